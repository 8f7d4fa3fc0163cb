"""Decode attention over pages in plain PyTorch: the reference, and the path of a CPU.

On a CPU in float32 (and float64) the history is not copied; two sparse operators read it where it lies in the pool:
    scores   `sampled_addmm`, dot products for the entries of a CSR pattern only. A row of the pattern is a query head
             of one sequence, its columns are the keys that this head sees.
    output   `embedding_bag`, sums of value rows by weight.
Tokens that a group of sequences shares are gathered once per group and layer instead, and all queries of the group meet
them in one GEMM per key head. Both parts are columns of one matrix of scores, so one softmax serves both. What is the
same in all layers of a step is planned once (`paged_plan.py`).

Elsewhere (CUDA, bf16) whole pages are gathered, in chunks that stay in the cache, and attended with SDPA.

SmolLM2's shape (H 9, Hk 3, D 64) in float32 on two cores, cold cache, pages of 32, ms a layer, gathered / in place:
    16 rows x 50-110 tokens 0.54 / 0.25, 64 rows 2.0 / 0.80, 64 rows x 576 tokens 8.1 / 4.8;
    4 groups of 16 with 512 shared tokens and 1-64 own 6.8 / 1.3 (without the hint 1.7).

No gradient. An output depends on its sequence's tokens and on nothing else, not even as 0 * NaN. Gathered pages are
the exception: their unused slots must be finite.
"""

from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from rhotrain.kernels.attention import dense_attention
from rhotrain.kernels.paged_plan import DecodePlans, Part, PlanShape, PoolLayout, SharedPages

_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of a gathered tensor of keys (or values): fresh memory costs page faults on a CPU, 1 MiB stays in the cache."""


class _Options(TypedDict):
    scale: float
    softcap: float | None
    sinks: Tensor | None


def cpu_pool(pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros [pages, page_size, heads, dim] on the CPU, in the layout that decode attention reads fastest there.

    In memory the heads come first: the keys of one head follow each other. A contiguous pool gives the same results.
    The zeros take no memory until they are written: the system gives pages of zeros when they are touched.
    """
    count = heads * pages * page_size * dim
    return (
        torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(heads, pages, page_size, dim)
        .permute(1, 2, 0, 3)
    )


def _attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, part: Part, options: _Options) -> Tensor:
    """The queries of a part [rows,D], in its order, over the history where it lies: [rows,E]."""
    items, _, most, _, width = part.mask.shape
    batches, queries, _ = part.scores.shape
    shape = (items, batches // items, most, queries // most)
    own = width - len(part.values) // len(q)
    # With beta 1 the entries start as the mask, so that masking needs no pass of its own.
    part.values.view(*shape, width - own).copy_(part.mask[..., own:])
    keys = part.layout.matrix(k_pool).t()
    torch.sparse.sampled_addmm(part.pattern, q, keys, beta=1.0, alpha=options["scale"], out=part.pattern)
    if own:
        part.scores[..., own:].copy_(part.values.view(batches, queries, width - own))
        torch.bmm(q.view(batches, queries, -1), part.gather(k_pool).transpose(1, 2), out=part.products)
        torch.mul(part.products, options["scale"], out=part.scores[..., :own])
    softcap = options["softcap"]
    if softcap is not None:
        part.scores.div_(softcap).tanh_().mul_(softcap)
    if softcap is not None or part.masks_shared:
        part.scores.view(*shape, width).add_(part.mask)
    _softmax(part, shape, options["sinks"])
    weights = part.weights[..., own:].reshape(-1)
    out = torch.embedding_bag(part.layout.matrix(v_pool), part.columns, part.offsets, False, 0, False, weights)[0]
    if own:
        out.view(batches, queries, -1).baddbmm_(part.weights[..., :own], part.gather(v_pool))
    return out


def _softmax(part: Part, shape: tuple[int, ...], sinks: Tensor | None) -> None:
    """part.weights from part.scores. A sink is one more column, whose weight nobody uses."""
    if sinks is None:
        torch.softmax(part.scores, 2, out=part.weights)
        return
    sink = sinks.to(part.scores.dtype).view(1, shape[1], 1, shape[3]).expand(shape).reshape(*part.scores.shape[:2], 1)
    part.weights.copy_(torch.cat((part.scores, sink), 2).softmax(2)[..., :-1])


def _in_place(
    q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, plans: DecodePlans, shape: PlanShape, options: _Options
) -> Tensor:
    """[B,H,E] over the history where it lies."""
    batch, heads, dim = q_BHD.shape
    plan = plans.of(shape)
    if plan.back is None:
        out = _attend(q_BHD.reshape(-1, dim), k_pool, v_pool, plan.parts[0], options)
    else:
        q = q_BHD.reshape(batch * shape.groups, -1)
        parts = [
            _attend(q.index_select(0, part.queries).view(-1, dim), k_pool, v_pool, part, options).view(
                len(part.queries), -1
            )
            for part in plan.parts
        ]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, plan.back)
    out = out.view(batch, heads, -1)
    return out if plan.empty is None else out.masked_fill_(plan.empty, 0.0)


def _chunk(q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lens: Tensor, **options: Any) -> Tensor:
    """One query per sequence over its gathered pages; the padding of the last page is masked."""
    shape = (len(tables), tables.shape[1] * k_pool.shape[1])
    keys, values = (pool.index_select(0, tables.reshape(-1)) for pool in (k_pool, v_pool))
    keys, values = keys.reshape(*shape, *keys.shape[2:]), values.reshape(*shape, *values.shape[2:])
    lens_B = lens[:, None, None, None]
    position = torch.arange(shape[1], device=q_BHD.device)
    mask = position < lens_B
    window = options.pop("window")
    if window is not None:
        mask &= position >= lens_B - window
    explicit = options["softcap"] is not None or options["sinks"] is not None
    q = q_BHD[:, :, None] if explicit else q_BHD.unflatten(1, (keys.shape[2], -1))
    out = dense_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask, **options)
    return out.reshape(*q_BHD.shape[:2], -1)


def _gathered(q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lens: Tensor, **options: Any) -> Tensor:
    """[B,H,E] over gathered pages. On CUDA nothing waits: the width of the tables bounds the work, not the lengths."""
    device = q_BHD.device.type
    if device == "cpu":
        width = -(-int(lens.max()) // k_pool.shape[1])
        tables = tables[:, : max(1, width)]
    row_bytes = tables.shape[1] * k_pool[0].numel() * k_pool.element_size()
    step = max(1, _CHUNK_BYTES.get(device, 2**28) // row_bytes)
    chunks = [slice(start, start + step) for start in range(0, len(tables), step)]
    out = torch.cat([_chunk(q_BHD[c], k_pool, v_pool, tables[c], lens[c], **options) for c in chunks])
    return out.masked_fill_((lens == 0)[:, None, None], 0.0)


def plan_shape(q_BHD: Tensor, k_pool: Tensor, v_pool: Tensor, window: int | None) -> PlanShape | None:
    """What to plan for; None where the sparse operators do not apply: other devices, dtypes and layouts."""
    dtype, layout = q_BHD.dtype, PoolLayout.of(k_pool)
    if q_BHD.device.type != "cpu" or dtype not in (torch.float32, torch.float64) or not len(q_BHD):
        return None
    if not dtype == k_pool.dtype == v_pool.dtype or layout is None or layout != PoolLayout.of(v_pool):
        return None
    # The patterns' indices are int32.
    if layout.rows >= 2**31:
        return None
    return PlanShape(q_BHD.shape[1], k_pool.shape[2], k_pool.shape[1], layout, window, dtype)


@torch.no_grad()
def decode_reference(
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
    plans: DecodePlans | None = None,
) -> Tensor:
    """One query per sequence over its pages: [B,H,E]. Arguments as in `paged_attention.paged_decode`.

    plans: `DecodePlans(tables, lens, shared)`, kept for all layers of a step; without it every call plans anew.
    """
    options: _Options = {"scale": scale, "softcap": softcap, "sinks": sinks}
    shape = plan_shape(q_BHD, k_pool, v_pool, window)
    if shape is None:
        return _gathered(q_BHD, k_pool, v_pool, tables, lens, window=window, **options)
    return _in_place(q_BHD, k_pool, v_pool, plans or DecodePlans(tables, lens, shared), shape, options)
