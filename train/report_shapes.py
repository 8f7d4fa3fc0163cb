"""Reports that are the trainer's logprobs spoilt on the way: missing, in another base, rounded, or a few garbage.

Each rule looks at reported and scored logprobs, float64 [N], and speaks only when it accounts for every token.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rhotrain.train.budget import Budget, Difference
from rhotrain.train.record_checks import Finding

FEW = 0.02
"""Largest share of tokens that may be garbage beside logprobs that are right."""

SCALES = {
    "base-10 logarithms": 1.0 / math.log(10.0),
    "base-2 logarithms": 1.0 / math.log(2.0),
    "negative log-likelihoods": -1.0,
}
FORMATS = {"float16": (torch.float16, 2.0**-11), "bfloat16": (torch.bfloat16, 2.0**-8)}
"""dtype and half a step, relative."""


def spoilt(reported: Tensor, scored: Tensor, budget: Budget) -> Finding | None:
    """The first rule that accounts for the report, None when there is none."""
    known = reported.isfinite() & scored.isfinite()
    if not bool(known.any()):
        return None
    rules: tuple[Callable[[Tensor, Tensor, Budget], Finding | None], ...] = (_missing, _scaled, _rounded, _outliers)
    return next((found for rule in rules if (found := rule(reported[known], scored[known], budget))), None)


def _within(reported: Tensor, scored: Tensor, budget: Budget) -> bool:
    return not budget.exceeded(Difference.of(scored - reported))


def _missing(reported: Tensor, scored: Tensor, budget: Budget) -> Finding | None:
    """Exact zeros where the model is unsure: a value that nobody filled in."""
    empty = (reported == 0.0) & (scored < -0.1)
    if not bool(empty.any()) or not _within(reported[~empty], scored[~empty], budget):
        return None
    first = int(empty.nonzero()[0])
    return Finding(
        "missing",
        f"{int(empty.sum())} of {len(reported)} logprobs are exactly 0 where the trainer scores otherwise (the first "
        f"{float(scored[first]):.3g}), the others are what it scores",
        "report a logprob for every token, the first one included",
    )


def _scaled(reported: Tensor, scored: Tensor, budget: Budget) -> Finding | None:
    """The same numbers in another base, negated, or not as logarithms."""
    readings = {name: reported / factor for name, factor in SCALES.items()}
    if bool((reported > 0.0).all()):
        readings["probabilities"] = reported.log()
    for name, values in readings.items():
        if not _within(reported, scored, budget) and _within(values, scored, budget):
            return Finding("scale", f"the values are {name}", "report natural logarithms of probabilities")
    return None


def _rounded(reported: Tensor, scored: Tensor, budget: Budget) -> Finding | None:
    """Few decimals, or a half-precision format, and nothing else."""
    d = (scored - reported).abs()
    steps = {f"{k} decimals": (_on_grid(reported, k), torch.full_like(d, 0.5 * 10.0**-k)) for k in range(1, 6)}
    for name, (dtype, half) in FORMATS.items():
        steps[name] = (bool((reported.to(dtype).double() == reported).all()), half * reported.abs())
    for name, (fits, allowed) in steps.items():
        if fits and bool((d <= allowed * (1 + 1e-6) + budget.p99).all()):
            return Finding(
                "rounded",
                f"the values are what the trainer scores, rounded to {name} (largest difference {float(d.max()):.2g})",
                "report them in float32 with all their digits: rounding is noise in the ratio",
            )
    return None


def _on_grid(values: Tensor, decimals: int) -> bool:
    scaled = values * 10.0**decimals
    return bool(((scaled - scaled.round()).abs() < 1e-6 * scaled.abs().clamp(min=1.0)).all())


def _outliers(reported: Tensor, scored: Tensor, budget: Budget) -> Finding | None:
    """A few values far off among logprobs that are right."""
    d = (scored - reported).abs()
    few = max(1, int(FEW * len(d)))
    order = d.argsort(descending=True)
    if len(d) < 50 or not _within(reported[order[few:]], scored[order[few:]], budget):
        return None
    far = int((d > 4.0 * budget.p99).sum())
    if not 0 < far <= few:
        return None
    worst = int(order[0])
    return Finding(
        "outlier",
        f"{far} of {len(d)} logprobs are far off (the furthest {float(reported[worst]):.4g}, scored "
        f"{float(scored[worst]):.4g}), the others are what the trainer scores",
        "look for sentinel values, requests that were aborted, or tokens that were not sampled (forced or replaced)",
    )
