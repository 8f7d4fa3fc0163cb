"""How far logprobs of two correct computations may lie apart: the numerics budget, calibrated on the machine.

Decode attention over pages and the trainer's packed forward sum in different orders, so their logprobs differ by
rounding. The budget is the larger of a starting point per compute dtype and three times what is measured here, on these
weights, between the decode path without a sampler (rollout/replay.py) and the packed forward: a fault of the sampler,
of the scheduler or of a server cannot widen it. What exceeds it has another cause than rounding.

Short samples are noisy, so one token in the tail is always allowed: of size `p99`, it adds p99 / count to the mean and
(exp(p99) - 1 - p99) / count to k3. The 99th percentile of fewer than 100 tokens, their maximum, may be twice the limit.

k3 = mean(exp(d) - 1 - d) with d = trainer - sampler, clamped to +-20: Schulman's estimator of KL(sampler || trainer).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.rollout.replay import Pair, decode_logprobs
from rhotrain.train.batching import make_table, pack
from rhotrain.train.step import score

STARTING_POINTS: dict[str, tuple[float, float, float]] = {
    "float64": (1e-12, 1e-11, 1e-14),
    "float32": (1e-5, 1e-4, 1e-8),
    "float16": (1e-2, 1e-1, 2e-4),
    "bfloat16": (0.06, 0.5, 5e-3),
}
"""mean |d|, 99th percentile of |d|, k3, by compute dtype. bfloat16: measured on a CPU with SmolLM2, mean 0.04, max
0.36. float64's k3 is what rounding leaves of exp(d) - 1 - d."""

FIGURES = {"mean": "mean |d|", "p99": "99th percentile of |d|", "k3": "k3"}

MARGIN = 3.0
"""Limits are at least this many times what was measured: another sample of tokens has another tail."""

CEILING = 10.0
"""No limit exceeds its starting point this many times (k3: squared). A decode path that is further off is wrong, and
must not excuse itself. (Float32 on a GPU with TF32 is such a case.)"""


@dataclass(frozen=True)
class Difference:
    """d over `count` tokens. mean, p99, max: of |d|; bias: mean d; k3: see above. All 0 without tokens."""

    count: int
    mean: float
    p99: float
    max: float
    k3: float
    bias: float

    @staticmethod
    def of(difference: Tensor) -> "Difference":
        """The figures of a tensor of differences, any shape and dtype; computed in float64. NaN stays NaN."""
        d = difference.detach().flatten().double().cpu()
        if not d.numel():
            return Difference(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        size, clamped = d.abs(), d.clamp(-20.0, 20.0)
        rank = max(1, math.ceil(0.99 * d.numel()))
        return Difference(
            count=d.numel(),
            mean=float(size.mean()),
            p99=float(size.kthvalue(rank).values),
            max=float(size.max()),
            k3=float((torch.expm1(clamped) - clamped).clamp(min=0.0).mean()),
            bias=float(d.mean()),
        )

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.count} tokens: mean {self.mean:.3g}, p99 {self.p99:.3g}, max {self.max:.3g}, k3 {self.k3:.3g}, "
            f"bias {self.bias:+.3g}"
        )


@dataclass(frozen=True)
class Budget:
    """Limits for mean |d|, the 99th percentile of |d| and k3 in compute dtype `dtype` (`float32`).

    measured: decode path against packed forward on this machine; None for the starting points alone.
    """

    dtype: str
    mean: float
    p99: float
    k3: float
    measured: Difference | None = None

    @staticmethod
    def starting(dtype: torch.dtype | str) -> "Budget":
        """The starting points of a compute dtype. Raises ValueError for one that has none."""
        name = str(dtype).removeprefix("torch.")
        if name not in STARTING_POINTS:
            raise ValueError(f"dtype: {name} has no numerics budget; use one of {', '.join(STARTING_POINTS)}")
        return Budget(name, *STARTING_POINTS[name])

    def as_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` reads them."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Budget":
        """The budget that `as_dict` wrote."""
        measured = values["measured"]
        return Budget(**{**values, "measured": None if measured is None else Difference(**measured)})

    def widened(self, measured: Difference) -> "Budget":
        """This budget with every limit at least MARGIN times what was measured, at most CEILING times its own.

        Both factors are squared for k3, which grows with the square of d.
        """

        def limit(own: float, found: float, power: int) -> float:
            return min(max(own, MARGIN**power * found), CEILING**power * own)

        mean, p99 = limit(self.mean, measured.mean, 1), limit(self.p99, measured.p99, 1)
        return Budget(self.dtype, mean, p99, limit(self.k3, measured.k3, 2), measured)

    def limits(self, count: int) -> dict[str, float]:
        """The limits for a sample of `count` tokens, by the field of Difference."""
        tokens = max(1, count)
        return {
            "mean": self.mean + self.p99 / tokens,
            "p99": self.p99 if count >= 100 else 2.0 * self.p99,
            "k3": self.k3 + (math.expm1(self.p99) - self.p99) / tokens,
        }

    def exceeded(self, difference: Difference) -> tuple[str, ...]:
        """One text per limit that `difference` is above, with the figure, its value and the limit; empty: within."""
        texts = []
        for name, limit in self.limits(difference.count).items():
            value, words = getattr(difference, name), FIGURES[name]
            if not value <= limit:  # NaN exceeds too
                texts.append(f"{words} {value:.3g} exceeds {limit:.3g} ({self.dtype}, {difference.count} tokens)")
        return tuple(texts)

    def describe(self) -> str:
        """One line for the log."""
        limits = f"numerics budget {self.dtype}: mean {self.mean:.3g}, p99 {self.p99:.3g}, k3 {self.k3:.3g}"
        if self.measured is None:
            return f"{limits} (starting points)"
        doubt = "; MORE THAN ROUNDING" if self.exceeded(self.measured) else ""
        return f"{limits}; decode against packed forward, {self.measured.describe()}{doubt}"


def packed_difference(
    loaded: LoadedModel, sequences: Sequence[Pair], *, temperature: float, token_budget: int
) -> Difference:
    """Trainer minus decode path, same weights, temperature and tokens. Completions without tokens are left out."""
    pairs = [(tuple(prompt), tuple(ids)) for prompt, ids in sequences if len(ids)]
    decoded = decode_logprobs(loaded, pairs, temperature=temperature)
    completions = [
        Completion(
            token_ids=ids,
            logprobs=tuple(values.tolist()),
            kept_mass=(1.0,) * len(ids),
            finish_reason="length",
            policy_version=loaded.policy_version,
            sample=sample,
        )
        for sample, ((_, ids), values) in enumerate(zip(pairs, decoded))
    ]
    table = make_table(
        _groups([prompt for prompt, _ in pairs], completions), dtype=torch.promote_types(loaded.dtype, torch.float32)
    )
    longest = max((len(prompt) + len(ids) for prompt, ids in pairs), default=1)
    batches = pack(table, range(len(pairs)), token_budget=max(token_budget, longest))
    logprobs = score(loaded, table, batches, temperature=temperature)
    return Difference.of(logprobs.double() - table.sampling_logprobs.double())


def excerpt(sequences: Sequence[Pair], *, tokens: int, longest: int = 64) -> list[Pair]:
    """Completions spread over all of `sequences`, each cut to its first `longest` tokens, about `tokens` in all and at
    least one: a decode path that runs token by token should not run to the end of long completions."""
    cut = [(prompt, ids[:longest]) for prompt, ids in sequences if len(ids)]
    return cut[:: max(1, round(sum(len(ids) for _, ids in cut) / tokens))]


def _groups(
    prompts: Sequence[tuple[int, ...]], completions: Iterable[Completion]
) -> list[tuple[tuple[int, ...], list[Completion]]]:
    """Neighbours with one prompt share it, as the completions of a group do in training."""
    joined = groupby(zip(prompts, completions), key=lambda pair: pair[0])
    return [(prompt, [completion for _, completion in pairs]) for prompt, pairs in joined]


def calibrate(loaded: LoadedModel, sequences: Sequence[Pair], *, temperature: float, token_budget: int) -> Budget:
    """The budget of `loaded` on this machine, from a few sampled (prompt ids, completion ids).

    Some hundred tokens are enough. token_budget: as in training, most tokens of one packed forward. Raises StepError
    when the trainer's logprobs are not finite, ValueError for sequences that cannot run (see decode_logprobs).
    """
    measured = packed_difference(loaded, sequences, temperature=temperature, token_budget=token_budget)
    budget = Budget.starting(loaded.dtype)
    return budget.widened(measured) if measured.count else budget
