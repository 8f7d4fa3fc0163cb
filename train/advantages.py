"""Rewards [P, G] to advantages [P, G].

    A[p, g] = (r[p, g] - mean of group p) / (std + eps)

`group` scaling is GRPO's (DeepSeekMath, arXiv 2402.03300, section 4.1.2), none is Dr. GRPO's (arXiv 2503.20783),
`batch` divides by the std of all scorable rewards (ScaleRL, arXiv 2510.13786). NaN marks an unscorable completion: it
is left out of mean and std and gets advantage 0. A group whose scorable rewards are all equal (one lone scorable reward
is such a group) has advantages of exactly 0: subtracting a rounded mean would leave 1e-17, which 1 / eps makes larger.

With several rewards `combined_advantages` normalises each of them in its group before they are added (GDPO, arXiv
2601.05242): otherwise a reward of wide spread drowns one of narrow spread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rhotrain.train.config import AdvantageScale, AlgoConfig

ROUNDING = 1e-12
"""A sum of normalised rewards, numbers of size 1, below this is 0 up to rounding."""


@dataclass(frozen=True)
class Advantages:
    """values_PG float64, 0 where unscorable; signal_P bool, False for a group whose advantages are all 0;
    group_std_P float64, the spread of each group's scorable rewards (0 with fewer than two)."""

    values_PG: Tensor
    signal_P: Tensor
    group_std_P: Tensor


def _std(values: Tensor, kind: Literal["sample", "population"]) -> Tensor:
    if values.numel() < 2:
        return values.new_zeros(())
    return values.std(correction=1 if kind == "sample" else 0)


def group_advantages(
    rewards_PG: Tensor,
    *,
    scale: AdvantageScale = "group",
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-4,
) -> Advantages:
    """Advantages of P groups of G completions.

    rewards_PG: float [P, G]; NaN is unscorable. Raises ValueError on infinite rewards and on a wrong shape.
    """
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG: need shape [P, G], got {tuple(rewards_PG.shape)}")
    rewards = rewards_PG.detach().to(device="cpu", dtype=torch.float64)
    if torch.isinf(rewards).any():
        p, g = torch.isinf(rewards).nonzero()[0].tolist()
        raise ValueError(
            f"rewards_PG: infinite reward for prompt {p}, completion {g}; return NaN for an unscorable one"
        )
    values = torch.zeros_like(rewards)
    group_std = rewards.new_zeros(len(rewards))
    scorable = ~rewards.isnan()
    batch_std = _std(rewards[scorable], std)
    for p, (row, ok) in enumerate(zip(rewards, scorable)):
        known = row[ok]
        if known.numel() < 2 or bool(known.max() == known.min()):
            continue
        group_std[p] = _std(known, std)
        centred = known - known.mean()
        if scale == "group":
            centred = centred / (group_std[p] + eps)
        elif scale == "batch":
            centred = centred / (batch_std + eps)
        values[p, ok] = centred
    return Advantages(values, (values != 0).any(dim=1), group_std)


def combined_advantages(
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    *,
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-4,
) -> Advantages:
    """Advantages of several rewards, each normalised by itself (GDPO, arXiv 2601.05242, section 3.1; TRL's
    `normalize_then_sum`).

        S[p, g] = sum over k of w_k (r_k[p, g] - mean of group p) / (std of group p + eps)
        A = S / (std of S over the batch + eps)

    parts: float [P, G] per reward; those of weight 0 are left out. A completion that one of the others could not score
    (NaN) has advantage 0 and stays out of every mean and std. The mean of S over the batch, which the paper subtracts,
    is 0 already: each group's sum is. group_std_P: the spread of each group's weighted sum.
    Raises ValueError when no weight differs from 0, and as `group_advantages` does.
    """
    counted = {name: part.detach().to(device="cpu", dtype=torch.float64) for name, part in parts.items()}
    counted = {name: part for name, part in counted.items() if weights[name] != 0}
    if not counted:
        raise ValueError(f"weights: all of {dict(weights)} are 0; at least one reward must count")
    total_PG = sum((weights[name] * part for name, part in counted.items()), torch.zeros(()))
    unscorable = total_PG.isnan()
    values = torch.zeros_like(total_PG)
    for name, part in counted.items():
        values += weights[name] * group_advantages(part.masked_fill(unscorable, torch.nan), std=std, eps=eps).values_PG
    values[values.abs() < ROUNDING] = 0.0  # rewards that cancel
    if bool((values != 0).any()):
        values = values / (_std(values[~unscorable], std) + eps)
    plain = group_advantages(total_PG, std=std, eps=eps)
    return Advantages(values, (values != 0).any(dim=1), plain.group_std_P)


def advantages_of(
    algo: AlgoConfig, total_PG: Tensor, parts: Mapping[str, Tensor], weights: Mapping[str, float]
) -> Advantages:
    """What `algo` asks for: the total's advantages, or with `reward_aggregation` normalize_then_sum the combination of
    the parts', over the completions whose total is not NaN. A penalty counts where it is in the total already."""
    if algo.reward_aggregation == "normalize_then_sum":
        scorable = ~total_PG.isnan()
        scored = {name: part.where(scorable, torch.nan) for name, part in parts.items()}
        return combined_advantages(scored, weights, std=algo.advantage_std, eps=algo.advantage_eps)
    return group_advantages(total_PG, scale=algo.advantage_scale, std=algo.advantage_std, eps=algo.advantage_eps)
