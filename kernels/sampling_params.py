"""The per-row parameters of `sampling.py`: their shapes, types and ranges."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rhotrain.kernels.backend import inverse_temperature


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


def row_param(name: str, value: float | Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((rows,), value, dtype=dtype, device=device)  # filled there: nothing is copied, nothing waits
    if value.dim() > 1 or (value.dim() == 1 and len(value) != rows):
        raise ValueError(
            f"{name}: shape {tuple(value.shape)} does not fit {rows} rows; give a number or a tensor [{rows}]"
        )
    return value.to(device=device, dtype=dtype).expand(rows)


def checked(params: RowParams, vocab: int) -> RowParams:
    """The same with top_k = 0 where it cuts nothing. Ranges are checked on a CPU only: a GPU would have to wait."""
    t, k, p, m = params.temperature, params.top_k, params.top_p, params.min_p
    if t.device.type == "cpu":
        _check_range("temperature", t, (t >= 0.0) & torch.isfinite(t), "a finite value >= 0 (0 is greedy)")
        _check_range("top_k", k, k >= 0, "top_k >= 0 (0 keeps all)")
        _check_range("top_p", p, (p > 0.0) & (p <= 1.0), "0 < top_p <= 1 (1 keeps all)")
        _check_range("min_p", m, (m >= 0.0) & (m <= 1.0), "0 <= min_p <= 1 (0 keeps all)")
    return replace(params, top_k=torch.where(k >= vocab, 0, k))


def _check_range(name: str, values: Tensor, ok: Tensor, rule: str) -> None:
    if not bool(ok.all()):
        raise ValueError(f"{name}: {values[~ok][0].item()} is out of range; need {rule}")
