"""The scalar maths of every objective, once: from a token's logprob to its loss and to dloss/dlogprob in closed form.

    d  = clamp(logprob - old_logprob, -20, 20)      r = exp(d)
    grpo       -min(min(r, c) A, clip(r, lo, hi) A) slope -r A, 0 where a bound is active; c = dual_clip, or inf
    cispo      -sg(clip(r, lo, hi)) A logprob       slope -clip(r, lo, hi) A
    reinforce  -A logprob                           slope -A
    sapo       -A g 4 / tau, g = sigmoid(tau (r-1)) slope -A r 4 g (1 - g); tau = tau_pos if A > 0 else tau_neg
    KL: k = clamp(ref_logprob - logprob, -20, 20)   k2 = k^2 / 2, slope -k      k3 = exp(k) - k - 1, slope 1 - exp(k)
        k3_unbiased = r k3, slope -r k              k3_k2grad: k3's value, k2's slope
    loss = weight * (importance * policy + beta * KL - entropy_coef * entropy)

At sequence level r is one number for all tokens of a sequence that carry loss, d the clamped mean of their
differences, and what flows through r reaches each of them: dloss/dlogprob_k = 1/L sum_t scale_t dterm_t/dd. cispo's r
is detached, so its slope stays the token's own. The KL is always per token, and so is the r of k3_unbiased.

Sources: grpo, DeepSeekMath (2402.03300) eq. 3; its cap c, Ye et al. (1912.09729) and INTELLECT-2 (2505.07291), see
spec.py; cispo, MiniMax-M1 (2506.13585) eq. 4-5; sapo, 2511.20347; sequence level, GSPO (2507.18071); k3_unbiased,
DeepSeek-V3.2 (2512.02556). All per token, shape [N], float32 or wider. Intervals are closed: at a bound the gradient
passes, outside +-20 the derivative of a clamped log-ratio is 0. The KL term is not importance-weighted. A row with
weight 0 contributes exactly 0 to every output, also where its inputs are NaN or inf. k3's value with k2's gradient:
k3's own gradient is biased as a gradient of the KL, k2's is not (Schulman, "Approximating KL Divergence"; Tang & Munos
2506.09477); r k3 is unbiased in value and gradient when the tokens come from the old policy.
The Triton half, `policy_terms_kernel`, is in objective_triton.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import promoted_dtype
from rhotrain.kernels.spec import LOG_RATIO_LIMIT, Objective


@dataclass(frozen=True, eq=False)
class PolicyTerms:
    """Per token, [N]. loss: weighted. dlogprob, dentropy: derivative of loss.sum() in closed form.

    ratio and kl are unweighted metrics (0 in rows of weight 0; kl is 0 without ref_logprobs). ratio is the one that the
    objective used: at sequence level the sequence's. clipped_low, clipped_high: the bound is active; for grpo the
    gradient is cut, for cispo the ratio's weight is clamped.
    """

    loss: Tensor
    dlogprob: Tensor
    dentropy: Tensor
    ratio: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


# ---- the policy term ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Term:
    """One policy term: its value (differentiable in logprobs) and the active bounds.

    direct: dvalue/dlogprob at a constant ratio. through_ratio: dvalue/dlog_ratio, before the limit of +-20.
    """

    value: Tensor
    direct: Tensor
    through_ratio: Tensor
    low: Tensor
    high: Tensor


PolicyTerm = Callable[[Tensor, Tensor, Tensor, Objective], _Term]


def _grpo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    low = (advantages < 0) & (ratio < objective.ratio_min)
    high = (advantages > 0) & (ratio > objective.ratio_max)
    clipped, capped = ratio.clamp(objective.ratio_min, objective.ratio_max), ratio
    if objective.dual_clip is not None:  # for A > 0 the minimum below never takes it: dual_clip >= ratio_max
        high = high | ((advantages < 0) & (ratio > objective.dual_clip))
        capped = ratio.clamp(max=objective.dual_clip)
    value = -torch.minimum(capped * advantages, clipped * advantages)
    return _Term(value, torch.zeros_like(ratio), torch.where(low | high, 0.0, -ratio * advantages), low, high)


def _cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    slope = -ratio.detach().clamp(objective.ratio_min, objective.ratio_max) * advantages
    low, high = ratio < objective.ratio_min, ratio > objective.ratio_max
    return _Term(slope * logprobs, slope, torch.zeros_like(slope), low, high)


def _reinforce(logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return _Term(-advantages * logprobs, -advantages, torch.zeros_like(ratio), never, never)


def _sapo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> _Term:
    tau = torch.where(advantages > 0, objective.sapo_tau_pos, torch.full_like(advantages, objective.sapo_tau_neg))
    x = tau * (ratio - 1.0)
    gate = torch.sigmoid(x)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    # sigmoid(-x) is 1 - gate without the cancellation: in float32 the subtraction is off by 1e-3 at x = 10
    slope = -advantages * ratio * (4.0 * gate * torch.sigmoid(-x))
    return _Term(-advantages * gate * (4.0 / tau), torch.zeros_like(ratio), slope, never, never)


POLICY_TERMS: dict[str, PolicyTerm] = {"grpo": _grpo, "cispo": _cispo, "reinforce": _reinforce, "sapo": _sapo}


# ---- the KL term ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _LogRatio:
    """A difference of logprobs, clamped to the limit, and where it is inside (closed)."""

    value: Tensor
    inside: Tensor

    @staticmethod
    def of(difference: Tensor) -> "_LogRatio":
        return _LogRatio(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), difference.abs() <= LOG_RATIO_LIMIT)


def _k3_value(k: Tensor) -> Tensor:
    """exp(k) - 1 - k. Up to |k| = 1 by its own power series: near 0 expm1(k) - k keeps few of its bits, or none."""
    last = 19 if k.dtype == torch.float64 else 12
    series = torch.full_like(k, 1.0 / math.factorial(last))
    for n in range(last - 1, 1, -1):
        series = series * k + 1.0 / math.factorial(n)
    return torch.where(k.abs() <= 1.0, k.square() * series, torch.expm1(k) - k)


def _k2(k: _LogRatio, token: _LogRatio) -> tuple[Tensor, Tensor]:
    return k.value.square() / 2, torch.where(k.inside, -k.value, 0.0)


def _k3(k: _LogRatio, token: _LogRatio) -> tuple[Tensor, Tensor]:
    return _k3_value(k.value), torch.where(k.inside, -torch.expm1(k.value), 0.0)


def _k3_k2grad(k: _LogRatio, token: _LogRatio) -> tuple[Tensor, Tensor]:
    k2, slope = _k2(k, token)
    return _k3_value(k.value.detach()) + (k2 - k2.detach()), slope


def _k3_unbiased(k: _LogRatio, token: _LogRatio) -> tuple[Tensor, Tensor]:
    k3, slope = _k3(k, token)
    ratio = token.value.exp()
    apart = ratio * (slope + torch.where(token.inside, k3, 0.0))
    # inside both limits the two parts are r (k3 + 1 - exp(k)) = -r k, which one product gives to the last bit
    return ratio * k3, torch.where(k.inside & token.inside, -ratio * k.value, apart)


KL_TERMS: dict[str, Callable[[_LogRatio, _LogRatio], tuple[Tensor, Tensor]]] = {
    "k2": _k2,
    "k3": _k3,
    "k3_k2grad": _k3_k2grad,
    "k3_unbiased": _k3_unbiased,
}
"""(value, dvalue/dlogprob) from the log-ratios to the reference (k) and to the old policy (token)."""


# ---- sequences ------------------------------------------------------------------------------------------------------


class _SequenceMean(torch.autograd.Function):
    """[N] -> [N]: each live row gets the mean over the live rows of its sequence, the others 0.

    As a matrix this is symmetric, so the backward pass is the function itself. The sums run one sequence at a time (in
    row order on a CPU, by one thread block on CUDA) and in float64: what a neighbour's sequence or the device's timing
    could move lies far below float32 (index_add and a parallel cumsum have no fixed order on CUDA), and the mean keeps
    the 1e-4 that GSPO's clip is about.
    """

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, groups: "_Sequences") -> Tensor:
        ctx.groups = groups
        mean_S = groups.sums(x_N) / groups.live_S
        return torch.where(groups.alive, mean_S[groups.sequence_N], 0.0).to(x_N.dtype)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _SequenceMean.apply(grad_N, ctx.groups), None


@dataclass(frozen=True, eq=False)
class _Sequences:
    """Which rows belong together. order_N: rows sorted by label, stable. sequence_N: number of a row's sequence.

    lengths_S: rows per sequence. live_S: those with weight, at least 1 (float64). alive: bool [N].
    """

    order_N: Tensor
    sequence_N: Tensor
    lengths_S: Tensor
    live_S: Tensor
    alive: Tensor

    @staticmethod
    def of(labels_N: Tensor, alive: Tensor) -> "_Sequences":
        order = torch.argsort(labels_N, stable=True)
        _, sorted_sequence, lengths = torch.unique_consecutive(labels_N[order], return_inverse=True, return_counts=True)
        sequence = torch.empty_like(order)
        sequence[order] = sorted_sequence  # each row once
        groups = _Sequences(order, sequence, lengths, lengths, alive)
        live = groups.sums(alive).clamp(min=1.0)
        return _Sequences(order, sequence, lengths, live, alive)

    def sums(self, x_N: Tensor) -> Tensor:
        """float64 [S]."""
        if x_N.shape[0] == 0:  # segment_reduce refuses an empty tensor
            return x_N.double()
        # unsafe: do not check that the lengths fit. They come from unique_consecutive of these rows, and the check
        # would wait for the device twice.
        x_sorted = x_N.detach()[self.order_N].double()
        return torch.segment_reduce(x_sorted, "sum", lengths=self.lengths_S, unsafe=True)

    def mean(self, x_N: Tensor) -> Tensor:
        """Differentiable; see _SequenceMean."""
        mean: Tensor = _SequenceMean.apply(x_N, self)
        return mean


def _sequences(sequence_ids: Tensor | None, alive: Tensor) -> _Sequences:
    if sequence_ids is None:
        raise ValueError("sequence_ids: missing, but objective.ratio_level='sequence' needs int64 [N], a label per row")
    if sequence_ids.dtype != torch.int64 or sequence_ids.shape != alive.shape:
        raise ValueError(
            f"sequence_ids: need int64 {list(alive.shape)}, got {sequence_ids.dtype} {list(sequence_ids.shape)}"
        )
    return _Sequences.of(sequence_ids, alive)


# ---- the whole ------------------------------------------------------------------------------------------------------


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
    sequence_ids: Tensor | None = None,
) -> PolicyTerms:
    """Loss, closed-form gradient and metrics per token; everything [N]. old_logprobs None means `logprobs`, detached.

    sequence_ids: int64 [N], any labels, in any order; the rows of one label are one sequence, and those of weight 0
    stay out of its mean. Read at sequence level only, where all rows of a sequence must come in one call.
    `loss` is also differentiable in `logprobs` and `entropy` through autograd; `dlogprob` and `dentropy` are the same
    gradient without a graph. ValueError when ref_logprobs, entropy or sequence_ids is missing though the objective
    needs it, or when one of the constants requires grad.
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
    sequences = _sequences(sequence_ids, alive) if objective.ratio_level == "sequence" else None

    def constant(x: Tensor) -> Tensor:
        """In the maths' type, and 0 in rows of weight 0, so that nothing there can turn into inf * 0."""
        return torch.where(alive, x.to(dtype), 0.0)

    lp, advantage, weight = constant(logprobs), constant(advantages), constant(weights)
    difference = lp - (lp.detach() if old_logprobs is None else constant(old_logprobs))
    token = _LogRatio.of(difference)
    log_ratio = token if sequences is None else _LogRatio.of(sequences.mean(difference))
    ratio = log_ratio.value.exp()
    term = POLICY_TERMS[objective.kind](lp, ratio, advantage, objective)
    scale = weight if importance is None else weight * constant(importance)
    loss = scale * term.value
    through = torch.where(log_ratio.inside, scale * term.through_ratio.detach(), 0.0)
    dlogprob = scale * term.direct + (through if sequences is None else sequences.mean(through))

    kl = torch.zeros_like(weight)
    if ref_logprobs is not None and objective.kl != "none":
        kl, kl_slope = KL_TERMS[objective.kl](_LogRatio.of(constant(ref_logprobs) - lp), token)
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
