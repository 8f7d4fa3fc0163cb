"""CUDA graphs of the decode step: one replay in place of some thousand kernel launches.

A graph is captured for a number of rows (a bucket) and a width of the page tables, when first needed; all of them share
one memory pool. It reads its inputs from buffers of its own. Rows are copied in when a burst begins or rows leave it;
after that a step feeds its tokens back on the device. Padding rows write into the spare page, have length 0, and what
comes out for them is not looked at. (nano-vllm issue 89: padding that wrote into slot 0 spoilt the first row.) A graph
ends at the hidden states: the head is one product outside of it, so no graph holds a buffer of logits.

Graphs hold addresses: when a parameter, a buffer or the KV pool lies elsewhere than at the capture, all are captured
anew. A model that cannot be captured (it waits for the device) runs without graphs, and `why_not` says so.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.flash_calls import waiting_raises
from rhotrain.rollout.decode import DecodeInputs, DecodeRows, decode_hidden
from rhotrain.rollout.pools import Pools

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], Any], Tensor]]

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64)
BUCKET_STEP = 32
"""Beyond the last bucket. Each capture costs some tenths of a second, and a padding row about its share of the KV
reads."""


def bucket_for(rows: int) -> int:
    """The smallest of 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, ... that holds `rows`."""
    small = next((b for b in BUCKETS if b >= rows), None)
    return small or -(-rows // BUCKET_STEP) * BUCKET_STEP


def width_for(pages: int) -> int:
    """The smallest power of two, from 8 on, that holds `pages`."""
    return max(8, 1 << (pages - 1).bit_length())


class CudaCapture:
    """Captures steps into graphs that share one memory pool, on a stream of its own.

    Warmed up on that stream: kernels are compiled, and the libraries' workspaces lie outside of the graphs' pool. A
    step that waits for the device is refused in the warm-up, for a capture that fails leaves PyTorch's allocator in
    disorder.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None

    def reset(self) -> None:
        """All graphs are gone: the next one starts a new pool, for one without graphs cannot be captured into."""
        self.pool = None

    def __call__(self, step: Step) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device):
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            # The outer context puts the current stream back even when ending a capture fails.
            with torch.cuda.stream(self.stream):
                step()
                with waiting_raises(self.device):
                    step()
                # Other threads, rewards say, may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    out = step()
            torch.cuda.current_stream().wait_stream(self.stream)
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeInputs
    replay: Callable[[], Any]
    hidden: Tensor


class DecodeGraphs:
    """Graphs of `decode_hidden` over `pools`.

    capture: turns a step into (replay, its output buffer). captures: how many there were; seconds: the time they took.
    why_not: why no graph is used, None while they are.
    """

    def __init__(self, pools: Pools, capture: Capture) -> None:
        self.pools = pools
        self.capture = capture
        self.captures = 0
        self.seconds = 0.0
        self.why_not: str | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._too_large: set[tuple[int, int]] = set()
        self._addresses: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._graphs)

    def check_addresses(self) -> None:
        """Drop every graph when something that it reads has moved. Called once per call of the engine, during which
        the weights stay where they are."""
        model = self.pools.loaded.model
        tensors = (*model.parameters(), *model.buffers(), *self.pools.keys, *self.pools.values)
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses

    def drop(self) -> None:
        """Free the graphs; they are captured anew when needed."""
        self._graphs.clear()
        self._too_large.clear()
        reset = getattr(self.capture, "reset", None)
        if reset is not None:
            reset()

    def logits(self, rows: DecodeRows) -> Tensor:
        """Logits [B,V] of the rows' newest tokens."""
        graph = self._graph_for(rows) if self.why_not is None else None
        if graph is None:
            return self.pools.logits(decode_hidden(self.pools, rows.inputs)[: len(rows)])
        graph.replay()
        return self.pools.logits(graph.hidden[: len(rows)])

    def _graph_for(self, rows: DecodeRows) -> _Graph | None:
        """The graph whose buffers hold the rows; they are moved there if they lie elsewhere."""
        key = (bucket_for(len(rows)), width_for(rows.inputs.tables.shape[1]))
        if key in self._too_large:
            return None
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, rows)
            if graph is None:
                return None
            self._graphs[key] = graph
        if rows.inputs is not graph.inputs:
            self._fill(graph.inputs, rows)
            rows.inputs = graph.inputs
        return graph

    def _capture(self, key: tuple[int, int], rows: DecodeRows) -> _Graph | None:
        """Capture with the rows' own values: what the warm-up writes is what the replay writes again."""
        start = perf_counter()
        bucket, width = key
        like = rows.inputs
        inputs = DecodeInputs(
            like.ids.new_zeros(bucket),
            like.cached.new_zeros(bucket),
            like.live.new_zeros(bucket),
            like.tables.new_zeros(bucket, width),
        )
        self._fill(inputs, rows)
        try:
            replay, hidden = self.capture(lambda: decode_hidden(self.pools, inputs))
        except torch.OutOfMemoryError:
            self._too_large.add(key)
            warnings.warn(
                f"no memory for a CUDA graph of {bucket} rows, they run without; lower kv_memory_gib or max_running",
                stacklevel=2,
            )
            return None
        except RuntimeError as error:
            if _is_fault_of_the_device(error):
                raise
            self.why_not = f"{self.pools.loaded.architecture} cannot be captured in a CUDA graph: {error}"
            self.drop()
            warnings.warn(f"{self.why_not}; decoding goes on without graphs, slower", stacklevel=2)
            return None
        self.captures += 1
        self.seconds += perf_counter() - start
        return _Graph(inputs, replay, hidden)

    def _fill(self, inputs: DecodeInputs, rows: DecodeRows) -> None:
        """Copy the rows in; what is left of the buffers becomes padding."""
        count, width = len(rows), rows.inputs.tables.shape[1]
        inputs.tables.fill_(self.pools.spare_page)
        inputs.tables[:count, :width].copy_(rows.inputs.tables[:count])
        for buffer, new in (
            (inputs.ids, rows.inputs.ids),
            (inputs.cached, rows.inputs.cached),
            (inputs.live, rows.inputs.live),
        ):
            buffer[:count].copy_(new[:count])
            buffer[count:].zero_()


def _is_fault_of_the_device(error: RuntimeError) -> bool:
    """True for errors of CUDA that have nothing to do with capturing, a device-side assert say."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind) and "captur" not in str(error)
