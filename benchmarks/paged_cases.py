"""Decode attention over pages as it is measured: shapes, inputs, float64 truth, and who computes it.

Every row has pages of its own, in random order: what a group shares through the cache is not counted on. Bytes that
must move are the keys and values of all tokens, once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from kernel_report import GRAPH, OURS
from torch import Tensor

from rhotrain.kernels.paged_attention import paged_decode

TARGET = 0.8
"""Share of the copy's bandwidth that is aimed at on an H200 from BUSY_ROWS rows on: below, launches are what counts."""
BUSY_ROWS = 64
SEED = 7
TRUTH_ROWS = 8


@dataclass(frozen=True, slots=True)
class Paged:
    """rows: sequences. tokens: of the longest. skewed: lengths spread over 1/16 to all of it. width: columns of the
    tables, in multiples of what the longest needs."""

    rows: int
    tokens: int
    heads: int
    key_heads: int
    dim: int
    skewed: bool = False
    width: int = 1
    page_size: int = 16

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.tokens} {self.heads}/{self.key_heads}x{self.dim} page {self.page_size}"
        return shape + " skewed" * self.skewed + (f" tables x{self.width}" if self.width > 1 else "")

    @property
    def lengths(self) -> Tensor:
        """int64 [rows], seeded."""
        if not self.skewed:
            return torch.full((self.rows,), self.tokens)
        g = torch.Generator().manual_seed(SEED)
        return torch.randint(self.tokens // 16, self.tokens + 1, (self.rows,), generator=g)

    def gigabytes(self, dtype: torch.dtype) -> float:
        return int(self.lengths.sum()) * self.key_heads * 2 * self.dim * dtype.itemsize / 1e9


QWEN3_06B, QWEN25_15B, SMOLLM2 = (16, 8, 128), (12, 2, 128), (9, 3, 64)


def paged_cases(device: torch.device) -> Iterator[Paged]:
    """On a CPU one small shape; on a GPU what a step of decode sees, the most important first."""
    if device.type == "cpu":
        yield Paged(16, 128, *SMOLLM2, skewed=True)
        return
    for rows, tokens in ((256, 1024), (64, 1024), (1, 1024), (256, 512), (64, 4096), (8, 4096), (1, 4096)):
        yield Paged(rows, tokens, *QWEN3_06B)
    yield Paged(256, 1024, *QWEN3_06B, skewed=True)
    yield Paged(256, 1024, *QWEN3_06B, page_size=256)
    for width in (1, 40):  # the same work beside tables for 40960 tokens
        yield Paged(64, 1024, *QWEN3_06B, skewed=True, width=width)
    for shape in (QWEN25_15B, SMOLLM2):
        yield Paged(256, 1024, *shape, skewed=True)


@dataclass(frozen=True, eq=False)
class PagedInputs:
    """What `paged_decode` takes."""

    case: Paged
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    tables: Tensor
    lens: Tensor

    @property
    def scale(self) -> float:
        return float(self.case.dim**-0.5)

    def decode(self, backend: Any) -> Tensor:
        pools = (self.k_pool, self.v_pool)
        return paged_decode(self.q, *pools, self.tables, self.lens, scale=self.scale, backend=backend)


def paged_inputs(case: Paged, dtype: torch.dtype, device: torch.device) -> PagedInputs:
    """Seeded; scores of standard deviation 2, so that some tokens weigh more than others."""
    g = torch.Generator(device).manual_seed(SEED)
    used = -(-case.tokens // case.page_size)
    pages = torch.randperm(case.rows * used, generator=g, device=device).int().view(case.rows, used)
    tables = torch.zeros(case.rows, used * case.width, dtype=torch.int32, device=device)
    tables[:, :used] = pages
    pool = (case.rows * used, case.page_size, case.key_heads, case.dim)
    k_pool, v_pool = (torch.randn(pool, generator=g, device=device, dtype=dtype) for _ in range(2))
    q = 2 * torch.randn(case.rows, case.heads, case.dim, generator=g, device=device, dtype=dtype)
    return PagedInputs(case, q, k_pool, v_pool, tables, case.lengths.to(device, torch.int32))


def paged_error(inputs: PagedInputs, out: Tensor) -> float:
    """Largest difference from float64 in TRUTH_ROWS of the rows, the last one among them."""
    case, worst = inputs.case, 0.0
    for b in torch.linspace(0, case.rows - 1, min(case.rows, TRUTH_ROWS)).long().tolist():
        length = int(inputs.lens[b])
        pages = inputs.tables[b, : -(-length // case.page_size)].long()
        keys, values = (
            pool[pages].flatten(0, 1)[:length].double().repeat_interleave(case.heads // case.key_heads, 1)
            for pool in (inputs.k_pool, inputs.v_pool)
        )
        scores = inputs.scale * torch.einsum("nhd,hd->hn", keys, inputs.q[b].double())
        truth = torch.einsum("hn,nhd->hd", scores.softmax(1), values)
        worst = max(worst, float((out[b].double() - truth).abs().nan_to_num(torch.inf).max()))
    return worst


def gathered(inputs: PagedInputs) -> Tensor:
    """Plain PyTorch: the pages of all rows copied, then SDPA with a mask."""
    keys, values = (pool[inputs.tables.long()].flatten(1, 2).transpose(1, 2) for pool in (inputs.k_pool, inputs.v_pool))
    seen = torch.arange(keys.shape[2], device=keys.device) < inputs.lens[:, None, None, None]
    q = inputs.q[:, :, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=inputs.scale, enable_gqa=True)
    return out[:, :, 0]


ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""A correct output stays below: one rounding of values up to 4 in bf16 is 0.008."""

PAGED: dict[str, Callable[[PagedInputs], Tensor]] = {
    OURS: lambda inputs: inputs.decode("triton" if inputs.q.is_cuda else "reference"),
    "gather and SDPA": gathered,
    "flash-attn 2": lambda inputs: inputs.decode("flash_attn"),
    "flash-attn 3": lambda inputs: inputs.decode("flash_attn3"),
    "torch varlen": lambda inputs: inputs.decode("torch_varlen"),
}
REPLAYED = (OURS, "flash-attn 2", "flash-attn 3")
"""Also as the replay of a CUDA graph."""


def paged_names() -> list[str]:
    """Implementations, ours first."""
    return [*PAGED, *(name + GRAPH for name in REPLAYED)]
