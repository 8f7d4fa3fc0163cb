"""What the diagnosis calls logprobs that differ from the trainer's in one known way, or in two.

The planted faults of test_planted_faults.py are not repeated here.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers_faults import (
    Weights,
    budget_of,
    drop_eos,
    hf_logprobs,
    rounded_parameters,
    sample,
    tiny_llama_case,
    tiny_sums_case,
    train,
    with_logprobs,
)
from helpers_model import VOCAB, tiny_model
from helpers_rollout import one_thread  # noqa: F401

from rhotrain.model.load import LoadedModel, load_model
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train.budget import Budget
from rhotrain.train.config import ConfigError
from rhotrain.train.diagnosis import Diagnosis, Scoring, diagnose
from rhotrain.train.readings import ALIGNMENTS, Temperature, View
from rhotrain.train.records import Record, records_of

CASE = tiny_llama_case()
SCORING = Scoring()


@cache
def policy() -> LoadedModel:
    """Shared by the tests that leave it as it is."""
    return CASE.make()


@cache
def reference() -> Any:
    """The same weights in transformers' hands."""
    return CASE.hf()


@cache
def _records(temperature: float, **options: Any) -> tuple[Record, ...]:
    return tuple(records_of(sample(policy(), CASE, SamplingParams(temperature=temperature, **options))))


def records_at(temperature: float = 1.0, **options: Any) -> list[Record]:
    """Records of the engine, clean ones."""
    return list(_records(temperature, **options))


def judge(
    records: Sequence[Record],
    scoring: Scoring = SCORING,
    loaded: LoadedModel | None = None,
    weights: dict[str, Weights] | None = None,
) -> Diagnosis:
    loaded = loaded or policy()
    return diagnose(loaded, records, scoring, budget_of(loaded, records, scoring.temperature), weights=weights)


def by_hf(
    records: Sequence[Record], temperature: float = 1.0, *, vocab: int | None = None, **options: Any
) -> list[Record]:
    model, real = reference(), vocab or policy().vocab_size
    return with_logprobs(records, lambda r: hf_logprobs(model, r, temperature=temperature, vocab=real, **options))


# ---- temperature ----------------------------------------------------------------------------------------------------


def test_raw_logprobs() -> None:
    found = judge(by_hf(records_at(0.6)), Scoring(temperature=0.6))
    assert found.names == ("temperature",)
    assert "raw (temperature 1), the trainer scores at 0.6" in found.findings[0].detail
    assert "processed_logprobs" in found.findings[0].fix


def test_raw_logprobs_divided_by_the_temperature() -> None:
    divided = with_logprobs(by_hf(records_at(0.6)), lambda r: tuple(x / 0.6 for x in r.logprobs))
    found = judge(divided, Scoring(temperature=0.6))
    assert found.names == ("temperature",)
    assert "divided by 0.6" in found.findings[0].detail


@pytest.mark.parametrize("temperature", [0.25, 0.97, 1.03, 3.0])
def test_an_unknown_temperature_is_fitted(temperature: float) -> None:
    found = judge(by_hf(records_at(1.0), temperature))
    assert found.names == ("temperature",)
    assert f"at a temperature of about {temperature:g}" in found.findings[0].detail


def test_an_unknown_temperature_over_recorded_sets() -> None:
    """A trainer that ignores the temperature, with truncated sampling and replay."""
    records = records_at(0.6, top_p=0.9, keep_sets=True)
    found = judge(records, Scoring(temperature=1.0, top_p=0.9, replay=True))
    assert found.names == ("temperature",)
    assert "0.6" in found.findings[0].detail


# ---- support --------------------------------------------------------------------------------------------------------

SETS: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.7, "min_p": 0.05}]


@pytest.mark.parametrize("options", SETS, ids=str)
@pytest.mark.parametrize("recorded", [True, False])
def test_renormalised_and_full(options: dict[str, Any], recorded: bool) -> None:
    records = records_at(0.8, keep_sets=recorded, **options)
    full = by_hf(records, 0.8)
    replay, ignore = (Scoring(temperature=0.8, replay=r, **options) for r in (True, False))
    assert judge(records, replay).clean
    assert judge(full, ignore).clean
    for found, words in (
        (judge(records, ignore), "renormalised over the kept"),
        (judge(full, replay), "full softmax,"),
    ):
        assert found.names == ("truncation",)
        assert words in found.findings[0].detail


def test_sets_that_were_cut_before_the_temperature() -> None:
    """top-p at temperature 1, then the temperature: what is drawn from is another set."""
    records = records_at(0.6, top_p=0.8)
    model, vocab = reference(), policy().vocab_size

    def renormalised(record: Record) -> tuple[float, ...]:
        with torch.no_grad():
            ids = torch.tensor([[*record.prompt_ids, *record.completion_ids]])
            logits = model.eval()(ids).logits[0, len(record.prompt_ids) - 1 : -1, :vocab].double()
        ordered, order = logits.softmax(-1).sort(descending=True)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, ordered.cumsum(-1) - ordered >= 0.8)
        token = torch.tensor(record.completion_ids)[:, None]
        drop.scatter_(1, token, False)
        x = logits.masked_fill(drop, -math.inf) / 0.6
        return tuple(x.log_softmax(-1).gather(1, token)[:, 0].tolist())

    found = judge(with_logprobs(records, renormalised), Scoring(temperature=0.6, top_p=0.8, replay=True))
    assert found.names == ("truncation",)
    assert "cut at temperature 1" in found.findings[0].detail


def test_a_token_outside_of_its_set_is_taken_into_it() -> None:
    """Rounding may move a token across the border of a set that is computed again."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0] + [-50.0] * (VOCAB - 4)] * 2)
    record = Record((5,), (0, 2), (-1.0, -1.0))
    view = View(policy(), [record], logits, Scoring(top_k=2, replay=True))
    found = view.logprobs(Temperature(None, 1.0), view.supports[0], ALIGNMENTS[0])
    inside = 3.0 - math.log(math.exp(3) + math.exp(2))
    outside = 1.0 - math.log(math.exp(3) + math.exp(2) + math.exp(1))
    assert found.tolist() == pytest.approx([inside, outside], abs=1e-6)


def test_renormalised_over_sets_that_nobody_told_us_of() -> None:
    found = judge(records_at(1.0, top_k=12))
    assert found.names == ("truncation",)
    assert "never below the full softmax" in found.findings[0].detail


def test_a_constant() -> None:
    off = with_logprobs(records_at(), lambda r: tuple(x - 0.25 for x in r.logprobs))
    found = judge(off)
    assert found.names == ("truncation",)
    assert "-0.25, a constant" in found.findings[0].detail


def test_padding_rows_of_the_head_in_the_softmax() -> None:
    found = judge(by_hf(records_at(), vocab=VOCAB))
    assert found.names == ("truncation",)
    assert "all 96 rows of the head" in found.findings[0].detail


# ---- position -------------------------------------------------------------------------------------------------------


def moved(record: Record, offset: int) -> tuple[float, ...]:
    values = record.logprobs
    return (values[0], *values[:-1]) if offset > 0 else (*values[1:], values[-1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda records: by_hf(records, late=1), "the token's own position"),
        (lambda records: by_hf(records, late=-1), "one too early"),
        (lambda records: with_logprobs(records, lambda r: moved(r, 1)), "those of the token before"),
        (lambda records: with_logprobs(records, lambda r: moved(r, -1)), "those of the token after"),
    ],
    ids=["late", "early", "list late", "list early"],
)
def test_shifted(make: Callable[[list[Record]], list[Record]], words: str) -> None:
    # At the end of a list that moved there is one value of the wrong token; a reading cannot know which.
    records = make([r for r in records_at() if len(r.completion_ids) > 3 and len(r.prompt_ids) > 1])
    found = judge(records)
    assert found.names == ("shifted",)
    assert words in found.findings[0].detail


# ---- context --------------------------------------------------------------------------------------------------------


def test_bos_added_and_bos_missing() -> None:
    records = records_at()
    bos = policy().tokenizer.bos_token_id
    added = judge(by_hf(records, before=[bos]))
    assert added.names == ("bos",) and "in front of the prompt" in added.findings[0].detail
    with_bos = [replace(r, prompt_ids=(bos, *r.prompt_ids)) for r in records]
    without = [replace(r, prompt_ids=w.prompt_ids) for r, w in zip(by_hf(records), with_bos)]
    missing = judge(without)
    assert missing.names == ("bos",) and "without the prompt's BOS" in missing.findings[0].detail


def test_left_padded_to_the_longest_prompt() -> None:
    records, model, loaded = records_at(), reference(), policy()
    pad = loaded.tokenizer.pad_token_id

    def padded(record: Record) -> tuple[float, ...]:
        pads = [pad] * (12 - len(record.prompt_ids))
        return hf_logprobs(model, record, temperature=1.0, vocab=loaded.vocab_size, pads=pads)

    found = judge(with_logprobs(records, padded))
    assert found.names == ("padding",)
    assert "left-padded to 12" in found.findings[0].detail


def test_right_padded_prompts() -> None:
    records, model, loaded = records_at(), reference(), policy()
    pad = loaded.tokenizer.pad_token_id

    def padded(record: Record) -> tuple[float, ...]:
        longer = replace(record, prompt_ids=record.prompt_ids + (pad,) * (12 - len(record.prompt_ids)))
        return hf_logprobs(model, longer, temperature=1.0, vocab=loaded.vocab_size)

    found = judge(with_logprobs(records, padded))
    assert found.names == ("padding",)
    assert "right-padded to 12" in found.findings[0].detail


# ---- weights --------------------------------------------------------------------------------------------------------


def test_the_right_one_of_several_earlier_sets() -> None:
    loaded = CASE.make()
    pairs = sample(loaded, CASE, SamplingParams())
    snapshots: dict[str, Weights] = {}
    for update in range(3):
        snapshots[f"before update {update}"] = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
        if update == 1:
            pairs = sample(loaded, CASE, SamplingParams())
        train(loaded, pairs, updates=1)
    found = judge(records_of(pairs), loaded=loaded, weights=snapshots)
    assert found.names == ("stale weights",)
    assert "'before update 1'" in found.findings[0].detail


@pytest.mark.parametrize("updates", [3, 30])
def test_stale_weights_that_nobody_names(updates: int) -> None:
    loaded = CASE.make()
    pairs = sample(loaded, CASE, SamplingParams())
    train(loaded, pairs, updates=updates)
    found = judge(records_of(pairs), loaded=loaded)
    assert found.names == ("other weights",)


def test_another_model() -> None:
    found = judge(records_at(), loaded=tiny_model("llama", 7, initializer_range=0.2))
    assert found.names == ("tokenizer",)
    assert "another tokenizer or model" in found.findings[0].detail


def test_the_model_is_left_as_it_was() -> None:
    """After every context and set of weights was tried, and after an error in the middle."""
    loaded = CASE.make()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    storage = {name: p.data_ptr() for name, p in loaded.model.named_parameters()}
    judge(with_logprobs(records_at(), lambda r: tuple(-1.0 - i % 3 for i in r.completion_ids)), loaded=loaded)
    for weights, message in (
        ({"model.norm.weight": torch.ones(5)}, r"model.norm.weight is \[5\], the model has \[32\]"),
        ({"x": torch.ones(1)}, "no name fits"),
    ):
        with pytest.raises(ConfigError, match=message):
            judge(by_hf(records_at(), before=[9]), loaded=loaded, weights={"old": weights})
    after = loaded.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert storage == {name: p.data_ptr() for name, p in loaded.model.named_parameters()}
    assert loaded.dtype == torch.float32 and loaded.attention.context is None


# ---- two at once ----------------------------------------------------------------------------------------------------


def test_two_deviations_are_both_named() -> None:
    records = records_at(0.7)
    bos = policy().tokenizer.bos_token_id
    found = judge(by_hf(records, before=[bos]), Scoring(temperature=0.7))
    assert set(found.names) == {"temperature", "bos"}
    found = judge([drop_eos(r) for r in by_hf(records, late=1)], Scoring(temperature=1.0))
    assert set(found.names) == {"shifted", "eos dropped"}
    half = rounded_parameters(CASE.hf())
    vocab = policy().vocab_size
    rounded = with_logprobs(records, lambda r: hf_logprobs(half, r, temperature=1.0, vocab=vocab, pads=[0]))
    assert set(judge(rounded).names) == {"bf16 weights", "padding"}


def test_another_context_and_other_weights() -> None:
    loaded, bos = CASE.make(), policy().tokenizer.bos_token_id
    records = by_hf(records_at(), before=[bos])
    train(loaded, sample(loaded, CASE, SamplingParams()), updates=3)
    earlier = {name: p.detach().clone() for name, p in policy().model.named_parameters()}
    found = judge(records, loaded=loaded, weights={"earlier": earlier})
    assert set(found.names) == {"bos", "stale weights"}
    assert found.readings[0].difference.mean < 1e-5


def test_a_faulty_engine_in_bfloat16_under_a_float32_trainer() -> None:
    """No reading explains both; the nearest is named, and what it leaves."""
    served = tiny_model("llama", 0, torch.bfloat16, 0.2)
    raw = records_of(sample(served, CASE, SamplingParams(temperature=1.0)))
    assert set(judge(raw, Scoring(temperature=0.6)).names) == {"temperature", "bf16 weights"}


# ---- bfloat16 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_bfloat16_model(seed: int) -> None:
    """Clean at its temperature although rounding is large; raw logprobs are named."""
    loaded = tiny_model("llama", seed, torch.bfloat16, 0.3)
    records = records_of(sample(loaded, CASE, SamplingParams(temperature=0.6, seed=seed)))
    assert judge(records, Scoring(temperature=0.6), loaded).clean
    raw = records_of(sample(loaded, CASE, SamplingParams(temperature=1.0, seed=seed)))
    assert judge(raw, Scoring(temperature=0.6), loaded).names == ("temperature",)


def test_a_fault_that_hides_in_the_wide_budget_of_bfloat16() -> None:
    loaded = tiny_model("llama", 0, torch.bfloat16, 0.3)
    records = records_of(sample(loaded, CASE, SamplingParams(temperature=1.03)))
    found = judge(records, SCORING, loaded)
    own = next(reading for reading in found.readings if not reading.deviations)
    assert Budget.starting("bfloat16").exceeded(own.difference) == ()
    assert found.names == ("temperature",)


# ---- what the records tell by themselves ----------------------------------------------------------------------------


def changed(record: Record, index: int, value: float) -> Record:
    return replace(record, logprobs=(*record.logprobs[:index], value, *record.logprobs[index + 1 :]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite(value: float) -> None:
    records = records_at()
    records[3] = changed(records[3], 1, value)
    found = judge(records)
    assert found.names == ("not finite",)
    assert f"the first is {value} for token 1 of sample 3" in found.findings[0].detail


def test_positive() -> None:
    records = records_at()
    records[2] = changed(records[2], 0, 0.5)
    found = judge(records)
    assert "positive" in found.names
    assert "the first is 0.5 for token 0 of sample 2" in found.findings[0].detail


def test_positive_rounding_is_none() -> None:
    case = tiny_sums_case()
    loaded = case.make()
    records = records_of(sample(loaded, case, SamplingParams(temperature=0.2)))
    touched = [replace(r, logprobs=tuple(x + 2e-6 if x > -1e-6 else x for x in r.logprobs)) for r in records]
    assert any(x > 0 for r in touched for x in r.logprobs)
    assert judge(touched, Scoring(temperature=0.2), loaded).clean


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: replace(r, completion_ids=r.completion_ids[:-1]), "more logprobs than ids by one"),
        (lambda r: replace(r, logprobs=r.logprobs[:-1]), "fewer logprobs than ids by one"),
    ],
    ids=["from ids", "from logprobs"],
)
def test_one_of_ids_and_logprobs_lacks_the_stop_token(change: Callable[[Record], Record], words: str) -> None:
    records = [change(r) if r.finish_reason == "stop" and len(r.logprobs) > 1 else r for r in records_at()]
    found = judge([replace(r, finish_reason="") for r in records])
    assert found.names == ("eos dropped",)
    assert words in found.findings[0].detail


def test_logprobs_of_the_prompt_in_front() -> None:
    records = [replace(r, logprobs=(-1.0,) * len(r.prompt_ids) + r.logprobs) for r in records_at()]
    found = judge(records)
    assert found.names == ("shifted",)
    assert "they include the prompt's" in found.findings[0].detail


def test_stop_strings_explain_a_stop_without_a_stop_id() -> None:
    sampling = SamplingParams(stop_strings=("a", "7"), max_new_tokens=20)
    records = records_of(sample(policy(), CASE, sampling))
    assert any(r.finish_reason == "stop" and r.completion_ids[-1] > 4 for r in records)
    assert judge(records, Scoring.of(sampling, replay=False)).clean
    assert judge(records).names == ("eos dropped",)


def test_stop_ids_of_the_settings_count() -> None:
    sampling = SamplingParams(stop_token_ids=tuple(range(10, 25)))
    records = records_of(sample(policy(), CASE, sampling))
    assert judge(records, Scoring.of(sampling, replay=False)).clean
    assert judge(records).names == ("eos dropped",)


def test_ids_of_another_vocabulary() -> None:
    records = records_at()
    records[1] = replace(records[1], completion_ids=(5000, *records[1].completion_ids[1:]))
    found = judge(records)
    assert found.names == ("tokenizer",)
    assert "sample 1 has id 5000" in found.findings[0].detail
    everywhere = [replace(r, prompt_ids=(5000,)) for r in records]
    assert diagnose(policy(), everywhere, SCORING, Budget.starting("float32")).names == ("tokenizer",)


def test_texts() -> None:
    records, tokenizer = records_at(), policy().tokenizer
    same = [replace(r, text=f" {tokenizer.decode(list(r.completion_ids), skip_special_tokens=True)} ") for r in records]
    assert judge(same).clean
    trimmed = [replace(r, text=tokenizer.decode(list(r.completion_ids))[:-1]) for r in records]
    assert judge(trimmed).clean
    shuffle = list(range(5, 70))
    random.Random(0).shuffle(shuffle)
    other = [replace(r, text=tokenizer.decode([shuffle[i % 65] for i in r.completion_ids])) for r in records]
    found = judge(other)
    assert found.names == ("tokenizer",)
    assert "texts are not what these ids mean here" in found.findings[0].detail


# ---- the report -----------------------------------------------------------------------------------------------------


def test_text_and_dict() -> None:
    found = judge(by_hf(records_at(0.6)), Scoring(temperature=0.6))
    text = found.as_text()
    assert "temperature: the logprobs are raw" in text and "fix: " in text and "what the trainer scores" in text
    data = json.loads(json.dumps(found.as_dict()))
    assert data["clean"] is False and data["findings"][0]["name"] == "temperature"
    assert data["readings"][0]["name"].startswith("raw") and data["readings"][0]["mean"] < 1e-5
    clean = judge(records_at())
    assert clean.clean and "the reported logprobs are what the trainer scores" in clean.as_text()
    assert [r.name for r in clean.readings] == ["what the trainer scores"]


def test_every_record_is_scored() -> None:
    records = records_at()
    found = judge(records)
    assert found.tokens == sum(len(r.completion_ids) for r in records) > 512 and found.records == len(records)


def test_nothing_to_judge() -> None:
    with pytest.raises(ConfigError, match="records: there are none"):
        diagnose(policy(), [], SCORING, Budget.starting("float32"))
    with pytest.raises(ConfigError, match="none can be scored"):
        diagnose(policy(), [Record((5,) * 300, (6,), (-1.0,))], SCORING, Budget.starting("float32"))


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_in_bfloat16_against_a_float32_trainer() -> None:
    """No reading of ours has the engine's rounding, but what is left goes with what bfloat16 does to our own."""
    texts = ("What is 12 + 35?", "Name three colours of the rainbow.", "Write a sentence about the sea.")
    served = load_model("smollm2", device="cpu", dtype="bfloat16", probe=False)
    prompts = [
        served.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    groups = Engine(served, num_pages=400).generate(prompts, SamplingParams(max_new_tokens=24), n=4)
    records = records_of((prompt, c) for prompt, group in zip(prompts, groups) for c in group)
    assert judge(records, loaded=served).clean
    found = judge(records, loaded=load_model("smollm2", device="cpu", dtype="float32"))
    assert found.names == ("bf16 weights",)
