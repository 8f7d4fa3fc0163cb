"""Reward functions: values by hand, and a reward process that survives whatever a function does."""

import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhotrain.rollout.completion import Completion
from rhotrain.train import reward_functions as built_in
from rhotrain.train.config import ConfigError, RewardConfig, TaskConfig
from rhotrain.train.data import EncodedPrompt
from rhotrain.train.questions import Question
from rhotrain.train.rewards import RewardBatch, RewardError, RewardSet, metric_config, parse_rewards
from rhotrain.train.tasks import Task


class Letters:
    """Stands in for a tokenizer: an id is a character's code."""

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        assert options == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return ["".join(map(chr, row)) for row in rows]


def completion(text: str, sample: int = 0) -> Completion:
    n = len(text)
    return Completion(
        token_ids=tuple(map(ord, text)),
        logprobs=(0.0,) * n,
        kept_mass=(1.0,) * n,
        finish_reason="stop" if n else "error",
        policy_version=0,
        sample=sample,
    )


def make_batch(*groups: tuple[dict[str, Any], list[str]]) -> RewardBatch:
    """A batch of (fields of the question, texts of its completions); an empty text is an engine error."""
    prompts = [
        EncodedPrompt((1,), f"prompt {p}", Question(prompt=f"p{p}", fields=row)) for p, (row, _) in enumerate(groups)
    ]
    return RewardBatch.make(prompts, [[completion(t) for t in texts] for _, texts in groups], Letters())


def make_task(*fields: str) -> Task:
    """A task of one JSONL-like question with these fields."""
    questions = [Question(prompt="q", fields=dict.fromkeys(fields, "1"))]
    return Task("sums.jsonl", questions, [], TaskConfig(task="sums.jsonl"), lambda text, row: 0.0)


def write_module(folder: Path, code: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


@pytest.fixture
def reward_set() -> Iterator[Any]:
    """Makes RewardSets and closes them after the test."""
    made: list[RewardSet] = []

    def make(*rewards: str, fields: tuple[str, ...] = ("answer",), **settings: Any) -> RewardSet:
        made.append(RewardSet(RewardConfig(rewards=rewards, **settings), make_task(*fields)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(tensor: Any, expected: list[list[float | None]]) -> None:
    """Equal to `expected`, where None stands for NaN."""
    found = [[None if math.isnan(x) else x for x in row] for row in tensor.tolist()]
    assert found == expected


# The built-in functions


@pytest.mark.parametrize(
    "text, number",
    [
        ("7", "7"),
        ("3 + 4 = 7.", "7"),
        ("4 - 8 = -4", "-4"),
        ("10-4", "4"),  # a difference, not the number -4
        ("x=-4", "-4"),
        ("(2)-3", "3"),
        ("it is \u22125", "-5"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("12.", "12"),
        ("-0.5", "-0.5"),
        ("007", "7"),
        ("none", None),
        ("", None),
        ("\u0663", None),
    ],
)
def test_last_number_in_text(text: str, number: str | None) -> None:
    found = built_in.find_last_number(text)
    assert found is None if number is None else found is not None and float(found) == float(number)


def test_number_rewards() -> None:
    texts = ["7", " 7\n", "3+4=7", "7 or 8", "", "7.0", "seven"]
    answers = ["7"] * len(texts)
    assert built_in.exact(completions=texts, answer=answers) == [1, 1, 0, 0, 0, 0, 0]
    assert built_in.last_number(completions=texts, answer=answers) == [1, 1, 1, 0, 0, 1, 0]
    assert built_in.bare_number(completions=texts, answer=answers) == [1, 1, 0.5, 0, 0, 0.5, 0]
    assert built_in.bare_number(completions=texts[:3], answer=answers[:3], bare=2.0, found=0.25) == [2, 2, 0.25]
    # GSM8K's answers end in the number; rows without a number cannot be scored
    mixed: list[Any] = ["so #### 18", "none", None, 18]
    assert built_in.last_number(completions=["18"] * 4, answer=mixed) == [1, None, None, 1]
    assert built_in.exact(completions=["18"] * 4, answer=mixed) == [0, 0, None, 1]


def test_final_text() -> None:
    assert built_in.final_text(" a ") == "a"
    assert built_in.final_text("<think>1</think>\n2") == "2"
    assert built_in.final_text("x <answer>1</answer> <answer> 2\n</answer> y") == "2"
    assert built_in.final_text("<think><answer>1</answer></think>2") == "2"


def test_regex_length_repetition() -> None:
    texts = ["<a>1</a>", "x<a>1\n</a>", "no"]
    assert built_in.regex(completions=texts, pattern="<a>.*</a>") == [1, 0, 0]
    assert built_in.regex(completions=texts, pattern="(?s)<a>.*</a>") == [1, 1, 0]
    assert built_in.regex(completions=texts, pattern="(?s)<a>.*</a>", full=True) == [1, 0, 0]
    rows = [[0] * n for n in (1, 2, 4, 5, 6, 9)]
    assert built_in.length(completion_ids=rows, min_tokens=2, max_tokens=4) == [0, 1, 1, 0, 0, 0]
    assert built_in.length(completion_ids=rows, min_tokens=2, max_tokens=4, soft=2) == [0.5, 1, 1, 0.5, 0, 0]
    # DAPO eq. 13 plus 1: 1 up to L_max - L_cache, 0 at L_max
    soft = built_in.length(completion_ids=[[0] * n for n in (12, 14, 16, 17)], max_tokens=12, soft=4)
    assert soft == [1, 0.5, 0, 0]
    # bigrams of 1 2 1 2 1: 12 21 12 21, two of four occurred before; ids, so any language
    rows = [[1, 2, 1, 2, 1], [1, 2, 3, 4], [9], []]
    assert built_in.repetition(completion_ids=rows, n=2) == [-0.5, 0, 0, 0]
    assert built_in.repetition(completion_ids=rows[:1], n=1, penalty=-2.0) == [pytest.approx(-2 * 3 / 5)]


def test_math_is_equal_in_value_and_works_in_any_thread() -> None:
    pytest.importorskip("math_verify")
    texts = ["\\boxed{0.5}", "$\\frac{2}{4}$", "1/3", "<think>1/2</think> $3$", "The answer is 1/2."]
    found: list[Any] = []

    def work() -> None:
        found.append(built_in.math(completions=texts, answer=["\\frac{1}{2}"] * 5))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert found == [[1, 1, 0, 0, 1]] * 2
    assert built_in.math(completions=["1", "$x^2-1$"], answer=[None, "(x-1)(x+1)"]) == [None, 1]


# The set


def test_weighted_sum_parts_and_fields(reward_set: Any, tmp_path: Path) -> None:
    path = write_module(
        tmp_path,
        """
        def show(prompts, completions, completion_ids, finish_reasons, level, answer, scale=1.0):
            assert all(isinstance(c, str) for c in completions)
            assert [list(map(ord, c)) for c in completions] == completion_ids
            assert finish_reasons == ["stop"] * 4
            assert prompts == ["prompt 0"] * 2 + ["prompt 1"] * 2, prompts
            assert level == ["hard"] * 2 + [None] * 2  # the second row has none
            return [scale * float(a) for a in answer]

        def every(**fields):
            return [len(fields)] * len(fields["answer"])
        """,
    )
    rewards = reward_set(
        "exact*2",
        f"{path}:show*-0.5",
        f"{path}:every*0",
        fields=("answer", "level"),
        reward_args={"show": {"scale": 10}},
    )
    batch = make_batch(({"answer": "7", "level": "hard"}, ["7", "8"]), ({"answer": "1"}, ["1", "1"]))
    result = rewards.score(batch)
    assert list(result.parts) == ["exact", "show", "every"]
    same(result.parts["show"], [[70, 70], [10, 10]])
    same(result.parts["every"], [[6, 6], [6, 6]])
    same(result.total, [[2 - 35, -35], [2 - 5, 2 - 5]])
    assert (result.failures, result.reasons) == (0, ())


def test_one_call_per_step_group_or_completion(reward_set: Any, tmp_path: Path) -> None:
    path = write_module(
        tmp_path,
        """
        def whole(completions): return [len(completions)] * len(completions)
        def group(completions): return [len(completions) + completions.index(c) / 10 for c in completions]
        def single(completions): return [len(completions)]
        group.per_group = True
        single.per_completion = True
        """,
    )
    rewards = reward_set(*(f"{path}:{name}" for name in ("whole", "group", "single")))
    result = rewards.score(make_batch(({}, ["a", "b", "c"]), ({}, ["d", "", "e"])))
    # the engine's error is not shown to any function and is unscorable
    same(result.parts["whole"], [[5, 5, 5], [5, None, 5]])
    same(result.parts["group"], [[3, 3.1, 3.2], [2, None, 2.1]])
    same(result.parts["single"], [[1, 1, 1], [1, None, 1]])
    assert result.total[1].isnan().tolist() == [False, True, False] and result.failures == 0


def test_none_and_nan_are_unscorable(reward_set: Any, tmp_path: Path) -> None:
    path = write_module(tmp_path, "def f(completions): return [None, float('nan'), True, 2]")
    batch = make_batch(({"answer": "a"}, ["a", "a", "a", "b"]))
    result = reward_set("exact", f"{path}:f").score(batch)
    same(result.total, [[None, None, 2, 2]])
    same(result.parts["exact"], [[1, 1, 1, 0]])
    assert result.failures == 0  # it said so itself; nothing failed
    same(reward_set("exact", f"{path}:f*0").score(batch).total, [[1, 1, 1, 0]])  # weight 0 is only logged


HANGS = """
import pathlib, re, subprocess, sys, time

def loop():
    while True:
        pass

def swallow():
    while True:
        try:
            time.sleep(1)
        except:
            pass

def regex():  # holds the interpreter lock
    re.match(r"(a+)+$", "a" * 60 + "b")

def child():
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("child").write_text(str(started.pid))
    started.wait()

def f(completions):
    if completions[0] in globals():
        globals()[completions[0]]()
    return [1]
f.per_completion = True
"""


@pytest.mark.parametrize("kind", ["loop", "swallow", "regex", "child"])
def test_a_hung_call_costs_its_completion_only(reward_set: Any, tmp_path: Path, kind: str) -> None:
    path = write_module(tmp_path, HANGS)
    rewards = reward_set(f"{path}:f", "exact", reward_timeout=0.5)
    batch = make_batch(({"answer": "a"}, ["a", kind, "b"]), ({"answer": "a"}, ["c", "a", "a"]))
    start = time.monotonic()
    result = rewards.score(batch)
    assert time.monotonic() - start < 10
    same(result.total, [[2, None, 1], [1, 2, 2]])
    assert result.failures == 1 and result.reasons == ("reward f: time-out: took more than 0.5 s",)
    assert rewards.score(make_batch(({"answer": "a"}, ["a"]))).total.tolist() == [[2]]
    if kind == "child":  # what the call started has ended with it
        assert wait_until_gone(int((tmp_path / "child").read_text()), 5)


def test_exceptions_are_counted_and_logged_once(
    reward_set: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_module(
        tmp_path,
        """
        import os
        def f(completions):
            if "bad" in completions: raise KeyError("no such thing")
            if "exit" in completions: os._exit(3)
            return [1] * len(completions)
        f.per_group = True
        """,
    )
    rewards = reward_set(f"{path}:f")
    batch = make_batch(({}, ["a", "bad"]), ({}, ["a", "b"]), ({}, ["exit", "b"]), ({}, ["a", "b"]))
    with caplog.at_level(logging.WARNING):
        results = [rewards.score(batch) for _ in range(2)]
    for result in results:
        same(result.total, [[None, None], [1, 1], [None, None], [1, 1]])
        assert result.failures == 4
        assert result.reasons[0] == "reward f: KeyError: 'no such thing' (mine.py, line 4)"
        assert "exit code 3" in result.reasons[1]
    assert [r.getMessage().count("left unscored") for r in caplog.records] == [1, 1]  # one per kind, not per step


@pytest.mark.parametrize(
    "body, words",
    [
        ("return [1]", r"f returned 1 scores for 2 completions"),
        ("return None", r"f returned None; need a list"),
        ("return ['good', 'bad']", r"f returned the score 'good'; need a number"),
        ("return [1, float('inf')]", r"f returned the score inf; need a finite"),
    ],
)
def test_a_broken_function_is_an_error_that_names_it(reward_set: Any, tmp_path: Path, body: str, words: str) -> None:
    path = write_module(tmp_path, f"def f(completions): {body}")
    rewards = reward_set(f"{path}:f")
    with pytest.raises(RewardError, match=words):
        rewards.score(make_batch(({}, ["a", "b"])))
    assert isinstance(RewardError(""), ValueError)


def test_random_rewards_depend_on_the_samples_only(reward_set: Any, tmp_path: Path) -> None:
    path = write_module(
        tmp_path,
        """
        import random
        import numpy
        def f(completions): return [random.random() + numpy.random.rand() for _ in completions]
        """,
    )
    rewards = reward_set(f"{path}:f")

    def draw(sample: int) -> Any:
        batch = RewardBatch(make_batch(({}, ["a"])).prompts, [[completion("a", sample)]], [["a"]])
        return rewards.score(batch).total.item()

    first = [draw(0), draw(1)]
    assert first[0] != first[1]
    assert [draw(0), draw(1)] == first  # as after a resume


def test_task_reward(reward_set: Any) -> None:
    batch = make_batch(({"answer": "7"}, ["7", "8"]))
    same(reward_set("task").score(batch).total, [[1, 0]])  # exact match where the task has no scorer
    with pytest.raises(ConfigError, match=r"task asks for 'answer'"):
        reward_set("task", fields=())


def test_task_reward_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    from rhotrain.train.tasks import load_task

    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task(TaskConfig(task="chain_sum", task_args=args, train_size=2), 0)
    rewards = RewardSet(RewardConfig(rewards=("task", "last_number")), task)
    answers = [q.fields["answer"] for q in task.train]
    prompts = [EncodedPrompt((1,), q.prompt or "", q) for q in task.train]
    groups = [[completion(f"<answer>{a}</answer>"), completion("nothing")] for a in answers]
    result = rewards.score(RewardBatch.make(prompts, groups, Letters()))
    rewards.close()
    same(result.total, [[2, 0], [2, 0]])
    same(result.parts["task"], [[1, 0], [1, 0]])


# Finding functions


def test_package_functions_resolve_from_the_working_folder(
    reward_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards_pkg").mkdir()
    write_module(tmp_path / "my_rewards_pkg", "def f(completions): return [3 for _ in completions]", "scores.py")
    monkeypatch.chdir(tmp_path)
    same(reward_set("my_rewards_pkg.scores:f*2").score(make_batch(({}, ["a"]))).total, [[6]])


@pytest.mark.parametrize(
    "rewards, args, words",
    [
        (("exat",), {}, "'exat' does not work; did you mean 'exact'"),
        (("nothing.at.all:f",), {}, "nothing.at.all raised ModuleNotFoundError"),
        (("{folder}/none.py:f",), {}, "there is no file"),
        (("{folder}/mine.py:scor",), {}, "has no function 'scor'; did you mean score"),
        (("{folder}/broken.py:f",), {}, "importing .*broken.py raised ZeroDivisionError.*line 2"),
        (("{folder}/mine.py:score",), {}, "score asks for 'colour', which 'sums.jsonl' does not have; .*answer"),
        (("{folder}/mine.py:score",), {"score": {"color": 1}}, "does not take 'color'; did you mean 'colour'"),
        (("exact*x",), {}, "'exact\\*x' does not work; after \\* comes a number"),
        (("exact*inf",), {}, "finite"),
        (("exact", "exact*2"), {}, "'exact' is there 2 times"),
        (("exact",), {"exat": {}}, "'exat' is not among the rewards; did you mean 'exact'"),
        (("exact",), {"exact": 3}, "exact is 3; need a table"),
        (("regex",), {}, "regex needs its arguments: .*pattern"),
        (("regex",), {"regex": {"pattern": "("}}, "regex does not work with .*unterminated"),
        (("length",), {"length": {"min_tokens": 5, "max_tokens": 2}}, "min_tokens \\(5\\) <= max_tokens \\(2\\)"),
        (("repetition",), {"repetition": {"n": 0}}, "n is 0"),
    ],
)
def test_mistakes_are_found_at_the_start(
    reward_set: Any, tmp_path: Path, rewards: tuple[str, ...], args: dict[str, Any], words: str
) -> None:
    write_module(tmp_path, "def score(completions, colour): return [0 for _ in completions]")
    write_module(tmp_path, "\n1 / 0", "broken.py")
    with pytest.raises(ConfigError, match=words):
        reward_set(*(r.format(folder=tmp_path) for r in rewards), reward_args=args)


def test_names_and_weights() -> None:
    config = RewardConfig(rewards=("a/x.py:f*2", "b/x.py:f", "p.q:g*-1.5", "exact"))
    assert [(s.name, s.weight) for s in parse_rewards(config)] == [
        ("a/x.py:f", 2.0),
        ("b/x.py:f", 1.0),
        ("g", -1.5),
        ("exact", 1.0),
    ]
    both = RewardConfig(rewards=("regex", "exact"), reward_args={"regex": {"pattern": "x"}}, reward_timeout=3.0)
    metric = metric_config(both, "regex")
    assert metric == RewardConfig(rewards=("regex",), reward_args=both.reward_args, reward_timeout=3.0)
    assert metric_config(both, "last_number").reward_args == {}


# The end of the process


def run_script(folder: Path, end: str) -> tuple["subprocess.CompletedProcess[str]", int]:
    """Run a program with a reward set in it; return it and the id of its reward process."""
    path = write_module(
        folder,
        """
        import os, time
        def f(completions):
            print("from a reward function")
            open("pid", "w").write(str(os.getpid()))
            if "hang" in completions:
                while True: pass
            return [1] * len(completions)
        """,
    )
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_rewards import *
rewards = RewardSet(RewardConfig(rewards=("{path}:f",), reward_timeout=0.5), make_task())
print(rewards.score(make_batch(({{}}, ["a"]))).total.tolist(), flush=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, text=True, capture_output=True, timeout=120, check=False
    )
    return done, int((folder / "pid").read_text())


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether process `pid` ends within that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # ended; whoever adopted it has not collected it yet
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "end, code",
    [
        ("rewards.score(make_batch(({}, ['hang'])))", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_nothing_is_left_when_the_program_ends(tmp_path: Path, end: str, code: int) -> None:
    done, pid = run_script(tmp_path, end)
    assert done.stdout.splitlines()[0] == "[[1.0]]", done.stderr
    assert "from a reward function" in done.stderr  # prints do not disturb the protocol
    assert done.returncode == code
    assert wait_until_gone(pid, 5)


def test_the_answer_to_an_interrupted_request_is_not_taken_for_the_next(reward_set: Any, tmp_path: Path) -> None:
    path = write_module(
        tmp_path,
        """
        import time
        def f(completions):
            time.sleep(0.6 if completions == ["slow"] else 0)
            return [{"slow": 1, "a": 2}[c] for c in completions]
        """,
    )
    rewards = reward_set(f"{path}:f")

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), 2)  # SIGINT

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        rewards.score(make_batch(({}, ["slow"])))
        time.sleep(5)
    same(rewards.score(make_batch(({}, ["a"]))).total, [[2]])  # not the late answer to "slow"


@pytest.mark.slow
def test_a_hung_orphan_ends_itself(tmp_path: Path) -> None:
    end = """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGKILL))).start()
rewards.score(make_batch(({}, ['hang'])))
"""
    _, pid = run_script(tmp_path, end)
    assert wait_until_gone(pid, 40)


# Soft overlong punishment


def test_overlong_completions_lose_in_proportion(tmp_path: Path) -> None:
    """max_new_tokens 10, buffer 4, penalty 2: lengths 5, 6, 7, 9, 10 lose 0, 0, 0.5, 1.5, 2; an engine error stays
    unscorable. A part of its own, of weight 1."""
    path = write_module(tmp_path, "def one(completions):\n    return [1.0] * len(completions)\n")
    config = RewardConfig(rewards=(f"{path}:one*3",), overlong_buffer=4, overlong_penalty=2.0)
    rewards = RewardSet(config, make_task(), max_new_tokens=10)
    try:
        result = rewards.score(make_batch(({}, ["a" * n for n in (5, 6, 7, 9, 10)]), ({}, ["", "a", "b", "c", "d"])))
    finally:
        rewards.close()
    assert result.parts["overlong"][0].tolist() == [0.0, 0.0, -0.5, -1.5, -2.0]
    same(result.total, [[3.0, 3.0, 2.5, 1.5, 1.0], [None, 3.0, 3.0, 3.0, 3.0]])
    assert result.weights == {"one": 3.0, "overlong": 1.0}


def test_evaluation_knows_nothing_of_the_punishment() -> None:
    assert metric_config(RewardConfig(overlong_buffer=4), "task").overlong_buffer == 0


def test_the_name_of_the_punishment_is_taken(tmp_path: Path) -> None:
    path = write_module(tmp_path, "def overlong(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match="rewards: 'overlong' is the name of what overlong_buffer subtracts"):
        parse_rewards(RewardConfig(rewards=(f"{path}:overlong",), overlong_buffer=4))
