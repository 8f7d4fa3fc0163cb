"""Policy loss of one token per row of logits: loss, dlogits and metrics from one visit to each block of logits.

    logprob, entropy = token_logprobs(logits / temperature)                         logprob.py
    loss_i           = weight_i (importance_i policy_i + beta KL_i - c entropy_i)   objective.py
    dlogits_j        = (dloss/dlogprob (1[j = t] - p_j) - dloss/dentropy p_j (log p_j + entropy)) / temperature

Shapes: logits [N, V], everything per token [N]; the loss is the SUM over rows: weights carry mask and normaliser, so
that the gradient does not depend on how rows are split into calls. Numerics as in logprob.py: float32 maths (float64
stays).
The loss is a scalar, so its gradient is formed in the forward pass; the backward pass only multiplies by the upstream
scalar, out of place.

Source: Liger's and Fast-LLM's fused GRPO kernels for forming gradients in the forward pass; formulas in objective.py.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Backend, promoted_dtype, refuse_create_graph, resolve_backend
from rhotrain.kernels.logprob import check_logits, logit_grads_, row_stats_
from rhotrain.kernels.objective import policy_terms, refuse_grad
from rhotrain.kernels.rows import ActiveRows, KeptSet, active_rows, gather_logits, row_blocks
from rhotrain.kernels.spec import IGNORE_INDEX, Objective


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyInputs:
    """The constants of the loss, per token, float32 (or float64) [N].

    old_logprobs: denominator of the ratio; None takes the current policy itself, detached: the ratio is exactly 1 and
    the gradient the on-policy one. advantages. weights: loss mask times normaliser; a row of weight 0 is not
    computed. ref_logprobs: reference policy, needed for a KL. importance: multiplies the policy term only.
    ValueError for a tensor that requires grad (a graph in old_logprobs cancels the advantage's gradient), a shape
    that differs, or a narrower type (bf16 old_logprobs are noise in the ratio).
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None = None
    importance: Tensor | None = None

    def __post_init__(self) -> None:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        refuse_grad(**named)
        shape = self.advantages.shape
        for name, value in named.items():
            if value is None:
                continue
            if value.dim() != 1 or value.shape != shape:
                raise ValueError(
                    f"{name}: shape {list(value.shape)}, but advantages has {list(shape)}; all must be the same [N]"
                )
            if value.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name}: {value.dtype} is refused; pass float32 (or float64)")

    def __len__(self) -> int:
        return self.advantages.shape[0]

    def select(self, index_M: Tensor) -> "PolicyInputs":
        """The rows of `index_M` (int64), in that order."""
        return PolicyInputs(**{f.name: _index(getattr(self, f.name), index_M) for f in fields(self)})

    def rows(self, start: int, stop: int) -> "PolicyInputs":
        """Rows start..stop, sharing memory."""
        return PolicyInputs(**{f.name: _index(getattr(self, f.name), slice(start, stop)) for f in fields(self)})


def _index(value: Tensor | None, at: Tensor | slice) -> Any:
    return None if value is None else value[at]


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


# ---- reference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyRecord:
    """Where blocks of rows write their results: values [5, N] = loss, logprobs, ratio, kl, entropy; flags [2, N]."""

    values_5N: Tensor
    flags_2N: Tensor

    @staticmethod
    def zeros(count: int, dtype: torch.dtype, device: torch.device) -> "PolicyRecord":
        """What rows without loss have."""
        values = torch.zeros(5, count, dtype=dtype, device=device)
        return PolicyRecord(values, torch.zeros(2, count, dtype=torch.bool, device=device))


def policy_rows_(
    x_MV: Tensor,
    rows: ActiveRows,
    inputs: PolicyInputs,
    objective: Objective,
    record: PolicyRecord,
    *,
    want_grad: bool,
) -> None:
    """Logits of the M active rows in, dlogits out (in place, if `want_grad`); results of the rows go into `record`.

    `inputs` and `record` have all N rows; `rows.index` says which are meant.
    """
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part, x = rows.rows(start, stop), x_MV[start:stop]
        stats = row_stats_(x, part, entropy=True)
        mine = inputs.select(part.index)
        terms = policy_terms(
            stats.logprobs,
            mine.old_logprobs,
            mine.advantages,
            mine.weights,
            objective,
            mine.ref_logprobs,
            mine.importance,
            stats.entropy,
        )
        if want_grad:
            dentropy = terms.dentropy if objective.entropy_coef != 0.0 else None
            logit_grads_(x, stats, part, terms.dlogprob, dentropy)
        assert stats.entropy is not None
        values = torch.stack([terms.loss, stats.logprobs, terms.ratio, terms.kl, stats.entropy])
        record.values_5N.index_copy_(1, part.index, values)
        record.flags_2N.index_copy_(1, part.index, torch.stack([terms.clipped_low, terms.clipped_high]))


def unpack_policy_loss(loss: Tensor, values_5N: Tensor, flags_2N: Tensor) -> PolicyLoss:
    """The public form of what the autograd functions return."""
    _, logprobs, ratio, kl, entropy = values_5N.unbind()
    return PolicyLoss(loss, logprobs, ratio, kl, entropy, *flags_2N.unbind())


# ---- autograd -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    rows: ActiveRows
    inputs: PolicyInputs
    objective: Objective
    inplace: bool
    want_grad: bool


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
        dtype, rows = promoted_dtype(logits_NV), call.rows
        record = PolicyRecord.zeros(logits_NV.shape[0], dtype, logits_NV.device)
        dlogits_NV = logits_NV
        if call.want_grad and not call.inplace:
            dlogits_NV = torch.zeros(logits_NV.shape, dtype=logits_NV.dtype, device=logits_NV.device)
        for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
            part = rows.rows(start, stop)
            x = gather_logits(logits_NV, part, dtype)
            policy_rows_(x, part, call.inputs, call.objective, record, want_grad=call.want_grad)
            if call.want_grad:
                dlogits_NV[:, : rows.vocab].index_copy_(0, part.index, x.to(dlogits_NV.dtype))
        if call.want_grad and call.inplace:
            _zero_the_rest_(logits_NV, rows)
        if call.want_grad:
            ctx.save_for_backward(dlogits_NV)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(record.values_5N, record.flags_2N)
        return record.values_5N[0].sum(), record.values_5N, record.flags_2N

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, None]:
        refuse_create_graph()
        (dlogits_NV,) = ctx.saved_tensors
        return (None if upstream is None else scaled(dlogits_NV, upstream)), None


def scaled(grad: Tensor, upstream: Tensor) -> Tensor:
    """grad * upstream out of place, so that a second backward finds `grad` as it was.

    An upstream of exactly 1 returns `grad` itself (on a CPU, where looking costs nothing): autograd then hands the
    memory on without a copy once the graph is freed, and copies as long as the graph is kept. For a head of
    49152 x 576 this is 113 MB and 5 % of the time of `linear_policy_loss`.
    """
    if upstream.device.type == "cpu" and upstream.item() == 1.0:
        return grad
    return grad * upstream.to(grad.dtype)


def _zero_the_rest_(dlogits_NV: Tensor, rows: ActiveRows) -> None:
    """In place: rows without loss and padded ids have gradient exactly 0."""
    dlogits_NV[:, rows.vocab :] = 0
    idle = torch.ones(dlogits_NV.shape[0], dtype=torch.bool, device=dlogits_NV.device)
    idle[rows.index] = False
    dlogits_NV.index_fill_(0, idle.nonzero().squeeze(1), 0)


_OVERWRITTEN = "_rhotrain_overwritten"


def _owner(logits_NV: Tensor) -> Tensor:
    """The tensor whose memory this is: itself, or what it is a view of."""
    base = logits_NV._base
    return logits_NV if base is None else base


def _check_reuse(logits_NV: Tensor, overwrite: bool) -> None:
    """ValueError for logits that an earlier in-place call turned into a gradient, and for overwriting a leaf.

    Autograd says nothing when a leaf's values are overwritten inside a Function.
    """
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
    one [N, V] tensor: the values of `logits_NV` are gone afterwards. Refused for a leaf that requires grad and for
    logits that an earlier in-place call has overwritten; autograd refuses the backward pass of whatever kept the old
    values.

    A second backward needs retain_graph=True, in place too.
    ValueError: wrong shape, dtype or device, a bad id, ref_logprobs missing for a KL, and what PolicyInputs refuses.
    """
    check_logits(logits_NV, token_ids_N)
    check_inputs(inputs, token_ids_N)
    resolve_backend(backend, logits_NV)
    want_grad = torch.is_grad_enabled() and logits_NV.requires_grad
    overwrite = inplace and want_grad
    _check_reuse(logits_NV, overwrite)
    rows = active_rows(
        token_ids_N,
        vocab=logits_NV.shape[1],
        dtype=promoted_dtype(logits_NV),
        temperature=temperature,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        kept=kept,
        weights_N=inputs.weights,
    )
    loss, values, flags = _PolicyLoss.apply(logits_NV, _Call(rows, inputs, objective, overwrite, want_grad))
    if overwrite:
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
