"""Numbers of a step, under TRL's names where TRL has them.

`docs/metrics.md` says how to read each of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.spec import LOG_RATIO_LIMIT
from rhotrain.train.advantages import Advantages
from rhotrain.train.batching import TokenTable
from rhotrain.train.budget import Difference
from rhotrain.train.correction import Importance, effective_sample_size, sequence_log_weights
from rhotrain.train.selection import Selection
from rhotrain.train.step import TokenResults

Metrics = dict[str, Any]


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _mean_of_known(values: Tensor) -> float | None:
    """Mean of what is not NaN; None, JSON's null, when nothing is known: 0 would look like a reward."""
    known = values[~values.isnan()]
    return float(known.double().mean()) if known.numel() else None


def reward_metrics(total_PG: Tensor, parts: dict[str, Tensor], advantages: Advantages, failures: int) -> Metrics:
    """Reward means over scorable completions; NaN marks an unscorable one."""
    metrics: Metrics = {
        "reward": _mean_of_known(total_PG),
        "reward_std": _mean(advantages.group_std_P),
        "frac_reward_zero_std": 1.0 - _mean(advantages.signal_P.double()),
        "frac_unscorable": _mean(total_PG.isnan().double()),
        "reward_failures": failures,
    }
    for name, values in parts.items():
        scored = values[~values.isnan()].double()
        metrics[f"rewards/{name}/mean"] = _mean_of_known(values)
        metrics[f"rewards/{name}/std"] = float(scored.std()) if scored.numel() > 1 else 0.0
    return metrics


def completion_metrics(table: TokenTable, num_errors: int = 0) -> Metrics:
    """Lengths in tokens, the shares that hit max_new_tokens and that failed, and the mass of the kept sets."""
    lengths = torch.tensor([t.num_tokens for t in table.trajectories], dtype=torch.float64)
    ended = torch.tensor([t.completion.finish_reason == "stop" for t in table.trajectories], dtype=torch.bool)
    metrics: Metrics = {
        "completions/clipped_ratio": _mean((~ended).double()),
        "completions/error_ratio": num_errors / max(1, num_errors + len(table.trajectories)),
        "kept_mass": _mean(table.kept_mass),
    }
    for name, values in (("length", lengths), ("terminated_length", lengths[ended])):
        metrics[f"completions/mean_{name}"] = _mean(values)
        metrics[f"completions/min_{name}"] = float(values.min()) if values.numel() else 0.0
        metrics[f"completions/max_{name}"] = float(values.max()) if values.numel() else 0.0
    return metrics


def mismatch_metrics(
    table: TokenTable, logprobs: Tensor, trajectories: Sequence[int], difference: Difference
) -> Metrics:
    """logprobs [N] of `trajectories` under the weights of the rollout's first update against the sampler's.

    On fresh samples that is what numerics, not learning, move the ratio by; on stale ones the policy's movement too.
    Weights are raw: nothing has been truncated. difference: that of these rows.
    """
    log_w_N = (logprobs - table.sampling_logprobs).double()
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in trajectories])
    ratio = log_w_N[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "sampling/sampling_logp_difference/mean": difference.mean,
        "sampling/sampling_logp_difference/p99": difference.p99,
        "sampling/sampling_logp_difference/max": difference.max,
        "sampling/importance_sampling_ratio/mean": _mean(ratio),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
        "sampling/k1": -difference.bias,
        "sampling/k3": difference.k3,
        "sampling/effective_sample_size": effective_sample_size(sequence_log_weights(log_w_N, table, trajectories)),
    }


def correction_metrics(importance: Importance | None) -> Metrics:
    """Raw weights of an off-policy correction at its own level, and the share that a bound cut."""
    if importance is None:
        return {}
    return {
        "correction/weight_mean": _mean(importance.raw),
        "correction/weight_max": float(importance.raw.max()),
        "correction/share_cut": _mean(importance.cut.double()),
    }


def selection_metrics(selection: Selection, table: TokenTable, trajectories: Sequence[int]) -> Metrics:
    """What the off-policy mask and top_entropy left of the policy term of one optimiser step."""
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in trajectories])
    metrics: Metrics = {
        "selection/tokens_kept": _mean(selection.keep[rows].double()),
        "selection/off_policy_completions": selection.off_policy,
    }
    if selection.threshold is not None:
        metrics["selection/entropy_threshold"] = selection.threshold
    return metrics


def approximate_kl(table: TokenTable, results: TokenResults) -> float:
    """Mean k3 between the old and the current policy over the tokens that ran (0 with `fresh` anchors)."""
    if table.old_logprobs is None:
        return 0.0
    log_ratio = (results.logprobs - table.old_logprobs)[results.ran].double().clamp(-20, 20)
    return _mean(log_ratio.exp() - 1 - log_ratio)


def update_metrics(table: TokenTable, results: TokenResults) -> Metrics:
    """Ratio, clip shares, entropy and KL of one optimiser step."""
    ran = results.ran
    ratio, old = results.ratio[ran].double(), table.old_logprobs
    log_ratio = ratio.log()
    k1 = 0.0 if old is None else _mean((old - results.logprobs)[ran])
    low, high = results.clipped_low[ran], results.clipped_high[ran]
    metrics: Metrics = {
        "policy_loss": results.loss,
        "ratio/mean": _mean(ratio),
        "ratio/min": float(ratio.min()) if len(ratio) else 1.0,
        "ratio/max": float(ratio.max()) if len(ratio) else 1.0,
        "log_ratio/mean": _mean(log_ratio),
        "log_ratio/abs_max": float(log_ratio.abs().max()) if len(ratio) else 0.0,
        "clip_ratio/low_mean": _mean(low.double()),
        "clip_ratio/high_mean": _mean(high.double()),
        "clip_ratio/region_mean": _mean((low | high).double()),
    }
    advantages = table.advantages[ran]
    for sign, of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
        for side, clipped in (("low", low), ("high", high)):
            metrics[f"clip_ratio/{side}_{sign}"] = _mean(clipped[of_sign].double())
    return metrics | {
        "approx_kl/k1": k1,
        "approx_kl/k3": approximate_kl(table, results),
        "kl": _mean(results.kl[ran]),
        "entropy": _mean(results.entropy[ran]),
        "update_tokens": int(ran.sum()),
    }


def staleness_metrics(staleness: Sequence[int], dropped: int) -> Metrics:
    """Per completion, the policy version at the rollout's first update minus the one that sampled it; and the rollouts
    dropped so far for being older than max_staleness."""
    return {
        "staleness/mean": sum(staleness) / max(1, len(staleness)),
        "staleness/max": max(staleness, default=0),
        "staleness/dropped": dropped,
    }


def combine_updates(updates: Sequence[Metrics]) -> Metrics:
    """One row for the updates of a rollout: means, and the extremes of minima and maxima."""
    if not updates:
        return {}
    combined: Metrics = {}
    for name in updates[0]:
        values = [u[name] for u in updates]
        if name.endswith(("/min",)):
            combined[name] = min(values)
        elif name.endswith(("/max", "abs_max")):
            combined[name] = max(values)
        elif name == "update_tokens":
            combined[name] = sum(values)
        else:
            combined[name] = math.fsum(values) / len(values)
    return combined
