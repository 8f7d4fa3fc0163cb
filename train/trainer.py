"""The training loop: rollout, rewards, advantages, updates; evaluation, logs and checkpoints around them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.load import save_model
from rhotrain.model.quantized import num_weights
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.train.advantages import Advantages, advantages_of
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.budget import Budget, calibrate, excerpt
from rhotrain.train.checkpoint import (
    MODEL_FOLDER,
    latest_checkpoint,
    load_state,
    restore_random_states,
    save_checkpoint,
)
from rhotrain.train.config import Config
from rhotrain.train.console import Console, StopRequest
from rhotrain.train.data import EncodedPrompt
from rhotrain.train.dynamic import Scored, fill_with_signal
from rhotrain.train.evaluate import EvalResult, evaluate
from rhotrain.train.inner_loop import InnerLoop, run_updates
from rhotrain.train.metrics import (
    Metrics,
    combine_updates,
    completion_metrics,
    reward_metrics,
    staleness_metrics,
)
from rhotrain.train.notices import about_ratio, dropout_notice
from rhotrain.train.rewards import RewardBatch, Rewards
from rhotrain.train.rollouts import RolloutQueue
from rhotrain.train.run_folder import RunFolder
from rhotrain.train.setup import Parts, build

CALIBRATION_TOKENS = 256
"""Completion tokens of the first rollout, about, on which the numerics budget is measured: seconds with SmolLM2."""

EVAL_SEED_OFFSET = 1 << 32
"""Evaluation draws from another key than training, so that evaluating more or less often changes no training sample."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to. before, after: held-out evaluation, None when there was none. stopped: ended by a signal."""

    folder: Path
    steps: int
    before: EvalResult | None
    after: EvalResult | None
    stopped: bool


PHASES = ("rollout", "reward", "update")


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - start


class Trainer:
    """One run: `run()` does all of it, `step()` one rollout with its updates."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = RunFolder.find(config)
        self.step_index = 0
        self.num_tokens = 0
        self.before: EvalResult | None = None
        if config.run.resume:
            checkpoint = latest_checkpoint(self.folder.path)
            saved = load_state(checkpoint)
            self.parts: Parts = build(config, checkpoint_model=checkpoint / MODEL_FOLDER, choices=saved["choices"])
            self.queue = RolloutQueue(config, self.parts.engine, self.parts.stream)
            self._restore(saved)
            self.folder.note_settings(config)
        else:
            self.parts = build(config)
            self.queue = RolloutQueue(config, self.parts.engine, self.parts.stream)
            self.folder.create(config)
            if self.parts.plan is not None:
                self.folder.note_plan(self.parts.plan.as_dict())
        self.console = Console(steps=config.run.steps, first_step=self.step_index)

    # ------------------------------------------------------------------ state

    def save(self) -> None:
        """Write a checkpoint of everything that the rest of the run depends on."""
        learner, folder = self.parts.learner, self.folder
        self.parts.choices["token_budget"] = learner.token_budget.tokens  # memory that ran out may have lowered it
        state = {
            "step_index": self.step_index,
            "num_tokens": self.num_tokens,
            "updates": learner.updates,
            "policy_version": self.parts.loaded.policy_version,
            "optimizer": learner.optimizer.state_dict(),
            "rollouts": self.queue.state_dict(),
            "choices": self.parts.choices,
            "metrics_size": folder.metrics.size,
            "rollouts_size": folder.rollouts.size,
            "before": None if self.before is None else self.before.as_dict(),
        }
        save_checkpoint(folder.path, self.step_index, self.parts.loaded, state, keep_last=self.config.run.keep_last)

    def _restore(self, saved: dict[str, Any]) -> None:
        parts = self.parts
        self.step_index, self.num_tokens = saved["step_index"], saved["num_tokens"]
        parts.learner.updates = saved["updates"]
        parts.loaded.policy_version = saved["policy_version"]
        parts.learner.optimizer.load_state_dict(saved["optimizer"])
        self.queue.load_state_dict(saved["rollouts"])
        self.folder.metrics.cut(saved["metrics_size"])
        self.folder.rollouts.cut(saved["rollouts_size"])
        self.before = None if saved["before"] is None else EvalResult.from_dict(saved["before"])
        restore_random_states(saved["random"])

    # ------------------------------------------------------------------ one step

    def rollout(self, clock: Clock) -> Scored:
        """The next rollout, drawn now or ahead of its turn, and its rewards; with dynamic sampling, refilled."""
        drawn_before, refills = self.queue.drawn, self.config.algo.dynamic_sampling
        with clock.phase("rollout"):
            rollout = self.queue.take(
                version=self.parts.loaded.policy_version,
                remaining=self.config.run.steps - self.step_index,
                on_finish=lambda finished, total: self.console.phase("rollout", finished, total),
                more_follows=refills > 0,
            )
        drawn = [rollout, *self.queue.pending] if self.queue.drawn > drawn_before else []
        texts, rewards = self.score_groups(clock, rollout.prompts, rollout.groups)
        scored = Scored(rollout, texts, rewards, sum(r.num_tokens for r in drawn))
        if refills:
            scored = fill_with_signal(
                scored,
                limit=refills,
                draw=partial(self.draw_more, clock),
                score=partial(self.score_groups, clock),
                signal=lambda rewards: self.advantages(rewards, torch.zeros_like(rewards.total)).signal_P,
            )
            self.queue.release()
        return scored

    def draw_more(self, clock: Clock, count: int) -> tuple[list[EncodedPrompt], list[list[Completion]]]:
        """Groups of further prompts for the rollout in hand."""
        with clock.phase("rollout"):
            return self.queue.more(count, lambda finished, total: self.console.phase("refill", finished, total))

    def score_groups(
        self, clock: Clock, prompts: Sequence[EncodedPrompt], groups: Sequence[Sequence[Completion]]
    ) -> tuple[list[list[str]], Rewards]:
        """The texts [P][G] of completions, and their rewards."""
        with clock.phase("reward"):
            batch = RewardBatch.make(prompts, groups, self.parts.loaded.tokenizer)
            return batch.texts, self.parts.rewards.score(batch)

    def table(self, scored: Scored) -> tuple[TokenTable, Advantages, Tensor]:
        """The rollout's tokens with reference logprobs, where a KL wants them; advantages; the KL penalty [P, G]."""
        algo, learner, rollout = self.config.algo, self.parts.learner, scored.rollout
        table = make_table(
            [(prompt.token_ids, group) for prompt, group in zip(rollout.prompts, rollout.groups)],
            replay=self.config.rollout.sampling(seed=0).keep_sets,
            mask_truncated=algo.mask_truncated,
            dtype=torch.promote_types(self.parts.loaded.dtype, torch.float32),
        )
        if self.parts.reference is not None:
            everything = list(range(len(table.trajectories)))
            table.ref_logprobs = learner.score(table, everything, loaded=self.parts.reference, who="the reference")
        penalty_PG = self.kl_penalty(scored.rewards, table)
        advantages = self.advantages(scored.rewards, penalty_PG)
        table.set_advantages(advantages.values_PG)
        return table, advantages, penalty_PG

    def advantages(self, rewards: Rewards, penalty_PG: Tensor) -> Advantages:
        """Of the rewards less the KL penalty [P, G]; `reward_aggregation` says in which order they are normalised."""
        return advantages_of(self.config.algo, rewards.total - penalty_PG, rewards.parts, rewards.weights)

    def kl_penalty(self, rewards: Rewards, table: TokenTable) -> Tensor:
        """float64 [P, G]: kl_in_reward times k1 = logprob - ref_logprob, summed over each completion; a constant.

        Both logprobs are the trainer's, by the same forward pass. The sampler's would leave its numeric noise in the
        reward, and a group's std scales noise up to advantages of size 1 where the true KL is 0.
        """
        learner, coefficient = self.parts.learner, self.config.algo.kl_in_reward
        penalty_PG = torch.zeros_like(rewards.total)
        if coefficient == 0.0:
            return penalty_PG
        assert table.ref_logprobs is not None
        logprobs = learner.score(table, list(range(len(table.trajectories))))
        k1_N = (logprobs - table.ref_logprobs).double()
        for i, trajectory in enumerate(table.trajectories):
            penalty_PG[trajectory.group, trajectory.member] = coefficient * k1_N[table.rows(i)].sum()
        return penalty_PG

    def know_numerics(self, table: TokenTable) -> None:
        """Before the first update of a run: how far sampler and trainer may differ here, and what dropout does.

        Checkpoints keep the budget, so that a resumed run judges as the run before it did.
        """
        parts, learner, choices = self.parts, self.parts.learner, self.parts.choices
        if learner.budget is None and "budget" in choices:
            learner.budget = Budget.from_dict(choices["budget"])
        if learner.budget is not None:
            return
        whole = [(t.prompt_ids, t.completion.token_ids) for t in table.trajectories]
        budget = calibrate(
            parts.loaded,
            excerpt(whole, tokens=CALIBRATION_TOKENS, longest=CALIBRATION_TOKENS // 8),
            temperature=learner.temperature,
            token_budget=learner.token_budget.tokens,
        )
        learner.budget, choices["budget"] = budget, budget.as_dict()
        self.console.say(budget.describe())
        if parts.loaded.dropout > 0.0:
            self.console.say(f"warning: {dropout_notice(learner, table)}")

    def step(self) -> Metrics:
        """One rollout and its updates; returns the step's metrics, which are also appended to the logs."""
        clock, start = Clock(), time.perf_counter()
        scored = self.rollout(clock)
        rollout = scored.rollout
        with clock.phase("update"):
            self.parts.engine.release_weights()
            table, advantages, penalty_PG = self.table(scored)
            staleness = table.staleness(self.parts.loaded.policy_version)
            self.know_numerics(table)
            done = run_updates(
                self.parts.learner,
                table,
                len(rollout.groups),
                rollout_index=rollout.index,
                on_update=lambda taken, total: self.console.phase("update", taken, total),
            )
            if self.config.rollout.release_memory:
                self.parts.learner.workspace.release()
        self.step_index += 1
        self.num_tokens += sum(len(t.prompt_ids) + t.num_tokens for t in table.trajectories)
        rewards = scored.rewards
        metrics: Metrics = {
            "step": self.step_index,
            "num_tokens": self.num_tokens,
            "updates_total": self.parts.learner.updates,
            "policy_version": self.parts.loaded.policy_version,
            **reward_metrics(rewards.total, rewards.parts, advantages, rewards.failures),
            **completion_metrics(table, rollout.num_errors),
            **staleness_metrics(staleness, self.queue.dropped),
            **(scored.sampling.metrics() if scored.sampling is not None else {}),
            **self._update_metrics(done),
            "step_time": time.perf_counter() - start,
            "token_budget": self.parts.learner.token_budget.tokens,
            "memory/retries": self.parts.learner.token_budget.retries,
            **{f"time/{name}": seconds for name, seconds in clock.seconds.items()},
            "tok_per_s": scored.drawn_tokens / clock.seconds["rollout"] if scored.drawn_tokens else None,
        }
        if self.config.algo.kl_in_reward > 0.0:
            metrics["kl_penalty/mean"] = float(penalty_PG.mean())
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        for notice in self.parts.learner.token_budget.take_notices():
            self.console.say(f"warning: {notice}")
        self.folder.metrics.write(metrics)
        self._log_rollout(scored, advantages.values_PG, penalty_PG)
        return metrics

    def _update_metrics(self, done: InnerLoop) -> Metrics:
        metrics: Metrics = {
            **done.mismatch,
            **combine_updates(done.updates),
            "updates_taken": len(done.updates),
            "updates_skipped": done.skipped,
            "stopped_by_kl": done.stopped_by_kl,
            "kl_at_stop": done.kl_at_stop,
            "over_numerics_budget": list(done.over_budget),
        }
        if self.config.algo.updates_per_rollout > 1:
            metrics["updates"] = done.updates
        scale = self.parts.learner.optimizer.loss_scale
        if scale is not None:
            metrics |= scale.metrics() | {"updates_overflowed": done.overflowed}
        if self.parts.learner.objective.kind == "cispo" and done.updates:
            metrics["cispo_clip_ratio"] = metrics["clip_ratio/region_mean"]
        return metrics

    def _log_rollout(self, scored: Scored, advantages_PG: Tensor, penalty_PG: Tensor) -> None:
        rewards, rollout = scored.rewards, scored.rollout
        for p, (prompt, group) in enumerate(zip(rollout.prompts, rollout.groups)):
            for g, completion in enumerate(group):
                record = {
                    "step": self.step_index,
                    "group": p,
                    "sample": completion.sample,
                    "prompt": prompt.text,
                    "completion": scored.texts[p][g],
                    "token_ids": list(completion.token_ids),
                    "reward": _number(rewards.total[p, g]),
                    "rewards": {name: _number(part[p, g]) for name, part in rewards.parts.items()},
                    "kl_penalty": float(penalty_PG[p, g]),
                    "advantage": float(advantages_PG[p, g]),
                    "finish_reason": completion.finish_reason,
                    "policy_version": completion.policy_version,
                }
                self.folder.rollouts.write(record)
                if p == 0 and g < self.config.run.log_completions:
                    self.console.say(f"  {prompt.text!r} -> {scored.texts[p][g]!r}  reward {record['reward']}")

    # ------------------------------------------------------------------ the run

    def evaluate(self, label: str) -> EvalResult:
        """Accuracy on the held-out prompts with the current weights; logged and printed."""
        settings, rollout = self.config.eval, self.config.rollout
        sampling = SamplingParams(
            temperature=settings.eval_temperature,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=rollout.stop_token_ids,
            stop_strings=rollout.stop_strings,
            seed=self.config.run.seed + EVAL_SEED_OFFSET,
        )
        parts = self.parts
        assert parts.scorer is not None
        result = evaluate(
            parts.loaded, parts.engine, parts.held_out, parts.scorer, sampling, num_samples=settings.eval_samples
        )
        self.folder.metrics.write({"step": self.step_index, **result.metrics()})
        self.console.evaluation(label, result)
        return result

    def run(self) -> RunResult:
        """Train to the last step, or to a signal; leaves a checkpoint and, at the end, the final model."""
        run, evaluates, stop = self.config.run, self.config.eval.eval_size > 0, StopRequest()
        self._announce()
        if run.resume and self.step_index >= run.steps:
            self.console.say(
                f"nothing to train: the run has {self.step_index} of {run.steps} steps; raise steps to go on"
            )
        saved_at = self.step_index if run.resume else -1
        with stop.listening():
            if evaluates and self.before is None:
                self.before = self.evaluate("held out before training")
            with self.console.progress():
                while self.step_index < run.steps and not stop.asked:
                    self.console.step(self.step_index + 1, self.step())
                    every = self.config.eval.eval_every
                    if evaluates and every and self.step_index % every == 0 and self.step_index < run.steps:
                        self.evaluate(f"held out after step {self.step_index}")
                    if run.save_every and self.step_index % run.save_every == 0:
                        self.save()
                        saved_at = self.step_index
            if saved_at != self.step_index:
                self.save()
            finished = self.step_index >= run.steps
            after = self.evaluate("held out after training") if evaluates and finished else None
            if finished:
                save_model(self.parts.loaded, self.folder.path / "model")
        self.folder.close()
        self.console.summary(self.before, after, str(self.folder.path), finished)
        return RunResult(self.folder.path, self.step_index, self.before, after, stopped=not finished)

    def _announce(self) -> None:
        """What a reader of the log needs to know before the first step."""
        config, learner, say = self.config, self.parts.learner, self.console.say
        loaded = self.parts.loaded
        say(f"run folder: {self.folder.path}" + (f", resumed after step {self.step_index}" if self.step_index else ""))
        size = sum(map(num_weights, loaded.model.parameters()))
        say(f"model {config.model.model}: {size / 1e6:.1f} M parameters, {loaded.dtype}, {loaded.device}")
        for note in self.parts.notes:
            say(f"note: {note}")
        say(
            f"{config.algo.objective}, old logprobs: {learner.anchor}, {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.group_size} completions, {config.algo.updates_per_rollout} update(s) per rollout"
        )
        for note in about_ratio(config, learner):
            say(note)


def _number(value: Tensor) -> float | None:
    """A JSON number; None for an unscorable reward."""
    return None if bool(value.isnan()) else float(value)


def train(config: Config) -> RunResult:
    """Run the training that `config` describes. Raises ConfigError, LoadError, CheckpointError on what cannot work."""
    return Trainer(config).run()
