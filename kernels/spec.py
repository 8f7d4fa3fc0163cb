"""Frozen specs that the configuration and the kernels share. Imports no torch, so that `--help` stays fast.

An `Objective` says how one token's loss is formed from its logprob; `objective.py` holds the maths.
Bounds are absolute values of the ratio, because conventions differ: GRPO's clip (DeepSeekMath, arXiv 2402.03300, eq. 3)
is written 1 - eps_low and 1 + eps_high, CISPO's clamp (MiniMax-M1, arXiv 2506.13585, eq. 4-5) is written with
eps_high added to 1 in some trainers and absolute in others. The configuration maps conventions; the kernels see bounds.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

ObjectiveKind = Literal["grpo", "cispo", "reinforce", "sapo"]
RatioLevel = Literal["token", "sequence"]
KLKind = Literal["none", "k2", "k3", "k3_k2grad", "k3_unbiased"]

OBJECTIVE_KINDS: tuple[str, ...] = ("grpo", "cispo", "reinforce", "sapo")
RATIO_LEVELS: tuple[str, ...] = ("token", "sequence")
KL_KINDS: tuple[str, ...] = ("none", "k2", "k3", "k3_k2grad", "k3_unbiased")

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp, with derivative 0 outside (float32 exp overflows at 88)."""

IGNORE_INDEX = -100
"""Token id of a row that carries no loss; such a row yields exact zeros and exact zero gradients."""


class Cell(NamedTuple):
    """One way to form the policy term: which kind, whose ratio, and whether the ratio is capped where A < 0."""

    kind: str
    ratio_level: str
    dual_clip: bool

    def __str__(self) -> str:
        return f"{self.kind}/{self.ratio_level}" + ("/dual_clip" if self.dual_clip else "")


CELLS: tuple[Cell, ...] = (
    Cell("grpo", "token", False),
    Cell("grpo", "token", True),
    Cell("grpo", "sequence", False),
    Cell("grpo", "sequence", True),
    Cell("cispo", "token", False),
    Cell("cispo", "sequence", False),
    Cell("reinforce", "token", False),
    Cell("sapo", "token", False),
)
"""The policy terms that exist. Each goes with every `kl`, and with any entropy_coef."""

_NO_CELL: dict[tuple[str, str], str] = {
    ("cispo", "dual_clip"): "ratio_max already caps the weight of every token",
    ("reinforce", "ratio_level"): "it has no ratio",
    ("reinforce", "dual_clip"): "it has no ratio to cap",
    ("sapo", "ratio_level"): "its gate is per token",
    ("sapo", "dual_clip"): "its gate already fades the gradient out as the ratio grows",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Per-token loss: `weight * (importance * policy_term + beta * KL - entropy_coef * entropy)`.

    kind: `grpo`, the clipped surrogate -min(r A, clip(r, ratio_min, ratio_max) A);
        `cispo`, -sg(clamp(r, ratio_min, ratio_max)) A logprob; `reinforce`, -A logprob;
        `sapo` (Gao et al., arXiv 2511.20347), -A sigmoid(tau (r - 1)) 4 / tau with tau = sapo_tau_pos where A > 0, else
        sapo_tau_neg: a gate in place of a clip, whose slope at r = 1 is -A.
    ratio_level: `token`, r = pi_new / pi_old of the token; `sequence` (GSPO, arXiv 2507.18071), r = the exponential of
        the log-ratio's mean over the sequence's tokens that carry loss, the same for all of them.
    ratio_min, ratio_max: absolute, closed bounds of the ratio (at a bound the gradient passes); ratio_max may be inf.
        Values of the ratio, not distances from 1: for grpo they must hold 1 between them.
    dual_clip: grpo only; where A < 0 the ratio counts as at most this, and the gradient is 0 beyond. > 1, >= ratio_max.
        Ye et al. (arXiv 1912.09729, dual clip) write -max(min(r A, clip(r) A), c A), INTELLECT-2 (arXiv 2505.07291,
        delta) writes -min(min(r, c) A, clip(r) A). With c >= ratio_max both are one function: for A < 0 either is
        -min(max(r, ratio_min), c) A, and for A > 0 c stays out of it, since min(r, clip(r)) <= ratio_max <= c.
    kl: estimator of KL(policy || reference) that is added to the loss: `k2` = d^2/2, `k3` = exp(d) - d - 1 with
        d = ref_logprob - logprob, `k3_k2grad` = k3's value with k2's gradient, `k3_unbiased` (DeepSeek-V3.2,
        arXiv 2512.02556) = r k3 with the gradient through the token's ratio r too: -r d, `none`.
        k1 as a loss is refused: its expected gradient is exactly 0.
    beta: KL coefficient. entropy_coef: coefficient of the entropy bonus. Both finite.
    ValueError for a combination that is not in CELLS, and for a value out of range.
    """

    kind: ObjectiveKind = "grpo"
    ratio_level: RatioLevel = "token"
    ratio_min: float = 0.8
    ratio_max: float = 1.2
    dual_clip: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    kl: KLKind = "none"
    beta: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVE_KINDS:
            raise ValueError(f"Objective.kind: {self.kind!r} is not one of {', '.join(OBJECTIVE_KINDS)}")
        if self.ratio_level not in RATIO_LEVELS:
            raise ValueError(f"Objective.ratio_level: {self.ratio_level!r} is not one of {', '.join(RATIO_LEVELS)}")
        if self.kl == "k1":
            raise ValueError(
                "Objective.kl: 'k1' is refused as a loss: its expected gradient is exactly 0, so it trains nothing. "
                f"Use {_listed(KL_KINDS[1:])}, or put k1 in the reward (kl_in_reward)"
            )
        if self.kl not in KL_KINDS:
            raise ValueError(f"Objective.kl: {self.kl!r} is not one of {', '.join(KL_KINDS)}")
        self._check_cell()
        self._check_ranges()

    def _check_cell(self) -> None:
        if (self.kind, self.ratio_level, self.dual_clip is not None) in CELLS:
            return
        name = "dual_clip" if (self.kind, self.ratio_level, False) in CELLS else "ratio_level"
        raise ValueError(
            f"Objective.{name}: {getattr(self, name)!r} does not go with kind={self.kind!r}: "
            f"{_NO_CELL[self.kind, name]}. What exists: {', '.join(map(str, CELLS))}"
        )

    def _check_ranges(self) -> None:
        if not (0.0 <= self.ratio_min <= self.ratio_max and _finite(self.ratio_min)):
            raise ValueError(
                f"Objective.ratio_min, ratio_max: need 0 <= ratio_min <= ratio_max and a finite ratio_min, "
                f"got {self.ratio_min} and {self.ratio_max}; ratio_min=0 and ratio_max=inf leave a side open"
            )
        if self.kind == "grpo" and not self.ratio_min <= 1.0 <= self.ratio_max:
            sign = ">" if self.ratio_max < 1.0 else "<"
            raise ValueError(
                f"Objective.ratio_min, ratio_max: {self.ratio_min} and {self.ratio_max} leave out 1: the gradient of "
                f"every on-policy token with A {sign} 0 would be 0. They are values of the ratio, not distances from "
                "1: a clip of 0.2 is ratio_min=0.8, ratio_max=1.2"
            )
        if self.dual_clip is not None and not (
            _finite(self.dual_clip) and self.dual_clip > 1.0 and self.dual_clip >= self.ratio_max
        ):
            raise ValueError(
                f"Objective.dual_clip: need a finite value > 1 and >= ratio_max ({self.ratio_max}), "
                f"got {self.dual_clip}; None does not cap"
            )
        for name, tau in (("sapo_tau_pos", self.sapo_tau_pos), ("sapo_tau_neg", self.sapo_tau_neg)):
            if not (_finite(tau) and tau > 0.0):
                raise ValueError(f"Objective.{name}: need a finite value > 0, got {tau}")
        if not _finite(self.entropy_coef):
            raise ValueError(f"Objective.entropy_coef: need a finite value, got {self.entropy_coef}")
        if not _finite(self.beta):
            raise ValueError(f"Objective.beta: need a finite value, got {self.beta}")
        if self.beta < 0.0:
            raise ValueError(f"Objective.beta: {self.beta} is negative; a KL penalty needs beta >= 0")
        if self.beta > 0.0 and self.kl == "none":
            raise ValueError(
                f"Objective.beta: {self.beta} has no effect with kl='none'; choose {_listed(KL_KINDS[1:])}"
            )

    @property
    def uses_reference(self) -> bool:
        """True when the loss needs `ref_logprobs`."""
        return self.kl != "none" and self.beta > 0.0

    @property
    def uses_ratio(self) -> bool:
        """True when the gradient depends on `old_logprobs`."""
        return self.kind != "reinforce" or (self.kl == "k3_unbiased" and self.beta > 0.0)

    @property
    def uses_bounds(self) -> bool:
        """True when ratio_min and ratio_max act."""
        return self.kind in ("grpo", "cispo")


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _finite(value: float) -> bool:
    """math.isfinite in comparisons, which torch.compile can trace when the number varies between calls."""
    return -inf < value < inf
