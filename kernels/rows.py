"""The rows of one call: which of them carry anything, their temperature, and the id sets they are restricted to.

Every op of this folder takes [N, ...] tensors in which some rows carry no loss. Those rows are left out before
anything is computed, so that what they hold (NaN, inf, garbage) cannot reach an output: no inf * 0, no gradient.

A public function checks what can be checked without looking at values (`check_rows`) and hands plain tensors and
numbers to its operator, so that torch.compile can trace the caller; inside, `active_rows` looks at the values.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import inverse_temperature
from rhotrain.kernels.spec import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class KeptSet:
    """For each of N rows, the set of ids that its distribution is restricted to; ragged, 4 bytes per id.

    offsets: int64 [N + 1], row i owns ids[offsets[i] : offsets[i + 1]]. ids: int32, ascending within a row, each once,
    below the vocabulary size.
    """

    offsets: Tensor
    ids: Tensor

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "KeptSet":
        """Build from one list of ids per row, in any order."""
        sets = [sorted({int(i) for i in row}) for row in rows]
        lengths = torch.tensor([0, *map(len, sets)], dtype=torch.int64)
        flat = torch.tensor([i for row in sets for i in row], dtype=torch.int32)
        return KeptSet(lengths.cumsum(0).to(device), flat.to(device))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def rows(self, start: int, stop: int) -> "KeptSet":
        """Rows start..stop, ids shared with this one."""
        offsets = self.offsets[start : stop + 1]
        first, last = torch.stack((offsets[0], offsets[-1])).tolist()  # one wait for a GPU
        return KeptSet(offsets - first, self.ids[first:last])

    def select(self, index_M: Tensor) -> "KeptSet":
        """The rows of `index_M` (int64), in that order."""
        starts = self.offsets[index_M]
        lengths = self.offsets[index_M + 1] - starts
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        return KeptSet(offsets, self.ids[torch.arange(shift.shape[0], device=shift.device) + shift])

    def check(self, vocab: int) -> None:
        """ValueError unless the offsets fit the ids, and every row's ids are in [0, vocab) and ascending.

        Looks at the values: for tensors on a CPU.
        """
        ids, lengths = self.ids, self.offsets.diff()
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != ids.shape[0] or bool((lengths < 0).any()):
            raise ValueError(
                f"KeptSet.offsets: must rise from 0 to the number of ids ({ids.shape[0]}), got "
                f"{int(self.offsets[0])} .. {int(self.offsets[-1])}"
            )
        if not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"KeptSet.ids: {low if low < 0 else high} is not in [0, {vocab}), the real vocabulary")
        inside = torch.ones(ids.shape[0], dtype=torch.bool)
        inside[self.offsets[:-1][lengths > 0]] = False  # a row's first id follows nothing
        wrong = inside[1:] & (ids[1:] <= ids[:-1])
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0]) + 1
            row = int(torch.searchsorted(self.offsets, at, right=True)) - 1
            raise ValueError(
                f"KeptSet.ids: row {row} has {int(ids[at])} after {int(ids[at - 1])}; ids must ascend, each once "
                "(KeptSet.from_lists sorts them)"
            )

    def mask(self, vocab: int) -> Tensor:
        """bool [N, vocab], True for kept ids. ValueError (on a CPU) as in `check`."""
        if self.ids.device.type == "cpu":
            self.check(vocab)
        # With its output size given, repeat_interleave does not wait for the device.
        rows, size = torch.arange(len(self), device=self.ids.device), self.ids.shape[0]
        row_of = torch.repeat_interleave(rows, self.offsets.diff(), output_size=size)
        mask = torch.zeros(len(self), vocab, dtype=torch.bool, device=self.ids.device)
        mask[row_of, self.ids.long()] = True
        return mask


@dataclass(frozen=True, eq=False)
class RowArguments:
    """What every op takes beside its logits, checked for shape and type but not for values.

    token_ids int64 or int32 [N]; inv_temperature 0-dim or [N], None for the number 1; kept: N sets or None; vocab: ids
    at or above it do not exist; ignore_index: the id of rows without loss.
    """

    token_ids: Tensor
    inv_temperature: Tensor | None
    kept_offsets: Tensor | None
    kept_ids: Tensor | None
    vocab: int
    ignore_index: int

    @property
    def kept(self) -> KeptSet | None:
        """The sets as one object."""
        if self.kept_offsets is None or self.kept_ids is None:
            return None
        return KeptSet(self.kept_offsets, self.kept_ids)

    @property
    def flat(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int, int]:
        """The fields in order, as the operators take them (torch.library takes no dataclass)."""
        return (
            self.token_ids,
            self.inv_temperature,
            self.kept_offsets,
            self.kept_ids,
            self.vocab,
            self.ignore_index,
        )


def check_rows(
    token_ids_N: Tensor,
    *,
    columns: int,
    dtype: torch.dtype,
    temperature: float | Tensor,
    vocab_size: int | None,
    ignore_index: int,
    kept: KeptSet | None,
) -> RowArguments:
    """The arguments that every op shares, without looking at a tensor's values.

    ValueError for a wrong shape, type or device, a temperature number that is not finite and positive, and a
    vocab_size outside [1, columns].
    """
    if token_ids_N.dim() != 1 or token_ids_N.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"token_ids: need int64 or int32 of shape [N], got {token_ids_N.dtype} {list(token_ids_N.shape)}"
        )
    vocab = columns if vocab_size is None else vocab_size
    if not 1 <= vocab <= columns:
        raise ValueError(f"vocab_size: {vocab} is not in [1, {columns}], the number of logits per row")
    count, device = token_ids_N.shape[0], token_ids_N.device
    offsets = ids = None
    if kept is not None:
        if not isinstance(kept, KeptSet):
            raise ValueError(f"kept: need a KeptSet, got {type(kept).__name__}; KeptSet.from_lists makes one")
        offsets, ids = kept.offsets, kept.ids
        if offsets.dim() != 1 or ids.dim() != 1:
            raise ValueError(f"kept: need offsets [N + 1] and ids [K], got {list(offsets.shape)} and {list(ids.shape)}")
        if len(kept) != count:
            raise ValueError(f"kept: has {len(kept)} rows for {count} token ids")
        if ids.dtype != torch.int32 or offsets.dtype != torch.int64:
            raise ValueError(f"kept: need int64 offsets and int32 ids, got {offsets.dtype} and {ids.dtype}")
        if offsets.device != device or ids.device != device:
            raise ValueError(f"kept: on {ids.device}, but token_ids are on {device}; move one of them")
    return RowArguments(
        token_ids_N, _inverse_rows(temperature, count, dtype, device), offsets, ids, vocab, ignore_index
    )


def _inverse_rows(temperature: float | Tensor, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if not isinstance(temperature, Tensor):
        if not 0.0 < temperature < math.inf:
            raise ValueError(f"temperature: {temperature} must be finite and > 0 (0, greedy, has no gradient)")
        return None if temperature == 1.0 else inverse_temperature(float(temperature), dtype, device)
    if temperature.requires_grad:
        raise ValueError("temperature: requires grad, but no gradient is formed for it; pass temperature.detach()")
    if temperature.dim() > 1 or (temperature.dim() == 1 and temperature.shape[0] != count):
        raise ValueError(f"temperature: need a number or shape [{count}], got shape {list(temperature.shape)}")
    return inverse_temperature(temperature, dtype, device)


def check_values(arguments: RowArguments, active_N: Tensor, in_range_N: Tensor) -> None:
    """ValueError for a temperature that is not finite and positive, or an active row's id outside the real vocabulary.

    Looks at values, so for tensors on a CPU; on CUDA both would have to wait for the device.
    """
    inverse, ids = arguments.inv_temperature, arguments.token_ids
    if inverse is not None and not bool(((inverse > 0) & inverse.isfinite()).all()):
        raise ValueError("temperature: every value must be finite and > 0 (0, greedy, has no gradient)")
    wrong = active_N & ~in_range_N
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"token_ids: row {row} has id {int(ids[row])}, outside [0, {arguments.vocab}); "
            f"rows without loss must have ignore_index ({arguments.ignore_index})"
        )


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

    def arguments(self) -> RowArguments:
        """These rows as the rows of a call of their own."""
        inverse, kept = self.inv_temperature, self.kept
        return RowArguments(
            self.token_ids,
            inverse.squeeze(1) if inverse is not None and inverse.dim() else inverse,
            None if kept is None else kept.offsets,
            None if kept is None else kept.ids,
            self.vocab,
            IGNORE_INDEX,
        )

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


def active_rows(arguments: RowArguments, weights_N: Tensor | None = None) -> ActiveRows:
    """The rows to compute: a row is active unless its id is `ignore_index` or its weight is 0.

    ValueError as in `check_values` on a CPU; on CUDA a bad id is an asynchronous assert and the row is left out.
    Knowing how many rows there are waits for the device.
    """
    ids, inverse, kept = arguments.token_ids.long(), arguments.inv_temperature, arguments.kept
    active = ids != arguments.ignore_index
    if weights_N is not None:
        active &= weights_N != 0
    in_range = (ids >= 0) & (ids < arguments.vocab)
    if ids.device.type == "cpu":
        check_values(arguments, active, in_range)
    else:
        torch._assert_async((in_range | ~active).all(), "token_ids: an id is outside the real vocabulary")
        active &= in_range
    index = active.nonzero().squeeze(1)
    if inverse is not None and inverse.dim():
        inverse = inverse[index].unsqueeze(1)
    return ActiveRows(
        index,
        ids[index],
        inverse,
        kept if kept is None or index.shape[0] == ids.shape[0] else kept.select(index),
        arguments.vocab,
    )


def row_blocks(count: int, vocab: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of rows whose logits stay in the cache of a CPU core while some ten operations pass over them."""
    elements = 2**20 if device.type == "cpu" else 2**26
    step = max(1, elements // vocab)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def gather_logits(logits_NV: Tensor, rows: ActiveRows, dtype: torch.dtype) -> Tensor:
    """A fresh [M, vocab] copy of the active rows' real logits in `dtype`, free to be overwritten."""
    return logits_NV[:, : rows.vocab].index_select(0, rows.index).to(dtype)
