"""Limits and expected lengths per prompt, and the number of CPU threads: what they change, and what they must not."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import assert_same, double_model, make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.rollout import threads
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine

PROMPTS = make_prompts(5, 17, 9, 12, 7)
PLAIN = SamplingParams(max_new_tokens=8, temperature=1.3, ignore_eos=True, seed=3)


def ends(engine: Engine, n: int = 1, **options: Any) -> list[tuple[int, int]]:
    """(prompt, member) in the order in which the completions end."""
    found: list[tuple[int, int]] = []
    engine.generate(PROMPTS, PLAIN, n=n, on_finish=lambda p, g, c: found.append((p, g)), **options)
    return found


def test_limits_per_prompt_are_kept_to_the_token() -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    limits = [3, 20, 1, 8, 2]
    groups = engine.generate(PROMPTS, PLAIN, n=2, max_new_tokens=limits)
    assert [[len(c.token_ids) for c in group] for group in groups] == [[limit] * 2 for limit in limits]
    assert {c.finish_reason for group in groups for c in group} == {"length"}
    free = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, temperature=1.3, ignore_eos=True, seed=3), n=2)
    for limit, cut, whole in zip(limits, tokens(groups), tokens(free)):
        assert cut == [ids[:limit] for ids in whole], "a limit only cuts"


def test_a_limit_per_prompt_decides_what_fits() -> None:
    engine = Engine(tiny_model("llama"), num_pages=2)
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    engine.generate([[5] * 20, [6] * 30], params, max_new_tokens=[13, 3])
    assert engine.stats.peak_pages == 2
    with pytest.raises(ValueError, match=r"prompt 1: 30 tokens \+ max_new_tokens 4 = 34 takes 3 pages"):
        engine.generate([[5] * 20, [6] * 30], params, max_new_tokens=[13, 4])


def test_the_longest_expected_start_first() -> None:
    engine = Engine(tiny_model("llama"), num_pages=60, max_running=1)
    assert [p for p, _ in ends(engine)] == [0, 1, 2, 3, 4], "the order of the prompts, unless told otherwise"
    assert [p for p, _ in ends(engine, expected_tokens=[1, 5, 2, 9, 3])] == [3, 1, 4, 2, 0]
    assert [p for p, _ in ends(engine, expected_tokens=[2.5, 7.0, 2.5, 7.0, 0.0])] == [1, 3, 0, 2, 4], "ties keep order"
    assert [p for p, _ in ends(engine, expected_tokens=[4] * 5)] == [0, 1, 2, 3, 4]
    assert ends(engine, n=2, expected_tokens=[1, 5, 2, 9, 3]) == [(p, g) for p in (3, 1, 4, 2, 0) for g in (0, 1)]


@pytest.mark.parametrize("size", [{"max_running": 4}, {"num_pages": 10}, {"max_batch_tokens": 7}], ids=str)
def test_expected_lengths_change_nothing_that_is_drawn(size: dict[str, Any]) -> None:
    engine = Engine(double_model(), **{"num_pages": 60, "page_size": 4, **size})
    limits = [3, 2, 5, 8, 8]
    plain = engine.generate(PROMPTS, PLAIN, n=2, first_sample=40, max_new_tokens=limits)
    steps = engine.stats.steps
    for expected in (limits, [-0.0, 1, 2, 3, 4], [float(2**70), 0.5, 1e-9, 3, 3]):
        found = engine.generate(PROMPTS, PLAIN, n=2, first_sample=40, max_new_tokens=limits, expected_tokens=expected)
        assert_same(found, plain)
        assert [[c.sample for c in g] for g in found] == [[40 + 2 * p, 41 + 2 * p] for p in range(5)]
        if size == {"max_running": 4} and expected is limits:
            assert engine.stats.steps < steps, "the long ones do not come last"


@pytest.mark.parametrize("name", ["max_new_tokens", "expected_tokens"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_number_per_prompt(name: str, count: int) -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    options: dict[str, Any] = {name: [5] * count}
    with pytest.raises(ValueError, match=f"{count} {name} for 2 prompts"):
        engine.generate(PROMPTS[:2], PLAIN, **options)
    assert engine.generate([], PLAIN, **{name: []}) == []  # type: ignore[arg-type]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", [0, -3, float("nan"), 2.5])
def test_impossible_limits_are_refused_by_name(value: Any) -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    with pytest.raises(ValueError, match=rf"max_new_tokens\[1\].*{value}"):
        engine.generate(PROMPTS[:2], PLAIN, max_new_tokens=[5, value])
    assert engine.stats.steps == 0 and engine.pool.free == 60


@pytest.mark.parametrize("value", [-1, float("nan"), float("-inf")])
def test_impossible_expectations_are_refused_by_name(value: Any) -> None:
    """NaN has no place in an order: it would make the order of the others depend on where it stands."""
    engine = Engine(tiny_model("llama"), num_pages=60)
    with pytest.raises(ValueError, match=rf"expected_tokens\[1\].*{value}"):
        engine.generate(PROMPTS[:2], PLAIN, expected_tokens=[5, value])
    assert engine.stats.steps == 0 and engine.pool.free == 60


def test_a_limit_below_the_minimum_is_refused() -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    params = SamplingParams(max_new_tokens=8, min_new_tokens=4)
    with pytest.raises(ValueError, match=r"max_new_tokens\[1\].*3.*at least 4"):
        engine.generate(PROMPTS[:2], params, max_new_tokens=[4, 3])
    assert all(len(c.token_ids) >= 4 for c in engine.generate(PROMPTS[:2], params, max_new_tokens=[4, 5])[1])


# ---- CPU threads ----------------------------------------------------------------------------------------------------


@pytest.fixture
def thread_count() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_the_engine_takes_its_threads_for_its_steps_only(thread_count: int) -> None:
    torch.set_num_threads(1)
    engine = Engine(tiny_model("llama"), num_pages=60, threads=2)
    inside: list[int] = []
    stream = engine.stream(PROMPTS, PLAIN, on_tokens=lambda count: inside.append(torch.get_num_threads()))
    next(stream)
    assert torch.get_num_threads() == 1, "whoever takes a completion has the threads that he had"
    list(stream)
    assert set(inside) == {2} and torch.get_num_threads() == 1

    def fail(count: int) -> None:
        raise KeyError("progress bar")

    with pytest.raises(KeyError, match="progress bar"):
        engine.generate(PROMPTS, PLAIN, on_tokens=fail)
    assert torch.get_num_threads() == 1
    inside.clear()
    plain = Engine(tiny_model("llama"), num_pages=60)
    plain.generate(PROMPTS, PLAIN, on_tokens=lambda count: inside.append(torch.get_num_threads()))
    assert set(inside) == {1}
    with pytest.raises(ValueError, match="threads: 0"):
        Engine(tiny_model("llama"), num_pages=60, threads=0)


def test_candidates_are_powers_of_two_and_all_cores() -> None:
    assert [threads.candidates(cores) for cores in (1, 2, 3, 4, 6, 16)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]


def test_fewer_threads_are_taken_only_when_clearly_faster() -> None:
    assert threads.choose({1: 1.0, 2: 0.6, 4: 0.35}) == 4
    assert threads.choose({1: 1.0, 2: 0.95}) == 2 and threads.choose({1: 0.95, 2: 1.0}) == 2, "a tie keeps the cores"
    assert threads.choose({1: 0.5, 2: 1.0}) == 1 and threads.choose({1: 5.0, 2: 1.0, 4: 3.0}) == 2
    assert threads.choose({1: 0.1, 2: 1.0, 4: 9.0}) == 1


def test_measuring_leaves_the_number_of_threads_alone(thread_count: int) -> None:
    seconds = threads.decode_seconds([1])
    assert set(seconds) == {1} and 0 < seconds[1] < 5
    assert torch.get_num_threads() == thread_count
    assert threads.decode_threads(1) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 1.5}, "n=1.5"),
        ({"n": True}, "n=True"),
        ({"first_sample": -1}, "first_sample=-1"),
        ({"first_sample": 2**63}, "first_sample=9223372036854775808"),
        ({"sampling": None}, "sampling is None"),
        ({"prompts": 5}, "prompts is 5"),
        ({"prompts": ["hello"]}, "prompt 0: 'hello' is text; encode it first"),
        ({"prompts": [[5, 6], [5.7]]}, r"prompt 1: \[5.7\] is no list of token ids"),
        ({"prompts": [{"input_ids": [5]}]}, "prompt 0: .* is no list of token ids"),
        ({"max_new_tokens": 8}, "max_new_tokens is 8"),
        ({"expected_tokens": 8}, "expected_tokens is 8"),
        ({"expected_tokens": ["4"]}, r"expected_tokens\[0\]: '4'"),
        ({"expected_tokens": [None]}, r"expected_tokens\[0\]: None"),
    ],
)
def test_wrong_types_are_refused_by_name_before_anything_runs(change: dict[str, Any], message: str) -> None:
    engine = Engine(tiny_model("llama"), num_pages=20)
    arguments = {"prompts": [[5, 6, 7]], "sampling": SamplingParams(max_new_tokens=3), **change}
    with pytest.raises(ValueError, match=message):
        engine.generate(arguments.pop("prompts"), arguments.pop("sampling"), **arguments)
    assert engine.stats.steps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 1.5}, r"Engine\.page_size: 1\.5 is no integer"),
        ({"kv_memory_bytes": 1e9}, r"Engine\.kv_memory_bytes: 1000000000\.0 is no integer"),
        ({"num_pages": 0}, r"Engine\.num_pages: 0 is too small"),
        ({"max_running": 1.5}, r"Engine\.max_running: 1\.5 is no integer"),
        ({"threads": 100_000}, r"Engine\.threads: 100000 threads on \d+ cores"),
    ],
)
def test_engine_sizes_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model("llama"), **{"num_pages": 20 if "kv_memory_bytes" not in change else None, **change})
    with pytest.raises(ValueError, match="LlamaForCausalLM is no LoadedModel; take load_model"):
        Engine(tiny_model("llama").model, num_pages=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop_strings": "abc"}, "stop_strings"),
        ({"stop_strings": (5,)}, "stop_strings"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"max_new_tokens": 4.0}, "max_new_tokens"),
        ({"min_new_tokens": 1.5}, "min_new_tokens"),
        ({"top_k": 0.5}, "top_k"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": None}, "top_p"),
    ],
)
def test_sampling_settings_of_a_wrong_type_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field}: "):
        SamplingParams(**change)


def test_arrays_do_as_limits_and_expectations() -> None:
    engine = Engine(tiny_model("llama"), num_pages=20)
    options: dict[str, Any] = {"max_new_tokens": np.array([2, 3]), "expected_tokens": np.array([1.0, 2.0])}
    prompts: Any = np.array([[5, 6], [7, 8]])
    groups = engine.generate(prompts, SamplingParams(ignore_eos=True), **options)
    assert [len(group[0].token_ids) for group in groups] == [2, 3]
