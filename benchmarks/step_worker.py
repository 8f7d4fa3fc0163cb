"""One side in a process of its own, because peak memory is per process; prints one JSON line.

    python benchmarks/step_worker.py SIDE SETTINGS_JSON

SIDE: rhotrain, trl or plain (step_sides.py). What comes back: `parity` (loss and norm of the gradient, a sample of
which is in the job's file), `update` (seconds of each update of the fixed rollout), `steps` and `phases` (seconds of
each whole step and of its parts), `spans` (phase, start, end on the system's monotonic clock), `peaks` (CUDA: phase ->
bytes of the allocator), `tokens` (mean lengths).
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from step_cases import Case
from torch import Tensor, nn

SAMPLED = 64
"""Every so many-th element of a parameter's gradient is compared."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a side is asked to do. model: folder. steps, updates: how many are timed after one that is not.
    fused_layers: ours alone, as load_model takes it."""

    case: Case
    model: str
    prompts: str
    rollout: str
    gradient: str
    steps: int
    updates: int
    threads: int
    lr: float = 1e-6
    fused_layers: Any = "off"

    @staticmethod
    def of(text: str) -> "Job":
        values = json.loads(text)
        case = Case(**{**values.pop("case"), "on": ()})
        return Job(case=case, **values)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def fixed(self) -> dict[str, Any]:
        """The rollout of `step_cases.write_rollout`."""
        content: dict[str, Any] = json.loads(Path(self.rollout).read_text())
        return content


@dataclass
class Record:
    """What the worker reports."""

    parity: dict[str, Any] = field(default_factory=dict)
    update: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds, and on CUDA the allocator's peak, of what runs inside."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        yield
        if cuda:
            torch.cuda.synchronize()
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())
        end = time.monotonic()
        self.spans.append((name, start, end))
        self.phases.setdefault(name, []).append(end - start)


def save_gradient(model: nn.Module, path: str) -> float:
    """Write a sample of every parameter's gradient by name; returns the norm of the whole."""
    grads: dict[str, Tensor] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.save({name: g.detach().flatten()[::SAMPLED].float().cpu() for name, g in grads.items()}, path)
    return float(torch.stack([g.float().norm() for g in grads.values()]).norm())


def main() -> None:
    from step_sides import SIDES

    side, job = sys.argv[1], Job.of(sys.argv[2])
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    record = Record()
    SIDES[side](job, record)
    print(json.dumps(vars(record)))


if __name__ == "__main__":
    main()
