"""KV cache in pages: write keys and values into a pool, attend over it through block tables.

The pool of a layer is one tensor [S,Hk,D] with S = num_pages * page_size slots; page p owns the slots p*page_size up to
(p+1)*page_size. Token t of sequence b lives in slot block_tables[b, t // page_size] * page_size + t % page_size, so
sequences share pages by naming the same page. No gradient: the pool is written in place. Slots that hold no token must
be finite (allocate with zeros, not empty): they get weight 0, and 0 * NaN is NaN.

Prefill and chunked prefill (more than one query) gather their keys and run `varlen_attention`. Decode rows (one query)
are batched: whole pages are gathered into [B,N,Hk,D], and the heads of a group become the queries of one key head. On a
CPU the batch is cut so that a gathered tensor stays in the cache: 64 rows x 100 tokens took 4.8 ms a layer at once
(page faults of fresh memory), 1.0 ms by 1 MiB, 3 ms row by row.
Source: PagedAttention, Kwon et al., arXiv 2309.06180.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rhotrain.kernels.attention import dense_attention, varlen_attention
from rhotrain.kernels.backend import Backend, resolve_backend

_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of a gathered tensor of keys (or values)."""


def write_kv(k_pool: Tensor, v_pool: Tensor, k_TGD: Tensor, v_TGE: Tensor, slots: Tensor) -> None:
    """Store keys and values of T tokens in slots (int64 [T], distinct) of the pool, in place, in the pool's dtype."""
    k_pool.index_copy_(0, slots, k_TGD.to(k_pool.dtype))
    v_pool.index_copy_(0, slots, v_TGE.to(v_pool.dtype))


def token_slots(block_table: Tensor, length: int, page_size: int) -> Tensor:
    """Slots int64 [length] of a sequence's tokens from its pages int64 [max_pages]."""
    pages = -(-length // page_size)
    offsets = torch.arange(page_size, device=block_table.device)
    return (block_table[:pages, None] * page_size + offsets).view(-1)[:length]


@dataclass(frozen=True, slots=True)
class _Cache:
    """The pool of a layer and how its scores are formed."""

    k_pool: Tensor
    v_pool: Tensor
    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B,N,Hk,D] of whole pages int64 [B,P], N = P * page_size."""
        shape = (len(pages), pages.shape[1] * self.page_size)
        keys, values = (
            pool.unflatten(0, (-1, self.page_size)).index_select(0, pages.reshape(-1))
            for pool in (self.k_pool, self.v_pool)
        )
        return keys.view(*shape, *keys.shape[2:]), values.view(*shape, *values.shape[2:])


def _decode_chunk(q_BHD: Tensor, cache: _Cache, tables: Tensor, lens: tuple[int, ...]) -> Tensor:
    """One query per sequence over its pages; the padding of the last page is masked."""
    pages = -(-max(lens) // cache.page_size)
    keys, values = cache.pages(tables[:, :pages])
    lens_B = torch.tensor(lens, device=q_BHD.device)[:, None, None, None]
    position = torch.arange(keys.shape[1], device=q_BHD.device)
    mask = position < lens_B
    if cache.window is not None:
        mask &= position >= lens_B - cache.window
    explicit = cache.softcap is not None or cache.sinks is not None
    groups = keys.shape[2]
    out = dense_attention(
        q_BHD[:, :, None] if explicit else q_BHD.unflatten(1, (groups, -1)),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        mask,
        scale=cache.scale,
        softcap=cache.softcap,
        sinks=cache.sinks,
    )
    return out.reshape(*q_BHD.shape[:2], -1)


def _decode(q_BHD: Tensor, cache: _Cache, tables: Tensor, lens: tuple[int, ...]) -> Tensor:
    row_bytes = max(lens) * cache.k_pool[0].numel() * cache.k_pool.element_size()
    step = max(1, _CHUNK_BYTES.get(q_BHD.device.type, 2**28) // row_bytes)
    chunks = [slice(start, start + step) for start in range(0, len(lens), step)]
    return torch.cat([_decode_chunk(q_BHD[c], cache, tables[c], lens[c]) for c in chunks])


def _prefill(q_THD: Tensor, cache: _Cache, tables: Tensor, lens_q: tuple[int, ...], lens_k: tuple[int, ...]) -> Tensor:
    """Several queries per sequence: its keys and values are gathered side by side and attended as packed segments."""
    slots = torch.cat([token_slots(table, n, cache.page_size) for table, n in zip(tables, lens_k)])
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q_THD.device) for lens in (lens_q, lens_k)
    )
    return varlen_attention(
        q_THD,
        cache.k_pool.index_select(0, slots),
        cache.v_pool.index_select(0, slots),
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=max(lens_q),
        max_k=max(lens_k),
        scale=cache.scale,
        window=cache.window,
        softcap=cache.softcap,
        sinks=cache.sinks,
        lens_q=lens_q,
        lens_k=lens_k,
    )


def _check(tokens: int, tables: Tensor, lens_q: tuple[int, ...], lens_k: tuple[int, ...], page_size: int) -> None:
    if sum(lens_q) != tokens or not len(lens_q) == len(lens_k) == len(tables):
        raise ValueError(
            f"lens_q, lens_k: {len(lens_q)} and {len(lens_k)} sequences with {sum(lens_q)} queries do not fit "
            f"{len(tables)} block tables and {tokens} queries"
        )
    capacity = tables.shape[1] * page_size
    for b, (m, n) in enumerate(zip(lens_q, lens_k)):
        if not 1 <= m <= n <= capacity:
            raise ValueError(
                f"lens_q, lens_k: sequence {b} has {m} queries and {n} keys; need 1 <= queries <= keys <= {capacity}, "
                f"the tokens that {tables.shape[1]} pages of {page_size} hold"
            )


def paged_attention(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_tables: Tensor,
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention of packed queries over pages; returns [T,H,E].

    q_THD: the queries of all sequences, one after the other. Those of sequence b are the last lens_q[b] of its
        lens_k[b] tokens, whose keys and values are all in the pool already.
    block_tables: int64 [B,max_pages]. Columns past a sequence's last page are not read as tokens, but must name some
        page (0 will do).
    scale, window, softcap, sinks: as in `varlen_attention`.

    ValueError: lengths that do not add up to T, fewer keys than queries, or more keys than the block table holds.
    """
    resolve_backend(backend, q_THD)
    _check(len(q_THD), block_tables, lens_q, lens_k, page_size)
    cache = _Cache(k_pool, v_pool, page_size, scale, window, softcap, sinks)
    decode = [b for b, m in enumerate(lens_q) if m == 1]
    prefill = [b for b, m in enumerate(lens_q) if m > 1]
    if not prefill:
        return _decode(q_THD, cache, block_tables, tuple(lens_k))
    parts = list(q_THD.split(lens_q))
    for rows in (decode, prefill):
        if not rows:
            continue
        q = torch.cat([parts[b] for b in rows])
        tables = block_tables[torch.tensor(rows, device=block_tables.device)]
        keys, queries = tuple(lens_k[b] for b in rows), tuple(lens_q[b] for b in rows)
        is_decode = rows is decode
        out = _decode(q, cache, tables, keys) if is_decode else _prefill(q, cache, tables, queries, keys)
        for b, segment in zip(rows, out.split(queries)):
            parts[b] = segment
    return torch.cat(parts)
