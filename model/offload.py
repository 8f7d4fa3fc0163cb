"""What lies on the CPU while the GPU does not need it: layer inputs under checkpointing, and a model that rests.

Layer inputs: with gradient checkpointing the only activations that live from the forward to the backward pass are each
layer's input [1, T, H]. `offloaded_inputs` moves them when autograd saves them and back when it asks for them, through
`torch.autograd.graph.saved_tensors_hooks`; values do not change. 2 T H bytes a layer in bf16: 64k tokens of H = 4096
are 0.5 GiB.

A model that rests (the reference): its parameters are pinned CPU tensors, and copies on the device exist inside
`ParkedModel.awake` only. Nothing is copied back: such a model does not change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Moved:
    """How many tensors were moved, and their bytes."""

    tensors: int = 0
    nbytes: int = 0


@contextmanager
def offloaded_inputs(num_tokens: int, hidden_size: int) -> Iterator[Moved]:
    """Tensors [..., H] of `num_tokens` rows that autograd saves inside are kept on the CPU, pinned where they come from
    a GPU. Parameters, masks and whatever has another shape stay. Copies are in the order of the current stream."""
    moved = Moved()

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        wanted = tensor.shape[-1:] == (hidden_size,) and tensor.numel() == num_tokens * hidden_size
        if not wanted or isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return tensor
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        there.copy_(tensor.detach(), non_blocking=True)
        moved.tensors += 1
        moved.nbytes += there.nbytes
        return tensor.device, there

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, there = packed
        return there.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield moved


@dataclass(eq=False)
class ParkedModel:
    """`model` on the CPU between uses, on `device` inside of `awake`. Its tensors must not be changed."""

    model: nn.Module
    device: torch.device
    _homes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _depth: int = 0

    def __post_init__(self) -> None:
        tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}  # a tied one once
        for tensor in tensors.values():
            home = tensor.detach().to("cpu", copy=True)
            self._homes.append((tensor, home.pin_memory() if self.device.type == "cuda" else home))
        self._sleep()

    @property
    def nbytes(self) -> int:
        """What the device needs while the model is awake."""
        return sum(home.nbytes for _, home in self._homes)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The model's tensors are on the device inside. May be entered again inside. When they do not all fit,
        those that did leave the device again before the error goes on."""
        self._depth += 1
        try:
            if self._depth == 1:
                for tensor, home in self._homes:
                    tensor.data = home.to(self.device, non_blocking=True, copy=True)
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._sleep()

    def _sleep(self) -> None:
        for tensor, home in self._homes:
            tensor.data = home
