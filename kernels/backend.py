"""Which implementation runs, how a Triton kernel is launched, and the few numeric conventions that every op shares.

This is the only guarded triton import: the other modules take `tl`, `jit` and `HAS_TRITON` from here and never ask
whether triton is installed. Each op has a plain PyTorch reference, which is also the production path on a CPU, and a
Triton kernel beside it; `resolve_backend` picks between the two.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

try:
    import triton
    from triton import knobs

    HAS_TRITON = True
    INTERPRETED = bool(knobs.runtime.interpret)
except ImportError:  # no Triton wheels on macOS and Windows
    HAS_TRITON = INTERPRETED = False

if TYPE_CHECKING:  # triton's own annotations do not fit what its compiler accepts

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):
        """triton.language"""

        tensor: TypeAlias = Any

        class constexpr(Any):
            def __init__(self, value: Any) -> None: ...
elif HAS_TRITON:
    import triton.language as tl
else:
    tl = SimpleNamespace(constexpr=lambda value: value, tensor=Tensor)

Backend = Literal["auto", "triton", "reference"]

# HAS_TRITON: triton can be imported. INTERPRETED: kernels run in its interpreter, on CPU tensors, because
# TRITON_INTERPRET=1 was set when they were decorated.


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`; without triton the undecorated function, which nothing calls."""
    if fn is None:
        return partial(jit, **options)
    return triton.jit(fn, **options) if HAS_TRITON else fn


LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e): kernels take exp2, which is one instruction, of differences that were formed in natural units."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched, whatever the data: fixed, so that a row gives the same bits in every batch.

    The block size and the number of warps decide the order of a reduction, so neither depends on N; nothing is
    autotuned (a kernel that works in place cannot be run twice).
    block: elements of a row that one program holds at a time. num_warps: 32 threads each. num_stages: how many blocks
    are in flight from memory (software pipelining of the loop). constants: further constexpr arguments.
    """

    block: int
    num_warps: int
    num_stages: int = 3
    constants: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constexprs: Any) -> None:
        """Run `kernel` on `device`, whichever device is current; nothing to do for an empty grid.

        The kernel must have the constexpr arguments BLOCK and STAGES. Floating-point fusion is off: x = logit * (1/T)
        is then the same float32 number in sampler, trainer and reference, whatever is done with it next.
        """
        if 0 in grid:
            return
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](
                *args,
                **constexprs,
                **self.constants,
                BLOCK=self.block,
                STAGES=self.num_stages,
                num_warps=self.num_warps,
                enable_fp_fusion=False,
            )


def resolve_backend(backend: Backend, tensor: Tensor) -> Literal["triton", "reference"]:
    """The implementation that runs an op on `tensor`.

    `auto`: Triton on CUDA, the reference elsewhere and for float64 (no kernel computes in float64). `triton` also runs
    on a CPU under TRITON_INTERPRET=1, slowly, for tests. ValueError when triton is asked for and cannot run.
    """
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"backend: {backend!r} is not one of auto, triton, reference")
    if backend == "reference":
        return "reference"
    why_not = why_no_triton(tensor)
    if why_not is None and (backend == "triton" or tensor.is_cuda):
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend: 'triton' cannot run here: {why_not}; use backend='auto' or 'reference'")
    return "reference"


def why_no_triton(tensor: Tensor) -> str | None:
    """Why no Triton kernel can run on `tensor`; None when one can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if tensor.dtype == torch.float64:
        return "float64 has no kernel"
    if tensor.is_cuda and INTERPRETED:
        return "TRITON_INTERPRET=1 was set when triton was imported, and the interpreter is for CPU tensors"
    if not tensor.is_cuda and not INTERPRETED:
        return (
            f"the tensor is on {tensor.device}, and kernels run on CUDA (on a CPU only in Triton's interpreter, for "
            "tests: TRITON_INTERPRET=1 before triton is imported)"
        )
    return None


def require_tensors(**named: Any) -> None:
    """ValueError for an argument that is no tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: need a tensor, got {type(value).__name__}")


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
    if not isinstance(temperature, Tensor):  # filled on the device: nothing is copied, nothing waits
        return torch.full((), temperature, dtype=dtype, device=device).reciprocal()
    return temperature.to(device=device, dtype=dtype).reciprocal()


def refuse_create_graph() -> None:
    """RuntimeError inside a backward pass that was asked for a graph of itself.

    The gradients formed here carry no graph; without this a term that differentiates them would silently be constant.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("this op cannot be differentiated twice; call backward or grad without create_graph=True")
