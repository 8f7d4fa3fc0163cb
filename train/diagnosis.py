"""What reported logprobs are, relative to what the trainer would score: the name of the fault, or that there is none.

Findings come from two sources. Records tell some by themselves: values that are not finite or positive, lengths that do
not fit, a stop without its stop token, ids or text of another tokenizer. The rest is told by readings (readings.py):
each says what the logprobs could be, and the one that leaves rounding alone is what they are.

Order of the search, which ends where something explains the report: the trainer's own reading; temperature, support
and position read from the same logits; other contexts and other weights; both together. Among readings that explain it,
the one with the fewest deviations wins. What no reading explains is told apart by its shape: a constant, never below
the full softmax (renormalised over unknown sets), rounding of bfloat16's kind, other weights, or nothing in common.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.loaded import LoadedModel
from rhotrain.train.batching import POSITIVE_LIMIT
from rhotrain.train.budget import STARTING_POINTS, Budget, Difference
from rhotrain.train.config import ConfigError
from rhotrain.train.plain_reading import LOGIT_BYTES, PLAIN_TOKENS, first, places, score_plainly, spread
from rhotrain.train.readings import ALIGNMENTS, Deviation, Reading, Scoring, Temperature, View, trimmed
from rhotrain.train.record_checks import Finding, check_records, usable
from rhotrain.train.records import Record
from rhotrain.train.report_shapes import OUTLIER_FIX, Report, sentinels, spoilt
from rhotrain.train.variants import Context, Weights, completion_logits, contexts, rounded_weights, using_weights

__all__ = ["Diagnosis", "Finding", "Reading", "Scoring", "diagnose"]

TOKENS = 512
"""Tokens on which other readings are tried; whole (cut) records."""
SCREEN_TOKENS = 160
"""The same for other contexts and other weights, of which there may be a dozen."""
BETTER = 4.0
"""A reading with a deviation is preferred to one without when it leaves so many times less. Between a decode path and a
packed forward, rounding alone never favours another reading by this much."""
ONE_SIDED = 0.05
"""Largest share of sum |d| that may lie on the wrong side for differences to count as one-sided."""
ALIKE = 0.3
"""Least correlation of what is left with what bfloat16 arithmetic does to our own logprobs."""
LIKE_SIZE = 4.0
"""Largest mean |d| of what is left, in units of what bfloat16 arithmetic does to our own logprobs."""
RELATED = 0.3
"""Least correlation of reported and own logprobs under weights that share a past; and at least two standard errors.
Measured: 3 updates at lr 1e-3 0.53 to 0.96, 100 updates 0.70 to 0.83, 20 at lr 1e-2 0.34 to 0.48, the same training
from another seed 0.59 and 0.71; other random weights -0.06 to 0.06, permuted ids 0.03 (SmolLM2) and 0.23 (16 ids)."""

FIXES = {
    "temperature": "score at the temperature that the logprobs were taken at, or have the engine report processed ones "
    "(vLLM: --logprobs-mode processed_logprobs; SGLang: leave SGLANG_RETURN_ORIGINAL_LOGPROB unset)",
    "truncation": "sample without top-k, top-p and min-p, or make trainer and engine normalise over the same set "
    "(truncation replay needs the kept sets)",
    "shifted": "the logits at position t - 1 predict token t: pair ids and logprobs by that, one logprob per id",
    "padding": "send prompts without padding, or mask it in attention and positions",
    "bos": "send token ids, not text, and have the server add no special tokens",
    "bf16 weights": "have engine and trainer compute in one dtype, or take trainer anchors and a budget for bfloat16",
    "stale weights": "load the trainer's weights into the engine and drop its prefix cache, or correct for staleness",
    "other weights": "load the trainer's weights into the engine and drop its prefix cache; name earlier checkpoints "
    "to have them tried",
    "outlier": OUTLIER_FIX,
    "tokenizer": "serve the checkpoint that is trained, with its own tokenizer, and pass token ids both ways",
}


@dataclass(frozen=True)
class Diagnosis:
    """findings: what is wrong, none when clean. readings: best first. tokens, records: how many were scored."""

    findings: tuple[Finding, ...]
    readings: tuple[Reading, ...]
    tokens: int
    records: int

    @property
    def clean(self) -> bool:
        return not self.findings

    @property
    def names(self) -> tuple[str, ...]:
        """The findings' names, each once."""
        return tuple(dict.fromkeys(finding.name for finding in self.findings))

    def as_text(self, most: int = 5) -> str:
        """For people: the verdict, each finding with its fix, the best readings."""
        lines = [f"scored {self.tokens} tokens of {self.records} completions"]
        if self.clean:
            lines.append("the reported logprobs are what the trainer scores")
        for finding in self.findings:
            lines += [f"{finding.name}: {finding.detail}", f"    fix: {finding.fix}"]
        if self.readings:
            lines.append("what they could be, and how far off (scored - reported):")
            lines += [f"    {r.name}: {r.difference.describe()}" for r in self.readings[:most]]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For machines; JSON values only."""
        return {
            "clean": self.clean,
            "tokens": self.tokens,
            "records": self.records,
            "findings": [vars(finding) for finding in self.findings],
            "readings": [{"name": r.name, **vars(r.difference)} for r in self.readings],
        }


def diagnose(
    loaded: LoadedModel,
    records: Sequence[Record],
    scoring: Scoring,
    budget: Budget,
    *,
    weights: Mapping[str, Weights] | None = None,
) -> Diagnosis:
    """Find out what the records' logprobs are.

    scoring: what the trainer takes. budget: of this model and temperature (budget.calibrate). weights: earlier sets of
    parameters by a name for the report, tried when the current ones do not explain the logprobs; their names are those
    of `model.state_dict()`. The model is left as it was. Raises ConfigError without records, or for weights of another
    model.
    """
    if not records:
        raise ConfigError("records: there are none; give at least one completion with its logprobs")
    findings = list(check_records(loaded, records, scoring))
    fitting = usable(loaded, records)
    if not fitting:
        if not findings:
            raise ConfigError("records: none can be scored; they are empty or longer than the model's positions")
        return Diagnosis(tuple(findings), (), 0, 0)
    samples, scored = spread(fitting, PLAIN_TOKENS)
    plain = score_plainly(loaded, scored, scoring)
    tokens = sum(len(one.reported) for one in plain)
    reported, ours = (torch.cat([getattr(one, name) for one in plain]) for name in ("reported", "scored"))
    # Sets that are computed again miss a few tokens of any record, which says nothing of the record.
    exact = not (scoring.truncates and scoring.replay) or all(record.kept_ids is not None for record in scored)
    whole = Reading.of((), ours, reported, trim=not exact)
    report = Report(reported, ours, places(samples, scored), budget, exact)
    shape = spoilt(report)
    if shape is not None:
        return Diagnosis(_unique([*findings, shape]), (whole,), tokens, len(scored))
    garbage, broken = sentinels(report)
    if broken is not None:  # the rest is something else, and is sought without them
        findings.append(broken)
        values = reported.masked_fill(garbage, torch.nan).split([len(one.reported) for one in plain])
        scored = [replace(r, logprobs=tuple(v.tolist())) for r, v in zip(scored, values)]
        plain = [Reading.of((), one.scored, v, trim=False) for one, v in zip(plain, values)]
    off = _off(plain, budget) if exact and budget.exceeded(whole.difference) else []
    chosen = [scored[i] for i in off] or scored
    rows = places([samples[i] for i in off] or samples, chosen)
    longest = max(len(record.prompt_ids) for record in scored)
    search = _Search(loaded, chosen, rows, scoring, budget, dict(weights or {}), longest)
    best = search.run()
    found = search.findings(best)
    if len(chosen) < len(scored):
        where = f"in {len(chosen)} of {len(scored)} completions, the others are what the trainer scores: "
        found = [replace(finding_, detail=where + finding_.detail) for finding_ in found]
    if not findings and not found and budget.exceeded(whole.difference):
        found = [finding("outlier", f"few completions are off, all together: {whole.difference.describe()}")]
    readings = sorted(search.readings, key=search.score)
    return Diagnosis(_unique([*findings, *found]), tuple(readings), tokens, len(scored))


def _off(plain: Sequence[Reading], budget: Budget) -> list[int]:
    """The records that are not what the trainer scores, where others are: a file may hold both (a weight sync in its
    middle, one faulty replica). Empty where the records do not part, or too few tokens would be left."""
    off = [i for i, one in enumerate(plain) if budget.exceeded(one.difference)]
    enough = sum(len(plain[i].reported) for i in off) >= 32
    return off if enough and len(off) < 0.9 * len(plain) else []


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The first finding of each name: what the records tell by themselves comes before what readings tell."""
    return tuple({finding.name: finding for finding in reversed(findings)}[name] for name in _names(findings))


def _names(findings: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in findings))


@dataclass(frozen=True)
class _WeightSet:
    """Weights to try; None: the model's own."""

    deviation: Deviation | None
    weights: Weights | None = None
    keep_dtype: bool = False


@dataclass
class _Search:
    """Tries readings until one explains the records. places: (sample, token) of the records' tokens."""

    loaded: LoadedModel
    scored: Sequence[Record]
    places: Sequence[tuple[int, int]]
    scoring: Scoring
    budget: Budget
    named: dict[str, Weights]
    longest: int
    readings: list[Reading] = field(default_factory=list)
    tokens: int = 0
    records: int = 0
    rounded: Tensor | None = None
    """The trainer's own reading in bfloat16 arithmetic, float64 [the first rows]."""

    def __post_init__(self) -> None:
        # Where less was measured on this model, less is to be expected: a fault may hide far below a starting point.
        start, measured = STARTING_POINTS[self.budget.dtype][0] / 10, self.budget.measured
        self.floor = start if measured is None else min(start, max(measured.mean, 1e-9))
        self.as_scored = Temperature(None, self.scoring.temperature)

    # -- one forward each ---------------------------------------------------------------------------------------------

    def view(self, context: Context, weights: _WeightSet, tokens: int) -> View | None:
        """The first records of up to `tokens` tokens; None when the context changes no prompt or has no room."""
        chosen = first(self.scored, tokens)
        pairs = [(context.change(record.prompt_ids), record.completion_ids) for record in chosen]
        if context.deviation is not None and all(p == r.prompt_ids for (p, _), r in zip(pairs, chosen)):
            return None
        limit = self.loaded.max_positions
        if limit is not None and any(len(prompt) + len(ids) > limit for prompt, ids in pairs):
            return None
        with ExitStack() as stack:
            if weights.weights is not None:
                stack.enter_context(using_weights(self.loaded, weights.weights, keep_dtype=weights.keep_dtype))
            logits = completion_logits(self.loaded, pairs)
        return View(self.loaded, chosen, logits, self.scoring)

    def try_all(self, places: Iterator[tuple[Context, _WeightSet]]) -> None:
        """The readings of every (context, weights)."""
        for context, weights in places:
            view = self.view(context, weights, SCREEN_TOKENS)
            if view is not None:
                outer = tuple(d for d in (context.deviation, weights.deviation) if d is not None)
                self.readings += view.readings(outer)
                if weights.keep_dtype and context.deviation is None:
                    self.rounded = view.logprobs(self.as_scored, view.supports[0], ALIGNMENTS[0])

    def run(self) -> Reading | None:
        """The reading that explains the records, None when none does. `readings` has all that were tried."""
        found = contexts(self.loaded.tokenizer, self.longest)
        own = _WeightSet(None)
        room = 2 * LOGIT_BYTES // (4 * self.loaded.head.weight.shape[0])
        view = self.view(found[0], own, min(TOKENS, max(SCREEN_TOKENS, room)))
        assert view is not None  # the records fit, and an unchanged context is never left out
        self.own_view = view
        self.tokens, self.records = len(self.own_view.ids), len(self.own_view.records)
        self.readings += self.own_view.readings((), plain=True)
        if self._beyond_doubt(self.readings[0]):
            return self.readings[0]
        self.readings += self.own_view.readings(())[1:]
        if self.best() is not None and self.best() is not self.readings[0]:
            return self.best()
        others = list(self.weight_sets())
        self.try_all(iter([*((context, own) for context in found[1:]), *((found[0], w) for w in others)]))
        if self.best() is None:
            self.try_all((context, w) for context in found[1:] for w in others)
        return self.best()

    def weight_sets(self) -> Iterator[_WeightSet]:
        """Every set of weights besides the model's own."""
        if self.loaded.dtype != torch.bfloat16:
            rounded = rounded_weights(self.loaded)
            own = dict(self.loaded.model.named_parameters())
            moves = any(bool((own[name].detach() != value).any()) for name, value in rounded.items())
            if moves:
                words = "of the trainer's weights rounded to bfloat16"
                yield _WeightSet(Deviation("bf16 weights", words), rounded)
            words = "of the trainer's weights in bfloat16 arithmetic"
            yield _WeightSet(Deviation("bf16 weights", words), rounded, keep_dtype=True)
        for name, weights in self.named.items():
            yield _WeightSet(Deviation("stale weights", f"of the earlier weights {name!r}"), weights)

    # -- judgement ----------------------------------------------------------------------------------------------------

    def explains(self, candidate: Reading) -> bool:
        """What it leaves is within the numerics budget."""
        return not self.budget.exceeded(candidate.difference)

    def _beyond_doubt(self, own: Reading) -> bool:
        """The trainer's own reading leaves no more than was measured between two correct paths, so nothing is sought.

        In half precision the budget is wide: a fault may hide in it, and shows as a reading that leaves much less.
        """
        measured = self.budget.measured
        expected = max(2.0 * measured.mean if measured else 0.0, self.floor)
        return self.explains(own) and own.difference.mean <= expected

    def score(self, candidate: Reading) -> float:
        """Least is best: the log of what is left, and log(BETTER) per deviation."""
        mean = candidate.difference.mean
        left = math.log(max(mean, self.floor)) if math.isfinite(mean) else math.inf
        return left + candidate.cost * math.log(BETTER)

    def best(self) -> Reading | None:
        """Of the readings that explain the records, the one of the best score."""
        return min(filter(self.explains, self.readings), key=self.score, default=None)

    def findings(self, best: Reading | None) -> list[Finding]:
        """One finding per deviation of the reading that explains the records. Without one: those of the reading that
        leaves the least, if it leaves much less, and what the shape of the rest tells."""
        found = best or min(self.readings, key=self.score)
        left = f"; what is left: mean |d| {found.difference.mean:.2g}, max {found.difference.max:.2g}"
        named = [finding(d.name, f"the logprobs are {d.words}{left}") for d in found.deviations]
        if best is not None:
            return named
        rest = self._rest(found)
        return [rest] if rest.name == "tokenizer" else [*named, rest]

    def _rest(self, nearest: Reading) -> Finding:
        """A name for what the nearest reading leaves."""
        d = nearest.scored - nearest.reported
        known = d.isfinite()
        d, related = d[known], correlation(inner(nearest.reported[known]), inner(nearest.scored[known]))
        figures = Difference.of(d).describe()
        exact = not self.scoring.truncates or all(r.kept_ids is not None for r in self.scored)
        spoiled = spoilt(Report(nearest.reported, nearest.scored, self.places, self.budget, exact))
        if spoiled is not None:
            return spoiled
        is_related = related >= max(RELATED, 2.0 / math.sqrt(max(1, len(d))))
        positive = bool((nearest.reported > POSITIVE_LIMIT).any())
        shape = self._support_shape() if is_related and not positive and not nearest.deviations else None
        if shape is not None:
            return finding("truncation", f"the logprobs are {shape}")
        if self._rounds_alike(nearest):
            return finding("bf16 weights", f"the logprobs differ as those of bfloat16 arithmetic do: {figures}")
        if is_related:
            words = f"no reading explains the logprobs, but they go with ours (correlation {related:.2f})"
            return finding("other weights", f"{words}: {figures}")
        words = f"the logprobs have little in common with ours (correlation {related:.2f}): another tokenizer or model"
        return finding("tokenizer", f"{words}: {figures}")

    def _support_shape(self) -> str | None:
        """Words for a support that shows in the differences from the full softmax, though no reading has it."""
        view = self.own_view
        full = next(s for s in view.supports if s.kept is None)
        d = view.logprobs(self.as_scored, full, ALIGNMENTS[0]) - view.reported
        d = d[d.isfinite() & (view.reported != 0.0)]  # a value that nobody filled in is above the full softmax too
        if not len(d):
            return None
        middle = float(d.median())
        apart = Difference.of(trimmed(d - middle))
        if len(d) >= 8 and not self.budget.exceeded(apart) and abs(middle) > BETTER * apart.mean:
            return f"those of the full softmax {-middle:+.4g}, a constant"
        if len(d) >= 32 and float(d.clamp(min=0.0).sum()) <= ONE_SIDED * float(d.abs().sum()):
            words = (
                "never below the full softmax, as if renormalised over sets that these sampling settings do not give"
            )
            return f"{words} (mean log of the kept mass {float(d.mean()):.3g})"
        return None

    def _rounds_alike(self, nearest: Reading) -> bool:
        """True when what is left has the size of bfloat16 rounding and goes with what it does to our own logprobs.

        An engine in bfloat16 rounds the same weights and the same activations, but sums in another order, so no reading
        of ours explains it (SmolLM2: correlation 0.48 over 413 tokens; of unrelated differences 0 +- 0.08 over 160).
        """
        if self.rounded is None or any(d.name == "shifted" for d in nearest.deviations):
            return False
        own = self.readings[0].scored
        count = min(len(self.rounded), len(nearest.scored))  # all start with the same records
        d = (nearest.reported - nearest.scored)[:count]
        rounding = (self.rounded[:count] - own[:count])[d.isfinite()]
        d = d[d.isfinite()]
        small = not Budget.starting(torch.bfloat16).exceeded(Difference.of(d))
        small = small and float(d.abs().mean()) <= LIKE_SIZE * float(rounding.abs().mean())
        return small and len(d) >= 32 and correlation(d, rounding) >= ALIKE


def inner(values: Tensor) -> Tensor:
    """Drawn in to between the 1st and 99th percentile: one garbage value must not hide that the others are related."""
    if not len(values):
        return values
    return values.clamp(values.quantile(0.01), values.quantile(0.99))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; 0 where one of the two is constant."""
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 0 else 0.0


def finding(name: str, detail: str) -> Finding:
    return Finding(name, detail, FIXES[name])
