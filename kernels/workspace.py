"""Buffers for chunks of logits that many calls share, so that a training loop allocates them once.

    workspace = Workspace()
    with workspace.using():
        for batch in batches:
            linear_policy_loss(...)     # the same buffers in every call
    workspace.release()

Outside of `using` every call allocates its own, which ends with the call. What a call returns never lies in a buffer.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_ACTIVE: ContextVar["Workspace | None"] = ContextVar("rhotrain_workspace", default=None)

Key = tuple[str, torch.dtype, torch.device, int]


class Workspace:
    """Flat buffers by use, dtype, device and CUDA stream; one that is too small is freed and replaced by a larger one.

    allocations: how many buffers were made. May be entered again and from several threads: while one call holds the
    buffers, any other allocates its own, as it does while a CUDA graph is captured and in autograd's threads.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._buffers: dict[Key, Tensor] = {}
        self._busy = threading.Lock()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Calls inside take their chunks from here."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def release(self) -> None:
        """Free the buffers; the next call makes them anew."""
        self._buffers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _take(self, use: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (use, dtype, device, stream)
        held = self._buffers.pop(key, None)
        if held is None or held.numel() < elements:
            del held  # before the larger one is made
            held = torch.empty(elements, dtype=dtype, device=device)
            self.allocations += 1
        self._buffers[key] = held
        return held


class Buffers:
    """Where one call's buffers come from; `shared` says whether they are a workspace's."""

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace

    @property
    def shared(self) -> bool:
        return self._workspace is not None

    def empty(self, use: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[elements], not initialised. Two buffers of one call need two names for their `use`."""
        if self._workspace is None:
            return torch.empty(elements, dtype=dtype, device=device)
        return self._workspace._take(use, elements, dtype, device)


@contextmanager
def call_buffers(device: torch.device) -> Iterator[Buffers]:
    """The buffers of one call: the active workspace's where it is free, else the call's own."""
    workspace = _ACTIVE.get()
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if workspace is None or capturing or not workspace._busy.acquire(blocking=False):
        yield Buffers(None)
        return
    try:
        yield Buffers(workspace)
    finally:
        workspace._busy.release()
