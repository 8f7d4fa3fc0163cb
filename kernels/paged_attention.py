"""KV cache in pages: write keys and values into a pool, attend over it through block tables.

The pool of a layer is one tensor [pages, page_size, Hk, D]. Token t of sequence b lies in page tables[b, t // page_size]
at offset t % page_size; its slot is page * page_size + offset. So sequences share pages by naming the same page. No
gradient: the pool is written in place. Slots that hold no token must be finite (allocate with zeros, not empty): they get
weight 0, and 0 * NaN is NaN.

Sequences with one query (decode) are a batch of their own, which reads lengths and pages from the device and so can be
captured in a CUDA graph. Those with several (prompts, in chunks or whole) gather their keys once per layer and run
`varlen_attention`.
Source: PagedAttention, Kwon et al., arXiv 2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rhotrain.kernels.attention import varlen_attention
from rhotrain.kernels.backend import Backend, resolve_backend
from rhotrain.kernels.paged_cpu import decode_reference


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The sequences start <= b < stop of a batch have the same first `pages` pages, all of them full. A hint: a backend
    may read them once for all of these sequences."""

    start: int
    stop: int
    pages: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Where the keys of sequences with several queries lie: slots int64 [sum(lens_k)], cu_q and cu_k int32 [n+1]."""

    slots: Tensor
    cu_q: Tensor
    cu_k: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """B sequences whose new tokens are packed one after the other; K/V of all their tokens are in the pool.

    tables: int32 [B,W], the pages of each sequence. Columns past its last page are not read as tokens, but must name
        some page (0 will do).
    lens: int32 [B], tokens of each sequence, the new ones included. 0: a padding row; its output is 0.
    page_size: tokens per page.
    decode: the first `decode` sequences have one new token each.
    lens_q, lens_k: of the sequences after those, as Python numbers: new tokens and all tokens.
    shared: which decode rows share pages.
    """

    tables: Tensor
    lens: Tensor
    page_size: int
    decode: int
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    shared: tuple[SharedPages, ...] = ()

    @classmethod
    def make(cls, tables: Tensor, lens_q: Sequence[int], lens_k: Sequence[int], page_size: int) -> "PagedBatch":
        """From the lengths of all sequences; those with one query must come first.

        Raises ValueError for lengths that contradict each other, the order, or the tables.
        """
        _check_lengths(lens_q, lens_k, tables, page_size)
        decode = next((b for b, m in enumerate(lens_q) if m > 1), len(lens_q))
        lens = torch.tensor(list(lens_k), dtype=torch.int32).to(tables.device, non_blocking=True)
        return cls(tables.int(), lens, page_size, decode, tuple(lens_q[decode:]), tuple(lens_k[decode:]))

    @property
    def tokens(self) -> int:
        """How many queries the batch has."""
        return self.decode + sum(self.lens_q)

    @cached_property
    def prefill(self) -> Prefill:
        """Computed once for all layers."""
        tables, device = self.tables[self.decode :], self.tables.device
        slots = [token_slots(table, n, self.page_size) for table, n in zip(tables, self.lens_k)]
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device, non_blocking=True)
            for lens in (self.lens_q, self.lens_k)
        )
        return Prefill(torch.cat(slots), cu_q, cu_k)


def _check_lengths(lens_q: Sequence[int], lens_k: Sequence[int], tables: Tensor, page_size: int) -> None:
    if not len(lens_q) == len(lens_k) == len(tables):
        raise ValueError(
            f"lens_q, lens_k: {len(lens_q)} and {len(lens_k)} sequences do not fit {len(tables)} block tables"
        )
    capacity = tables.shape[1] * page_size
    for b, (m, n) in enumerate(zip(lens_q, lens_k)):
        if not 1 <= m <= n <= capacity:
            raise ValueError(
                f"lens_q, lens_k: sequence {b} has {m} queries and {n} keys; need 1 <= queries <= keys <= {capacity}, "
                f"the tokens that {tables.shape[1]} pages of {page_size} hold"
            )
    single = [m == 1 for m in lens_q]
    if single != sorted(single, reverse=True):
        raise ValueError(f"lens_q: {tuple(lens_q)}; sequences with one query must come before those with several")


def token_slots(table: Tensor, length: int, page_size: int) -> Tensor:
    """Slots int64 [length] of a sequence's tokens from its pages [W]."""
    pages = -(-length // page_size)
    offsets = torch.arange(page_size, device=table.device)
    return (table[:pages, None].long() * page_size + offsets).view(-1)[:length]


def write_kv(k_pool: Tensor, v_pool: Tensor, k_TGD: Tensor, v_TGE: Tensor, slots: Tensor) -> None:
    """Store keys and values of T tokens in slots (int64 [T]) of the pool, in place, in the pool's dtype.

    Slots are distinct, but for those of padding rows, whose page nobody reads.
    """
    for pool, new in ((k_pool, k_TGD), (v_pool, v_TGE)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new.to(pool.dtype))


def paged_decode(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: tuple[SharedPages, ...] = (),
    backend: Backend = "auto",
) -> Tensor:
    """Attention of the newest token of each sequence over its pages: [B,H,E] in q's dtype.

    tables int32 [B,W], lens int32 [B]: as in `PagedBatch`; both are read on the device only.
    scale, window, softcap, sinks: as in `varlen_attention`.
    """
    resolve_backend(backend, q_BHD)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return decode_reference(q_BHD, k_pool, v_pool, tables, lens, shared=shared, **options)  # type: ignore[arg-type]


def paged_attention(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention of packed queries over pages; returns [T,H,E].

    q_THD: the new tokens of all sequences, one after the other: the last of each, in the order of `batch`.
    scale, window, softcap, sinks: as in `varlen_attention`.
    Raises ValueError when the number of queries is not that of the batch.
    """
    if len(q_THD) != batch.tokens:
        raise ValueError(f"q_THD: {len(q_THD)} queries, but the batch has {batch.tokens} new tokens")
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "backend": backend}
    parts = []
    if batch.decode:
        d = batch.decode
        parts.append(
            paged_decode(
                q_THD[:d],
                k_pool,
                v_pool,
                batch.tables[:d],
                batch.lens[:d],
                shared=batch.shared,
                **options,  # type: ignore[arg-type]
            )
        )
    if batch.lens_q:
        prefill = batch.prefill
        keys, values = (pool.flatten(0, 1).index_select(0, prefill.slots) for pool in (k_pool, v_pool))
        parts.append(
            varlen_attention(
                q_THD[batch.decode :],
                keys,
                values,
                cu_q=prefill.cu_q,
                cu_k=prefill.cu_k,
                max_q=max(batch.lens_q),
                max_k=max(batch.lens_k),
                lens_q=batch.lens_q,
                lens_k=batch.lens_k,
                **options,  # type: ignore[arg-type]
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
