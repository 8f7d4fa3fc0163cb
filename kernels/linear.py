"""Token logprobs and policy loss from hidden states: hidden [N, H] x lm_head [V, H], without ever holding [N, V].

    logits = softcap tanh((hidden lm_head^T + bias) logit_scale / softcap), then exactly logprob.py and policy_loss.py

The rows that carry something are taken in chunks. One [chunk, V] float32 buffer is filled by a GEMM, turned into the
gradient of the logits in place, and consumed by two GEMMs: dhidden (per chunk) and dlm_head (accumulated in float32).
`linear_policy_loss` forms gradients in the forward pass: 6NVH FLOP in all (2NVH without a gradient).
`linear_token_logprobs` knows its upstream gradients only later and computes the logits again: 2NVH + 6NVH.

Numerics: logits come out of the GEMM in float32 (bf16 logits near 20 carry +-0.06): float32 inputs as they are; bf16
and fp16 on CUDA through `torch.mm(out_dtype=float32)`, on a CPU by casting the weight one tile at a time. float64
stays. On CUDA the gradient of the logits is rounded to the half type for its two GEMMs, products are accumulated in
float32.

Source: chunking as in Liger's fused linear losses; float32 weight accumulation: Liger #512, axolotl #1601.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promoted_dtype, refuse_create_graph, resolve_backend
from rhotrain.kernels.logprob import TokenLogprobs, empty_token_logprobs, token_grads_, token_rows_
from rhotrain.kernels.policy_loss import (
    PolicyInputs,
    PolicyLoss,
    PolicyRecord,
    check_inputs,
    policy_rows_,
    scaled,
    unpack_policy_loss,
)
from rhotrain.kernels.rows import ActiveRows, KeptSet, active_rows
from rhotrain.kernels.spec import IGNORE_INDEX, Objective

CHUNK_ELEMENTS = 2**24
"""Default size of the logits buffer, 64 MiB in float32: larger chunks gain little in the GEMMs, smaller ones lose."""
WEIGHT_TILE_ELEMENTS = 2**22
"""Elements of the weight that are cast at a time where the GEMM cannot take half types and return float32."""


# ---- reference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Head:
    """The real vocabulary's part of the head, and how its output becomes logits in `dtype`."""

    weight_VH: Tensor
    bias_V: Tensor | None
    softcap: float | None
    logit_scale: float | None
    dtype: torch.dtype

    def half_on_cuda(self, hidden: Tensor) -> bool:
        """True where a GEMM takes the half types as they are and accumulates in float32."""
        weight = self.weight_VH
        return weight.is_cuda and weight.dtype == hidden.dtype and weight.dtype in (torch.bfloat16, torch.float16)

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, rows start..stop of the weight in `dtype`): one tile where nothing has to be cast."""
        vocab, hidden = self.weight_VH.shape
        step = vocab if self.weight_VH.dtype == self.dtype else max(1, WEIGHT_TILE_ELEMENTS // hidden)
        for start in range(0, vocab, step):
            yield start, min(start + step, vocab), self.weight_VH[start : start + step].to(self.dtype)

    def logits_into(self, hidden_CH: Tensor, out_CV: Tensor) -> Tensor | None:
        """Fill `out_CV` with logits; returns tanh of the softcap, which the gradient needs, or None without one."""
        if self.half_on_cuda(hidden_CH):
            out_CV.copy_(torch.mm(hidden_CH, self.weight_VH.t(), out_dtype=torch.float32))
        else:
            hidden = hidden_CH.to(self.dtype)
            for start, stop, weight in self.tiles():
                torch.mm(hidden, weight.t(), out=out_CV[:, start:stop])
        if self.bias_V is not None:
            out_CV.add_(self.bias_V)
        if self.logit_scale is not None:
            out_CV.mul_(self.logit_scale)
        if self.softcap is None:
            return None
        tanh_CV = out_CV.div_(self.softcap).tanh_().clone()
        out_CV.mul_(self.softcap)
        return tanh_CV

    def through_transform_(self, dlogits_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """Gradient of the logits in, gradient of the GEMM's output out, in place."""
        if tanh_CV is not None:
            dlogits_CV.mul_(tanh_CV.square_().neg_().add_(1.0))
        if self.logit_scale is not None:
            dlogits_CV.mul_(self.logit_scale)


class _Gradients:
    """Accumulates the gradients of one call, chunk by chunk; what is not needed stays None."""

    def __init__(self, hidden_NH: Tensor, lm_head_VH: Tensor, head: _Head, needs: tuple[bool, bool, bool]) -> None:
        def zeros(shape: torch.Size | tuple[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=hidden_NH.device)

        self.head = head
        self.hidden_NH = zeros(hidden_NH.shape, hidden_NH.dtype) if needs[0] else None
        self.weight_VH = zeros(lm_head_VH.shape, head.dtype) if needs[1] else None
        self.bias_V = zeros((lm_head_VH.shape[0],), head.dtype) if needs[2] else None

    def add(self, rows: ActiveRows, hidden_CH: Tensor, dlogits_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """One chunk: `dlogits_CV` is the gradient of the logits and is overwritten."""
        head, vocab = self.head, rows.vocab
        head.through_transform_(dlogits_CV, tanh_CV)
        if self.bias_V is not None:
            self.bias_V[:vocab] += dlogits_CV.sum(0)
        half = head.half_on_cuda(hidden_CH)
        grad = dlogits_CV.to(hidden_CH.dtype) if half else dlogits_CV
        if self.hidden_NH is not None:
            if half:
                dhidden = torch.mm(grad, head.weight_VH)
            else:
                dhidden = torch.zeros(hidden_CH.shape, dtype=head.dtype, device=grad.device)
                for start, stop, weight in head.tiles():
                    dhidden.addmm_(grad[:, start:stop], weight)
            self.hidden_NH.index_copy_(0, rows.index, dhidden.to(self.hidden_NH.dtype))
        if self.weight_VH is not None and half:
            self.weight_VH[:vocab] += torch.mm(grad.t(), hidden_CH, out_dtype=torch.float32)
        elif self.weight_VH is not None:
            self.weight_VH[:vocab].addmm_(grad.t(), hidden_CH.to(head.dtype))


def _chunks(
    hidden_NH: Tensor, head: _Head, rows: ActiveRows, chunk: int | None
) -> Iterator[tuple[ActiveRows, Tensor, Tensor, Tensor | None]]:
    """(rows, their hidden, their logits in a buffer that the next chunk reuses, tanh of the softcap), evenly
    sized."""
    total = len(rows)
    if total == 0:
        return
    limit = max(16, CHUNK_ELEMENTS // rows.vocab) if chunk is None else chunk
    size = -(-total // -(-total // limit))
    buffer = torch.empty(size, rows.vocab, dtype=head.dtype, device=hidden_NH.device)
    for start in range(0, total, size):
        part = rows.rows(start, min(start + size, total))
        hidden_CH = hidden_NH.index_select(0, part.index)
        logits_CV = buffer[: len(part)]
        yield part, hidden_CH, logits_CV, head.logits_into(hidden_CH, logits_CV)


# ---- autograd -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """What a call has besides the tensors that get gradients; needs: which of (hidden, lm_head, bias) want one."""

    rows: ActiveRows
    softcap: float | None
    logit_scale: float | None
    chunk: int | None
    needs: tuple[bool, bool, bool]

    def head(self, hidden_NH: Tensor, lm_head_VH: Tensor, bias_V: Tensor | None) -> _Head:
        vocab = self.rows.vocab
        bias = None if bias_V is None else bias_V[:vocab]
        return _Head(lm_head_VH[:vocab], bias, self.softcap, self.logit_scale, promoted_dtype(hidden_NH, lm_head_VH))


def _no_autocast(tensor: Tensor) -> torch.autocast:
    """Autocast would round the float32 logits to bf16 behind our back."""
    return torch.autocast(tensor.device.type, enabled=False)


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, lm_head_VH: Tensor, bias_V: Tensor | None, call: _Call, entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        head = call.head(hidden_NH, lm_head_VH, bias_V)
        out = empty_token_logprobs(hidden_NH.shape[0], head.dtype, hidden_NH.device, entropy)
        with _no_autocast(hidden_NH):
            for rows, _, logits_CV, _ in _chunks(hidden_NH, head, call.rows, call.chunk):
                token_rows_(logits_CV, rows, out)
        ctx.save_for_backward(hidden_NH, lm_head_VH, bias_V)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out.logprobs, out.entropy, out.logsumexp

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_create_graph()
        hidden_NH, lm_head_VH, bias_V = ctx.saved_tensors
        call: _Call = ctx.call
        head = call.head(hidden_NH, lm_head_VH, bias_V)
        grads = _Gradients(hidden_NH, lm_head_VH, head, call.needs)
        with _no_autocast(hidden_NH):
            for rows, hidden_CH, x_CV, tanh_CV in _chunks(hidden_NH, head, call.rows, call.chunk):
                token_grads_(x_CV, rows, (upstream[0], upstream[1], upstream[2]))
                grads.add(rows, hidden_CH, x_CV, tanh_CV)
        weight = None if grads.weight_VH is None else grads.weight_VH.to(lm_head_VH.dtype)
        bias = None if grads.bias_V is None or bias_V is None else grads.bias_V.to(bias_V.dtype)
        return grads.hidden_NH, weight, bias, None, None


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        lm_head_VH: Tensor,
        bias_V: Tensor | None,
        call: _Call,
        inputs: PolicyInputs,
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = call.head(hidden_NH, lm_head_VH, bias_V)
        grads = _Gradients(hidden_NH, lm_head_VH, head, call.needs)
        record = PolicyRecord.zeros(hidden_NH.shape[0], head.dtype, hidden_NH.device)
        want_grad = any(call.needs)
        with _no_autocast(hidden_NH):
            for rows, hidden_CH, x_CV, tanh_CV in _chunks(hidden_NH, head, call.rows, call.chunk):
                policy_rows_(x_CV, rows, inputs, objective, record, want_grad=want_grad)
                if want_grad:
                    grads.add(rows, hidden_CH, x_CV, tanh_CV)
        ctx.save_for_backward(grads.hidden_NH, grads.weight_VH, grads.bias_V)
        ctx.dtypes = (hidden_NH.dtype, lm_head_VH.dtype, None if bias_V is None else bias_V.dtype)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(record.values_5N, record.flags_2N)
        return record.values_5N[0].sum(), record.values_5N, record.flags_2N

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        grads = ctx.saved_tensors
        if upstream is None:
            return (None,) * 6
        results = [None if g is None else scaled(g, upstream).to(d) for g, d in zip(grads, ctx.dtypes)]
        return (*results, None, None, None)


# ---- public ---------------------------------------------------------------------------------------------------------


def _prepare(
    hidden_NH: Tensor,
    lm_head_VH: Tensor,
    bias: Tensor | None,
    token_ids_N: Tensor,
    softcap: float | None,
    logit_scale: float | None,
    chunk: int | None,
    rows_arguments: dict[str, Any],
) -> _Call:
    """Check what concerns the head, and put the call together."""
    if hidden_NH.dim() != 2 or lm_head_VH.dim() != 2 or hidden_NH.shape[1] != lm_head_VH.shape[1]:
        raise ValueError(
            f"hidden, lm_head: need [N, H] and [V, H], got {list(hidden_NH.shape)} and {list(lm_head_VH.shape)}"
        )
    if token_ids_N.shape[:1] != hidden_NH.shape[:1]:
        raise ValueError(f"token_ids: shape {list(token_ids_N.shape)} does not fit {hidden_NH.shape[0]} hidden rows")
    if bias is not None and bias.shape != lm_head_VH.shape[:1]:
        raise ValueError(f"bias: need shape [{lm_head_VH.shape[0]}], got {list(bias.shape)}")
    if len({hidden_NH.device, lm_head_VH.device, token_ids_N.device}) != 1:
        raise ValueError(
            f"hidden, lm_head, token_ids: on {hidden_NH.device}, {lm_head_VH.device} and {token_ids_N.device}; "
            "move them to one device"
        )
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap: {softcap} must be > 0; None means no cap")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: {chunk} must be at least 1 row; None picks one")
    rows = active_rows(
        token_ids_N, vocab=lm_head_VH.shape[0], dtype=promoted_dtype(hidden_NH, lm_head_VH), **rows_arguments
    )
    on = torch.is_grad_enabled()
    needs = (
        on and hidden_NH.requires_grad,
        on and lm_head_VH.requires_grad,
        on and bias is not None and bias.requires_grad,
    )
    return _Call(rows, softcap, logit_scale, chunk, needs)


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
    resolve_backend(backend, hidden_NH)
    arguments = {"temperature": temperature, "vocab_size": vocab_size, "ignore_index": ignore_index, "kept": kept}
    call = _prepare(hidden_NH, lm_head_VH, bias, token_ids_N, softcap, logit_scale, chunk, arguments)
    return TokenLogprobs(*_LinearTokenLogprobs.apply(hidden_NH, lm_head_VH, bias, call, entropy))


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
    float32 [V, H]; a backward pass with an upstream other than 1 returns scaled copies. Rows with `ignore_index` or
    weight 0 are dropped before the GEMM. A head that is tied to the embedding needs nothing special: autograd adds
    both gradients of the parameter.
    A second backward needs retain_graph=True. ValueError as in `policy_loss`.
    """
    resolve_backend(backend, hidden_NH)
    check_inputs(inputs, token_ids_N)
    arguments = {
        "temperature": temperature,
        "vocab_size": vocab_size,
        "ignore_index": ignore_index,
        "kept": kept,
        "weights_N": inputs.weights,
    }
    call = _prepare(hidden_NH, lm_head_VH, bias, token_ids_N, softcap, logit_scale, chunk, arguments)
    return unpack_policy_loss(*_LinearPolicyLoss.apply(hidden_NH, lm_head_VH, bias, call, inputs, objective))
