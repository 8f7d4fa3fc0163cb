"""The arguments of `sampling.py`: their shapes, types and ranges.

What can be told without a look at a tensor's values is checked on every device, the range of a Python number among it.
Values of tensors are checked on a CPU only: a GPU would have to wait.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rhotrain.kernels.backend import inverse_temperature
from rhotrain.kernels.rows import KeptSet

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_INTS = (int, torch.SymInt)  # a size is a SymInt while torch.export traces
_REALS = (*_INTS, float, torch.SymFloat)
_FLOAT32, _INT64 = torch.finfo(torch.float32), torch.iinfo(torch.int64)


@dataclass(frozen=True, slots=True)
class _Range:
    """low <= value <= high, in words; `zero`: or 0."""

    low: float
    high: float
    rule: str
    zero: bool = False


_WORD = _Range(_INT64.min, _INT64.max, "an integer of 64 bits, -2**63 to 2**63 - 1")
_RANGES = {
    # From the smallest normal float32 on: below it 1/T overflows, or is what the device makes of denormal numbers.
    "temperature": _Range(
        _FLOAT32.smallest_normal, _FLOAT32.max, "0 (greedy) or 1.2e-38 to 3.4e38, where 1/T is finite in float32", True
    ),
    "top_k": _Range(0, _INT64.max, "0 <= top_k < 2**63 (0 keeps all)"),
    "top_p": _Range(_FLOAT32.smallest_normal, 1.0, "0 < top_p <= 1 in float32 (1 keeps all)"),
    "min_p": _Range(0.0, 1.0, "0 <= min_p <= 1 (0 keeps all)"),
    "seeds": _WORD,
    "samples": _WORD,
    "positions": _WORD,
}


@dataclass(frozen=True, slots=True)
class RowParams:
    """What every row is sampled with, tensors [B]. temperature 0: greedy; top_k 0: cuts nothing.

    temperature has the type of the maths; seeds, samples, positions and top_k are int64; top_p and min_p are float64
    for the reference and float32 for the kernels.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    samples: Tensor
    positions: Tensor

    def tensors(self) -> list[Tensor]:
        """The fields in their order."""
        return [getattr(self, field.name) for field in fields(self)]

    def select(self, index: Tensor) -> "RowParams":
        """The rows of `index` (int64), in that order."""
        return RowParams(*(tensor[index] for tensor in self.tensors()))

    @property
    def greedy(self) -> Tensor:
        """bool [B]."""
        return self.temperature == 0.0

    @property
    def inverse(self) -> Tensor:
        """1 / temperature [B], 1 where greedy."""
        t = torch.where(self.greedy, 1.0, self.temperature)
        return inverse_temperature(t, t.dtype, t.device)

    @property
    def truncates(self) -> Tensor:
        """bool [B], the rows that cut anything."""
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))


def _found(value: object) -> str:
    """What was given instead, for a message."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def check_logits(logits_BV: object, vocab_size: object) -> None:
    """ValueError unless logits are floating point [B, V] with V >= 1, and vocab_size is None or in [1, V]."""
    need = "bf16, fp16, fp32 or fp64 of shape [B, V]"
    if not isinstance(logits_BV, Tensor) or logits_BV.dim() != 2 or logits_BV.dtype not in _FLOATS:
        raise ValueError(f"logits: need {need}, got {_found(logits_BV)}")
    vocab = logits_BV.shape[1]
    if vocab == 0:
        raise ValueError(f"logits: need {need} with V >= 1, got {_found(logits_BV)}: no id to draw")
    if vocab_size is None:
        return
    if not isinstance(vocab_size, _INTS) or isinstance(vocab_size, bool):  # bool is an int to Python
        raise ValueError(f"vocab_size: need an int or None (all {vocab} columns), got {_found(vocab_size)}")
    if not 1 <= vocab_size <= vocab:
        raise ValueError(f"vocab_size: {vocab_size} is not in [1, {vocab}], the columns of the logits")


def row_param(name: str, value: float | Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value`, a number or a tensor, as a tensor [rows] of `dtype`. ValueError as in `sample_tokens`."""
    integer = dtype == torch.int64
    if isinstance(value, Tensor):
        if value.dtype not in _INTEGERS and (integer or value.dtype not in _FLOATS):
            raise _wrong_type(name, value, rows, integer)
        if value.requires_grad:
            raise ValueError(f"{name}: requires grad, but no gradient is formed for it; pass {name}.detach()")
        if value.device != device:
            raise ValueError(f"{name}: on {value.device}, but logits are on {device}; move one of them")
        if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != rows):
            raise ValueError(
                f"{name}: shape {list(value.shape)} does not fit {rows} rows; give a number or a tensor [{rows}]"
            )
        return value.to(dtype).expand(rows)
    if not isinstance(value, _INTS if integer else _REALS) or isinstance(value, bool):
        raise _wrong_type(name, value, rows, integer)
    limits = _RANGES[name]
    if not (limits.low <= value <= limits.high or (limits.zero and value == 0)):
        raise ValueError(f"{name}: {value} is out of range; need {limits.rule}")
    return torch.full((rows,), value, dtype=dtype, device=device)  # filled there: nothing is copied, nothing waits


def _wrong_type(name: str, value: object, rows: int, integer: bool) -> ValueError:
    need = f"an int or an integer tensor [{rows}]" if integer else f"a number or a real tensor [{rows}]"
    return ValueError(f"{name}: need {need}, got {_found(value)}")


def checked(params: RowParams, vocab: int) -> RowParams:
    """The same with top_k = 0 where it cuts nothing. Ranges are checked on a CPU only: a GPU would have to wait."""
    if params.top_k.device.type == "cpu":
        for name in ("temperature", "top_k", "top_p", "min_p"):
            values, limits = getattr(params, name), _RANGES[name]
            ok = (values >= limits.low) & (values <= limits.high)
            if limits.zero:
                ok |= values == 0
            if not bool(ok.all()):
                raise ValueError(f"{name}: {values[~ok][0].item()} is out of range; need {limits.rule}")
    return replace(params, top_k=torch.where(params.top_k >= vocab, 0, params.top_k))


def set_tensors(name: str, sets: object, rows: int, device: torch.device) -> list[Tensor]:
    """(offsets, ids) of `allowed` or `banned`, nothing for None. ValueError unless they fit the logits' rows."""
    if sets is None:
        return []
    if not isinstance(sets, KeptSet):
        raise ValueError(f"{name}: need a KeptSet (KeptSet.from_lists makes one of lists), got {_found(sets)}")
    offsets, ids = sets.offsets, sets.ids
    if not isinstance(offsets, Tensor) or not isinstance(ids, Tensor):
        raise ValueError(f"{name}: need tensors, got {_found(offsets)} and {_found(ids)}; use KeptSet.from_lists")
    if offsets.dtype != torch.int64 or ids.dtype != torch.int32 or offsets.dim() != 1 or ids.dim() != 1:
        raise ValueError(f"{name}: need 1-D int64 offsets and int32 ids, got {_found(offsets)} and {_found(ids)}")
    if offsets.device != device or ids.device != device:
        raise ValueError(
            f"{name}: offsets on {offsets.device}, ids on {ids.device}, but logits are on {device}; move them"
        )
    if offsets.shape[0] != rows + 1:
        raise ValueError(f"{name}: {offsets.shape[0] - 1} sets for {rows} rows; give one set per row")
    return [offsets, ids]


def may_draw_mask(vocab: int, allowed: KeptSet | None, banned: KeptSet | None) -> Tensor | None:
    """bool [B,V], the ids that may be drawn; None for all. ValueError (on a CPU) names the set with a wrong id."""
    may_draw: Tensor | None = None
    for name, sets in (("allowed", allowed), ("banned", banned)):
        if sets is None:
            continue
        try:
            mask = sets.mask(vocab)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        mask = ~mask if name == "banned" else mask
        may_draw = mask if may_draw is None else may_draw & mask
    return may_draw
