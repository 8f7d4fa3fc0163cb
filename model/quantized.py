"""A frozen base in 4 bits under an adapter (QLoRA): the body's linear layers as bitsandbytes' NF4.

    W ~ code[q] * absmax[block]      q 4 bits a weight, code the 16 NF4 values, one absmax per block of 64 weights

Source: Dettmers et al., arXiv 2305.14314, sections 2 and 3. With double quantisation absmax takes 8 bits, and every 256
of them one float32: 4 + 8/64 + 32/(64 * 256) = 4.127 bits a weight. The layers are bitsandbytes' own (`Linear4bit`),
which multiply by the dequantised weight in the run's dtype; the adapter over them is PEFT's. It is applied, never
merged: the sum of both would be rounded to 4 bits again. The embedding, the head, norms and biases stay as they are.

What stays in the run's dtype besides, and is named in a note: linears whose inputs are no multiple of 64, gpt2's
`Conv1D`, and tensors that hold all experts of a layer. bitsandbytes 0.50.2 counts blocks from the start of every row
when it dequantises on a CPU with AVX-512, so rows that end within a block come out wrong: 32 x 48 weights of
size 1 by up to 1.3.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rhotrain.model.loaded import LoadError, quiet_bitsandbytes

QuantizeBase = Literal["none", "nf4"]

BLOCK = 64
"""Weights that share an absmax."""


def check_quantize(spec: str, quantize_base: str, dtype: torch.dtype) -> None:
    """LoadError for an unknown `quantize_base`, without bitsandbytes, and for float64, which it does not take."""
    if quantize_base == "none":
        return
    if quantize_base != "nf4":
        raise LoadError(f"{spec}: quantize_base: {quantize_base!r} is not one of none, nf4")
    if find_spec("bitsandbytes") is None:
        raise LoadError(
            f"{spec}: quantize_base: nf4 needs bitsandbytes, which is not installed; pip install 'rhotrain[optim]'"
        )
    if dtype == torch.float64:
        raise LoadError(
            f"{spec}: quantize_base: nf4 does not go with dtype float64, which bitsandbytes does not take; use float32"
        )


def quantize_linears(model: nn.Module, device: torch.device, *, spec: str) -> tuple[str, ...]:
    """Replace the body's linear layers by 4-bit ones on `device`, one after the other, each freeing its weight; the
    rest of the model stays where it is. Everything is frozen: what is trained is put over it. Returns notes.

    Raises LoadError when the model has no layer that can be quantised.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    shared = {id(head.weight), id(model.get_input_embeddings().weight)}  # type: ignore[operator, union-attr]
    plain = [n for n, m in model.named_modules() if type(m) is nn.Linear and id(m.weight) not in shared]
    odd = [name for name in plain if _linear(model, name).in_features % BLOCK]
    taken = [name for name in plain if name not in set(odd)]
    left = _left_as_they_are(model, odd)
    if not taken:
        raise LoadError(
            f"{spec}: quantize_base: nf4 finds no layer to quantize in {type(model).__name__}: "
            f"{'; '.join(left) or 'it has no linear layer'}. Leave quantize_base at none"
        )
    with quiet_bitsandbytes():
        for name in taken:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _quantized(_linear(model, name), device))
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True  # type: ignore[assignment] # PEFT asks for it before it takes its 4-bit layer
    weights = sum(_linear(model, name).quant_state.shape.numel() for name in taken)
    done = f"quantize_base: nf4 holds {len(taken)} linear layers, {weights:,} weights, in 4 bits"
    return (done, *(f"quantize_base: {reason}" for reason in left))


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize_linears` was here."""
    return next(_states(model), None) is not None


def num_weights(parameter: Tensor) -> int:
    """How many weights a parameter stands for: a 4-bit one holds two of them in a byte."""
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, each once, with the scales and tables of 4-bit ones."""
    parameters = {id(p): p.nbytes for p in model.parameters()}
    return sum(parameters.values()) + sum(tensor.nbytes for state in _states(model) for tensor in _tensors(state))


def largest_dequantized(model: nn.Module) -> int:
    """Bytes of the largest 4-bit weight as it is multiplied by: what exists besides, one at a time. 0 without any."""
    return max((state.shape.numel() * state.dtype.itemsize for state in _states(model)), default=0)


def _linear(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def _quantized(linear: nn.Linear, device: torch.device) -> nn.Module:
    """bitsandbytes' layer with the weight of `linear` quantised on `device` (meta: with the shapes alone)."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
    if device.type == "meta":  # the table of 8-bit values is made once, on the device that asks first: not on this one
        quantize_4bit(torch.zeros(BLOCK), blocksize=BLOCK, **options)
    weight = linear.weight.detach().to(device).contiguous()
    packed, state = quantize_4bit(weight, blocksize=BLOCK, **options)
    layer: Any = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype, device="meta", **options
    )
    layer.weight = Params4bit(
        packed, requires_grad=False, quant_state=state, blocksize=BLOCK, bnb_quantized=True, **options
    )
    layer.quant_state = state
    layer.bias = linear.bias
    # In eval mode it would lay the weight out anew for a bfloat16 kernel, in place and for good: other numbers than in
    # train mode, and no gradient.
    layer.support_avx512bf16_for_cpu = False
    return layer


def _left_as_they_are(model: nn.Module, odd: list[str]) -> list[str]:
    """Why layers stay in the run's dtype, one text per reason."""
    found = []
    if odd:
        width = _linear(model, odd[0]).in_features
        found.append(f"{len(odd)} linear layers stay as they are, inputs no multiple of {BLOCK} ({odd[0]}: {width})")
    other = sum(isinstance(m, Conv1D) for m in model.modules())
    if other:
        found.append(f"{other} Conv1D layers stay as they are, which bitsandbytes does not have")
    experts = sum(p.dim() == 3 for p in model.parameters())
    if experts:
        found.append(f"{experts} tensors that hold all experts of a layer stay as they are, most of the weights")
    return found


def _states(model: nn.Module) -> Iterator[Any]:
    """bitsandbytes' QuantState of every 4-bit parameter."""
    for parameter in model.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield state


def _tensors(state: Any) -> tuple[Tensor, ...]:
    """What a nested QuantState holds besides the weight: 8-bit absmax, its float32 scales and mean, two tables."""
    return state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code
