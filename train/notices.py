"""What a run says about its ratio: whether a clip can act, and what of the ratio is not the policy's doing."""

from typing import TYPE_CHECKING

from rhotrain.train.causes import Bounds, Effect, logprobs
from rhotrain.train.config import Config

if TYPE_CHECKING:
    from rhotrain.train.batching import TokenTable
    from rhotrain.train.inner_loop import Learner


def about_ratio(config: Config, learner: "Learner") -> list[str]:
    """Notes and warnings, one line each."""
    lines = (_clip(config, learner), _anchor(learner), *_truncation(config), _staleness(config, learner))
    return [line for line in lines if line]


def _clip(config: Config, learner: "Learner") -> str:
    objective = learner.objective
    if not objective.uses_bounds:
        return ""
    if not objective.ratio_min <= 1.0 <= objective.ratio_max:
        return (
            f"warning: the bounds [{objective.ratio_min:g}, {objective.ratio_max:g}] leave out a ratio of 1: every "
            "on-policy token is clipped; ratio_min and ratio_max are values of the ratio, not distances from 1"
        )
    moves_otherwise = learner.loaded.dropout > 0.0 or (
        learner.anchor == "sampler" and (config.rollouts_ahead or not learner.loaded.full_precision)
    )
    if config.algo.updates_per_rollout > 1 or (learner.anchor != "fresh" and moves_otherwise):
        return ""
    by = "by construction" if learner.anchor == "fresh" else "up to numerics"
    return (
        f"note: one update per rollout: the ratio is 1 {by} and clip cannot act; num_iterations or "
        "minibatches_per_rollout above 1 bring it to life"
    )


def _anchor(learner: "Learner") -> str:
    objective = learner.objective
    if objective.kind == "reinforce":
        if learner.algo.updates_per_rollout == 1:
            return ""
        return (
            "warning: reinforce has no ratio: the updates after a rollout's first are off-policy, and nothing limits "
            "or weighs them; grpo, cispo and sapo do"
        )
    if learner.loaded.full_precision or learner.anchor != "sampler":
        return ""
    name = str(learner.loaded.dtype).removeprefix("torch.")
    does = "alone may put tokens outside the clip" if objective.kind == "grpo" else "is in every ratio"
    return (
        f"warning: old_logprobs=sampler in {name}: the rounding of the decode path {does}; trainer, or fresh with one "
        "update per rollout, is free of it"
    )


def _truncation(config: Config) -> list[str]:
    if not config.rollout.sampling(seed=0).truncates:
        return []
    if config.rollout.truncation == "ignore":
        return [
            "warning: truncation=ignore scores the full softmax although the kept set was sampled: the gradient is "
            "biased (kept_mass in metrics.jsonl says by how much a token's probability is off)"
        ]
    if config.algo.updates_per_rollout > 1:
        return [
            "note: truncation=replay: at the first update the gradient is that of the policy that was sampled; then "
            "the ratio is conditional on the recorded sets"
        ]
    return []


def _staleness(config: Config, learner: "Learner") -> str:
    if not config.rollouts_ahead:
        return ""
    ahead = min(config.rollouts_ahead, max(1, config.run.steps - 1))
    oldest = ahead * config.algo.updates_per_rollout
    contained = (
        "the ratio contains the movement since then"
        if learner.ratio_holds_movement
        else "the ratio does not contain that"
    )
    text = f"rollouts are up to {oldest} optimiser steps old at their first update; {contained}"
    if config.algo.kl_stop > 0.0 and learner.ratio_holds_movement:
        text += ", and kl_stop counts it"
    if config.algo.correction != "none":
        return f"note: {text}, correction {config.algo.correction} weighs it"
    if learner.ratio_holds_movement:
        return f"note: {text}"
    return f"warning: {text} and nothing corrects for it: biased; set a correction, for example sequence_mask"


def dropout_notice(learner: "Learner", table: "TokenTable") -> str:
    """What the model's dropout does to the ratio of these samples, with no update of the policy."""
    loaded, bounds = learner.loaded, Bounds.of(learner.algo)
    plain = logprobs(learner, table, temperature=learner.temperature)
    noisy = logprobs(learner, table, temperature=learner.temperature, dropout=loaded.dropout, seed=learner.seed)
    effect = Effect.of("dropout", noisy - plain, table, bounds)
    return (
        f"dropout {loaded.dropout:g} alone, with no update of the policy, moves the log-ratio by {effect.mean_abs:.3g} "
        f"on average and {effect.max_abs:.3g} at most; {100 * effect.clip:.1f} % of the ratios lie outside "
        f"[{bounds.clip_low:g}, {bounds.clip_high:g}] (grpo's clip), {100 * effect.clamp:.1f} % above {bounds.clamp:g} "
        "(cispo's clamp)"
    )
