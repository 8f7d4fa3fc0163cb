"""The backward pass of a loss whose gradient was formed in the forward pass: gradient times the upstream scalar.

Nearly always that scalar is 1 (`loss.backward()`), and multiplying all the same would cost two passes over a gradient
that took three to make. On a CPU looking at it costs nothing. On CUDA the host cannot look without waiting, so a kernel
looks: it multiplies in place unless the factor is 1, and what was applied is remembered on the device for a second
backward pass.
"""

import torch
from torch import Tensor

from rhotrain.kernels.backend import Launch, promote, refuse_create_graph, resolve_backend, tl
from rhotrain.kernels.row_launch import row_jit

SCALE = Launch(block=4096, num_warps=8)


@row_jit
def scale_kernel(
    gradient: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    upstream: tl.tensor,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row of a gradient [R, C]: times upstream, in place; nothing is read where that is 1."""
    factor = tl.load(upstream).to(tl.float32)
    length = tl.where(factor == 1.0, 0, columns)
    row_ptr = gradient + tl.program_id(0).to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    whole = length // BLOCK * BLOCK
    for c in tl.range(0, whole, BLOCK, num_stages=STAGES):
        at = c + lane
        tl.store(row_ptr + at, tl.load(row_ptr + at).to(tl.float32) * factor)
    at = whole + lane
    rest = at < length
    tl.store(row_ptr + at, tl.load(row_ptr + at, mask=rest, other=0.0).to(tl.float32) * factor, mask=rest)


def waiting_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a gradient waits for the upstream scalar: float32 for float16, else its own.

    Weights carry the normaliser, so gradients of logits lie near 1e-9, and float16 ends at 6e-8. A loss scale is there
    to prevent that, but it arrives as the upstream scalar, after the gradient was formed.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def _multiplied(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in float32 (float64 stays), rounded once.

    A half type's own product would round the factor first: to 8 bits, or to inf (a loss scale of 65536 in float16).
    """
    if grad.dtype == dtype and grad.dtype in (torch.float32, torch.float64):
        return grad * factor.to(dtype)
    return (promote(grad) * promote(factor)).to(dtype)


class Upstream:
    """What the backward passes of one call need to know about each other; kept in the call's autograd context."""

    def __init__(self) -> None:
        self.applied: dict[int, Tensor] = {}

    def times(self, grads: list[Tensor], upstream: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
        """Each gradient times the scalar, in the wanted dtype.

        The first backward pass may return `grads` themselves, scaled in place; a later one (retain_graph=True) makes
        new ones. Autograd copies a returned gradient that the graph still holds before it accumulates into it.
        """
        refuse_create_graph()
        return [self._one(i, grad, upstream, dtype) for i, (grad, dtype) in enumerate(zip(grads, dtypes))]

    def _one(self, index: int, grad: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
        if type(upstream) is not Tensor or torch.compiler.is_compiling():  # a tracer's stand-in has no value
            return _multiplied(grad, upstream, dtype)
        if grad.device.type == "cpu" and upstream.item() == 1.0:
            return grad.to(dtype)
        if index in self.applied:
            return self._again(grad, upstream, self.applied[index])
        in_rows = grad.dim() == 2 and grad.stride(1) == 1
        if grad.is_cuda and in_rows and dtype == grad.dtype and resolve_backend("auto", grad) == "triton":
            return self._in_place(index, grad, upstream)
        return _multiplied(grad, upstream, dtype)

    def _in_place(self, index: int, grad: Tensor, upstream: Tensor) -> Tensor:
        self.applied[index] = upstream.detach().clone()
        SCALE(scale_kernel, (grad.shape[0],), grad.device, grad, grad.stride(0), grad.shape[1], upstream)
        return grad

    def _again(self, grad: Tensor, upstream: Tensor, applied: Tensor) -> Tensor:
        """After an in-place pass `grad` carries what that applied; a factor of 0 cannot be undone."""
        torch._assert_async(
            applied != 0,
            "an earlier backward pass had an upstream gradient of 0 and overwrote this one; compute the loss again",
        )
        return _multiplied(grad, promote(upstream) / promote(applied), grad.dtype)
