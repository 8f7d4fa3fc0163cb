"""One optimiser step's forward and backward passes, micro-batch by micro-batch.

The loss is a sum over token rows whose weights already hold the one denominator of the optimiser step (batching.py), so
gradients add up over micro-batches and do not depend on the split. The attention context stays set until backward has
ended, because gradient checkpointing runs the layers again inside it.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import KeptSet
from rhotrain.kernels.policy_loss import PolicyInputs
from rhotrain.kernels.spec import Objective
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadedModel
from rhotrain.train.batching import MicroBatch, TokenTable, bad_logprobs
from rhotrain.train.optim import StepError


@dataclass
class TokenResults:
    """What the current policy says of the rows that were run; every column is [N] on the CPU.

    ran marks those rows; logprobs, ratio, entropy, kl (0 without a reference) are of the last pass over them.
    """

    ran: Tensor
    logprobs: Tensor
    ratio: Tensor
    entropy: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    loss: float = 0.0

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype) -> "TokenResults":
        """No row has run yet."""
        ran, low, high = torch.zeros(3, num_rows, dtype=torch.bool)
        logprobs, ratio, entropy, kl = torch.zeros(4, num_rows, dtype=dtype)
        return cls(ran, logprobs, ratio, entropy, kl, low, high)


@contextmanager
def packed_hidden(loaded: LoadedModel, batch: MicroBatch) -> Iterator[Tensor]:
    """The hidden rows [M, H] that predict the batch's loss tokens, with the attention context set until the exit."""
    device = loaded.device
    index = None if batch.kv_index is None else batch.kv_index.to(device)
    context = PackedContext.make(batch.lens_q, batch.lens_k, index, device=device)
    with loaded.with_attention(context):
        hidden_TH = loaded.hidden(batch.input_ids.to(device), batch.position_ids.to(device))
        yield hidden_TH.index_select(0, batch.hidden_rows.to(device))


def _kept(table: TokenTable, rows: Tensor, device: torch.device) -> KeptSet | None:
    if table.kept is None:
        return None
    kept = table.kept.select(rows)
    return KeptSet(kept.offsets.to(device), kept.ids.to(device))


def _head_options(loaded: LoadedModel, table: TokenTable, rows: Tensor, temperature: float) -> dict[str, Any]:
    """What both functions of kernels/linear.py need besides hidden rows, weight and token ids."""
    head = loaded.head
    return {
        "bias": head.bias,
        "softcap": head.softcap,
        "logit_scale": head.logit_scale,
        "temperature": temperature,
        "vocab_size": loaded.vocab_size,
        "kept": _kept(table, rows, loaded.device),
    }


@torch.no_grad()
def score(
    loaded: LoadedModel,
    table: TokenTable,
    batches: Sequence[MicroBatch],
    *,
    temperature: float,
    who: str = "the trainer",
    entropies: Tensor | None = None,
) -> Tensor:
    """Logprobs [N] of the table's tokens under `loaded`, in the table's dtype; 0 in rows that no batch holds.

    entropies: [N], filled in the same rows with the entropy in nats of what each token was drawn from.
    Raises StepError, which names `who`, for what cannot be a logprob.
    """
    logprobs = torch.zeros_like(table.sampling_logprobs)
    for batch in batches:
        options = _head_options(loaded, table, batch.table_rows, temperature)
        ids = table.token_ids[batch.table_rows].to(loaded.device)
        with packed_hidden(loaded, batch) as hidden_MH:
            out = linear_token_logprobs(hidden_MH, loaded.head.weight, ids, entropy=entropies is not None, **options)
        logprobs[batch.table_rows] = checked(out.logprobs, table, batch, who).to(logprobs)
        if entropies is not None:
            assert out.entropy is not None
            entropies[batch.table_rows] = out.entropy.to(entropies)
    return logprobs


def checked(logprobs: Tensor, table: TokenTable, batch: MicroBatch, who: str) -> Tensor:
    """The logprobs on the CPU, positive rounding set to 0. `who` scored them: `the trainer` or `the reference`.

    Raises StepError when one is not finite or is positive beyond rounding.
    """
    values = logprobs.detach().cpu()
    bad = bad_logprobs(values)
    if not bad.any():
        return values.clamp(max=0.0)
    where = int(bad.nonzero()[0])
    row = int(batch.table_rows[where])
    i = bisect_right(table.starts, row) - 1
    trajectory = table.trajectories[i]
    raise StepError(
        f"logprobs: {who} gives {float(values[where])} for token {row - table.starts[i]} of sample "
        f"{trajectory.completion.sample} (prompt {trajectory.group}, completion {trajectory.member}). A logprob is "
        "finite and at most 0; the weights have probably diverged (lower lr, set grad_clip), the compute dtype "
        "overflows (use float32 or bfloat16), or the token lies outside its kept set"
    )


def run_batches(
    loaded: LoadedModel,
    table: TokenTable,
    batches: Sequence[MicroBatch],
    weights: Tensor,
    objective: Objective,
    results: TokenResults,
    *,
    temperature: float,
    loss_scale: float = 1.0,
) -> float:
    """Forward and backward over the micro-batches of one optimiser step; gradients accumulate in the parameters.

    weights: [N] from `token_weights`. Results of the rows that ran are written into `results`. Returns the loss.
    loss_scale: the gradients are those of the loss times this; the loss itself is not.
    The model's dropout, if any was asked for, acts here and nowhere else. No batch splits a completion, which a
    sequence-level ratio needs.
    `table.old_logprobs` None means the current policy itself (ratio 1). Raises StepError on a non-finite logprob.
    """
    weight, device, total = loaded.head.weight, loaded.device, 0.0

    sequences = table.sequence_ids() if objective.ratio_level == "sequence" else None

    def column(values: Tensor | None, rows: Tensor) -> Tensor | None:
        return None if values is None else values[rows].to(device)

    for batch in batches:
        rows = batch.table_rows
        ids, options = table.token_ids[rows].to(device), _head_options(loaded, table, rows, temperature)
        with loaded.with_dropout(), packed_hidden(loaded, batch) as hidden_MH:
            inputs = PolicyInputs(
                old_logprobs=column(table.old_logprobs, rows),
                advantages=table.advantages[rows].to(device),
                weights=weights[rows].to(device),
                ref_logprobs=column(table.ref_logprobs, rows),
                importance=column(table.importance, rows),
                sequence_ids=column(sequences, rows),
            )
            out = linear_policy_loss(hidden_MH, weight, ids, inputs, objective, **options)
            results.logprobs[rows] = checked(out.logprobs, table, batch, "the trainer").to(results.logprobs)
            out.loss.backward(torch.full_like(out.loss, loss_scale))
        total += float(out.loss.detach())
        results.ran[rows] = True
        for name in ("ratio", "entropy", "kl", "clipped_low", "clipped_high"):
            values = getattr(out, name)
            if values is not None:
                column_N = getattr(results, name)
                column_N[rows] = values.to(column_N)
    results.loss = total
    return total
