import random
import re
from itertools import chain
from typing import Any

import pytest
import torch
from helpers_model import VOCAB, tiny_hf_model, tiny_model
from helpers_rollout import one_thread, simulate  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rhotrain.kernels.sampling import philox_uniform
from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine, StopStrings, plan_pages

Groups = list[list[Completion]]


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(5, 70) for _ in range(n)] for n in lengths]


def tokens(groups: Groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def model_logits(prompt: list[int], ids: tuple[int, ...], loaded: LoadedModel) -> torch.Tensor:
    """Logits [N, vocab] before each of `ids`, by transformers alone."""
    model = tiny_hf_model("llama").eval()
    with torch.no_grad():
        out = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits
    return out[0, len(prompt) - 1 : -1, : loaded.vocab_size].double()


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
def test_tokens_do_not_depend_on_pool_budget_or_page_size(change: dict[str, int]) -> None:
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


@pytest.mark.parametrize("seed", range(8))
def test_planned_pages_are_what_the_groups_take(seed: int) -> None:
    rng = random.Random(seed)
    loaded = tiny_model("llama")
    lens = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
    n, new, size = rng.randint(1, 6), rng.randint(1, 30), rng.choice([1, 4, 16])
    planned = plan_pages(loaded, lens, n, new, page_size=size)
    done = simulate(
        [[0] * length for length in lens],
        [[new] * n] * len(lens),
        num_pages=planned,
        page_size=size,
        max_batch_tokens=1000,
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
    with pytest.raises(ValueError, match=f"{name}: 0"):
        Engine(tiny_model("llama"), **{name: 0})


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

    with pytest.raises(KeyError, match="reward"):
        engine.generate(make_prompts(20, 30), params, n=2, on_finish=fail)
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


# ---- how completions end --------------------------------------------------------------------------------------------


def test_stop_ids_are_kept_with_their_logprob() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=100)
    prompt = make_prompts(6)[0]
    free = engine.generate([prompt], SamplingParams(max_new_tokens=20, ignore_eos=True), n=1)[0][0]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    ended = engine.generate([prompt], SamplingParams(max_new_tokens=20, stop_token_ids=(76, stop), ignore_eos=True))
    completion = ended[0][0]
    assert completion.token_ids == free.token_ids[: first + 1]
    assert completion.logprobs == pytest.approx(free.logprobs[: first + 1], abs=1e-5)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert (free.finish_reason, free.stop_reason) == ("length", None)


def test_every_stop_id_of_the_model_ends_a_completion_unless_ignored() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=100)
    prompts = make_prompts(3, 4, 5, 6)
    free = SamplingParams(max_new_tokens=24, temperature=1.5, ignore_eos=True)
    drawn = engine.generate(prompts, free, n=2)
    loaded.stop_token_ids = tuple(sorted({c.token_ids[5 + i] for i, group in enumerate(drawn) for c in group}))
    assert len(loaded.stop_token_ids) >= 3
    ended = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=1.5), n=2)
    for before, after in zip(chain(*drawn), chain(*ended), strict=True):
        first = next(i for i, t in enumerate(before.token_ids) if t in loaded.stop_token_ids)
        assert after.token_ids == before.token_ids[: first + 1]
        assert after.stop_reason == after.token_ids[-1] and after.finish_reason == "stop"
    assert len({c.stop_reason for group in ended for c in group}) >= 2
    assert tokens(engine.generate(prompts, free, n=2)) == tokens(drawn)


def test_a_stop_id_at_the_last_token_is_a_stop() -> None:
    engine = Engine(tiny_model("llama"), num_pages=100)
    prompt = make_prompts(6)[0]
    free = engine.generate([prompt], SamplingParams(max_new_tokens=5, ignore_eos=True))[0][0]
    length = free.token_ids.index(free.token_ids[-1]) + 1
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, stop_token_ids=(free.token_ids[-1],))
    assert engine.generate([prompt], params)[0][0].finish_reason == "stop"


def test_stop_strings_end_a_completion_across_token_boundaries() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=100)
    prompt = make_prompts(6)[0]
    params = SamplingParams(max_new_tokens=24, temperature=1.5, ignore_eos=True)
    free = engine.generate([prompt], params)[0][0]
    text = loaded.tokenizer.decode(free.token_ids[9:12])
    assert len(text) >= 3, "one character per token"
    changed = SamplingParams(max_new_tokens=24, temperature=1.5, ignore_eos=True, stop_strings=("never drawn", text))
    completion = engine.generate([prompt], changed)[0][0]
    whole = [loaded.tokenizer.decode(free.token_ids[: i + 1]) for i in range(24)]
    first = next(i for i, prefix in enumerate(whole) if text in prefix)
    assert completion.token_ids == free.token_ids[: first + 1], "ids are never trimmed"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", text)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: every character outside ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece style: a decoder that drops the space before the first piece."""
    pieces = ["<unk>", "\u2581", "\u2581a", "\u2581b", "a", "b", "ab", "\u2581ab", "c"]
    core = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_are_found_as_soon_as_the_whole_text_holds_them(seed: int) -> None:
    """Against decoding the whole completion after every token."""
    rng = random.Random(seed)
    tokenizer = byte_tokenizer() if seed % 2 else metaspace_tokenizer()
    if seed % 2:
        ids = tokenizer.encode("".join(rng.choice("ab\u00e9\u4f60\U0001f600 ") for _ in range(40)))
        stops = tuple(
            "".join(rng.choice("ab\u00e9\u4f60\U0001f600 ") for _ in range(rng.randint(1, 3))) for _ in range(2)
        )
    else:
        ids = [rng.randrange(1, 9) for _ in range(60)]
        stops = tuple("".join(rng.choice("abc ") for _ in range(rng.randint(2, 4))) for _ in range(2))
    prompt = ids[:7]
    finder = StopStrings(tokenizer, stops, prompt)
    context = tokenizer.decode(prompt)
    for i in range(7, len(ids)):
        found = finder.add(ids[i])
        text = tokenizer.decode(ids[: i + 1])[len(context) :]
        holding = [s for s in stops if s in text]
        assert (found is not None) == bool(holding), (text, stops, found)
        if found is not None:
            assert found in holding
            break


def test_broken_bytes_do_not_make_the_tail_grow() -> None:
    tokenizer = byte_tokenizer()
    finder = StopStrings(tokenizer, ("end",), [])
    broken = tokenizer.encode("\u4f60")[0]
    for _ in range(200):
        assert finder.add(broken) is None
        assert len(finder.ids) <= 30
    ids = tokenizer.encode("the end")
    assert [finder.add(i) for i in ids] == [None] * (len(ids) - 1) + ["end"]


# ---- truncation -----------------------------------------------------------------------------------------------------


def test_below_min_new_tokens_stop_ids_are_not_drawn_and_the_kept_mass_says_so() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=100)
    prompts = make_prompts(5, 9)
    stops = tuple(range(5, 60))
    params = SamplingParams(
        max_new_tokens=12, min_new_tokens=6, stop_token_ids=stops, temperature=1.3, keep_sets=True, seed=8
    )
    for prompt, group in zip(prompts, engine.generate(prompts, params, n=4)):
        for completion in group:
            ids = completion.token_ids
            all_stops = set(stops) | set(loaded.stop_token_ids)
            assert len(ids) > 6 and not all_stops & set(ids[:6])
            p = (model_logits(prompt, ids, loaded) / 1.3).softmax(-1)
            allowed = [i for i in range(loaded.vocab_size) if i not in all_stops]
            mass = [float(row[allowed].sum()) if i < 6 else 1.0 for i, row in enumerate(p)]
            assert completion.kept_mass == pytest.approx(mass, abs=1e-5)
            assert min(completion.kept_mass[:6]) < 0.9
            assert completion.logprobs == pytest.approx([float(r[t].log()) for r, t in zip(p, ids)], abs=1e-4)
            assert completion.kept_ids is not None
            sets = [tuple(allowed) if i < 6 else tuple(range(loaded.vocab_size)) for i in range(len(ids))]
            assert list(completion.kept_ids) == sets


@pytest.mark.parametrize(
    "truncation",
    [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8, "min_new_tokens": 4}],
    ids=str,
)
def test_kept_sets_are_what_the_token_was_drawn_from(truncation: dict[str, Any]) -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=40, page_size=4)
    prompts = make_prompts(5, 9, 14)
    params = SamplingParams(max_new_tokens=10, temperature=1.4, keep_sets=True, seed=3, **truncation)
    for prompt, group in zip(prompts, engine.generate(prompts, params, n=3)):
        for completion in group:
            x = model_logits(prompt, completion.token_ids, loaded) / 1.4
            assert completion.kept_ids is not None
            for i, kept in enumerate(completion.kept_ids):
                p = x[i].softmax(-1)
                restricted = p.clone()
                if i < params.min_new_tokens:
                    restricted[list(loaded.stop_token_ids)] = 0
                assert kept == expected_set(restricted, params)
                assert completion.kept_mass[i] == pytest.approx(float(p[list(kept)].sum()), abs=1e-4)
                assert completion.token_ids[i] in kept
                assert completion.logprobs[i] == pytest.approx(float(p[completion.token_ids[i]].log()), abs=1e-4)


def expected_set(p: torch.Tensor, params: SamplingParams) -> tuple[int, ...]:
    """The kept set, one id after the other, from the definition."""
    order = sorted((i for i in range(len(p)) if p[i] > 0), key=lambda i: (-float(p[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = float(p[order].sum()), 0.0, []
    for i in order:
        if mass >= params.top_p * total:
            break
        kept.append(i)
        mass += float(p[i])
    return tuple(sorted(i for i in kept if p[i] >= params.min_p * p[order[0]]))


def test_without_truncation_everything_is_kept_and_no_sets_are_recorded() -> None:
    engine = Engine(tiny_model("llama"), num_pages=40)
    completion = engine.generate(make_prompts(5), SamplingParams(max_new_tokens=6, keep_sets=True))[0][0]
    assert set(completion.kept_mass) == {1.0} and completion.kept_ids is None


def test_padding_ids_are_never_drawn() -> None:
    """The head has 96 rows, the tokenizer 77 ids; unmasked, a flat model draws 1 token in 5 from the rest."""
    loaded = tiny_model("qwen2")
    with torch.no_grad():
        loaded.head.weight.zero_()
    engine = Engine(loaded, num_pages=100)
    completions = engine.generate(make_prompts(5), SamplingParams(max_new_tokens=20, ignore_eos=True), n=10)[0]
    assert max(max(c.token_ids) for c in completions) < loaded.vocab_size < VOCAB
    expected = -torch.tensor(float(loaded.vocab_size)).log().item()
    assert all(c.logprobs == pytest.approx([expected] * 20, abs=1e-5) for c in completions)


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
