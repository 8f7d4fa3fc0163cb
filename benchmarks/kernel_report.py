"""One row per op, shape and implementation: its figure with the physical limit beside it, as a table and as JSON.

A row that was not measured says why. A row whose parity check failed has no figures at all.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

OURS = "rhotrain"
GRAPH = ", CUDA graph"
"""Ends the name of an implementation that is replayed as a CUDA graph."""
RESULTS = Path(__file__).parent / "results"

Status = Literal["ok", "skipped", "parity failed"]


@dataclass(kw_only=True, slots=True)
class Row:
    """ms: median. rate: GB/s of the bytes that must move, or TFLOP/s. limit: what the machine reaches, same unit.

    share = rate / limit. peak_mib: memory over the inputs (CUDA). errors: of the parity check, against float64.
    target: the share that is aimed at on an H200. reachable: the share at which everything runs at its limit, for a
    head whose logits also move (`reachable_share`). fastest_peer, times_faster: filled in by `compare_with_peers`.
    """

    op: str
    shape: str
    dtype: str
    peer: str
    status: Status
    reason: str = ""
    ms: float | None = None
    fastest_ms: float | None = None
    rounds: int | None = None
    rate: float | None = None
    unit: str = ""
    limit: float | None = None
    share: float | None = None
    peak_mib: float | None = None
    errors: dict[str, float] | None = None
    target: float | None = None
    target_met: bool | None = None
    reachable: float | None = None
    fastest_peer: str | None = None
    times_faster: float | None = None

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.ms is not None):
            raise ValueError(
                f"Row.ms: {self.ms} with status {self.status!r}; only a row that passed parity has figures"
            )

    @property
    def ours(self) -> bool:
        return self.peer.startswith(OURS)

    @property
    def graph(self) -> bool:
        return self.peer.endswith(GRAPH)

    def rivals(self, other: "Row") -> bool:
        """True when both do the same in the same way, one of them ours: a replay is compared with replays."""
        if self.ours == other.ours or self.graph != other.graph:
            return False
        return (self.op, self.shape, self.dtype) == (other.op, other.shape, other.dtype)


def has_targets(device: str) -> bool:
    """The targets are shares of what an H200 reaches; other machines have none."""
    return "H200" in device


def reachable_share(gemms_ms: float, logits: int, logit_bytes: int, copy_gb_per_s: float) -> float:
    """The most that the GEMMs' share of the time can be when the logits also move `logit_bytes` each, at the speed of
    a copy and not at the same time."""
    return gemms_ms / (gemms_ms + logit_bytes * logits / copy_gb_per_s / 1e6)


def compare_with_peers(rows: list[Row]) -> None:
    """Beside each figure of ours the fastest peer that does the same, and how many times its time is ours."""
    for mine in rows:
        if not mine.ours or mine.ms is None:
            continue
        timed = [(r.ms, r.peer) for r in rows if r.ms is not None and mine.rivals(r)]
        if timed:
            ms, mine.fastest_peer = min(timed)
            mine.times_faster = ms / mine.ms


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of text, rows grouped by op and shape; ours first in each group."""
    header = ("op", "shape", "dtype", "by", "ms", "rate", "limit", "share", "peak MiB", "target", "reachable", "note")
    lines: list[tuple[str, ...]] = [header]
    order = {(r.op, r.shape): i for i, r in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda r: (order[r.op, r.shape], not r.ours)):
        lines.append((row.op, row.shape, row.dtype, row.peer, *_figures(row), _note(row)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[-1]]).rstrip()


def _figures(row: Row) -> tuple[str, ...]:
    if row.ms is None or row.rate is None or row.limit is None or row.share is None:
        return ("-",) * 7
    peak = "-" if row.peak_mib is None else f"{row.peak_mib:.0f}"
    target = "-" if row.target is None else f"{row.target:.0%} {'met' if row.target_met else 'MISSED'}"
    return (
        f"{row.ms:.3f}",
        f"{row.rate:.4g} {row.unit}",
        f"{row.limit:.4g} {row.unit}",
        f"{row.share:.0%}",
        peak,
        target,
        "-" if row.reachable is None else f"{row.reachable:.0%}",
    )


def _note(row: Row) -> str:
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    if row.times_faster is None:
        return ""
    return f"{row.times_faster:.2f}x as fast as {row.fastest_peer}"


def summary(rows: list[Row]) -> str:
    """One line: how many rows, how many targets met, how often every peer was slower."""
    by_status = {s: sum(r.status == s for r in rows) for s in ("ok", "skipped", "parity failed")}
    parts = [", ".join(f"{count} {status}" for status, count in by_status.items())]
    targets = [r.target_met for r in rows if r.target is not None and r.target_met is not None]
    if targets:
        parts.append(f"targets met: {sum(targets)} of {len(targets)}")
    beside = [r.times_faster for r in rows if r.times_faster is not None]
    if beside:
        parts.append(f"faster than every peer measured: {sum(x > 1.0 for x in beside)} of {len(beside)}")
    return "; ".join(parts)


def default_path(device: str) -> Path:
    """benchmarks/results/kernels-<device>.json."""
    return RESULTS / f"kernels-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def write_json(
    path: Path, machine: dict[str, Any], limits: dict[str, float], rows: list[Row], not_started: int = 0
) -> None:
    """Machine, limits and rows, to six digits; fields that say nothing are left out. not_started: measurements that
    the time was over for."""
    kept = [{k: v for k, v in asdict(row).items() if v is not None and v != ""} for row in rows]
    content = {
        "benchmark": "benchmarks/test_kernels.py",
        "machine": machine,
        "limits": limits,
        "not_started": not_started,
        "rows": kept,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_six_digits(content), indent=1) + "\n")


def _six_digits(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _six_digits(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_six_digits(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
