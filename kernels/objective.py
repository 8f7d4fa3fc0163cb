"""The scalar maths of every objective, once: from a token's logprob to its loss and to dloss/dlogprob in closed form.

    d  = clamp(logprob - old_logprob, -20, 20)      r = exp(d)
    grpo       -min(r A, clip(r, lo, hi) A)         slope -r A, 0 where the bound is active
    cispo      -sg(clip(r, lo, hi)) A logprob       slope -clip(r, lo, hi) A
    reinforce  -A logprob                           slope -A
    KL: k = clamp(ref_logprob - logprob, -20, 20)   k2 = k^2 / 2, slope -k      k3 = exp(k) - k - 1, slope 1 - exp(k)
    loss = weight * (importance * policy + beta * KL - entropy_coef * entropy)

Sources: grpo, DeepSeekMath (2402.03300) eq. 3; cispo, MiniMax-M1 (2506.13585) eq. 4-5.
All per token, shape [N], float32 or wider. Intervals are closed: at a bound the gradient passes, outside +-20 the
derivative of a clamped log-ratio is 0. The KL term is not importance-weighted. A row with weight 0 contributes
exactly 0 to every output, also where its inputs are NaN or inf. k3's value with k2's gradient (`k3_k2grad`): k3's own
gradient is biased as a gradient of the KL, k2's is not (Schulman, "Approximating KL Divergence"; Tang & Munos
2506.09477).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import promoted_dtype
from rhotrain.kernels.spec import LOG_RATIO_LIMIT, Objective


@dataclass(frozen=True, eq=False)
class PolicyTerms:
    """Per token, [N]. loss: weighted. dlogprob, dentropy: derivative of loss.sum() in closed form.

    ratio and kl are unweighted metrics (0 in rows of weight 0; kl is 0 without ref_logprobs). clipped_low,
    clipped_high: the bound is active; for grpo the gradient is cut, for cispo the ratio's weight is clamped.
    """

    loss: Tensor
    dlogprob: Tensor
    dentropy: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True, eq=False)
class _Term:
    """One policy term: its value (differentiable in logprobs) and slope = dvalue/dlogprob, and the active bounds."""

    value: Tensor
    slope: Tensor
    low: Tensor
    high: Tensor


PolicyTerm = Callable[[Tensor, Tensor, Tensor, Tensor, Objective], _Term]


def _grpo(logprobs: Tensor, ratio: Tensor, inside: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    low = (advantages < 0) & (ratio < objective.ratio_min)
    high = (advantages > 0) & (ratio > objective.ratio_max)
    clipped = ratio.clamp(objective.ratio_min, objective.ratio_max)
    value = -torch.minimum(ratio * advantages, clipped * advantages)
    passes = inside & ~(low | high)
    return _Term(value, torch.where(passes, -ratio * advantages, 0.0), low, high)


def _cispo(logprobs: Tensor, ratio: Tensor, inside: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    slope = -ratio.detach().clamp(objective.ratio_min, objective.ratio_max) * advantages
    return _Term(slope * logprobs, slope, ratio < objective.ratio_min, ratio > objective.ratio_max)


def _reinforce(logprobs: Tensor, ratio: Tensor, inside: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    never = torch.zeros_like(inside)
    return _Term(-advantages * logprobs, -advantages, never, never)


POLICY_TERMS: dict[str, PolicyTerm] = {"grpo": _grpo, "cispo": _cispo, "reinforce": _reinforce}


def _k2(k: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    return k.square() / 2, torch.where(inside, -k, 0.0)


def _k3(k: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    growth = torch.expm1(k)
    return growth - k, torch.where(inside, -growth, 0.0)


def _k3_k2grad(k: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    k2, slope = _k2(k, inside)
    return _k3(k.detach(), inside)[0] + (k2 - k2.detach()), slope


KL_TERMS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "k2": _k2,
    "k3": _k3,
    "k3_k2grad": _k3_k2grad,
}


def _bounded_difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b clamped to the log-ratio limit, and where it is inside (closed)."""
    difference = a - b
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), difference.abs() <= LOG_RATIO_LIMIT


def refuse_grad(**constants: Tensor | None) -> None:
    """ValueError if a tensor that the loss treats as a constant carries a graph."""
    for name, value in constants.items():
        if value is not None and value.requires_grad:
            why = (
                "exp(logprob - old_logprob) would be exp(x - x) = 1 with zero gradient, and the advantage would "
                "silently train nothing"
                if name == "old_logprobs"
                else "it is a constant of the loss, and no gradient is formed for it"
            )
            raise ValueError(f"{name}: requires grad. {why}. Pass {name}.detach()")


def policy_terms(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    objective: Objective,
    ref_logprobs: Tensor | None = None,
    importance: Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyTerms:
    """Loss, closed-form gradient and metrics per token; everything [N]. old_logprobs None means `logprobs`, detached.

    `loss` is also differentiable in `logprobs` and `entropy` through autograd; `dlogprob` and `dentropy` are the same
    gradient without a graph. ValueError when ref_logprobs or entropy is missing though the objective needs it, or
    when one of the constants requires grad.
    """
    refuse_grad(
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        ref_logprobs=ref_logprobs,
        importance=importance,
    )
    if objective.uses_reference and ref_logprobs is None:
        raise ValueError(
            f"ref_logprobs: missing, but objective.kl={objective.kl!r} with beta={objective.beta} needs it"
        )
    if objective.entropy_coef != 0.0 and entropy is None:
        raise ValueError(f"entropy: missing, but objective.entropy_coef={objective.entropy_coef} needs it")
    dtype = promoted_dtype(logprobs)
    alive = weights != 0

    def constant(x: Tensor) -> Tensor:
        """In the maths' type, and 0 in rows of weight 0, so that nothing there can turn into inf * 0."""
        return torch.where(alive, x.to(dtype), 0.0)

    lp, advantage, weight = constant(logprobs), constant(advantages), constant(weights)
    log_ratio, inside = _bounded_difference(lp, lp.detach() if old_logprobs is None else constant(old_logprobs))
    ratio = log_ratio.exp()
    term = POLICY_TERMS[objective.kind](lp, ratio, inside, advantage, objective)
    scale = weight if importance is None else weight * constant(importance)
    loss, dlogprob = scale * term.value, scale * term.slope.detach()

    kl = torch.zeros_like(weight)
    if ref_logprobs is not None and objective.kl != "none":
        kl, kl_slope = KL_TERMS[objective.kl](*_bounded_difference(constant(ref_logprobs), lp))
        loss = loss + objective.beta * weight * kl
        dlogprob = dlogprob + objective.beta * weight * kl_slope.detach()
    dentropy = -objective.entropy_coef * weight
    if entropy is not None and objective.entropy_coef != 0.0:
        loss = loss + dentropy * constant(entropy)
    return PolicyTerms(
        loss,
        dlogprob,
        dentropy,
        torch.where(alive, ratio.detach(), 0.0),
        kl.detach(),
        term.low & alive,
        term.high & alive,
    )
