"""Micro-batches by cost: the estimate, and splits that are never worse than the one in order."""

import random
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from torch import nn

from rhotrain.rollout.completion import Completion
from rhotrain.train.balance import Packing, StepCost, balanced_split, pack_balanced
from rhotrain.train.batching import TokenTable, make_table, split_in_order

COST = StepCost(per_token=100.0, per_pair=1.0, per_row=10.0)


def table_of(*groups: tuple[int, tuple[int, ...]]) -> TokenTable:
    """Groups as (prompt tokens, completion tokens of each member)."""

    def completion(length: int) -> Completion:
        return Completion(
            token_ids=(5,) * length,
            logprobs=(-1.0,) * length,
            kept_mass=(1.0,) * length,
            finish_reason="stop",
            policy_version=0,
            sample=0,
        )

    return make_table([((7,) * prompt, [completion(n) for n in lengths]) for prompt, lengths in groups])


def random_table(seed: int, kind: str, groups: int = 12, members: int = 6) -> TokenTable:
    rng = random.Random(seed)

    def length() -> int:
        if kind == "uniform":
            return rng.randint(1, 60)
        return min(120, max(1, int(rng.lognormvariate(2.5, 1.2))))

    return table_of(*((rng.randint(1, 40), tuple(length() for _ in range(members))) for _ in range(groups)))


# ---- the estimate ---------------------------------------------------------------------------------------------------


def test_the_load_of_a_micro_batch_counts_tokens_pairs_and_rows() -> None:
    """Prompt 3; completions of 2 and 4 tokens, whose last token is no input."""
    made = table_of((3, (2, 4)))
    shared, plain = (Packing(made, 99, share, COST).load([0, 1]) for share in (True, False))
    # Prompt 1 + 2 + 3 pairs; one input on 4 keys; three inputs on 4, 5 and 6 keys.
    assert shared.tokens == 3 + 1 + 3 and shared.flops == 100 * 7 + (6 + 4 + 15) + 10 * 6
    assert plain.tokens == 4 + 6 and plain.flops == 100 * 10 + (10 + 21) + 10 * 6
    assert Packing(made, 99, True, COST).load([1], prompts=[0]).tokens == 3


@pytest.mark.parametrize("share", [True, False])
def test_the_load_is_that_of_the_packed_inputs(share: bool) -> None:
    made = random_table(1, "uniform", groups=3)
    order = [0, 7, 3, 12, 1]
    (batch,) = pack_balanced(made, order, token_budget=10_000, share_prompts=share, cost=COST)
    pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(batch.lens_q, batch.lens_k))
    load = Packing(made, 10_000, share, COST).load(order)
    assert load.tokens == batch.num_tokens
    assert load.flops == 100 * batch.num_tokens + pairs + 10 * len(batch.table_rows)


def test_coefficients_of_a_model() -> None:
    """llama: 2 layers, hidden 32, 4 heads of 8, 2 key heads, MLP 48, vocabulary 96; three passes of 2 FLOPs."""
    cost = StepCost.of(tiny_model("llama"))
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    assert cost == StepCost(per_token=6 * 2 * layer, per_pair=6 * 2 * 4 * (8 + 8), per_row=6 * 96 * 32)


def test_of_experts_those_that_are_picked_count() -> None:
    cost = StepCost.of(tiny_model("qwen3_moe"))
    attention, router, expert = 32 * 32 * 2 + 2 * 32 * 16, 32 * 4, 3 * 32 * 24
    assert cost.per_token == 6 * 2 * (attention + router + 2 * expert)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3"])
def test_every_matrix_of_the_layers_counts_once(family: str) -> None:
    loaded = tiny_model(family)
    embeddings = sum(m.weight.numel() for m in loaded.body.modules() if isinstance(m, nn.Embedding))
    matrices = sum(p.numel() for p in loaded.body.parameters() if p.dim() >= 2)
    calls = loaded.attention.calls
    assert StepCost.of(loaded).per_token == 6 * (matrices - embeddings)
    assert loaded.attention.calls == calls


# ---- the split ------------------------------------------------------------------------------------------------------


def rank(packing: Packing, parts: list[list[int]]) -> tuple[int, int, float]:
    loads = [packing.load(part) for part in parts]
    return sum(x.tokens for x in loads), len(parts), max(x.flops for x in loads)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "long-tailed"])
@pytest.mark.parametrize("budget", [160, 300, 900, 100_000])
def test_never_worse_than_in_order(kind: str, budget: int, share: bool) -> None:
    better = 0
    for seed in range(6):
        made = random_table(seed, kind)
        packing = Packing(made, budget, share, COST)
        order = [i for i in range(len(made.trajectories)) if i % 7 != 3]
        plain = split_in_order(made, order, token_budget=budget, share_prompts=share)
        parts = balanced_split(packing, order)
        assert sorted(i for part in parts for i in part) == order
        assert all(packing.load(part).tokens <= budget for part in parts)
        assert len(parts) <= len(plain)
        assert rank(packing, parts) <= rank(packing, plain)
        better += rank(packing, parts) < rank(packing, plain)
        assert parts == balanced_split(packing, order)
    assert better >= 3 or budget == 100_000


def test_whole_groups_stay_together_and_the_last_micro_batch_is_not_a_crumb() -> None:
    """Six groups of 40 tokens. Budget 160: four and two in order, three and three by cost. Budget 150: the cut in order
    goes through the fourth group and runs its prompt twice."""
    made = table_of(*((10, (11, 11, 11)) for _ in range(6)))
    order = list(range(18))
    for budget, in_order in ((160, [160, 80]), (150, [150, 100])):
        packing = Packing(made, budget, True, COST)
        assert [packing.load(part).tokens for part in packing.in_order(order)] == in_order
        assert [packing.load(part).tokens for part in balanced_split(packing, order)] == [120, 120]


def test_sharing_beats_balance() -> None:
    """Two groups of 60 and 30 tokens, budget 60: an even split would cut the first and run its prompt twice."""
    made = table_of((40, (11, 11)), (10, (11, 11)))
    packing = Packing(made, 60, True, COST)
    assert balanced_split(packing, [0, 1, 2, 3]) == [[0, 1], [2, 3]]


def test_the_old_order_stays_where_nothing_is_better() -> None:
    made = table_of((5, (6,)), (5, (6,)), (5, (6,)), (5, (6,)))
    packing = Packing(made, 20, True, COST)
    assert balanced_split(packing, [0, 1, 2, 3]) == packing.in_order([0, 1, 2, 3]) == [[0, 1], [2, 3]]


def test_a_group_beyond_the_budget_is_cut_into_even_pieces() -> None:
    """Without repeated prompts 20 + 10 x 10 = 120; budget 80 holds 6 completions: 6 and 4 in order, 5 and 5 by cost."""
    made = table_of((20, (11,) * 10))
    packing = Packing(made, 80, True, COST)
    assert [len(part) for part in packing.in_order(range(10))] == [6, 4]  # type: ignore[arg-type]
    assert [len(part) for part in balanced_split(packing, list(range(10)))] == [5, 5]


def test_the_dearest_comes_first_and_members_keep_their_order() -> None:
    made = table_of((5, (3, 3)), (5, (30, 30)), (5, (4, 20)))
    parts = balanced_split(Packing(made, 66, True, COST), [0, 1, 2, 3, 4, 5])
    assert parts == [[2, 3], [0, 1, 4, 5]]


@pytest.mark.parametrize("share", [True, False])
def test_a_trajectory_longer_than_the_budget_is_refused(share: bool) -> None:
    with pytest.raises(ValueError, match=r"token_budget: 11 is less than the 12 tokens.*raise token_budget"):
        pack_balanced(table_of((3, (2,)), (5, (8,))), [0, 1], token_budget=11, share_prompts=share, cost=COST)


def test_nothing_to_pack_gives_no_batch() -> None:
    assert pack_balanced(table_of((3, (2,))), [], token_budget=9, share_prompts=True, cost=COST) == []


def test_the_learner_packs_by_cost_and_every_row_runs_once() -> None:
    from helpers_train import make_learner

    from rhotrain.train.config import AlgoConfig

    made: Any = random_table(3, "long-tailed")
    learner = make_learner(tiny_model("llama"), AlgoConfig(), token_budget=300)
    batches = learner.pack(made, list(range(len(made.trajectories))))
    rows = torch.cat([batch.table_rows for batch in batches])
    assert rows.sort().values.tolist() == list(range(len(made.token_ids)))
    plain = split_in_order(made, range(len(made.trajectories)), token_budget=300)
    packing = Packing(made, 300, True, learner.cost)
    assert sum(batch.num_tokens for batch in batches) < sum(packing.load(part).tokens for part in plain)
