"""The reward process: finds reward functions and calls them, apart from the trainer's process.

Why a process of its own: a time-out must end any hung call. A thread cannot be ended, and a regular expression that
backtracks, or C code, holds the interpreter lock so that the waiting thread never wakes; a signal interrupts only the
main thread and a bare `except` swallows it; `fork` is unsafe beside CUDA and OpenMP threads and makes every page of
the weights copy-on-write. A process that is started fresh and kept can be killed whatever it does. Functions are found
here, by name, so nothing but the data has to be picklable, and user modules are imported here only.

Protocol, pickled over stdin and stdout: Setup -> ("ready", list[FunctionInfo]) or ("refused", message); then for each
list of Calls one Outcome per call, in order. End of input ends the process. What functions print goes to stderr.
Imports no torch.
"""

import importlib
import importlib.util
import inspect
import math
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rhotrain.train.config import ConfigError, TaskConfig
from rhotrain.train.reward_functions import BUILT_IN, exact, task_reward
from rhotrain.train.tasks import task_scorer

GRACE_SECONDS = 30
"""An orphan that hangs ends itself this long after its time-out."""


@dataclass(frozen=True)
class Setup:
    """What the process is to run. targets: function names or `place:function`; args: keyword arguments of each."""

    targets: tuple[str, ...]
    args: tuple[dict[str, Any], ...]
    task: TaskConfig
    timeout: float


@dataclass(frozen=True)
class FunctionInfo:
    """How a function is called. keywords: what it declares (less its args); required: those without a default."""

    keywords: tuple[str, ...]
    required: tuple[str, ...]
    any_keyword: bool
    per_group: bool
    per_completion: bool


@dataclass(frozen=True)
class Call:
    """One call of function number `function`, for `count` completions. seed: of the global generators."""

    function: int
    keywords: dict[str, list[Any]]
    count: int
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """values: a float or None per completion, or None when the call failed and `reason` says why.

    broken: the function itself is wrong (return length, return type), which ends the run.
    """

    values: list[float | None] | None
    reason: str = ""
    broken: bool = field(default=False)


def find_function(target: str, task: TaskConfig) -> Callable[..., Any]:
    """The reward function `target` names. Raises ConfigError with the nearest names."""
    if target == "task":
        scorer = task_scorer(task)
        return exact if scorer is None else task_reward(scorer)
    if target in BUILT_IN:
        return BUILT_IN[target]
    place, colon, name = target.rpartition(":")
    if not colon:
        near = get_close_matches(target, ["task", *BUILT_IN], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"rewards: {target!r} does not work; {hint}built in are task, {', '.join(BUILT_IN)}; "
            "your own: package.module:function or path/file.py:function"
        )
    module = _import(place, target)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        near = get_close_matches(name, functions, n=3) or functions[:5]
        hint = f"did you mean {', '.join(near)}?" if near else "it defines none"
        raise ConfigError(f"rewards: {target!r} does not work; {place} has no function {name!r}; {hint}")
    return found


def _import(place: str, target: str) -> ModuleType:
    """The module at a path or a dotted name. Raises ConfigError; an exception during the import is told in it."""
    path = Path(place).expanduser()
    is_file = place.endswith(".py") or "/" in place
    if is_file and not path.is_file():
        raise ConfigError(f"rewards: {target!r} does not work; there is no file {str(path)!r}")
    # Neighbours of the file, or modules in the working folder, can be imported; installed packages go first.
    folder = str(path.parent.resolve()) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        if not is_file:
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"rhotrain_rewards_{path.stem}", path)
        assert spec is not None and spec.loader is not None  # a .py file always has a loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        raise ConfigError(
            f"rewards: {target!r} does not work; importing {place} raised {describe_error(error)}"
        ) from error


def describe_error(error: BaseException) -> str:
    """`ValueError: text (file.py, line 3)`: an exception in one line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def bind(target: str, function: Callable[..., Any], args: dict[str, Any]) -> FunctionInfo:
    """How to call `function` once `args` are fixed. Raises ConfigError for arguments that it does not take."""
    parameters = inspect.signature(function).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in args:
        if name not in names and not any_keyword:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"reward_args: {target} does not take {name!r}; {hint}it takes: {', '.join(names)}")
    free = [p for p in named if p.name not in args]
    return FunctionInfo(
        keywords=tuple(p.name for p in free),
        required=tuple(p.name for p in free if p.default is p.empty),
        any_keyword=any_keyword,
        per_group=bool(getattr(function, "per_group", False)),
        per_completion=bool(getattr(function, "per_completion", False)),
    )


def prepare(setup: Setup) -> tuple[list[Callable[..., Any]], list[FunctionInfo]]:
    """Functions and how to call them. A built-in is tried without completions, which checks its arguments."""
    functions, infos = [], []
    for target, args in zip(setup.targets, setup.args):
        function = find_function(target, setup.task)
        info = bind(target, function, args)
        if target in BUILT_IN:
            try:
                function(**{name: [] for name in info.required if name in _TRIED}, **args)
            except ImportError as error:
                raise ConfigError(f"rewards: {target} does not work; {error}; pip install 'rhotrain[tasks]'") from None
            except TypeError as error:
                raise ConfigError(f"reward_args: {target} needs its arguments: {error}") from None
            except Exception as error:
                raise ConfigError(f"reward_args: {target} does not work with {args}: {error}") from None
        functions.append(function)
        infos.append(info)
    return functions, infos


_TRIED = ("prompts", "completions", "completion_ids", "answer")


def run_call(call: Call, function: Callable[..., Any], args: dict[str, Any], name: str) -> Outcome:
    """Call a function; an exception is an Outcome with its reason, a wrong return value one that is `broken`."""
    seed_generators(call.seed)
    try:
        returned = function(**call.keywords, **args)
    except Exception as error:
        return Outcome(None, describe_error(error))
    try:
        values = list(returned)
    except TypeError:
        return Outcome(None, f"{name} returned {returned!r:.80}; need a list with one score per completion", True)
    if len(values) != call.count:
        return Outcome(None, f"{name} returned {len(values)} scores for {call.count} completions", True)
    scores: list[float | None] = []
    for value in values:
        try:
            score = None if value is None else float(value)
        except (TypeError, ValueError):
            return Outcome(None, f"{name} returned the score {value!r:.80}; need a number or None", True)
        if score is not None and math.isinf(score):
            return Outcome(None, f"{name} returned the score {score}; need a finite number or None", True)
        scores.append(score)
    return Outcome(scores)


def seed_generators(seed: int) -> None:
    """Seed Python's generator, and numpy's and torch's where a reward function has imported them: rewards that draw
    random numbers are then the same after a resume."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def main() -> None:
    """Serve one trainer until its pipe closes."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # functions that read stdin or print must not touch the protocol
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's: it still needs this step's rewards

    def reply(message: Any) -> None:
        pickle.dump(message, replies)
        replies.flush()

    setup: Setup = pickle.load(requests)
    try:
        functions, infos = prepare(setup)
    except ConfigError as error:
        reply(("refused", str(error)))
        return
    reply(("ready", infos))
    while True:
        try:
            calls: list[Call] = pickle.load(requests)
        except EOFError:
            return
        for call in calls:
            # The default action of SIGALRM ends the process: nobody may be left to kill it.
            _alarm(setup.timeout + GRACE_SECONDS)
            number = call.function
            reply(run_call(call, functions[number], setup.args[number], setup.targets[number]))
        _alarm(0.0)


def _alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
