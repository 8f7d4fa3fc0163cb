"""Attention over shuffled pages against contiguous attention and against a softmax written out in float64."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers_flash import KINDS, flash_stand_in
from torch import Tensor

from rhotrain.kernels import flash_calls
from rhotrain.kernels import paged_cpu as module
from rhotrain.kernels.attention import varlen_attention
from rhotrain.kernels.backend import INTERPRETED
from rhotrain.kernels.paged_attention import (
    PagedBatch,
    decode_backend,
    paged_attention,
    paged_decode,
    prefill_backend,
    token_slots,
    write_kv,
)

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
    lengths: dict[str, Any] = {"lens_q": (1, 1), "lens_k": (5, 6)}
    lengths.update({name: value for name, value in change.items() if name in lengths})
    options = {name: value for name, value in change.items() if name not in lengths}
    with pytest.raises(ValueError, match=message):
        pages = PagedBatch.make(batch.block_tables, page_size=4, **lengths)
        paged_attention(batch.q, batch.k_pool, batch.v_pool, pages, scale=1.0, **options)


# ---- backends -------------------------------------------------------------------------------------------------------


def runs(kind: str, options: dict[str, Any], page_size: int) -> tuple[bool, bool]:
    """(decode, prompts over pages): what a library can do with these options and pages."""
    if "sinks" in options or (kind.startswith("torch_varlen") and ("softcap" in options or kind.endswith("2.11"))):
        return False, kind == "flash_attn4"
    paged = page_size % 256 == 0 or kind in ("flash_attn3", "flash_attn4")
    return paged and kind != "flash_attn4", paged


@pytest.mark.parametrize("page_size", [4, 256])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_library_equals_the_definition(kind: str, options: str, page_size: int) -> None:
    """Decode and prompts, by the library where it can and by something else where it cannot."""
    for lengths in ("decode", "chunked prefill", "mixed"):
        batch = make_batch(*LENGTHS[lengths], page_size, value_dim=DIM)  # pyright: ignore
        truth = by_definition(batch, scale=0.4, **OPTIONS[options])
        with flash_stand_in(kind) as library:
            out = batch.paged(scale=0.4, **OPTIONS[options])
            assert (out - truth).abs().max() < 1e-12
            can_decode, can_prefill = runs(kind, OPTIONS[options], page_size)
            if lengths == "decode":
                assert sum(library.calls.values()) == int(can_decode)
                for asked in library.asked.values():  # keys are not split, whatever the batch (see flash_calls.py)
                    assert asked.max_q == 2 if kind == "torch_varlen" else asked.num_splits == 1
            elif lengths == "chunked prefill" and can_prefill:
                (asked,) = library.asked.values()
                names = ("page_table", "block_table")
                assert any(getattr(asked, name, None) is not None for name in names), "read from the pages"


@pytest.mark.parametrize("kind", ["flash_attn3", "flash_attn", "torch_varlen"])
def test_libraries_over_several_pages_of_256(kind: str) -> None:
    batch = make_batch((1, 1, 1, 5, 3), (256, 257, 520, 300, 3), 256, heads=2, groups=1, value_dim=DIM)
    settings: tuple[dict[str, Any], ...] = ({}, {"window": 100})
    for options in settings:
        truth = by_definition(batch, scale=0.4, **options)
        with flash_stand_in(kind) as library:
            assert (batch.paged(scale=0.4, **options) - truth).abs().max() < 1e-12
            assert sum(library.calls.values()) == 2


@pytest.mark.parametrize("kind", ["flash_attn3", "flash_attn", "torch_varlen", "sdpa"])
def test_rows_of_length_zero_give_zero(kind: str) -> None:
    """Padding of a captured batch: nothing of the page that it names is read, whatever lies there."""
    page = torch.full((2, 256, 2, 8), torch.nan)
    page[1] = torch.randn(256, 2, 8, generator=torch.Generator().manual_seed(0))
    table, lens = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    if kind == "sdpa":
        page[0] = 0.0  # multiplied by weight 0, so it must be finite
        out = paged_decode(q, page, page, table, lens, scale=0.4)
    else:
        with flash_stand_in(kind):
            out = paged_decode(q, page, page, table, lens, scale=0.4)
    assert out[0].abs().min() > 0 and not out[1].any()


def test_queries_may_be_wider_than_the_pool() -> None:
    """PEFT's float32 norms: the library gets the pool's type, and the output has the query's."""
    batch = make_batch((1, 1, 4, 2), (5, 9, 4, 7), 256, value_dim=DIM, dtype=torch.bfloat16)
    truth = by_definition(batch, scale=0.4)
    batch.q = batch.q.float()
    with flash_stand_in("flash_attn3", half_only=True) as library:
        out = batch.paged(scale=0.4)
        assert out.dtype == torch.float32 and library.calls.total() == 2
    assert (out - truth).abs().max() < 2 * 2**-8 * truth.abs().max()


def test_choice_for_decode() -> None:
    half = torch.bfloat16
    assert decode_backend("cpu", torch.float32, 16) == "sdpa"
    with flash_stand_in("flash_attn", half_only=True):
        assert decode_backend("cpu", half, 256) == "flash_attn"
        assert decode_backend("cpu", half, 16) == "sdpa"
        assert decode_backend("cpu", half, 256, sinks=True) == "sdpa"
        assert decode_backend("cpu", half, 256, backend="reference") == "sdpa"
        with pytest.raises(ValueError, match="'flash_attn' cannot run here: pages of 16 tokens; it reads multiples of"):
            decode_backend("cpu", half, 16, backend="flash_attn")
        with pytest.raises(ValueError, match="head dimension 60"):
            decode_backend("cpu", half, 256, key_dim=60, backend="flash_attn")
    with flash_stand_in("flash_attn3", half_only=True):
        assert decode_backend("cpu", half, 16) == "flash_attn3"
        assert decode_backend("cpu", half, 16, softcap=30.0) == "flash_attn3"
    with flash_stand_in("flash_attn4"), pytest.raises(ValueError, match="no function for one query per sequence"):
        decode_backend("cpu", half, 16, backend="flash_attn4")
    with flash_stand_in("torch_varlen 2.11"), pytest.raises(ValueError, match="has no block tables"):
        decode_backend("cpu", half, 256, backend="torch_varlen")
    with pytest.raises(ValueError, match="'flash_attn3' cannot run here: it needs CUDA"):
        decode_backend("cpu", half, 16, backend="flash_attn3")
    with pytest.raises(ValueError, match="backend: 'fastest' is not one of"):
        decode_backend("cpu", half, 16, backend="fastest")  # type: ignore[arg-type]


def test_triton_comes_first_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rhotrain.kernels.paged_attention.resolve_backend", lambda backend, tensor: "triton")
    with flash_stand_in("flash_attn3"):
        assert decode_backend("cpu", torch.bfloat16, 16) == "triton"
        assert decode_backend("cpu", torch.bfloat16, 16, backend="flash_attn3") == "flash_attn3"


def test_what_waits_for_the_device_has_no_place_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    with flash_stand_in("flash_attn", waits=True):
        assert decode_backend("cpu", half, 256) == "sdpa"
        assert decode_backend("cpu", half, 256, backend="flash_attn") == "flash_attn"
        monkeypatch.setattr(flash_calls, "capturing", lambda device: True)
        with pytest.raises(ValueError, match="'flash_attn' waits for the device"):
            decode_backend("cpu", half, 256, backend="flash_attn")
    with flash_stand_in("flash_attn"):
        assert decode_backend("cpu", half, 256, backend="flash_attn") == "flash_attn"


def test_choice_for_prompts() -> None:
    half = torch.bfloat16
    assert prefill_backend("cpu", torch.float32, 16) == "gather"
    for kind, small, large in (
        ("flash_attn3", "flash_attn3", "flash_attn3"),
        ("flash_attn4", "flash_attn4", "flash_attn4"),
        ("flash_attn", "gather", "flash_attn"),
        ("torch_varlen", "gather", "torch_varlen"),
        ("torch_varlen 2.11", "gather", "gather"),
    ):
        name: Any = kind.split()[0]
        with flash_stand_in(kind):
            for backend in ("auto", name):
                assert prefill_backend("cpu", half, 16, backend=backend) == small
                assert prefill_backend("cpu", half, 256, backend=backend) == large
            assert prefill_backend("cpu", half, 256, backend="sdpa") == "gather"


@pytest.mark.skipif(not INTERPRETED, reason="a GPU was found, so kernels are not decorated for the interpreter")
@pytest.mark.parametrize("options", ["plain", "all"])
def test_triton_through_the_public_functions(options: str) -> None:
    """Its own proofs are in test_paged_triton.py; here only that the arguments arrive."""
    batch = make_batch(*LENGTHS["mixed"], 16, dtype=torch.float32)  # pyright: ignore
    settings: dict[str, Any] = {name: v.float() if isinstance(v, Tensor) else v for name, v in OPTIONS[options].items()}
    truth = by_definition(batch, scale=0.4, **settings)
    assert (batch.paged(scale=0.4, backend="triton", **settings) - truth).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["reference", "triton"] if INTERPRETED else ["reference"])
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "half of a larger pool"])
def test_write_and_read_pools_of_any_layout(layout: str, backend: Any) -> None:
    """Heads first in memory, or keys and values side by side in one tensor: views, whose slots are rows or are not."""
    pages, size, heads, dim = 3, 4, 2, 8
    pools = {
        "contiguous": lambda: torch.zeros(pages, size, heads, dim),
        "heads first": lambda: torch.zeros(heads, pages, size, dim).permute(1, 2, 0, 3),
        "half of a larger pool": lambda: torch.zeros(pages, 2, size, heads, dim)[:, 1],
    }
    k_pool, v_pool = pools[layout](), pools[layout]()
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(heads, 5, dim, generator=g).transpose(0, 1) for _ in range(2))  # as a model gives them
    slots = torch.tensor([9, 0, 4, 5, 11])
    write_kv(k_pool, v_pool, k, v, slots, backend=backend)
    for pool, new in ((k_pool, k), (v_pool, v)):
        dense = pool.reshape(-1, heads, dim)
        assert torch.equal(dense[slots], new)
        assert not dense[[s for s in range(12) if s not in slots.tolist()]].any()
    tables = torch.tensor([[2, 1]])
    q = torch.randn(2, 4, dim, generator=g)
    dense_pools = (k_pool.contiguous(), v_pool.contiguous())
    batch = PagedBatch.make(tables, (2,), (6,), size)
    assert torch.equal(
        paged_attention(q, k_pool, v_pool, batch, scale=0.4), paged_attention(q, *dense_pools, batch, scale=0.4)
    )


def test_plans_count_for_their_own_lengths_only() -> None:
    batch = make_batch((1, 1), (5, 30), 4, dtype=torch.float32)
    pages = PagedBatch.make(batch.block_tables, batch.lens_q, batch.lens_k, 4)
    pools = (batch.k_pool, batch.v_pool)
    paged_attention(batch.q, *pools, pages, scale=0.4)
    shorter = pages.lens - 1
    with_plans = paged_decode(batch.q, *pools, pages.tables, shorter, scale=0.4, plans=pages.plans)
    assert torch.equal(with_plans, paged_decode(batch.q, *pools, pages.tables, shorter, scale=0.4))
    assert (with_plans - paged_attention(batch.q, *pools, pages, scale=0.4)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [({"window": 0}, "window: 0"), ({"window": -1}, "window: -1"), ({"softcap": 0.0}, "softcap: 0.0")],
)
def test_scores_that_would_be_nan_are_refused(change: dict[str, Any], message: str) -> None:
    batch = make_batch((1, 1), (5, 6), 4)
    with pytest.raises(ValueError, match=message):
        batch.paged(scale=1.0, **change)


def test_a_batch_for_other_pages_is_refused() -> None:
    batch = make_batch((1, 2), (5, 6), 4)
    other = PagedBatch.make(batch.block_tables, batch.lens_q, batch.lens_k, 3)
    with pytest.raises(ValueError, match="page_size: 3, but the pool's pages have 4 slots"):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, other, scale=1.0)
