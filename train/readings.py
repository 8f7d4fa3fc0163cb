"""What reported logprobs could be: every reading of them that the audit knows, computed from one packed forward each.

A reading says at which temperature, over which support, at which position, after which context and from which weights a
logprob was taken. Temperature, support and position are read from the same logits; a context or other weights cost a
forward. The reading without deviations is what the trainer scores.

    d = scored - reported, per token, for each reading; the right one leaves rounding and nothing else
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.sampling import sample_tokens
from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.completion import SamplingParams
from rhotrain.train.budget import Difference
from rhotrain.train.records import Record

FIT_ROWS = 32
"""Rows that a temperature is fitted on."""
FIT_RANGE = (0.05, 20.0)
TRIM = 0.05
"""Share of the largest |d| left out where kept sets were computed again: rounding moves an id across a set's border now
and then, and then the whole set's mass differs."""
FEWEST_TOKENS = 4
"""A reading over fewer tokens proves nothing."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What the trainer scores, and how the completions were sampled.

    temperature: the trainer's. replay: it normalises over the kept set of top_k, top_p, min_p and min_new_tokens, else
    over the full softmax. stop_token_ids, stop_strings: what ends a completion besides the model's own stop ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    replay: bool = False
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @staticmethod
    def of(sampling: SamplingParams, *, replay: bool) -> "Scoring":
        """The scoring that fits these sampling settings."""
        return Scoring(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            replay=replay,
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop_strings=sampling.stop_strings,
        )

    @property
    def truncates(self) -> bool:
        """True when the sampled distribution is not the full softmax."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.min_new_tokens > 0


@dataclass(frozen=True)
class Deviation:
    """How a reading differs from what the trainer scores: the finding's name, and words for it. cost: 1, a little more
    for one with a free parameter, so that a plainer one wins a tie."""

    name: str
    words: str
    cost: float = 1.0


@dataclass(frozen=True)
class Reading:
    """One reading and what it leaves. name: in words. difference: scored - reported, trimmed where sets were computed
    again. deviations: from what the trainer scores; none: that itself. scored, reported: float64 [N], NaN where a token
    has none."""

    name: str
    difference: Difference
    deviations: tuple[Deviation, ...] = ()
    scored: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False, compare=False)
    reported: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False, compare=False)

    @staticmethod
    def of(deviations: tuple[Deviation, ...], scored: Tensor, reported: Tensor, *, trim: bool) -> "Reading":
        """The reading of these logprobs; `trim` leaves the largest differences out of its figures."""
        d = scored - reported
        d = d[d.isfinite()]
        words = "; ".join(deviation.words for deviation in deviations) or "what the trainer scores"
        return Reading(words, Difference.of(trimmed(d) if trim else d), deviations, scored, reported)

    @property
    def cost(self) -> float:
        """Of all deviations. Raw logprobs of the full softmax are one setting of an engine, and cost as one."""
        names = {deviation.name for deviation in self.deviations}
        joint = 0.8 if {"temperature", "truncation"} <= names else 0.0
        return sum(deviation.cost for deviation in self.deviations) - joint


# ---- readings of one forward ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Support:
    """What a logprob is normalised over: `kept` sets, or all of the first `columns` ids. exact: no set was computed
    again, so every token counts."""

    deviation: Deviation | None
    columns: int
    kept: KeptSet | None = None
    exact: bool = True

    @cached_property
    def member_NV(self) -> Tensor | None:
        """bool, the ids of every token's set; None without sets."""
        return None if self.kept is None else self.kept.mask(self.columns)


@dataclass(frozen=True)
class Temperature:
    """Logits are divided by `value`; divide: the logprob at temperature 1 is divided instead, and sums to nothing."""

    deviation: Deviation | None
    value: float
    divide: float = 1.0


@dataclass(frozen=True)
class Alignment:
    """Token i is scored with the logits of row i + rows, and compared with the report of token i + report."""

    deviation: Deviation | None
    rows: int = 0
    report: int = 0


ALIGNMENTS = (
    Alignment(None),
    Alignment(Deviation("shifted", "read from the logits of the token's own position, which predict the next"), rows=1),
    Alignment(Deviation("shifted", "read from the logits of two positions before the token, one too early"), rows=-1),
    Alignment(Deviation("shifted", "those of the token before"), report=1),
    Alignment(Deviation("shifted", "those of the token after"), report=-1),
)


class View:
    """The records' tokens (N rows) under one context and one set of weights."""

    def __init__(self, loaded: LoadedModel, records: Sequence[Record], logits_NV: Tensor, scoring: Scoring) -> None:
        self.vocab = loaded.vocab_size
        self.logits_NV = logits_NV
        self.scoring = scoring
        self.records = records
        self.ids = torch.tensor([i for r in records for i in r.completion_ids], dtype=torch.int64)
        self.reported = torch.tensor([x for r in records for x in r.logprobs], dtype=torch.float64)
        lens = [len(r.completion_ids) for r in records]
        self.record_of = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
        self.place = torch.cat([torch.arange(n) for n in lens])
        own = {*loaded.stop_token_ids, *scoring.stop_token_ids}
        self.stop_ids = sorted(i for i in own if i < self.vocab)

    def moved(self, offset: int) -> Tensor:
        """Row i + offset for every row i, -1 where that is another record's."""
        rows = torch.arange(len(self.ids)) + offset
        inside = (rows >= 0) & (rows < len(self.ids))
        same = self.record_of[rows.clamp(0, len(self.ids) - 1)] == self.record_of
        return torch.where(inside & same, rows, -1)

    def logprobs(
        self, temperature: Temperature, support: Support, alignment: Alignment, normaliser: Tensor | None = None
    ) -> Tensor:
        """float64 [N]; NaN where the alignment names no row. A token outside of its set is taken into it."""
        if normaliser is None:
            normaliser = self.normaliser(temperature.value, support)
        rows = self.moved(alignment.rows)
        safe = rows.clamp(min=0)
        x, normaliser = self.logits_NV[safe, self.ids].double() / temperature.value, normaliser[safe]
        if support.member_NV is not None:
            outside = ~support.member_NV[safe, self.ids]
            normaliser = torch.where(outside, torch.logaddexp(normaliser, x), normaliser)
        return ((x - normaliser) / temperature.divide).masked_fill(rows < 0, torch.nan)

    def normaliser(self, temperature: float, support: Support) -> Tensor:
        """logsumexp(logits / temperature) over the support, float64 [N]."""
        kept = support.kept
        # Any id of the set will do: only the logsumexp is asked for.
        ids = torch.zeros_like(self.ids) if kept is None else kept.ids[kept.offsets[:-1]].long()
        out = token_logprobs(
            self.logits_NV, ids, temperature=temperature, vocab_size=support.columns, kept=kept, backend="reference"
        )
        return out.logsumexp.double()

    def report(self, alignment: Alignment) -> Tensor:
        """The reported logprob that each token is compared with, float64 [N]; NaN where there is none."""
        rows = self.moved(alignment.report)
        return self.reported[rows.clamp(min=0)].masked_fill(rows < 0, torch.nan)

    # -- candidates ---------------------------------------------------------------------------------------------------

    @cached_property
    def supports(self) -> tuple[Support, ...]:
        """The trainer's own first."""
        scoring, rows = self.scoring, self.logits_NV.shape[1]
        full = Support(None, self.vocab)
        found = [full]
        if scoring.truncates:
            kept, exact = self.kept_sets(scoring.temperature)
            renormalised = Support(None, self.vocab, kept, exact)
            words = "normalised over the full softmax, the trainer over the kept set"
            if scoring.replay:
                found = [renormalised, replace(full, deviation=Deviation("truncation", words))]
            else:
                words = "renormalised over the kept set, the trainer over the full softmax"
                found = [full, replace(renormalised, deviation=Deviation("truncation", words))]
            if scoring.temperature != 1.0 and (scoring.top_p < 1.0 or scoring.min_p > 0.0):
                words = "renormalised over a set that was cut at temperature 1"
                first, _ = self.kept_sets(1.0, recorded=False)
                found.append(Support(Deviation("truncation", words, 1.1), self.vocab, first, exact=False))
        if rows > self.vocab:
            words = f"normalised over all {rows} rows of the head, {rows - self.vocab} padding rows among them"
            found.append(Support(Deviation("truncation", words, 1.1), rows))
        return tuple(found)

    def kept_sets(self, temperature: float, *, recorded: bool = True) -> tuple[KeptSet, bool]:
        """(the set of every token, whether they are recorded ones); the engine's own sampler computes missing ones."""
        if recorded and all(r.kept_ids is not None for r in self.records):
            return KeptSet.from_lists([ids for r in self.records for ids in r.kept_ids or ()]), True
        below = (self.place < self.scoring.min_new_tokens).tolist()
        banned = KeptSet.from_lists([self.stop_ids if b else [] for b in below]) if any(below) else None
        scoring = self.scoring
        sample = sample_tokens(
            self.logits_NV,
            temperature=temperature,
            top_k=scoring.top_k,
            top_p=scoring.top_p,
            min_p=scoring.min_p,
            seeds=0,
            positions=0,
            vocab_size=self.vocab,
            banned=banned,
            keep_sets=True,
            backend="reference",
        )
        assert sample.kept is not None
        return sample.kept, False

    def temperatures(self, support: Support) -> list[Temperature]:
        """The trainer's own, 1, the logprob at 1 divided, and the one that fits best."""
        own = self.scoring.temperature
        found = [Temperature(None, own)]
        if own != 1.0:
            raw = f"raw (temperature 1), the trainer scores at {own:g}"
            found.append(Temperature(Deviation("temperature", raw), 1.0))
            divided = f"raw (temperature 1) and then divided by {own:g}, which sums to no probability"
            found.append(Temperature(Deviation("temperature", divided), 1.0, divide=own))
        plain = support.deviation is None or support.deviation.cost <= 1.0
        fitted = self.fit(support) if plain else None
        if fitted is not None and all(abs(fitted / t.value - 1.0) > 1e-3 for t in found):
            words = f"at a temperature of about {fitted:.4g}, the trainer scores at {own:g}"
            found.append(Temperature(Deviation("temperature", words, 1.2), fitted))
        return found

    def fit(self, support: Support) -> float | None:
        """The temperature with the least mean |d|: a grid, then golden sections; None for too few tokens."""
        known = self.reported.isfinite().nonzero()[:, 0]
        if len(known) < FEWEST_TOKENS:
            return None
        rows = known[torch.linspace(0, len(known) - 1, min(FIT_ROWS, len(known))).long()]
        logits_RV = self.logits_NV[rows, : support.columns]
        if support.member_NV is not None:
            logits_RV = logits_RV.masked_fill(~support.member_NV[rows], -torch.inf)
        logit, reported = self.logits_NV[rows, self.ids[rows]].double(), self.reported[rows]
        logits_RV = logits_RV.double()

        def loss(log_t: float) -> float:
            t = math.exp(log_t)
            return float((logit / t - torch.logsumexp(logits_RV / t, 1) - reported).abs().mean())

        return math.exp(_minimum(loss, math.log(FIT_RANGE[0]), math.log(FIT_RANGE[1])))

    def readings(self, outer: tuple[Deviation, ...], *, plain: bool = False) -> list[Reading]:
        """All readings of this forward; `outer`: the deviations of its context and weights. plain: only the trainer's
        own temperature, support and alignment."""
        found = []
        for support in self.supports[:1] if plain else self.supports:
            temperatures = [Temperature(None, self.scoring.temperature)] if plain else self.temperatures(support)
            for temperature in temperatures:
                normaliser = self.normaliser(temperature.value, support)
                for alignment in ALIGNMENTS[:1] if plain else ALIGNMENTS:
                    inner = (temperature.deviation, support.deviation, alignment.deviation)
                    deviations = (*(d for d in inner if d is not None), *outer)
                    scored = self.logprobs(temperature, support, alignment, normaliser)
                    one = Reading.of(deviations, scored, self.report(alignment), trim=not support.exact)
                    if one.difference.count >= FEWEST_TOKENS or not deviations:
                        found.append(one)
        return found


def trimmed(d: Tensor) -> Tensor:
    """d [N] without the TRIM share of it that is largest in size."""
    return d[d.abs().argsort()[: len(d) - int(TRIM * len(d))]]


def _minimum(f: Callable[[float], float], low: float, high: float, grid: int = 25, rounds: int = 32) -> float:
    """Where f is least: the best point of a grid, then golden sections between its neighbours."""
    step = (high - low) / (grid - 1)
    best = min(range(grid), key=lambda i: f(low + i * step))
    a, b, golden = low + (best - 1) * step, low + (best + 1) * step, (5**0.5 - 1) / 2
    x, y = b - golden * (b - a), a + golden * (b - a)
    fx, fy = f(x), f(y)
    for _ in range(rounds):
        if fx <= fy:
            b, y, fy = y, x, fx
            x = b - golden * (b - a)
            fx = f(x)
        else:
            a, x, fx = x, y, fy
            y = a + golden * (b - a)
            fy = f(y)
    return (a + b) / 2
