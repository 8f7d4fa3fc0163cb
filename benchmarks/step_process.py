"""A side's process from outside: its result, its memory by phase, and what other processes took meanwhile."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
from rollout_limits import busy_seconds
from step_worker import Job

WORKER = Path(__file__).with_name("step_worker.py")
SAMPLE_SECONDS = 0.05
SCAN_EVERY = 20
"""Children are looked for in one sample of so many: a scan of all processes takes longer than all else here."""


class SideFailed(RuntimeError):
    """The last line of what the side wrote."""


def run_side(side: str, job: Job) -> dict[str, Any]:
    """What the worker prints, with `peaks` by phase (bytes; on a CPU the largest resident set, and what its children
    hold for themselves, sampled every 50 ms) and `others` (share of the CPU that processes outside took)."""
    values = asdict(job)
    values["case"].pop("on")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        busy, start = busy_seconds(), time.perf_counter()
        process = subprocess.Popen([sys.executable, str(WORKER), side, json.dumps(values)], stdout=out, stderr=errors)
        try:
            samples, own = sample(process)
        finally:
            process.kill()  # it has ended, unless this run was interrupted
            process.wait()
        elapsed = time.perf_counter() - start
        others = max(0.0, busy_seconds() - busy - own) / (elapsed * (psutil.cpu_count() or 1))
        out.seek(0)
        errors.seek(0)
        lines, complaint = out.read().strip().splitlines(), errors.read().strip().splitlines()
    if process.returncode != 0 or not lines:
        raise SideFailed(complaint[-1][:160] if complaint else f"exit status {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    if not result["peaks"]:
        result["peaks"] = peaks(samples, result["spans"])
    result["others"] = min(1.0, others)
    return result


def sample(process: "subprocess.Popen[Any]") -> tuple[list[tuple[float, int]], float]:
    """(monotonic time, bytes) until the process ends, and the CPU seconds of it and of this sampler."""
    found: list[tuple[float, int]] = []
    cpu, mine = 0.0, time.process_time()
    family = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    while process.poll() is None:
        try:
            if len(found) % SCAN_EVERY == 0:
                children = family.children(recursive=True)
            own = sum(child.memory_full_info().uss for child in children)
            found.append((time.monotonic(), family.memory_info().rss + own))
            cpu = max(cpu, sum(sum(member.cpu_times()[:2]) for member in (family, *children)))
        except psutil.Error:  # one of them has just ended
            children = []
            found.append(found[-1] if found else (time.monotonic(), 0))
        time.sleep(SAMPLE_SECONDS)
    return found, cpu + time.process_time() - mine


def peaks(samples: list[tuple[float, int]], spans: list[tuple[str, float, float]]) -> dict[str, int]:
    """The largest sample in the spans of each phase; a phase that ended between two samples has the next one."""
    found: dict[str, int] = {}
    for name, start, end in spans:
        inside = [size for at, size in samples if start <= at <= end]
        inside = inside or [next((size for at, size in samples if at > end), 0)]
        found[name] = max(found.get(name, 0), *inside)
    return found
