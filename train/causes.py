"""Why the trainer's logprob of a sampled token differs from the sampler's: the log-ratio as a sum of causes.

    log_ratio = trainer's logprob - logprob under the distribution that drew the token, no update of the policy between

One thing is switched at a time, in this order; each link is the difference that its switch makes, so the links add up:

    numerics      the engine's number               -> packed score, same weights, temperature, kept sets; no dropout
    staleness     the weights that drew the token   -> the current ones
    temperature   the sampler's                     -> the trainer's
    truncation    the kept sets                     -> what the trainer normalises over: the sets or the full vocabulary
    dropout       none                              -> a second forward pass in train mode, at the probability asked for
    tokenisation  the ids that were drawn           -> the ids that the trainer holds

Another order would give other links where causes interact (a temperature moves the kept mass). Means add up over the
links; extremes and shares of tokens do not. Only the first link compares two computations: the others are differences
of one forward pass in one precision, 0 where nothing was switched. Links are float64 [N], a row per sampled token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.spec import LOG_RATIO_LIMIT, RatioLevel
from rhotrain.model.loaded import LoadedModel
from rhotrain.train.batching import TokenTable
from rhotrain.train.config import AlgoConfig
from rhotrain.train.inner_loop import Learner

CAUSES = ("numerics", "staleness", "temperature", "truncation", "dropout", "tokenisation")
SEMANTIC = CAUSES[1:]
"""Causes that no rounding explains."""

ROUNDING = 1e-5
"""Links other than numerics count above this: a float32 logsumexp of logits near 50 rounds by 4e-6."""

FIXES = {
    "numerics": "on the same weights sampler and trainer differ by more than their budget",
    "staleness": "the samples are of an older policy and nothing weighs them; set a correction, or sampler anchors",
    "temperature": "the trainer scores at another temperature than the sampler drew at; score at the sampler's",
    "truncation": "the sampler drew from kept sets, the trainer normalises over all ids; use truncation replay",
    "dropout": "two forward passes draw two masks; set dropout to 0",
    "tokenisation": "the trainer holds other ids than were drawn; pass ids on, never text",
}


@dataclass(frozen=True, eq=False)
class Chain:
    """links: cause -> float64 [N], in the order of CAUSES. sampled, scored: the two ends of the chain, float64 [N]."""

    sampled: Tensor
    scored: Tensor
    links: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The whole log-ratio."""
        return self.scored - self.sampled

    def present(self, cause: str) -> bool:
        """Whether a semantic cause moves any token by more than rounding."""
        return bool(self.links[cause].abs().max() > ROUNDING)


def logprobs(learner: Learner, table: TokenTable, *, temperature: float, dropout: float = 0.0, seed: int = 0) -> Tensor:
    """The trainer's packed score of every token, float64 [N], with the current weights.

    dropout: its masks are drawn from `seed`, and the global random state is left as it was.
    Raises StepError for what cannot be a logprob.
    """
    loaded = learner.loaded
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), loaded.with_dropout(dropout):
        torch.manual_seed(seed)
        return learner.score(table, list(range(len(table.trajectories))), temperature=temperature).double()


def trace(
    learner: Learner, acting: TokenTable, held: TokenTable, frozen: Tensor, *, temperature: float, seed: int = 0
) -> Chain:
    """The chain from what the sampler reports to what the trainer scores.

    acting: the rollout as it was drawn, kept sets included. held: the same rollout as the trainer holds it; without
    `kept` it normalises over the full vocabulary. frozen: float64 [N], `logprobs` of `acting` under the weights that
    drew it, at the sampler's `temperature`. The trainer's temperature is the learner's, its dropout the model's.
    Raises ValueError when the two tables hold completions of other lengths: there is no token to compare with then.
    """
    if held.starts != acting.starts:
        raise ValueError("trace: the trainer's table holds completions of other lengths than were drawn")
    loaded, own = learner.loaded, learner.temperature
    moved = any(acting.staleness(loaded.policy_version))
    now = logprobs(learner, acting, temperature=temperature) if moved else frozen
    tempered = now if own == temperature else logprobs(learner, acting, temperature=own)
    view = scored_view(acting, held)
    plain = tempered if view is acting else logprobs(learner, view, temperature=own)
    full = torch.minimum(tempered, plain)  # a set weighs no more than the whole vocabulary, whatever rounding says
    noise: dict[str, Any] = {"temperature": own, "dropout": loaded.dropout, "seed": seed}
    noisy = logprobs(learner, view, **noise) if loaded.dropout else plain
    scored = noisy if _same_ids(acting, held) else logprobs(learner, held, **noise)
    sampled = acting.sampling_logprobs.double()
    # `plain - full` is rounding, and goes where rounding is counted: the links add up exactly
    numerics = frozen - sampled + (plain - full)
    links = (numerics, now - frozen, tempered - now, full - tempered, noisy - plain, scored - noisy)
    return Chain(sampled, scored, dict(zip(CAUSES, links)))


def scored_view(acting: TokenTable, held: TokenTable) -> TokenTable:
    """The tokens that were drawn, normalised as the trainer does: `acting` itself unless it ignores the kept sets."""
    return acting if acting.kept is None or held.kept is not None else replace(acting, kept=None)


def _same_ids(a: TokenTable, b: TokenTable) -> bool:
    prompts = all(x.prompt_ids == y.prompt_ids for x, y in zip(a.trajectories, b.trajectories))
    return prompts and torch.equal(a.token_ids, b.token_ids)


# ---- what a link does to the objectives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """clip_low, clip_high: GRPO's clip as values of the ratio. clamp: CISPO's upper bound. level: of the ratio."""

    clip_low: float
    clip_high: float
    clamp: float
    level: RatioLevel = "token"

    @staticmethod
    def of(algo: AlgoConfig) -> "Bounds":
        """Both objectives' bounds, whichever of them trains."""
        return Bounds(1.0 - algo.clip_low, 1.0 + algo.clip_high, algo.ratio_max, algo.ratio_level)


@dataclass(frozen=True)
class Effect:
    """What a log-ratio does, over tokens, or over completions with a sequence-level ratio.

    mean: of log_ratio; mean_abs, max_abs: of |log_ratio|; ratio_min, ratio_max: of its exponential. clip: share outside
    GRPO's clip on either side, whatever the sign of the advantage. clamp: share above CISPO's bound.
    """

    name: str
    mean: float
    mean_abs: float
    max_abs: float
    ratio_min: float
    ratio_max: float
    clip: float
    clamp: float

    @staticmethod
    def of(name: str, log_ratio: Tensor, table: TokenTable, bounds: Bounds) -> "Effect":
        """log_ratio: [N], a row per token of `table`. A sequence-level ratio is that of the mean over a completion."""
        x = log_ratio.double()
        if bounds.level == "sequence":
            x = torch.stack([x[table.rows(i)].mean() for i in range(len(table.trajectories))])
        ratio = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        outside = (ratio < bounds.clip_low) | (ratio > bounds.clip_high)
        return Effect(
            name=name,
            mean=float(x.mean()) + 0.0,  # never -0.0
            mean_abs=float(x.abs().mean()),
            max_abs=float(x.abs().max()),
            ratio_min=float(ratio.min()),
            ratio_max=float(ratio.max()),
            clip=float(outside.double().mean()),
            clamp=float((ratio > bounds.clamp).double().mean()),
        )


# ---- the verdict ----------------------------------------------------------------------------------------------------


def found_causes(chain: Chain, exceeded: Sequence[str], *, staleness_counts: bool = True) -> tuple[str, ...]:
    """The causes that count: semantic ones above rounding, numerics above their budget."""
    semantic = {cause for cause in SEMANTIC if chain.present(cause) and (cause != "staleness" or staleness_counts)}
    return tuple(cause for cause in CAUSES if cause in semantic or (cause == "numerics" and exceeded))


def verdict(found: Sequence[str], total: Effect, contained: str = "", named: Sequence[str] = ()) -> str:
    """One sentence. contained: what is there and taken care of; named: what the diagnosis found behind the numerics."""
    also = f" ({contained})" if contained else ""
    if not found:
        also_apart = " and staleness set" if contained else ", within their budget, set"
        return (
            f"clean: before any update on these samples only numerics{also_apart} trainer and sampler apart{also}; "
            "what moves the ratio later is the policy"
        )
    fixes = {**FIXES, "numerics": FIXES["numerics"] + (f" (diagnosed: {', '.join(named)})" if named else "")}
    *first, last = found
    causes = f"{', '.join(first)} and {last} set" if first else f"{last} sets"
    return (
        f"not clean: before any update on these samples {causes} trainer and sampler apart, {100 * total.clip:.1f} % "
        f"by more than GRPO's clip in all{also}: {'; '.join(f'{cause}: {fixes[cause]}' for cause in found)}"
    )


# ---- what other settings would do -----------------------------------------------------------------------------------


def temperature_ignored(learner: Learner, view: TokenTable, plain: Tensor) -> Tensor:
    """[N]: the link of a trainer that scores at temperature 1. plain: `logprobs` of `view` at the learner's."""
    return logprobs(learner, view, temperature=1.0) - plain


def truncation_ignored(learner: Learner, view: TokenTable, plain: Tensor) -> Tensor:
    """[N], at most 0: the log of the kept mass, the link of a trainer that normalises over the full vocabulary."""
    full = logprobs(learner, replace(view, kept=None), temperature=learner.temperature)
    return (full - plain).clamp(max=0.0)


def dropout_table(learner: Learner, view: TokenTable, plain: Tensor, p: float, *, seed: int = 0) -> dict[str, Tensor]:
    """What two forward passes of one batch under the same weights differ by, [N] each, with and without dropout `p`.

    Eval mode silences dropout, but gradient checkpointing with it: that is why training stays in train mode at 0.
    """

    def second_pass(probability: float) -> Tensor:
        return logprobs(learner, view, temperature=learner.temperature, dropout=probability, seed=seed) - plain

    rows = {"dropout 0, train mode": second_pass(0.0), f"dropout {p:g}, train mode": second_pass(p)}
    with eval_mode(learner.loaded):
        return rows | {f"dropout {p:g}, eval mode": second_pass(p)}


@contextmanager
def eval_mode(loaded: LoadedModel) -> Iterator[None]:
    """`model.eval()` inside, train mode again after it."""
    loaded.model.eval()
    try:
        yield
    finally:
        loaded.model.train()
