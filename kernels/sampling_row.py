"""Softmax and the two-level inverse CDF of one row of logits, as Triton device functions for `sampling_kernels.py`.

A row is read in blocks of ids. Sums of exp(x - max) per block are the upper level of the CDF, in registers; the ids of
the one block that holds the token are read again for the lower level. x = logit * (1/T) in float32 everywhere.
"""

from rhotrain.kernels.backend import LOG2E, jit, tl

NONE = tl.constexpr(2**31 - 1)
"""Larger than any id."""


@jit
def exp_below(x: tl.tensor, m: tl.tensor) -> tl.tensor:
    """exp(x - m), 0 for x = -inf even where m is -inf."""
    return tl.exp2((x - tl.where(m == float("-inf"), 0.0, m)) * LOG2E)


@jit
def first_above(weights: tl.tensor, target: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Index of the first positive weight whose CDF exceeds the target; past the end (rounding) the last positive."""
    positive = weights > 0.0
    above = positive & (tl.cumsum(weights, 0) > target)
    return tl.minimum(tl.min(tl.where(above, index, NONE), 0), tl.max(tl.where(positive, index, -1), 0))


@jit
def kept_by_cut(
    x: tl.tensor, ids: tl.tensor, m: tl.tensor, cut: tl.tensor, cut_id: tl.tensor, min_p: tl.tensor
) -> tl.tensor:
    """Which ids the cut leaves: values above it, and at it the ids up to cut_id; then min-p."""
    return ((x > cut) | ((x == cut) & (ids <= cut_id))) & (exp_below(x, m) >= min_p)


@jit
def _put_softmax(maxima: tl.tensor, sums: tl.tensor, place: tl.tensor, at: tl.tensor, x: tl.tensor) -> tl.tensor:
    m = tl.max(x, 0)
    return tl.where(place == at, m, maxima), tl.where(place == at, tl.sum(exp_below(x, m), 0), sums)


@jit
def softmax_blocks(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(max [BLOCKS], sum of exp(x - row max) [BLOCKS], row max, row sum) of a row; one read.

    NaN or +inf anywhere, or no finite value at all, leaves a row sum that is not a positive finite number.
    """
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCKS)
    maxima = tl.full([BLOCKS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCKS], tl.float32)
    full = vocab // BLOCK * BLOCK
    for c in tl.range(0, full, BLOCK, num_stages=STAGES):
        x = tl.load(row_ptr + c + lane).to(tl.float32) * inverse
        maxima, sums = _put_softmax(maxima, sums, place, c // BLOCK, x)
    for c in tl.range(full, vocab, BLOCK, num_stages=1):  # once, or not at all
        x = tl.load(row_ptr + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32) * inverse
        maxima, sums = _put_softmax(maxima, sums, place, c // BLOCK, x)
    m = tl.max(maxima, 0)
    # The weight of a block is positive exactly where that of its largest id is: both are this very number times >= 1.
    sums = sums * exp_below(maxima, m)
    return maxima, sums, m, tl.sum(sums, 0)


@jit
def _put_kept(
    weights: tl.tensor, count: tl.tensor, place: tl.tensor, at: tl.tensor, x: tl.tensor, m: tl.tensor, keep: tl.tensor
) -> tl.tensor:
    kept = tl.sum(tl.where(keep, exp_below(x, m), 0.0), 0)
    return tl.where(place == at, kept, weights), count + tl.sum(keep.to(tl.int32), 0)


@jit
def kept_blocks(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    m: tl.tensor,
    cut: tl.tensor,
    cut_id: tl.tensor,
    min_p: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(sum of exp(x - m) of the kept ids [BLOCKS], number of kept ids)."""
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCKS)
    weights = tl.zeros([BLOCKS], tl.float32)
    count = tl.full((), 0, tl.int32)
    full = vocab // BLOCK * BLOCK
    for c in tl.range(0, full, BLOCK, num_stages=STAGES):
        x = tl.load(row_ptr + c + lane).to(tl.float32) * inverse
        keep = kept_by_cut(x, c + lane, m, cut, cut_id, min_p)
        weights, count = _put_kept(weights, count, place, c // BLOCK, x, m, keep)
    for c in tl.range(full, vocab, BLOCK, num_stages=1):  # once, or not at all
        x = tl.load(row_ptr + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32) * inverse
        keep = kept_by_cut(x, c + lane, m, cut, cut_id, min_p)
        weights, count = _put_kept(weights, count, place, c // BLOCK, x, m, keep)
    return weights, count


@jit
def draw_from_blocks(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    m: tl.tensor,
    weights: tl.tensor,
    target: tl.tensor,
    cut: tl.tensor,
    cut_id: tl.tensor,
    min_p: tl.tensor,
    greedy: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The id at which the CDF of the kept ids passes the target; weights [BLOCKS]: those of its upper level."""
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCKS)
    block = tl.maximum(first_above(weights, target, place), 0)
    target -= tl.sum(tl.where(place < block, weights, 0.0), 0)
    ids = block * BLOCK + lane
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32) * inverse
    w = tl.where(kept_by_cut(x, ids, m, cut, cut_id, min_p), exp_below(x, m), 0.0)
    w = tl.where(greedy, tl.where(x == m, 1.0, 0.0), w)
    return tl.maximum(block * BLOCK + first_above(w, target, lane), 0)
