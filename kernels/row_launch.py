"""Launching the kernels that have one program per row: specialisation, checks, kept sets, strides.

Every such kernel takes the same first parameters (`RowLaunch.args`): token_ids, inv_temperature and its stride,
kept_offsets, kept_ids, vocab, ignore_index.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.backend import Launch, jit, tl
from rhotrain.kernels.passes import check_kept, kept_range
from rhotrain.kernels.rows import RowArguments, active_rows

PER_ROW = frozenset(
    (
        *("token_ids", "inv_temperature", "kept_offsets", "kept_ids", "status", "upstream"),
        *("logprobs", "entropies", "logsumexps", "g_logprobs", "g_entropies", "g_logsumexps", "values", "flags"),
        *("old_logprobs", "advantages", "weights", "ref_logprobs", "importance"),
        *("temperatures", "inverses", "top_ks", "top_ps", "min_ps", "seeds", "samples", "positions"),
        *("available", "counts", "errors", "cut_ids", "offsets"),
    )
)
"""Parameters of which a program reads or writes one number, or a piece that starts anywhere (kept_ids). Where they
start in memory gains nothing, and a slice must not cost a compilation."""
NUMBERS = ("inv_t_stride", "vocab", "ignore_index", "columns", "count")
"""Integers that would gain nothing from being known at compile time."""


def row_jit(fn: Any) -> Any:
    """`jit` for a kernel of one program per row: one binary for every N, whatever vectors and numbers it is given."""
    names = list(inspect.signature(fn).parameters)
    return jit(
        fn,
        do_not_specialize=[name for name in names if name in NUMBERS],
        do_not_specialize_on_alignment=[name for name in names if name in PER_ROW],
    )


@row_jit
def scatter_kernel(
    kept_offsets: tl.tensor,
    kept_ids: tl.tensor,
    token_ids: tl.tensor,
    ignore_index: tl.tensor,
    gradients: tl.tensor,
    dlogits: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: the gradients of its kept set, ragged in `gradients`, to their places in dlogits."""
    row = tl.program_id(0).to(tl.int64)
    first, length = kept_range(kept_offsets, kept_ids, row, tl.load(token_ids + row).to(tl.int64) != ignore_index)
    for c in tl.range(0, length, BLOCK, num_stages=STAGES):
        at = c + tl.arange(0, BLOCK)
        ids = tl.load(kept_ids + first + at, mask=at < length, other=0)
        grad = tl.load(gradients + first + at, mask=at < length, other=0.0)
        tl.store(dlogits + row * row_stride + ids, grad, mask=at < length)


SCATTER = Launch(block=1024, num_warps=4)


class RowLaunch:
    """What every row kernel is launched with, from the arguments of an op; the ids' and sets' values are checked.

    ValueError on a CPU (the interpreter) as in the reference. On CUDA a kernel sets a bit of `status` instead, and
    `check` turns that into an asynchronous assert.
    """

    def __init__(self, arguments: RowArguments, weights_N: Tensor | None = None) -> None:
        ids, inverse = arguments.token_ids, arguments.inv_temperature
        self.device = ids.device
        if self.device.type == "cpu":
            rows = active_rows(arguments, weights_N)
            if rows.kept is not None:
                check_kept(rows.kept.mask(rows.vocab).gather(1, rows.token_ids.unsqueeze(1)), rows)
        if inverse is None:
            inverse = torch.ones((), device=self.device)
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.kept = arguments.kept
        self.token_ids = ids.contiguous()
        self.args = (
            self.token_ids,
            inverse,
            inverse.stride(0) if inverse.dim() else 0,
            None if self.kept is None else self.kept.offsets.contiguous(),
            None if self.kept is None else self.kept.ids.contiguous(),
            arguments.vocab,
            arguments.ignore_index,
        )
        """token_ids, inv_temperature, its stride, kept_offsets, kept_ids, vocab, ignore_index: in the order of every
        kernel's parameters."""

    def check(self) -> None:
        """After the launch: assert, when the device gets there, that no kernel found a bad row."""
        if self.device.type == "cuda":
            torch._assert_async(
                self.status == 0,
                "token_ids, kept: an id is outside the real vocabulary, or a token is not in its own kept set",
            )

    def kept_gradients(self) -> Tensor | None:
        """A buffer for the gradients of the kept sets, one after the other; None without kept sets."""
        return None if self.kept is None else torch.zeros(self.kept.ids.shape, device=self.device)

    def scatter(self, gradients: Tensor | None, dlogits_NV: Tensor) -> None:
        """The kept sets' gradients to their places; the rest of dlogits is 0. Nothing to do without kept sets."""
        if gradients is None:
            return
        dlogits_NV.zero_()
        ids, _, _, offsets, kept_ids, _, ignore_index = self.args
        SCATTER(
            scatter_kernel,
            (dlogits_NV.shape[0],),
            self.device,
            offsets,
            kept_ids,
            ids,
            ignore_index,
            gradients,
            dlogits_NV,
            dlogits_NV.stride(0),
        )


def unit_columns(logits_NV: Tensor) -> Tensor:
    """The logits, copied if their columns do not lie side by side; rows may have any stride."""
    return logits_NV if logits_NV.stride(1) == 1 or logits_NV.shape[1] == 1 else logits_NV.contiguous()
