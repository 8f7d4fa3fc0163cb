"""What `rhotrain audit` prints: a table for people, one JSON object for machines."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rhotrain.train.audit import Audit, Subject
from rhotrain.train.causes import Bounds, Effect
from rhotrain.train.foreign import ForeignAudit

NAME_WIDTH = 26
LINE_WIDTH = 112

ANCHORS = {
    "sampler": "its ratio is against the sampler's numbers over the same ids: all of the first table is in it but "
    "truncation, which biases the gradient unseen",
    "trainer": "its ratio is against a pass of the trainer before the first update: dropout is in it; the rest of the "
    "first table is not, and biases the gradient unseen",
    "fresh": "its ratio is 1 by construction: none of the first table is in it, and what is there biases the gradient "
    "unseen",
}


def report(audit: Audit | ForeignAudit, *, as_json: bool) -> str:
    """What the command prints."""
    if isinstance(audit, Audit):
        return json.dumps(audit_json(audit), allow_nan=False) if as_json else audit_text(audit)
    return json.dumps(foreign_json(audit), allow_nan=False) if as_json else foreign_text(audit)


# ---- text -----------------------------------------------------------------------------------------------------------


def audit_text(audit: Audit) -> str:
    """The whole report."""
    subject = audit.subject
    lines = [
        *_wrapped(
            f"{subject.model} on {subject.task}, {subject.dtype} on {subject.device}: {subject.groups} groups, "
            f"{subject.completions} completions, {subject.tokens} tokens; {subject.sampling}"
        ),
        *_wrapped(f"old logprobs: {subject.anchor}; {ANCHORS[subject.anchor]}"),
        *(line for note in audit.notes for line in _wrapped(f"note: {note}")),
        "",
        "log_ratio = trainer's logprob - sampler's before any update on these samples, one cause after the other",
        _header("cause"),
        *(_row(effect) for effect in audit.causes),
        _row(audit.total),
        "Means add up over the causes; extremes and clip shares do not.",
        *_legend(audit.bounds, subject),
        *_facts(audit),
    ]
    if audit.what_if:
        lines += ["", "what if: settings that are not this run's, each alone against its own score; not in the verdict"]
        lines += [_header("setting"), *(_row(effect) for effect in audit.what_if)]
    if audit.movement:
        lines += ["", "policy movement: real updates on these samples, against the weights before the first"]
        lines += [_header("updates"), *(_row(effect) for effect in audit.movement)]
    lines += ["", *_wrapped(audit.budget.describe())]
    lines += _wrapped(f"numerics here, {audit.numerics.describe()}: {_within(audit.exceeded)}")
    if audit.diagnosis is not None:
        lines += ["", audit.diagnosis.as_text()]
    return "\n".join([*lines, "", *_wrapped(f"verdict: {audit.verdict}")])


def foreign_text(audit: ForeignAudit) -> str:
    """The report on somebody else's logprobs."""
    lines = [
        *_wrapped(f"{audit.source}: {audit.completions} completions, {audit.tokens} tokens; {audit.seen}"),
        *_wrapped(f"against {audit.model} in {audit.dtype}, scored at {audit.scored}"),
        *_wrapped(audit.budget.describe()),
        "",
        audit.diagnosis.as_text(),
        "",
        *_wrapped(f"verdict: {audit.verdict}"),
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_WIDTH, subsequent_indent="  ")


def _header(name: str) -> str:
    columns = (f"{name:<{NAME_WIDTH}}", f"{'mean':>10}", f"{'mean |.|':>9}", f"{'max |.|':>9}")
    return "  ".join((*columns, f"{'ratio range':<24}", f"{'clip':>8}", f"{'clamp':>8}"))


def _row(effect: Effect) -> str:
    low, high = _ratio(effect.ratio_min), _ratio(effect.ratio_max)
    numbers = (f"{effect.mean:>10.3g}", f"{effect.mean_abs:>9.3g}", f"{effect.max_abs:>9.3g}")
    columns = (f"{effect.name:<{NAME_WIDTH}}", *numbers, f"{f'[{low}, {high}]':<24}")
    return "  ".join((*columns, f"{_percent(effect.clip):>8}", f"{_percent(effect.clamp):>8}"))


def _legend(bounds: Bounds, subject: Subject) -> list[str]:
    return _wrapped(
        f"clip: share of the {subject.unit} with a ratio outside [{bounds.clip_low:g}, {bounds.clip_high:g}] (grpo), "
        f"either side, whatever the advantage's sign; clamp: above {bounds.clamp:g} (cispo)."
    )


def _ratio(value: float) -> str:
    if value == 1.0:
        return "1"
    return f"{value:.6f}" if 1e-3 <= value < 1e3 else f"{value:.3g}"


def _percent(share: float) -> str:
    """One digit; a share that is there and would round to 0.0 shows that it is."""
    return f"{100 * share:.1f} %" if share == 0.0 or share >= 0.0005 else "< 0.05 %"


def _facts(audit: Audit) -> list[str]:
    subject = audit.subject
    facts = [
        f"tokenisation: ids are passed on as they were drawn; the text of {_percent(subject.recoded)} of the "
        "completions would give other ids"
    ]
    if subject.staleness:
        facts.append(f"staleness: {subject.staleness} optimiser step(s)")
    if subject.kept_mass < 1.0:
        facts.append(f"kept mass: mean {subject.kept_mass:.6f}")
    return facts


def _within(exceeded: Sequence[str]) -> str:
    return f"EXCEEDED: {'; '.join(exceeded)}" if exceeded else "within the budget"


# ---- JSON -----------------------------------------------------------------------------------------------------------


def audit_json(audit: Audit) -> dict[str, Any]:
    """Everything that the text says, ready for JSON."""
    found = {
        "kind": "pipeline",
        **asdict(audit.subject),
        "bounds": asdict(audit.bounds),
        "causes": [asdict(effect) for effect in audit.causes],
        "total": asdict(audit.total),
        "what_if": [asdict(effect) for effect in audit.what_if],
        "movement": [asdict(effect) for effect in audit.movement],
        "numerics": asdict(audit.numerics),
        "budget": asdict(audit.budget),
        "exceeded": list(audit.exceeded),
        "diagnosis": None if audit.diagnosis is None else audit.diagnosis.as_dict(),
        "found": list(audit.found),
        "verdict": audit.verdict,
        "notes": list(audit.notes),
        "exit_code": audit.exit_code,
    }
    return _plain(found)


def foreign_json(audit: ForeignAudit) -> dict[str, Any]:
    """Everything that the text says, ready for JSON."""
    found = {
        "kind": "foreign",
        "source": audit.source,
        "model": audit.model,
        "dtype": audit.dtype,
        "scored": audit.scored,
        "ignores": audit.ignores,
        "completions": audit.completions,
        "tokens": audit.tokens,
        "scored_completions": audit.diagnosis.records,
        "scored_tokens": audit.diagnosis.tokens,
        "budget": asdict(audit.budget),
        "diagnosis": audit.diagnosis.as_dict(),
        "found": list(audit.diagnosis.names),
        "verdict": audit.verdict,
        "exit_code": audit.exit_code,
    }
    return _plain(found)


def _plain(value: Any) -> Any:
    """Tuples as lists, and null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
