"""Logprob, entropy and logsumexp of one token per row of logits, forward and backward.

    x_j     = logits_j * (1 / temperature)            over the real vocabulary (or over the row's kept set), float32
    lse     = log sum_j exp(x_j)                      logprob = x_t - lse          entropy = -sum_j p_j log p_j
    dx_j    = g_lp (1[j = t] - p_j) + g_lse p_j - g_H p_j (log p_j + entropy)       dlogits_j = dx_j / temperature

Shapes: logits [N, V] in bf16, fp16, float32 or float64 with any row stride, token_ids [N], everything per row [N].
Numerics: the maths runs in float32 (float64 stays float64). The row maximum is subtracted first, and the entropy is
formed as log s - sum e (x - max) / s with s = sum e and e = exp(x - max), so that nothing large cancels. Logits of
-inf have p = 0 and add exactly 0. A row without a finite logit is NaN, as in `torch.log_softmax`.
Rows that carry nothing (`ignore_index`) are never read: NaN or inf there reaches no output and no gradient.

Source: softmax cross entropy; gradients as in shared kernels of Liger and TRL (`trl_losses/logprob_entropy.py`), with
the logsumexp term added. The in-place pair `row_stats_` / `logit_grads_` is also the core of `policy_loss.py` and
`linear.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promoted_dtype, refuse_create_graph, resolve_backend
from rhotrain.kernels.rows import ActiveRows, KeptSet, active_rows, gather_logits, row_blocks
from rhotrain.kernels.spec import IGNORE_INDEX

LOG_ZERO = -1e4
"""Stands in for a log-probability of -inf where it is multiplied by p = 0: exp of it is 0 in float32 and float64
alike."""


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Per row, float32 or wider, [N]: log p(token), entropy of p (None when not asked for), logsumexp of logits /
    T."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


# ---- reference: the two in-place passes -----------------------------------------------------------------------------


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
        _check_kept(mask.gather(1, ids_C1), rows)
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


def _check_kept(found_C1: Tensor, rows: ActiveRows) -> None:
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
    """The buffer that `row_stats_` left in, dlogits out (in place); upstream gradients per row.

    p_t - 1 is formed in float32 before any rounding to a narrower type (Liger #1329: wrong by 100 % at p = 0.999).
    """
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


def token_rows_(x_MV: Tensor, rows: ActiveRows, out: TokenLogprobs) -> None:
    """Write the M rows' results into `out` [N]; `x_MV` is overwritten."""
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part = rows.rows(start, stop)
        stats = row_stats_(x_MV[start:stop], part, entropy=out.entropy is not None)
        out.logprobs.index_copy_(0, part.index, stats.logprobs)
        out.logsumexp.index_copy_(0, part.index, stats.logsumexp)
        if out.entropy is not None and stats.entropy is not None:
            out.entropy.index_copy_(0, part.index, stats.entropy)


def token_grads_(x_MV: Tensor, rows: ActiveRows, upstream: tuple[Tensor | None, Tensor | None, Tensor | None]) -> None:
    """Logits in, dlogits out (in place), for the upstream gradients [N] of (logprobs, entropy, logsumexp)."""
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part, x = rows.rows(start, stop), x_MV[start:stop]
        dlogprobs, dentropy, dlogsumexp = (None if g is None else g[part.index].to(x.dtype) for g in upstream)
        stats = row_stats_(x, part, entropy=dentropy is not None)
        if dlogprobs is None:
            dlogprobs = torch.zeros_like(stats.logprobs)
        logit_grads_(x, stats, part, dlogprobs, dentropy, dlogsumexp)


def empty_token_logprobs(count: int, dtype: torch.dtype, device: torch.device, entropy: bool) -> TokenLogprobs:
    """All zeros: what rows without loss have."""
    zeros = [torch.zeros(count, dtype=dtype, device=device) for _ in range(3 if entropy else 2)]
    return TokenLogprobs(zeros[0], zeros[2] if entropy else None, zeros[1])


# ---- autograd -------------------------------------------------------------------------------------------------------


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits as they are and forms exp again in the backward pass: no [N, V] tensor but the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, rows: ActiveRows, entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = promoted_dtype(logits_NV)
        out = empty_token_logprobs(logits_NV.shape[0], dtype, logits_NV.device, entropy)
        for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
            part = rows.rows(start, stop)
            token_rows_(gather_logits(logits_NV, part, dtype), part, out)
        ctx.save_for_backward(logits_NV)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return out.logprobs, out.entropy, out.logsumexp

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None]:
        refuse_create_graph()
        (logits_NV,) = ctx.saved_tensors
        rows: ActiveRows = ctx.rows
        dlogits_NV = torch.zeros(logits_NV.shape, dtype=logits_NV.dtype, device=logits_NV.device)
        for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
            part = rows.rows(start, stop)
            x = gather_logits(logits_NV, part, promoted_dtype(logits_NV))
            token_grads_(x, part, (upstream[0], upstream[1], upstream[2]))
            dlogits_NV[:, : rows.vocab].index_copy_(0, part.index, x.to(logits_NV.dtype))
        return dlogits_NV, None, None


def check_logits(logits_NV: Tensor, token_ids_N: Tensor) -> None:
    """ValueError unless logits are floating point [N, V] with one row per token id."""
    if logits_NV.dim() != 2 or not logits_NV.is_floating_point():
        raise ValueError(f"logits: need floating point of shape [N, V], got {logits_NV.dtype} {list(logits_NV.shape)}")
    if token_ids_N.shape[:1] != logits_NV.shape[:1]:
        raise ValueError(
            f"token_ids: shape {list(token_ids_N.shape)} does not fit logits of shape {list(logits_NV.shape)}"
        )
    if token_ids_N.device != logits_NV.device:
        raise ValueError(f"token_ids: on {token_ids_N.device}, but logits are on {logits_NV.device}; move one of them")


def token_logprobs(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = False,
    kept: KeptSet | None = None,
    backend: Backend = "auto",
) -> TokenLogprobs:
    """log_softmax(logits / temperature) at token_ids, with logsumexp and (if asked) entropy; all three
    differentiable.

    logits [N, V]; token_ids int64 [N]; temperature a number or [N], > 0; ids at or above `vocab_size` are padding and
    have probability 0; `kept` restricts each row's softmax to its set, which must hold the token.
    Rows whose id is `ignore_index` are exactly 0 in all outputs and get a gradient of exactly 0, whatever their
    logits are.
    Results are float32 (float64 for float64 logits); the gradient has the logits' dtype. A second backward needs
    retain_graph=True; differentiating twice (create_graph=True) is refused.
    ValueError: wrong shape, dtype or device, an id outside the real vocabulary, a token outside its kept set.
    """
    check_logits(logits_NV, token_ids_N)
    resolve_backend(backend, logits_NV)
    rows = active_rows(
        token_ids_N,
        vocab=logits_NV.shape[1],
        dtype=promoted_dtype(logits_NV),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
    )
    return TokenLogprobs(*_TokenLogprobs.apply(logits_NV, rows, entropy))
