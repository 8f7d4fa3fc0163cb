"""The clock, and what the machine can do at best: copy and read bandwidth, GEMM peak, the bare GEMMs of a head.

Limits are measured in the run whose figures they stand beside, by the same clock. Tensors of a call should be much
larger than the last cache; on CUDA the cache is flushed before every round anyway.
"""

import functools
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "numpy", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "rhotrain")
FLUSH_BYTES = 2**29
"""Read before every round on CUDA: ten times an H200's L2, four times a B200's."""
SLEEP_CYCLES = 2_000_000
"""About 1 ms of a GPU's clock, which the host has for the launches of a round."""


def milliseconds(
    call: Callable[[], object], device: torch.device, *, budget_s: float = 0.3, least: int = 3, most: int = 30
) -> list[float]:
    """Times of `call`, one per round; as many rounds as fit into the budget, which one call before them decides.

    CUDA: two events around each round, read after all rounds. The host has SLEEP_CYCLES for the round's launches, so
    they do not count unless they take longer or the op itself waits. CPU: the clock of the host. What `call` returns
    is freed within the round.
    """
    clock = _cuda_rounds if device.type == "cuda" else _cpu_rounds
    first = clock(call, 1, device)[0]
    if first > 1e3:  # one more round of a slow peer says enough
        least = 1
    return clock(call, max(least, min(most, int(budget_s * 1e3 / max(first, 1e-3)))), device)


def _cpu_rounds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


@functools.lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> tuple[Tensor, Tensor]:
    """What is read, and the scalar that takes its sum."""
    return torch.zeros(FLUSH_BYTES // 4, device=device), torch.zeros((), device=device)


def _cuda_rounds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    flush, total = _flush_buffer(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, stop in events:
        # Reading evicts the lines that the round before wrote; zeros written here would be dirty lines of their own,
        # written back while the clock runs.
        torch.sum(flush, 0, out=total)
        # The flush takes 0.1 ms, the launches of one call often longer: the GPU would pass `start` and then wait for
        # the host, and a short op's figure would be the host's. Behind the sleep they queue up before `start` is due.
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in events]


def peak_extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Peak of the CUDA allocator during one call over what is allocated now; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _large(device: torch.device, most_bytes: int) -> Tensor:
    """Ones, far more than any cache holds; on CUDA at most a quarter of the free memory."""
    if device.type != "cuda":
        return torch.ones(2**26, device=device)
    torch.cuda.empty_cache()  # what only the allocator holds is free
    return torch.ones(min(most_bytes, torch.cuda.mem_get_info(device)[0] // 4) // 4, device=device)


@functools.lru_cache(maxsize=1)
def copy_gb_per_s(device: torch.device) -> float:
    """Bandwidth of one large copy, bytes read plus bytes written: what shares are shares of."""
    source = _large(device, 2**32)
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), device, least=10)
    return 2 * source.nbytes / statistics.median(times) / 1e6


@functools.lru_cache(maxsize=1)
def read_gb_per_s(device: torch.device) -> float:
    """Bandwidth of one large sum, which writes nothing: more than a copy's where the memory loses time by turning
    from reads to writes."""
    source, total = _large(device, 2**30), torch.zeros((), device=device)  # from 2 GiB on a sum is several launches
    times = milliseconds(lambda: torch.sum(source, 0, out=total), device, least=10)
    return source.nbytes / statistics.median(times) / 1e6


@functools.lru_cache(maxsize=2)
def gemm_tflop_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of one large square GEMM."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = milliseconds(lambda: torch.mm(a, b), device, least=10)
    return 2 * size**3 / statistics.median(times) / 1e9


@functools.lru_cache(maxsize=4)
def head_gemms_ms(rows: int, vocab: int, hidden: int, gemms: int, dtype: torch.dtype, device: torch.device) -> float:
    """The floor of a fused head: nothing but its GEMMs, whole and in the inputs' dtype.

    gemms: 1 for logits = hidden head^T; 3 adds the gradients of hidden and head.
    """
    hidden_NH = torch.randn(rows, hidden, device=device, dtype=dtype)
    head_VH = torch.randn(vocab, hidden, device=device, dtype=dtype)
    logits_NV = torch.empty(rows, vocab, device=device, dtype=dtype)

    def gemms_only() -> None:
        torch.mm(hidden_NH, head_VH.t(), out=logits_NV)
        if gemms == 3:
            torch.mm(logits_NV, head_VH)
            torch.mm(logits_NV.t(), hidden_NH)

    gemms_only()
    return statistics.median(milliseconds(gemms_only, device))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, None where it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Where the figures come from: hardware, settings, versions, commit."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "commit": _output("git", "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if device.type == "cuda":
        query = "--query-gpu=driver_version,power.limit,clocks.max.sm"
        found["cuda"] = torch.version.cuda
        found["capability"] = list(torch.cuda.get_device_capability(device))
        found["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1)
        found["driver, power limit, SM clock"] = _output("nvidia-smi", query, "--format=csv,noheader", "--id=0")
    return found
