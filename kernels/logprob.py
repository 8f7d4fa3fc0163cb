"""Logprob, entropy and logsumexp of one token per row of logits, forward and backward.

    x_j     = logits_j * (1 / temperature)            over the real vocabulary (or over the row's kept set), float32
    lse     = log sum_j exp(x_j)                      logprob = x_t - lse          entropy = -sum_j p_j log p_j
    dx_j    = g_lp (1[j = t] - p_j) + g_lse p_j - g_H p_j (log p_j + entropy)       dlogits_j = dx_j / temperature

Shapes: logits [N, V] in bf16, fp16, float32 or float64 with any row stride, token_ids [N], everything per row [N].
Numerics (`passes.py`): the maths runs in float32 (float64 stays float64, in the reference). Logits of -inf have p = 0
and add exactly 0. A row without a finite logit is NaN, as in `torch.log_softmax`. Rows that carry nothing
(`ignore_index`) are never read: NaN or inf there reaches no output and no gradient.

Bytes: the forward pass reads the logits once, the backward pass reads them again and writes the gradient; entropy
costs none. With kept sets only the sets are read.

Source: softmax cross entropy; fused logprob and entropy as in TRL (`trl_losses/logprob_entropy.py`), with the
logsumexp term, ragged kept sets and any row stride added.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import (
    Backend,
    Launch,
    promoted_dtype,
    refuse_create_graph,
    require_tensors,
    resolve_backend,
    tl,
)
from rhotrain.kernels.passes import (
    BAD_ID,
    BAD_KEPT,
    kept_range,
    load_token,
    logit_grads_,
    row_gradient,
    row_statistics,
    row_stats_,
)
from rhotrain.kernels.row_launch import RowLaunch, row_jit, unit_columns
from rhotrain.kernels.rows import (
    ActiveRows,
    KeptSet,
    RowArguments,
    active_rows,
    check_rows,
    gather_logits,
    row_blocks,
)
from rhotrain.kernels.spec import IGNORE_INDEX

FORWARD = Launch(block=4096, num_warps=4, num_stages=2)
"""56 registers a thread (sm_90, Triton 3.9): nine programs share a multiprocessor; 96, so five, in 3.6. Twice the
threads would double the cost of the three reductions per block, which bound a bf16 row with entropy. The fused loss
(`policy_rows.FUSED`) has the same block and threads: one row, the same bits from either."""
BACKWARD = Launch(block=1024, num_warps=4)
KEPT = Launch(block=1024, num_warps=4, num_stages=1)
"""Both, over kept sets: these are short, and pipelined gathers of 4096 ids would take 255 registers."""


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Per row, float32 or wider, [N]: log p(token), entropy of p (None when not asked for), logsumexp of logits /
    T."""

    logprobs: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


# ---- reference ------------------------------------------------------------------------------------------------------


def token_rows_(x_MV: Tensor, rows: ActiveRows, out: TokenLogprobs) -> None:
    """Write the M rows' results into `out` [N]; `x_MV` is overwritten."""
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part = rows.rows(start, stop)
        stats = row_stats_(x_MV[start:stop], part, entropy=out.entropy is not None)
        out.logprobs.index_copy_(0, part.index, stats.logprobs)
        out.logsumexp.index_copy_(0, part.index, stats.logsumexp)
        if out.entropy is not None and stats.entropy is not None:
            out.entropy.index_copy_(0, part.index, stats.entropy)


def token_grads_(x_MV: Tensor, rows: ActiveRows, upstream: "Upstream") -> None:
    """Logits in, dlogits out (in place), for the upstream gradients [N] of (logprobs, entropy, logsumexp)."""
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part, x = rows.rows(start, stop), x_MV[start:stop]
        dlogprobs, dentropy, dlogsumexp = (None if g is None else g[part.index].to(x.dtype) for g in upstream)
        stats = row_stats_(x, part, entropy=dentropy is not None)
        if dlogprobs is None:
            dlogprobs = torch.zeros_like(stats.logprobs)
        logit_grads_(x, stats, part, dlogprobs, dentropy, dlogsumexp)


@dataclass(frozen=True, eq=False)
class SavedStats:
    """What the Triton backward pass needs of the forward pass, [N]. The reference computes both again."""

    entropy: Tensor | None
    logsumexp: Tensor


Upstream = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of (logprobs, entropy, logsumexp), [N] each or None."""


def empty_token_logprobs(count: int, dtype: torch.dtype, device: torch.device, entropy: bool) -> TokenLogprobs:
    """All zeros: what rows without loss have."""
    zeros = [torch.zeros(count, dtype=dtype, device=device) for _ in range(3 if entropy else 2)]
    return TokenLogprobs(zeros[0], zeros[2] if entropy else None, zeros[1])


def _reference(logits_NV: Tensor, arguments: RowArguments, entropy: bool) -> TokenLogprobs:
    dtype, rows = promoted_dtype(logits_NV), active_rows(arguments)
    out = empty_token_logprobs(logits_NV.shape[0], dtype, logits_NV.device, entropy)
    for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
        part = rows.rows(start, stop)
        token_rows_(gather_logits(logits_NV, part, dtype), part, out)
    return out


def _reference_grad(logits_NV: Tensor, out_NV: Tensor, arguments: RowArguments, upstream: Upstream) -> None:
    dtype, rows = promoted_dtype(logits_NV), active_rows(arguments)
    for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
        part = rows.rows(start, stop)
        x = gather_logits(logits_NV, part, dtype)
        token_grads_(x, part, upstream)
        out_NV[:, : rows.vocab].index_copy_(0, part.index, x.to(out_NV.dtype))
    zero_the_rest_(out_NV, rows)


def zero_the_rest_(dlogits_NV: Tensor, rows: ActiveRows) -> None:
    """In place: rows without loss and padded ids have gradient exactly 0."""
    dlogits_NV[:, rows.vocab :] = 0
    idle = torch.ones(dlogits_NV.shape[0], dtype=torch.bool, device=dlogits_NV.device)
    idle[rows.index] = False
    dlogits_NV.index_fill_(0, idle.nonzero().squeeze(1), 0)


# ---- Triton ---------------------------------------------------------------------------------------------------------


@row_jit
def forward_kernel(
    token_ids: tl.tensor,
    inv_temperature: tl.tensor,
    inv_t_stride: tl.tensor,
    kept_offsets: tl.tensor,
    kept_ids: tl.tensor,
    vocab: tl.tensor,
    ignore_index: tl.tensor,
    status: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    logprobs: tl.tensor,
    entropies: tl.tensor,
    logsumexps: tl.tensor,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: float32 logprob, entropy (with ENTROPY) and logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    token, active, bad = load_token(token_ids, row, vocab, ignore_index)
    length = tl.where(active, vocab, 0)
    if KEPT:
        first, length = kept_range(kept_offsets, kept_ids, row, active)
        kept_ids += first
    inv_t = tl.load(inv_temperature + row * inv_t_stride)
    logprob, entropy, logsumexp, bad_kept = row_statistics(
        logits + row * row_stride, kept_ids, length, vocab, token, inv_t, ENTROPY, KEPT, BLOCK, STAGES
    )
    if bad:
        tl.atomic_or(status, BAD_ID)
    if KEPT:
        if active & bad_kept:
            tl.atomic_or(status, BAD_KEPT)
        active = active & (bad_kept == 0)
    tl.store(logprobs + row, tl.where(active, logprob, 0.0))
    tl.store(logsumexps + row, tl.where(active, logsumexp, 0.0))
    if ENTROPY:
        tl.store(entropies + row, tl.where(active, entropy, 0.0))


@row_jit
def backward_kernel(
    token_ids: tl.tensor,
    inv_temperature: tl.tensor,
    inv_t_stride: tl.tensor,
    kept_offsets: tl.tensor,
    kept_ids: tl.tensor,
    vocab: tl.tensor,
    ignore_index: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    logsumexps: tl.tensor,
    entropies: tl.tensor,
    g_logprobs: tl.tensor,
    g_entropies: tl.tensor,
    g_logsumexps: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: dlogits, zeros where there is no loss; with KEPT the sets' gradients one after the other."""
    row = tl.program_id(0).to(tl.int64)
    token, active, _bad = load_token(token_ids, row, vocab, ignore_index)
    length = tl.where(active, vocab, 0)
    out += row * out_stride
    if KEPT:
        first, length = kept_range(kept_offsets, kept_ids, row, active)
        kept_ids += first
        out += first
    entropy = 0.0
    g_entropy = 0.0
    if ENTROPY:
        entropy = tl.load(entropies + row)
        g_entropy = tl.load(g_entropies + row)
    row_gradient(
        logits + row * row_stride,
        out,
        kept_ids,
        length,
        columns,
        token,
        tl.load(inv_temperature + row * inv_t_stride),
        tl.load(logsumexps + row),
        entropy,
        tl.load(g_logprobs + row),
        tl.load(g_logsumexps + row),
        g_entropy,
        ENTROPY,
        KEPT,
        BLOCK,
    )


def _triton(logits_NV: Tensor, arguments: RowArguments, entropy: bool) -> TokenLogprobs:
    logits, launch = unit_columns(logits_NV), RowLaunch(arguments)
    count = logits.shape[0]
    rows = [torch.empty(count, device=logits.device) for _ in range(3 if entropy else 2)]
    out = TokenLogprobs(rows[0], rows[2] if entropy else None, rows[1])
    (FORWARD if launch.kept is None else KEPT)(
        forward_kernel,
        (count,),
        logits.device,
        *launch.args,
        launch.status,
        logits,
        logits.stride(0),
        out.logprobs,
        out.entropy,
        out.logsumexp,
        ENTROPY=entropy,
        KEPT=launch.kept is not None,
    )
    launch.check()
    return out


def _triton_grad(
    logits_NV: Tensor, out_NV: Tensor, arguments: RowArguments, stats: "SavedStats", upstream: Upstream
) -> None:
    logits, launch = unit_columns(logits_NV), RowLaunch(arguments)
    flat = launch.kept_gradients()
    zeros = torch.zeros_like(stats.logsumexp)
    g_logprobs, g_entropies, g_logsumexps = (None if g is None else g.float().contiguous() for g in upstream)
    (BACKWARD if flat is None else KEPT)(
        backward_kernel,
        (logits.shape[0],),
        logits.device,
        *launch.args,
        logits,
        logits.stride(0),
        stats.logsumexp,
        None if g_entropies is None else stats.entropy,
        zeros if g_logprobs is None else g_logprobs,
        g_entropies,
        zeros if g_logsumexps is None else g_logsumexps,
        out_NV if flat is None else flat,
        out_NV.stride(0) if flat is None else 0,
        out_NV.shape[1],
        ENTROPY=g_entropies is not None,
        KEPT=flat is not None,
    )
    launch.scatter(flat, out_NV)


def forward_rows(logits_NV: Tensor, arguments: RowArguments, *, entropy: bool, triton: bool) -> TokenLogprobs:
    """The forward pass without autograd."""
    return (_triton if triton else _reference)(logits_NV, arguments, entropy)


def backward_rows(
    logits_NV: Tensor,
    out_NV: Tensor,
    arguments: RowArguments,
    stats: SavedStats,
    upstream: Upstream,
    *,
    triton: bool,
) -> None:
    """dlogits into `out_NV` (all of it), which may be `logits_NV` itself; stats: from `forward_rows`."""
    if not triton:
        _reference_grad(logits_NV, out_NV, arguments, upstream)
    elif unit_columns(out_NV) is out_NV:
        _triton_grad(logits_NV, out_NV, arguments, stats, upstream)
    else:
        dense_NV = torch.empty(out_NV.shape, dtype=out_NV.dtype, device=out_NV.device)
        _triton_grad(logits_NV, dense_NV, arguments, stats, upstream)
        out_NV.copy_(dense_NV)


# ---- operators ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rhotrain::token_logprobs", mutates_args=())
def _op(
    logits: Tensor,
    token_ids: Tensor,
    inv_temperature: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    vocab: int,
    ignore_index: int,
    entropy: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, entropy (empty when not asked for), logsumexp."""
    arguments = RowArguments(token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    out = forward_rows(logits, arguments, entropy=entropy, triton=triton)
    return out.logprobs, out.logprobs.new_empty(0) if out.entropy is None else out.entropy, out.logsumexp


@_op.register_fake
def _(logits: Tensor, token_ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    entropy = rest[5]
    rows = [logits.new_empty(logits.shape[0], dtype=promoted_dtype(logits)) for _ in range(3)]
    return rows[0], rows[1] if entropy else rows[1].new_empty(0), rows[2]


@torch.library.custom_op("rhotrain::token_logprobs_backward", mutates_args=())
def _backward_op(
    logits: Tensor,
    token_ids: Tensor,
    inv_temperature: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    vocab: int,
    ignore_index: int,
    entropy: Tensor,
    logsumexp: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
    g_logsumexp: Tensor | None,
    triton: bool,
) -> Tensor:
    arguments = RowArguments(token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    upstream = (g_logprobs, g_entropy, g_logsumexp)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    backward_rows(logits, dlogits, arguments, SavedStats(entropy, logsumexp), upstream, triton=triton)
    return dlogits


@_backward_op.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, vocab, ignore_index, entropy, triton = inputs
    ctx.save_for_backward(*tensors, *output[1:])  # not the logprobs, which the caller may change in place
    ctx.numbers = (vocab, ignore_index)
    ctx.entropy, ctx.triton = entropy, triton
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_create_graph()
    saved = ctx.saved_tensors  # once: non-reentrant checkpointing gives each tensor out a single time
    tensors, outputs = saved[:5], saved[5:]
    g_logprobs, g_entropy, g_logsumexp = upstream
    g_entropy = g_entropy if ctx.entropy else None
    dlogits = _backward_op(*tensors, *ctx.numbers, *outputs, g_logprobs, g_entropy, g_logsumexp, ctx.triton)
    return dlogits, *[None] * 8


_op.register_autograd(_backward, setup_context=_setup_context)


def check_logits(logits_NV: Tensor, token_ids_N: Tensor) -> None:
    """ValueError unless logits are floating point [N, V] with one row per token id."""
    require_tensors(logits=logits_NV, token_ids=token_ids_N)
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
    retain_graph=True; differentiating twice (create_graph=True) is refused. Works inside
    torch.compile(fullgraph=True).
    ValueError: wrong shape, dtype or device, an id outside the real vocabulary, a token outside its kept set; the
    last two are asynchronous asserts on CUDA, where the row counts as ignored.
    """
    check_logits(logits_NV, token_ids_N)
    triton = resolve_backend(backend, logits_NV) == "triton"
    rows = check_rows(
        token_ids_N,
        columns=logits_NV.shape[1],
        dtype=promoted_dtype(logits_NV),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
    )
    logprobs, entropies, logsumexp = _op(logits_NV, *rows.flat, entropy, triton)
    return TokenLogprobs(logprobs, entropies if entropy else None, logsumexp)
