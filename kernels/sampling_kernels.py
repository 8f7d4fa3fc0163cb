"""Triton kernels of `sampling.py`: one program per row, float32, no sort. What they compute is defined there.

    draw       one read of the row: maximum and sum of exp per block of ids, held in registers. The block sums are the
               upper level of the CDF; one block is read again to draw from it. Rows that cut nothing are done.
    truncate   rows with top-k, top-p or min-p: the cut (`sampling_cut.py`), then the draw from the buffer that holds
               all ids from the cut on, or over the row in two levels where these are too many or only min-p cuts.
    kept       the kept ids, ascending, once the sizes of all sets are known.

A row never depends on its neighbours: block sizes are fixed, nothing is shared between programs, and a row that cuts
nothing runs the same code whether others do or not. Whole blocks are read without a mask (16-byte loads), the rest of
the row in one masked block. Registers (sm_90, Triton 3.9): draw 80, truncate 124, so 3 and 2 rows share a processor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels import philox
from rhotrain.kernels.backend import Launch, jit, tl
from rhotrain.kernels.row_launch import row_jit
from rhotrain.kernels.rows import KeptSet
from rhotrain.kernels.sampling_cut import find_cut, nth_tie
from rhotrain.kernels.sampling_params import RowParams
from rhotrain.kernels.sampling_row import (
    draw_from_blocks,
    exp_below,
    first_above,
    kept_blocks,
    kept_by_cut,
    softmax_blocks,
)

DRAW = Launch(block=4096, num_warps=8, num_stages=2)
"""Three or four stages spill 8 bytes in one variant or another of Triton 3.6 and 3.9."""
TRUNCATE = Launch(block=1024, num_warps=4, num_stages=2, constants={"CAPACITY": 1024})
"""8 ids a thread make 16-byte loads of bf16. At most 255 registers: two programs share a multiprocessor. A buffer
of 2048 ids would spill some in Triton 3.9 (sm_80), more threads with a larger block leave room for one program only."""
KEEP = Launch(block=2048, num_warps=8)


# ---- kernels --------------------------------------------------------------------------------------------------------


@jit
def _store_draw(
    logits_ptr: tl.tensor,
    inverse: tl.tensor,
    token: tl.tensor,
    count: tl.tensor,
    total: tl.tensor,
    cut: tl.tensor,
    cut_id: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    cut_ids: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    ok: tl.tensor,
    greedy: tl.tensor,
) -> None:
    """What is known once the token is, and the mass `total` that it was drawn from. A row that is not ok: zeros."""
    m = tl.load(values + 3 * rows + row)
    m_all = tl.load(values + 5 * rows + row)
    total_all = tl.load(values + 6 * rows + row)
    token = tl.where(ok, token, 0)
    x = tl.load(logits_ptr + token).to(tl.float32) * inverse
    logprob = (x - m_all) - tl.log(total_all)
    mass = tl.minimum(tl.div_rn(total, total_all) * exp_below(m, m_all), 1.0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(counts + row, tl.where(ok, count, 0).to(tl.int64))
    tl.store(values + row, tl.where(ok, logprob, 0.0))
    tl.store(values + rows + row, tl.where(ok, tl.where(greedy, 1.0, mass), 0.0))
    tl.store(values + 2 * rows + row, tl.where(ok, cut, float("inf")))
    tl.store(cut_ids + row, tl.where(ok, cut_id, -1))


@row_jit
def draw_kernel(
    logits: tl.tensor,
    drawable: tl.tensor,
    stride: tl.tensor,
    drawable_stride: tl.tensor,
    vocab: tl.tensor,
    available: tl.tensor,
    temperatures: tl.tensor,
    inverses: tl.tensor,
    seeds: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    errors: tl.tensor,
    values: tl.tensor,
    cut_ids: tl.tensor,
    RESTRICTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: softmax, and the draw as if nothing were cut. `Drawn` says what is written.

    drawable: with RESTRICTED, the logits with -inf where an id may not be drawn; available int64 [B]: how many may.
    BLOCKS: at least vocab / BLOCK, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    inverse = tl.load(inverses + row)
    u = philox.uniform(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))

    logits_ptr = logits + row * stride
    row_ptr = logits_ptr
    maxima, weights, m, total = softmax_blocks(logits_ptr, vocab, inverse, BLOCKS, BLOCK, STAGES)
    tl.store(values + 5 * rows + row, m)
    tl.store(values + 6 * rows + row, total)
    ok = (total > 0.0) & (total < float("inf"))
    count = tl.full((), 0, tl.int32) + vocab
    if RESTRICTED:
        row_ptr = drawable + row * drawable_stride
        maxima, weights, m, total = softmax_blocks(row_ptr, vocab, inverse, BLOCKS, BLOCK, STAGES)
        ok = ok & (total > 0.0) & (total < float("inf"))
        count = tl.load(available + row).to(tl.int32)
    tl.store(values + 3 * rows + row, m)
    tl.store(values + 4 * rows + row, total)
    tl.store(errors + row, ok == 0)

    greedy = ok & (temperature == 0.0)
    weights = tl.where(greedy, tl.where(maxima == m, 1.0, 0.0), weights)
    target = tl.where(greedy, 0.0, u * total)
    cut = tl.full((), float("-inf"), tl.float32)
    token = draw_from_blocks(row_ptr, vocab, inverse, m, weights, target, cut, vocab, 0.0, greedy, BLOCKS, BLOCK)
    cut = tl.where(greedy, m, cut)
    cut_id = tl.where(greedy, token, vocab)
    count = tl.where(greedy, 1, count)
    tl.debug_barrier()  # one thread wrote the values that all read
    _store_draw(
        logits_ptr,
        inverse,
        token,
        count,
        total,
        cut,
        cut_id,
        token_ids,
        counts,
        values,
        cut_ids,
        row,
        rows,
        ok,
        greedy,
    )


@row_jit
def truncate_kernel(
    logits: tl.tensor,
    drawable: tl.tensor,
    stride: tl.tensor,
    drawable_stride: tl.tensor,
    vocab: tl.tensor,
    temperatures: tl.tensor,
    inverses: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    held_x: tl.tensor,
    held_id: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    errors: tl.tensor,
    values: tl.tensor,
    cut_ids: tl.tensor,
    BLOCKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row, after `draw_kernel`: rows that cut something are cut, and drawn from what is left.

    held_x, held_id [B,CAPACITY]: buffers. The other rows end at once.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    cuts = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if cuts & (tl.load(temperatures + row) > 0.0) & (tl.load(errors + row) == 0):
        inverse = tl.load(inverses + row)
        u = philox.uniform(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
        row_ptr = drawable + row * drawable_stride
        m = tl.load(values + 3 * rows + row)
        total = tl.load(values + 4 * rows + row)
        buffer_x = held_x + row * CAPACITY
        buffer_id = held_id + row * CAPACITY
        cut, ties, tied, held = find_cut(
            row_ptr, buffer_x, buffer_id, vocab, inverse, m, total, top_k, top_p, BLOCK, CAPACITY, STAGES
        )
        cut_id = tl.where(tied > 0, vocab, -1)
        if held > 0:
            slot = tl.arange(0, CAPACITY)
            v = tl.load(buffer_x + slot, mask=slot < held, other=float("-inf"))
            ids = tl.load(buffer_id + slot, mask=slot < held, other=-1)
            tie = (v == cut) & (slot < held)
            cut_id = tl.max(tl.where(tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties), ids, -1), 0)
            keep = kept_by_cut(v, ids, m, cut, cut_id, min_p) & (slot < held)
            w = tl.where(keep, exp_below(v, m), 0.0)
            count = tl.sum(keep.to(tl.int32), 0)
            total = tl.sum(w, 0)
            token = tl.max(tl.where(slot == first_above(w, u * total, slot), ids, 0), 0)
        else:
            if ties < tied:
                cut_id = nth_tie(row_ptr, vocab, inverse, cut, ties, BLOCK)
            weights, count = kept_blocks(row_ptr, vocab, inverse, m, cut, cut_id, min_p, BLOCKS, BLOCK, STAGES)
            total = tl.sum(weights, 0)
            token = draw_from_blocks(
                row_ptr, vocab, inverse, m, weights, u * total, cut, cut_id, min_p, cut > m, BLOCKS, BLOCK
            )
        _store_draw(
            logits + row * stride,
            inverse,
            token,
            count,
            total,
            cut,
            cut_id,
            token_ids,
            counts,
            values,
            cut_ids,
            row,
            rows,
            cut <= m,
            cut > m,
        )


@jit
def _put_ids(kept_ids: tl.tensor, at: tl.tensor, end: tl.tensor, ids: tl.tensor, keep: tl.tensor) -> tl.tensor:
    here = tl.sum(keep.to(tl.int32), 0)
    if here > 0:
        to = at + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(kept_ids + to, ids, mask=keep & (to < end))
    return at + here


@row_jit
def kept_kernel(
    logits: tl.tensor,
    may_draw: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    temperatures: tl.tensor,
    inverses: tl.tensor,
    min_ps: tl.tensor,
    values: tl.tensor,
    cut_ids: tl.tensor,
    offsets: tl.tensor,
    kept_ids: tl.tensor,
    RESTRICTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The kept ids of each row, ascending, at its offset. may_draw: bool [B, vocab], when RESTRICTED."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    inverse = tl.load(inverses + row)
    min_p = tl.where(tl.load(temperatures + row) == 0.0, 0.0, tl.load(min_ps + row))
    cut = tl.load(values + 2 * rows + row)
    m = tl.load(values + 3 * rows + row)
    cut_id = tl.load(cut_ids + row)
    at = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    length = tl.where(end > at, vocab, 0)  # a row in error is not read
    row_ptr = logits + row * stride
    may_draw_ptr = may_draw + row * vocab
    lane = tl.arange(0, BLOCK)
    full = length // BLOCK * BLOCK
    for c in tl.range(0, full, BLOCK, num_stages=STAGES):
        x = tl.load(row_ptr + c + lane).to(tl.float32) * inverse
        keep = kept_by_cut(x, c + lane, m, cut, cut_id, min_p)
        if RESTRICTED:
            keep = keep & (tl.load(may_draw_ptr + c + lane) != 0)
        at = _put_ids(kept_ids, at, end, c + lane, keep)
    for c in tl.range(full, length, BLOCK, num_stages=1):
        inside = c + lane < vocab
        x = tl.load(row_ptr + c + lane, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        keep = kept_by_cut(x, c + lane, m, cut, cut_id, min_p) & inside
        if RESTRICTED:
            keep = keep & (tl.load(may_draw_ptr + c + lane, mask=inside, other=0) != 0)
        at = _put_ids(kept_ids, at, end, c + lane, keep)


# ---- launching ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the kernels write: token_ids, counts int64 [B], errors bool [B], values float32 [7,B], cut_ids int32 [B].

    values: logprob, kept mass, cut, maximum and sum of exp(x - maximum) of what may be drawn, the same two of all.
    The kept set is what lies above the cut and, at it, the ids up to cut_ids; then min-p. So -inf and vocab keep all.
    """

    token_ids: Tensor
    counts: Tensor
    errors: Tensor
    values: Tensor
    cut_ids: Tensor


def _masked(logits_BV: Tensor, may_draw_BV: Tensor) -> Tensor:
    """-inf where an id may not be drawn; rows begin at multiples of 16 elements, for wide loads."""
    rows, vocab = logits_BV.shape
    buffer = torch.empty(rows, -(-vocab // 16) * 16, dtype=logits_BV.dtype, device=logits_BV.device)
    never = torch.full((), -torch.inf, dtype=logits_BV.dtype, device=logits_BV.device)
    return torch.where(may_draw_BV, logits_BV, never, out=buffer[:, :vocab])


def draw_rows(logits_BV: Tensor, may_draw: Tensor | None, params: RowParams, truncates: bool) -> Drawn:
    """Draw one token per row of the real logits [B,V]; nothing here waits for the device.

    may_draw: bool [B,V] or None for all. truncates: False promises that no row cuts anything.
    """
    rows, vocab = logits_BV.shape
    device = logits_BV.device
    logits = _unit_columns(logits_BV)
    drawable = logits if may_draw is None else _masked(logits, may_draw)
    drawn = Drawn(
        token_ids=torch.empty(rows, dtype=torch.int64, device=device),
        counts=torch.empty(rows, dtype=torch.int64, device=device),
        errors=torch.empty(rows, dtype=torch.bool, device=device),
        values=torch.empty(7, rows, dtype=torch.float32, device=device),
        cut_ids=torch.empty(rows, dtype=torch.int32, device=device),
    )
    placed = (logits, drawable, logits.stride(0), drawable.stride(0), vocab)
    temperatures = _contiguous(params.temperature, params.inverse)
    counters = _contiguous(params.seeds, params.samples, params.positions)
    outputs = (drawn.token_ids, drawn.counts, drawn.errors, drawn.values, drawn.cut_ids)
    DRAW(
        draw_kernel,
        (rows,),
        device,
        *placed,
        drawn.counts if may_draw is None else may_draw.sum(1),
        *temperatures,
        *counters,
        *outputs,
        RESTRICTED=may_draw is not None,
        BLOCKS=_power_of_two(-(-vocab // DRAW.block)),
    )
    if truncates:
        capacity = TRUNCATE.constants["CAPACITY"]
        TRUNCATE(
            truncate_kernel,
            (rows,),
            device,
            *placed,
            *temperatures,
            *_contiguous(params.top_k, params.top_p, params.min_p),
            *counters,
            torch.empty(rows, capacity, dtype=torch.float32, device=device),
            torch.empty(rows, capacity, dtype=torch.int32, device=device),
            *outputs,
            BLOCKS=_power_of_two(-(-vocab // TRUNCATE.block)),
        )
    return drawn


def kept_sets(logits_BV: Tensor, may_draw: Tensor | None, params: RowParams, drawn: Drawn) -> KeptSet:
    """The sets that the tokens of `drawn` were drawn from. Waits for the device: their total size must be known."""
    rows, vocab = logits_BV.shape
    device = logits_BV.device
    logits = _unit_columns(logits_BV)
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(drawn.counts, 0, out=offsets[1:])
    ids = torch.empty(int(offsets[-1]), dtype=torch.int32, device=device)
    KEEP(
        kept_kernel,
        (rows,),
        device,
        logits,
        drawn.counts if may_draw is None else may_draw.contiguous().view(torch.uint8),
        logits.stride(0),
        vocab,
        *_contiguous(params.temperature, params.inverse, params.min_p),
        drawn.values,
        drawn.cut_ids,
        offsets,
        ids,
        RESTRICTED=may_draw is not None,
    )
    return KeptSet(offsets, ids)


def _unit_columns(logits_BV: Tensor) -> Tensor:
    return logits_BV if logits_BV.stride(1) == 1 or logits_BV.shape[1] == 1 else logits_BV.contiguous()


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
