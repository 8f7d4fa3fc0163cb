"""Which implementation runs, and the few numeric conventions that every op shares.

This is the only guarded triton import: nothing else in the package asks whether triton is installed. Each op has a
plain PyTorch reference, which is also the production path on a CPU; `resolve_backend` picks between the two.
"""

from typing import Literal

import torch
from torch import Tensor

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:  # no Triton wheels on macOS and Windows
    HAS_TRITON = False

Backend = Literal["auto", "triton", "reference"]


def resolve_backend(backend: Backend, tensor: Tensor) -> Literal["triton", "reference"]:
    """The implementation that runs an op on `tensor`.

    `auto` takes the fastest one that exists for the tensor's device. Every op has only its reference so far, so
    `auto` is `reference` everywhere, and asking for triton raises ValueError rather than quietly running something
    else.
    """
    if backend in ("auto", "reference"):
        return "reference"
    if backend == "triton":
        installed = "installed" if HAS_TRITON else "not installed"
        raise ValueError(
            f"backend: 'triton' has no kernel for this op on {tensor.device} (triton is {installed}); "
            "use backend='auto' or 'reference'"
        )
    raise ValueError(f"backend: {backend!r} is not one of auto, triton, reference")


def promote(x: Tensor) -> Tensor:
    """`x` in the type that the maths runs in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def promoted_dtype(*tensors: Tensor) -> torch.dtype:
    """The type that the maths of these tensors runs in: float64 if one of them is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def inverse_temperature(temperature: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / temperature: 0-dim for a number, [N] for a tensor [N].

    Sampler, trainer and reference all multiply logits by this very tensor. The temperature is rounded to `dtype`
    first and divided then, so that a Python number and a tensor of the same value give the same bits.
    """
    return torch.as_tensor(temperature, dtype=dtype, device=device).reciprocal()


def refuse_create_graph() -> None:
    """RuntimeError inside a backward pass that was asked for a graph of itself.

    The gradients formed here carry no graph; without this a term that differentiates them would silently be constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("this op cannot be differentiated twice; call backward or grad without create_graph=True")
