"""Prompts that begin alike share the pages of their beginning: each page is run once, and nobody can tell."""

from typing import Any

import pytest
import torch
from helpers_model import VOCAB, tiny_model
from helpers_rollout import Groups, assert_same, double_model, make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.model.load import LoadedModel
from rhotrain.model.packed import packed_weights
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.kv_pool import KVPool

POISON = VOCAB - 1
"""An id in the padding of the vocabulary: prompts may hold it, nobody draws it."""

HEAD, OTHER, *TAILS = make_prompts(37, 40, 3, 9, 1, 14)


def alike(*tails: int) -> list[list[int]]:
    """The head of 37 tokens and tails of these lengths."""
    return [[*HEAD, *tail[:length]] for tail, length in zip(TAILS, tails)]


def generate(
    loaded: LoadedModel,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    share: bool = True,
    n: int = 2,
    **size: Any,
) -> tuple[Groups, Engine, int]:
    """The groups, the engine, and how many tokens the model has run."""
    engine = Engine(loaded, tapes=False, **{"num_pages": 300, "page_size": 8, **size})
    run, hidden = 0, engine.runner.pools.hidden

    def count(context: Any, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        nonlocal run
        run += len(input_ids_T)
        return hidden(context, input_ids_T, position_ids_T)

    engine.runner.pools.hidden = count  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        if not share:
            patch.setattr(KVPool, "find", lambda self, keys: [])
        return engine.generate(prompts, params, n=n), engine, run


CASES: dict[str, tuple[list[list[int]], dict[str, Any], int]] = {
    "in the same step": (alike(3, 9, 1, 14), {}, 3 * 32),
    "in chunks": (alike(3, 9, 1, 14), {"max_batch_tokens": 11}, 3 * 32),
    "one group after the other": (alike(3, 9, 1, 14), {"max_running": 2}, 3 * 32),
    "pages of one token": (alike(3, 9), {"page_size": 1}, 37),
    "pages of 16": (alike(3, 9, 1), {"page_size": 16}, 2 * 32),
    "pages larger than the head": (alike(3, 9, 1), {"page_size": 64}, 0),
    "in a tight pool": (alike(3, 9, 1, 14), {"num_pages": 11, "max_batch_tokens": 16}, 3 * 32),
    "evicted": (
        [*alike(3), OTHER, *alike(9)],
        {"num_pages": 8, "max_running": 1},
        16,
    ),  # the end of the head goes first
    "equal prompts": ([OTHER[:35]] * 3, {}, 2 * 32),
    "equal prompts that fill their pages": ([OTHER[:32]] * 3, {}, 2 * 24),
    "a prompt begins another": ([OTHER[:20], OTHER, OTHER[:24]], {}, 16 + 16),
    "two heads": ([*alike(3, 9), OTHER, OTHER[:30]], {}, 32 + 24),
}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, max_new_tokens=8, ignore_eos=True, seed=4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_sharing_changes_nothing_but_the_work(case: str, params: SamplingParams) -> None:
    """Tokens and logprobs to 1e-11 as when every prompt runs by itself; what ran is counted in the model."""
    prompts, size, found = CASES[case]
    shared, engine, run = generate(double_model(), prompts, params, **size)
    alone, plain, _ = generate(double_model(), prompts, params, share=False, **size)
    assert_same(shared, alone)
    stats, total = engine.stats, sum(map(len, prompts))
    assert plain.stats.found_tokens == 0 and plain.stats.prefill_tokens == total
    assert stats.found_tokens == found and stats.prefill_tokens == total - found
    width = 1 if params is GREEDY else 2
    first = len(prompts) * width
    assert run == total - found + stats.recomputed_tokens + stats.decode_tokens - first
    if case == "in a tight pool":
        assert width == 1 or stats.preemptions > 0
    else:
        assert stats.preemptions == 0
    if case == "in the same step":
        assert stats.steps == 8, "one for the prompts, which draws the first tokens"
        assert stats.peak_pages < plain.stats.peak_pages
    assert engine.pool.free == engine.pool.num_pages


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "qwen3"])
def test_sharing_under_windows_softcap_and_learned_positions(family: str) -> None:
    prompts = alike(3, 9, 1)
    shared, engine, _ = generate(double_model(family), prompts, SAMPLED, max_batch_tokens=24)
    assert engine.stats.found_tokens == 64
    assert_same(shared, generate(double_model(family), prompts, SAMPLED, share=False, max_batch_tokens=24)[0])


def poisoned_model() -> LoadedModel:
    loaded = tiny_model("qwen2", dtype=torch.float64)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[POISON] = float("nan")  # type: ignore[operator]
    return loaded


@pytest.mark.parametrize(("most", "budget"), [(2, 500), (2, 8), (4, 8), (64, 8)])
def test_pages_with_nan_are_not_found_and_clean_ones_stay_right(most: int, budget: int) -> None:
    """The head itself is clean, one prompt goes on with NaN: whoever shares the head with it is not touched."""
    loaded = poisoned_model()
    clean = alike(3, 9, 14)
    bad = [[*HEAD, POISON, *TAILS[3][:10]], [POISON, *HEAD], [POISON, *HEAD, 7]]
    prompts = [bad[0], clean[0], bad[1], clean[1], bad[2], clean[2]]
    found, engine, _ = generate(loaded, prompts, SAMPLED, max_running=most, max_batch_tokens=budget)
    alone, _, _ = generate(loaded, prompts, SAMPLED, share=False)
    assert_same(found, alone)
    reasons = [group[0].finish_reason for group in found]
    assert reasons == ["error", "length"] * 3
    if most == 2:
        # One group after the other: what is named after the errors is the head that the second prompt has run.
        assert engine.stats.found_tokens == 32 + 32
    assert all(bool(pool.isfinite().all()) for pool in (*engine.runner.pools.keys, *engine.runner.pools.values))
    again, _, _ = generate(loaded, clean, SAMPLED)
    assert tokens(engine.generate(clean, SAMPLED, n=2)) == tokens(again)


def test_a_prompt_with_nan_leaves_nothing_behind_for_those_that_share_its_head() -> None:
    """Attention over a whole prompt gives NaN a weight of 0 before it, and 0 * NaN is NaN: after the first layer the
    clean head of that prompt is spoilt as well. Who shares it in the same step ends in an error too, a prompt that
    begins otherwise does not, and the next call finds clean pages."""
    loaded = poisoned_model()
    poisoned, sharing, apart = [*HEAD, POISON, *TAILS[3][:10]], *alike(3), [5, 6, 7, 8]
    found, engine, _ = generate(loaded, [poisoned, sharing, apart], SAMPLED)
    reasons = [group[0].finish_reason for group in found]
    assert reasons[0] == "error" and reasons[2] == "length"
    assert all(bool(pool.isfinite().all()) for pool in (*engine.runner.pools.keys, *engine.runner.pools.values))
    again = engine.generate([sharing, apart], SAMPLED, n=2)
    assert_same(again, generate(loaded, [sharing, apart], SAMPLED, share=False)[0])


def test_nothing_is_found_in_a_later_call() -> None:
    """Even with the same weights: a call that leaves K/V behind would have to know that nobody touched the weights."""
    loaded = tiny_model("llama", dtype=torch.float64)
    prompts = alike(3, 9)
    engine = Engine(loaded, num_pages=300, page_size=8)
    before = engine.generate(prompts, SAMPLED, n=2)
    counts = (engine.stats.prefill_tokens, engine.stats.found_tokens)
    assert counts == (sum(map(len, prompts)) - 32, 32)
    assert_same(engine.generate(prompts, SAMPLED, n=2), before)
    assert (engine.stats.prefill_tokens, engine.stats.found_tokens) == counts


@pytest.mark.parametrize("how", ["in place", "through .data", "replaced", "a new policy_version"])
def test_changed_weights_are_used_whoever_changed_them(how: str) -> None:
    """Large enough for packed layouts on a CPU, which are derived from the weights, as K/V are."""
    loaded = tiny_model("llama", initializer_range=0.3)
    packed_weights(loaded).min_elements = 1
    prompts = alike(3, 9)
    engine = Engine(loaded, num_pages=300, page_size=8)
    before = engine.generate(prompts, SAMPLED, n=2)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if how == "through .data":
                parameter.data.mul_(1.1)
            elif how == "replaced":
                parameter.data = parameter.data * 1.1
            else:
                parameter.mul_(1.1)
    loaded.policy_version += how == "a new policy_version"
    after = engine.generate(prompts, SAMPLED, n=2)
    fresh = tiny_model("llama", initializer_range=0.3)
    fresh.policy_version = loaded.policy_version
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.1)
    assert_same(after, Engine(fresh, num_pages=300, page_size=8).generate(prompts, SAMPLED, n=2), atol=5e-5)
    assert tokens(after) != tokens(before)


def test_a_stream_that_was_left_leaves_nothing_to_be_found() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    prompts = alike(3, 9)
    engine = Engine(loaded, num_pages=300, page_size=8, max_running=1)
    stream = engine.stream(prompts, SAMPLED)
    next(stream)
    stream.close()
    with torch.no_grad():
        loaded.head.weight.mul_(0.5)
        loaded.model.get_input_embeddings().weight.mul_(1.5)  # type: ignore[operator]
    found = engine.generate(prompts, SAMPLED)
    assert engine.stats.found_tokens == 32
    assert_same(found, Engine(loaded, num_pages=300, page_size=8).generate(prompts, SAMPLED))
