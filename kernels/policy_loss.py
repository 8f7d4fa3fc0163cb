"""Policy loss of one token per row of logits: loss, dlogits and metrics from one visit to each row of logits.

    logprob, entropy = token_logprobs(logits / temperature)                         logprob.py
    loss_i           = weight_i (importance_i policy_i + beta KL_i - c entropy_i)   objective.py
    dlogits_j        = (dloss/dlogprob (1[j = t] - p_j) - dloss/dentropy p_j (log p_j + entropy)) / temperature

Shapes: logits [N, V], everything per token [N]; the loss is the SUM over rows: weights carry mask and normaliser, so
that the gradient does not depend on how rows are split into calls. Numerics as in logprob.py: float32 maths (float64
stays, in the reference).
The loss is a scalar, so its gradient is formed in the forward pass; the backward pass only multiplies by the upstream
scalar (`upstream.py`).

Bytes: one kernel reads each row, does the scalar maths, reads the row again (from the L2 cache where it is still there)
and writes the gradient: 3 N V values, 2 N V at best. A sequence-level ratio needs every logprob of a sequence before
any gradient: two kernels, without the chance of finding a row in the cache, and one wait for the device to learn
how many sequences there are.

Source: Liger's and Fast-LLM's fused GRPO kernels for forming gradients in the forward pass; formulas in objective.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promoted_dtype, resolve_backend
from rhotrain.kernels.logprob import check_logits
from rhotrain.kernels.objective_triton import pack_objective, unpack_objective
from rhotrain.kernels.policy_rows import PolicyCall, PolicyInputs
from rhotrain.kernels.rows import KeptSet, RowArguments, check_rows
from rhotrain.kernels.spec import IGNORE_INDEX, Objective
from rhotrain.kernels.upstream import Upstream, waiting_dtype


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """loss: scalar, the sum over rows. The rest is detached, [N], and 0 (False) in rows that carry no loss."""

    loss: Tensor
    logprobs: Tensor
    ratio: Tensor
    kl: Tensor
    entropy: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def unpack_policy_loss(loss: Tensor, values_5N: Tensor, flags_2N: Tensor) -> PolicyLoss:
    """The public form of what the operators return."""
    _, logprobs, ratio, kl, entropy = values_5N.detach().unbind()
    return PolicyLoss(loss, logprobs, ratio, kl, entropy, *flags_2N.unbind())


# ---- operators ------------------------------------------------------------------------------------------------------


def unpack_call(*arguments: Any) -> PolicyCall:
    """The operators' arguments after the logits, put together again."""
    rows, inputs, (kind, level, kl, numbers, triton) = arguments[:6], arguments[6:12], arguments[12:]
    names = ("old_logprobs", "advantages", "weights", "ref_logprobs", "importance", "sequence_ids")
    return PolicyCall(
        RowArguments(*rows),
        PolicyInputs(**dict(zip(names, inputs))),
        unpack_objective(kind, level, kl, numbers),
        triton,
    )


@torch.library.custom_op("rhotrain::policy_loss", mutates_args=())
def _op(
    logits: Tensor,
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
    want_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, values [5, N], flags [2, N], dlogits (empty without want_grad)."""
    rows = (token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    inputs = (old_logprobs, advantages, weights, ref_logprobs, importance, sequence_ids)
    call = unpack_call(*rows, *inputs, kind, ratio_level, kl, numbers, triton)
    shape = logits.shape if want_grad else (0,)
    dlogits = torch.empty(shape, dtype=waiting_dtype(logits.dtype), device=logits.device)
    record = call.run(logits, dlogits if want_grad else None)
    return record.values_5N[0].sum(), record.values_5N, record.flags_2N, dlogits


def fake_record(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and types of (loss, values, flags) for a tensor of N rows."""
    count = rows.shape[0]
    flags = rows.new_empty((2, count), dtype=torch.bool)
    return rows.new_empty((), dtype=dtype), rows.new_empty((5, count), dtype=dtype), flags


@_op.register_fake
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, dtype = logits.shape if rest[-1] else (0,), waiting_dtype(logits.dtype)
    return *fake_record(logits, promoted_dtype(logits)), torch.empty(shape, dtype=dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Detached: autograd wraps a saved output anew, takes the wrapper for its only owner and accumulates into it.
    ctx.save_for_backward(output[3].detach())
    ctx.upstream, ctx.dtype = Upstream(), inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 19
    (dlogits,) = ctx.saved_tensors
    return *ctx.upstream.times([dlogits], upstream, [ctx.dtype]), *[None] * 18


_op.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("rhotrain::policy_loss_", mutates_args=("logits",))
def _op_(
    logits: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """loss, values [5, N], flags [2, N]; the logits are overwritten with their gradient."""
    rows = (token_ids, inv_temperature, kept_offsets, kept_ids, vocab, ignore_index)
    inputs = (old_logprobs, advantages, weights, ref_logprobs, importance, sequence_ids)
    record = unpack_call(*rows, *inputs, kind, ratio_level, kl, numbers, triton).run(logits, logits)
    return record.values_5N[0].sum(), record.values_5N, record.flags_2N


@_op_.register_fake
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_record(logits, promoted_dtype(logits))


class _InPlace(torch.autograd.Function):
    """Around the operator that overwrites: torch.library registers no autograd formula for one that mutates."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss, values, flags = _op_(logits_NV, *rest)
        ctx.save_for_backward(logits_NV)
        ctx.upstream = Upstream()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(values, flags)
        return loss, values, flags

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 18
        (dlogits_NV,) = ctx.saved_tensors
        return *ctx.upstream.times([dlogits_NV], upstream, [dlogits_NV.dtype]), *[None] * 17


_OVERWRITTEN = "_rhotrain_overwritten"


def _owner(logits_NV: Tensor) -> Tensor:
    """The tensor whose memory this is: itself, or what it is a view of."""
    base = logits_NV._base
    return logits_NV if base is None else base


def _check_reuse(logits_NV: Tensor, overwrite: bool) -> None:
    """ValueError for logits that an earlier in-place call turned into a gradient, and for overwriting a leaf.

    Autograd says nothing when a leaf's values are overwritten inside a Function.
    """
    if torch.compiler.is_compiling():
        return
    if overwrite and 0 in logits_NV.stride() and logits_NV.numel() > 1:
        raise ValueError("inplace: rows of the logits share memory (an expanded tensor); use inplace=False")
    if overwrite and logits_NV.dtype == torch.float16:
        raise ValueError(
            "inplace: float16 logits cannot hold their own gradient: it underflows before a loss scale can act; use "
            "inplace=False, or bf16"
        )
    owner = _owner(logits_NV)
    mark = getattr(owner, _OVERWRITTEN, None)
    if mark is not None and mark == (logits_NV.data_ptr(), logits_NV._version):
        raise ValueError(
            "logits: an earlier policy_loss(inplace=True) overwrote them with their gradient; compute them again or "
            "use inplace=False"
        )
    if overwrite and owner.is_leaf and owner.requires_grad:
        raise ValueError(
            "inplace: logits are a leaf that requires grad, and its values would be lost; use inplace=False"
        )


def policy_loss(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    inputs: PolicyInputs,
    objective: Objective,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    kept: KeptSet | None = None,
    inplace: bool = False,
    backend: Backend = "auto",
) -> PolicyLoss:
    """Sum of the weighted per-token losses, with its gradient for `logits_NV` only, and detached per-token metrics.

    logits [N, V] bf16, fp16, float32 or float64; token_ids int64 [N]; temperature a number or [N], > 0; `vocab_size`,
    `ignore_index` and `kept` as in `token_logprobs`. Rows whose id is `ignore_index` or whose weight is 0 are not
    read: 0 in every field, gradient exactly 0.

    inplace=True overwrites the logits with their gradient during this call (when a gradient is wanted), which saves
    one [N, V] tensor: the values of `logits_NV` are gone afterwards. Refused for a leaf that requires grad, for float16
    and for logits that an earlier in-place call has overwritten (as passed: a detached alias is not seen); autograd
    refuses the backward pass of whatever kept the old values. Of two calls on slices of one buffer the first needs its
    backward pass before the second. Inside torch.compile it is ignored.

    A second backward needs retain_graph=True, in place too.
    ValueError: wrong shape, dtype or device, a bad id, ref_logprobs missing for a KL, and what PolicyInputs refuses.
    """
    check_logits(logits_NV, token_ids_N)
    check_inputs(inputs, token_ids_N)
    triton = resolve_backend(backend, logits_NV) == "triton"
    want_grad = torch.is_grad_enabled() and logits_NV.requires_grad
    # A compiler makes mutation functional anyway, and has no way to refuse a leaf: there, in place is out of place.
    overwrite = inplace and want_grad and not torch.compiler.is_compiling()
    _check_reuse(logits_NV, overwrite)
    rows = check_rows(
        token_ids_N,
        columns=logits_NV.shape[1],
        dtype=promoted_dtype(logits_NV),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
    )
    PolicyCall(rows, inputs, objective, triton).check()
    arguments = (*rows.flat, *inputs.named().values(), *pack_objective(objective), triton)
    if not overwrite:
        loss, values, flags, _ = _op(logits_NV, *arguments, want_grad)
        return unpack_policy_loss(loss, values, flags)
    loss, values, flags = _InPlace.apply(logits_NV, *arguments)
    setattr(_owner(logits_NV), _OVERWRITTEN, (logits_NV.data_ptr(), logits_NV._version))
    return unpack_policy_loss(loss, values, flags)


def check_inputs(inputs: PolicyInputs, token_ids_N: Tensor) -> None:
    """ValueError unless `inputs` has one row per token id, on the same device."""
    if len(inputs) != token_ids_N.shape[0]:
        raise ValueError(f"inputs: PolicyInputs has {len(inputs)} rows for {token_ids_N.shape[0]} token ids")
    if inputs.weights.device != token_ids_N.device:
        raise ValueError(
            f"inputs: on {inputs.weights.device}, but token_ids are on {token_ids_N.device}; move one of them"
        )
