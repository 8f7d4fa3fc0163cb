"""Every kernel beside the peers and the hardware's limit; parity with float64 is checked before anything is timed.

    make bench ARGS="benchmarks/test_kernels.py"      on a CPU: the references, small shapes, 3 minutes
    make bench-gpu                                    on an NVIDIA GPU: the kernels, real shapes, 8 minutes, one JSON

What is measured: kernel_cases.py; by whom: kernel_peers.py; the clock and the limits: kernel_limits.py. A peer that is
missing, fails, runs out of memory or computes something else is a skipped row with its reason; rhotrain's own kernels
fail the run. Shares: for logits, bytes that must move / time, of the bandwidth of a copy (which an op that only reads
may exceed: the bandwidth of reads is printed too); for heads, the time of the bare GEMMs of the same shape and dtype /
time, and beside the target what is left of it at most when the logits move at the speed of a copy.
"""

import gc
import statistics
import time
from typing import Any

import pytest
import torch
from kernel_cases import Inputs, Op, Shape, case_dtype, cases, make_inputs, parity_errors, parity_failures
from kernel_limits import copy_gb_per_s, device_name, head_gemms_ms, milliseconds, peak_extra_mib
from kernel_peers import OURS, PEERS, Call, Unavailable, implementations, our_backend
from kernel_report import Row, has_targets, reachable_share

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ordered_cases() -> list[tuple[Op, Shape, str]]:
    """CPU: all implementations of a case side by side. GPU: ours at every shape first, then the peers, because the
    time may run out."""
    every = [(op, shape, name) for op, shape in cases(DEVICE) for name in implementations(op)]
    return sorted(every, key=lambda case: not case[2].startswith(OURS)) if DEVICE.type == "cuda" else every


_HELD: dict[tuple[Op, Shape], Inputs] = {}


def inputs_of(op: Op, shape: Shape) -> Inputs:
    """The inputs of a case, which its implementations share; those of the case before are freed first."""
    if (op, shape) not in _HELD:
        _HELD.clear()
        free_memory()
        if DEVICE.type == "cuda" and inputs_bytes(op, shape) > torch.cuda.mem_get_info(DEVICE)[0]:
            raise Unavailable("does not fit into free memory")
        _HELD[op, shape] = make_inputs(op, shape, DEVICE)
    return _HELD[op, shape]


def inputs_bytes(op: Op, shape: Shape) -> int:
    """The inputs, as much again for gradients, and room for a few chunks of float32."""
    elements = shape.vocab * shape.hidden + shape.rows * shape.hidden if op.head else shape.rows * shape.vocab
    return 2 * elements * case_dtype(op, DEVICE).itemsize + 2**33


def free_memory() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def prepare(op: Op, shape: Shape, name: str) -> tuple[Call | None, Row]:
    """(the call, its row), the call None where nothing may be timed; ours raises instead of failing quietly."""
    dtype = str(case_dtype(op, DEVICE)).removeprefix("torch.")
    row = Row(op=op.name, shape=str(shape), dtype=dtype, peer=name, status="skipped")
    try:
        inputs = inputs_of(op, shape)
        if row.ours:
            row.peer = name.replace(OURS, f"{OURS} ({our_backend(inputs)})")
        call = PEERS[name](inputs)
        row.errors = parity_errors(inputs, call())
    except (Unavailable, ImportError, torch.OutOfMemoryError) as error:
        row.reason = one_line(error)
        return None, row
    except Exception as error:
        if row.ours:
            raise
        row.reason = one_line(error)
        return None, row
    failures = parity_failures(inputs, row.errors, ours=row.ours)
    if failures:
        row.status, row.reason = "parity failed", "; ".join(failures)
        return None, row
    return call, row


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def add_figures(row: Row, op: Op, shape: Shape, times: list[float]) -> None:
    """Median, rate, limit and share; targets where this machine has them."""
    ms, dtype, floor_ms = statistics.median(times), case_dtype(op, DEVICE), 0.0
    if op.head:
        floor_ms = head_gemms_ms(shape.rows, shape.vocab, shape.hidden, op.gemms, dtype, DEVICE)
        work, row.unit = 2 * op.gemms * shape.rows * shape.vocab * shape.hidden / 1e9, "TFLOP/s"
        row.limit = work / floor_ms
    else:
        row.limit = copy_gb_per_s(DEVICE)
        work, row.unit = op.passes * shape.rows * shape.vocab * dtype.itemsize / 1e6, "GB/s"
    row.status, row.ms, row.fastest_ms, row.rounds, row.rate = "ok", ms, min(times), len(times), work / ms
    row.share = row.rate / row.limit
    if row.ours and op.target is not None and has_targets(device_name(DEVICE)):
        row.target, row.target_met = op.target, row.share >= op.target
        if op.logit_bytes:
            row.reachable = reachable_share(floor_ms, shape.rows * shape.vocab, op.logit_bytes, copy_gb_per_s(DEVICE))


@pytest.mark.parametrize(("op", "shape", "name"), ordered_cases(), ids=str)
def test_kernel(op: Op, shape: Shape, name: str, benchmark: Any, kernel_run: Any) -> None:
    if benchmark.disabled:
        pytest.skip("--benchmark-disable: nothing to measure")
    if time.monotonic() > kernel_run.deadline:
        kernel_run.not_started += 1
        pytest.skip(f"--bench-seconds: {kernel_run.seconds:.0f} s are over")
    call, row = prepare(op, shape, name)
    kernel_run.rows.append(row)
    if call is None:
        free_memory()
        if row.ours and row.status == "parity failed":
            pytest.fail(f"{row.reason}: no figures for a wrong result", pytrace=False)
        pytest.skip(f"{row.status}: {row.reason}")
    try:
        if not row.graph:  # a replay allocates nothing: its memory was taken at the capture
            row.peak_mib = peak_extra_mib(call, DEVICE)
        add_figures(row, op, shape, timed(call, benchmark))
    except torch.OutOfMemoryError as error:
        row.reason = one_line(error)
    if row.status != "ok":
        pytest.skip(row.reason)
    benchmark.extra_info.update(share=row.share, rate=row.rate, unit=row.unit, limit=row.limit)


def timed(call: Call, benchmark: Any) -> list[float]:
    """Milliseconds per round. CPU: pytest-benchmark's own clock. CUDA: events; pytest-benchmark then shows one call
    with its launch and its end, which should be a little more."""
    if DEVICE.type == "cpu":
        benchmark.pedantic(call, rounds=3, iterations=1, warmup_rounds=1)
        return [seconds * 1e3 for seconds in benchmark.stats.stats.data]
    times = milliseconds(call, DEVICE)

    def whole_call() -> None:
        call()
        torch.cuda.synchronize(DEVICE)

    benchmark.pedantic(whole_call, rounds=1, iterations=1)
    return times
