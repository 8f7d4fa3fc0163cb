import random
import re
from typing import Any

import pytest
import torch
from helpers_model import VOCAB, tiny_model
from helpers_rollout import make_prompts, model_logits, one_thread, simulate, tokens  # noqa: F401

from rhotrain.kernels.philox import philox_uniform
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.sizing import plan_pages

# ---- randomness and order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_pages": 14},
        {"page_size": 1, "num_pages": 60},
        {"page_size": 7, "num_pages": 30},
        {"max_batch_tokens": 5},
        {"max_running": 2},
        {"max_running": 1},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_pool_budget_or_page_size(change: dict[str, Any]) -> None:
    loaded = tiny_model("llama")
    prompts = make_prompts(4, 17, 9, 30)
    params = SamplingParams(max_new_tokens=16, seed=42, ignore_eos=True)
    expected = Engine(loaded, num_pages=500, page_size=4).generate(prompts, params, n=3)
    engine = Engine(loaded, **{"num_pages": 500, "page_size": 4, **change})
    found = engine.generate(prompts, params, n=3)
    assert tokens(found) == tokens(expected)
    flat = [torch.tensor(c.logprobs) for group in found for c in group]
    again = [torch.tensor(c.logprobs) for group in expected for c in group]
    torch.testing.assert_close(torch.cat(flat), torch.cat(again), rtol=0, atol=5e-5)
    if change.get("num_pages") in (14, 30):
        assert engine.stats.preemptions > 0
    assert engine.pool.free == engine.pool.num_pages


def test_tokens_depend_on_seed_and_sample_but_not_on_neighbours() -> None:
    loaded = tiny_model("qwen3")
    prompts = make_prompts(8, 5, 21)
    params = SamplingParams(max_new_tokens=12, seed=9, ignore_eos=True)
    engine = Engine(loaded, num_pages=200)
    together = engine.generate(prompts, params, n=4)
    for p, prompt in enumerate(prompts):
        for g in range(4):
            alone = engine.generate([prompt], params, first_sample=p * 4 + g)
            assert alone[0][0].token_ids == together[p][g].token_ids
            assert alone[0][0].sample == together[p][g].sample == p * 4 + g
    members = [completion.token_ids for group in together for completion in group]
    assert len(set(members)) == len(members), "samples must differ"
    other = SamplingParams(max_new_tokens=12, seed=10, ignore_eos=True)
    assert tokens(engine.generate(prompts, other, n=4)) != tokens(together)
    assert tokens(engine.generate(prompts, params, n=4, first_sample=12)) != tokens(together)


def test_a_token_is_the_inverse_cdf_at_the_uniform_of_seed_sample_and_position() -> None:
    """Position is the index in the completion: it must not move with the prompt, the batch or a preemption."""
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=14, page_size=4)
    prompts = make_prompts(4, 17, 9)
    params = SamplingParams(max_new_tokens=16, seed=77, temperature=1.2, ignore_eos=True)
    groups = engine.generate(prompts, params, n=2, first_sample=1000)
    assert engine.stats.preemptions > 0
    right = 0
    for prompt, completion in ((p, c) for p, group in zip(prompts, groups, strict=True) for c in group):
        cdf_NV = (model_logits(prompt, completion.token_ids, loaded) / 1.2).softmax(-1).cumsum(-1)
        steps = torch.arange(16)
        uniforms = philox_uniform(torch.full((16,), 77), torch.full((16,), completion.sample), steps)
        drawn = (cdf_NV > uniforms.double()[:, None]).to(torch.uint8).argmax(-1)
        right += int((drawn == torch.tensor(completion.token_ids)).sum())
    assert right >= 3 * 2 * 16 - 1, "one uniform may lie within rounding of a boundary"


def test_first_tokens_follow_the_softmax() -> None:
    """4000 members of one group: chi-square of the first token against the model's own distribution."""
    loaded = tiny_model("llama")
    prompt = make_prompts(6)[0]
    engine = Engine(loaded, num_pages=400, max_running=4000)
    groups = engine.generate([prompt], SamplingParams(max_new_tokens=1, temperature=2.0, seed=5), n=4000)
    assert engine.stats.prefill_tokens == 6 and engine.stats.steps == 1 and engine.stats.peak_pages == 1
    p = (model_logits(prompt, (0,), loaded)[0] / 2.0).softmax(-1)
    drawn = torch.tensor([c.token_ids[0] for c in groups[0]])
    counts = torch.bincount(drawn, minlength=len(p)).double()
    big = p * 4000 >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    expected = torch.cat([p[big] * 4000, p[~big].sum()[None] * 4000])
    chi2 = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = len(expected) - 1
    assert freedom > 5
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_groups_are_drawn_once_and_copied() -> None:
    engine = Engine(tiny_model("llama"), num_pages=100)
    calls: list[tuple[int, int, int]] = []
    groups = engine.generate(
        make_prompts(5, 6),
        SamplingParams(temperature=0.0, max_new_tokens=7, ignore_eos=True),
        n=3,
        first_sample=100,
        on_finish=lambda p, g, completion: calls.append((p, g, completion.sample)),
    )
    assert engine.stats.decode_tokens == 2 * 7
    assert all(len({c.token_ids for c in group}) == 1 for group in groups)
    assert [[c.sample for c in group] for group in groups] == [[100, 101, 102], [103, 104, 105]]
    assert sorted(calls) == [(p, g, 100 + p * 3 + g) for p in range(2) for g in range(3)]


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_a_group_shares_the_pages_of_its_prompt() -> None:
    engine = Engine(tiny_model("llama"), num_pages=200, page_size=8)
    engine.generate(make_prompts(61), SamplingParams(max_new_tokens=10, ignore_eos=True), n=8)
    # 7 full prompt pages once; tokens 56..69 are 2 pages for each member.
    assert engine.stats.peak_pages == 7 + 8 * 2
    assert engine.stats.prefill_tokens == 61 and engine.stats.steps == 10
    assert engine.pool.free == 200
    engine.generate(make_prompts(5), SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert engine.stats.peak_pages == 1 and engine.stats.prefill_tokens == 5, "numbers of the latest call"


@pytest.mark.parametrize("seed", range(8))
def test_planned_pages_are_what_the_groups_take(seed: int) -> None:
    rng = random.Random(seed)
    loaded = tiny_model("llama")
    lens = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
    n, new, size = rng.randint(1, 6), rng.randint(1, 30), rng.choice([1, 4, 16])
    planned = plan_pages(loaded, lens, n, new, page_size=size)
    for burst in (0, 32):
        done = simulate(
            [[index] * length for index, length in enumerate(lens)],  # prompts that begin alike would share pages
            [[new] * n] * len(lens),
            num_pages=planned,
            page_size=size,
            max_batch_tokens=1000,
            burst=burst,
        )
        assert done.scheduler.preemptions == 0 and done.again_tokens == 0
        assert done.pool.peak == planned
        assert done.steps == new, "all of them run together"


def test_the_pool_is_sized_from_memory() -> None:
    loaded = tiny_model("llama")
    # 2 layers x keys and values x 2 heads x 8 dims x 16 tokens x 4 bytes
    assert Engine(loaded, kv_memory_bytes=2 * 2 * 2 * 8 * 16 * 4 * 10 + 5).pool.num_pages == 10
    assert Engine(loaded, max_running=3).pool.num_pages == 3 * 256 // 16
    with pytest.raises(ValueError, match="kv_memory_bytes: 100 holds no page; one page takes 4096 bytes"):
        Engine(loaded, kv_memory_bytes=100)
    with pytest.raises(ValueError, match="both kv_memory_bytes=1 and num_pages=2"):
        Engine(loaded, kv_memory_bytes=1, num_pages=2)


@pytest.mark.parametrize("name", ["page_size", "max_batch_tokens", "max_running"])
def test_engine_sizes_below_one_are_refused(name: str) -> None:
    size: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name}: 0"):
        Engine(tiny_model("llama"), **size)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, r"prompt 1: it has no tokens"),
        ([5, 99999], {}, r"prompt 1: ids range from 5 to 99999; need ids from 0 to 95"),
        ([5, -1], {}, r"prompt 1: ids range from -1"),
        ([5] * 200, {"max_new_tokens": 57}, r"200 tokens \+ max_new_tokens 57 = 257, but the model has 256 positions"),
        ([5] * 60, {"max_new_tokens": 30}, r"60 tokens \+ max_new_tokens 30 = 90 takes 6 pages of 16 .* pool has 5"),
        ([5], {"stop_token_ids": (4, 96)}, r"stop_token_ids: \[96\] are outside the vocabulary"),
        ([5], {"stop_token_ids": tuple(range(77)), "min_new_tokens": 1}, r"min_new_tokens: 1, but all 77 ids"),
    ],
)
def test_what_can_never_run_is_refused_before_anything_runs(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    loaded = tiny_model("llama")
    assert loaded.vocab_size == 77
    engine = Engine(loaded, num_pages=5)
    with pytest.raises(ValueError, match=message):
        engine.generate([[5, 6], prompt], SamplingParams(**{"max_new_tokens": 4, **params}))
    assert engine.stats.steps == 0 and engine.pool.free == 5
    engine.generate([[5] * 60], SamplingParams(max_new_tokens=21, ignore_eos=True))
    assert engine.stats.peak_pages == 5, "60 + 21 - 1 tokens fill the pool exactly"


def test_an_exception_in_a_callback_leaves_the_engine_usable() -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)

    def fail(p: int, g: int, completion: Completion) -> None:
        raise KeyError("reward")

    # One row at a time: the other three still wait or hold pages when the first one ends.
    with pytest.raises(KeyError, match="reward"):
        engine.generate(make_prompts(20, 30), params, n=2, on_finish=fail)
    assert engine.pool.free == 60
    stop = engine.generate(make_prompts(20), params, n=2)[0][1].token_ids[0]
    early = SamplingParams(max_new_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    with pytest.raises(KeyError, match="reward"):
        engine.generate(make_prompts(20, 30), early, n=2, on_finish=fail)
    assert engine.pool.free == 60
    assert len(engine.generate(make_prompts(20), params)[0][0].token_ids) == 6


def test_generate_inside_generate_is_refused() -> None:
    engine = Engine(tiny_model("llama"), num_pages=60)
    params = SamplingParams(max_new_tokens=2)
    with pytest.raises(RuntimeError, match="generating already"):
        engine.generate([[5]], params, on_finish=lambda p, g, c: engine.generate([[5]], params))  # type: ignore[arg-type]


def test_progress_counts_every_token() -> None:
    engine = Engine(tiny_model("llama"), num_pages=200)
    seen: list[int] = []
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    engine.generate(make_prompts(3, 4), params, n=2, on_tokens=seen.append)
    assert sum(seen) == 2 * 2 * 9
    engine.generate(
        make_prompts(3), SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True), n=4, on_tokens=seen.append
    )
    assert sum(seen) == 36 + 20


def test_no_prompts_give_no_groups() -> None:
    engine = Engine(tiny_model("llama"), num_pages=5)
    assert engine.generate([], SamplingParams()) == []
    with pytest.raises(ValueError, match="n=0"):
        engine.generate([[5]], SamplingParams(), n=0)


# ---- weights --------------------------------------------------------------------------------------------------------


def test_completions_carry_the_version_of_the_weights_that_drew_them() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=40)
    loaded.policy_version = 7
    assert engine.generate([[5, 6]], SamplingParams(max_new_tokens=3), n=2)[0][1].policy_version == 7


def test_changed_weights_are_seen_at_once() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=40)
    prompts = make_prompts(20, 20)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    before = engine.generate(prompts, params)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.1)
    after = engine.generate(prompts, params)
    assert tokens(after) != tokens(before)
    assert tokens(after) == tokens(Engine(loaded, num_pages=40).generate(prompts, params))


def test_generating_leaves_training_as_it_was() -> None:
    loaded = tiny_model("llama")
    assert loaded.model.training
    Engine(loaded, num_pages=40).generate([[5, 6]], SamplingParams(max_new_tokens=3))
    assert loaded.model.training and loaded.attention.context is None
    assert all(p.requires_grad and not p.is_inference() and p.grad is None for p in loaded.parameters())


def test_checkpointing_for_training_changes_nothing_here(recwarn: pytest.WarningsRecorder) -> None:
    prompts = make_prompts(20, 9)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    plain = Engine(tiny_model("llama"), num_pages=40).generate(prompts, params)
    checkpointed = Engine(tiny_model("llama", gradient_checkpointing=True), num_pages=40)
    assert tokens(checkpointed.generate(prompts, params)) == tokens(plain)
    assert not [w for w in recwarn if "checkpoint" in str(w.message) or "requires_grad" in str(w.message)]


def test_logits_that_are_nan_end_one_completion_and_spare_the_others() -> None:
    """A prompt with an id whose embedding is NaN; the id lies in the padding of the vocabulary, so nobody draws it."""
    loaded = tiny_model("qwen2")
    engine = Engine(loaded, num_pages=12, page_size=4)
    good, poisoned = make_prompts(9, 14), [7, VOCAB - 1, 8, 9, 10]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, seed=2)
    expected = engine.generate([good[0], [7, 7, 8, 9, 10], good[1]], params, n=2)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[VOCAB - 1] = float("nan")  # type: ignore[operator]
    loaded.policy_version = 3
    found = engine.generate([good[0], poisoned, good[1]], params, n=2)
    assert tokens([found[0], found[2]]) == tokens([expected[0], expected[2]])
    for g, completion in enumerate(found[1]):
        assert completion.finish_reason == "error" and completion.token_ids == ()
        assert completion.error is not None
        assert re.search(rf"token 0 of sample {2 + g} are NaN or infinite \(policy_version 3\)", completion.error)
    # The pages that held NaN go to others in the next call.
    assert tokens(engine.generate([good[0], [7, 7, 8, 9, 10], good[1]], params, n=2)) == tokens(expected)


def test_pages_that_held_nan_are_clean_for_the_next_sequence() -> None:
    """One page for everybody: what is masked in it still enters attention, as 0 * NaN, unless it was zeroed."""
    loaded = tiny_model("qwen2")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[VOCAB - 1] = float("nan")  # type: ignore[operator]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine = Engine(loaded, num_pages=1, page_size=32)
    assert engine.generate([[VOCAB - 1] * 20], params)[0][0].finish_reason == "error"
    again = engine.generate(make_prompts(3), params)
    assert again[0][0].finish_reason == "length"
    assert tokens(again) == tokens(Engine(loaded, num_pages=1, page_size=32).generate(make_prompts(3), params))


def test_a_neighbour_that_turns_nan_does_not_reach_shorter_rows() -> None:
    """The first sequence owns page 0 and turns NaN late; rows shorter than the longest pad their page tables."""
    loaded = tiny_model("qwen2")
    prompts = make_prompts(2, 3, 40)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=1)
    clean = Engine(loaded, num_pages=40, page_size=8).generate(prompts, params)
    others = {i for p in prompts for i in p} | {i for group in clean[1:] for i in group[0].token_ids}
    poison = next(i for i in clean[0][0].token_ids[2:-1] if i not in others)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poison] = float("nan")  # type: ignore[operator]
    found = Engine(loaded, num_pages=40, page_size=8).generate(prompts, params)
    assert found[0][0].finish_reason == "error"
    assert tokens(found[1:]) == tokens(clean[1:])


def test_an_error_in_the_middle_keeps_what_was_drawn() -> None:
    loaded = tiny_model("qwen2")
    engine = Engine(loaded, num_pages=40, page_size=4)
    prompt = make_prompts(9)[0]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=4)
    clean = engine.generate([prompt], params, n=3)[0]
    poison = next(
        t for i, t in enumerate(clean[0].token_ids[3:]) if t not in prompt and t not in clean[0].token_ids[:3]
    )
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[poison] = float("nan")  # type: ignore[operator]
    for before, after in zip(clean, engine.generate([prompt], params, n=3)[0]):
        if poison in before.token_ids[:-1]:
            drawn = before.token_ids.index(poison) + 1
            assert after.finish_reason == "error" and after.token_ids == before.token_ids[:drawn]
            assert after.logprobs == pytest.approx(before.logprobs[:drawn], abs=1e-5)
        else:
            assert after.token_ids == before.token_ids and after.finish_reason == "length"
    assert engine.pool.free == 40
