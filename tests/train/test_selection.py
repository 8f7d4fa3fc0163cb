"""Tokens of the policy term: the off-policy mask and the share of highest entropy, by hand and in the step."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_naive import model_pair
from helpers_train import Recorder, fake_rollout, make_learner, one_thread, whole_error

from rhotrain.rollout.completion import Completion
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.config import AlgoConfig, ConfigError
from rhotrain.train.inner_loop import InnerLoop, run_updates
from rhotrain.train.selection import select_tokens, selects
from rhotrain.train.step import score

LENGTHS = (3, 1, 2)
DISTANCE = (0.3, 0.6, 0.0, 0.9, 0.2, 0.1)
"""sampling_logprob - logprob per token: means 0.3, 0.9 and 0.15."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def table(advantages: tuple[float, ...]) -> TokenTable:
    completions = [
        Completion(
            token_ids=(7,) * n,
            logprobs=(-4.0,) * n,
            kept_mass=(1.0,) * n,
            finish_reason="stop",
            policy_version=0,
            sample=i,
        )
        for i, n in enumerate(LENGTHS)
    ]
    made = make_table([((1, 2), completions)], dtype=torch.float64)
    made.set_advantages(torch.tensor([advantages], dtype=torch.float64))
    return made


def keep(
    algo: AlgoConfig, advantages: tuple[float, ...], entropies: Any = None, only: tuple[int, ...] = (0, 1, 2)
) -> Any:
    made = table(advantages)
    logprobs = made.sampling_logprobs - torch.tensor(DISTANCE, dtype=torch.float64)
    values = None if entropies is None else torch.tensor(entropies, dtype=torch.float64)
    return select_tokens(made, only, logprobs, values, algo)


def test_the_off_policy_mask_by_hand() -> None:
    algo = AlgoConfig(off_policy_mask=0.2)
    found = keep(algo, (-1.0, -1.0, -1.0))
    assert found.keep.tolist() == [False] * 4 + [True] * 2
    assert found.off_policy == 2 / 3 and found.threshold is None
    assert keep(algo, (1.0, -1.0, 0.0)).keep.tolist() == [True] * 3 + [False] + [True] * 2, "A >= 0 stays"
    assert keep(replace(algo, off_policy_mask=0.5), (-1.0, -1.0, -1.0)).keep.tolist() == [True] * 3 + [
        False,
        True,
        True,
    ]
    assert keep(algo, (-1.0, -1.0, -1.0), only=(2,)).keep.all(), "only what runs in this step is looked at"


ENTROPIES = (0.5, 2.0, 1.0, 3.0, 1.0, 0.1)


@pytest.mark.parametrize(
    ("share", "threshold", "kept"),
    [
        (0.01, 3.0, (3,)),
        (1 / 6, 3.0, (3,)),
        (0.2, 2.0, (1, 3)),
        (0.5, 1.0, (1, 2, 3, 4)),  # two tie with the third
        (0.99, 0.1, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_the_share_of_highest_entropy_by_hand(share: float, threshold: float, kept: tuple[int, ...]) -> None:
    found = keep(AlgoConfig(top_entropy=share), (1.0, -1.0, 0.5), ENTROPIES)
    assert found.threshold == threshold
    assert tuple(found.keep.nonzero().flatten().tolist()) == kept


def test_rows_of_other_steps_are_not_counted() -> None:
    found = keep(AlgoConfig(top_entropy=0.5), (1.0, -1.0, 0.5), ENTROPIES, only=(0,))
    assert found.threshold == 1.0 and found.keep.tolist() == [False, True, True, True, True, True]


def test_weights_of_a_correction_are_kept() -> None:
    found = keep(AlgoConfig(off_policy_mask=0.2), (-1.0, -1.0, -1.0))
    assert found.apply(None).tolist() == [0.0] * 4 + [1.0] * 2
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    assert found.apply(weights).tolist() == [0.0] * 4 + [5.0, 6.0]


def test_nothing_is_selected_unless_asked() -> None:
    assert not selects(AlgoConfig())
    assert selects(AlgoConfig(top_entropy=0.5)) and selects(AlgoConfig(off_policy_mask=0.1))


# ---- in the step ----------------------------------------------------------------------------------------------------


def start(algo: AlgoConfig, budget: int = 64) -> tuple[Any, Any, TokenTable]:
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=77, rewards=((1.0, 0.0, 0.5, 2.0),) * 6)
    learner = make_learner(loaded, algo, optimizer=Recorder(loaded), token_budget=budget)
    return learner, rollout, rollout.table(algo, torch.float64)


def step(algo: AlgoConfig, budget: int = 64, importance: Any = None) -> tuple[Any, InnerLoop]:
    """Gradients of one update; `importance` [N] multiplies the policy term by hand."""
    learner, rollout, made = start(algo, budget)
    if importance is not None:

        def select(table: TokenTable, *rest: Any, **options: Any) -> dict[str, Any]:
            table.importance = importance
            return {}

        learner.select = select
    done = run_updates(learner, made, rollout.num_groups, rollout_index=0)
    return learner.optimizer.taken[0], done


PLAIN = AlgoConfig(old_logprobs="sampler", beta=0.1, entropy_coef=0.01)


@pytest.mark.parametrize(
    "change", [{"off_policy_mask": 0.05}, {"top_entropy": 0.2}, {"off_policy_mask": 0.05, "top_entropy": 0.5}]
)
def test_the_step_leaves_out_what_is_named_whatever_the_split(change: dict[str, float]) -> None:
    """Equal to an importance weight of 0 in the rows that scores and entropies of the whole step name; KL, entropy
    bonus and denominator stay."""
    algo = replace(PLAIN, **change)  # type: ignore[arg-type]
    learner, _, made = start(PLAIN, budget=4096)
    everything = list(range(len(made.trajectories)))
    entropies = torch.zeros_like(made.sampling_logprobs)
    logprobs = score(learner.loaded, made, learner.pack(made, everything), temperature=1.0, entropies=entropies)
    by_hand = torch.ones_like(logprobs)
    if algo.off_policy_mask:
        for i in everything:
            rows = made.rows(i)
            far = float((made.sampling_logprobs - logprobs)[rows].mean()) > algo.off_policy_mask
            by_hand[rows] = 0.0 if far and float(made.advantages[rows][0]) < 0 else 1.0
    if algo.top_entropy < 1:
        order = entropies.argsort(descending=True)
        by_hand[order[math.ceil(algo.top_entropy * len(order)) :]] = 0.0
    assert 0 < float(by_hand.sum()) < len(by_hand)
    expected, _ = step(PLAIN, importance=by_hand)
    for budget in (24, 64, 4096):
        actual, done = step(algo, budget)
        assert whole_error(actual, expected) <= 1e-10, budget
        assert done.updates[0]["selection/tokens_kept"] == pytest.approx(float(by_hand.mean()))
    assert whole_error(step(PLAIN)[0], expected) > 1e-3, "the selection does something here"
    assert ("selection/entropy_threshold" in done.updates[0]) == (algo.top_entropy < 1)
    assert (done.updates[0]["selection/off_policy_completions"] > 0) == (algo.off_policy_mask > 0)


def test_a_step_of_which_nothing_is_left_is_not_taken() -> None:
    """The off-policy mask took the only completions with an advantage, and no other term carries loss."""
    algo = AlgoConfig(old_logprobs="sampler", off_policy_mask=1e-6)
    learner, rollout, made = start(algo)
    for i in range(len(made.trajectories)):
        made.advantages[made.rows(i)] = -1.0
    made.sampling_logprobs = torch.zeros_like(made.sampling_logprobs)
    done = run_updates(learner, made, rollout.num_groups, rollout_index=0)
    assert done.skipped == 1 and not learner.optimizer.taken and learner.updates == 0


def test_the_frozen_scores_serve_the_first_update_and_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    algo = AlgoConfig(old_logprobs="trainer", off_policy_mask=0.01, num_iterations=3)
    learner, rollout, made = start(algo)
    calls: list[int] = []
    plain = type(learner).score

    def count(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return plain(self, *args, **options)

    monkeypatch.setattr(type(learner), "score", count)
    done = run_updates(learner, made, rollout.num_groups, rollout_index=0)
    assert len(done.updates) == 3 and len(calls) == 1 + 2


def test_a_minibatch_without_signal_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    algo = AlgoConfig(old_logprobs="sampler", off_policy_mask=0.01, minibatches_per_rollout=2)
    learner, rollout, made = start(algo)
    for i, trajectory in enumerate(made.trajectories):
        if trajectory.group < rollout.num_groups // 2:
            made.advantages[made.rows(i)] = 0.0
    scored: list[list[int]] = []
    plain = type(learner).score

    def note(self: Any, table: TokenTable, which: list[int], **options: Any) -> torch.Tensor:
        scored.append(which)
        return plain(self, table, which, **options)

    monkeypatch.setattr(type(learner), "score", note)
    done = run_updates(learner, made, rollout.num_groups, rollout_index=0)
    assert done.skipped == 1 and len(done.updates) == 1
    assert [{made.trajectories[i].group for i in which} for which in scored] == [{3, 4, 5}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_entropy": 0.0}, "top_entropy: 0.0"),
        ({"top_entropy": 1.5}, "top_entropy: 1.5"),
        ({"off_policy_mask": -1.0}, "off_policy_mask: -1.0"),
        ({"dual_clip": 0.5}, "dual_clip: 0.5"),
        ({"dual_clip": 1.1}, "dual_clip: .* >= ratio_max"),
        ({"dual_clip": 3.0, "objective": "cispo"}, "dual_clip: 3.0 does not go with kind='cispo'"),
        ({"sapo_tau_pos": 0.0, "objective": "sapo"}, "sapo_tau_pos: .* > 0"),
        ({"reward_aggregation": "normalize_then_sum", "kl_in_reward": 0.1}, "kl_in_reward: 0.1"),
        ({"reward_aggregation": "normalize_then_sum", "advantage_scale": "none"}, "advantage_scale: 'none'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgoConfig(**values)


def test_settings_reach_the_kernels() -> None:
    assert AlgoConfig(dual_clip=3.0).spec().dual_clip == 3.0 and AlgoConfig().spec().dual_clip is None
    spec = AlgoConfig(objective="sapo", sapo_tau_pos=2.0, sapo_tau_neg=3.0).spec()
    assert (spec.sapo_tau_pos, spec.sapo_tau_neg) == (2.0, 3.0)
