"""The training loop: rollout, rewards, advantages, updates; evaluation, logs and checkpoints around them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.load import save_model
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.train.advantages import Advantages, group_advantages
from rhotrain.train.batching import TokenTable, make_table
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
from rhotrain.train.evaluate import EvalResult, evaluate
from rhotrain.train.inner_loop import InnerLoop, run_updates
from rhotrain.train.metrics import Metrics, combine_updates, completion_metrics, reward_metrics
from rhotrain.train.optim import StepError
from rhotrain.train.rewards import RewardBatch, Rewards
from rhotrain.train.run_folder import RunFolder
from rhotrain.train.setup import Parts, build
from rhotrain.train.step import score

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


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Rollout:
    """The completions of one step with their prompts, texts [P][G] and scores."""

    index: int
    prompts: list[EncodedPrompt]
    groups: list[list[Completion]]
    texts: list[list[str]]
    rewards: Rewards

    @property
    def num_errors(self) -> int:
        """Completions that ended in an error of the engine."""
        return sum(c.finish_reason == "error" for group in self.groups for c in group)


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
            self._restore(saved)
            self.folder.note_settings(config)
        else:
            self.parts = build(config)
            self.folder.create(config)
        self.console = Console(steps=config.run.steps, first_step=self.step_index)

    # ------------------------------------------------------------------ state

    def save(self) -> None:
        """Write a checkpoint of everything that the rest of the run depends on."""
        learner, folder = self.parts.learner, self.folder
        state = {
            "step_index": self.step_index,
            "num_tokens": self.num_tokens,
            "updates": learner.updates,
            "policy_version": self.parts.loaded.policy_version,
            "optimizer": learner.optimizer.state_dict(),
            "stream": self.parts.stream.state_dict(),
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
        parts.stream.load_state_dict(saved["stream"])
        self.folder.metrics.cut(saved["metrics_size"])
        self.folder.rollouts.cut(saved["rollouts_size"])
        self.before = None if saved["before"] is None else EvalResult.from_dict(saved["before"])
        restore_random_states(saved["random"])

    # ------------------------------------------------------------------ one step

    def rollout(self, clock: Clock) -> Rollout:
        """Draw the next prompts, their completions and rewards."""
        settings, finished = self.config.rollout, 0
        prompts = self.parts.stream.take(settings.prompts_per_step)
        total = len(prompts) * settings.group_size

        def on_finish(prompt: int, member: int, completion: Completion) -> None:
            nonlocal finished
            finished += 1
            self.console.phase("rollout", finished, total)

        with clock.phase("rollout"):
            groups = self.parts.engine.generate(
                [p.token_ids for p in prompts],
                settings.sampling(seed=self.config.run.seed),
                n=settings.group_size,
                first_sample=self.step_index * total,
                on_finish=on_finish,
            )
        _refuse_all_errors(groups)
        with clock.phase("reward"):
            batch = RewardBatch.make(prompts, groups, self.parts.loaded.tokenizer)
            rewards = self.parts.rewards.score(batch)
        return Rollout(self.step_index, prompts, groups, batch.texts, rewards)

    def table(self, rollout: Rollout) -> tuple[TokenTable, Advantages, Tensor]:
        """The rollout's tokens with reference logprobs, where a KL wants them; advantages; the KL penalty [P, G]."""
        algo, learner = self.config.algo, self.parts.learner
        table = make_table(
            [(prompt.token_ids, group) for prompt, group in zip(rollout.prompts, rollout.groups)],
            replay=self.config.rollout.sampling(seed=0).keep_sets,
            mask_truncated=algo.mask_truncated,
            dtype=torch.promote_types(self.parts.loaded.dtype, torch.float32),
        )
        if self.parts.reference is not None:
            batches = learner.pack(table, list(range(len(table.trajectories))))
            table.ref_logprobs = score(self.parts.reference, table, batches, temperature=learner.temperature)
        penalty_PG = self.kl_penalty(rollout, table)
        advantages = group_advantages(
            rollout.rewards.total - penalty_PG,
            scale=algo.advantage_scale,
            std=algo.advantage_std,
            eps=algo.advantage_eps,
        )
        table.set_advantages(advantages.values_PG)
        return table, advantages, penalty_PG

    def kl_penalty(self, rollout: Rollout, table: TokenTable) -> Tensor:
        """float64 [P, G]: kl_in_reward times k1 = logprob - ref_logprob, summed over each completion; a constant.

        Both logprobs are the trainer's, by the same forward pass. The sampler's would leave its numeric noise in the
        reward, and a group's std scales noise up to advantages of size 1 where the true KL is 0.
        """
        learner, coefficient = self.parts.learner, self.config.algo.kl_in_reward
        penalty_PG = torch.zeros_like(rollout.rewards.total)
        if coefficient == 0.0:
            return penalty_PG
        assert table.ref_logprobs is not None
        batches = learner.pack(table, list(range(len(table.trajectories))))
        logprobs = score(self.parts.loaded, table, batches, temperature=learner.temperature)
        k1_N = (logprobs - table.ref_logprobs).double()
        for i, trajectory in enumerate(table.trajectories):
            penalty_PG[trajectory.group, trajectory.member] = coefficient * k1_N[table.rows(i)].sum()
        return penalty_PG

    def step(self) -> Metrics:
        """One rollout and its updates; returns the step's metrics, which are also appended to the logs."""
        clock, start = Clock(), time.perf_counter()
        rollout = self.rollout(clock)
        with clock.phase("update"):
            table, advantages, penalty_PG = self.table(rollout)
            done = run_updates(
                self.parts.learner,
                table,
                len(rollout.groups),
                rollout_index=rollout.index,
                on_update=lambda taken, total: self.console.phase("update", taken, total),
            )
        self.step_index += 1
        self.num_tokens += sum(len(t.prompt_ids) + t.num_tokens for t in table.trajectories)
        rewards = rollout.rewards
        metrics: Metrics = {
            "step": self.step_index,
            "num_tokens": self.num_tokens,
            "updates_total": self.parts.learner.updates,
            "policy_version": self.parts.loaded.policy_version,
            **reward_metrics(rewards.total, rewards.parts, advantages, rewards.failures),
            **completion_metrics(table, rollout.num_errors),
            **self._update_metrics(done),
            "step_time": time.perf_counter() - start,
            **{f"time/{name}": seconds for name, seconds in clock.seconds.items()},
            "tok_per_s": len(table.token_ids) / clock.seconds["rollout"],
        }
        if self.config.algo.kl_in_reward > 0.0:
            metrics["kl_penalty/mean"] = float(penalty_PG.mean())
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.folder.metrics.write(metrics)
        self._log_rollout(rollout, advantages.values_PG, penalty_PG)
        return metrics

    def _update_metrics(self, done: InnerLoop) -> Metrics:
        metrics: Metrics = {
            **done.mismatch,
            **combine_updates(done.updates),
            "updates_taken": len(done.updates),
            "updates_skipped": done.skipped,
            "stopped_by_kl": done.stopped_by_kl,
            "kl_at_stop": done.kl_at_stop,
        }
        if self.config.algo.updates_per_rollout > 1:
            metrics["updates"] = done.updates
        if self.parts.learner.objective.kind == "cispo" and done.updates:
            metrics["cispo_clip_ratio"] = metrics["clip_ratio/region_mean"]
        return metrics

    def _log_rollout(self, rollout: Rollout, advantages_PG: Tensor, penalty_PG: Tensor) -> None:
        rewards = rollout.rewards
        for p, (prompt, group) in enumerate(zip(rollout.prompts, rollout.groups)):
            for g, completion in enumerate(group):
                record = {
                    "step": self.step_index,
                    "group": p,
                    "sample": completion.sample,
                    "prompt": prompt.text,
                    "completion": rollout.texts[p][g],
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
                    self.console.say(f"  {prompt.text!r} -> {rollout.texts[p][g]!r}  reward {record['reward']}")

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
        size = sum(p.numel() for p in loaded.model.parameters())
        say(f"model {config.model.model}: {size / 1e6:.1f} M parameters, {loaded.dtype}, {loaded.device}")
        for note in self.parts.notes:
            say(f"note: {note}")
        say(
            f"{config.algo.objective}, old logprobs: {learner.anchor}, {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.group_size} completions, {config.algo.updates_per_rollout} update(s) per rollout"
        )
        objective = learner.objective
        if objective.uses_bounds and not objective.ratio_min <= 1.0 <= objective.ratio_max:
            say(
                f"warning: the bounds [{objective.ratio_min:g}, {objective.ratio_max:g}] leave out a ratio of 1: every "
                "on-policy token is clipped; ratio_min and ratio_max are values of the ratio, not distances from 1"
            )
        elif config.algo.updates_per_rollout == 1 and objective.uses_bounds:
            say(
                "note: one update per rollout is on-policy: the ratio is 1 up to numerics and clip cannot act; "
                "num_iterations or minibatches_per_rollout above 1 bring it to life"
            )
        if config.rollout.truncation == "ignore" and config.rollout.sampling(seed=0).truncates:
            say("note: truncation=ignore scores the full softmax although the kept set was sampled: biased")


def _refuse_all_errors(groups: list[list[Completion]]) -> None:
    """StepError when every completion ended in an error: the weights or the settings are beyond learning from."""
    errors = [c.error for group in groups for c in group if c.finish_reason == "error"]
    if errors and len(errors) == sum(map(len, groups)):
        raise StepError(
            f"rollout: all {len(errors)} completions ended in an error, the first: {errors[0]}. Go back to a "
            "checkpoint with a lower lr, or check temperature and dtype"
        )


def _number(value: Tensor) -> float | None:
    """A JSON number; None for an unscorable reward."""
    return None if bool(value.isnan()) else float(value)


def train(config: Config) -> RunResult:
    """Run the training that `config` describes. Raises ConfigError, LoadError, CheckpointError on what cannot work."""
    return Trainer(config).run()
