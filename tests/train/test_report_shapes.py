"""Reports that are spoilt on the way, files of which only a part is wrong, and faults inside a wide budget."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from helpers_faults import budget_of, sample, tiny_llama_case, tiny_sums_case, train, with_logprobs
from helpers_rollout import one_thread  # noqa: F401

from rhotrain.model.load import LoadedModel, load_model
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train import plain_reading
from rhotrain.train.diagnosis import Diagnosis, Scoring, correlation, diagnose, inner
from rhotrain.train.plain_reading import LONGEST
from rhotrain.train.records import Record, records_of

CASE = tiny_llama_case()
SUMS = tiny_sums_case()
Change = Callable[[tuple[float, ...]], tuple[float, ...]]


def clean_records(temperature: float = 1.0) -> list[Record]:
    return list(records_of(sample(CASE.make(), CASE, SamplingParams(temperature=temperature))))


def judge(records: Sequence[Record], scoring: Scoring | None = None, loaded: LoadedModel | None = None) -> Diagnosis:
    loaded, scoring = loaded or CASE.make(), scoring or Scoring()
    return diagnose(loaded, records, scoring, budget_of(loaded, records, scoring.temperature))


def changed(change: Change) -> list[Record]:
    return with_logprobs(clean_records(), lambda record: change(record.logprobs))


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (lambda xs: tuple(round(x, 4) for x in xs), "rounded", "4 decimals"),
        (lambda xs: tuple(round(x, 2) for x in xs), "rounded", "2 decimals"),
        (lambda xs: tuple(torch.tensor(xs).half().tolist()), "rounded", "float16"),
        (lambda xs: tuple(torch.tensor(xs).bfloat16().tolist()), "rounded", "bfloat16"),
        (lambda xs: (0.0, *xs[1:]), "missing", "exactly 0"),
        (lambda xs: (0.0,) * len(xs), "missing", "exactly 0"),
        (lambda xs: tuple(x / math.log(10) for x in xs), "scale", "base-10"),
        (lambda xs: tuple(x / math.log(2) for x in xs), "scale", "base-2"),
        (lambda xs: tuple(x / 2 for x in xs), "scale", "0.5 times what"),
    ],
    ids=["4 decimals", "2 decimals", "half", "bfloat16", "first", "all", "log10", "log2", "halved"],
)
def test_a_spoilt_report_is_named(change: Change, name: str, words: str) -> None:
    found = judge(changed(change))
    assert found.names == (name,) and words in found.findings[0].detail


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda xs: tuple(-x for x in xs), "negative log-likelihoods"), (lambda xs: tuple(map(math.exp, xs)), "probab")],
    ids=["nll", "probabilities"],
)
def test_what_is_no_logarithm_is_positive_and_of_another_scale(change: Change, words: str) -> None:
    found = judge(changed(change))
    assert found.names == ("positive", "scale") and words in found.findings[1].detail


@pytest.mark.parametrize("value", [-9999.0, -30.0])
def test_one_garbage_value_is_an_outlier(value: float) -> None:
    records = clean_records()
    records[5] = replace(records[5], logprobs=(*records[5].logprobs[:2], value, *records[5].logprobs[3:]))
    found = judge(records)
    assert found.names == ("outlier",) and found.findings[0].detail.startswith("1 of ")
    assert f"token 2 of sample 5: {value:.4g}, scored {clean_records()[5].logprobs[2]:.4g}" in found.findings[0].detail


def test_one_garbage_value_does_not_hide_what_the_others_are() -> None:
    loaded, records = CASE.make(), clean_records()
    train(loaded, sample(CASE.make(), CASE, SamplingParams(temperature=1.0)), updates=3)
    records[5] = replace(records[5], logprobs=(-9999.0, *records[5].logprobs[1:]))
    found = judge(records, loaded=loaded)
    assert found.names == ("outlier", "other weights") and "token 0 of sample 5: -9999" in found.findings[0].detail


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda xs: (-9999.0, *xs[1:]), "outlier"),
        (lambda xs: (0.0, *xs[1:]), "missing"),
        (lambda xs: tuple(x / math.log(2) for x in xs), "scale"),
        (lambda xs: tuple(round(x, 2) for x in xs), "rounded"),
    ],
    ids=["outlier", "missing", "scale", "rounded"],
)
def test_spoilt_values_do_not_hide_in_what_is_trimmed_for_sets_computed_again(change: Change, name: str) -> None:
    loaded = CASE.make()
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    records, scoring = list(records_of(sample(loaded, CASE, sampling))), Scoring.of(sampling, replay=True)
    assert judge(records, scoring, loaded).clean
    some = records[:1] if name == "outlier" else records
    records = [replace(r, logprobs=change(r.logprobs)) if r in some else r for r in records]
    assert judge(records, scoring, loaded).names == (name,)


@pytest.mark.parametrize("share", ["first", "all"])
def test_zeros_are_missing_where_the_model_is_sure_of_some_tokens(share: str) -> None:
    loaded = SUMS.make()
    records = list(records_of(sample(loaded, SUMS, SamplingParams(temperature=1.0))))
    records = with_logprobs(records, lambda r: (0.0, *((x if share == "first" else 0.0) for x in r.logprobs[1:])))
    assert judge(records, loaded=loaded).names == ("missing",)


def test_zeros_in_place_of_values_are_no_sets_of_one() -> None:
    """Beside another fault: the zeros are above the full softmax, the values are on both sides of it."""
    loaded = CASE.make()
    train(loaded, sample(CASE.make(), CASE, SamplingParams(temperature=1.0)), updates=1, lr=1e-5)
    records = changed(lambda xs: tuple(0.0 if i % 2 else x for i, x in enumerate(xs)))
    assert "truncation" not in judge(records, loaded=loaded).names


def test_swapped_ids_without_text_are_no_truncation() -> None:
    ids = list(range(5, 75))
    random.Random(3).shuffle(ids)
    swap = dict(zip(range(5, 75), ids))
    records = [replace(r, completion_ids=tuple(swap.get(i, i) for i in r.completion_ids)) for r in clean_records()]
    assert judge(records).names == ("tokenizer",)


# ---- a part of the file ---------------------------------------------------------------------------------------------


def test_a_fault_late_in_a_long_file_is_seen_and_only_its_records_are_blamed() -> None:
    """The first three quarters are clean: more than any cap on the tokens of the search."""
    good = [*clean_records(), *clean_records(), *clean_records()]
    assert sum(len(r.completion_ids) for r in good) > 1024
    found = judge([*good, *clean_records(0.6)])  # the last weights sync came with another temperature
    assert found.names == ("temperature",)
    assert "about 0.6" in found.findings[0].detail and found.findings[0].detail.startswith("in ")
    assert found.tokens > 1500 and judge(good).clean


def test_a_few_tokens_late_in_a_long_file_are_seen() -> None:
    good = [*clean_records(), *clean_records(), *clean_records()]
    last = replace(good[-2], logprobs=tuple(x - 0.05 for x in good[-2].logprobs))
    assert judge([*good, last]).names == ("outlier",)


def test_a_few_tokens_that_are_slightly_off_are_not_lost_between_pass_and_search() -> None:
    """Too few to be looked at alone, too near to be garbage, and not among the tokens of the search."""
    good = [*clean_records(), *clean_records(), *clean_records()]
    numbers, tokens = [], 0
    for i in reversed(range(len(good))):
        if tokens + len(good[i].completion_ids) < 32:
            numbers.append(i)
            tokens += len(good[i].completion_ids)
    for i in numbers:
        good[i] = replace(good[i], logprobs=tuple(x - 3e-4 for x in good[i].logprobs))
    found = judge(good)
    assert found.names == ("outlier",) and "few completions are off" in found.findings[0].detail


def test_one_value_does_not_decide_a_correlation() -> None:
    a = torch.linspace(-5.0, 0.0, 300, dtype=torch.float64)
    b = a.clone()
    b[200] = -9999.0
    assert abs(correlation(a, b)) < 0.1 and correlation(inner(a), inner(b)) > 0.9


def test_few_logits_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    compute = plain_reading.completion_logits

    def watched(loaded: LoadedModel, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> torch.Tensor:
        logits = compute(loaded, pairs)
        held.append(logits.numel() * logits.element_size())
        return logits

    monkeypatch.setattr(plain_reading, "completion_logits", watched)
    monkeypatch.setattr(plain_reading, "LOGIT_BYTES", 64 << 10)
    records = clean_records()
    found = judge(records)
    assert found.clean and found.tokens == sum(len(r.completion_ids) for r in records)
    assert len(held) > 2 and max(held) <= 64 << 10


def test_the_same_weights_named_as_earlier_ones_are_not_blamed() -> None:
    loaded = CASE.make()
    records = [*clean_records(), *clean_records(0.6)]
    same = {"yesterday": {name: p.detach().clone() for name, p in loaded.model.named_parameters()}}
    found = diagnose(loaded, records, Scoring(), budget_of(loaded, records, 1.0), weights=same)
    assert found.names == ("temperature",)


def test_long_completions_are_judged_by_their_beginning() -> None:
    """What follows a token cannot change its logprob; the ending is still looked at."""
    loaded = CASE.make()
    prompts = [(5 + i, 9, 11) for i in range(6)]
    params = SamplingParams(temperature=1.0, max_new_tokens=150, ignore_eos=True)
    groups = Engine(loaded, num_pages=128).generate(prompts, params)
    records = list(records_of([(prompt, group[0]) for prompt, group in zip(prompts, groups)]))
    found = judge(records, loaded=loaded)
    assert found.clean and found.tokens == 6 * LONGEST


# ---- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.2])
def test_raw_logprobs_of_truncated_sampling_show_inside_the_wide_budget_of_bfloat16(temperature: float) -> None:
    """An engine's raw mode: full softmax at temperature 1, where the trainer scores the kept set. The difference is far
    within bfloat16's starting point, and far above what this model's own rounding is."""
    loaded = load_model("tiny-sums", device="cpu", dtype="bfloat16")
    sampling = SamplingParams(temperature=temperature, top_p=0.9, top_k=8)
    pairs = sample(loaded, SUMS, sampling)
    records = list(records_of(pairs))
    scoring = Scoring.of(sampling, replay=True)
    assert judge(records, scoring, loaded).clean
    raw = full_softmax(loaded, records)
    assert set(judge(raw, scoring, loaded).names) == {"temperature", "truncation"}


def full_softmax(loaded: LoadedModel, records: Sequence[Record]) -> list[Record]:
    """Logprobs at temperature 1 over all ids, by the decode path."""
    from rhotrain.rollout.replay import decode_logprobs

    rows = decode_logprobs(loaded, [(r.prompt_ids, r.completion_ids) for r in records], temperature=1.0)
    return [replace(r, logprobs=tuple(values.tolist()), kept_ids=None) for r, values in zip(records, rows)]
