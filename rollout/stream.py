"""Completions as they end, for asyncio: the engine runs in a thread of its own, rewards run while the rest decode.

async for done in stream_completions(engine, prompts, sampling, n=8):
    tasks.append(asyncio.create_task(reward(done.completion)))
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine, Finished


class _Left(Exception):
    """Nobody takes the completions any more."""


async def stream_completions(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any
) -> AsyncGenerator[Finished, None]:
    """`engine.stream(prompts, sampling, **options)` without waiting between its completions.

    The engine does not wait for whoever takes them: ended completions queue up. Leaving the loop early (break, an
    exception, cancellation) ends the rollout after the step that is running, and gives its pages back before it
    returns. The model must not be used by anybody else meanwhile. Raises what `Engine.stream` raises.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Queue[Finished | BaseException | None] = asyncio.Queue()
    leave = threading.Event()
    on_tokens = options.pop("on_tokens", None)

    def after_step(count: int) -> None:
        if leave.is_set():
            raise _Left
        if on_tokens is not None:
            on_tokens(count)

    # Checked here, so that a wrong prompt raises before a thread is started.
    steps = engine.stream(prompts, sampling, on_tokens=after_step, **options)

    def put(item: Finished | BaseException | None) -> None:
        loop.call_soon_threadsafe(ended.put_nowait, item)

    def run() -> None:
        try:
            for done in steps:
                put(done)
        except _Left:
            return
        except BaseException as error:  # the caller raises it
            put(error)
        finally:
            steps.close()
            put(None)

    thread = threading.Thread(target=run, name="rhotrain rollout", daemon=True)
    thread.start()
    try:
        while (item := await ended.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        leave.set()
        await asyncio.shield(asyncio.to_thread(thread.join))
