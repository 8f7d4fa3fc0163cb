"""Frozen specs that the configuration and the kernels share. Imports no torch, so that `--help` stays fast.

An `Objective` says how one token's loss is formed from its logprob; `objective.py` holds the maths.
Bounds are absolute values of the ratio, because conventions differ: GRPO's clip (DeepSeekMath, arXiv 2402.03300, eq. 3)
is written 1 - eps_low and 1 + eps_high, CISPO's clamp (MiniMax-M1, arXiv 2506.13585, eq. 4-5) is written with
eps_high added to 1 in some trainers and absolute in others. The configuration maps conventions; the kernels see bounds.
"""

from dataclasses import dataclass
from typing import Literal

ObjectiveKind = Literal["grpo", "cispo", "reinforce"]
KLKind = Literal["none", "k2", "k3", "k3_k2grad"]

OBJECTIVE_KINDS: tuple[str, ...] = ("grpo", "cispo", "reinforce")
KL_KINDS: tuple[str, ...] = ("none", "k2", "k3", "k3_k2grad")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp, with derivative 0 outside (float32 exp overflows at 88)."""

IGNORE_INDEX = -100
"""Token id of a row that carries no loss; such a row yields exact zeros and exact zero gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Per-token loss: `weight * (importance * policy_term + beta * KL - entropy_coef * entropy)`.

    kind: `grpo`, the clipped surrogate -min(r A, clip(r, ratio_min, ratio_max) A);
        `cispo`, -sg(clamp(r, ratio_min, ratio_max)) A logprob; `reinforce`, -A logprob.
    ratio_min, ratio_max: absolute, closed bounds of the ratio (at a bound the gradient passes).
    kl: estimator of KL(policy || reference) that is added to the loss: `k2` = d^2/2, `k3` = exp(d) - d - 1 with
        d = ref_logprob - logprob, `k3_k2grad` = k3's value with k2's gradient, `none`.
        k1 as a loss is refused: its expected gradient is exactly 0.
    beta: KL coefficient. entropy_coef: coefficient of the entropy bonus.
    """

    kind: ObjectiveKind = "grpo"
    ratio_min: float = 0.8
    ratio_max: float = 1.2
    kl: KLKind = "none"
    beta: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVE_KINDS:
            raise ValueError(f"Objective.kind: {self.kind!r} is not one of {', '.join(OBJECTIVE_KINDS)}")
        if self.kl == "k1":
            raise ValueError(
                "Objective.kl: 'k1' is refused as a loss: its expected gradient is exactly 0, so it trains nothing. "
                "Use k2, k3 or k3_k2grad, or put k1 in the reward (kl_in_reward)"
            )
        if self.kl not in KL_KINDS:
            raise ValueError(f"Objective.kl: {self.kl!r} is not one of {', '.join(KL_KINDS)}")
        if not 0.0 <= self.ratio_min <= self.ratio_max:
            raise ValueError(
                f"Objective.ratio_min, ratio_max: need 0 <= ratio_min <= ratio_max, "
                f"got {self.ratio_min} and {self.ratio_max}"
            )
        if self.beta < 0.0:
            raise ValueError(f"Objective.beta: {self.beta} is negative; a KL penalty needs beta >= 0")
        if self.beta > 0.0 and self.kl == "none":
            raise ValueError(f"Objective.beta: {self.beta} has no effect with kl='none'; choose k2, k3 or k3_k2grad")

    @property
    def uses_reference(self) -> bool:
        """True when the loss needs `ref_logprobs`."""
        return self.kl != "none" and self.beta > 0.0

    @property
    def uses_ratio(self) -> bool:
        """True when the gradient depends on `old_logprobs`."""
        return self.kind != "reinforce"
