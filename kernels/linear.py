"""Token logprobs and policy loss from hidden states: hidden [N, H] x lm_head [V, H], without ever holding [N, V].

    logits = softcap tanh((hidden lm_head^T + bias) logit_scale / softcap), then exactly logprob.py and policy_loss.py

The rows that carry something are taken in chunks. One [chunk, V] float32 buffer is filled by a GEMM, turned into the
gradient of the logits (in place, or into a half-type buffer that the next GEMMs take), and consumed by two GEMMs:
dhidden (per chunk) and dlm_head (accumulated in float32); `head_gemm.py`.
`linear_policy_loss` forms gradients in the forward pass: 6NVH FLOP in all (2NVH without a gradient). With a
sequence-level ratio all logprobs come first and the logits are computed again: 8NVH.
`linear_token_logprobs` knows its upstream gradients only later and computes the logits again: 2NVH + 6NVH.

Source: chunking as in Liger's fused linear losses; a materialised chunk costs 6 bytes an element and recomputing it 2H
FLOP, so materialising wins from H = 551 on (H200).
"""

import math
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promoted_dtype, refuse_create_graph, require_tensors, resolve_backend
from rhotrain.kernels.linear_rows import LinearRows
from rhotrain.kernels.logprob import (
    SavedStats,
    TokenLogprobs,
)
from rhotrain.kernels.objective_triton import pack_objective
from rhotrain.kernels.policy_loss import PolicyLoss, check_inputs, fake_record, unpack_call, unpack_policy_loss
from rhotrain.kernels.policy_rows import PolicyCall, PolicyInputs
from rhotrain.kernels.rows import KeptSet, RowArguments, active_rows, check_rows
from rhotrain.kernels.spec import IGNORE_INDEX, Objective
from rhotrain.kernels.upstream import Upstream, waiting_dtype


def _no_autocast(tensor: Tensor) -> torch.autocast:
    """Autocast would round the float32 logits to bf16 behind our back."""
    return torch.autocast(tensor.device.type, enabled=False)


def _or_empty(value: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Operators return tensors only: an empty one stands for None."""
    return like.new_empty(0) if value is None else value.to(dtype or value.dtype)


# ---- operators ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rhotrain::linear_token_logprobs", mutates_args=())
def _token_op(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    inv_temperature: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    vocab: int,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float | None,
    chunk: int | None,
    triton: bool,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs, entropy (empty when not asked for), logsumexp."""
    rows = RowArguments(token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    call = LinearRows.of(hidden, lm_head, bias, rows, softcap, logit_scale, chunk, triton, loss=False)
    with _no_autocast(hidden):
        out = call.token_logprobs(active_rows(rows), entropy=entropy)
    return out.logprobs, _or_empty(out.entropy, out.logprobs), out.logsumexp


@_token_op.register_fake
def _(hidden: Tensor, lm_head: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = promoted_dtype(hidden, lm_head)
    sizes = (hidden.shape[0], hidden.shape[0] if rest[-1] else 0, hidden.shape[0])
    first, second, third = (hidden.new_empty(size, dtype=dtype) for size in sizes)
    return first, second, third


@torch.library.custom_op("rhotrain::linear_token_logprobs_backward", mutates_args=())
def _token_backward_op(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    inv_temperature: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    vocab: int,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float | None,
    chunk: int | None,
    triton: bool,
    entropy: Tensor,
    logsumexp: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
    g_logsumexp: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, lm_head and bias; those that are not needed are empty."""
    rows = RowArguments(token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    call = LinearRows.of(hidden, lm_head, bias, rows, softcap, logit_scale, chunk, triton, loss=False)
    stats = SavedStats(entropy, logsumexp)
    with _no_autocast(hidden):
        grads = call.token_gradients(active_rows(rows), stats, (g_logprobs, g_entropy, g_logsumexp), needs)
    bias_V = _or_empty(grads.bias_V, hidden, None if bias is None else bias.dtype)
    return _or_empty(grads.hidden_NH, hidden), _or_empty(grads.weight_VH, hidden, lm_head.dtype), bias_V


@_token_backward_op.register_fake
def _(hidden: Tensor, lm_head: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = [hidden.dtype, lm_head.dtype, hidden.dtype if bias is None else bias.dtype]
    return _fake_gradients((hidden, lm_head, bias), rest[-1], dtypes)


def _fake_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None], needs: list[bool], dtypes: list[torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty where nothing is needed, in hidden's dtype then."""
    like = inputs[0]
    hidden, weight, bias = (
        like.new_empty(x.shape, dtype=dtype) if need and x is not None else like.new_empty(0)
        for x, need, dtype in zip(inputs, needs, dtypes)
    )
    return hidden, weight, bias


def _token_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])  # not the logprobs, which the caller may change in place
    ctx.numbers, ctx.entropy = inputs[7:13], inputs[13]
    ctx.set_materialize_grads(False)


def _token_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_create_graph()
    saved = ctx.saved_tensors  # once: non-reentrant checkpointing gives each tensor out a single time
    inputs, outputs = saved[:7], saved[7:]
    g_logprobs, g_entropy, g_logsumexp = upstream
    needs = list(ctx.needs_input_grad[:3])
    grads = _token_backward_op(
        *inputs,
        *ctx.numbers,
        *outputs,
        g_logprobs,
        g_entropy if ctx.entropy else None,
        g_logsumexp,
        needs,
    )
    return *(g if need else None for g, need in zip(grads, needs)), *[None] * 11


_token_op.register_autograd(_token_backward, setup_context=_token_setup)


@torch.library.custom_op("rhotrain::linear_policy_loss", mutates_args=())
def _policy_op(
    hidden: Tensor,
    lm_head: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    inv_temperature: Tensor | None,
    kept_offsets: Tensor | None,
    kept_ids: Tensor | None,
    vocab: int,
    ignore_index: int,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None,
    importance: Tensor | None,
    sequence_ids: Tensor | None,
    kind: str,
    ratio_level: str,
    kl: str,
    numbers: list[float],
    triton: bool,
    softcap: float | None,
    logit_scale: float | None,
    chunk: int | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, values [5, N], flags [2, N], and the gradients of hidden, lm_head and bias (empty where not needed)."""
    rows = (token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    inputs = (old_logprobs, advantages, weights, ref_logprobs, importance, sequence_ids)
    call = unpack_call(*rows, *inputs, kind, ratio_level, kl, numbers, triton)
    linear = LinearRows.of(hidden, lm_head, bias, call.rows, softcap, logit_scale, chunk, triton, loss=True)
    with _no_autocast(hidden):
        record, grads = linear.policy(call, needs)
    dhidden, dweight, dbias = (_or_empty(g, hidden) for g in (grads.hidden_NH, grads.weight_VH, grads.bias_V))
    return record.values_5N[0].sum(), record.values_5N, record.flags_2N, dhidden, dweight, dbias


@_policy_op.register_fake
def _(hidden: Tensor, lm_head: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dtype = promoted_dtype(hidden, lm_head)
    record = fake_record(hidden, dtype)
    dtypes = [waiting_dtype(hidden.dtype), dtype, dtype]
    return *record, *_fake_gradients((hidden, lm_head, bias), rest[-1], dtypes)


def _policy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*(g.detach() for g in output[3:]))  # detached: see policy_loss.py
    ctx.upstream = Upstream()
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.needs = inputs[-1]
    ctx.set_materialize_grads(False)


def _policy_backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 24
    formed = [(i, g) for i, (g, need) in enumerate(zip(ctx.saved_tensors, ctx.needs)) if need]
    scaled = ctx.upstream.times([g for _, g in formed], upstream, [ctx.dtypes[i] for i, _ in formed])
    grads: list[Tensor | None] = [None] * 24
    for (i, _), g in zip(formed, scaled):
        grads[i] = g
    return tuple(grads)


_policy_op.register_autograd(_policy_backward, setup_context=_policy_setup)


# ---- public ---------------------------------------------------------------------------------------------------------


def _check(
    hidden_NH: Tensor,
    lm_head_VH: Tensor,
    token_ids_N: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    chunk: int | None,
) -> None:
    """ValueError for what concerns the head."""
    require_tensors(hidden=hidden_NH, lm_head=lm_head_VH, token_ids=token_ids_N)
    if bias is not None:
        require_tensors(bias=bias)
    if hidden_NH.dim() != 2 or lm_head_VH.dim() != 2 or not 0 < hidden_NH.shape[1] == lm_head_VH.shape[1]:
        raise ValueError(
            f"hidden, lm_head: need [N, H] and [V, H], H > 0, got {list(hidden_NH.shape)} and {list(lm_head_VH.shape)}"
        )
    if not (hidden_NH.is_floating_point() and lm_head_VH.is_floating_point()):
        raise ValueError(f"hidden, lm_head: need floating point, got {hidden_NH.dtype} and {lm_head_VH.dtype}")
    if token_ids_N.shape[:1] != hidden_NH.shape[:1]:
        raise ValueError(f"token_ids: shape {list(token_ids_N.shape)} does not fit {hidden_NH.shape[0]} hidden rows")
    if bias is not None and (bias.shape != lm_head_VH.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"bias: need floating point of shape [{lm_head_VH.shape[0]}], got {bias.dtype} {list(bias.shape)}"
        )
    if bias is not None and bias.device != lm_head_VH.device:
        raise ValueError(f"bias: on {bias.device}, but lm_head is on {lm_head_VH.device}; move one of them")
    if len({hidden_NH.device, lm_head_VH.device, token_ids_N.device}) != 1:
        raise ValueError(
            f"hidden, lm_head, token_ids: on {hidden_NH.device}, {lm_head_VH.device} and {token_ids_N.device}; "
            "move them to one device"
        )
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap: {softcap} must be > 0 and finite; None means no cap")
    if logit_scale is not None and not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale: {logit_scale} must be finite; None means 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: {chunk} must be at least 1 row; None picks one")


def _triton_backend(backend: Backend, hidden_NH: Tensor, lm_head_VH: Tensor) -> bool:
    return resolve_backend(backend, lm_head_VH if lm_head_VH.dtype == torch.float64 else hidden_NH) == "triton"


def linear_token_logprobs(
    hidden_NH: Tensor,
    lm_head_VH: Tensor,
    token_ids_N: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = False,
    kept: KeptSet | None = None,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> TokenLogprobs:
    """`token_logprobs` of the head's logits; peak extra memory is one chunk (two with a softcap).

    hidden [N, H], lm_head [V, H], bias [V]: bf16, fp16, float32 or float64; the other arguments as in
    `token_logprobs`.
    chunk: rows of logits held at a time, by default 64 MiB of float32. Differentiable in hidden, lm_head and bias;
    only what requires grad is computed. Rows with `ignore_index` are dropped before the GEMM. ValueError as in
    `token_logprobs`.
    """
    _check(hidden_NH, lm_head_VH, token_ids_N, bias, softcap, logit_scale, chunk)
    triton = _triton_backend(backend, hidden_NH, lm_head_VH)
    rows = check_rows(
        token_ids_N,
        columns=lm_head_VH.shape[0],
        dtype=promoted_dtype(hidden_NH, lm_head_VH),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
    )
    numbers = (softcap, logit_scale, chunk, triton, entropy)
    logprobs, entropies, logsumexp = _token_op(hidden_NH, lm_head_VH, bias, *rows.flat, *numbers)
    return TokenLogprobs(logprobs, entropies if entropy else None, logsumexp)


def linear_policy_loss(
    hidden_NH: Tensor,
    lm_head_VH: Tensor,
    token_ids_N: Tensor,
    inputs: PolicyInputs,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    kept: KeptSet | None = None,
    chunk: int | None = None,
    backend: Backend = "auto",
) -> PolicyLoss:
    """`policy_loss` of the head's logits, gradients for hidden, lm_head and bias formed during this call.

    Peak extra memory: one chunk (two with a softcap), the gradient of hidden and, unless the head is frozen, one
    float32 [V, H]. Rows with `ignore_index` or
    weight 0 are dropped before the GEMM. A head that is tied to the embedding needs nothing special: autograd adds
    both gradients of the parameter.
    A second backward needs retain_graph=True. ValueError as in `policy_loss`.
    """
    _check(hidden_NH, lm_head_VH, token_ids_N, bias, softcap, logit_scale, chunk)
    check_inputs(inputs, token_ids_N)
    triton = _triton_backend(backend, hidden_NH, lm_head_VH)
    rows = check_rows(
        token_ids_N,
        columns=lm_head_VH.shape[0],
        dtype=promoted_dtype(hidden_NH, lm_head_VH),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
    )
    PolicyCall(rows, inputs, objective, triton).check()
    on = torch.is_grad_enabled()
    needs = [on and x is not None and x.requires_grad for x in (hidden_NH, lm_head_VH, bias)]
    arguments = (*rows.flat, *inputs.named().values(), *pack_objective(objective), triton)
    loss, values, flags, *_ = _policy_op(hidden_NH, lm_head_VH, bias, *arguments, softcap, logit_scale, chunk, needs)
    return unpack_policy_loss(loss, values, flags)
