"""Numbers of a step, under TRL's names where TRL has them.

`docs/metrics.md` says how to read each of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rhotrain.train.advantages import Advantages
from rhotrain.train.batching import TokenTable
from rhotrain.train.step import TokenResults

Metrics = dict[str, Any]


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _mean_of_known(values: Tensor) -> float | None:
    """Mean of what is not NaN; None, JSON's null, when nothing is known: 0 would look like a reward."""
    known = values[~values.isnan()]
    return float(known.double().mean()) if known.numel() else None


def _quantile(values: Tensor, q: float) -> float:
    """The smallest value that a share q of all is not above. (torch.quantile refuses more than 2**24 values.)"""
    if not values.numel():
        return 0.0
    return float(values.kthvalue(max(1, math.ceil(q * values.numel()))).values)


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


def mismatch_metrics(table: TokenTable, results: TokenResults) -> Metrics:
    """logprobs - sampling_logprobs at the rollout's first update: what numerics, not learning, move the ratio by."""
    difference = (results.logprobs - table.sampling_logprobs)[results.ran].double()
    ratio = difference.clamp(-20, 20).exp()
    k3 = (ratio - 1 - difference).clamp(min=0)
    return {
        "sampling/sampling_logp_difference/mean": _mean(difference.abs()),
        "sampling/sampling_logp_difference/p99": _quantile(difference.abs(), 0.99),
        "sampling/sampling_logp_difference/max": float(difference.abs().max()) if len(difference) else 0.0,
        "sampling/importance_sampling_ratio/mean": _mean(ratio),
        "sampling/importance_sampling_ratio/min": float(ratio.min()) if len(ratio) else 1.0,
        "sampling/importance_sampling_ratio/max": float(ratio.max()) if len(ratio) else 1.0,
        "sampling/k3": _mean(k3),
    }


def approximate_kl(table: TokenTable, results: TokenResults) -> float:
    """Mean k3 between the old and the current policy over the tokens that ran (0 with `fresh` anchors)."""
    if table.old_logprobs is None:
        return 0.0
    log_ratio = (results.logprobs - table.old_logprobs)[results.ran].double().clamp(-20, 20)
    return _mean(log_ratio.exp() - 1 - log_ratio)


def update_metrics(table: TokenTable, results: TokenResults) -> Metrics:
    """Ratio, clip shares, entropy and KL of one optimiser step."""
    ratio = results.ratio[results.ran].double()
    low, high = results.clipped_low[results.ran].double(), results.clipped_high[results.ran].double()
    return {
        "policy_loss": results.loss,
        "ratio/mean": _mean(ratio),
        "ratio/min": float(ratio.min()) if len(ratio) else 1.0,
        "ratio/max": float(ratio.max()) if len(ratio) else 1.0,
        "log_ratio/abs_max": float(ratio.log().abs().max()) if len(ratio) else 0.0,
        "clip_ratio/low_mean": _mean(low),
        "clip_ratio/high_mean": _mean(high),
        "clip_ratio/region_mean": _mean(torch.maximum(low, high)),
        "approx_kl": approximate_kl(table, results),
        "kl": _mean(results.kl[results.ran]),
        "entropy": _mean(results.entropy[results.ran]),
        "update_tokens": int(results.ran.sum()),
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
