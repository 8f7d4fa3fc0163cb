"""Completions as they end: in order, while others decode; whoever leaves early gets a usable engine back."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import Groups, make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.model.packed import packed_weights
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine, Finished
from rhotrain.rollout.stream import stream_completions

PLAIN = SamplingParams(max_new_tokens=24, temperature=1.3, ignore_eos=True, seed=3)
PROMPTS = make_prompts(5, 17, 9)
LIMITS = [3, 24, 12]
WAIT = 20.0
"""Seconds after which something that never comes is given up; nothing here waits that long when it works."""


def make_engine(**options: Any) -> Engine:
    return Engine(tiny_model("llama"), **{"num_pages": 60, **options})


def expect_usable(engine: Engine) -> None:
    """All pages are back, and the next call gives what a fresh engine gives."""
    assert engine.pool.free == engine.pool.num_pages and not engine.scheduler.has_work
    found = engine.generate(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS)
    assert tokens(found) == tokens(make_engine().generate(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS))


def gathered(done: list[Finished], n: int) -> Groups:
    found = {(d.prompt, d.member): d.completion for d in done}
    assert len(found) == len(done), "each completion once"
    return [[found[p, g] for g in range(n)] for p in range(len(PROMPTS))]


# ---- the plain stream -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.3, 0.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_completions_come_as_they_end(overlap: bool, temperature: float) -> None:
    engine = make_engine(overlap=overlap)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, ignore_eos=True, seed=3)
    done = list(engine.stream(PROMPTS, params, n=2, first_sample=10, max_new_tokens=LIMITS))
    assert [(d.prompt, d.member) for d in done] == [(0, 0), (0, 1), (2, 0), (2, 1), (1, 0), (1, 1)]
    assert [d.completion.sample for d in done] == [10 + 2 * d.prompt + d.member for d in done]
    expected = make_engine().generate(PROMPTS, params, n=2, first_sample=10, max_new_tokens=LIMITS)
    assert tokens(gathered(done, 2)) == tokens(expected)


def test_a_completion_is_there_before_the_others_are_drawn() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, PLAIN, max_new_tokens=LIMITS)
    assert engine.stats.steps == 0 and engine.pool.free == 60, "nothing runs before somebody asks"
    assert next(stream).prompt == 0
    assert engine.stats.steps == 3
    assert next(stream).prompt == 2 and engine.stats.steps == 12
    assert next(stream).prompt == 1 and engine.stats.steps == 24
    assert next(stream, None) is None
    expect_usable(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("taken", [1, 2])
def test_closing_early_gives_everything_back(taken: int, overlap: bool) -> None:
    engine = make_engine(overlap=overlap, max_running=4)
    stream = engine.stream(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS)
    for _ in range(taken):
        next(stream)
    assert engine.pool.free < 60
    with pytest.raises(RuntimeError, match="under way; close it first"):
        engine.release()
    stream.close()
    expect_usable(engine)
    engine.release()
    expect_usable(engine)


def test_a_stream_that_nobody_began_leaves_the_engine_idle() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, PLAIN)
    expect_usable(engine)
    stream.close()
    engine.release()
    forgotten = engine.stream(PROMPTS, PLAIN)
    del forgotten
    expect_usable(engine)


def test_a_second_call_during_a_stream_is_refused_and_the_stream_goes_on() -> None:
    engine = make_engine()
    later = engine.stream(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS)
    stream = engine.stream(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS)
    done = [next(stream)]
    with pytest.raises(RuntimeError, match="generating already"):
        engine.generate(PROMPTS, PLAIN)
    with pytest.raises(RuntimeError, match="generating already"):
        next(later)
    done += stream
    assert len(gathered(done, 2)) == 3
    expect_usable(engine)


@pytest.mark.parametrize("begun", [True, False])
def test_an_optimiser_step_during_a_stream_is_an_error(begun: bool) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, PLAIN, max_new_tokens=LIMITS)
    if begun:
        next(stream)
    engine.loaded.policy_version += 1
    with pytest.raises(RuntimeError, match="policy_version 0 to 1 during a rollout"):
        next(stream)
    assert next(stream, None) is None
    assert engine.generate(PROMPTS, PLAIN)[0][0].policy_version == 1
    assert engine.pool.free == 60


def test_the_model_can_be_trained_between_two_completions_of_a_stream() -> None:
    """Autograd's state, hooks and the modules' forwards are the caller's while the stream waits."""
    engine = make_engine()
    packed_weights(engine.loaded).min_elements = 1
    stream = engine.stream(PROMPTS, PLAIN, max_new_tokens=LIMITS)
    next(stream)
    assert torch.is_grad_enabled() and engine.loaded.attention.context is None
    assert not any("forward" in module.__dict__ for module in engine.loaded.model.modules())
    list(stream)


# ---- asyncio --------------------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 3 * WAIT))


async def until_idle(engine: Engine) -> None:
    """A loop that was left by `break` is closed by the event loop, not by the loop itself."""
    for _ in range(int(WAIT / 0.01)):
        if not engine.scheduler.has_work and not any(t.name == "rhotrain rollout" for t in threading.enumerate()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the rollout goes on")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_async_stream_gives_the_same_completions(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    seen: list[int] = []

    async def work() -> None:
        options = {"n": 2, "max_new_tokens": LIMITS, "on_tokens": seen.append}
        done = [d async for d in stream_completions(engine, PROMPTS, PLAIN, **options)]
        assert tokens(gathered(done, 2)) == tokens(make_engine().generate(PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS))
        expect_usable(engine)

    run(work())
    assert sum(seen) == 2 * sum(LIMITS)


def test_rewards_run_while_rows_decode() -> None:
    """The engine stops after the first completion until its reward was computed: were completions handed over at the
    end, or the event loop blocked meanwhile, this would never go on."""
    engine = make_engine()
    rewarded = threading.Event()
    steps_at_reward: list[int] = []

    def after_step(count: int) -> None:
        if engine.stats.steps == 5:
            assert rewarded.wait(WAIT), "the first completion did not arrive while the others decode"

    async def reward(done: Finished) -> None:
        await asyncio.sleep(0)
        steps_at_reward.append(engine.stats.steps)
        rewarded.set()

    async def work() -> None:
        tasks = []
        options = {"max_new_tokens": LIMITS, "on_tokens": after_step}
        async for done in stream_completions(engine, PROMPTS, PLAIN, **options):
            tasks.append(asyncio.create_task(reward(done)))
        await asyncio.gather(*tasks)

    run(work())
    assert len(steps_at_reward) == 3 and steps_at_reward[0] <= 5


def test_the_engine_does_not_wait_for_whoever_takes_the_completions() -> None:
    engine = make_engine()
    everything = threading.Event()
    drawn: list[int] = []

    def after_step(count: int) -> None:
        drawn.append(count)
        if sum(drawn) == sum(LIMITS):
            everything.set()

    async def work() -> None:
        async for _ in stream_completions(engine, PROMPTS, PLAIN, max_new_tokens=LIMITS, on_tokens=after_step):
            assert await asyncio.to_thread(everything.wait, WAIT), "the engine waits for the first reward"

    run(work())


def test_a_wrong_prompt_raises_before_a_thread_is_started() -> None:
    engine = make_engine()

    async def work() -> None:
        stream = stream_completions(engine, [[5], []], PLAIN)
        before = threading.active_count()
        with pytest.raises(ValueError, match="prompt 1: it has no tokens"):
            await anext(stream)
        assert threading.active_count() == before
        expect_usable(engine)

    run(work())


def test_an_error_of_the_engine_reaches_the_consumer() -> None:
    engine = make_engine()

    def after_step(count: int) -> None:
        if engine.stats.steps == 6:
            raise KeyError("progress bar")

    async def work() -> None:
        done = []
        with pytest.raises(KeyError, match="progress bar"):
            async for d in stream_completions(engine, PROMPTS, PLAIN, max_new_tokens=LIMITS, on_tokens=after_step):
                done.append(d.prompt)
        assert done == [0], "what had ended before the error was handed over"
        expect_usable(engine)

    run(work())


def test_an_error_in_the_loop_ends_the_rollout() -> None:
    engine = make_engine()
    steps: list[int] = []

    async def work() -> None:
        with pytest.raises(KeyError, match="reward"):
            async with aclosing(
                stream_completions(engine, PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS, on_tokens=steps.append)
            ) as stream:
                async for _ in stream:
                    raise KeyError("reward")
        count = len(steps)
        expect_usable(engine)
        assert len(steps) == count, "it goes on after its pages are back"

    run(work())


def test_closing_ends_the_rollout_before_it_returns() -> None:
    """The engine waits in its fifth step until the consumer is leaving: the rollout cannot have ended by itself."""
    engine = make_engine()
    fifth, leaving = threading.Event(), threading.Event()

    def after_step(count: int) -> None:
        if engine.stats.steps == 5:
            fifth.set()
            assert leaving.wait(WAIT)

    async def work() -> None:
        stream = stream_completions(engine, PROMPTS, PLAIN, max_new_tokens=LIMITS, on_tokens=after_step)
        assert (await anext(stream)).prompt == 0 and await asyncio.to_thread(fifth.wait, WAIT)
        asyncio.get_running_loop().call_later(0.05, leaving.set)
        await stream.aclose()  # type: ignore[attr-defined]
        assert engine.stats.steps == 6, "the step that was running, and the one that notices"
        expect_usable(engine)

    run(work())


def test_a_loop_that_is_left_by_break_ends_soon() -> None:
    engine = make_engine()

    async def work() -> None:
        async for done in stream_completions(engine, PROMPTS, PLAIN, n=2, max_new_tokens=LIMITS):
            assert done.prompt == 0
            break
        await until_idle(engine)
        expect_usable(engine)

    run(work())


def test_a_cancelled_consumer_ends_the_rollout() -> None:
    engine = make_engine()
    begun = threading.Event()

    def after_step(count: int) -> None:
        begun.set()

    async def consume() -> None:
        async for _ in stream_completions(engine, PROMPTS, PLAIN, max_new_tokens=[200, 200, 200], on_tokens=after_step):
            raise AssertionError("nothing ends so early")

    async def work() -> None:
        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(begun.wait, WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 < engine.stats.steps < 200
        await until_idle(engine)
        expect_usable(engine)

    run(work())
