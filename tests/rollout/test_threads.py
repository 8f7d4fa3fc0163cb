"""The number of threads to decode with: the choice, and that an engine's threads end with its steps."""

import pytest
import torch
from helpers_model import tiny_model

from rhotrain.rollout import threads
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.95}, 2),
        ({1: 0.95, 2: 1.0}, 2),  # a tie keeps the cores
        ({1: 0.5, 2: 1.0}, 1),
        ({1: 4.0, 2: 2.0, 4: 1.0, 8: 1.3}, 4),
        ({1: 1.0, 2: 0.9, 4: 0.95, 8: 2.0}, 4),
    ],
)
def test_fewer_threads_are_taken_when_they_are_clearly_faster(seconds: dict[int, float], best: int) -> None:
    assert threads.choose(seconds) == best


def test_candidates_are_powers_of_two_and_all_cores() -> None:
    assert [threads.candidates(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_measuring_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    found = threads.decode_seconds([1, 2])
    assert set(found) == {1, 2} and all(time > 0 for time in found.values())
    assert torch.get_num_threads() == before

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch.nn.functional, "linear", fail)
    with pytest.raises(MemoryError):
        threads.decode_seconds([1 if before > 1 else 2])
    assert torch.get_num_threads() == before
    assert threads.decode_threads(1) == 1, "one core needs no measurement"


def test_an_engine_runs_its_steps_with_its_threads() -> None:
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    engine = Engine(tiny_model("llama"), num_pages=20, threads=other)
    seen = []
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    engine.generate([[5, 6, 7]], sampling, on_tokens=lambda _: seen.append(torch.get_num_threads()))
    assert set(seen) == {other} and torch.get_num_threads() == before
    for _ in engine.stream([[5, 6, 7]], sampling):
        assert torch.get_num_threads() == before, "the caller's code runs with the caller's threads"
    with pytest.raises(ValueError, match=r"Engine\.threads: 0 is too small"):
        Engine(tiny_model("llama"), num_pages=20, threads=0)
