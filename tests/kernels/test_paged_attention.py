"""Attention over shuffled pages against contiguous attention and against a softmax written out in float64."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels import paged_cpu as module
from rhotrain.kernels.attention import varlen_attention
from rhotrain.kernels.paged_attention import PagedBatch, paged_attention, token_slots, write_kv

HEADS, GROUPS, DIM, VALUE_DIM = 6, 2, 8, 5


@dataclass
class Batch:
    """Sequences with contiguous keys and values, and the same in a pool of shuffled pages."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_pool: Tensor
    v_pool: Tensor
    block_tables: Tensor
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    page_size: int

    def paged(self, **options: Any) -> Tensor:
        batch = PagedBatch.make(self.block_tables, self.lens_q, self.lens_k, self.page_size)
        return paged_attention(self.q, self.k_pool, self.v_pool, batch, **options)


def make_batch(
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    page_size: int,
    *,
    heads: int = HEADS,
    groups: int = GROUPS,
    dim: int = DIM,
    value_dim: int = VALUE_DIM,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Batch:
    """Pages in random order; slots that hold no token are large, so that giving them any weight shows."""
    g = torch.Generator().manual_seed(seed)
    width = max(-(-n // page_size) for n in lens_k) + 1
    pages = torch.randperm(len(lens_k) * width, generator=g).view(len(lens_k), width)
    k_pool = torch.full((pages.numel(), page_size, groups, dim), 1e3, dtype=dtype)
    v_pool = torch.full((pages.numel(), page_size, groups, value_dim), 1e3, dtype=dtype)
    keys, values = [], []
    for table, n in zip(pages, lens_k):
        keys.append(torch.randn(n, groups, dim, generator=g, dtype=torch.float64).to(dtype))
        values.append(torch.randn(n, groups, value_dim, generator=g, dtype=torch.float64).to(dtype))
        at = torch.tensor([int(table[t // page_size]) * page_size + t % page_size for t in range(n)])
        write_kv(k_pool, v_pool, keys[-1], values[-1], at)
    q = torch.randn(sum(lens_q), heads, dim, generator=g, dtype=torch.float64).to(dtype)
    return Batch(q, keys, values, k_pool, v_pool, pages, lens_q, lens_k, page_size)


def by_definition(
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query and one head at a time in float64."""
    rows = []
    q = list(batch.q.double())
    for m, n, keys, values in zip(batch.lens_q, batch.lens_k, batch.keys, batch.values):
        per_group = batch.q.shape[1] // keys.shape[1]
        for j in range(m):
            query, position = q.pop(0), n - m + j
            first = 0 if window is None else max(0, position - window + 1)
            out = []
            for h in range(query.shape[0]):
                scores = scale * keys[first : position + 1, h // per_group].double() @ query[h]
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - 10.0)
                total = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[h]) - 10.0))
                out.append(weights @ values[first : position + 1, h // per_group].double() / total)
            rows.append(torch.stack(out))
    return torch.stack(rows)


LENGTHS = {
    "decode": ((1, 1, 1, 1, 1), (1, 16, 17, 5, 40)),
    "prefill": ((3, 16, 20), (3, 16, 20)),
    "chunked prefill": ((4, 2), (19, 33)),
    "mixed": ((1, 1, 1, 7, 3, 2), (9, 1, 33, 7, 30, 2)),
    "one": ((1,), (1,)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 2, HEADS, dtype=torch.float64)},
    "all": {"window": 3, "softcap": 1.5, "sinks": torch.linspace(-1, 1, HEADS, dtype=torch.float64)},
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equals_the_definition_over_shuffled_pages(lengths: str, options: str, page_size: int) -> None:
    batch = make_batch(*LENGTHS[lengths], page_size)  # pyright: ignore
    truth = by_definition(batch, scale=0.4, **OPTIONS[options])
    out = batch.paged(scale=0.4, **OPTIONS[options])
    assert out.shape == (sum(batch.lens_q), HEADS, VALUE_DIM)
    assert (out - truth).abs().max() < 1e-12


@pytest.mark.parametrize("lengths", ["decode", "mixed"])
def test_equals_contiguous_attention(lengths: str) -> None:
    batch = make_batch(*LENGTHS[lengths], 16, heads=9, groups=3, dim=64, value_dim=64, dtype=torch.float32)  # pyright: ignore

    def cumulative(lens: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)

    contiguous = varlen_attention(
        batch.q,
        torch.cat(batch.keys),
        torch.cat(batch.values),
        cu_q=cumulative(batch.lens_q),
        cu_k=cumulative(batch.lens_k),
        max_q=max(batch.lens_q),
        max_k=max(batch.lens_k),
        scale=0.125,
    )
    assert (batch.paged(scale=0.125) - contiguous).abs().max() < 2e-6


def test_decode_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lens_k = tuple(3 + 5 * b % 47 for b in range(13))
    batch = make_batch((1,) * 13, lens_k, 16)
    truth = by_definition(batch, scale=0.4)
    whole = batch.paged(scale=0.4)
    row_bytes = -(-max(lens_k) // 16) * 16 * GROUPS * DIM * 8
    for rows in (1, 2, 5):
        monkeypatch.setitem(module._CHUNK_BYTES, "cpu", rows * row_bytes)
        out = batch.paged(scale=0.4)
        assert (out - truth).abs().max() < 1e-12
        assert (out - whole).abs().max() < 1e-12


def test_sequences_share_pages() -> None:
    """A fork: two completions name the prompt's full pages, and each has a page of its own after them."""
    page_size, prompt = 4, 8
    g = torch.Generator().manual_seed(3)
    k_pool, v_pool = (torch.randn(10, 4, GROUPS, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    block_tables = torch.tensor([[7, 2, 5], [7, 2, 9]])
    lens = (prompt + 2, prompt + 3)
    q = torch.randn(2, HEADS, DIM, generator=g, dtype=torch.float64)
    out = paged_attention(q, k_pool, v_pool, PagedBatch.make(block_tables, (1, 1), lens, page_size), scale=0.4)
    k_pool, v_pool = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
    for row, (table, n) in enumerate(zip(block_tables.tolist(), lens)):
        slots = [table[t // page_size] * page_size + t % page_size for t in range(n)]
        scores = 0.4 * torch.einsum("thd,hd->ht", k_pool[slots].repeat_interleave(3, 1), q[row])
        expected = torch.einsum("ht,thd->hd", scores.softmax(1), v_pool[slots].repeat_interleave(3, 1))
        assert (out[row] - expected).abs().max() < 1e-13


def test_write_kv_writes_only_its_slots_in_the_dtype_of_the_pool() -> None:
    k_pool, v_pool = (torch.zeros(3, 4, 2, d, dtype=torch.bfloat16) for d in (3, 5))
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 5)
    slots = torch.tensor([9, 0, 4])
    addresses = k_pool.data_ptr(), v_pool.data_ptr()
    write_kv(k_pool, v_pool, k, v, slots)
    assert (k_pool.data_ptr(), v_pool.data_ptr()) == addresses
    k_pool, v_pool = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
    for place, slot in enumerate(slots.tolist()):
        assert torch.equal(k_pool[slot], k[place].bfloat16())
        assert torch.equal(v_pool[slot], v[place].bfloat16())
    others = [s for s in range(12) if s not in (9, 0, 4)]
    assert not k_pool[others].any()
    assert not v_pool[others].any()


def test_token_slots() -> None:
    assert token_slots(torch.tensor([3, 0, 9]), 6, 4).tolist() == [12, 13, 14, 15, 0, 1]
    assert token_slots(torch.tensor([3, 0, 9]), 8, 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lens_q": (1, 2)}, "2 queries, but the batch has 3"),
        ({"lens_q": (2, 1)}, "one query must come before"),
        ({"lens_k": (5,)}, "2 and 1 sequences"),
        ({"lens_k": (5, 99)}, "sequence 1 has 1 queries and 99 keys"),
        ({"lens_q": (2, 0)}, "sequence 1 has 0 queries"),
        ({"backend": "triton"}, "backend"),
    ],
)
def test_wrong_lengths_are_named(change: dict[str, Any], message: str) -> None:
    batch = make_batch((1, 1), (5, 6), 4)
    lengths = {"lens_q": (1, 1), "lens_k": (5, 6)}
    lengths.update({name: value for name, value in change.items() if name in lengths})
    options = {name: value for name, value in change.items() if name not in lengths}
    with pytest.raises(ValueError, match=message):
        pages = PagedBatch.make(batch.block_tables, page_size=4, **lengths)
        paged_attention(batch.q, batch.k_pool, batch.v_pool, pages, scale=1.0, **options)
