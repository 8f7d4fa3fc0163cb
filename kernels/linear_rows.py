"""Rows of a policy loss and token logprobs through the head, chunk by chunk, without autograd.

`linear.py` says what is computed and what it costs; `head_gemm.py` has the GEMMs around a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rhotrain.kernels.backend import promoted_dtype
from rhotrain.kernels.head_gemm import Chunk, Gradients, Head, chunks, takes_half
from rhotrain.kernels.logprob import (
    SavedStats,
    TokenLogprobs,
    Upstream,
    backward_rows,
    empty_token_logprobs,
    forward_rows,
    token_grads_,
    token_rows_,
)
from rhotrain.kernels.policy_rows import PolicyCall, PolicyRecord, policy_rows_, sequence_terms
from rhotrain.kernels.rows import ActiveRows, RowArguments, active_rows
from rhotrain.kernels.upstream import waiting_dtype


@dataclass(frozen=True, eq=False)
class LinearRows:
    """hidden [N, H], lm_head [V, H] and rows of one call; `needs`: which of (hidden, lm_head, bias) want a gradient.

    hidden_dtype: of hidden's gradient.
    """

    hidden_NH: Tensor
    lm_head_VH: Tensor
    head: Head
    rows: RowArguments
    chunk: int | None
    triton: bool
    hidden_dtype: torch.dtype

    @staticmethod
    def of(
        hidden_NH: Tensor,
        lm_head_VH: Tensor,
        bias_V: Tensor | None,
        rows: RowArguments,
        softcap: float | None,
        logit_scale: float | None,
        chunk: int | None,
        triton: bool,
        *,
        loss: bool,
    ) -> "LinearRows":
        """loss: gradients are formed before the upstream scalar is known, see `waiting_dtype`."""
        bias = None if bias_V is None else bias_V[: rows.vocab]
        dtype, half = promoted_dtype(hidden_NH, lm_head_VH), takes_half(hidden_NH, lm_head_VH)
        half_grad = half and not (loss and hidden_NH.dtype == torch.float16)
        head = Head(lm_head_VH[: rows.vocab], bias, softcap, logit_scale, dtype, half, half_grad)
        hidden_dtype = waiting_dtype(hidden_NH.dtype) if loss else hidden_NH.dtype
        return LinearRows(hidden_NH, lm_head_VH, head, rows, chunk, triton, hidden_dtype)

    def chunks(self, rows: ActiveRows, *, want_grad: bool) -> Iterator[Chunk]:
        return chunks(self.hidden_NH, self.head, rows, self.chunk, want_grad=want_grad)

    def gradients(self, needs: list[bool]) -> Gradients:
        return Gradients(self.hidden_NH, self.lm_head_VH, self.head, needs, self.hidden_dtype)

    def token_logprobs(self, rows: ActiveRows, *, entropy: bool) -> TokenLogprobs:
        """Of all N rows, 0 in those that are not among `rows`."""
        out = empty_token_logprobs(self.hidden_NH.shape[0], self.head.dtype, self.hidden_NH.device, entropy)
        for chunk in self.chunks(rows, want_grad=False):
            if not self.triton:
                token_rows_(chunk.logits_CV, chunk.rows, out)
                continue
            stats = forward_rows(chunk.logits_CV, chunk.rows.arguments(), entropy=entropy, triton=True)
            out.logprobs.index_copy_(0, chunk.rows.index, stats.logprobs)
            out.logsumexp.index_copy_(0, chunk.rows.index, stats.logsumexp)
            if out.entropy is not None and stats.entropy is not None:
                out.entropy.index_copy_(0, chunk.rows.index, stats.entropy)
        return out

    def token_gradients(self, rows: ActiveRows, stats: SavedStats, upstream: Upstream, needs: list[bool]) -> Gradients:
        """For the gradients [N] of (logprobs, entropy, logsumexp); stats: from `token_logprobs`."""
        grads = self.gradients(needs)
        for chunk in self.chunks(rows, want_grad=True):
            if self.triton:
                index = chunk.rows.index
                entropy = None if stats.entropy is None or upstream[1] is None else stats.entropy[index]
                mine = tuple(None if g is None else g[index] for g in upstream)
                backward_rows(
                    chunk.logits_CV,
                    chunk.grad_CV,
                    chunk.rows.arguments(),
                    SavedStats(entropy, stats.logsumexp[index]),
                    (mine[0], mine[1], mine[2]),
                    triton=True,
                )
            else:
                token_grads_(chunk.logits_CV, chunk.rows, upstream)
                _hand_over(chunk)
            grads.add(chunk)
        return grads.finish()

    def policy(self, call: PolicyCall, needs: list[bool]) -> tuple[PolicyRecord, Gradients]:
        """Results of all rows, and the gradients of the loss."""
        rows = active_rows(self.rows, call.inputs.weights)
        if call.objective.ratio_level == "sequence":
            return self._policy_by_sequence(call, rows, needs)
        record = PolicyRecord.zeros(self.hidden_NH.shape[0], self.head.dtype, self.hidden_NH.device)
        grads, want_grad = self.gradients(needs), any(needs)
        for chunk in self.chunks(rows, want_grad=want_grad):
            if self.triton:
                mine = replace(call, rows=chunk.rows.arguments(), inputs=call.inputs.select(chunk.rows.index))
                part = mine.run(chunk.logits_CV, chunk.grad_CV if want_grad else None)
                record.put(chunk.rows.index, part)
            else:
                policy_rows_(chunk.logits_CV, chunk.rows, call.inputs, call.objective, record, want_grad=want_grad)
                _hand_over(chunk)
            if want_grad:
                grads.add(chunk)
        return record, grads.finish()

    def _policy_by_sequence(
        self, call: PolicyCall, rows: ActiveRows, needs: list[bool]
    ) -> tuple[PolicyRecord, Gradients]:
        stats = self.token_logprobs(rows, entropy=True)
        terms, dentropy = sequence_terms(stats, self.rows, call.inputs, call.objective)
        record = PolicyRecord.of(terms, stats)
        if not any(needs):
            return record, self.gradients(needs)
        saved = SavedStats(stats.entropy, stats.logsumexp)
        return record, self.token_gradients(rows, saved, (terms.dlogprob, dentropy, None), needs)


def _hand_over(chunk: Chunk) -> None:
    """The references leave the gradient where the logits were."""
    if chunk.grad_CV is not chunk.logits_CV:
        chunk.grad_CV.copy_(chunk.logits_CV)
