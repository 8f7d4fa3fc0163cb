"""Decode attention over pages: GB/s of keys and values, beside a copy's, and beside the libraries that read pages.

    make bench ARGS="benchmarks/test_paged.py"      on a CPU: one small shape
    make bench-gpu                                  with the other kernels

As in test_kernels.py: parity with float64 first, a peer that is missing or refuses is a skipped row with its reason.
"""

import statistics
import time
from typing import Any

import pytest
import torch
from kernel_limits import copy_gb_per_s, device_name
from kernel_peers import Unavailable, captured
from kernel_report import GRAPH, Row, has_targets
from paged_cases import (
    BUSY_ROWS,
    ERRORS,
    PAGED,
    TARGET,
    Paged,
    PagedInputs,
    paged_cases,
    paged_error,
    paged_inputs,
    paged_names,
)
from test_kernels import DEVICE, free_memory, one_line, timed

_HELD: dict[Paged, PagedInputs] = {}


def inputs_of(case: Paged) -> PagedInputs:
    """Inputs that the implementations of a case share; those of the case before are freed first."""
    if case not in _HELD:
        _HELD.clear()
        free_memory()
        _HELD[case] = paged_inputs(case, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, DEVICE)
    return _HELD[case]


def prepare(case: Paged, name: str) -> tuple[Any, Row]:
    """(the call, its row), the call None where nothing may be timed; ours raises instead of failing quietly."""
    inputs = inputs_of(case)
    row = Row(
        op="paged_decode",
        shape=str(case),
        dtype=str(inputs.q.dtype).removeprefix("torch."),
        peer=name,
        status="skipped",
    )
    decode = PAGED[name.removesuffix(GRAPH)]
    try:
        call: Any = lambda: decode(inputs)  # noqa: E731
        if row.graph and not inputs.q.is_cuda:
            raise Unavailable("CUDA graphs need a GPU")
        row.errors = {"output": paged_error(inputs, call())}
        if row.graph:
            call = captured(call, DEVICE)
            row.errors = {"output": paged_error(inputs, call())}
    except Exception as error:
        if row.ours and not isinstance(error, (Unavailable, torch.OutOfMemoryError)):
            raise
        row.reason = one_line(error)
        return None, row
    bound = ERRORS[inputs.q.dtype]
    if not row.errors["output"] <= bound:
        row.status, row.reason = "parity failed", f"output off by {row.errors['output']:.2g} (bound {bound:g})"
        return None, row
    return call, row


def add_figures(row: Row, case: Paged, times: list[float]) -> None:
    """Median, rate, limit and share; the target where this machine has one."""
    ms = statistics.median(times)
    row.status, row.ms, row.fastest_ms, row.rounds, row.unit = "ok", ms, min(times), len(times), "GB/s"
    row.rate, row.limit = case.gigabytes(inputs_of(case).q.dtype) / ms * 1e3, copy_gb_per_s(DEVICE)
    row.share = row.rate / row.limit
    if row.ours and case.rows >= BUSY_ROWS and has_targets(device_name(DEVICE)):
        row.target, row.target_met = TARGET, row.share >= TARGET


@pytest.mark.parametrize(("case", "name"), [(c, n) for c in paged_cases(DEVICE) for n in paged_names()], ids=str)
def test_paged(case: Paged, name: str, benchmark: Any, kernel_run: Any) -> None:
    if benchmark.disabled:
        pytest.skip("--benchmark-disable: nothing to measure")
    if time.monotonic() > kernel_run.deadline:
        kernel_run.not_started += 1
        pytest.skip(f"--bench-seconds: {kernel_run.seconds:.0f} s are over")
    call, row = prepare(case, name)
    kernel_run.rows.append(row)
    if call is None:
        if row.ours and row.status == "parity failed":
            pytest.fail(f"{row.reason}: no figures for a wrong result", pytrace=False)
        pytest.skip(f"{row.status}: {row.reason}")
    add_figures(row, case, timed(call, benchmark))
    benchmark.extra_info.update(share=row.share, rate=row.rate, unit=row.unit, limit=row.limit)
