"""Rollouts ahead of their turn: order, staleness, what is drawn with which numbers, and what a checkpoint holds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_train import one_thread

from rhotrain.rollout.completion import Completion
from rhotrain.rollout.engine import Engine
from rhotrain.train.config import AlgoConfig, Config, EvalConfig, RolloutConfig, RunConfig
from rhotrain.train.data import EncodedPrompt, PromptStream
from rhotrain.train.optim import StepError
from rhotrain.train.questions import Question
from rhotrain.train.rollouts import Rollout, RolloutQueue


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def config(max_staleness: int = 0, updates: int = 1, **rollout: Any) -> Config:
    values = {"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 5, "temperature": 0.9} | rollout
    return Config(
        rollout=RolloutConfig(max_staleness=max_staleness, **values),
        algo=AlgoConfig(num_iterations=updates),
        eval=EvalConfig(eval_size=0),
        run=RunConfig(steps=7, seed=5),
    )


def make(settings: Config) -> RolloutQueue:
    loaded = tiny_model("llama")
    prompts = [EncodedPrompt((5 + i, 9, 11), str(i), Question(prompt=str(i), fields={})) for i in range(7)]
    return RolloutQueue(settings, Engine(loaded, num_pages=64), PromptStream(prompts, seed=3))


def tokens(rollout: Rollout) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in rollout.groups]


def play(queue: RolloutQueue, steps: int, updates: int = 1) -> list[tuple[Rollout, int]]:
    """(rollout, staleness) per step, as the trainer takes them; every step takes `updates` optimiser steps."""
    found, version = [], queue.engine.loaded.policy_version
    for step in range(steps):
        rollout = queue.take(version=version, remaining=steps - step)
        found.append((rollout, version - rollout.policy_version))
        version += updates
        queue.engine.loaded.policy_version = version
    return found


def test_fresh_rollouts_without_staleness() -> None:
    assert [age for _, age in play(make(config()), 4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("allowed", "updates", "ages"),
    [
        (1, 1, [0, 1, 0, 1, 0, 1, 0]),
        (2, 1, [0, 1, 2, 0, 1, 2, 0]),
        (4, 2, [0, 2, 4, 0, 2, 4, 0]),
        (5, 2, [0, 2, 4, 0, 2, 4, 0]),  # a third rollout would be 6 steps old
        (2, 2, [0, 2, 0, 2, 0, 2, 0]),
    ],
)
def test_staleness_grows_by_the_updates_between_and_never_exceeds_the_limit(
    allowed: int, updates: int, ages: list[int]
) -> None:
    """The version at the rollout's first update minus the one that sampled it; the inner loop adds nothing to it."""
    queue = make(config(allowed, updates))
    assert [age for _, age in play(queue, 7, updates)] == ages
    assert queue.drawn == 7 and queue.dropped == 0 and not queue.pending


def test_drawing_ahead_changes_no_sample_while_the_weights_stand() -> None:
    """Sample numbers and prompts are those of rollouts drawn one by one."""
    one_by_one = [rollout for rollout, _ in play(make(config()), 6)]
    ahead = [rollout for rollout, _ in play(make(config(2)), 6)]
    for a, b in zip(one_by_one, ahead):
        assert tokens(a) == tokens(b) and a.index == b.index
        assert [p.text for p in a.prompts] == [p.text for p in b.prompts]
        assert [c.sample for g in a.groups for c in g] == [c.sample for g in b.groups for c in g]
    assert len({str(tokens(r)) for r in ahead}) == 6


def test_memory_is_released_between_rollouts_when_asked() -> None:
    """The pool is gone while the trainer works, and what is drawn is the same."""
    kept, released = make(config()), make(config(release_memory=True))
    for queue, holds in ((kept, True), (released, False)):
        queue.take(version=0, remaining=2)
        assert bool(queue.engine.runner.pools.keys) is holds
    again = [queue.take(version=0, remaining=1) for queue in (kept, released)]
    assert tokens(again[0]) == tokens(again[1])


def test_no_more_is_drawn_than_the_run_needs() -> None:
    queue = make(config(4))
    queue.take(version=0, remaining=2)
    assert queue.drawn == 2 and len(queue.pending) == 1


def test_what_is_too_old_is_dropped_and_counted() -> None:
    queue = make(config(2))
    first = queue.take(version=0, remaining=7)
    assert first.index == 0 and [r.index for r in queue.pending] == [1, 2]
    queue.engine.loaded.policy_version = 9  # somebody trained on other data in between
    later = queue.take(version=9, remaining=6)
    assert queue.dropped == 2 and later.index == 3 and later.policy_version == 9


def test_a_checkpoint_holds_the_queue() -> None:
    whole = make(config(2))
    expected = [rollout for rollout, _ in play(whole, 7)]
    for stop in range(1, 7):
        first = make(config(2))
        for step in range(stop):
            first.take(version=step, remaining=7 - step)
            first.engine.loaded.policy_version = step + 1
        state = first.state_dict()
        second = make(config(2))
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert [tokens(r) for r in second.pending] == [tokens(r) for r in first.pending]
        for step in range(stop, 7):
            second.engine.loaded.policy_version = step
            rollout = second.take(version=step, remaining=7 - step)
            assert rollout.index == step and tokens(rollout) == tokens(expected[step])
            assert rollout.prompts == expected[step].prompts


def test_the_state_survives_a_safe_load(tmp_path: Any) -> None:
    """Checkpoints are read with weights_only: tensors and plain values."""
    queue = make(config(2, top_k=3))
    queue.take(version=0, remaining=7)
    torch.save(queue.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    other = make(config(2, top_k=3))
    other.load_state_dict(loaded)
    completion = other.pending[0].groups[0][0]
    assert completion == queue.pending[0].groups[0][0] and completion.kept_ids is not None


def test_a_rollout_of_errors_stops_the_run() -> None:
    queue = make(config())
    bad = Completion(
        token_ids=(), logprobs=(), kept_mass=(), finish_reason="error", policy_version=0, sample=0, error="NaN logits"
    )
    queue.engine.generate = lambda prompts, *a, **k: [[bad] * 3 for _ in prompts]  # type: ignore[method-assign]
    with pytest.raises(StepError, match="all 6 completions ended in an error, the first: NaN logits"):
        queue.take(version=0, remaining=1)
