"""Reports that are the trainer's logprobs spoilt on the way: missing, in another base, rounded, or a few garbage.

Each rule speaks only when it accounts for every token; where kept sets were computed again, for all but a few.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.train.budget import Budget, Difference
from rhotrain.train.readings import TRIM, trimmed
from rhotrain.train.record_checks import Finding

SENTINEL = 20.0
"""A value so many nats below twice the least that is scored stands for something else than a probability."""
OUTLIER_FIX = (
    "look for sentinel values, requests that were aborted, or tokens that were not sampled (forced or replaced)"
)
FEW = 0.02
"""Largest share of tokens that may be garbage beside logprobs that are right."""

UNSURE = -0.1
"""A scored logprob below this is not 0, whatever the rounding."""
BORDER = 0.8
"""An id that joins a set of one by rounding, at most as likely as the first, costs log 2; a zero there is honest."""
ROUNDING = 1e-5
"""Mean |d| that float32's rounding of values and factor may leave, whatever was measured."""
FEWEST = 8
"""Tokens that a constant factor is taken from, at least."""
GARBAGE = 4.0
"""|d| that neither rounding nor an id at a set's border makes, in nats: looked for where the figures are in order too,
since one value in thousands does not move them."""

SCALES = {
    "base-10 logarithms": 1.0 / math.log(10.0),
    "base-2 logarithms": 1.0 / math.log(2.0),
    "negative log-likelihoods": -1.0,
}
FORMATS = {"float16": (torch.float16, 2.0**-11), "bfloat16": (torch.bfloat16, 2.0**-8)}
"""dtype and half a step, relative."""


@dataclass(frozen=True)
class Report:
    """reported, scored: logprobs, float64 [N]. places: (sample, token) of every row. exact: the scores are over full
    softmaxes or recorded sets, else over sets that were computed again, where rounding moves an id across a border now
    and then."""

    reported: Tensor
    scored: Tensor
    places: Sequence[tuple[int, int]]
    budget: Budget
    exact: bool = True

    def known(self) -> "Report":
        """Without the rows that have no finite value on both sides."""
        finite = self.reported.isfinite() & self.scored.isfinite()
        places = [place for place, keep in zip(self.places, finite.tolist()) if keep]
        return Report(self.reported[finite], self.scored[finite], places, self.budget, self.exact)

    def within(self, reported: Tensor, rows: Tensor | None = None) -> bool:
        """True when these values, of all or of some rows, leave numerics and nothing else."""
        d = self.scored - reported
        d = d if rows is None else d[rows]
        return not self.budget.exceeded(Difference.of(d if self.exact else trimmed(d)))

    def tight(self, reported: Tensor) -> bool:
        """True when no more is left than was measured between two correct paths; in half precision the budget is far
        wider, and another fault may fit in."""
        measured, d = self.budget.measured, self.scored - reported
        limit = self.budget.mean if measured is None else max(2.0 * measured.mean, ROUNDING)
        return Difference.of(d if self.exact else trimmed(d)).mean <= limit

    def place(self, row: int) -> str:
        sample, token = self.places[row]
        return (
            f"token {token} of sample {sample}: {float(self.reported[row]):.4g}, scored {float(self.scored[row]):.4g}"
        )


def spoilt(report: Report) -> Finding | None:
    """The first rule that accounts for the report, None when there is none."""
    report = report.known()
    rules: tuple[Callable[[Report], Finding | None], ...] = (_missing, _scaled, _rounded, _outliers)
    return next((found for rule in rules if (found := rule(report))), None) if report.places else None


def _missing(report: Report) -> Finding | None:
    """Exact zeros where the model is unsure: a value that nobody filled in."""
    empty = (report.reported == 0.0) & (report.scored < (UNSURE if report.exact else -BORDER))
    # The zeros of tokens that the model is sure of are as empty, and tell nothing.
    if not bool(empty.any()) or not report.within(report.reported, report.reported != 0.0):
        return None
    return Finding(
        "missing",
        f"{int(empty.sum())} of {len(empty)} logprobs are exactly 0 where the trainer scores otherwise (the first is "
        f"{report.place(int(empty.nonzero()[0]))}), the others are what it scores",
        "report a logprob for every token, the first one included",
    )


def _scaled(report: Report) -> Finding | None:
    """The same numbers in another base, negated, times a constant, or not as logarithms."""
    if report.within(report.reported):
        return None
    readings = {name: report.reported / factor for name, factor in SCALES.items()}
    if bool((report.reported > 0.0).all()):
        readings["probabilities"] = report.reported.log()
    unsure = report.scored < UNSURE
    if int(unsure.sum()) >= FEWEST:
        factor = float((report.reported[unsure] / report.scored[unsure]).median())
        if factor != 0.0:
            readings[f"{factor:.4g} times what the trainer scores"] = report.reported / factor
    for name, values in readings.items():
        if report.within(values) and report.tight(values):
            return Finding("scale", f"the values are {name}", "report natural logarithms of probabilities")
    return None


def _rounded(report: Report) -> Finding | None:
    """Few decimals, or a half-precision format, and nothing else."""
    if report.within(report.reported):
        return None
    reported, d = report.reported, (report.scored - report.reported).abs()
    steps = {f"{k} decimals": (_on_grid(reported, k), torch.full_like(d, 0.5 * 10.0**-k)) for k in range(1, 6)}
    for name, (dtype, half) in FORMATS.items():
        steps[name] = (bool((reported.to(dtype).double() == reported).all()), half * reported.abs())
    for name, (fits, allowed) in steps.items():
        inside = d <= allowed * (1 + 1e-6) + report.budget.p99
        if fits and float(inside.double().mean()) >= (1.0 if report.exact else 1.0 - TRIM):
            return Finding(
                "rounded",
                f"the values are what the trainer scores, rounded to {name} (largest difference {float(d.max()):.2g})",
                "report them in float32 with all their digits: rounding is noise in the ratio",
            )
    return None


def _on_grid(values: Tensor, decimals: int) -> bool:
    scaled = values * 10.0**decimals
    return bool(((scaled - scaled.round()).abs() < 1e-6 * scaled.abs().clamp(min=1.0)).all())


def _outliers(report: Report) -> Finding | None:
    """A few values far off among logprobs that are right."""
    d = (report.scored - report.reported).abs()
    few = max(1, int(FEW * len(d)))
    order = d.argsort(descending=True)
    if len(d) < 50 or not report.within(report.reported, order[few:]):
        return None
    doubted = report.exact and not report.within(report.reported)
    least = 4.0 * report.budget.p99
    far = int((d > (least if doubted else max(least, GARBAGE))).sum())
    if not 0 < far <= few:
        return None
    return Finding(
        "outlier",
        f"{far} of {len(d)} logprobs are far off (the furthest is {report.place(int(order[0]))}), the others are what "
        "the trainer scores",
        OUTLIER_FIX,
    )


def sentinels(report: Report) -> tuple[Tensor, Finding | None]:
    """(bool [N] of values that no model of this vocabulary gives, a finding), where they are few and the others are
    off too: left in, one of them outweighs hundreds of tokens in whatever reading does not drop its row."""
    far = report.reported.isfinite() & (report.reported < 2.0 * float(report.scored.min()) - SENTINEL)
    count = int(far.sum())
    if not 0 < count <= max(1, int(FEW * len(far))):
        return torch.zeros_like(far), None
    words = f"{count} of {len(far)} logprobs are far off (the first is {report.place(int(far.nonzero()[0]))})"
    return far, Finding("outlier", words, OUTLIER_FIX)
