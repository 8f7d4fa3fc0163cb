"""Where questions come from: counts, disjoint sets, and one clear message for everything that cannot work."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rhotrain.train.config import ConfigError, TaskConfig
from rhotrain.train.tasks import Task, check_task, load_task, task_scorer

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # a + b and a - b: 200 questions in all


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def texts(questions: list[Any]) -> list[str]:
    return [q.prompt for q in questions]


def assert_disjoint(task: Task) -> None:
    train, held_out = {q.key for q in task.train}, {q.key for q in task.held_out}
    assert not train & held_out
    assert len(train) == len(task.train) and len(held_out) == len(task.held_out)


# reasoning-gym


def test_gym_sets_are_disjoint_complete_and_repeatable() -> None:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig(task="chain_sum", task_args=SMALL | {"max_terms": 3}, train_size=300)
    task = load_task(config, 200)
    assert len(task.train) == 300 and len(task.held_out) == 200 and task.notes == ()
    assert_disjoint(task)
    for question in (task.train[0], task.held_out[0]):  # the answer is right: Python's own arithmetic
        assert question.prompt is not None
        assert eval(question.prompt.partition(":")[2].strip(" =")) == int(question.fields["answer"])
    again = load_task(config, 200)
    assert texts(again.train) == texts(task.train) and texts(again.held_out) == texts(task.held_out)
    other = load_task(TaskConfig(task="chain_sum", task_args=config.task_args, train_size=300, task_seed=1), 200)
    assert texts(other.train) != texts(task.train)


def test_gym_exhausts_a_small_task_and_says_so() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(TaskConfig(task="chain_sum", task_args=SMALL), 100)
    assert len(task.train) == len(task.held_out) == 100  # 2 operators x 10 x 10 digits, none missed
    assert_disjoint(task)
    assert "200 distinct questions" in task.notes[0] and "train_size=2000" in task.notes[0]


def test_too_few_distinct_questions_name_the_count_and_the_knob() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"eval_size: 101 .* only 200 distinct .* eval_size to 100 .* task_args"):
        load_task(TaskConfig(task="chain_sum", task_args=SMALL), 101)


def test_enough_questions_may_all_be_used_even_when_more_than_half_are_held_out() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(TaskConfig(task="chain_sum", task_args=SMALL, train_size=40), 120)
    assert (len(task.train), len(task.held_out)) == (40, 120)


def test_gym_scorer_is_the_datasets_own() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(TaskConfig(task="chain_sum", task_args=SMALL, train_size=4), 0)
    fields = task.train[0].fields
    answer = fields["answer"]
    assert task.held_out == []
    assert task.score(answer, fields) == 1.0
    assert task.score(f"<think>99</think> <answer> {answer} </answer>", fields) == 1.0
    assert task.score(str(int(answer) + 1), fields) < 1.0
    # prime_factorization's scorer calls int() on the text: a wrong answer, not an accident
    scorer = task_scorer(TaskConfig(task="prime_factorization"))
    assert scorer is not None
    entry = load_task(TaskConfig(task="prime_factorization", train_size=1), 0).train[0].fields
    assert scorer("zzz", entry) == 0.0 and scorer(entry["answer"], entry) == 1.0


def test_composite_takes_plain_tables() -> None:
    pytest.importorskip("reasoning_gym")
    parts: list[dict[str, Any]] = [{"name": "chain_sum", "config": SMALL}, {"name": "leg_counting", "weight": 2.0}]
    task = load_task(TaskConfig(task="composite", task_args={"datasets": parts}, train_size=20), 5)
    assert_disjoint(task)
    sources = {q.fields["metadata"]["source_dataset"] for q in task.train}
    assert sources == {"chain_sum", "leg_counting"}
    assert all(task.score(q.fields["answer"], q.fields) == 1.0 for q in task.train)


@pytest.mark.parametrize(
    "task, args, words",
    [
        ("chain_summ", {}, ["'chain_summ'", "chain_sum", "tiny-sums", ".jsonl", "hf:PATH"]),
        ("qqqqq", {}, ["'qqqqq'", "datasets, for example chain_sum"]),
        ("tiny_sums", {}, ["did you mean 'tiny-sums'"]),
        ("tiny-sums", {"digits": 2}, ["'digits'", "tiny-sums takes: none"]),
        ("chain_sum", {"min_term": 2}, ["'min_term'", "did you mean 'min_terms'", "max_digits, max_terms"]),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, ["max_terms must be >= min_terms"]),
        ("chain_sum", {"seed": 1}, ["'seed'", "use task_seed"]),
        ("chain_sum", {"size": 1}, ["'size'", "use train_size"]),
        ("nowhere.jsonl", {}, ["'nowhere.jsonl'", "no such file"]),
        ("hf:", {}, ["after hf:"]),
        ("hf:./nowhere", {}, ["no such file or folder"]),
        ("hf:./nowhere", {"spilt": "x"}, ["'spilt'", "did you mean 'split'"]),
    ],
)
def test_check_task_finds_mistakes_without_making_questions(task: str, args: dict[str, Any], words: list[str]) -> None:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError) as caught:
        check_task(TaskConfig(task=task, task_args=args))
    for word in words:
        assert word in str(caught.value)


def test_missing_reasoning_gym_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # importing it now raises ImportError
    with pytest.raises(ConfigError, match=r"'chain_sum' .* pip install 'rhotrain\[tasks\]'"):
        check_task(TaskConfig(task="chain_sum"))
    check_task(TaskConfig(task="tiny-sums"))  # does not need it


@pytest.mark.slow
def test_every_reasoning_gym_dataset_loads_and_scores() -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    for name in DATASETS:
        args = {"datasets": [{"name": "chain_sum"}]} if name == "composite" else {}
        task = load_task(TaskConfig(task=name, task_args=args, train_size=4), 2)
        assert (len(task.train), len(task.held_out)) == (4, 2), name
        assert_disjoint(task)
        entry = task.train[0].fields
        assert 0.0 <= task.score("zzz", entry) <= 1.0, name
        if entry["answer"] is not None:
            assert task.score(entry["answer"], entry) == 1.0, name


# tiny-sums


def test_tiny_sums_keeps_its_own_split() -> None:
    from rhotrain.model.tiny import all_questions, split_questions

    task = load_task(TaskConfig(), 200)
    assert_disjoint(task)
    assert len(task.held_out) == 200 and set(texts(task.held_out)) < {p for p, _ in split_questions()[1]}
    assert set(texts(task.train)) == {p for p, _ in split_questions()[0]} and task.notes == ()
    answers = dict(all_questions())
    assert all(q.fields == {"answer": answers[q.prompt]} for q in task.train + task.held_out if q.prompt)
    assert len(load_task(TaskConfig(train_size=30), 5).train) == 30
    assert task.score(" 7 ", {"answer": "7"}) == 1.0 and task.score("17", {"answer": "7"}) == 0.0


# JSONL


def test_jsonl_rows_become_questions(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"prompt": "a", "answer": 1, "level": "hard"},
        "",
        {"messages": conversation, "answer": "x"},
        {"prompt": conversation[1:]},  # TRL's conversational prompts
        {"prompt": " a ", "answer": 2},  # the first question again
    ]
    task = load_task(TaskConfig(task=write_jsonl(tmp_path / "q.jsonl", rows)), 0)
    assert [q.prompt for q in task.train] == ["a", None, None]
    assert task.train[0].fields == {"answer": 1, "level": "hard"}
    assert task.train[1].messages == tuple(conversation) and task.train[2].messages == (conversation[1],)
    assert task.field_names == ("answer", "level")
    assert "1 of 4 rows repeat" in task.notes[0]


def test_jsonl_split_is_by_text_and_seeded(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 60}", "answer": i} for i in range(120)]  # every text twice
    path = write_jsonl(tmp_path / "q.jsonl", rows)
    task = load_task(TaskConfig(task=path), 20)
    assert (len(task.train), len(task.held_out)) == (40, 20)
    assert_disjoint(task)
    assert texts(load_task(TaskConfig(task=path), 20).held_out) == texts(task.held_out)
    assert texts(load_task(TaskConfig(task=path, task_seed=1), 20).held_out) != texts(task.held_out)
    with pytest.raises(ConfigError, match=r"eval_size: 31 .* only 60 distinct .* eval_size to 30 .* add questions"):
        load_task(TaskConfig(task=path), 31)


def test_jsonl_eval_file_leaves_training(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"ask": f"q{i}", "gold": i} for i in range(10)])
    held = write_jsonl(tmp_path / "eval.jsonl", [{"ask": f"q{i}", "gold": i} for i in (2, 5, 77)])
    args = {"eval_file": held, "prompt_column": "ask", "answer_column": "gold"}
    task = load_task(TaskConfig(task=train, task_args=args), 100)
    assert texts(task.held_out) == ["q2", "q5", "q77"] and task.held_out[2].fields == {"answer": 77}
    assert texts(task.train) == [f"q{i}" for i in range(10) if i not in (2, 5)]
    assert "2 training questions" in task.notes[0]
    fewer = load_task(TaskConfig(task=train, task_args=args), 1)
    assert len(fewer.held_out) == 1 and len(fewer.train) == 8  # no text of the file may be trained on


@pytest.mark.parametrize(
    "line, words",
    [
        ("{oops", ["q.jsonl:3", "not JSON"]),
        ([1, 2], ["q.jsonl:3", "list does not work"]),
        ({"answer": 1}, ["q.jsonl:3", "neither `prompt` nor `messages`", "answer"]),
        ({"prompt": "a", "messages": []}, ["q.jsonl:3", "both"]),
        ({"prompt": "  "}, ["q.jsonl:3", "not empty"]),
        ({"prompt": 5}, ["q.jsonl:3", "prompt is 5"]),
        ({"messages": []}, ["q.jsonl:3", "messages is []"]),
        ({"messages": [{"role": "user"}]}, ["q.jsonl:3", "message 0", "role and content"]),
        ({"messages": [{"role": "assistant", "content": "x"}]}, ["q.jsonl:3", "assistant_prefill"]),
        ({"prompt": "a", "completion_ids": 1}, ["q.jsonl:3", "'completion_ids'", "rename"]),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path: Path, line: Any, words: list[str]) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "first"}, "", line])
    with pytest.raises(ConfigError) as caught:
        load_task(TaskConfig(task=path), 0)
    for word in words:
        assert word in str(caught.value)


def test_jsonl_that_is_not_utf8_names_the_line_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin.jsonl:2: not UTF-8 .*save the file as UTF-8"):
        load_task(TaskConfig(task=str(path)), 0)
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert [q.prompt for q in load_task(TaskConfig(task=str(path)), 0).train] == ["a"]


def test_jsonl_missing_column_and_empty_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "a"}])
    with pytest.raises(ConfigError, match=r"q\.jsonl:1: no 'ask' \(prompt_column\); the row has: question"):
        load_task(TaskConfig(task=path, task_args={"prompt_column": "ask"}), 0)
    with pytest.raises(ConfigError, match="no rows"):
        load_task(TaskConfig(task=write_jsonl(tmp_path / "e.jsonl", [""])), 0)


# Hugging Face datasets


@pytest.mark.parametrize("form", ["folder", "file.parquet", "file.csv", "save_to_disk"])
def test_hf_local_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows: dict[str, list[Any]] = {
        "question": [f"q{i}" for i in range(8)],
        "final": [str(i) for i in range(8)],
        "level": list(range(8)),
    }
    train = datasets.Dataset.from_dict(rows)
    test = datasets.Dataset.from_dict({k: v[6:] for k, v in rows.items()})
    args: dict[str, Any] = {"prompt_column": "question", "answer_column": "final"}
    path = tmp_path / "data"
    path.mkdir()
    if form == "folder":
        train.to_json(path / "train.jsonl")
        test.to_json(path / "test.jsonl")
    elif form == "save_to_disk":
        datasets.DatasetDict(train=train, test=test).save_to_disk(path)
    else:
        path = path / form
        train.to_parquet(path) if form.endswith("parquet") else train.to_csv(path)
    split = form in ("folder", "save_to_disk")
    task = load_task(TaskConfig(task=f"hf:{path}", task_args=args | ({"eval_split": "test"} if split else {})), 2)
    assert_disjoint(task)
    assert len(task.held_out) == 2 and len(task.train) == 6
    if split:
        assert texts(task.held_out) == ["q6", "q7"]
    question = task.train[0]
    assert question.prompt is not None and f"q{question.fields['answer']}" == question.prompt
    assert str(question.fields["level"]) == str(question.fields["answer"])


def test_hf_wrong_split_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(ConfigError, match=r"split 'valid'"):
        load_task(TaskConfig(task=f"hf:{tmp_path}", task_args={"split": "valid"}), 0)
