"""The updates that one rollout is used for: num_iterations passes over minibatches_per_rollout parts of whole groups.

With one update and weights that have not moved, the ratio is 1 up to numerics and the clip cannot act: that is correct
on-policy learning (DeepSeekMath, arXiv 2402.03300, section 4.1.3, also takes a single update per exploration stage).

The frozen logprobs, scored once before the first update, serve three purposes: they are the `trainer` anchors, the
numerator of an off-policy correction, and, where the current forward has dropout, what the sampler is compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from rhotrain.kernels.spec import Objective
from rhotrain.kernels.workspace import Workspace
from rhotrain.model.load import LoadedModel
from rhotrain.train.balance import StepCost, pack_balanced
from rhotrain.train.batching import MicroBatch, TokenTable, longest_trajectory, token_weights
from rhotrain.train.budget import Budget, Difference
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.correction import importance_weights
from rhotrain.train.metrics import (
    Metrics,
    approximate_kl,
    correction_metrics,
    mismatch_metrics,
    selection_metrics,
    update_metrics,
)
from rhotrain.train.optim import Optimizer, StepError, learning_rate
from rhotrain.train.selection import select_tokens, selects
from rhotrain.train.step import TokenResults, run_batches, score
from rhotrain.train.token_budget import TokenBudget


@dataclass
class Learner:
    """Everything that changes when an update is taken; `updates` counts optimiser steps and drives the schedule.

    budget: how far sampler and trainer may differ on the same weights; None does not look. strict_ratio: beyond it,
    stop. workspace: the head's chunks, of the policy and of any other model that is scored.
    Raises ConfigError when `algo` cannot work in the model's dtype.
    """

    loaded: LoadedModel
    optimizer: Optimizer
    algo: AlgoConfig
    optim: OptimConfig
    temperature: float
    max_new_tokens: int
    total_updates: int
    seed: int
    updates: int = 0
    budget: Budget | None = None
    strict_ratio: bool = False
    workspace: Workspace = field(default_factory=Workspace)

    def __post_init__(self) -> None:
        self.objective: Objective = self.algo.spec()
        self.anchor = self.algo.anchor(exact=self.loaded.full_precision)
        self.token_budget = TokenBudget(self.optim.token_budget)

    @cached_property
    def cost(self) -> StepCost:
        """What a micro-batch is estimated to cost."""
        return StepCost.of(self.loaded)

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
        """The micro-batches of one optimiser step, even in cost, under the token budget as it stands."""
        return pack_balanced(
            table,
            trajectories,
            token_budget=self.token_budget.tokens,
            share_prompts=self.optim.share_prompts,
            cost=self.cost,
        )

    def score(
        self,
        table: TokenTable,
        trajectories: list[int],
        *,
        loaded: LoadedModel | None = None,
        who: str = "the trainer",
        entropies: Tensor | None = None,
        temperature: float | None = None,
    ) -> Tensor:
        """`step.score` of these trajectories under `loaded` (default: the policy) at `temperature` (default: the
        learner's); the token budget falls when memory runs out. Raises ConfigError when one trajectory alone does not
        fit."""
        model, at = loaded or self.loaded, temperature or self.temperature

        def work(batches: list[MicroBatch]) -> Tensor:
            with self.workspace.using(), model.awake():
                return score(model, table, batches, temperature=at, who=who, entropies=entropies)

        return self.token_budget.attempt(
            lambda: self.pack(table, trajectories),
            work,
            longest=longest_trajectory(table, trajectories),
            undo=self.workspace.release,
        )

    def backward(self, table: TokenTable, trajectories: list[int], weights: Tensor) -> TokenResults:
        """Forward and backward passes of one optimiser step (see `run_batches`). When memory runs out, its gradients
        are dropped and it starts anew with a lower token budget: the result is that of another split.
        Raises ConfigError when one trajectory alone does not fit."""

        def work(batches: list[MicroBatch]) -> TokenResults:
            results = TokenResults.empty(len(table.token_ids), table.dtype)
            objective, temperature = self.objective, self.temperature
            scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.value
            with self.workspace.using():
                run_batches(
                    self.loaded,
                    table,
                    batches,
                    weights,
                    objective,
                    results,
                    temperature=temperature,
                    loss_scale=scale,
                )
            return results

        def undo() -> None:
            self.optimizer.zero_grad()
            self.workspace.release()

        return self.token_budget.attempt(
            lambda: self.pack(table, trajectories),
            work,
            longest=longest_trajectory(table, trajectories),
            undo=undo,
        )

    def step(self, lr: float) -> float | None:
        """`Optimizer.step`, after which, if it was taken, the next update follows under the next policy version.
        Raises StepError, which names the optimiser step."""
        try:
            norm = self.optimizer.step(lr)
        except StepError as error:
            raise StepError(f"optimiser step {self.updates + 1}: {error}") from None
        if norm is not None:
            self.updates += 1
            self.loaded.policy_version += 1
        return norm

    @property
    def ratio_holds_movement(self) -> bool:
        """Whether the policy term's ratio contains the movement of the policy since stale samples were drawn."""
        return self.anchor == "sampler" and self.objective.kind != "reinforce"

    @property
    def scores_frozen(self) -> bool:
        """Whether a rollout is scored under the frozen weights before its first update."""
        return self.anchor == "trainer" or self.algo.correction != "none" or self.loaded.dropout > 0.0

    def prepare(self, table: TokenTable) -> "Prepared":
        """Anchor the ratio and weigh the samples, before the first update of a rollout."""
        running = [i for i in range(len(table.trajectories)) if self.runs(table, i)]
        frozen = None
        if self.scores_frozen:
            frozen = self.score(table, running)
        table.old_logprobs = {"fresh": None, "sampler": table.sampling_logprobs, "trainer": frozen}[self.anchor]
        importance = None if frozen is None else importance_weights(table, frozen, running, self.algo)
        table.importance = None if importance is None else importance.weights
        return Prepared(frozen, running, correction_metrics(importance), table.importance)

    def select(self, table: TokenTable, trajectories: list[int], prepared: "Prepared", *, first: bool) -> Metrics:
        """Take out of the policy term what `off_policy_mask` and `top_entropy` name, by the weights as they are now.

        trajectories: those that run in this optimiser step. first: no update has been taken since `prepare`.
        Writes table.importance; returns the update's metrics, empty when neither rule is on.
        """
        if not selects(self.algo):
            return {}
        entropies = torch.zeros_like(table.sampling_logprobs) if self.algo.top_entropy < 1.0 else None
        logprobs = prepared.frozen if first and entropies is None else None
        if logprobs is None:
            logprobs = self.score(table, trajectories, entropies=entropies)
        chosen = select_tokens(table, trajectories, logprobs, entropies, self.algo)
        table.importance = chosen.apply(prepared.importance).to(table.dtype)
        return selection_metrics(chosen, table, trajectories)

    def check_numerics(self, table: TokenTable, difference: Difference) -> tuple[str, ...]:
        """What of `difference`, logprobs - sampling_logprobs at a rollout's first update, exceeds the budget.

        Nothing is said of a stale rollout, whose difference is the movement of the policy.
        Raises StepError with strict_ratio: the step has not been taken.
        """
        if self.budget is None or any(table.staleness(self.loaded.policy_version)):
            return ()
        exceeded = self.budget.exceeded(difference)
        if exceeded and self.strict_ratio:
            raise StepError(
                f"strict_ratio: on the same weights sampler and trainer differ by more than numerics: "
                f"{'; '.join(exceeded)}. The step was not taken; `rhotrain audit` with the same flags finds the cause"
            )
        return exceeded


@dataclass(frozen=True)
class Prepared:
    """frozen: [N] logprobs under the frozen weights in the rows of the trajectories `running`, None when they were not
    needed. correction: metrics of the importance weights. importance: [N] those weights, None without a correction."""

    frozen: Tensor | None
    running: list[int]
    correction: Metrics
    importance: Tensor | None = None


@dataclass
class InnerLoop:
    """What the updates of one rollout did. mismatch: sampler against trainer before the first of them; over_budget:
    what of it exceeds the numerics budget. overflowed: those of `skipped` whose gradient the loss scale pushed beyond
    float16."""

    updates: list[Metrics] = field(default_factory=list)
    mismatch: Metrics = field(default_factory=dict)
    over_budget: tuple[str, ...] = ()
    stopped_by_kl: bool = False
    kl_at_stop: float = 0.0
    skipped: int = 0
    overflowed: int = 0


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

    A minibatch without any loss term takes no step, and neither weights, optimiser nor schedule change; nor do they
    when a gradient in float16 overflows under the loss scale, which is halved. When the mean k3 between old and current
    policy exceeds kl_stop, that update and all that remain are skipped.
    Raises StepError on a number that must not reach the weights, and, with strict_ratio, over the numerics budget.
    """
    plan = minibatch_plan(num_groups, learner.algo, seed=learner.seed, rollout_index=rollout_index)
    done = InnerLoop()
    prepared = learner.prepare(table)
    if prepared.frozen is not None and prepared.running:
        _compare(learner, table, prepared.frozen, prepared.running, prepared, done)
    for index, groups in enumerate(plan):
        chosen = set(groups)
        members = [i for i, t in enumerate(table.trajectories) if t.group in chosen]
        running = [i for i in members if learner.runs(table, i)]
        if not _has_signal(learner, table, running, prepared.importance):
            done.skipped += 1
            continue
        selection = learner.select(table, running, prepared, first=not done.updates)
        if not _has_signal(learner, table, running, table.importance):
            done.skipped += 1
            continue
        weights = token_weights(
            table,
            [i for i in members if learner.counts(table, i)],
            aggregation=learner.algo.aggregation,
            max_new_tokens=learner.max_new_tokens,
        )
        results = learner.backward(table, running, weights)
        if not done.mismatch:
            _compare(learner, table, results.logprobs, running, prepared, done)
        if 0.0 < learner.algo.kl_stop < approximate_kl(table, results):
            learner.optimizer.zero_grad()
            done.stopped_by_kl, done.kl_at_stop = True, approximate_kl(table, results)
            done.skipped += len(plan) - index
            break
        lr = learning_rate(learner.optim, learner.updates, learner.total_updates)
        norm = learner.step(lr)
        if norm is None:
            done.skipped += 1
            done.overflowed += 1
            continue
        metrics = update_metrics(table, results) | selection
        metrics |= {"grad_norm": norm, "learning_rate": lr, "changed_share": learner.optimizer.changed_share}
        done.updates.append(metrics)
        if on_update is not None:
            on_update(index + 1, len(plan))
    return done


def _has_signal(learner: Learner, table: TokenTable, running: list[int], importance: Tensor | None) -> bool:
    """Whether a loss term is left on one of these trajectories: a group's advantages may all sit on completions that
    are masked or left out, and a correction or selection may have cut what is left."""
    if learner.other_loss_terms:
        return bool(running)
    for trajectory in running:
        rows = table.rows(trajectory)
        term = table.advantages[rows] if importance is None else table.advantages[rows] * importance[rows]
        if bool((term != 0).any()):
            return True
    return False


def _compare(
    learner: Learner, table: TokenTable, logprobs: Tensor, trajectories: list[int], prepared: Prepared, done: InnerLoop
) -> None:
    """Sampler against trainer before any update, of the whole rollout where it was scored, else the first minibatch."""
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in trajectories])
    difference = Difference.of((logprobs - table.sampling_logprobs)[rows])
    done.over_budget = learner.check_numerics(table, difference)
    done.mismatch = {**mismatch_metrics(table, logprobs, trajectories, difference), **prepared.correction}
