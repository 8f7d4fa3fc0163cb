"""CUDA graphs of the decode step: one replay in place of some thousand kernel launches.

A graph is captured for a number of rows (a bucket) and a width of the page tables, when first needed; all of them share
one memory pool. It reads its inputs from buffers of its own. Rows are copied in when a burst begins or rows leave it;
after that a step feeds its tokens back on the device. Padding rows write into the spare page, have length 0, and their
logits are not looked at. (nano-vllm issue 89: padding that wrote into slot 0 spoilt the first row.)

Graphs hold addresses: when a parameter, a buffer or the KV pool lies elsewhere than at the capture, all are captured
anew. A model that cannot be captured (it asks the device for a number) runs without graphs, and `why_not` says so.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rhotrain.rollout.decode import DecodeInputs, DecodeRows, decode_logits
from rhotrain.rollout.pools import Pools

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], Any], Tensor]]

SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 16


def bucket_for(rows: int) -> int:
    """The smallest of 1, 2, 4, 8, 16, 32, 48, ... that holds `rows`."""
    small = next((b for b in SMALL_BUCKETS if b >= rows), None)
    return small or -(-rows // BUCKET_STEP) * BUCKET_STEP


def width_for(pages: int) -> int:
    """The smallest power of two, from 8 on, that holds `pages`."""
    return max(8, 1 << (pages - 1).bit_length())


class CudaCapture:
    """Captures steps into graphs that share one memory pool. The warm-up compiles kernels and sets up libraries."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                out = step()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeInputs
    replay: Callable[[], Any]
    logits: Tensor


class DecodeGraphs:
    """Graphs of `decode_logits` over `pools`.

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
        self._addresses: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._graphs)

    def check_addresses(self) -> None:
        """Drop every graph when something that it reads has moved. Called before a burst."""
        model = self.pools.loaded.model
        tensors = (*model.parameters(), *model.buffers(), *self.pools.keys, *self.pools.values)
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses

    def drop(self) -> None:
        """Free the graphs; they are captured anew when needed."""
        self._graphs.clear()

    def logits(self, rows: DecodeRows) -> Tensor:
        """Logits [B,V] of the rows' newest tokens; valid until the next call."""
        if self.why_not is None:
            graph = self._graph_for(rows)
            if graph is not None:
                graph.replay()
                return graph.logits[: len(rows)]
        return decode_logits(self.pools, rows.inputs)[: len(rows)]

    def _graph_for(self, rows: DecodeRows) -> _Graph | None:
        """The graph whose buffers hold the rows; they are moved there if they lie elsewhere."""
        key = (bucket_for(len(rows)), width_for(rows.inputs.tables.shape[1]))
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
            replay, logits = self.capture(lambda: decode_logits(self.pools, inputs))
        except RuntimeError as error:
            self.why_not = f"{self.pools.loaded.architecture} cannot be captured in a CUDA graph: {error}"
            self.drop()
            warnings.warn(f"{self.why_not}; decoding goes on without graphs, slower", stacklevel=2)
            return None
        self.captures += 1
        self.seconds += perf_counter() - start
        return _Graph(inputs, replay, logits)

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
