"""Rewards: the weighted sum of reward functions, called in a process of their own (`reward_worker.py` says why).

A reward function is `fn(prompts, completions, completion_ids, **fields) -> list[float | None]`. It gets only the
keywords that it declares (all with **kwargs), as lists aligned to the completions: the prompts' texts, the completions'
texts (special tokens left out) and ids (end token included), `finish_reasons`, and every field of the question's row.
Called once per step with all completions; with `fn.per_group = True` once per group; with `fn.per_completion = True`
once per completion. A call that raises or takes longer than reward_timeout makes its completions unscorable (NaN) and
is counted; the first of each kind is logged with its reason. None and NaN mean unscorable too. A wrong number of
scores, or scores that are no numbers, is a RewardError: the function is broken, not a completion.

The total is NaN as soon as one function with a weight other than 0 could not score the completion: half a sum would be
compared with whole ones. Weight 0 logs a function without counting it.
"""

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from rhotrain.rollout.completion import Completion
from rhotrain.train.config import ConfigError, RewardConfig
from rhotrain.train.data import EncodedPrompt
from rhotrain.train.questions import RESERVED_FIELDS
from rhotrain.train.reward_worker import Call, FunctionInfo, Outcome, Setup
from rhotrain.train.tasks import Task

START_SECONDS = 300.0
"""How long the reward process may take to import its functions."""

_log = logging.getLogger("rhotrain.rewards")


OVERLONG = "overlong"
"""Log name of the soft overlong punishment."""


class RewardError(ValueError):
    """A reward function that is wrong whatever it scores. The message names it."""


@dataclass(frozen=True)
class RewardBatch:
    """What is scored: P prompts, their groups of completions, and the completions' texts [P][G]."""

    prompts: Sequence[EncodedPrompt]
    groups: Sequence[Sequence[Completion]]
    texts: list[list[str]]

    @staticmethod
    def make(prompts: Sequence[EncodedPrompt], groups: Sequence[Sequence[Completion]], tokenizer: Any) -> "RewardBatch":
        """Decode the completions once, without special tokens, for scoring and for the log."""
        flat = [list(c.token_ids) for group in groups for c in group]
        decoded = iter(
            tokenizer.batch_decode(flat, skip_special_tokens=True, clean_up_tokenization_spaces=False) if flat else []
        )
        return RewardBatch(prompts, groups, [[next(decoded) for _ in group] for group in groups])


@dataclass(frozen=True)
class Rewards:
    """total: float64 [P, G], NaN = unscorable. parts: the same per function, before its weight, by its log name;
    weights by the same names. Soft overlong punishment is a part, `overlong`, of weight 1.

    failures: completions that a failed call (exception, time-out) made unscorable. reasons: why, one per kind.
    """

    total: Tensor
    parts: dict[str, Tensor]
    failures: int
    reasons: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSpec:
    """One entry of RewardConfig.rewards: what to call, under which name it is logged and configured, and its weight."""

    target: str
    name: str
    weight: float


def parse_rewards(config: RewardConfig) -> tuple[RewardSpec, ...]:
    """The entries of `rewards`. Raises ConfigError for a bad weight, a name given twice, or args of an unknown name."""
    specs: list[RewardSpec] = []
    for entry in config.rewards:
        target, star, number = entry.rpartition("*")
        if not star:
            target, number = entry, "1"
        try:
            weight = float(number)
        except ValueError:
            raise ConfigError(f"rewards: {entry!r} does not work; after * comes a number, the weight") from None
        target = target.strip()
        if not abs(weight) < float("inf"):
            raise ConfigError(f"rewards: {entry!r} does not work; the weight must be finite")
        specs.append(RewardSpec(target, target.rpartition(":")[2], weight))
    names = [s.name for s in specs]
    specs = [s if names.count(s.name) == 1 else replace(s, name=s.target) for s in specs]
    names = [s.name for s in specs]
    if config.overlong_buffer and OVERLONG in names:
        raise ConfigError(f"rewards: {OVERLONG!r} is the name of what overlong_buffer subtracts; rename the function")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"rewards: {name!r} is there {names.count(name)} times; give it once, with its whole weight"
            )
    for key in config.reward_args:
        if key not in names:
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the rewards are: {', '.join(names)}"
            raise ConfigError(f"reward_args: {key!r} is not among the rewards; {hint}")
        if not isinstance(config.reward_args[key], dict):
            raise ConfigError(f"reward_args: {key} is {config.reward_args[key]!r}; need a table of keyword arguments")
    return tuple(specs)


def metric_config(config: RewardConfig, metric: str) -> RewardConfig:
    """The configuration that scores by `metric` alone (eval_metric), with its own `reward_args` if there are some."""
    name = metric.rpartition("*")[0] or metric
    args = {k: v for k, v in config.reward_args.items() if k in (name, name.rpartition(":")[2])}
    return RewardConfig(rewards=(metric,), reward_args=args, reward_timeout=config.reward_timeout)


def overlong_reward(lengths: Tensor, config: RewardConfig, max_new_tokens: int) -> Tensor:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13) of completions with these lengths in tokens: 0 up to
    max_new_tokens - overlong_buffer, then falling in a line to -overlong_penalty at max_new_tokens. float64."""
    over = lengths.double() - (max_new_tokens - config.overlong_buffer)
    return -config.overlong_penalty * (over / config.overlong_buffer).clamp(0.0, 1.0)


class RewardSet:
    """The reward functions of a run. Made before the model is loaded: it finds wrong names, arguments and fields.

    max_new_tokens: the length at which overlong_penalty is reached; needed with overlong_buffer.
    Owns a process; `close()` ends it, and so does the end of this object or of the program.
    Raises ConfigError for functions that cannot be found, imported or called with this task's fields.
    """

    def __init__(self, config: RewardConfig, task: Task, *, max_new_tokens: int = 0) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.specs = parse_rewards(config)
        args = tuple(config.reward_args.get(spec.name, {}) for spec in self.specs)
        targets = tuple(spec.target for spec in self.specs)
        self._worker = _Worker(Setup(targets, args, task.config, config.reward_timeout))
        self._reported: set[tuple[str, str]] = set()
        try:
            known = (*RESERVED_FIELDS, *task.field_names)
            for spec, info in zip(self.specs, self._worker.infos):
                missing = [name for name in info.required if name not in known]
                if missing:
                    raise ConfigError(
                        f"rewards: {spec.name} asks for {', '.join(map(repr, missing))}, which {task.name!r} does not "
                        f"have; it can have: {', '.join(known)} (or give it in reward_args)"
                    )
        except ConfigError:
            self.close()
            raise

    def score(self, batch: RewardBatch) -> Rewards:
        """Call every function. All groups have the same size. Completions that ended in an error are unscorable and are
        not shown to the functions. Raises RewardError for a broken function."""
        shape = (len(batch.groups), len(batch.groups[0]) if batch.groups else 0)
        total, parts = torch.zeros(shape, dtype=torch.float64), {}
        failed: set[tuple[int, int]] = set()
        reasons: dict[str, None] = {}
        for number, (spec, info) in enumerate(zip(self.specs, self._worker.infos)):
            part = torch.full(shape, float("nan"), dtype=torch.float64)
            places = _places(batch, info)
            calls = [_call(number, info, batch, cells) for cells in places]
            for cells, outcome in zip(places, self._worker.run(calls)):
                if outcome.broken:
                    raise RewardError(f"rewards: {outcome.reason}")
                if outcome.values is None:
                    failed.update(cells)
                    reasons[self._report(spec.name, outcome.reason, len(cells))] = None
                    continue
                for (p, g), value in zip(cells, outcome.values):
                    part[p, g] = float("nan") if value is None else value
            parts[spec.name] = part
            if spec.weight != 0:
                total += spec.weight * part
        weights = {spec.name: spec.weight for spec in self.specs}
        if self.config.overlong_buffer:
            lengths = torch.tensor([[len(c.token_ids) for c in group] for group in batch.groups])
            parts[OVERLONG], weights[OVERLONG] = overlong_reward(lengths, self.config, self.max_new_tokens), 1.0
            total += parts[OVERLONG]
        for p, group in enumerate(batch.groups):
            for g, completion in enumerate(group):
                if completion.finish_reason == "error":
                    total[p, g] = float("nan")
        return Rewards(total, parts, len(failed), tuple(reasons), weights)

    def _report(self, name: str, reason: str, count: int) -> str:
        """Log a failure the first time that this function fails in this way."""
        message = f"reward {name}: {reason}"
        kind = (name, reason.split(":")[0])
        if kind not in self._reported:
            self._reported.add(kind)
            _log.warning("%s; %d completion(s) left unscored; more of this kind are only counted", message, count)
        return message

    def close(self) -> None:
        """End the reward process."""
        self._worker.close()


Cells = list[tuple[int, int]]


def _places(batch: RewardBatch, info: FunctionInfo) -> list[Cells]:
    """Which completions (prompt, member) go into one call."""
    groups = [
        [(p, g) for g, completion in enumerate(group) if completion.finish_reason != "error"]
        for p, group in enumerate(batch.groups)
    ]
    if info.per_completion:
        return [[cell] for group in groups for cell in group]
    calls = groups if info.per_group else [[cell for group in groups for cell in group]]
    return [cells for cells in calls if cells]


def _call(number: int, info: FunctionInfo, batch: RewardBatch, cells: Cells) -> Call:
    """The keywords that the function declares, as lists aligned to `cells`."""
    completions = [batch.groups[p][g] for p, g in cells]
    available: dict[str, list[Any]] = {
        "prompts": [batch.prompts[p].text for p, _ in cells],
        "completions": [batch.texts[p][g] for p, g in cells],
        "completion_ids": [list(c.token_ids) for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
    }
    rows = [batch.prompts[p].question.fields for p, _ in cells]
    for name in dict.fromkeys(name for row in rows for name in row):
        available[name] = [row.get(name) for row in rows]
    wanted = available if info.any_keyword else {k: v for k, v in available.items() if k in info.keywords}
    for name in info.required:  # a field that no row of this call has
        wanted.setdefault(name, [None] * len(cells))
    seed = crc32(repr([(c.sample, c.policy_version) for c in completions]).encode())
    return Call(number, wanted, len(cells), seed)


@dataclass
class _Process:
    """The running process and the queue that its replies arrive in (None at their end)."""

    popen: "subprocess.Popen[bytes]"
    replies: "queue.Queue[Any]" = field(default_factory=queue.Queue)


class _Worker:
    """Starts the reward process, asks it, kills it when a call takes too long, and starts it again."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._running: list[_Process] = []  # at most one; the finalizer holds the list, not this object
        weakref.finalize(self, _kill, self._running)
        self.infos: list[FunctionInfo] = []
        self._start()

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in order; a call that takes too long or ends the process is one with its reason."""
        outcomes: list[Outcome] = []
        try:
            while len(outcomes) < len(calls):
                if not self._running:
                    self._start()
                process = self._running[0]
                _send(process, list(calls[len(outcomes) :]))
                while len(outcomes) < len(calls) and self._running:
                    outcomes.append(self._reply(process))
        except BaseException:
            self.close()  # replies of an interrupted request must not be taken for those of the next
            raise
        return outcomes

    def _reply(self, process: _Process) -> Outcome:
        try:
            reply = process.replies.get(timeout=self.setup.timeout)
        except queue.Empty:
            self.close()
            return Outcome(None, f"time-out: took more than {self.setup.timeout:g} s")
        if reply is None:
            code = process.popen.wait()
            self.close()
            return Outcome(None, f"process ended: the call ended its process (exit code {code})")
        return reply

    def _start(self) -> None:
        code = "import sys; sys.path[:] = sys.argv[1:]; from rhotrain.train.reward_worker import main; main()"
        popen = subprocess.Popen(
            [sys.executable, "-c", code, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is not for it; its children can be killed with it
        )
        process = _Process(popen)
        self._running.append(process)
        threading.Thread(target=_read, args=(process,), daemon=True, name="rhotrain-rewards").start()
        try:
            _send(process, self.setup)
            reply = process.replies.get(timeout=START_SECONDS)
        except queue.Empty:
            self.close()
            raise RewardError(f"rewards: importing the functions took more than {START_SECONDS:g} s") from None
        if reply is None:
            code_number = popen.wait()
            self.close()
            raise RewardError(
                f"rewards: the reward process ended while it imported its functions (exit code {code_number})"
            )
        state, content = reply
        if state == "refused":
            self.close()
            raise ConfigError(content)
        self.infos = content

    def close(self) -> None:
        _kill(self._running)


def _send(process: _Process, message: Any) -> None:
    """Write one message. A pipe that the process has closed is left to the reader: it finds the end of the replies."""
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(message, process.popen.stdin)  # type: ignore[arg-type]
        process.popen.stdin.flush()  # type: ignore[union-attr]


def _read(process: _Process) -> None:
    """Move replies from the pipe to the queue, so that waiting for one can have a time-out on every system."""
    try:
        while True:
            process.replies.put(pickle.load(process.popen.stdout))  # type: ignore[arg-type]
    except (EOFError, pickle.UnpicklingError, OSError, ValueError):  # the process ended, perhaps amid a reply
        process.replies.put(None)


def _kill(running: list[_Process]) -> None:
    """Kill the process and what it started."""
    while running:
        popen = running.pop().popen
        if hasattr(os, "killpg"):
            try:
                os.killpg(popen.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended already
                popen.kill()
        else:
            popen.kill()
        popen.wait()
        with contextlib.suppress(OSError):  # unsent data of a closed pipe
            popen.stdin.close()  # type: ignore[union-attr]
