"""The rows of one call: which of them carry anything, their temperature, and the id sets they are restricted to.

Every op of this folder takes [N, ...] tensors in which some rows carry no loss. Those rows are left out before
anything is computed, so that what they hold (NaN, inf, garbage) cannot reach an output: no inf * 0, no gradient.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import inverse_temperature


@dataclass(frozen=True, eq=False)
class KeptSet:
    """For each of N rows, the set of ids that its distribution is restricted to; ragged, 4 bytes per id.

    offsets: int64 [N + 1], row i owns ids[offsets[i] : offsets[i + 1]]. ids: int32, each below the vocabulary size.
    """

    offsets: Tensor
    ids: Tensor

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "KeptSet":
        """Build from one list of ids per row."""
        lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        flat = torch.tensor([i for row in rows for i in row], dtype=torch.int32)
        return KeptSet(lengths.cumsum(0).to(device), flat.to(device))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def rows(self, start: int, stop: int) -> "KeptSet":
        """Rows start..stop, ids shared with this one."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return KeptSet(offsets - first, self.ids[first:last])

    def select(self, index_M: Tensor) -> "KeptSet":
        """The rows of `index_M` (int64), in that order."""
        starts = self.offsets[index_M]
        lengths = self.offsets[index_M + 1] - starts
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        return KeptSet(offsets, self.ids[torch.arange(shift.shape[0], device=shift.device) + shift])

    def mask(self, vocab: int) -> Tensor:
        """bool [N, vocab], True for kept ids. ValueError (on a CPU) if an id is not below `vocab`."""
        if (
            self.ids.device.type == "cpu"
            and self.ids.numel()
            and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocab
        ):
            bad = int(self.ids.max()) if int(self.ids.min()) >= 0 else int(self.ids.min())
            raise ValueError(f"KeptSet.ids: {bad} is not in [0, {vocab}), the real vocabulary")
        row_of = torch.repeat_interleave(torch.arange(len(self), device=self.ids.device), self.offsets.diff())
        mask = torch.zeros(len(self), vocab, dtype=torch.bool, device=self.ids.device)
        mask[row_of, self.ids.long()] = True
        return mask


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """The M of N rows that carry something, with what the maths needs about each.

    index int64 [M] into the N rows; token_ids int64 [M]; inv_temperature 0-dim or [M, 1], None when the temperature
    is the number 1; kept: the M kept sets or None; vocab: ids at or above it do not exist.
    """

    index: Tensor
    token_ids: Tensor
    inv_temperature: Tensor | None
    kept: KeptSet | None
    vocab: int

    def __len__(self) -> int:
        return self.index.shape[0]

    def rows(self, start: int, stop: int) -> "ActiveRows":
        """Active rows start..stop."""
        inverse = self.inv_temperature
        return ActiveRows(
            self.index[start:stop],
            self.token_ids[start:stop],
            inverse[start:stop] if inverse is not None and inverse.dim() else inverse,
            self.kept.rows(start, stop) if self.kept is not None else None,
            self.vocab,
        )


def active_rows(
    token_ids_N: Tensor,
    *,
    vocab: int,
    dtype: torch.dtype,
    temperature: float | Tensor,
    vocab_size: int | None,
    ignore_index: int,
    kept: KeptSet | None,
    weights_N: Tensor | None = None,
) -> ActiveRows:
    """Check the arguments that every op shares and find the rows to compute.

    A row is active unless its id is `ignore_index` or its weight is 0. ValueError for a wrong shape, a temperature
    that is not finite and positive, a vocab_size outside [1, vocab], and (CPU) an active row's id outside the real
    vocabulary; on CUDA a bad id is an asynchronous assert and the row is left out.
    """
    if token_ids_N.dim() != 1 or token_ids_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"token_ids: need int64 or int32 of shape [N], got {token_ids_N.dtype} {list(token_ids_N.shape)}"
        )
    count = token_ids_N.shape[0]
    real = vocab if vocab_size is None else vocab_size
    if not 1 <= real <= vocab:
        raise ValueError(f"vocab_size: {real} is not in [1, {vocab}], the number of logits per row")
    if kept is not None and len(kept) != count:
        raise ValueError(f"kept: has {len(kept)} rows for {count} token ids")
    ids = token_ids_N.long()
    active = ids != ignore_index
    if weights_N is not None:
        active &= weights_N != 0
    in_range = (ids >= 0) & (ids < real)
    if ids.is_cuda:
        torch._assert_async((in_range | ~active).all(), "token_ids: an id is outside the real vocabulary")
        active &= in_range
    elif bool((active & ~in_range).any()):
        row = int((active & ~in_range).nonzero()[0])
        raise ValueError(
            f"token_ids: row {row} has id {int(ids[row])}, outside [0, {real}); "
            f"rows without loss must have ignore_index ({ignore_index})"
        )
    index = active.nonzero().squeeze(1)
    return ActiveRows(
        index,
        ids[index],
        _inverse_temperature_rows(temperature, count, index, dtype),
        kept if kept is None or index.shape[0] == count else kept.select(index),
        real,
    )


def _inverse_temperature_rows(
    temperature: float | Tensor, count: int, index_M: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if not isinstance(temperature, Tensor):
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature: {temperature} must be finite and > 0 (0, greedy, has no gradient)")
        return None if temperature == 1.0 else inverse_temperature(float(temperature), dtype, index_M.device)
    if temperature.requires_grad:
        raise ValueError("temperature: requires grad, but no gradient is formed for it; pass temperature.detach()")
    if temperature.dim() > 1 or (temperature.dim() == 1 and temperature.shape[0] != count):
        raise ValueError(f"temperature: need a number or shape [{count}], got shape {list(temperature.shape)}")
    if temperature.device.type == "cpu" and not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueError("temperature: every value must be finite and > 0 (0, greedy, has no gradient)")
    inverse = inverse_temperature(temperature, dtype, index_M.device)
    return inverse[index_M].unsqueeze(1) if inverse.dim() else inverse


def row_blocks(count: int, vocab: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose logits stay in the cache of a CPU core while some ten operations pass over them."""
    elements = 2**20 if device.type == "cpu" else 2**26
    step = max(1, elements // vocab)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def gather_logits(logits_NV: Tensor, rows: ActiveRows, dtype: torch.dtype) -> Tensor:
    """A fresh [M, vocab] copy of the active rows' real logits in `dtype`, free to be overwritten."""
    return logits_NV[:, : rows.vocab].index_select(0, rows.index).to(dtype)
