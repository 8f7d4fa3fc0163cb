"""Completions with the logprobs that somebody reports for them: another engine's, a server's, a file's, or our own."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhotrain.rollout.completion import Completion
from rhotrain.train.config import ConfigError


@dataclass(frozen=True)
class Record:
    """One completion as it was reported. Nothing is assumed of the values: to judge them is the audit's work.

    logprobs: one per completion id, or not: a length that differs is a finding. They may be NaN, infinite or positive.
    finish_reason: `stop`, `length` or empty when unknown. text: the completion's text as reported, None when unknown.
    kept_ids: per token the ids it was drawn from, where they are recorded; None otherwise.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = ""
    text: str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None


def records_of(pairs: Iterable[tuple[Sequence[int], Completion]]) -> list[Record]:
    """Records of our own engine's (prompt ids, completion); completions that ended in an error are left out.

    The logprobs are those of the distribution that acted: over the kept set where one was drawn from.
    """
    return [
        Record(
            prompt_ids=tuple(prompt),
            completion_ids=completion.token_ids,
            logprobs=tuple(x - math.log(m) for x, m in zip(completion.logprobs, completion.kept_mass)),
            finish_reason=completion.finish_reason,
            kept_ids=completion.kept_ids,
        )
        for prompt, completion in pairs
        if completion.finish_reason != "error"
    ]


def read_records(path: str | Path) -> list[Record]:
    """Records of a JSONL file: objects with prompt_ids, completion_ids, logprobs and, optionally, finish_reason, text.

    Other keys are ignored, and so are blank lines; null in logprobs is read as NaN. Raises ConfigError that names file,
    line, field and the fix.
    """
    file = Path(path)
    try:
        # Not splitlines: JSON strings may hold U+2028 as it is. utf-8-sig: some write a byte-order mark.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"logprobs: {str(file)!r} cannot be read ({error.strerror}); name a JSONL file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"logprobs: {str(file)!r} is not UTF-8 ({error}); name a JSONL file") from None
    records = [_record(f"{file}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise ConfigError(f"logprobs: {file} holds no records; write one JSON object per line (see docs/audit.md)")
    return records


def _record(where: str, line: str) -> Record:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, or an integer of thousands of digits
        raise ConfigError(f"{where}: is not JSON ({error}); write one object per line") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{where}: is {type(found).__name__}, not an object with prompt_ids, completion_ids, logprobs"
        )
    reason, text = found.get("finish_reason"), found.get("text")
    if reason is not None and not isinstance(reason, str):
        raise ConfigError(f"{where}: finish_reason: {reason!r} is not text; write stop or length, or leave it out")
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{where}: text: {text!r:.60} is not text; leave it out if it is unknown")
    completion = _ids(where, found, "completion_ids")
    return Record(_ids(where, found, "prompt_ids"), completion, _logprobs(where, found), reason or "", text)


def _list(where: str, found: dict[str, Any], name: str) -> list[Any]:
    if name not in found:
        raise ConfigError(f"{where}: {name} is missing; every record needs prompt_ids, completion_ids and logprobs")
    values = found[name]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: {name}: {values!r:.60} is not a list with at least one entry")
    return values


def _ids(where: str, found: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _list(where, found, name)
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ConfigError(f"{where}: {name}[{i}]: {value!r:.60} is not a token id; write integers >= 0, not text")
    return tuple(values)


def _logprobs(where: str, found: dict[str, Any]) -> tuple[float, ...]:
    values = _list(where, found, "logprobs")
    for i, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (isinstance(value, float) or abs(value) < 2**53)):
            raise ConfigError(
                f"{where}: logprobs[{i}]: {value!r:.60} is not a number; write one natural logarithm per completion id"
            )
    return tuple(math.nan if value is None else float(value) for value in values)
