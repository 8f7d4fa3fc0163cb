"""Decode steps without a look at the sequences in between: the same completions as with one after every step."""

import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from helpers_model import VOCAB, tiny_model
from helpers_rollout import Groups, assert_same, double_model, make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.model.load import LoadedModel
from rhotrain.rollout import engine as engine_module
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.scheduler import Scheduler

VARIANTS = [(1, False), (2, True), (7, False), (32, True)]
"""Most steps of a burst, and whether results are read after the next step was launched."""

PROMPTS = make_prompts(5, 17, 9, 21)
STOPS = (11, 16)
PLAIN: dict[str, Any] = {"max_new_tokens": 11, "temperature": 1.4, "ignore_eos": True, "seed": 6}


def generate(
    loaded: LoadedModel,
    params: SamplingParams,
    variant: tuple[int, bool] | None,
    *,
    n: int = 2,
    prompts: list[list[int]] = PROMPTS,
    per_call: dict[str, Any] | None = None,
    **size: Any,
) -> tuple[Groups, Engine]:
    """variant None: no bursts at all."""
    steps, overlap = variant or (1, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "BURST_STEPS", steps)
        if variant is None:
            patch.setattr(Scheduler, "burst", lambda self, most: None)
        engine = Engine(loaded, **{"num_pages": 400, "page_size": 4, "overlap": overlap, **size})
        groups = engine.generate(prompts, params, n=n, **(per_call or {}))
    assert engine.pool.free == engine.pool.num_pages and not engine.scheduler.has_work
    return groups, engine


CASES: dict[str, dict[str, Any]] = {
    "length": {},
    "stop ids": {"stop_token_ids": STOPS},
    "the model's stop ids": {"ignore_eos": False},
    "stop strings": {"stop_strings": ("a", "c", "g", "m", "8", "never drawn")},
    "minimum": {"min_new_tokens": 6, "stop_token_ids": tuple(range(5, 50)), "keep_sets": True},
    "minimum and stop strings": {"min_new_tokens": 4, "stop_strings": ("a", "b", "c", "d", "e", "f", "g")},
    "top-k": {"top_k": 7, "keep_sets": True, "stop_token_ids": STOPS},
    "top-p": {"top_p": 0.8, "min_p": 0.01, "keep_sets": True, "min_new_tokens": 3, "stop_token_ids": STOPS},
    "greedy": {"temperature": 0.0},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "tight pool": {},
    "few rows": {"stop_token_ids": STOPS},
    "small budget": {"stop_token_ids": STOPS},
    "per prompt": {"stop_token_ids": STOPS},
    "no groups": {"stop_token_ids": STOPS},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tight pool": {"num_pages": 10},
    "few rows": {"max_running": 3},
    "small budget": {"max_batch_tokens": 5, "max_running": 6},
    "per prompt": {"per_call": {"max_new_tokens": [3, 11, 1, 20]}},
    "no groups": {"n": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_bursts_change_no_completion(case: str) -> None:
    """Tokens, logprobs, kept sets and reasons, however long a burst is and however late its results are read."""
    params = SamplingParams(**{**PLAIN, **CASES[case]})
    options = OPTIONS.get(case, {})
    expected, plain = generate(double_model(), params, None, **options)
    ends = Counter(c.finish_reason for group in expected for c in group)
    assert ends["stop"] > 0 or not {"stop_token_ids", "stop_strings"} & set(CASES[case])
    most = max(len(c.token_ids) for group in expected for c in group)
    for variant in VARIANTS:
        found, engine = generate(double_model(), params, variant, **options)
        assert_same(found, expected)
        stats, overlap = engine.stats, variant[1]
        assert stats.decode_tokens == plain.stats.decode_tokens
        assert stats.prefill_tokens + stats.found_tokens == sum(map(len, PROMPTS))
        if case == "tight pool":
            assert stats.preemptions > 0 and stats.recomputed_tokens > 0
        elif case not in ("few rows", "small budget"):
            assert stats.preemptions == 0 and most <= stats.steps <= most + overlap
        assert stats.prefill_seconds > 0 and (stats.decode_seconds > 0) == (most > 1)
        assert stats.capture_seconds == 0


def test_counts_of_a_burst() -> None:
    """8 completions of 11 tokens: the first ones come from the prompts' step; 10 steps follow."""
    _, engine = generate(double_model(), SamplingParams(**PLAIN), (32, False), n=4, prompts=make_prompts(5, 17))
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (22, 2 * 4 * 11, 11)
    # 5 + 11 - 1 tokens are 4 pages of 4, one of them shared; 17 + 11 - 1 are 7, four of them shared.
    assert stats.peak_pages == 1 + 4 * 3 + 4 + 4 * 3
    seen: list[int] = []
    generate(
        double_model(), SamplingParams(**PLAIN), (7, True), prompts=make_prompts(5), per_call={"on_tokens": seen.append}
    )
    assert sum(seen) == 2 * 11


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_enters_while_the_others_go_on(overlap: bool) -> None:
    """Two places; three short completions pass through one of them while the long one keeps the other."""
    limits = {"max_new_tokens": [3, 24, 4, 5]}
    options: dict[str, Any] = {"n": 1, "max_running": 2, "per_call": limits}
    _, engine = generate(double_model(), SamplingParams(**PLAIN), (32, overlap), **options)
    assert 24 <= engine.stats.steps <= 24 + overlap


def poisoned(loaded: LoadedModel, clean: Groups, prompts: list[list[int]]) -> int:
    """Make an id NaN that the first completion draws in its middle and no prompt holds."""
    ids = clean[0][0].token_ids
    poison = next(t for t in ids[4:-2] if t not in ids[:4] and all(t not in p for p in prompts))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poison] = float("nan")  # type: ignore[operator]
    return poison


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_nan_in_the_middle_of_a_burst_ends_its_row_alone(variant: tuple[int, bool] | None) -> None:
    loaded = tiny_model("qwen2", dtype=torch.float64)
    prompts = make_prompts(9, 14, 3)
    params = SamplingParams(**PLAIN)
    clean, _ = generate(loaded, params, variant, prompts=prompts)
    poison = poisoned(loaded, clean, prompts)
    found, engine = generate(loaded, params, variant, prompts=prompts)
    ended = 0
    for before, after in ((b, a) for x, y in zip(clean, found) for b, a in zip(x, y)):
        if poison in before.token_ids[:-1]:
            drawn = before.token_ids.index(poison) + 1
            ended += 1
            assert after.finish_reason == "error" and after.token_ids == before.token_ids[:drawn]
            assert f"token {drawn} of sample {after.sample}" in (after.error or "")
        else:
            drawn = 11
            assert after.finish_reason == "length" and after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs[:drawn], abs=1e-11)
    assert 0 < ended < 6
    assert engine.stats.decode_tokens == sum(len(c.token_ids) for group in found for c in group)
    pools = (*engine.runner.pools.keys, *engine.runner.pools.values)
    assert all(bool(pool.isfinite().all()) for pool in pools), "pages that held NaN are zeroed"


@pytest.mark.parametrize("overlap", [False, True])
def test_leaving_before_an_error_was_read_leaves_no_nan(overlap: bool) -> None:
    """The next call gets pages whose unused slots are multiplied by 0; NaN there would reach its rows."""
    loaded = tiny_model("qwen2", dtype=torch.float64)
    prompts = make_prompts(9, 14, 3)
    clean, _ = generate(loaded, SamplingParams(**PLAIN), None, prompts=prompts, n=1)
    poison = poisoned(loaded, clean, prompts)
    at = clean[0][0].token_ids.index(poison)
    engine = Engine(loaded, num_pages=60, page_size=4, overlap=overlap)
    limits = [11, at + 1, 11]
    # Prompt 1 ends in the step in which prompt 0 draws the NaN id; with overlap the step after it has run by then.
    stream = engine.stream(prompts, SamplingParams(**PLAIN), max_new_tokens=limits)
    done = next(stream)
    assert done.prompt == 1
    stream.close()
    pools = (*engine.runner.pools.keys, *engine.runner.pools.values)
    assert all(bool(pool.isfinite().all()) for pool in pools)


def python_calls(rows: int) -> Counter[str]:
    """How often each of our Python functions is called in one step of a burst of unrelated rows."""
    loaded = double_model()
    engine = Engine(loaded, num_pages=400, page_size=16)
    prompts = make_prompts(*[8] * rows)
    calls: list[Counter[str]] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("rhotrain."):  # a garbage collection may call others at any time
            calls[-1][f"{module}.{frame.f_code.co_qualname}"] += 1

    def after_step(count: int) -> None:
        calls.append(Counter())
        sys.setprofile(profile)

    try:
        engine.generate(prompts, SamplingParams(**PLAIN), on_tokens=after_step)
    finally:
        sys.setprofile(None)
    assert engine.stats.steps == 11
    # The steps in the middle: neither the first of the burst, nor the last.
    assert calls[5] == calls[6] == calls[7]
    return calls[6]


@pytest.mark.parametrize("room", ["rollout", "model", "kernels"])
def test_the_work_in_python_does_not_grow_with_the_rows(room: str) -> None:
    """Nothing is called once per row in a step that ends no row."""
    few, many = (python_calls(rows) for rows in (4, 64))
    names = {name for name in few | many if name.startswith(f"rhotrain.{room}.")}
    assert len(names) > 3
    assert {name: many[name] - few[name] for name in names if many[name] != few[name]} == {}


def test_padding_ids_are_never_fed_back() -> None:
    """The ids of a burst go from the sampler to the model without passing the host, which would have noticed."""
    loaded = tiny_model("qwen2")
    engine = Engine(loaded, num_pages=60, tapes=False)
    seen: list[int] = []
    hidden = engine.runner.pools.hidden

    def look(context: Any, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        seen.extend(input_ids_T.tolist())
        return hidden(context, input_ids_T, position_ids_T)

    engine.runner.pools.hidden = look  # type: ignore[method-assign]
    prompt = make_prompts(6)[0]
    group = engine.generate([prompt], SamplingParams(max_new_tokens=20, temperature=3.0, ignore_eos=True), n=4)[0]
    assert max(seen) < loaded.vocab_size < VOCAB
    drawn = Counter(t for c in group for t in c.token_ids[:-1])
    assert Counter(seen) == drawn + Counter(prompt)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_the_scheduler_composes_admits_somebody(
    n: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as many completions as places: places are filled in batches, and nobody asks in vain. (A step outside
    of a burst runs without a graph on a GPU; one for every completion that ends would halve the speed.)"""
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=400, page_size=8, max_running=32, overlap=overlap)
    mixed: list[bool] = []
    schedule = Scheduler.schedule

    def spy(self: Scheduler) -> Any:
        batch = schedule(self)
        mixed.append(any(sequence.drawn == 0 for sequence, _ in batch.rows))
        return batch

    monkeypatch.setattr(Scheduler, "schedule", spy)
    rng = random.Random(3)
    prompts = [[5 + i % 60, 6, 7 + i // 60] for i in range(128 // n)]
    limits = [rng.randint(2, 40) for _ in prompts]
    groups = engine.generate(prompts, SamplingParams(ignore_eos=True), n=n, max_new_tokens=limits)
    assert [len(c.token_ids) for group in groups for c in group] == [limit for limit in limits for _ in range(n)]
    # The last row of a call decodes alone in a composed step only where its group waited for the others.
    in_vain = len(mixed) - sum(mixed)
    assert in_vain <= 2 and len(mixed) < engine.stats.steps / 2, (in_vain, len(mixed), engine.stats.steps)
