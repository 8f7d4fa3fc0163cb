"""The two passes over a row of logits that every op here is made of, in PyTorch and as Triton device functions.

    statistics   x_j = logits_j * (1 / temperature)      m = max_j x_j      s = sum_j e_j with e_j = exp(x_j - m)
                 lse = m + log s      logprob = (x_t - m) - log s      entropy = log s - sum_j e_j (x_j - m) / s
    gradient     p_j = exp(x_j - lse)
                 dx_j = g_lp (1[j = t] - p_j) + g_lse p_j - g_H p_j (log p_j + entropy)      dlogits_j = dx_j / T

over the real vocabulary, or over the row's kept set: then every other logit has p = 0 and a gradient of exactly 0.
Both passes subtract the row maximum first, so nothing large cancels, in the entropy neither. Logits of -inf have p = 0
and add exactly 0; a row without a finite logit is NaN, as in `torch.log_softmax`. p_t - 1 is formed in float32 before
any rounding to a narrower type (Liger #1329: wrong by 100 % at p = 0.999).

PyTorch: a [C, V] block in place, logits -> exp -> gradient. Triton: one program per row. The statistics are one online
pass with a scalar running maximum (a running maximum per lane would need twice the exponentials and spill registers);
the gradient pass walks the row backwards, so that what the first pass read last is still in the L2 cache. Whole blocks
are read without a mask, which is what compiles to 16-byte loads; the rest of the row is one masked block. A row with
a kept set reads only that set.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.backend import LOG2E, jit, tl
from rhotrain.kernels.rows import ActiveRows

LOG_ZERO = -1e4
"""Stands in for a log-probability of -inf where it is multiplied by p = 0: exp of it is 0 in float32 and float64
alike."""

_LOG_ZERO = tl.constexpr(LOG_ZERO)


# ---- reference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowStats:
    """What `row_stats_` found: [C] each, inverse_sum [C, 1] turns the overwritten buffer into probabilities."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor
    inverse_sum: Tensor


def row_stats_(x_CV: Tensor, rows: ActiveRows, *, entropy: bool) -> RowStats:
    """Logits in, e = exp(x - max) left in `x_CV`; x = logits / T on the kept set."""
    if rows.inv_temperature is not None:
        x_CV.mul_(rows.inv_temperature)
    ids_C1 = rows.token_ids.unsqueeze(1)
    if rows.kept is not None:
        mask = rows.kept.mask(rows.vocab)
        check_kept(mask.gather(1, ids_C1), rows)
        x_CV.masked_fill_(mask.logical_not_(), -math.inf)
    max_C1 = x_CV.amax(1, keepdim=True)
    target_C1 = x_CV.gather(1, ids_C1).sub_(max_C1)
    x_CV.sub_(max_C1)
    if entropy:
        shifted = x_CV.clamp(min=LOG_ZERO)
        sum_C1 = x_CV.exp_().sum(1, keepdim=True)
        weighted_C1 = shifted.mul_(x_CV).sum(1, keepdim=True)
    else:
        sum_C1 = x_CV.exp_().sum(1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    return RowStats(
        (target_C1 - log_sum_C1).squeeze(1),
        (log_sum_C1 - weighted_C1 / sum_C1).squeeze(1) if entropy else None,
        (max_C1 + log_sum_C1).squeeze(1),
        sum_C1.reciprocal(),
    )


def check_kept(found_C1: Tensor, rows: ActiveRows) -> None:
    """ValueError (CUDA: an asynchronous assert) unless every row's token is in the row's kept set."""
    if found_C1.is_cuda:
        torch._assert_async(found_C1.all(), "kept: a token is not in its own kept set")
    elif not bool(found_C1.all()):
        at = int((~found_C1).nonzero()[0, 0])
        raise ValueError(
            f"kept: row {int(rows.index[at])} has token {int(rows.token_ids[at])}, which is not in its own kept set; "
            "the token was drawn from that set, so rows and sets are out of step"
        )


def logit_grads_(
    x_CV: Tensor,
    stats: RowStats,
    rows: ActiveRows,
    dlogprobs_C: Tensor,
    dentropy_C: Tensor | None = None,
    dlogsumexp_C: Tensor | None = None,
) -> None:
    """The buffer that `row_stats_` left in, dlogits out (in place); upstream gradients per row."""
    slope_C = -dlogprobs_C
    if dlogsumexp_C is not None:
        slope_C = slope_C + dlogsumexp_C
    direct_C1 = dlogprobs_C.unsqueeze(1)
    inverse = rows.inv_temperature
    if inverse is not None:
        direct_C1 = direct_C1 * inverse
    if dentropy_C is None:
        scale_C1 = slope_C.unsqueeze(1) * stats.inverse_sum
        x_CV.mul_(scale_C1 if inverse is None else scale_C1 * inverse)
    else:
        assert stats.entropy is not None
        slope_C1 = (slope_C - dentropy_C * stats.entropy).unsqueeze(1)
        dentropy_C1 = dentropy_C.unsqueeze(1)
        x_CV.mul_(stats.inverse_sum)
        entr = torch.special.entr(x_CV).mul_(dentropy_C1 if inverse is None else dentropy_C1 * inverse)
        x_CV.mul_(slope_C1 if inverse is None else slope_C1 * inverse).add_(entr)
    x_CV.scatter_add_(1, rows.token_ids.unsqueeze(1), direct_C1)


# ---- Triton device functions ----------------------------------------------------------------------------------------

BAD_ID = tl.constexpr(1)
"""Status bit: an active row's id is outside the real vocabulary."""
BAD_KEPT = tl.constexpr(2)
"""Status bit: a kept set lacks its own token, leaves the vocabulary or does not ascend."""


@jit
def load_token(token_ids: tl.tensor, row: tl.tensor, vocab: tl.tensor, ignore_index: tl.tensor) -> tl.tensor:
    """(id as int32, active, bad) of a row; the id is 0 in a row that is not active."""
    token = tl.load(token_ids + row).to(tl.int64)
    wanted = token != ignore_index
    inside = (token >= 0) & (token < vocab)
    active = wanted & inside
    return tl.where(active, token, 0).to(tl.int32), active, wanted & (inside == 0)


@jit
def _online(m: tl.tensor, s: tl.tensor, w: tl.tensor, x: tl.tensor, ENTROPY: tl.constexpr) -> tl.tensor:
    """One block x of tempered logits into (max, sum e, sum e log2 e) of the blocks before it."""
    new = tl.maximum(m, tl.max(x, 0))
    base = tl.where(new == float("-inf"), 0.0, new)  # -inf so far: exp(-inf - -inf) would be NaN
    fade = tl.exp2((m - base) * LOG2E)
    shifted = (x - base) * LOG2E
    e = tl.exp2(shifted)
    if ENTROPY:
        step = tl.where(m == float("-inf"), 0.0, (m - base) * LOG2E)
        w = fade * (w + s * step) + tl.sum(e * tl.maximum(shifted, _LOG_ZERO), 0)
    s = s * fade + tl.sum(e, 0)
    return new, s, w


@jit
def row_statistics(
    row_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    length: tl.tensor,
    vocab: tl.tensor,
    token: tl.tensor,
    inv_t: tl.tensor,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """(logprob, entropy, logsumexp, bad) of one row. length: number of ids to read, 0 for a row that is not active.

    Those are the ids 0 .. length - 1 or, with KEPT, the ids at kept_ptr. bad (KEPT): the set does not hold the token,
    holds ids outside the vocabulary or does not ascend.
    """
    lane = tl.arange(0, BLOCK)
    # First, so that the barriers of the reductions below lie between it and a gradient that overwrites the row.
    target = tl.load(row_ptr + token, mask=length > 0, other=0.0).to(tl.float32) * inv_t
    m = float("-inf")
    s = 0.0
    w = 0.0
    found = 0
    wrong = 0
    if KEPT:
        for c in tl.range(0, length, BLOCK, num_stages=STAGES):
            at = c + lane
            inside = at < length
            ids = tl.load(kept_ptr + at, mask=inside, other=0)
            before = tl.load(kept_ptr + at - 1, mask=inside & (at > 0), other=-1)
            real = inside & (ids >= 0) & (ids < vocab)
            found += tl.sum((real & (ids == token)).to(tl.int32), 0)
            wrong += tl.sum((inside & ((real == 0) | (ids <= before))).to(tl.int32), 0)
            x = tl.load(row_ptr + ids, mask=real, other=float("-inf")).to(tl.float32) * inv_t
            m, s, w = _online(m, s, w, x, ENTROPY)
    else:
        whole = length // BLOCK * BLOCK
        for c in tl.range(0, whole, BLOCK, num_stages=STAGES):
            x = tl.load(row_ptr + c + lane).to(tl.float32) * inv_t
            m, s, w = _online(m, s, w, x, ENTROPY)
        for c in tl.range(whole, length, BLOCK, num_stages=1):  # no turn where BLOCK divides the length
            x = tl.load(row_ptr + c + lane, mask=c + lane < length, other=float("-inf")).to(tl.float32) * inv_t
            m, s, w = _online(m, s, w, x, ENTROPY)
    empty = m == float("-inf")  # no finite logit: NaN, as in torch
    s = tl.where(empty, 1.0, s)
    log_s = tl.where(empty, float("nan"), tl.log(s))
    entropy = 0.0
    if ENTROPY:
        entropy = log_s - w / (s * LOG2E)
    bad = (found != 1) | (wrong > 0)
    return (target - m) - log_s, entropy, m + log_s, bad


@jit
def _gradient(
    x: tl.tensor,
    is_token: tl.tensor,
    lse: tl.tensor,
    g_token: tl.tensor,
    slope: tl.tensor,
    g_entropy: tl.tensor,
    ENTROPY: tl.constexpr,
) -> tl.tensor:
    log_p = x - lse
    p = tl.exp2(log_p * LOG2E)
    if ENTROPY:
        slope = slope - g_entropy * tl.maximum(log_p, _LOG_ZERO)
    return p * slope + tl.where(is_token, g_token, 0.0)


@jit
def row_gradient(
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    length: tl.tensor,
    columns: tl.tensor,
    token: tl.tensor,
    inv_t: tl.tensor,
    lse: tl.tensor,
    entropy: tl.tensor,
    g_logprob: tl.tensor,
    g_logsumexp: tl.tensor,
    g_entropy: tl.tensor,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one row of dlogits to out_ptr, which may be row_ptr; zeros from `length` to `columns`.

    With KEPT only the set's gradients are written, one after the other (`scatter_kernel` puts them in their places).
    BLOCK: smaller than the statistics' in a kernel that has both. Accesses of one shape share a layout, and that of a
    half-type store would change the order of the statistics' sums; and it is this pass that needs the registers. Its
    loads are not pipelined: they go through the L1 cache, where float32 in and half types out find whole sectors.
    """
    lane = tl.arange(0, BLOCK)
    g_token = g_logprob * inv_t
    slope = (g_logsumexp - g_logprob) * inv_t
    if ENTROPY:
        g_entropy = g_entropy * inv_t
        slope = slope - g_entropy * entropy
    if KEPT:
        for c in tl.range(0, length, BLOCK, num_stages=1):
            at = c + lane
            ids = tl.load(kept_ptr + at, mask=at < length, other=0)
            x = tl.load(row_ptr + ids, mask=at < length, other=float("-inf")).to(tl.float32) * inv_t
            tl.store(out_ptr + at, _gradient(x, ids == token, lse, g_token, slope, g_entropy, ENTROPY), at < length)
    else:
        blocks = length // BLOCK
        first = blocks * BLOCK
        if length == 0:  # nothing to read, zeros to write
            first = columns // BLOCK * BLOCK
            zeros = tl.zeros([BLOCK], tl.float32)
            for c in tl.range(0, first, BLOCK, num_stages=1):
                tl.store(out_ptr + c + lane, zeros)
        for c in tl.range(first, columns, BLOCK, num_stages=1):
            at = c + lane
            x = tl.load(row_ptr + at, mask=at < length, other=float("-inf")).to(tl.float32) * inv_t
            grad = _gradient(x, at == token, lse, g_token, slope, g_entropy, ENTROPY)
            tl.store(out_ptr + at, tl.where(at < length, grad, 0.0), mask=at < columns)
        for i in tl.range(0, blocks, num_stages=1):
            at = (blocks - 1 - i) * BLOCK + lane
            x = tl.load(row_ptr + at).to(tl.float32) * inv_t
            tl.store(out_ptr + at, _gradient(x, at == token, lse, g_token, slope, g_entropy, ENTROPY))


@jit
def kept_range(kept_offsets: tl.tensor, kept_ids: tl.tensor, row: tl.tensor, active: tl.tensor) -> tl.tensor:
    """(where a row's kept ids start, how many there are; 0 for a row that is not active)."""
    first = tl.load(kept_offsets + row)
    count = (tl.load(kept_offsets + row + 1) - first).to(tl.int32)
    return first, tl.where(active, count, 0)
