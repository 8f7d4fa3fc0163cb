"""Memory of many calls: one pool, made once; nothing else stays."""

import gc
import weakref
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.model.packed import packed_weights
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine

PLAIN = SamplingParams(max_new_tokens=4, temperature=1.3, ignore_eos=True, seed=3)


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def addresses(engine: Engine) -> list[int]:
    pools = engine.runner.pools
    return [pool.data_ptr() for pool in (*pools.keys, *pools.values)]


@pytest.mark.parametrize(("case", "calls"), [("plain", 200), ("kept sets, overlap, stop strings", 60)])
def test_many_calls_leave_nothing_behind(case: str, calls: int) -> None:
    """As in training: another policy_version each time, prompts of other lengths, packed weights made anew."""
    loaded = tiny_model("llama")
    packed_weights(loaded).min_elements = 1
    engine = Engine(loaded, num_pages=40, page_size=4, max_running=6, overlap=case != "plain")
    params = PLAIN
    if case != "plain":
        params = SamplingParams(max_new_tokens=4, top_k=8, keep_sets=True, stop_strings=("ab",), seed=3)
    process, at, tapes = psutil.Process(), addresses(engine), engine.runner.tapes
    assert tapes is not None
    objects, resident = 0, 0
    for call in range(calls):
        if call == 20:
            tapes.drop()
            objects, resident = live_tensors(), process.memory_info().rss
        with torch.no_grad():
            loaded.head.weight.mul_(1.001)
        loaded.policy_version += 1
        engine.generate(make_prompts(3 + call % 20, 9), params, n=2)
        assert engine.pool.free == 40
    tapes.drop()  # a tape holds a few constants, and there are at most MOST_TAPES
    assert live_tensors() == objects
    assert process.memory_info().rss - resident < 24 << 20
    assert addresses(engine) == at, "the pool was never allocated again"


def pool_tensors(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    pools = engine.runner.pools
    return [weakref.ref(pool) for pool in (*pools.keys, *pools.values)]


def test_release_frees_the_pool_and_the_next_call_makes_it_again() -> None:
    loaded = tiny_model("llama")
    packed_weights(loaded).min_elements = 1
    engine = Engine(loaded, num_pages=40, page_size=4)
    prompts = make_prompts(9, 14)
    before = engine.generate(prompts, PLAIN, n=3)
    assert packed_weights(loaded).packed_bytes > 0 and engine.runner.pools.bytes > 0
    tensors = pool_tensors(engine)
    engine.release()
    gc.collect()
    assert all(tensor() is None for tensor in tensors), "somebody still holds the pool"
    assert engine.runner.pools.bytes == 0 and packed_weights(loaded).packed_bytes == 0
    engine.release()
    assert tokens(engine.generate(prompts, PLAIN, n=3)) == tokens(before)
    assert engine.runner.pools.bytes == 2 * 2 * 41 * 4 * 2 * 8 * 4, "layers, keys and values, pages, slots, heads, dims"


@pytest.mark.parametrize("end", ["exception", "close"])
def test_a_call_that_was_cut_short_holds_no_tensors(end: str) -> None:
    engine = Engine(tiny_model("llama"), num_pages=40, page_size=4, overlap=True)
    prompts = make_prompts(9, 14, 5)

    def fail(*_: Any) -> None:
        raise KeyError("reward")

    def cut() -> None:
        if end == "close":
            stream = engine.stream(prompts, PLAIN, n=2, max_new_tokens=[2, 9, 9])
            next(stream)
            stream.close()
            return
        with pytest.raises(KeyError):
            engine.generate(prompts, PLAIN, n=2, max_new_tokens=[2, 9, 9], on_finish=fail)

    cut()
    objects = live_tensors()
    for _ in range(5):
        cut()
    assert live_tensors() == objects and engine.pool.free == 40
