"""How completions end (stop ids, stop strings, minimum length), and what truncation records."""

import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from helpers_model import VOCAB, tiny_model
from helpers_rollout import make_prompts, model_logits, one_thread, tokens  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.stops import StopStrings

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


def test_stop_strings_below_min_new_tokens_are_passed_over() -> None:
    loaded = tiny_model("llama")
    engine = Engine(loaded, num_pages=100)
    prompt = make_prompts(6)[0]
    params = SamplingParams(max_new_tokens=24, temperature=1.5, ignore_eos=True)
    free = engine.generate([prompt], params)[0][0]
    texts = [loaded.tokenizer.decode(free.token_ids[:i]) for i in range(25)]
    early = texts[7][len(texts[5]) :]
    # The long one is never drawn, but makes the engine keep a tail that still holds the early one.
    changed = replace(params, min_new_tokens=9, stop_strings=(early, "a string of many characters"))
    completion = engine.generate([prompt], changed)[0][0]
    ends = [i for i in range(10, 25) if early in texts[i][len(texts[i - 1]) - len(early) + 1 :]]
    length = ends[0] if ends else 24
    assert early in texts[7]
    assert completion.token_ids == free.token_ids[:length] and length > 9


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
