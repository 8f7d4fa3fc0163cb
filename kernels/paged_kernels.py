"""Triton kernels of decode attention over pages, in splits; the write of keys and values is in paged_write.py.

    decode    one program per key head and share of a row: online softmax over its splits of SPLIT tokens. The query
              heads of a key head are the rows of one tile, padded to 16 for `tl.dot`.
    combine   partial sums of a row's splits, in their order. Rows of one split do not come here.

A row's bits depend on nothing but its own query, keys and length. Splits begin at multiples of SPLIT tokens, whatever
the batch and the width of the tables; each is computed alone, and they are added up from left to right (`_fold`), by
one program where the batch fills the GPU, else through memory. How many programs share a row follows from shapes and
stays near PROGRAMS in all, so that a wide table adds few that find nothing to do; no length is read on the host.

Why 256 tokens: one row of 8 key heads and 4096 tokens makes 128 programs, about one for each of an H200's 132
processors, and 256 tokens of 128 bf16 dimensions are 128 KiB, of which a processor's share of 4.3 TB/s needs 4 us. The
partial sums that go through memory are 1 % of the bytes read per query head of a group (a float32 row, written and
read), and none do where the batch has PROGRAMS programs anyway.

Numerics: scores, softmax and sums in float32. Softmax weights meet V as two terms of V's type, so that a bf16 V costs
them 2^-17, not 2^-9; what remains is the rounding of the output.
Sources: Flash-Decoding (Dao et al., 2023), PagedAttention (Kwon et al., arXiv 2309.06180).
"""

import torch
from torch import Tensor

from rhotrain.kernels.backend import INTERPRETED, LOG2E, Launch, jit, tl
from rhotrain.kernels.paged_write import cdiv, check_pools, padded, row_strides, unit_columns, write_triton

__all__ = ["decode_triton", "split_grid", "write_triton"]

SPLIT = 256
"""Tokens of a split: decides bits, so it depends on nothing."""
PROGRAMS = 2048
"""How many programs a launch should have at least: 16 per processor of an H200, so that unequal rows even out. Not
many more, either: one that finds nothing to do still waits for a length, about 1 us in one of 264 places."""
WORKSPACE_BYTES = 2**28
"""Largest buffer of partial sums; a call that would need more leaves each row to one program."""

DECODE = Launch(block=64, num_warps=4, num_stages=5)
"""Two blocks of K and V in flight, and the page numbers of the two after them: keys wait for their page's number."""
DECODE_WIDE = Launch(block=32, num_warps=4, num_stages=3)
DECODE_WIDEST = Launch(block=16, num_warps=8, num_stages=3)
"""Heads of more than 128 dims, and those of more than 256 or in float32: fewer tokens at a time, so that nothing spills
and two programs share a processor. float32 is multiplied without tensor cores, as TF32 would lose bits."""
COMBINE = Launch(block=1, num_warps=1, num_stages=4)
"""block: splits at a time."""

ROWS = 16
"""Query heads per tile: the least that `tl.dot` takes. More share their keys through the L2 cache."""
_ROWS = tl.constexpr(ROWS)


# ---- kernels --------------------------------------------------------------------------------------------------------


@jit
def _dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """acc + a b. UPCAST: the types differ, or this is the interpreter, which cannot multiply bf16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def _weigh(p: tl.tensor, v: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """acc + p v, p float32. A half type takes p in two terms."""
    high = p.to(v.dtype)
    if v.dtype != tl.float32:
        acc = _dot((p - high.to(tl.float32)).to(v.dtype), v, acc, UPCAST)
    return _dot(high, v, acc, UPCAST)


@jit
def _cap(x: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(x / softcap). tanh by exp2; near 0, where that would cancel, by its series up to t^9."""
    t = x / softcap
    square = t * t
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    tanh = 1.0 - 2.0 / (tl.exp2((t + t) * LOG2E) + 1.0)
    return softcap * tl.where(square < 0.09, t * series, tanh)


@jit
def _fold(m: tl.tensor, s: tl.tensor, m_split: tl.tensor, s_split: tl.tensor) -> tl.tensor:
    """(max, sum of exp, factor of what was summed so far, factor of the split) after one more split."""
    new = tl.maximum(m, m_split)
    old_factor = tl.exp2((m - new) * LOG2E)
    factor = tl.exp2((m_split - new) * LOG2E)
    return new, s * old_factor + s_split * factor, old_factor, factor


@jit
def _with_sink(m: tl.tensor, s: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """(denominator, factor of the sum) once the sink, a logit without a value, has entered."""
    new = tl.maximum(m, sink)
    factor = tl.exp2((m - new) * LOG2E)
    return s * factor + tl.exp2((sink - new) * LOG2E), factor


_NUMBERS = ["table_stride", "capacity", "window", "heads", "tiles", "programs", "splits"]
_VECTORS = ["tables", "lens", "sinks", "maxima", "totals"]
"""As in row_launch.py: what neither a value nor an alignment of can be worth a compilation."""


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def decode_kernel(
    q: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_pool: tl.tensor,
    k_page_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_pool: tl.tensor,
    v_page_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    lens: tl.tensor,
    capacity: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    heads: tl.tensor,
    tiles: tl.tensor,
    programs: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Grid (rows * tiles, programs): the programs of a row take equal numbers of its splits, one after the other.

    Tiles come first, so neighbours read neighbouring heads of the same tokens; the rows of a group, which share
    pages, come right after one another.
    """
    TILES_PER_GROUP: tl.constexpr = (GROUP + _ROWS - 1) // _ROWS
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    row_64 = row.to(tl.int64)
    key_head = (tile // TILES_PER_GROUP).to(tl.int64)
    member = (tile % TILES_PER_GROUP).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    is_head = member < GROUP
    head = key_head * GROUP + member
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)

    queries = tl.load(
        q + row_64 * q_row_stride + head[:, None] * q_head_stride + dims[None, :],
        mask=is_head[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    length = tl.minimum(tl.load(lens + row), capacity)
    start = tl.maximum(length - window, 0)
    first = start // SPLIT
    count = (length + SPLIT - 1) // SPLIT - first
    share = (count + programs - 1) // programs
    whole = share == count  # one program has all of the row
    own = first + tl.program_id(1).to(tl.int64) * share
    begin = tl.maximum(start, own * SPLIT).to(tl.int32)
    end = tl.minimum(length, (own + share) * SPLIT).to(tl.int32)

    m = tl.full([_ROWS], float("-inf"), tl.float32)  # of the splits before
    s = tl.zeros([_ROWS], tl.float32)
    total = tl.zeros([_ROWS, BLOCK_E], tl.float32)
    m_split = tl.full([_ROWS], float("-inf"), tl.float32)
    s_split = tl.zeros([_ROWS], tl.float32)
    acc = tl.zeros([_ROWS, BLOCK_E], tl.float32)
    for at in tl.range(begin // BLOCK * BLOCK, end, BLOCK, num_stages=STAGES):
        token = at + tl.arange(0, BLOCK)
        seen = (token >= begin) & (token < end)
        page = tl.load(tables + row_64 * table_stride + token // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (token % PAGE).to(tl.int64)
        k_at = page * k_page_stride + slot * k_slot_stride + key_head * k_head_stride
        v_at = page * v_page_stride + slot * v_slot_stride + key_head * v_head_stride
        keys = tl.load(k_pool + k_at[:, None] + dims[None, :], mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        x = _dot(queries, tl.trans(keys), tl.zeros([_ROWS, BLOCK], tl.float32), UPCAST) * scale
        if softcap is not None:
            x = _cap(x, softcap)
        x = tl.where(seen[None, :], x, float("-inf"))
        new = tl.maximum(m_split, tl.max(x, 1))
        fade = tl.exp2((m_split - new) * LOG2E)
        p = tl.exp2((x - new[:, None]) * LOG2E)
        values = tl.load(
            v_pool + v_at[:, None] + value_dims[None, :], mask=seen[:, None] & (value_dims < E)[None, :], other=0.0
        )
        m_split = new
        s_split = s_split * fade + tl.sum(p, 1)
        acc = _weigh(p, values, acc * fade[:, None], UPCAST)
        done = ((at + BLOCK) % SPLIT == 0) | (at + BLOCK >= end)
        if done:
            if whole:
                m, s, old_factor, factor = _fold(m, s, m_split, s_split)
                total = total * old_factor[:, None] + acc * factor[:, None]
            else:
                place = (row_64 * heads + head) * splits + (at // SPLIT - first)
                tl.store(maxima + place, m_split, mask=is_head)
                tl.store(totals + place, s_split, mask=is_head)
                inside = is_head[:, None] & (value_dims < E)[None, :]
                tl.store(sums + place[:, None] * E + value_dims[None, :], acc, mask=inside)
            m_split = tl.full([_ROWS], float("-inf"), tl.float32)
            s_split = tl.zeros([_ROWS], tl.float32)
            acc = tl.zeros([_ROWS, BLOCK_E], tl.float32)

    if whole & (tl.program_id(1) == 0):
        if sinks is not None:
            s, factor = _with_sink(m, s, tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32))
            total = total * factor[:, None]
        result = total / tl.where(length == 0, 1.0, s)[:, None]  # no tokens: 0 / 1
        tl.store(
            out + (row_64 * heads + head)[:, None] * E + value_dims[None, :],
            result.to(out.dtype.element_ty),
            mask=is_head[:, None] & (value_dims < E)[None, :],
        )


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_VECTORS)
def combine_kernel(
    sums: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    lens: tl.tensor,
    capacity: tl.tensor,
    window: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    splits: tl.tensor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row and query head: `_fold` over the row's splits, as one program of decode would have done."""
    row = tl.program_id(0).to(tl.int64) // heads
    head = tl.program_id(0) % heads
    length = tl.minimum(tl.load(lens + row), capacity)
    first = tl.maximum(length - window, 0) // SPLIT
    count = (length + SPLIT - 1) // SPLIT - first
    if count > 1:
        dims = tl.arange(0, BLOCK_E)
        place = (row * heads + head) * splits
        m = float("-inf")
        s = 0.0
        total = tl.zeros([BLOCK_E], tl.float32)
        for i in tl.range(0, count, num_stages=STAGES):
            acc = tl.load(sums + (place + i) * E + dims, mask=dims < E, other=0.0)
            m, s, old_factor, factor = _fold(m, s, tl.load(maxima + place + i), tl.load(totals + place + i))
            total = total * old_factor + acc * factor
        if sinks is not None:
            s, factor = _with_sink(m, s, tl.load(sinks + head).to(tl.float32))
            total = total * factor
        tl.store(out + (row * heads + head) * E + dims, (total / s).to(out.dtype.element_ty), mask=dims < E)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _check_decode(q_BHD: Tensor, k_pool: Tensor, tables: Tensor, lens: Tensor, sinks: Tensor | None) -> None:
    batch, heads, dim = q_BHD.shape
    if dim != k_pool.shape[3] or heads % k_pool.shape[2]:
        raise ValueError(
            f"q_BHD: {heads} heads of {dim} dims do not fit {k_pool.shape[2]} key heads of {k_pool.shape[3]}; need the "
            "same dims and a multiple of the key heads"
        )
    if tables.dim() != 2 or not len(tables) == len(lens) == batch:
        raise ValueError(
            f"tables, lens: shapes {tuple(tables.shape)} and {tuple(lens.shape)} do not fit {batch} queries; need "
            f"[{batch}, W] and [{batch}]"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}; need [{heads}], one per query head")


def split_grid(rows: int, capacity: int, window: int | None) -> tuple[int, int]:
    """(splits, programs): how many splits a row can have, and how many programs share them, from shapes alone.

    rows: sequences times tiles of query heads. capacity: tokens that a table's pages hold.
    """
    splits = max(1, cdiv(capacity, SPLIT))
    if window is not None:
        splits = min(splits, (window + 2 * SPLIT - 2) // SPLIT)  # so many can `window` tokens touch
    return splits, min(splits, cdiv(PROGRAMS, max(1, rows)))


def decode_triton(
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
) -> Tensor:
    """Attention of the newest token of each sequence over its pages: [B,H,E] in q's dtype, 0 for a length of 0.

    q bf16, fp16 or float32 [B,H,D]; pools [pages, page_size, Hk, D and E] with any strides but the last; tables int32
    [B,W] and lens int32 [B] are read on the device only, so the call can be captured in a CUDA graph. Any page size.
    Raises ValueError for shapes that do not fit. A length beyond the table counts as the table's.
    """
    check_pools(k_pool, v_pool)
    _check_decode(q_BHD, k_pool, tables, lens, sinks)
    q_BHD, tables, lens = unit_columns(q_BHD), unit_columns(tables), unit_columns(lens)
    sinks = None if sinks is None else unit_columns(sinks)
    batch, heads, dim = q_BHD.shape
    page_size, key_heads, value_dim = v_pool.shape[1:]
    group = heads // key_heads
    tiles = key_heads * cdiv(group, ROWS)
    capacity = tables.shape[1] * page_size
    splits, programs = split_grid(batch * tiles, capacity, window)
    if 4 * batch * heads * splits * (value_dim + 2) > WORKSPACE_BYTES:
        programs = 1
    places = batch * heads * splits if programs > 1 else 0
    out = torch.empty(batch, heads, value_dim, dtype=q_BHD.dtype, device=q_BHD.device)
    sums = torch.empty(places, value_dim, device=q_BHD.device)
    maxima, totals = torch.empty(2, places, device=q_BHD.device)
    mixed = q_BHD.dtype != k_pool.dtype
    blocks = {"BLOCK_E": padded(value_dim), "E": value_dim, "SPLIT": SPLIT}
    window = 2**31 - 1 if window is None else window
    _decode_launch(max(padded(dim), padded(value_dim)), mixed or k_pool.dtype == torch.float32)(
        decode_kernel,
        (batch * tiles, programs),
        q_BHD.device,
        q_BHD,
        *row_strides(q_BHD),
        k_pool,
        *k_pool.stride()[:3],
        v_pool,
        *v_pool.stride()[:3],
        tables,
        tables.stride(0),
        lens,
        capacity,
        window,
        float(scale),
        None if softcap is None else float(softcap),
        sinks,
        out,
        sums,
        maxima,
        totals,
        heads,
        tiles,
        programs,
        splits,
        GROUP=group,
        D=dim,
        BLOCK_D=padded(dim),
        PAGE=page_size,
        UPCAST=INTERPRETED or mixed,
        **blocks,
    )
    if programs > 1:
        numbers = (lens, capacity, window, sinks, out, heads, splits)
        COMBINE(combine_kernel, (batch * heads,), q_BHD.device, sums, maxima, totals, *numbers, **blocks)
    return out


def _decode_launch(block_dims: int, exact: bool) -> Launch:
    """block_dims: the larger of the two padded head dimensions. exact: the dots are float32."""
    if block_dims > 256 or exact:
        return DECODE_WIDEST
    return DECODE_WIDE if block_dims > 128 else DECODE
