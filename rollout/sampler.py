"""What one call asks of the sampler, and the draw of one token per row with its way to the host.

Sampler and trainer share the function: log_softmax(logits / temperature) over the real vocabulary, float32.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhotrain.kernels.logprob import KeptSet
from rhotrain.kernels.sampling import Sample, sample_tokens
from rhotrain.rollout.completion import SamplingParams

Ids = tuple[int, ...]


@dataclass(frozen=True)
class SamplingPlan:
    """What one `generate` call asks of the sampler. stop_ids: every id that ends a completion."""

    params: SamplingParams
    stop_ids: frozenset[int]
    vocab_size: int
    device: torch.device
    _banned: dict[bytes, KeptSet] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def records_sets(self) -> bool:
        """True when the kept ids of every token are recorded; without truncation there is nothing to record."""
        return self.params.keep_sets and self.params.truncates

    @property
    def cuts_tail(self) -> bool:
        """True when top-k, top-p or min-p are on, so that every token has a kept set of its own."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def minimum(self) -> int:
        """Tokens below which no stop id is drawn."""
        return self.params.min_new_tokens if self.stop_ids else 0

    @cached_property
    def all_ids(self) -> Ids:
        """The real vocabulary. One object for every token with this kept set, else each would cost V ints."""
        return tuple(range(self.vocab_size))

    @cached_property
    def allowed_ids(self) -> Ids:
        """What may be drawn below min_new_tokens: the real vocabulary without the stop ids."""
        return tuple(i for i in range(self.vocab_size) if i not in self.stop_ids)

    @cached_property
    def stop_array(self) -> np.ndarray:
        """`stop_ids`, int64, ascending."""
        return np.array(sorted(self.stop_ids), dtype=np.int64)

    def banned(self, short: np.ndarray) -> KeptSet | None:
        """The stop ids for every row that `short` (bool [B]) marks, nothing for the others; None when it marks none."""
        if not short.any():
            return None
        key = short.tobytes()
        if key not in self._banned:
            self._banned.clear()  # the rows that are short stay the same for many steps
            self._banned[key] = self._banned_sets(short)
        return self._banned[key]

    def _banned_sets(self, short: np.ndarray) -> KeptSet:
        offsets = np.concatenate(([0], np.cumsum(short * len(self.stop_array))))
        ids = np.tile(self.stop_array, int(short.sum())).astype(np.int32)
        return KeptSet(*(torch.from_numpy(a).to(self.device, non_blocking=True) for a in (offsets, ids)))


@dataclass(frozen=True, slots=True)
class HostDraw:
    """One drawn token per row, on the host: arrays [B]; kept_ids one entry per row, None when they are not recorded.

    error: the logits were NaN or infinite, and the row's other entries mean nothing.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    kept_mass: np.ndarray
    error: np.ndarray
    kept_ids: list[Ids] | None


class Draw:
    """One drawn token per row, on its way to the host: the copy runs behind the device's other work.

    token_ids: int64 [B] on the device, what the next step feeds back.
    """

    def __init__(self, sample: Sample, plan: SamplingPlan, short: np.ndarray) -> None:
        self.token_ids = sample.token_ids
        self._sample, self._plan, self._short = sample, plan, short
        # One transfer: float64 holds the ids and the float32 values exactly.
        columns = (sample.token_ids, sample.logprobs, sample.kept_mass, sample.error)
        values_4B = torch.stack([column.double() for column in columns])
        self._event: Any = None
        if values_4B.is_cuda:
            self._values = torch.empty(values_4B.shape, dtype=values_4B.dtype, pin_memory=True)
            self._values.copy_(values_4B, non_blocking=True)
            self._event = torch.cuda.Event()
            # Of the tensors' device, which need not be the current one.
            self._event.record(torch.cuda.current_stream(values_4B.device))
        else:
            self._values = values_4B

    def host(self) -> HostDraw:
        """Wait for the copy."""
        if self._event is not None:
            self._event.synchronize()
        ids, logprobs, mass, error = self._values.numpy()
        return HostDraw(ids.astype(np.int64), logprobs, mass, error != 0, self._kept_ids())

    def _kept_ids(self) -> list[Ids] | None:
        plan = self._plan
        if not plan.records_sets:
            return None
        if self._sample.kept is None:
            return [plan.allowed_ids if short else plan.all_ids for short in self._short.tolist()]
        offsets, ids = self._sample.kept.offsets.tolist(), self._sample.kept.ids.tolist()
        return [tuple(ids[a:b]) for a, b in pairwise(offsets)]


def draw_tokens(logits_BV: Tensor, samples_B: Tensor, drawn_B: Tensor, plan: SamplingPlan, short: np.ndarray) -> Draw:
    """One token per row. samples_B, drawn_B: int64, the counters of the row's random number. short: bool [B], rows
    below min_new_tokens."""
    params = plan.params
    sample = sample_tokens(
        logits_BV,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seeds=params.seed,
        positions=drawn_B,
        samples=samples_B,
        vocab_size=plan.vocab_size,
        banned=plan.banned(short),
        keep_sets=plan.records_sets and plan.cuts_tail,
    )
    return Draw(sample, plan, short)
