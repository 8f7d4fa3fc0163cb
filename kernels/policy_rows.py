"""The rows of a policy loss: their inputs, what is recorded about them, and the two implementations, without autograd.

`policy_loss.py` says what is computed and what it costs; this module has the PyTorch reference, the Triton kernel and
`PolicyCall.run`, which picks one, and does a sequence-level ratio as two passes with either.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Launch, promoted_dtype, require_tensors, tl
from rhotrain.kernels.logprob import FORWARD, SavedStats, TokenLogprobs, backward_rows, forward_rows, zero_the_rest_
from rhotrain.kernels.objective import PolicyTerms, policy_terms, refuse_grad
from rhotrain.kernels.objective_triton import objective_arguments, policy_terms_kernel
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
from rhotrain.kernels.rows import ActiveRows, RowArguments, active_rows, gather_logits, row_blocks
from rhotrain.kernels.spec import Objective

FUSED = Launch(block=FORWARD.block, num_warps=FORWARD.num_warps, num_stages=FORWARD.num_stages)
"""As the forward pass alone: `old_logprobs` from `token_logprobs` give a ratio of exactly 1. The gradient pass takes
quarter blocks, which leaves room for nine programs a multiprocessor (56 registers, sm_90; two with whole blocks)."""
FUSED_KEPT = Launch(block=1024, num_warps=4, num_stages=1)
"""Over kept sets; see KEPT in logprob.py."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyInputs:
    """The constants of the loss, per token, float32 (or float64) [N].

    old_logprobs: denominator of the ratio; None takes the current policy itself, detached: the ratio is exactly 1 and
    the gradient the on-policy one. advantages. weights: loss mask times normaliser; a row of weight 0 is not
    computed. ref_logprobs: reference policy, needed for a KL. importance: multiplies the policy term only.
    sequence_ids: int64 [N], which sequence a row belongs to, any labels in any order; needed for a sequence-level
    ratio, which wants all rows of a sequence in one call.
    ValueError for a tensor that requires grad (a graph in old_logprobs cancels the advantage's gradient), a shape
    that differs, or a narrower type (bf16 old_logprobs are noise in the ratio).
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None = None
    importance: Tensor | None = None
    sequence_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in self.named().items():
            if value is not None or name in ("advantages", "weights"):
                require_tensors(**{name: value})
        shape = self.advantages.shape
        if len(shape) != 1:
            raise ValueError(f"advantages: need one value per token, [N], got shape {list(shape)}")
        for name, value in self.named().items():
            if value is None:
                continue
            refuse_grad(**{name: value})
            if value.shape != shape:
                raise ValueError(
                    f"{name}: shape {list(value.shape)}, but advantages has {list(shape)}; all must be the same [N]"
                )
            if value.device != self.advantages.device:
                raise ValueError(
                    f"{name}: on {value.device}, but advantages are on {self.advantages.device}; move one of them"
                )
            wanted = (torch.int64,) if name == "sequence_ids" else (torch.float32, torch.float64)
            if value.dtype not in wanted:
                hint = "int64" if name == "sequence_ids" else "float32 (or float64)"
                raise ValueError(f"{name}: {value.dtype} is refused; pass {hint}")

    def named(self) -> dict[str, Tensor | None]:
        """Field name -> value, in the order of the operators' arguments."""
        return {
            "old_logprobs": self.old_logprobs,
            "advantages": self.advantages,
            "weights": self.weights,
            "ref_logprobs": self.ref_logprobs,
            "importance": self.importance,
            "sequence_ids": self.sequence_ids,
        }

    def __len__(self) -> int:
        return self.advantages.shape[0]

    def select(self, index_M: Tensor) -> "PolicyInputs":
        """The rows of `index_M` (int64), in that order."""
        return self._at(index_M)

    def rows(self, start: int, stop: int) -> "PolicyInputs":
        """Rows start..stop, sharing memory."""
        return self._at(slice(start, stop))

    def _at(self, where: Tensor | slice) -> "PolicyInputs":
        picked: dict[str, Any] = {name: None if x is None else x[where] for name, x in self.named().items()}
        return PolicyInputs(**picked)


# ---- reference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyRecord:
    """Where rows write their results: values [5, N] = loss, logprobs, ratio, kl, entropy; flags bool [2, N]."""

    values_5N: Tensor
    flags_2N: Tensor

    @staticmethod
    def zeros(count: int, dtype: torch.dtype, device: torch.device) -> "PolicyRecord":
        """What rows without loss have."""
        values = torch.zeros(5, count, dtype=dtype, device=device)
        return PolicyRecord(values, torch.zeros(2, count, dtype=torch.bool, device=device))

    @staticmethod
    def of(terms: PolicyTerms, stats: TokenLogprobs) -> "PolicyRecord":
        """Of all rows at once."""
        assert stats.entropy is not None
        values = torch.stack([terms.loss, stats.logprobs, terms.ratio, terms.kl, stats.entropy])
        return PolicyRecord(values, torch.stack([terms.clipped_low, terms.clipped_high]))

    def put(self, index_M: Tensor, part: "PolicyRecord") -> None:
        """Results of the rows `index_M`."""
        self.values_5N.index_copy_(1, index_M, part.values_5N)
        self.flags_2N.index_copy_(1, index_M, part.flags_2N)


def terms_of(logprobs: Tensor, entropy: Tensor, inputs: PolicyInputs, objective: Objective) -> PolicyTerms:
    """objective.py's terms for rows whose logprobs and entropies are known."""
    return policy_terms(
        logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.weights,
        objective,
        inputs.ref_logprobs,
        inputs.importance,
        entropy,
        inputs.sequence_ids,
    )


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

    `inputs` and `record` have all N rows; `rows.index` says which are meant. Token-level ratios.
    """
    for start, stop in row_blocks(len(rows), rows.vocab, x_MV.device):
        part, x = rows.rows(start, stop), x_MV[start:stop]
        stats = row_stats_(x, part, entropy=True)
        assert stats.entropy is not None
        terms = terms_of(stats.logprobs, stats.entropy, inputs.select(part.index), objective)
        if want_grad:
            dentropy = terms.dentropy if objective.entropy_coef != 0.0 else None
            logit_grads_(x, stats, part, terms.dlogprob, dentropy)
        values = (stats.logprobs, stats.entropy, stats.logsumexp)
        record.put(part.index, PolicyRecord.of(terms, TokenLogprobs(*values)))


def _reference(logits_NV: Tensor, call: "PolicyCall", out_NV: Tensor | None) -> PolicyRecord:
    dtype, rows = promoted_dtype(logits_NV), active_rows(call.rows, call.inputs.weights)
    record = PolicyRecord.zeros(logits_NV.shape[0], dtype, logits_NV.device)
    for start, stop in row_blocks(len(rows), rows.vocab, logits_NV.device):
        part = rows.rows(start, stop)
        x = gather_logits(logits_NV, part, dtype)
        policy_rows_(x, part, call.inputs, call.objective, record, want_grad=out_NV is not None)
        if out_NV is not None:
            out_NV[:, : rows.vocab].index_copy_(0, part.index, x.to(out_NV.dtype))
    if out_NV is not None:
        zero_the_rest_(out_NV, rows)
    return record


# ---- Triton ---------------------------------------------------------------------------------------------------------


@row_jit
def policy_loss_kernel(
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
    old_logprobs: tl.tensor,
    advantages: tl.tensor,
    weights: tl.tensor,
    ref_logprobs: tl.tensor,
    importance: tl.tensor,
    values: tl.tensor,
    flags: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    ratio_min: tl.tensor,
    ratio_max: tl.tensor,
    dual_clip: tl.tensor,
    sapo_tau_pos: tl.tensor,
    sapo_tau_neg: tl.tensor,
    beta: tl.tensor,
    entropy_coef: tl.tensor,
    KIND: tl.constexpr,
    KL: tl.constexpr,
    ENTROPY_BONUS: tl.constexpr,
    GRAD: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: values [5, count] and flags [2, count] as in PolicyRecord; with GRAD dlogits in `out`.

    `out` may be the logits. With KEPT it is ragged, one set's gradients after the other. Absent inputs are None.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    token, active, bad = load_token(token_ids, row, vocab, ignore_index)
    active = active & (weight != 0.0)
    if bad & (weight != 0.0):
        tl.atomic_or(status, BAD_ID)
    length = tl.where(active, vocab, 0)
    if KEPT:
        first, length = kept_range(kept_offsets, kept_ids, row, active)
        kept_ids += first
    inv_t = tl.load(inv_temperature + row * inv_t_stride)
    # Before the row is read: what is loaded between the passes would be waited for.
    advantage = tl.load(advantages + row)
    factor = 1.0
    if importance is not None:
        factor = tl.load(importance + row)
    if old_logprobs is not None:
        old_logprob = tl.load(old_logprobs + row)
    if ref_logprobs is not None:
        ref_logprob = tl.load(ref_logprobs + row)
    row_ptr = logits + row * row_stride
    logprob, entropy, logsumexp, bad_kept = row_statistics(
        row_ptr, kept_ids, length, vocab, token, inv_t, True, KEPT, BLOCK, STAGES
    )
    if KEPT:
        if active & bad_kept:
            tl.atomic_or(status, BAD_KEPT)
        active = active & (bad_kept == 0)
        length = tl.where(active, length, 0)  # its ids may lie anywhere
    if old_logprobs is None:
        old_logprob = logprob
    if ref_logprobs is None:
        ref_logprob = logprob
    loss, dlogprob, dentropy, ratio, kl, low, high = policy_terms_kernel(
        logprob,
        old_logprob,
        ref_logprob,
        advantage,
        tl.where(active, weight, 0.0),
        factor,
        entropy,
        ratio_min,
        ratio_max,
        dual_clip,
        sapo_tau_pos,
        sapo_tau_neg,
        beta,
        entropy_coef,
        KIND,
        KL,
    )
    tl.store(values + row, loss)
    tl.store(values + count + row, tl.where(active, logprob, 0.0))
    tl.store(values + count * 2 + row, ratio)
    tl.store(values + count * 3 + row, kl)
    tl.store(values + count * 4 + row, tl.where(active, entropy, 0.0))
    tl.store(flags + row, low.to(tl.uint8))
    tl.store(flags + count + row, high.to(tl.uint8))
    if GRAD:
        out += row * out_stride
        if KEPT:
            out += first
        row_gradient(
            row_ptr,
            out,
            kept_ids,
            length,
            columns,
            token,
            inv_t,
            logsumexp,
            entropy,
            dlogprob,
            0.0,
            dentropy,
            ENTROPY_BONUS,
            KEPT,
            BLOCK // 4,
        )


def _triton(logits_NV: Tensor, call: "PolicyCall", out_NV: Tensor | None) -> PolicyRecord:
    logits, launch = unit_columns(logits_NV), RowLaunch(call.rows, call.inputs.weights)
    count, device = logits.shape[0], logits.device
    values = torch.empty(5, count, device=device)
    flags = torch.empty(2, count, dtype=torch.uint8, device=device)
    flat = None if out_NV is None else launch.kept_gradients()
    target = logits if out_NV is None else out_NV if flat is None else flat
    constants = (None if x is None else x.float().contiguous() for x in list(call.inputs.named().values())[:5])
    numbers, names = objective_arguments(call.objective)
    (FUSED if launch.kept is None else FUSED_KEPT)(
        policy_loss_kernel,
        (count,),
        device,
        *launch.args,
        launch.status,
        logits,
        logits.stride(0),
        *constants,
        values,
        flags,
        count,
        target,
        0 if launch.kept is not None else target.stride(0),
        logits.shape[1],
        *numbers,
        **names,
        ENTROPY_BONUS=call.objective.entropy_coef != 0.0,
        GRAD=out_NV is not None,
        KEPT=launch.kept is not None,
    )
    launch.check()
    if out_NV is not None:
        launch.scatter(flat, out_NV)
    return PolicyRecord(values, flags.view(torch.bool))


# ---- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PolicyCall:
    """What a call has besides its logits. triton: which implementation runs."""

    rows: RowArguments
    inputs: PolicyInputs
    objective: Objective
    triton: bool

    def check(self) -> None:
        """ValueError when the objective needs an input that is missing."""
        objective = self.objective
        if objective.uses_reference and self.inputs.ref_logprobs is None:
            raise ValueError(
                f"ref_logprobs: missing, but objective.kl={objective.kl!r} with beta={objective.beta} needs it"
            )
        if objective.ratio_level == "sequence" and self.inputs.sequence_ids is None:
            raise ValueError("sequence_ids: missing, but objective.ratio_level='sequence' needs a label per row")

    def run(self, logits_NV: Tensor, out_NV: Tensor | None) -> PolicyRecord:
        """Results of all rows; dlogits into `out_NV`, which may be the logits (None: no gradient is wanted)."""
        if self.objective.ratio_level == "sequence":
            return self._sequence_level(logits_NV, out_NV)
        if not self.triton:
            return _reference(logits_NV, self, out_NV)
        if out_NV is None or unit_columns(out_NV) is out_NV:
            return _triton(logits_NV, self, out_NV)
        dense_NV = torch.empty(out_NV.shape, dtype=out_NV.dtype, device=out_NV.device)
        record = _triton(logits_NV, self, dense_NV)
        out_NV.copy_(dense_NV)
        return record

    def _sequence_level(self, logits_NV: Tensor, out_NV: Tensor | None) -> PolicyRecord:
        idle_N = self.inputs.weights == 0
        rows = replace(self.rows, token_ids=self.rows.token_ids.masked_fill(idle_N, self.rows.ignore_index))
        stats = forward_rows(logits_NV, rows, entropy=True, triton=self.triton)
        assert stats.entropy is not None
        terms, dentropy = sequence_terms(stats, rows, self.inputs, self.objective)
        if out_NV is not None:
            saved = SavedStats(stats.entropy, stats.logsumexp)
            backward_rows(logits_NV, out_NV, rows, saved, (terms.dlogprob, dentropy, None), triton=self.triton)
        return PolicyRecord.of(terms, stats)


def sequence_terms(
    stats: TokenLogprobs, rows: RowArguments, inputs: PolicyInputs, objective: Objective
) -> tuple[PolicyTerms, Tensor | None]:
    """Terms of all rows once all logprobs are known, and dloss/dentropy if there is an entropy bonus.

    Ignored rows count as rows of weight 0.
    """
    assert stats.entropy is not None
    weights = inputs.weights.masked_fill(rows.token_ids == rows.ignore_index, 0.0)
    terms = terms_of(stats.logprobs, stats.entropy, replace(inputs, weights=weights), objective)
    return terms, terms.dentropy if objective.entropy_coef != 0.0 else None
