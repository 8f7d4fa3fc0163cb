"""objective.py's token-level maths for Triton: one device function, and an Objective as plain arguments.

    loss, dlogprob, dentropy, ratio, kl, clipped_low, clipped_high = policy_terms_kernel(logprob, ..., KIND=..., KL=...)

Float32, on scalars (one row per program) and on blocks (one row per lane) alike. Kernels call it; it launches
nothing. The formulas, and where they were published, are in objective.py.
Numerics: no libdevice, since the interpreter has none. exp is 2^n 2^f with n = round(x / ln 2) and f from a two-part
ln 2: the product x * log2(e) alone is off by 1e-6 at x = 20, where float32 exp is good to 1e-7. k3 = exp(k) - k - 1 and
expm1 = k + k3 come from k3's power series up to |k| = 1, where the subtraction would cancel; beyond it does not.
Sequence level is not formed here: its ratio needs a pass over all rows first.
"""

import math
from typing import Any, cast

from rhotrain.kernels.backend import LOG2E, jit, tl
from rhotrain.kernels.spec import LOG_RATIO_LIMIT, KLKind, Objective, ObjectiveKind, RatioLevel

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 15 significant bits, so that n * LN2_HIGH is exact
LN2_LOW = tl.constexpr(1.4286068202862268e-06)


# ---- elementary functions -------------------------------------------------------------------------------------------


@jit
def _exp(x: tl.tensor) -> tl.tensor:
    """exp for |x| <= 80, exactly 1 at 0; beyond it is the caller's to clamp."""
    n = tl.floor(x * LOG2E + 0.5)
    rest = (x - n * LN2_HIGH) - n * LN2_LOW
    return tl.exp2(rest * LOG2E) * tl.exp2(n)


@jit
def _k3_and_expm1(k: tl.tensor) -> tl.tensor:
    """(exp(k) - 1 - k, exp(k) - 1)."""
    series = k * 2.08767569878681e-09 + 2.505210838544172e-08
    series = series * k + 2.755731922398589e-07
    series = series * k + 2.7557319223985893e-06
    series = series * k + 2.48015873015873e-05
    series = series * k + 0.0001984126984126984
    series = series * k + 0.001388888888888889
    series = series * k + 0.008333333333333333
    series = series * k + 0.041666666666666664
    series = series * k + 0.16666666666666666
    series = series * k + 0.5
    near = k * k * series
    growth = _exp(k) - 1.0
    small = tl.abs(k) <= 1.0
    return tl.where(small, near, growth - k), tl.where(small, k + near, growth)


@jit
def _log_ratio(difference: tl.tensor) -> tl.tensor:
    """(clamped to the limit, inside it); NaN stays NaN."""
    capped = tl.where(difference > LIMIT, LIMIT, difference)
    return tl.where(capped < -LIMIT, -LIMIT, capped), tl.abs(difference) <= LIMIT


# ---- the terms: value, slope and active bounds ----------------------------------------------------------------------


@jit
def _grpo(
    ratio: tl.tensor, advantage: tl.tensor, ratio_min: tl.tensor, ratio_max: tl.tensor, dual_clip: tl.tensor
) -> tl.tensor:
    low = (advantage < 0.0) & (ratio < ratio_min)
    over = (advantage > 0.0) & (ratio > ratio_max)
    high = over | ((advantage < 0.0) & (ratio > dual_clip))
    bounded = tl.where(high, tl.where(over, ratio_max, dual_clip), tl.where(low, ratio_min, ratio))
    return -bounded * advantage, tl.where(low | high, 0.0, -ratio * advantage), low, high


@jit
def _sapo(ratio: tl.tensor, advantage: tl.tensor, tau_pos: tl.tensor, tau_neg: tl.tensor) -> tl.tensor:
    tau = tl.where(advantage > 0.0, tau_pos, tau_neg)
    x = tau * (ratio - 1.0)
    far = tl.abs(x)
    small = tl.where(far > 80.0, 0.0, _exp(-far))  # exp(-|x|): with it g (1 - g) does not cancel
    gate = tl.where(x >= 0.0, 1.0, small) / (1.0 + small)
    slope = -advantage * ratio * (4.0 * small / ((1.0 + small) * (1.0 + small)))
    return -advantage * gate * (4.0 / tau), slope


@jit
def _kl(k: tl.tensor, k_inside: tl.tensor, ratio: tl.tensor, inside: tl.tensor, KL: tl.constexpr) -> tl.tensor:
    """(value, slope); KL is not none."""
    if KL == "k2":
        return k * k * 0.5, tl.where(k_inside, -k, 0.0)
    else:
        k3, expm1 = _k3_and_expm1(k)
        if KL == "k3":
            return k3, tl.where(k_inside, -expm1, 0.0)
        elif KL == "k3_k2grad":
            return k3, tl.where(k_inside, -k, 0.0)
        else:
            tl.static_assert(KL == "k3_unbiased")
            apart = ratio * (tl.where(inside, k3, 0.0) - tl.where(k_inside, expm1, 0.0))
            return ratio * k3, tl.where(inside & k_inside, -ratio * k, apart)


# ---- the whole ------------------------------------------------------------------------------------------------------


@jit
def policy_terms_kernel(
    logprob: tl.tensor,
    old_logprob: tl.tensor,
    ref_logprob: tl.tensor,
    advantage: tl.tensor,
    weight: tl.tensor,
    importance: tl.tensor,
    entropy: tl.tensor,
    ratio_min: tl.tensor,
    ratio_max: tl.tensor,
    dual_clip: tl.tensor,
    sapo_tau_pos: tl.tensor,
    sapo_tau_neg: tl.tensor,
    beta: tl.tensor,
    entropy_coef: tl.tensor,
    KIND: tl.constexpr,
    KL: tl.constexpr,
) -> tl.tensor:
    """`policy_terms` at token level, for float32 scalars or blocks of one shape; a device function.

    Returns (loss, dlogprob, dentropy, ratio, kl, clipped_low, clipped_high), float32 and, the last two, int1; all 0
    where the weight is 0, whatever the other inputs hold there.
    What is absent is passed as its neutral value: old_logprob and ref_logprob as the logprob itself, importance as 1.0,
    entropy as 0.0, no dual clip as inf; then KL may be anything. The numbers from ratio_min on, and KIND and KL, come
    from `objective_arguments`.
    """
    alive = weight != 0.0
    lp = tl.where(alive, logprob, 0.0)
    advantage = tl.where(alive, advantage, 0.0)
    weight = tl.where(alive, weight, 0.0)
    scale = weight * tl.where(alive, importance, 0.0)
    log_ratio, inside = _log_ratio(lp - tl.where(alive, old_logprob, 0.0))
    ratio = _exp(log_ratio)

    if KIND == "grpo":
        value, slope, low, high = _grpo(ratio, advantage, ratio_min, ratio_max, dual_clip)
        slope = tl.where(inside, slope, 0.0)
    elif KIND == "sapo":
        value, slope = _sapo(ratio, advantage, sapo_tau_pos, sapo_tau_neg)
        slope = tl.where(inside, slope, 0.0)
        low, high = ratio < 0.0, ratio < 0.0  # never, in the rows' shape
    elif KIND == "cispo":
        low, high = ratio < ratio_min, ratio > ratio_max
        slope = -tl.where(high, ratio_max, tl.where(low, ratio_min, ratio)) * advantage
        value = slope * lp
    else:
        tl.static_assert(KIND == "reinforce")
        low, high = ratio < 0.0, ratio < 0.0
        slope = -advantage
        value = slope * lp
    loss = scale * value
    dlogprob = scale * slope

    kl = tl.where(alive, 0.0, 0.0)
    if KL != "none":
        k, k_inside = _log_ratio(tl.where(alive, ref_logprob, 0.0) - lp)
        kl, kl_slope = _kl(k, k_inside, ratio, inside, KL)
        loss += beta * weight * kl
        dlogprob += beta * weight * kl_slope
    dentropy = -entropy_coef * weight
    loss += dentropy * tl.where(alive & (entropy_coef != 0.0), entropy, 0.0)
    return loss, dlogprob, dentropy, tl.where(alive, ratio, 0.0), kl, low & alive, high & alive


# ---- an Objective as plain values -----------------------------------------------------------------------------------


def _numbers(objective: Objective) -> tuple[float, ...]:
    """ratio_min, ratio_max, dual_clip (inf for None), sapo_tau_pos, sapo_tau_neg, beta, entropy_coef."""
    return (
        float(objective.ratio_min),
        float(objective.ratio_max),
        math.inf if objective.dual_clip is None else float(objective.dual_clip),
        float(objective.sapo_tau_pos),
        float(objective.sapo_tau_neg),
        float(objective.beta),
        float(objective.entropy_coef),
    )


def objective_arguments(objective: Objective) -> tuple[tuple[float, ...], dict[str, Any]]:
    """What `policy_terms_kernel` takes after the entropy: its numbers in order, and its constexpr arguments."""
    return _numbers(objective), {"KIND": objective.kind, "KL": objective.kl}


def pack_objective(objective: Objective) -> tuple[str, str, str, list[float]]:
    """(kind, ratio_level, kl, numbers), since a custom op of torch.library takes no dataclass. See unpack_objective."""
    return objective.kind, objective.ratio_level, objective.kl, list(_numbers(objective))


def unpack_objective(kind: str, ratio_level: str, kl: str, numbers: list[float]) -> Objective:
    """The Objective that `pack_objective` took apart; ValueError as when it is made."""
    ratio_min, ratio_max, dual_clip, sapo_tau_pos, sapo_tau_neg, beta, entropy_coef = numbers
    return Objective(
        kind=cast(ObjectiveKind, kind),
        ratio_level=cast(RatioLevel, ratio_level),
        ratio_min=ratio_min,
        ratio_max=ratio_max,
        dual_clip=None if dual_clip == math.inf else dual_clip,
        sapo_tau_pos=sapo_tau_pos,
        sapo_tau_neg=sapo_tau_neg,
        kl=cast(KLKind, kl),
        beta=beta,
        entropy_coef=entropy_coef,
    )
