"""Options of the kernel benchmarks, and their table at the end of the run."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_limits import copy_gb_per_s, describe_machine, device_name, gemm_tflop_per_s, read_gb_per_s
from kernel_report import Row, compare_with_peers, default_path, summary, table, write_json

HERE = pytest.StashKey["KernelRun"]()


class KernelRun:
    """What one session measures: where, until when, the rows so far, and how many it had no time for."""

    def __init__(self, seconds: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.deadline = time.monotonic() + seconds
        self.seconds = seconds
        self.rows: list[Row] = []
        self.not_started = 0

    @property
    def gemm_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def limits(self) -> dict[str, float]:
        return {
            "copy GB/s": copy_gb_per_s(self.device),
            "read GB/s": read_gb_per_s(self.device),
            "gemm TFLOP/s": gemm_tflop_per_s(self.gemm_dtype, self.device),
        }


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    group.addoption(
        "--bench-json",
        metavar="PATH",
        default=os.environ.get("RHOTRAIN_BENCH_JSON"),
        help="write the kernel rows to PATH; `auto` is benchmarks/results/kernels-<device>.json",
    )
    group.addoption(
        "--bench-seconds",
        metavar="S",
        type=float,
        default=450.0,
        help="start no further kernel measurement after S seconds; the important ones come first (default 450)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RHOTRAIN_TEST_GPU") == "1" and not torch.cuda.is_available():
        raise pytest.UsageError("RHOTRAIN_TEST_GPU=1, but torch sees no GPU here; on a CPU: make bench")
    config.stash[HERE] = KernelRun(float(config.getoption("--bench-seconds") or 0.0))


@pytest.fixture(scope="session")
def kernel_run(pytestconfig: pytest.Config) -> KernelRun:
    return pytestconfig.stash[HERE]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash[HERE]
    if not run.rows:
        return
    compare_with_peers(run.rows)
    limits = run.limits()
    terminalreporter.section("kernels, beside what the machine reaches")
    terminalreporter.write_line(
        f"{device_name(run.device)}: " + ", ".join(f"{name} {value:.4g}" for name, value in limits.items())
    )
    terminalreporter.write_line(
        "shares in GB/s are of the copy (reads and writes); an op that only reads may exceed it, up to the read"
    )
    for line in table(run.rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line(summary(run.rows))
    if run.not_started:
        terminalreporter.write_line(f"not started: {run.not_started}, as --bench-seconds {run.seconds:g} were over")
    wanted = config.getoption("--bench-json")
    if wanted:
        path = default_path(device_name(run.device)) if wanted == "auto" else Path(wanted)
        write_json(path, describe_machine(run.device), limits, run.rows, run.not_started)
        terminalreporter.write_line(f"written to {path}")
