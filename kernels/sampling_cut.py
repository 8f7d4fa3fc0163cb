"""Where the kept set of a row ends: the value and the ties at it, as Triton device functions for `sampling_kernels.py`.

The kept set is a prefix of the total order (value descending, id ascending), so it is a value and a number of ties at
it. Nothing is sorted. Passes over the row count the ids, and their mass, at or above four values; each leaves a
narrower interval that holds the wanted value, mostly one is enough, until at most CAPACITY ids lie from it on (or in
it). Those are written to a buffer in the order of their ids, and top-k and top-p are settled on them in registers, by
bisection. The interval is split by value first, which is quick for any usual row, and after a few passes by the order
of float32 numbers, so that 20 passes are enough whatever the row holds. Passes after the first read the L2 cache.
"""

from rhotrain.kernels.backend import jit, tl
from rhotrain.kernels.sampling_row import NONE, exp_below

LOWEST = tl.constexpr(-3.4028234663852886e38)
_FIRST_DEPTH = tl.constexpr(12.0)
"""Nats below the maximum that the first pass of a top-k row looks at; further passes look 8 times as deep."""
_VALUE_PASSES = tl.constexpr(6)
"""Passes that split an interval of values; from then on they split the float32 numbers in it, 5 ways each."""


@jit
def _key(value: tl.tensor) -> tl.tensor:
    """int64 that orders float32 numbers as their values do."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float32 number of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _pivot(
    lo: tl.tensor, hi: tl.tensor, m: tl.tensor, depth: tl.tensor, passes: tl.tensor, PART: tl.constexpr
) -> tl.tensor:
    """Where a pass splits [lo, hi): PART fifths above lo or, while lo is unknown, some way below the top."""
    top = tl.minimum(hi, m)
    step = depth
    if PART == 3:
        step = depth * 0.5
    if PART == 4:  # first the maximum itself: its ties may be enough
        step = tl.where(hi > m, 0.0, depth * 0.1)
    value = tl.where(lo == LOWEST, top - step, lo + (top - lo) * (PART * 0.2))
    if PART == 1:
        value = tl.where(lo == LOWEST, LOWEST, value)  # counts every finite id
    width = _key(hi) - _key(lo)
    by_key = _value(_key(lo) + tl.maximum(width * PART // 5, 1))
    return tl.maximum(tl.where(passes < _VALUE_PASSES, value, by_key), LOWEST)


@jit
def _tally(count: tl.tensor, mass: tl.tensor, x: tl.tensor, e: tl.tensor, pivot: tl.tensor) -> tl.tensor:
    above = x >= pivot
    return count + above.to(tl.int32), mass + tl.where(above, e, 0.0)


@jit
def _count_and_mass(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    m: tl.tensor,
    p1: tl.tensor,
    p2: tl.tensor,
    p3: tl.tensor,
    p4: tl.tensor,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Number and mass of the ids at or above each of four values; one read. Both fall as the value rises.

    Summed per lane, so that no reduction holds the loop up.
    """
    lane = tl.arange(0, TILE)
    n1 = tl.zeros([TILE], tl.int32)
    n2, n3, n4 = n1, n1, n1
    w1 = tl.zeros([TILE], tl.float32)
    w2, w3, w4 = w1, w1, w1
    full = vocab // TILE * TILE
    for c in tl.range(0, full, TILE, num_stages=STAGES):
        x = tl.load(row_ptr + c + lane).to(tl.float32) * inverse
        e = exp_below(x, m)
        n1, w1 = _tally(n1, w1, x, e, p1)
        n2, w2 = _tally(n2, w2, x, e, p2)
        n3, w3 = _tally(n3, w3, x, e, p3)
        n4, w4 = _tally(n4, w4, x, e, p4)
    for c in tl.range(full, vocab, TILE, num_stages=1):  # once, or not at all
        x = tl.load(row_ptr + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32) * inverse
        e = exp_below(x, m)
        n1, w1 = _tally(n1, w1, x, e, p1)
        n2, w2 = _tally(n2, w2, x, e, p2)
        n3, w3 = _tally(n3, w3, x, e, p3)
        n4, w4 = _tally(n4, w4, x, e, p4)
    n1, n2, n3, n4 = tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0), tl.sum(n4, 0)
    return n1, n2, n3, n4, tl.sum(w1, 0), tl.sum(w2, 0), tl.sum(w3, 0), tl.sum(w4, 0)


@jit
def _shrink(
    lo: tl.tensor,
    n_lo: tl.tensor,
    hi: tl.tensor,
    n_hi: tl.tensor,
    w_hi: tl.tensor,
    pivot: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    target: tl.tensor,
    by_mass: tl.tensor,
) -> tl.tensor:
    """[lo, hi) after a pass: the ids from a pivot on are enough, so the cut is there or above, or they are not."""
    enough = (tl.where(by_mass, mass, count.to(tl.float32)) >= target) | (pivot == LOWEST)
    up = enough & (pivot >= lo)
    down = (enough == 0) & (pivot <= hi)
    lo, n_lo = tl.where(up, pivot, lo), tl.where(up, count, n_lo)
    return lo, n_lo, tl.where(down, pivot, hi), tl.where(down, count, n_hi), tl.where(down, mass, w_hi)


@jit
def _narrow(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    m: tl.tensor,
    lo: tl.tensor,
    n_lo: tl.tensor,
    target: tl.tensor,
    by_mass: tl.tensor,
    depth: tl.tensor,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(lo, ids from lo on, hi, ids from hi on, their mass): the cut is in [lo, hi), and few ids or one value are."""
    hi = _value(_key(tl.where(m == 0.0, 0.0, m)) + 1)  # the number after m; -0.0 and 0.0 are one value, two keys
    n_hi = tl.full((), 0, tl.int32)
    w_hi = tl.full((), 0.0, tl.float32)
    passes = tl.full((), 0, tl.int32)
    while (n_lo - n_hi > CAPACITY) & (_key(hi) - _key(lo) > 1):
        p4 = _pivot(lo, hi, m, depth, passes, 4)
        p3 = _pivot(lo, hi, m, depth, passes, 3)
        p2 = _pivot(lo, hi, m, depth, passes, 2)
        p1 = _pivot(lo, hi, m, depth, passes, 1)
        n1, n2, n3, n4, w1, w2, w3, w4 = _count_and_mass(row_ptr, vocab, inverse, m, p1, p2, p3, p4, TILE, STAGES)
        lo, n_lo, hi, n_hi, w_hi = _shrink(lo, n_lo, hi, n_hi, w_hi, p4, n4, w4, target, by_mass)
        lo, n_lo, hi, n_hi, w_hi = _shrink(lo, n_lo, hi, n_hi, w_hi, p3, n3, w3, target, by_mass)
        lo, n_lo, hi, n_hi, w_hi = _shrink(lo, n_lo, hi, n_hi, w_hi, p2, n2, w2, target, by_mass)
        lo, n_lo, hi, n_hi, w_hi = _shrink(lo, n_lo, hi, n_hi, w_hi, p1, n1, w1, target, by_mass)
        depth = depth * 8.0
        passes += 1
    return lo, n_lo, hi, n_hi, w_hi


@jit
def _hold(
    held_x: tl.tensor,
    held_id: tl.tensor,
    n: tl.tensor,
    ids: tl.tensor,
    x: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    CAPACITY: tl.constexpr,
) -> tl.tensor:
    inside = (x >= lo) & (x < hi)
    here = tl.sum(inside.to(tl.int32), 0)
    if here > 0:
        at = n + tl.cumsum(inside.to(tl.int32), 0) - 1
        stays = inside & (at < CAPACITY)
        tl.store(held_x + at, tl.where(x == 0.0, 0.0, x), mask=stays)  # one zero: -0.0 has a key of its own
        tl.store(held_id + at, ids, mask=stays)
    return n + here


@jit
def _collect(
    row_ptr: tl.tensor,
    held_x: tl.tensor,
    held_id: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Write the ids with a value in [lo, hi), at most CAPACITY, and their values to the buffer; returns how many."""
    lane = tl.arange(0, TILE)
    n = tl.full((), 0, tl.int32)
    full = vocab // TILE * TILE
    tl.debug_barrier()  # the buffer may still be read
    for c in tl.range(0, full, TILE, num_stages=STAGES):
        x = tl.load(row_ptr + c + lane).to(tl.float32) * inverse
        n = _hold(held_x, held_id, n, c + lane, x, lo, hi, CAPACITY)
    for c in tl.range(full, vocab, TILE, num_stages=1):  # once, or not at all
        x = tl.load(row_ptr + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32) * inverse
        n = _hold(held_x, held_id, n, c + lane, x, lo, hi, CAPACITY)
    tl.debug_barrier()  # one thread wrote what another will read
    return n


@jit
def _smallest_needed(v: tl.tensor, weights: tl.tensor, base: tl.tensor, target: tl.tensor) -> tl.tensor:
    """The largest value in v such that base and the weights from it on reach the target; the smallest if none does.

    Each turn halves the float32 numbers between two values of v and takes the nearest values of v on that side.
    """
    lo = tl.min(tl.where(v > float("-inf"), v, float("inf")), 0)
    hi = tl.max(v, 0)
    while lo < hi:
        middle = _value(_key(lo) + ((_key(hi) - _key(lo) + 1) >> 1))
        upper = v >= middle
        enough = base + tl.sum(tl.where(upper, weights, 0.0), 0) >= target
        lo = tl.where(enough, tl.min(tl.where(upper, v, float("inf")), 0), lo)
        hi = tl.where(enough, hi, tl.max(tl.where(upper, float("-inf"), v), 0))
    return lo


@jit
def nth_tie(
    row_ptr: tl.tensor, vocab: tl.tensor, inverse: tl.tensor, cut: tl.tensor, ties: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Id of the ties-th id whose value is `cut`."""
    lane = tl.arange(0, TILE)
    seen = tl.full((), 0, tl.int32)
    c = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    while (found < 0) & (c < vocab):
        ids = c + lane
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * inverse
        tie = (x == cut).to(tl.int32)
        here = tl.sum(tie, 0)
        if seen + here >= ties:
            rank = seen + tl.cumsum(tie, 0)
            found = tl.min(tl.where((tie > 0) & (rank == ties), ids, NONE), 0)
        seen += here
        c += TILE
    return found


@jit
def find_cut(
    row_ptr: tl.tensor,
    held_x: tl.tensor,
    held_id: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    m: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(cut, ties, tied, held): top-k, then top-p keep the values above `cut` and the first `ties` of the `tied` at it.

    held: number of ids in the buffer, in order, if all of the kept ones are there, else 0. cut is -inf where neither
    of the two cuts anything; min-p is not looked at here.
    """
    cut = tl.full((), float("-inf"), tl.float32)
    ties = tl.full((), 0, tl.int32)
    tied = tl.full((), 0, tl.int32)
    held = tl.full((), 0, tl.int32)
    lo = tl.full((), LOWEST, tl.float32)
    n_lo = tl.full((), 0, tl.int32) + vocab  # more than there are, until a pass has counted the finite ones
    mass = total
    for stage in range(2):
        by_mass = stage == 1
        if tl.where(by_mass, top_p < 1.0, top_k > 0):
            target = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
            hi = tl.full((), float("inf"), tl.float32)
            n_hi = tl.full((), 0, tl.int32)
            w_hi = tl.full((), 0.0, tl.float32)
            n = held
            if held == 0:
                # Below this depth all ids together hold less than 1 - top_p of the mass.
                tail = tl.log(vocab / tl.maximum((1.0 - top_p) * total, 1e-30))
                depth = tl.where(by_mass, tl.minimum(tl.maximum(tail, 1.0), 80.0), _FIRST_DEPTH)
                lo, n_lo, hi, n_hi, w_hi = _narrow(
                    row_ptr, vocab, inverse, m, lo, n_lo, target, by_mass, depth, TILE, CAPACITY, STAGES
                )
                everything = n_lo <= CAPACITY
                hi = tl.where(everything, float("inf"), hi)
                n_hi = tl.where(everything, 0, n_hi)
                w_hi = tl.where(everything, 0.0, w_hi)
                if n_lo - n_hi <= CAPACITY:
                    n = _collect(row_ptr, held_x, held_id, vocab, inverse, lo, hi, TILE, CAPACITY, STAGES)
                held = tl.where(everything, n, 0)
            found = cut
            here = n_lo - n_hi
            if n > 0:
                lane = tl.arange(0, CAPACITY)
                v = tl.load(held_x + lane, mask=lane < n, other=float("-inf"))
                e = exp_below(v, m)
                counts = tl.where(v > float("-inf"), 1.0, 0.0)
                base = tl.where(by_mass, w_hi, n_hi.to(tl.float32))
                found = _smallest_needed(v, tl.where(by_mass, e, counts), base, target)
                found = tl.maximum(found, cut)  # top-p never keeps what top-k has cut, however the sums round
                n_hi += tl.sum((v > found).to(tl.int32), 0)
                w_hi += tl.sum(tl.where(v > found, e, 0.0), 0)
                here = tl.sum((v == found).to(tl.int32), 0)
            elif here > CAPACITY:
                found = lo  # one value, more often than the buffer could hold
            limit = tl.where(found > cut, here, ties)
            w = exp_below(found, m)
            by_count = top_k - n_hi
            room = limit.to(tl.float32)
            fits = tl.where(w > 0.0, -tl.floor(-tl.div_rn(target - w_hi, tl.where(w > 0.0, w, 1.0))), room)
            fits = tl.maximum(tl.minimum(fits, room), tl.minimum(room, 1.0)).to(tl.int32)
            ties = tl.where(by_mass, fits, tl.minimum(by_count, limit))
            if found > float("-inf"):
                tied = here
                cut = found
                lo = found
                n_lo = n_hi + here
                mass = w_hi + ties.to(tl.float32) * w
    return cut, ties, tied, held
