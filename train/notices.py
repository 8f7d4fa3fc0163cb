"""What a run says about its ratio: whether a clip can act, and what of the ratio is not the policy's doing."""

from typing import TYPE_CHECKING

import torch

from rhotrain.train.config import Config
from rhotrain.train.step import score

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
    on_policy = config.algo.updates_per_rollout == 1 and config.rollout.max_staleness == 0
    if config.algo.updates_per_rollout == 1 and (on_policy or learner.anchor != "sampler"):
        by = "by construction" if learner.anchor == "fresh" else "up to numerics"
        return (
            f"note: one update per rollout: the ratio is 1 {by} and clip cannot act; num_iterations or "
            "minibatches_per_rollout above 1 bring it to life"
        )
    return ""


def _anchor(learner: "Learner") -> str:
    exact = learner.loaded.dtype in (torch.float32, torch.float64)
    if exact or learner.anchor != "sampler" or not learner.objective.uses_ratio:
        return ""
    name = str(learner.loaded.dtype).removeprefix("torch.")
    return (
        f"warning: old_logprobs=sampler in {name}: the rounding of the decode "
        "path alone puts tokens outside the clip; trainer, or fresh with one update per rollout, is free of it"
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
    oldest = config.rollouts_ahead * config.algo.updates_per_rollout
    contained = {
        "sampler": "the ratio contains the movement since then",
        "trainer": "the ratio does not contain that movement",
        "fresh": "the ratio is 1",
    }[learner.anchor]
    text = f"rollouts are up to {oldest} optimiser steps old at their first update; {contained}"
    if config.algo.correction != "none":
        return f"note: {text}, correction {config.algo.correction} weighs it"
    if learner.anchor == "sampler":
        return f"note: {text}"
    return f"warning: {text} and nothing corrects for it: biased; set a correction, for example sequence_mask"


@torch.no_grad()
def dropout_notice(learner: "Learner", table: "TokenTable") -> str:
    """What the model's dropout does to the ratio of these samples, with no update of the policy."""
    loaded, algo = learner.loaded, learner.algo
    batches = learner.pack(table, list(range(len(table.trajectories))))
    plain = score(loaded, table, batches, temperature=learner.temperature)
    with loaded.with_dropout():
        noisy = score(loaded, table, batches, temperature=learner.temperature)
    log_ratio = (noisy - plain).double()
    ratio = log_ratio.exp()
    outside = ((ratio < 1 - algo.clip_low) | (ratio > 1 + algo.clip_high)).double().mean()
    return (
        f"dropout {loaded.dropout:g} alone, with no update of the policy, moves the log-ratio by "
        f"{float(log_ratio.abs().mean()):.3g} on average and {float(log_ratio.abs().max()):.3g} at most and puts "
        f"{100 * float(outside):.1f} % of the tokens outside [{1 - algo.clip_low:g}, {1 + algo.clip_high:g}]"
    )
