"""The updates that one rollout is used for: num_iterations passes over minibatches_per_rollout parts of whole groups.

With one update and weights that have not moved, the ratio is 1 up to numerics and the clip cannot act: that is correct
on-policy learning (DeepSeekMath, arXiv 2402.03300, section 4.1.3, also takes a single update per exploration stage).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rhotrain.kernels.spec import Objective
from rhotrain.model.load import LoadedModel
from rhotrain.train.batching import MicroBatch, TokenTable, pack, token_weights
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.metrics import Metrics, approximate_kl, mismatch_metrics, update_metrics
from rhotrain.train.optim import Optimizer, learning_rate
from rhotrain.train.step import TokenResults, run_batches, score


@dataclass
class Learner:
    """Everything that changes when an update is taken; `updates` counts optimiser steps and drives the schedule."""

    loaded: LoadedModel
    optimizer: Optimizer
    algo: AlgoConfig
    optim: OptimConfig
    temperature: float
    max_new_tokens: int
    total_updates: int
    seed: int
    updates: int = 0

    def __post_init__(self) -> None:
        self.objective: Objective = self.algo.spec()
        self.anchor = self.algo.anchor(exact=self.loaded.dtype in (torch.float32, torch.float64))

    @property
    def other_loss_terms(self) -> bool:
        """True when a group without advantages still carries loss (KL or entropy)."""
        return self.objective.uses_reference or self.objective.entropy_coef != 0.0

    def runs(self, table: TokenTable, trajectory: int) -> bool:
        """Whether a trajectory goes through the model: it carries loss, and some term of it is not 0."""
        if not table.carries_loss(trajectory):
            return False
        signal = table.trajectories[trajectory].group in table.signal_groups
        if self.algo.zero_variance == "filter":
            return signal
        return signal or self.other_loss_terms or self.algo.zero_variance == "keep"

    def counts(self, table: TokenTable, trajectory: int) -> bool:
        """Whether a trajectory is part of the denominator."""
        if self.algo.zero_variance == "filter":
            return table.trajectories[trajectory].group in table.signal_groups
        return True

    def pack(self, table: TokenTable, trajectories: list[int]) -> list[MicroBatch]:
        return pack(table, trajectories, token_budget=self.optim.token_budget, share_prompts=self.optim.share_prompts)

    def set_old_logprobs(self, table: TokenTable) -> None:
        """Anchor the ratio before the first update of a rollout."""
        if self.anchor == "fresh":
            table.old_logprobs = None
        elif self.anchor == "sampler":
            table.old_logprobs = table.sampling_logprobs
        else:
            batches = self.pack(table, [i for i in range(len(table.trajectories)) if self.runs(table, i)])
            table.old_logprobs = score(self.loaded, table, batches, temperature=self.temperature)


@dataclass
class InnerLoop:
    """What the updates of one rollout did."""

    updates: list[Metrics] = field(default_factory=list)
    mismatch: Metrics = field(default_factory=dict)
    stopped_by_kl: bool = False
    kl_at_stop: float = 0.0
    skipped: int = 0


def minibatch_plan(num_groups: int, algo: AlgoConfig, *, seed: int, rollout_index: int) -> list[list[int]]:
    """Group numbers of every update, in order. The first pass keeps the rollout's order, later ones shuffle it.

    The shuffle depends on (seed, rollout, pass) alone, so that a resumed run repeats it.
    """
    size = num_groups // algo.minibatches_per_rollout
    plan: list[list[int]] = []
    for iteration in range(algo.num_iterations):
        order = list(range(num_groups))
        if iteration > 0:
            generator = torch.Generator().manual_seed(((seed * 1_000_003 + rollout_index) * 1_009 + iteration) % 2**63)
            order = torch.randperm(num_groups, generator=generator).tolist()
        plan.extend(order[k : k + size] for k in range(0, num_groups, size))
    return plan


def run_updates(
    learner: Learner,
    table: TokenTable,
    num_groups: int,
    *,
    rollout_index: int,
    on_update: Callable[[int, int], None] | None = None,
) -> InnerLoop:
    """Take the updates of one rollout.

    A minibatch without any loss term takes no step, and neither weights, optimiser nor schedule change. When the mean
    k3 between old and current policy exceeds kl_stop, that update and all that remain are skipped.
    """
    plan = minibatch_plan(num_groups, learner.algo, seed=learner.seed, rollout_index=rollout_index)
    done = InnerLoop()
    learner.set_old_logprobs(table)
    for index, groups in enumerate(plan):
        chosen = set(groups)
        members = [i for i, t in enumerate(table.trajectories) if t.group in chosen]
        running = [i for i in members if learner.runs(table, i)]
        # asked of the rows that run: a group's advantages may all sit on completions that are masked or left out
        signal = learner.other_loss_terms or any(table.advantages[table.starts[i]] != 0 for i in running)
        if not running or not signal:
            done.skipped += 1
            continue
        weights = token_weights(
            table,
            [i for i in members if learner.counts(table, i)],
            aggregation=learner.algo.aggregation,
            max_new_tokens=learner.max_new_tokens,
        )
        results = TokenResults.empty(len(table.token_ids), table.dtype)
        run_batches(
            learner.loaded,
            table,
            learner.pack(table, running),
            weights,
            learner.objective,
            results,
            temperature=learner.temperature,
        )
        if not done.updates:
            done.mismatch = mismatch_metrics(table, results)
        if 0.0 < learner.algo.kl_stop < approximate_kl(table, results):
            learner.optimizer.zero_grad()
            done.stopped_by_kl, done.kl_at_stop = True, approximate_kl(table, results)
            done.skipped += len(plan) - index
            break
        lr = learning_rate(learner.optim, learner.updates, learner.total_updates)
        metrics = update_metrics(table, results)
        metrics |= {"grad_norm": learner.optimizer.step(lr), "learning_rate": lr}
        learner.updates += 1
        learner.loaded.policy_version += 1
        done.updates.append(metrics)
        if on_update is not None:
            on_update(index + 1, len(plan))
    return done
