"""Dynamic sampling: which groups a rollout ends up with, what is counted, and that a resumed run repeats it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_train import one_thread
from torch import Tensor

from rhotrain.rollout.completion import Completion
from rhotrain.train.advantages import group_advantages
from rhotrain.train.batching import make_table, token_weights
from rhotrain.train.config import AlgoConfig, Config, ConfigError, EvalConfig, RolloutConfig, RunConfig
from rhotrain.train.data import EncodedPrompt, PromptStream
from rhotrain.train.dynamic import DynamicSampling, Scored, choose_groups, fill_with_signal, refill_size
from rhotrain.train.optim import StepError
from rhotrain.train.presets import preset
from rhotrain.train.questions import Question
from rhotrain.train.rewards import Rewards
from rhotrain.train.rollouts import RolloutQueue
from rhotrain.train.settings import build, merge
from rhotrain.train.trainer import Trainer

NAN = float("nan")
P, G = 4, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# ---- the arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "with_signal", "groups", "size"),
    [
        (3, 4, 8, 6),  # half of the groups carry signal
        (3, 8, 8, 3),  # never fewer than are missing
        (7, 1, 8, 8),  # 56 would be needed: no more than a rollout's
        (8, 0, 8, 8),
        (1, 3, 10, 4),  # 3.33 rounded up
    ],
)
def test_a_refill_draws_what_will_probably_do(missing: int, with_signal: int, groups: int, size: int) -> None:
    assert refill_size(missing, with_signal, groups, 8) == size


def test_the_first_groups_with_signal_are_kept_in_the_order_of_drawing() -> None:
    signal = [False, True, True, False, False, True, True]
    assert choose_groups(signal, 3) == [1, 2, 5]
    assert choose_groups(signal, 6) == [0, 1, 2, 3, 5, 6]  # two without: the first ones
    assert choose_groups([False] * 5, 3) == [0, 1, 2]


# ---- a scripted engine ----------------------------------------------------------------------------------------------


class Script:
    """An engine whose completions are one token each; it notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # (prompts, first_sample)
        self.version = 7
        self.released = 0
        self.fails = False

    def generate(
        self, prompts: Sequence[Any], sampling: Any, *, n: int, first_sample: int, on_finish: Any
    ) -> list[list[Completion]]:
        self.calls.append((len(prompts), first_sample))
        return [[self.completion(first_sample + p * n + g) for g in range(n)] for p in range(len(prompts))]

    def completion(self, sample: int) -> Completion:
        count = 0 if self.fails else 1 + sample % 5
        return Completion(
            token_ids=(9,) * count,
            logprobs=(-1.0,) * count,
            kept_mass=(1.0,) * count,
            finish_reason="error" if self.fails else "stop",
            policy_version=self.version,
            sample=sample,
            error="scripted" if self.fails else None,
        )

    def release(self) -> None:
        self.released += 1


def queue_of(script: Script, **rollout: Any) -> RolloutQueue:
    config = Config(
        rollout=RolloutConfig(prompts_per_step=P, group_size=G, max_new_tokens=8, **rollout),
        algo=AlgoConfig(dynamic_sampling=3),
        eval=EvalConfig(eval_size=0),
        run=RunConfig(steps=9),
    )
    prompts = [EncodedPrompt((5, i), str(i), Question(prompt=str(i), fields={})) for i in range(50)]
    return RolloutQueue(config, script, PromptStream(prompts, seed=1))  # type: ignore[arg-type]


class Task:
    """Rewards by the number of a group in the order of drawing: NaN unscorable, else all equal or not."""

    def __init__(self, signal: Sequence[bool | float]) -> None:
        self.signal = list(signal)
        self.scored = 0

    def score(self, prompts: Any, groups: Sequence[Sequence[Completion]]) -> tuple[list[list[str]], Rewards]:
        rows = []
        for _ in groups:
            kind = self.signal[self.scored] if self.scored < len(self.signal) else False
            rows.append([NAN] * G if kind != kind else [0.0, 1.0, 1.0] if kind else [0.25] * G)
            self.scored += 1
        total = torch.tensor(rows, dtype=torch.float64)
        texts = [[str(c.sample) for c in group] for group in groups]
        return texts, Rewards(total, {"task": total / 2}, failures=1, reasons=("late",), weights={"task": 2.0})


def signal_of(rewards: Rewards) -> Tensor:
    return group_advantages(rewards.total).signal_P


def fill(queue: RolloutQueue, task: Task, limit: int = 3) -> Scored:
    rollout = queue.take(version=7, remaining=9)
    texts, rewards = task.score(rollout.prompts, rollout.groups)
    first = Scored(rollout, texts, rewards, rollout.num_tokens)
    return fill_with_signal(first, limit=limit, draw=queue.more, score=task.score, signal=signal_of)


def samples(scored: Scored) -> list[list[int]]:
    return [[c.sample for c in group] for group in scored.rollout.groups]


def test_groups_without_signal_are_replaced_and_surplus_is_dropped() -> None:
    """Groups 1 and 3 of the first draw carry signal; of the four that are drawn for the missing two, 4, 6 and 7."""
    script, task = Script(), Task([False, True, NAN, True, True, False, True, True])
    queue = queue_of(script)
    scored = fill(queue, task)
    assert script.calls == [(4, 0), (4, 4 * G)]  # half carried signal: 2 / 0.5
    kept = [1, 3, 4, 6]
    assert samples(scored) == [[g * G + m for m in range(G)] for g in kept]
    assert scored.texts == [[str(g * G + m) for m in range(G)] for g in kept]
    expected = torch.tensor([[0.0, 1.0, 1.0]] * 4, dtype=torch.float64)
    assert torch.equal(scored.rewards.total, expected) and torch.equal(scored.rewards.parts["task"], expected / 2)
    assert scored.rewards.failures == 2 and scored.rewards.reasons == ("late",)
    assert scored.rewards.weights == {"task": 2.0}
    order = PromptStream(queue.stream.prompts, seed=1).take(8)
    assert scored.rollout.prompts == [order[g] for g in kept]
    assert {c.policy_version for group in scored.rollout.groups for c in group} == {7}
    assert scored.drawn_tokens == sum(1 + sample % 5 for sample in range(8 * G))
    mean = (5 * 2 / 3 + 2 * 0.25) / 7  # seven scorable groups
    assert scored.sampling == DynamicSampling(8, 5, 4, 0, 1, pytest.approx(mean))  # type: ignore[arg-type]
    assert (queue.stream.epoch, queue.stream.position) == (0, 8)  # every draw moves the cursor


def test_a_full_first_draw_is_left_alone() -> None:
    script, task = Script(), Task([True] * 4)
    scored = fill(queue_of(script), task)
    assert script.calls == [(4, 0)] and samples(scored) == [[g * G + m for m in range(G)] for g in range(4)]
    assert scored.sampling == DynamicSampling(4, 4, 0, 0, 0, pytest.approx(2 / 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [False, NAN])
def test_without_any_signal_the_rollout_keeps_its_shape(kind: float) -> None:
    """All calls are made, and the first draw stays."""
    script = Script()
    scored = fill(queue_of(script), Task([kind] * 16))
    assert script.calls == [(4, 0), (4, 12), (4, 24), (4, 36)]
    assert samples(scored) == [[g * G + m for m in range(G)] for g in range(4)]
    assert scored.sampling is not None and scored.sampling.metrics() == {
        "dynamic/groups_drawn": 16,
        "dynamic/groups_dropped": 12,
        "dynamic/groups_filled": 4,
        "dynamic/refills": 3,
        "dynamic/signal_rate": 0.0,
        "dynamic/reward": None if kind != kind else 0.25,
    }


def test_too_little_signal_is_filled_up_with_the_first_groups_without() -> None:
    scored = fill(queue_of(Script()), Task([False, False, False, True, False, True]), limit=1)
    assert samples(scored) == [[g * G + m for m in range(G)] for g in (0, 1, 3, 5)]
    assert scored.sampling is not None and (scored.sampling.filled, scored.sampling.refills) == (2, 1)


def test_the_denominator_is_that_of_what_was_kept() -> None:
    scored = fill(queue_of(Script()), Task([False, True, False, True, True, False, True, True]))
    pairs = [(p.token_ids, group) for p, group in zip(scored.rollout.prompts, scored.rollout.groups)]
    table = make_table(pairs, dtype=torch.float64)
    weights = token_weights(table, range(P * G), aggregation="token", max_new_tokens=8)
    tokens = sum(1 + s % 5 for group in samples(scored) for s in group)
    assert weights.unique().tolist() == pytest.approx([1 / tokens])


def test_sample_numbers_and_the_cursor_go_on_over_rollouts_and_checkpoints() -> None:
    signal = [False, True, NAN, True, True, False, True, True, True, False, True, True, True, True, True]
    whole, parts = Script(), Script()
    task, queue = Task(signal), queue_of(whole)
    expected = [fill(queue, task) for _ in range(2)]
    assert whole.calls == [(4, 0), (4, 12), (4, 24), (2, 36)]  # third call: 3 of 4; 1 / 0.75 rounded up
    used = [s for scored in expected for group in samples(scored) for s in group]
    assert len(set(used)) == len(used) == 2 * P * G
    task = Task(signal)
    first = queue_of(parts)
    fill(first, task)
    state = first.state_dict()
    assert (state["drawn"], state["groups"], state["pending"]) == (1, 8, [])
    second = queue_of(parts)
    second.load_state_dict(state)
    again = fill(second, task)
    assert parts.calls == whole.calls
    assert again.rollout == expected[1].rollout and again.rollout.index == 1
    assert second.state_dict() == queue.state_dict()


def test_a_checkpoint_without_the_count_of_groups_goes_on_as_it_counted() -> None:
    queue = queue_of(Script())
    queue.take(version=7, remaining=9)
    state = queue.state_dict()
    del state["groups"]
    other = queue_of(Script())
    other.load_state_dict(state)
    assert other.groups == queue.groups == P


def test_a_refill_of_errors_stops_the_run() -> None:
    script = Script()
    queue = queue_of(script)
    queue.take(version=7, remaining=9)
    script.fails = True
    with pytest.raises(StepError, match="all 6 completions ended in an error, the first: scripted"):
        queue.more(2)


def test_the_engine_keeps_its_memory_until_the_last_refill() -> None:
    script = Script()
    queue = queue_of(script, release_memory=True)
    queue.take(version=7, remaining=9, more_follows=True)
    queue.more(2)
    assert script.released == 0
    queue.release()
    queue.take(version=7, remaining=9)
    assert script.released == 2


def test_rollouts_ahead_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"dynamic_sampling: 2 does not work; with max_staleness .* set max_staleness"
    ):
        Config(rollout=RolloutConfig(max_staleness=1), algo=AlgoConfig(dynamic_sampling=2, old_logprobs="sampler"))


# ---- a run ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "steps": 4,
    "eval_size": 0,
    "lr": 1e-3,
    "train_size": 60,
    "threads": 1,
    "dynamic_sampling": 3,
}


def settings(folder: Path, **values: Any) -> Config:
    return build(merge([preset("tiny-sums").layer, SMALL, values, {"out": str(folder / "run")}]))


def steps_of(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    timed = ("time/", "step_time", "tok_per_s", "memory/")
    rows = [trainer.step() for _ in range(count)]
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("zero_variance", ["skip", "keep", "filter"])
def test_a_run_trains_on_groups_with_signal_and_resumes_bit_for_bit(tmp_path: Path, zero_variance: str) -> None:
    values = {"zero_variance": zero_variance, "minibatches_per_rollout": 2}
    trainer = Trainer(settings(tmp_path / "whole", **values))
    whole = steps_of(trainer, 4)
    trainer.folder.close()
    first = Trainer(settings(tmp_path / "parts", **values))
    rows = steps_of(first, 2)
    first.save()
    first.folder.close()
    second = Trainer(settings(tmp_path / "parts", **values, resume=True))
    rows += steps_of(second, 2)
    second.folder.close()
    assert rows == whole
    lines = records(tmp_path / "whole")
    assert records(tmp_path / "parts") == lines
    assert len({line["sample"] for line in lines}) == len(lines) == 4 * 16
    drawn = [row["dynamic/groups_drawn"] for row in whole]
    assert sum(row["dynamic/refills"] for row in whole) > 0 and second.queue.groups == sum(drawn) > 16
    assert second.parts.stream.epoch * 60 + second.parts.stream.position == sum(drawn)
    for step, row in enumerate(whole, start=1):
        assert row["frac_reward_zero_std"] == row["dynamic/groups_filled"] / 4
        assert row["dynamic/groups_dropped"] == row["dynamic/groups_drawn"] - 4
        assert row["dynamic/groups_filled"] == 0 or row["dynamic/refills"] == 3
        mine = [line for line in lines if line["step"] == step]
        assert len({line["policy_version"] for line in mine}) == 1
        assert [line["group"] for line in mine] == [p for p in range(4) for _ in range(4)]
        assert [line["sample"] for line in mine] == sorted(line["sample"] for line in mine)


def test_a_refilled_rollout_differs_from_a_plain_one_in_its_groups_alone(tmp_path: Path) -> None:
    """The first draw is the plain run's; with dynamic sampling the step learns from more groups."""
    rows = []
    for name, limit in (("plain", 0), ("refilled", 5)):
        trainer = Trainer(settings(tmp_path / name, dynamic_sampling=limit))
        rows += steps_of(trainer, 1)
        trainer.folder.close()
    plain, refilled = rows
    assert "dynamic/refills" not in plain and plain["frac_reward_zero_std"] > refilled["frac_reward_zero_std"] == 0
    kept = {line["sample"] for line in records(tmp_path / "refilled")}
    loud = {line["sample"] for line in records(tmp_path / "plain") if line["advantage"] != 0}
    assert loud <= kept


def test_several_rewards_carry_signal_where_any_of_them_does(tmp_path: Path) -> None:
    """normalize_then_sum: parts that vary but add up to equal sums are signal; the sum alone would not show it."""
    parts = {"a": torch.tensor([[0.0, 1.0], [1.0, 1.0]]), "b": torch.tensor([[2.0, 0.0], [1.0, 1.0]])}
    rewards = Rewards(parts["a"] * 2 + parts["b"], parts, 0, weights={"a": 2.0, "b": 1.0})
    trainer = Trainer(settings(tmp_path, reward_aggregation="sum_then_normalize"))
    assert trainer.advantages(rewards, torch.zeros(2, 2)).signal_P.tolist() == [False, False]
    trainer.folder.close()
    trainer = Trainer(settings(tmp_path / "other", reward_aggregation="normalize_then_sum"))
    assert trainer.advantages(rewards, torch.zeros(2, 2)).signal_P.tolist() == [True, False]
    trainer.folder.close()
