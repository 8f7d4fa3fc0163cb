"""Questions and where they are read from: JSONL files and Hugging Face datasets (generated tasks are in `tasks.py`).

A row has `prompt` (a text, or a list of messages as in TRL) or `messages`, an optional `answer`, and any further
fields, which reward functions may ask for. Columns of other names are mapped by task_args prompt_column,
messages_column and answer_column. Errors name the file and the line.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rhotrain.train.config import ConfigError, TaskConfig

RESERVED_FIELDS = ("prompts", "completions", "completion_ids", "finish_reasons")
"""Keywords that reward functions get besides the fields of the question."""

_COLUMNS = ("prompt_column", "messages_column", "answer_column")
_JSONL_ARGS = (*_COLUMNS, "eval_file")
_HF_ARGS = (*_COLUMNS, "name", "split", "eval_split", "revision")


@dataclass(frozen=True)
class Question:
    """One row of a task: a text or a conversation (exactly one of them), and the fields that rewards may ask for."""

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The text that identifies the question, blanks made even: what train and held-out sets are kept apart by."""
        text = self.prompt if self.prompt is not None else json.dumps(self.messages, sort_keys=True, default=str)
        return " ".join(text.split())


@dataclass(frozen=True)
class Pool:
    """What a source gives: distinct questions, its own held-out ones where it has them, and how to get more."""

    questions: list[Question]
    held_out: list[Question] | None = None
    generated: bool = False
    more: str = "add questions"
    notes: tuple[str, ...] = ()


def distinct(questions: Iterable[Question]) -> list[Question]:
    """The first question of every key, in order."""
    first: dict[str, Question] = {}
    for question in questions:
        first.setdefault(question.key, question)
    return list(first.values())


def check_args(config: TaskConfig, allowed: Sequence[str], what: str) -> None:
    """Refuse task_args that `what` does not have."""
    for name in config.task_args:
        if name not in allowed:
            near = get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            listing = ", ".join(sorted(allowed)) if allowed else "none"
            raise ConfigError(f"task_args: {name!r} does not work; {hint}{what} takes: {listing}")


def _question(row: Any, config: TaskConfig, where: str) -> Question:
    """A row of a file as a question. `where` (file and line) starts every message."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {type(row).__name__} does not work; need an object with `prompt` or `messages`")
    row = dict(row)
    for name in ("prompt", "messages", "answer"):
        column = config.task_args.get(f"{name}_column")
        if column is not None:
            if column not in row:
                raise ConfigError(f"{where}: no {column!r} ({name}_column); the row has: {', '.join(row) or 'nothing'}")
            row[name] = row.pop(column)
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    if isinstance(prompt, list):  # TRL's conversational format
        prompt, messages = None, prompt if messages is None else messages
    if (prompt is None) == (messages is None):
        given = "both `prompt` and `messages`" if prompt is not None else "neither `prompt` nor `messages`"
        raise ConfigError(f"{where}: {given}; need exactly one (columns here: {', '.join(row) or 'none'})")
    clash = [name for name in RESERVED_FIELDS if name in row]
    if clash:
        raise ConfigError(
            f"{where}: field {clash[0]!r} does not work; reward functions get that name, rename the field"
        )
    if messages is not None:
        return Question(messages=_messages(messages, where), fields=row)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: prompt is {prompt!r}; need a text that is not empty")
    return Question(prompt=prompt, fields=row)


def _messages(messages: Any, where: str) -> tuple[dict[str, Any], ...]:
    """A conversation, checked: a list of {role, content} that does not end with the assistant."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {messages!r}; need a list of objects with role and content")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f"{where}: message {number} is {message!r}; need an object with role and content")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message is the assistant's; leave it out, or use assistant_prefill to start its turn"
        )
    return tuple(messages)


def _read_jsonl(path: Path, config: TaskConfig) -> list[Question]:
    """Every row of the file, duplicates included. Raises ConfigError with file and line."""
    questions = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        broken = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{broken}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
        questions.append(_question(row, config, f"{path}:{number}"))
    if not questions:
        raise ConfigError(f"{path}: no rows; need one JSON object per line")
    return questions


def _file_pool(rows: list[Question], held_out: list[Question] | None) -> Pool:
    """The pool of a file: distinct rows, with a note on what was left out."""
    questions = distinct(rows)
    notes = []
    if len(questions) < len(rows):
        notes.append(f"{len(rows) - len(questions)} of {len(rows)} rows repeat an earlier question and were left out")
    if held_out is not None:
        held_out = distinct(held_out)
        keys = {q.key for q in held_out}
        overlap = sum(q.key in keys for q in questions)
        if overlap:
            notes.append(f"{overlap} training questions also occur among the held-out ones and were left out")
    return Pool(questions, held_out, notes=tuple(notes))


def jsonl_check(config: TaskConfig) -> None:
    check_args(config, _JSONL_ARGS, "a .jsonl task")
    for name, path in (("task", config.task), ("task_args eval_file", config.task_args.get("eval_file", config.task))):
        if not Path(path).is_file():
            raise ConfigError(f"{name}: {path!r} does not work; there is no such file")


def jsonl_pool(config: TaskConfig, wanted: int) -> Pool:
    eval_file = config.task_args.get("eval_file")
    held_out = None if eval_file is None else _read_jsonl(Path(eval_file), config)
    return _file_pool(_read_jsonl(Path(config.task), config), held_out)


def hf_check(config: TaskConfig) -> None:
    check_args(config, _HF_ARGS, "an hf: task")
    path = config.task.removeprefix("hf:")
    if not path:
        raise ConfigError(f"task: {config.task!r} does not work; name a folder, a file or a hub id after hf:")
    if find_spec("datasets") is None:
        raise ConfigError(f"task: {config.task!r} needs the datasets package; pip install 'rhotrain[tasks]'")
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise ConfigError(f"task: {config.task!r} does not work; there is no such file or folder")


def _hf_rows(config: TaskConfig, split: str) -> list[Question]:
    """The rows of one split. Raises ConfigError with what `datasets` says."""
    import datasets

    path = Path(config.task.removeprefix("hf:")).expanduser()
    args = config.task_args
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # written by save_to_disk
            saved = datasets.load_from_disk(str(path))
            table = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        elif path.is_file():
            kind = {".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".json": "json"}.get(path.suffix, "text")
            table = datasets.load_dataset(kind, data_files=str(path), split=split)
        else:
            name = str(path) if path.exists() else config.task.removeprefix("hf:")
            table = datasets.load_dataset(name, args.get("name"), split=split, revision=args.get("revision"))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"task: {config.task!r} (split {split!r}) does not work; {error}") from None
    return [_question(row, config, f"{config.task} {split} row {i}") for i, row in enumerate(table)]


def hf_pool(config: TaskConfig, wanted: int) -> Pool:
    eval_split = config.task_args.get("eval_split")
    held_out = None if eval_split is None else _hf_rows(config, eval_split)
    return _file_pool(_hf_rows(config, config.task_args.get("split", "train")), held_out)
