"""The small layers of a decoder in fewer operations: RMSNorm, the gated product of an MLP, rotary positions.

    norm     y = x * rsqrt(mean(x^2) + eps) * (offset + weight)              x [..., H], weight [H]
    gate     y = act(gate) * up                                              gate, up [..., F]
    rotary   y = x * cos + rotate_half(x) * sin, for q and for k             q, k [1, heads, T, D], cos, sin [1, T, D]

Three implementations of each. Norms compute in float32 and round once, at the end, in every one of them.
- torch: PyTorch's own operations, as few as there can be. For a norm on a CPU that is not F.rms_norm: 16 rows of 576
  floats take 11 us here, 21 in F.rms_norm, 30-40 in transformers' layers; with the backward pass 700 rows take 0.7 ms,
  2.9 and 3.1 (two cores, PyTorch 2.13). On CUDA it is F.rms_norm, one kernel.
- liger: the Triton kernels of Liger (https://github.com/linkedin/Liger-Kernel), where installed; CUDA.
- compile: torch.compile of the plain formulas; CUDA, or a CPU with a C++ compiler. Every call passes Dynamo's guards:
  39 us for the norm above, so on a CPU it is slower than the plain layers.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rhotrain.kernels.backend import HAS_TRITON, INTERPRETED

Implementation = Literal["liger", "compile", "torch"]
Activation = Literal["silu", "gelu_tanh"]
NormOp = Callable[[Tensor, Tensor], Tensor]
GateOp = Callable[[Tensor, Tensor], Tensor]
RotaryOp = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("liger", "compile", "torch")

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def why_unavailable(implementation: Implementation, device: torch.device) -> str | None:
    """The reason why `implementation` cannot run on `device`, with the fix; None where it can."""
    if implementation == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger-kernel is not installed; pip install 'rhotrain[fused]'"
        if device.type != "cuda" and not (HAS_TRITON and INTERPRETED):
            return f"Liger's kernels need CUDA, the model is on {device}"
    if implementation == "compile":
        if device.type == "cuda" and not (HAS_TRITON and not INTERPRETED):
            return "torch.compile needs triton on CUDA, without TRITON_INTERPRET"
        if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
            return "torch.compile needs a C++ compiler on a CPU (CXX, g++, clang++)"
    return None


# ---- norm -----------------------------------------------------------------------------------------------------------


def norm_op(implementation: Implementation, *, size: int, eps: float, offset: float, device: torch.device) -> NormOp:
    """RMSNorm of x [..., size] with weight [size] of the same dtype, differentiable in both. `offset` is 0, or 1 for
    gemma's 1 + weight."""
    if implementation == "liger":
        from liger_kernel.transformers.functional import liger_rms_norm  # pyright: ignore

        # in_place would write dx into the incoming gradient, which a residual still needs
        return lambda x, weight: liger_rms_norm(x, weight, eps, offset, "gemma", False)
    if implementation == "compile":
        compiled = _compiled_norm(size, eps, offset)
        return lambda x, weight: compiled(x.reshape(-1, size), weight).view(x.shape)
    if device.type == "cpu":
        return partial(_short_norm, eps=eps, offset=offset)
    return partial(_torch_norm, eps=eps, offset=offset)


def _torch_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # 1 + weight in half precision would lose the weight's last bits
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


def _short_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _ShortNorm.apply(x, weight, eps, offset)
    return _short_norm_forward(x, weight, eps, offset)[0]


def _short_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(y, 1 / rms float32 [..., 1]). Five operations; mean(x^2) as the norm's square, which is one pass over x."""
    x32 = x.float()
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    inverse = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x32 * inverse).mul_(_scale(weight, offset)).to(x.dtype), inverse


class _ShortNorm(torch.autograd.Function):
    """Keeps x and one number per row for backward; the plain layer keeps three tensors of x's size in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        y, inverse = _short_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """dx = (g - u * mean(g * u)) / rms with u = x / rms, g = grad * scale; dweight = sum over rows of grad * u."""
        x, weight, inverse = ctx.saved_tensors
        unit = x.float() * inverse
        grad32, scale = grad.float(), _scale(weight, ctx.offset)
        product = grad32 * unit
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dot = (product @ scale).unsqueeze(-1)
            dx = (grad32 * scale).addcmul_(unit, dot, value=-1 / x.shape[-1]).mul_(inverse).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = product.reshape(-1, weight.numel()).sum(0).to(weight.dtype)
        return dx, dweight, None, None


def _scale(weight: Tensor, offset: float) -> Tensor:
    return weight.float() + offset if offset else weight.float()


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    """A float32 [1]; making one anew costs as much as the addition that it is for."""
    return torch.full((1,), value, device=device)


# ---- gate -----------------------------------------------------------------------------------------------------------


def gate_op(implementation: Implementation, *, activation: Activation) -> GateOp:
    """act(gate) * up. With autograd off `torch` writes into `gate`, which nobody else may read afterwards: 2-7 % of an
    MLP at 16 to 64 rows. Liger's backward writes the gradients over gate and up: one backward per forward."""
    if implementation == "liger":
        from liger_kernel.transformers.functional import liger_geglu, liger_swiglu  # pyright: ignore

        return {"silu": liger_swiglu, "gelu_tanh": liger_geglu}[activation]
    if implementation == "compile":
        return _compiled_gate(activation)
    return _silu_gate if activation == "silu" else _gelu_gate


def _silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return F.silu(gate) * up
    return F.silu(gate, inplace=True).mul_(up)


def _gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    active = F.gelu(gate, approximate="tanh")
    return active * up if torch.is_grad_enabled() else active.mul_(up)


# ---- rotary ---------------------------------------------------------------------------------------------------------


def rotary_op(implementation: Implementation) -> RotaryOp:
    """(q, k, cos, sin) -> q and k rotated. Liger's reads the first half of cos and sin only: they must repeat."""
    if implementation == "liger":
        return _liger_rotary
    if implementation == "compile":
        return _compiled_rotary()
    return _torch_rotary


def _liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_rope  # pyright: ignore

    if torch.is_grad_enabled():  # it writes into q and k behind autograd's back, and a norm may have kept them
        q, k = q.clone(), k.clone()
    return liger_rope(q, k, cos, sin)


def _torch_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """rotate_half(x) * sin is roll(x) * (-sin | sin): no slices, no concatenation, and a short backward pass."""
    half = q.shape[-1] // 2
    cos = cos.unsqueeze(1)
    sin = (sin * _signs(half, sin.dtype, sin.device)).unsqueeze(1)
    return (q * cos).addcmul_(q.roll(half, -1), sin), (k * cos).addcmul_(k.roll(half, -1), sin)


@cache
def _signs(half: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[-1] * half + [1] * half."""
    ones = torch.ones(half, dtype=dtype, device=device)
    return torch.cat((-ones, ones))


# ---- compile --------------------------------------------------------------------------------------------------------


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for any number of rows. Dynamo keeps graphs, and counts them against its limit, per code object, so
    every use gets its own: with and without gradients, one row and many, each dtype is a graph."""
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=True, fullgraph=True)


@cache
def _compiled_norm(size: int, eps: float, offset: float) -> Callable[..., Any]:
    """`size` only tells the graphs apart: a model has norms over hidden states and over heads."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        unit = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        return (unit * (offset + weight.float())).to(x.dtype)

    return _compile(norm)


@cache
def _compiled_gate(activation: Activation) -> Callable[..., Any]:
    act = ACTIVATIONS[activation]

    def gate_product(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    return _compile(gate_product)


@cache
def _compiled_rotary() -> Callable[..., Any]:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        half = q.shape[-1] // 2
        q_turned = torch.cat((-q[..., half:], q[..., :half]), -1)
        k_turned = torch.cat((-k[..., half:], k[..., :half]), -1)
        return q * cos + q_turned * sin, k * cos + k_turned * sin

    return _compile(rotary)
