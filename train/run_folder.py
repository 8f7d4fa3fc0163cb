"""The folder that a run leaves: config.toml, env.json, metrics.jsonl, rollouts.jsonl, checkpoints/, model/."""

import json
import os
import platform
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch

from rhotrain.train.checkpoint import checkpoints
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.settings import layer_of, read_toml, write_toml

# What may differ between a run and its resumption: the length of the run, and what only concerns logs and saving.
FREE_ON_RESUME = frozenset(
    {"out", "resume", "steps", "save_every", "keep_last", "eval_every", "log_completions", "threads", "device"}
    | {"strict_ratio"}  # it judges and changes nothing
)


@dataclass
class JsonLines:
    """An append-only file of JSON objects, flushed line by line, that can be cut back to an earlier length."""

    path: Path
    _file: TextIO | None = field(default=None, repr=False)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int) -> None:
        """Drop everything after `size` bytes: what a killed run wrote after its last checkpoint."""
        self.close()
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.truncate(size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class RunFolder:
    """A run's folder and its logs."""

    path: Path

    def __post_init__(self) -> None:
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.rollouts = JsonLines(self.path / "rollouts.jsonl")

    @classmethod
    def find(cls, config: Config) -> "RunFolder":
        """The folder of a new run, which `create` makes, or the one to resume.

        Raises ConfigError when a new run's folder already holds a run, or a resumed run's settings differ from its own.
        """
        if config.run.resume:
            folder = cls(Path(config.run.out))
            folder._check_same_settings(config)
            return folder
        path = Path(config.run.out) if config.run.out else _fresh_name(config)
        if (path / "config.toml").exists():
            ended = "add --resume to go on" if checkpoints(path) else "it ended before its first checkpoint, remove it"
            raise ConfigError(f"out: {str(path)!r} already holds a run; {ended}, or name another folder")
        return cls(path)

    def note_plan(self, plan: dict[str, Any]) -> None:
        """Write memory_plan.json."""
        (self.path / "memory_plan.json").write_text(json.dumps(plan, indent=1) + "\n")

    def create(self, config: Config) -> None:
        """Make the folder of a new run, once everything else is known to work. Raises ConfigError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.toml").touch(exist_ok=False)  # two runs may have started at once
            write_toml(config, self.path / "config.toml")
            (self.path / "env.json").write_text(json.dumps(environment(), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"out: {str(self.path)!r} cannot be written ({error.strerror}); name another folder"
            ) from None

    def note_settings(self, config: Config) -> None:
        """Keep config.toml true for a resumed run, whose length and logging may be others."""
        write_toml(replace(config, run=replace(config.run, resume=False)), self.path / "config.toml")

    def _check_same_settings(self, config: Config) -> None:
        saved = self.path / "config.toml"
        if not saved.is_file():
            raise ConfigError(f"out: {str(self.path)!r} holds no run to resume (no config.toml); check the path")
        before, now = read_toml(saved), layer_of(config)
        # A schedule other than constant is stretched over the steps, so another number changes every rate; and the last
        # rollouts that are drawn ahead are as many as the run still needs.
        stretched = now["schedule"] != "constant" or config.rollouts_ahead > 0
        free = FREE_ON_RESUME - ({"steps"} if stretched else set())
        changed = sorted(k for k, v in now.items() if k not in free and before.get(k, v) != v)
        if changed:
            raise ConfigError(
                f"resume: {changed[0]} was {before[changed[0]]!r} and is now {now[changed[0]]!r}; a resumed run keeps "
                f"its settings: leave out the flag or start a new run (changed: {', '.join(changed)})"
            )

    def close(self) -> None:
        self.metrics.close()
        self.rollouts.close()


def _fresh_name(config: Config) -> Path:
    """runs/TASK-DATE, with a number when two runs start in one second."""
    task = Path(config.task.task.removeprefix("hf:")).stem or "run"
    name = f"{task}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def environment() -> dict[str, Any]:
    """Versions and devices, for bug reports and for comparing runs."""
    packages = ("rhotrain", "torch", "transformers", "triton", "numpy", "flash-attn", "reasoning-gym")
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "packages": versions,
        "command": sys.argv,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
