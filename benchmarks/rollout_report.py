"""One row per workload and side: output tok/s and what stands beside it, as a table and as JSON."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kernel_report import default_path
from rollout_cases import Batch, Targets
from rollout_limits import LeastWork, Roofline
from rollout_peers import Run

DISTURBED = 0.05
"""Share of the CPU that other processes may take before a row says that they did."""

Status = Literal["ok", "skipped"]


@dataclass(kw_only=True, slots=True)
class Row:
    """Medians over the rounds of one side; a row that was not measured says why.

    tok_per_s: output tokens by seconds, prompts included. seconds: every round. times_faster: on a peer's row, how many
    times ours is as fast, the median of the rounds' ratios. floor_s: least seconds on this machine; share: of the
    roofline, floor_s by seconds; decode_share: the same of decoding alone, where the side tells the two apart.
    pack_s: per round; capture_s: of all rounds and the warm-up. peak_mib: over what was held before the run; kv_mib:
    memory for K/V that was taken before. others: most that other processes took of the CPU in a round. logprob_error:
    ours, largest difference from transformers' own logits. target, least: for times_faster of generate's row, for
    tok_per_s and share of ours.
    """

    workload: str
    by: str
    status: Status = "skipped"
    reason: str = ""
    rows: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    seconds: list[float] | None = None
    tok_per_s: float | None = None
    times_faster: float | None = None
    decode_ms: float | None = None
    prefill_s: float | None = None
    pack_s: float | None = None
    capture_s: float | None = None
    floor_s: float | None = None
    share: float | None = None
    decode_share: float | None = None
    peak_mib: float | None = None
    kv_mib: float | None = None
    others: float | None = None
    logprob_error: float | None = None
    target: float | None = None
    least: float | None = None
    target_share: float | None = None
    verdict: str = ""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.tok_per_s is not None):
            raise ValueError(f"Row.tok_per_s: {self.tok_per_s} with status {self.status!r}; needed if ok, else None")


def measured(
    workload: str, by: str, batch: Batch, runs: Sequence[Run], work: LeastWork, roofline: Roofline, extra: Sequence[Run]
) -> Row:
    """The row of a side. extra: runs that are not timed (a warm-up), but may have captured graphs."""
    seconds = [run.seconds for run in runs]
    prefill, decode = roofline.seconds(work)
    row = Row(
        workload=workload,
        by=by,
        status="ok",
        rows=batch.rows,
        prompt_tokens=batch.prompt_tokens,
        output_tokens=batch.output_tokens,
        seconds=seconds,
        tok_per_s=batch.output_tokens / statistics.median(seconds),
        decode_ms=_median(run.decode_ms for run in runs),
        prefill_s=_median(run.prefill_seconds for run in runs),
        pack_s=_median(run.pack_seconds for run in runs),
        capture_s=_sum(run.capture_seconds for run in (*extra, *runs)),
        floor_s=prefill + decode,
        share=(prefill + decode) / statistics.median(seconds),
        peak_mib=_median(run.peak_mib for run in runs),
        kv_mib=_median(run.kv_mib for run in runs),
        others=max((run.others for run in runs if run.others is not None), default=None),
    )
    decode_s = _median(run.decode_seconds for run in runs)
    row.decode_share = decode / decode_s if decode_s else None
    return row


def _median(values: Iterator[float | None] | Any) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _sum(values: Iterator[float | None] | Any) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def compare(ours: Row, peer: Row) -> None:
    """Fill in how many times ours is as fast, round by round: speed drifts, so only neighbours in time are compared."""
    if ours.seconds and peer.seconds:
        peer.times_faster = statistics.median(b / a for a, b in zip(ours.seconds, peer.seconds))


def judge(ours: Row, rows: Sequence[Row], targets: Targets) -> None:
    """Write the targets and whether they were met."""
    for row in rows:
        if row.by == "generate" and row.times_faster is not None and targets.times_generate is not None:
            row.target, row.least = targets.times_generate, targets.least
            row.verdict = _verdict(row.times_faster, row.target, row.least)
    if ours.tok_per_s is not None and targets.tok_per_s is not None:
        ours.target, ours.target_share = targets.tok_per_s, targets.share
        met = ours.tok_per_s >= ours.target and (ours.share or 0.0) >= (ours.target_share or 0.0)
        ours.verdict = "met" if met else "MISSED"


def _verdict(value: float, target: float, least: float | None) -> str:
    if value >= target:
        return "met"
    return "MISSED, but not below the least" if least is not None and value >= least else "MISSED"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of text; columns are aligned."""
    header = (
        "workload",
        "by",
        "tok/s",
        "ours is",
        "decode ms",
        "prefill s",
        "pack s",
        "capture s",
        "roofline",
        "decode only",
        "peak MiB",
        "K/V MiB",
        "note",
    )
    lines = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        text = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        text += [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:])]
        yield "  ".join([*text, line[-1]]).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    note = f"{row.status}: {row.reason}" if row.status != "ok" else _note(row)

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return (
        row.workload,
        row.by,
        show(row.tok_per_s, "{:.0f}"),
        show(row.times_faster, "{:.2f}x"),
        show(row.decode_ms, "{:.2f}"),
        show(row.prefill_s, "{:.3f}"),
        show(row.pack_s, "{:.3f}"),
        show(row.capture_s, "{:.3f}"),
        show(row.share, "{:.0%}"),
        show(row.decode_share, "{:.0%}"),
        show(row.peak_mib, "{:.0f}"),
        show(row.kv_mib, "{:.0f}"),
        note,
    )


def _note(row: Row) -> str:
    disturbed = row.others is not None and row.others > DISTURBED
    warning = f"DISTURBED: other processes took {row.others:.0%} of the CPU" if disturbed else ""
    return "; ".join(text for text in (_aim(row), warning) if text)


def _aim(row: Row) -> str:
    if row.target is None:
        return ""
    unit = "x" if row.times_faster is not None else " tok/s"
    least = "" if row.least is None else f", at least {row.least:g}{unit}"
    share = "" if row.target_share is None else f" and {row.target_share:.0%} of the roofline"
    return f"target {row.target:g}{unit}{least}{share}: {row.verdict}"


def result_path(wanted: str, device: str, others_too: bool, kind: str = "rollout") -> Path:
    """Where `--bench-json` puts the rows: auto is benchmarks/results/<kind>-<device>.json. A path that the kernel
    benchmarks of the same run write to gets -<kind> added to its name."""
    if wanted == "auto":
        kernels = default_path(device)
        return kernels.with_name(kernels.name.replace("kernels-", f"{kind}-", 1))
    path = Path(wanted)
    return path.with_name(f"{path.stem}-{kind}{path.suffix}") if others_too else path


def write_json(
    path: Path,
    machine: dict[str, Any],
    settings: dict[str, Any],
    limits: dict[str, float],
    rows: Sequence[Any],
    kind: str = "rollout",
) -> None:
    """Machine, settings, limits and rows (dataclasses), to six digits; fields that say nothing are left out."""
    kept = [{k: v for k, v in asdict(row).items() if v not in (None, "", [])} for row in rows]
    content = {
        "benchmark": f"benchmarks/test_{kind}.py",
        "machine": machine,
        "settings": settings,
        "limits": limits,
        "rows": kept,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.6g}"))
    path.write_text(json.dumps(rounded, indent=1) + "\n")
