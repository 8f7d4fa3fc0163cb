"""Parity, the least time of a step, one row per case and side, as a table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rollout_limits import LeastWork, ModelShape
from rollout_report import DISTURBED, Status
from step_cases import PRIME_RL, Case

LOSS_LIMIT = {"cpu": 1e-4, "cuda": 2e-2}
GRADIENT_LIMIT = {"cpu": 1e-3, "cuda": 5e-2}
"""Largest difference from the plain loop: of the loss beside the mean |advantage| of 1, and of the sampled gradient,
relative to its norm. float32 on a CPU; on CUDA the peers' log-softmax of bfloat16 logits alone is off by about 1 %."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One side of one case; medians over rounds, every round in the lists.

    seconds: of whole steps. update_alone: of forward, backward and optimiser on the fixed rollout. tok_per_s: prompt
    (once per group) and completion tokens by seconds, whole steps or, without them, updates. share: of what the machine
    reaches in a GEMM, least FLOP by seconds; MFU where the limit is the device's. peak_gib: of whole steps, or of the
    process; rollout_gib, update_gib: by phase. times_faster, memory_share: ours beside this peer. others: most CPU that
    other processes took.
    """

    case: str
    by: str
    status: Status = "skipped"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    rollout_s: float | None = None
    update_s: float | None = None
    update_alone: list[float] = field(default_factory=list)
    tok_per_s: float | None = None
    share: float | None = None
    peak_gib: float | None = None
    rollout_gib: float | None = None
    update_gib: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    times_faster: float | None = None
    times_faster_range: tuple[float, float] | None = None
    update_times_faster: float | None = None
    memory_share: float | None = None
    others: float | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    verdict: str = ""


def gradient_error(sample: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """|sample - truth| / |truth| over all parameters; infinite where the two hold other parameters."""
    if sample.keys() != truth.keys() or any(sample[n].shape != truth[n].shape for n in truth):
        return float("inf")
    off = sum(float((sample[n] - truth[n]).double().square().sum()) for n in truth)
    norm = sum(float(truth[n].double().square().sum()) for n in truth)
    return (off / norm) ** 0.5 if norm > 0 else float("inf")


def parity_failure(row: Row, device: str) -> str | None:
    """Why a side's figures are not shown."""
    loss, gradient = row.loss_error, row.gradient_error
    if loss is None or gradient is None:
        return "no parity was measured"
    if not loss <= LOSS_LIMIT[device]:
        return f"its loss differs from the plain loop's by {loss:.2g} (limit {LOSS_LIMIT[device]:g})"
    if not gradient <= GRADIENT_LIMIT[device]:
        limit = GRADIENT_LIMIT[device]
        return f"its gradient differs from the plain loop's by {gradient:.2g} of its norm (limit {limit:g})"
    return None


def least_flop(case: Case, shape: ModelShape) -> tuple[float, float]:
    """(rollout, update) of a step that computes every token once: prompts once per group, 2 FLOP per parameter forward
    and 4 backward, the head on the tokens that carry loss, scores on the pairs that attend."""
    from rollout_cases import Batch

    work = LeastWork.of(
        shape, Batch([[0] * case.prompt_tokens] * case.prompts, [case.new_tokens] * case.prompts, case.group)
    )
    forward = 2.0 * (case.packed_tokens * shape.body + case.loss_tokens * shape.head + case.context * shape.score)
    return (work.prefill_flop + work.decode_flop if case.whole else 0.0), 3.0 * forward


def fill(row: Row, case: Case, results: Sequence[dict[str, Any]], shape: ModelShape, flop_per_s: float) -> None:
    """What the rounds of a side came to; one result per process."""
    row.status = "ok"
    row.seconds = [s for r in results for s in r["steps"]]
    row.update_alone = [s for r in results for s in r["update"]]
    row.others = max((r["others"] for r in results if r.get("others") is not None), default=None)
    row.prompt_tokens = _first(results, "prompt")
    row.completion_tokens = _first(results, "completion")
    rollout, update = least_flop(case, shape)
    tokens = case.prompts * case.prompt_tokens + case.loss_tokens
    seconds = statistics.median(row.seconds or row.update_alone)
    row.tok_per_s = tokens / seconds
    row.share = (rollout + update) / flop_per_s / seconds
    for name, field_ in (("rollout", "rollout_s"), ("update", "update_s")):
        values = [s for r in results for s in r["phases"].get(name, [])]
        setattr(row, field_, statistics.median(values) if values else None)
    peaks = {n: max(r["peaks"].get(n, 0) for r in results) / 2**30 for n in ("rollout", "update", "update alone")}
    row.rollout_gib, row.update_gib = peaks["rollout"] or None, peaks["update"] or peaks["update alone"] or None
    row.peak_gib = max(peaks.values()) if not case.whole else max(peaks["rollout"], peaks["update"])


def _first(results: Sequence[dict[str, Any]], name: str) -> float | None:
    return next((r["tokens"][name] for r in results if name in r["tokens"]), None)


def compare(ours: Row, peer: Row, case: Case) -> None:
    """Fill in how many times ours is as fast, of medians and of the extremes, and the share of memory; the verdict."""
    if ours.status != "ok" or peer.status != "ok":
        return
    mine, theirs = ours.seconds, peer.seconds
    if mine and theirs:
        peer.times_faster = statistics.median(theirs) / statistics.median(mine)
        peer.times_faster_range = (min(theirs) / max(mine), max(theirs) / min(mine))
    if ours.update_alone and peer.update_alone:
        peer.update_times_faster = statistics.median(peer.update_alone) / statistics.median(ours.update_alone)
    if ours.peak_gib and peer.peak_gib:
        peer.memory_share = ours.peak_gib / peer.peak_gib
    if not peer.by.startswith("trl"):
        return
    parts = []
    if case.times_trl is not None and peer.times_faster is not None:
        met = "met" if peer.times_faster >= case.times_trl else "MISSED"
        parts.append(f"target {case.times_trl:g}x: {met}")
    if case.memory is not None and peer.memory_share is not None:
        met = "met" if peer.memory_share <= case.memory else "MISSED"
        parts.append(f"at most {case.memory:.0%} of its memory: {met}")
    peer.verdict = ", ".join(parts)


def beside_prime_rl(row: Row) -> None:
    """The published figures of the same shape and context."""
    if row.case in PRIME_RL and row.by == "rhotrain" and row.tok_per_s is not None:
        rate, mfu, gib = PRIME_RL[row.case]
        met = "met" if row.tok_per_s >= 3 * rate else "MISSED"
        row.verdict = f"prime-rl on an H100: {rate:,.0f} tok/s, MFU {mfu:.1%}, {gib} GiB; target 3x: {met}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of text; columns are aligned."""
    header: tuple[str, ...] = (
        "case",
        "by",
        "step s",
        "rollout",
        "update",
        "update alone",
        "tok/s",
        "of GEMM",
        "ours is",
        "update only",
    )
    header += ("peak GiB", "rollout", "update", "ours takes", "note")
    lines = [header, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    for line in lines:
        text = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        text += [cell.rjust(width) for cell, width in zip(line[2:-1], widths[2:])]
        yield "  ".join([*text, line[-1]]).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    faster = show(row.times_faster, "{:.2f}x")
    if row.times_faster_range is not None:
        faster += f" ({row.times_faster_range[0]:.1f}-{row.times_faster_range[1]:.1f})"
    notes = [f"skipped: {row.reason}"] if row.status != "ok" else [row.verdict]
    if row.others is not None and row.others > DISTURBED:
        notes.append(f"DISTURBED: other processes took {row.others:.0%} of the CPU")
    return (
        row.case,
        row.by,
        show(median(row.seconds), "{:.2f}"),
        show(row.rollout_s, "{:.2f}"),
        show(row.update_s, "{:.2f}"),
        show(median(row.update_alone), "{:.2f}"),
        show(row.tok_per_s, "{:.0f}"),
        show(row.share, "{:.0%}"),
        faster,
        show(row.update_times_faster, "{:.2f}x"),
        show(row.peak_gib, "{:.2f}"),
        show(row.rollout_gib, "{:.2f}"),
        show(row.update_gib, "{:.2f}"),
        show(row.memory_share, "{:.0%}"),
        "; ".join(note for note in notes if note),
    )
