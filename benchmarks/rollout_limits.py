"""The least that a workload takes on this machine, and the clocks: what figures of a rollout stand beside.

The least work: every prompt is run once, however many completions it has; every new token but a row's last is run once;
the head is applied where a token is drawn. On a CPU that is FLOP, held against the fastest large GEMM that this process
reaches. On CUDA the prompts are FLOP too, but decoding is bytes: all weights once a step, as many steps as the longest
completion, and the K/V of every row (a group's prompt once), held against the bandwidth of a copy. Attention windows
are not considered: the models here have none.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from kernel_limits import copy_gb_per_s, gemm_tflop_per_s, milliseconds
from rollout_cases import Batch

from rhotrain.model.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a token costs. body, head: parameters that multiply it. score: multiplications per token of context, all
    layers, queries with keys and weights with values. kv_bytes: K/V of one token. itemsize: bytes of a parameter."""

    body: int
    head: int
    score: int
    kv_bytes: int
    itemsize: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> "ModelShape":
        """Counted on the model itself; its embedding only looks up, unless it is the head."""
        embedding = loaded.model.get_input_embeddings().weight  # type: ignore[operator]
        head = loaded.head.weight
        tables = {id(embedding), id(head)}
        body = sum(p.numel() for p in loaded.body.parameters() if p.dim() > 1 and id(p) not in tables)
        heads = loaded.config.num_attention_heads
        kv = loaded.kv_shapes
        return cls(
            body=body,
            head=head.numel(),
            score=sum(heads * (key + value) for _, key, value in kv),
            kv_bytes=sum(kv_heads * (key + value) for kv_heads, key, value in kv) * head.element_size(),
            itemsize=head.element_size(),
        )


@dataclass(frozen=True, slots=True)
class LeastWork:
    """FLOP of the prompts and of decoding; bytes that decoding reads."""

    prefill_flop: float
    decode_flop: float
    decode_bytes: float

    @classmethod
    def of(cls, shape: ModelShape, batch: Batch) -> "LeastWork":
        prefill = decode = kv_read = 0
        for prompt, new in zip(batch.prompts, batch.new_tokens):
            length, fed = len(prompt), new - 1
            # The n-th token attends to n: sums of 1..length, and of length+1..length+fed for every member.
            prefill += length * shape.body + shape.score * length * (length + 1) // 2 + shape.head
            own = fed * (fed + 1) // 2
            decode += batch.group * (fed * (shape.body + shape.head) + shape.score * (fed * length + own))
            kv_read += fed * length + batch.group * own
        steps = max(batch.new_tokens) - 1
        weights = (shape.body + shape.head) * shape.itemsize
        return cls(2.0 * prefill, 2.0 * decode, float(steps * weights + kv_read * shape.kv_bytes))


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the machine reaches: a large GEMM, FLOP/s, and on CUDA a copy, byte/s; 0 where FLOP are what counts."""

    flop_per_s: float
    bytes_per_s: float = 0.0

    def seconds(self, work: LeastWork) -> tuple[float, float]:
        """The least seconds of (prompts, decoding)."""
        prefill = work.prefill_flop / self.flop_per_s
        if self.bytes_per_s:
            return prefill, work.decode_bytes / self.bytes_per_s
        return prefill, work.decode_flop / self.flop_per_s

    def limits(self) -> dict[str, float]:
        """For the report."""
        found = {"gemm GFLOP/s": self.flop_per_s / 1e9}
        return found | ({"copy GB/s": self.bytes_per_s / 1e9} if self.bytes_per_s else {})


def measure_roofline(device: torch.device) -> Roofline:
    """Measured now, in this process."""
    if device.type == "cuda":
        return Roofline(1e12 * gemm_tflop_per_s(torch.bfloat16, device), 1e9 * copy_gb_per_s(device))
    return Roofline(cpu_flop_per_s())


@functools.lru_cache(maxsize=1)
def cpu_flop_per_s() -> float:
    """The fastest of some large float32 GEMMs: PyTorch's own and, where it is there, oneDNN's with a packed weight.

    The best round of the best shape: a limit should be one. oneDNN is up to twice as fast here, so the limit would be
    passed if PyTorch's own were all.
    """
    device, rows, width, height = torch.device("cpu"), 512, 1536, 3072
    x, weight = torch.randn(rows, width), torch.randn(height, width)
    calls: list[Callable[[], object]] = [lambda: torch.nn.functional.linear(x, weight)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    best_ms = min(min(milliseconds(call, device, least=5)) for call in calls)
    square = gemm_tflop_per_s(torch.float32, device) * 1e12
    return max(square, 2e3 * rows * width * height / best_ms)


class StepClock:
    """Notes the time at every step; the figures are differences."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.ticks: list[float] = []

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    @property
    def first_seconds(self) -> float | None:
        """Until the first tick."""
        return self.ticks[0] - self.start if self.ticks else None

    @property
    def rest_seconds(self) -> float | None:
        """From the first tick to the last."""
        return self.ticks[-1] - self.ticks[0] if self.ticks else None

    def median_ms(self) -> float | None:
        """Between the ticks."""
        return median_gap_ms([self.ticks])


class DecodeClock:
    """Median time of the steps that ran no prompt."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = [[]]
        self.prefilled = 0

    def tick(self, prefilled: int) -> None:
        """A step has ended, and so many prompt tokens were run so far: if it ran some, it begins a new stretch."""
        if prefilled != self.prefilled:
            self.runs.append([])
            self.prefilled = prefilled
        self.runs[-1].append(time.perf_counter())

    def median_ms(self) -> float | None:
        return median_gap_ms(self.runs)


def median_gap_ms(timestamps: list[list[float]]) -> float | None:
    """Median milliseconds between neighbours in each list of seconds; None where there are none."""
    gaps = [b - a for ticks in timestamps for a, b in pairwise(ticks)]
    return 1e3 * statistics.median(gaps) if gaps else None


class Watch:
    """What `watched` saw. peak_mib: the most memory that was held inside over what was held before; None where nobody
    counts it. others: share of the machine's CPU time that other processes took, and the hypervisor; None on CUDA."""

    peak_mib: float | None = None
    others: float | None = None


@contextmanager
def watched(device: torch.device) -> Iterator[Watch]:
    """CUDA: peak of the allocator. CPU: of the resident set, on Linux, where a process may reset its high-water mark;
    for information only, as an allocator that kept memory from the round before shows less."""
    found = Watch()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        return
    reset = _reset_high_water()
    before, busy, own = psutil.Process().memory_info().rss, busy_seconds(), time.process_time()
    start = time.perf_counter()
    yield found
    available = (time.perf_counter() - start) * (psutil.cpu_count() or 1)
    foreign = busy_seconds() - busy - (time.process_time() - own)
    found.others = min(1.0, max(0.0, foreign / available))
    peak = _high_water_bytes() if reset else None
    if peak is not None:
        found.peak_mib = max(0.0, (peak - before) / 2**20)


def busy_seconds() -> float:
    """CPU time of all processes and of other machines on this one. A second busy process makes a GEMM of all cores up
    to ten times slower, as each waits for the slowest: figures without this say little."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes() -> int | None:
    """VmHWM of this process."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
