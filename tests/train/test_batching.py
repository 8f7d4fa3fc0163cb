"""The token table, the weights and the packing, checked token by token against what they say they are."""

import math
from typing import Any

import pytest
import torch

from rhotrain.rollout.completion import Completion
from rhotrain.train.batching import MicroBatch, TokenTable, make_table, pack, token_weights
from rhotrain.train.optim import StepError

PROMPTS = ((11, 12, 13), (21,), (31, 32, 33, 34, 35))
LENGTHS = ((4, 1, 2), (3, 3, 5), (1, 1, 1))


def completion(length: int, sample: int, **changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "token_ids": tuple(100 * (sample + 1) + k for k in range(length)),
        "logprobs": tuple(-0.5 * (k + 1) for k in range(length)),
        "kept_mass": (1.0,) * length,
        "finish_reason": "stop",
        "policy_version": 0,
        "sample": sample,
    }
    return Completion(**{**fields, **changes})


def groups() -> list[tuple[tuple[int, ...], list[Completion]]]:
    return [
        (prompt, [completion(n, 3 * p + g) for g, n in enumerate(lengths)])
        for p, (prompt, lengths) in enumerate(zip(PROMPTS, LENGTHS))
    ]


def table(**options: Any) -> TokenTable:
    return make_table(groups(), **options)


# ---- the table ------------------------------------------------------------------------------------------------------


def test_rows_are_the_completion_tokens_in_order() -> None:
    made = table()
    expected = [i for _, completions in groups() for c in completions for i in c.token_ids]
    assert made.token_ids.tolist() == expected
    assert made.starts == (0, 4, 5, 7, 10, 13, 18, 19, 20, 21)
    assert [(t.group, t.member) for t in made.trajectories] == [(p, g) for p in range(3) for g in range(3)]
    assert made.loss_mask.all()
    assert made.kept is None and made.old_logprobs is None and made.ref_logprobs is None
    assert made.sampling_logprobs.dtype == torch.float32


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.01])
def test_what_cannot_be_a_sampler_logprob_names_its_token(value: float) -> None:
    data = groups()
    data[1][1][2] = completion(5, 5, logprobs=(-0.1, -0.2, value, -0.3, -0.4))
    with pytest.raises(
        StepError, match=r"logprobs: the sampler gave .* token 2 of sample 5 \(prompt 1, completion 2\)"
    ):
        make_table(data)


def test_positive_rounding_of_a_sampler_logprob_counts_as_zero() -> None:
    data = groups()
    data[0][1][0] = completion(4, 0, logprobs=(5e-5, -1.0, -1.0, -1.0))
    assert float(make_table(data).sampling_logprobs[0]) == 0.0


@pytest.mark.parametrize("value", [math.nan, 0.0, -0.5, 1.5])
def test_what_cannot_be_a_kept_mass_names_its_token(value: float) -> None:
    data = groups()
    data[2][1][0] = completion(1, 6, kept_mass=(value,))
    with pytest.raises(StepError, match=r"kept_mass: the sampler gave .* token 0 of sample 6"):
        make_table(data)


def test_staleness_and_the_trajectory_of_a_row() -> None:
    data = groups()
    data[0][1][1] = completion(1, 1, policy_version=2)
    made = make_table(data)
    assert made.staleness(5) == [5, 3, *[5] * 7]
    ids = made.sequence_ids()
    assert all(ids[made.rows(i)].tolist() == [i] * t.num_tokens for i, t in enumerate(made.trajectories))


def test_completions_that_failed_are_left_out() -> None:
    data = groups()
    data[1][1][1] = completion(0, 4, finish_reason="error", error="too long")
    made = make_table(data)
    assert [(t.group, t.member) for t in made.trajectories if t.group == 1] == [(1, 0), (1, 2)]
    assert len(made.token_ids) == 21 - 3


def test_truncated_completions_lose_their_mask_only_when_asked() -> None:
    data = groups()
    data[0][1][0] = completion(4, 0, finish_reason="length")
    assert make_table(data).loss_mask.all()
    masked = make_table(data, mask_truncated=True)
    assert masked.loss_mask.tolist() == [False] * 4 + [True] * 17
    assert [masked.carries_loss(i) for i in range(9)] == [False] + [True] * 8


def test_replay_renormalises_the_sampling_logprobs_over_the_kept_set() -> None:
    one = completion(
        2, 0, logprobs=(-1.0, -0.25), kept_mass=(0.5, 0.8), kept_ids=((100, 7), (101, 9, 3)), token_ids=(100, 101)
    )
    made = make_table([((1, 2), [one])], replay=True, dtype=torch.float64)
    assert made.sampling_logprobs.tolist() == pytest.approx([-1.0 - math.log(0.5), -0.25 - math.log(0.8)], rel=1e-14)
    assert made.kept is not None
    assert made.kept.offsets.tolist() == [0, 2, 5] and made.kept.ids.tolist() == [7, 100, 3, 9, 101]
    plain = make_table([((1, 2), [one])], dtype=torch.float64)
    assert plain.sampling_logprobs.tolist() == [-1.0, -0.25] and plain.kept is None
    with pytest.raises(ValueError, match=r"kept_ids.*keep_sets=True"):
        make_table(groups(), replay=True)


def test_rounding_cannot_make_a_sampling_logprob_positive() -> None:
    one = completion(1, 0, logprobs=(-0.1,), kept_mass=(math.exp(-0.10005),), kept_ids=((100,),))
    made = make_table([((1,), [one])], replay=True)  # -0.1 - log kept_mass = +0.00005
    assert made.sampling_logprobs.tolist() == [0.0]


def test_advantages_are_spread_over_the_tokens_of_their_completion() -> None:
    made = table()
    values = torch.tensor([[1.0, -2.0, 1.0], [0.0, 0.0, 0.0], [0.0, 3.0, -3.0]])
    made.set_advantages(values)
    expected = [v for row, lengths in zip(values.tolist(), LENGTHS) for v, n in zip(row, lengths) for _ in range(n)]
    assert made.advantages.tolist() == expected
    assert made.signal_groups == {0, 2}


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [tuple(range(9)), (0, 1, 2, 6, 7, 8), (5,)])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_sum_to_what_the_aggregation_says(chosen: tuple[int, ...], masked: bool) -> None:
    data = groups()
    data[0][1][0] = completion(4, 0, finish_reason="length")
    made = make_table(data, mask_truncated=masked, dtype=torch.float64)
    lengths = {i: t.num_tokens for i, t in enumerate(made.trajectories) if i in chosen and not (masked and i == 0)}
    tokens, completions = sum(lengths.values()), len(lengths)

    def weights(aggregation: Any) -> torch.Tensor:
        result = token_weights(made, chosen, aggregation=aggregation, max_new_tokens=50)
        assert result.dtype == torch.float64
        for i in range(9):
            assert bool((result[made.rows(i)] != 0).all()) == (i in lengths)
            assert bool((result[made.rows(i)] == 0).all()) == (i not in lengths)
            assert result[made.rows(i)].unique().numel() == 1
        return result

    assert float(weights("token").sum()) == pytest.approx(1.0, rel=1e-14)
    sequence = weights("sequence")
    assert float(sequence.sum()) == pytest.approx(1.0, rel=1e-14)
    for i in lengths:  # every completion has the same say
        assert float(sequence[made.rows(i)].sum()) == pytest.approx(1 / completions, rel=1e-14)
    assert float(weights("constant").sum()) == pytest.approx(tokens / (completions * 50), rel=1e-14)


def test_weights_of_nothing_are_zero() -> None:
    made = table()
    assert (token_weights(made, [], aggregation="token", max_new_tokens=5) == 0).all()


# ---- packing --------------------------------------------------------------------------------------------------------


def visible(batch: MicroBatch, row: int) -> list[tuple[int, int]]:
    """(position, id) of every packed token that hidden row `row` attends to: bottom-right causal in its segment."""
    first = key = 0
    for queries, keys in zip(batch.lens_q, batch.lens_k):
        if first <= row < first + queries:
            own = range(key, key + keys - queries + (row - first) + 1)
            index = [k if batch.kv_index is None else int(batch.kv_index[k]) for k in own]
            return [(int(batch.position_ids[k]), int(batch.input_ids[k])) for k in index]
        first, key = first + queries, key + keys
    raise AssertionError(f"row {row} is in no segment")


def check(made: TokenTable, batches: list[MicroBatch], order: list[int], budget: int) -> None:
    """Every token of the trajectories in `order` once, in order, each predicted from exactly its own history."""
    rows = [int(r) for b in batches for r in b.table_rows]
    assert rows == [r for i in order for r in range(made.starts[i], made.starts[i + 1])]
    history = {}
    for i in order:
        trajectory = made.trajectories[i]
        for k, r in enumerate(range(made.starts[i], made.starts[i + 1])):
            history[r] = list(enumerate(trajectory.prompt_ids + trajectory.completion.token_ids[:k]))
    for batch in batches:
        assert batch.num_tokens == len(batch.position_ids) == sum(batch.lens_q) <= budget
        assert all(1 <= q <= k for q, k in zip(batch.lens_q, batch.lens_k))
        if batch.kv_index is None:
            assert batch.lens_q == batch.lens_k
        else:
            assert len(batch.kv_index) == sum(batch.lens_k)
        for hidden_row, r in zip(batch.hidden_rows.tolist(), batch.table_rows.tolist()):
            assert visible(batch, hidden_row) == history[r]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [6, 7, 10, 14, 1000])
@pytest.mark.parametrize("order", [list(range(9)), [8, 3, 0, 4, 7, 1, 6, 2, 5], [2, 5]])
def test_every_token_is_predicted_from_its_own_history(budget: int, share: bool, order: list[int]) -> None:
    made = table()
    batches = pack(made, order, token_budget=budget, share_prompts=share)
    check(made, batches, order, budget)
    if budget == 6:
        assert len(batches) > 1


def test_a_groups_prompt_is_packed_once_when_shared() -> None:
    made = table()
    (shared,) = pack(made, range(9), token_budget=1000)
    (repeated,) = pack(made, range(9), token_budget=1000, share_prompts=False)
    assert shared.num_tokens == sum(len(p) + sum(n - 1 for n in ns) for p, ns in zip(PROMPTS, LENGTHS))
    assert repeated.num_tokens == sum(len(p) + n - 1 for p, ns in zip(PROMPTS, LENGTHS) for n in ns)


def test_a_budget_is_used_to_the_last_token() -> None:
    made = table()
    (one,) = pack(made, [0], token_budget=6)
    assert one.num_tokens == 6
    total = sum(len(p) + sum(n - 1 for n in ns) for p, ns in zip(PROMPTS, LENGTHS))
    assert len(pack(made, range(9), token_budget=total)) == 1
    assert len(pack(made, range(9), token_budget=total - 1)) == 2


@pytest.mark.parametrize("share", [True, False])
def test_a_trajectory_longer_than_the_budget_is_refused(share: bool) -> None:
    with pytest.raises(ValueError, match=r"token_budget: 5 is less than the 6 tokens.*raise token_budget"):
        pack(table(), range(9), token_budget=5, share_prompts=share)


def test_nothing_to_pack_gives_no_batch() -> None:
    assert pack(table(), [], token_budget=10) == []
