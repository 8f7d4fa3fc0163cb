"""The numerics budget: figures against formulas, limits, and what can and cannot widen it."""

import math
import random
from typing import Any

import pytest
import torch
from helpers_faults import budget_of, sample, tiny_llama_case
from helpers_model import tiny_model
from helpers_rollout import make_prompts, one_thread  # noqa: F401

from rhotrain.kernels import paged_attention
from rhotrain.rollout.completion import SamplingParams
from rhotrain.train.budget import STARTING_POINTS, Budget, Difference, calibrate, packed_difference
from rhotrain.train.config import ConfigError
from rhotrain.train.records import Record, read_records, records_of

SEQUENCES = [(prompt, ids) for prompt, ids in zip(make_prompts(3, 17, 1, 8), make_prompts(20, 9, 15, 12))]


# ---- Difference -----------------------------------------------------------------------------------------------------


def test_figures_against_their_formulas() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0.1, 0.5) for _ in range(250)]
    found = Difference.of(torch.tensor(values, dtype=torch.float64).view(5, 50))
    ordered = sorted(map(abs, values))
    assert found.count == 250
    assert found.mean == pytest.approx(math.fsum(ordered) / 250, rel=1e-12)
    assert found.p99 == ordered[247]  # 248 of 250 are not above it
    assert found.max == ordered[-1]
    assert found.bias == pytest.approx(math.fsum(values) / 250, rel=1e-12)
    assert found.k3 == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in values) / 250, rel=1e-12)


def test_k3_of_tiny_differences_does_not_cancel() -> None:
    """d = 1e-6: k3 = 5e-13, of which exp(d) - 1 - d in float64 has three digits left."""
    d = torch.full((10,), 1e-6, dtype=torch.float64)
    assert Difference.of(d).k3 == pytest.approx(0.5e-12, rel=1e-4)
    assert Difference.of(d * 1e-3).k3 < 1e-17


def test_no_tokens_and_not_a_number() -> None:
    assert Difference.of(torch.zeros(0)) == Difference(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    broken = Difference.of(torch.tensor([0.0, math.nan]))
    assert math.isnan(broken.mean)
    assert Budget.starting("float32").exceeded(broken)


def test_huge_differences_stay_finite() -> None:
    assert math.isfinite(Difference.of(torch.tensor([-1000.0, 1000.0])).k3)


# ---- Budget ---------------------------------------------------------------------------------------------------------


def test_starting_points_by_dtype() -> None:
    assert Budget.starting(torch.bfloat16) == Budget("bfloat16", 0.06, 0.5, 5e-3)
    assert Budget.starting("float32").mean == 1e-5
    with pytest.raises(ValueError, match="float8_e4m3fn has no numerics budget; use one of float64, float32"):
        Budget.starting("float8_e4m3fn")


def test_each_figure_is_named_with_its_limit() -> None:
    budget = Budget("float32", mean=1e-5, p99=1e-4, k3=1e-8)
    fine = Difference(1000, 9e-6, 9e-5, 1.0, 9e-9, 0.0)
    assert budget.exceeded(fine) == ()
    (mean,) = budget.exceeded(Difference(1000, 2e-5, 9e-5, 1.0, 9e-9, 0.0))
    (p99,) = budget.exceeded(Difference(1000, 9e-6, 2e-4, 1.0, 9e-9, 0.0))
    (k3,) = budget.exceeded(Difference(1000, 9e-6, 9e-5, 1.0, 2e-8, 0.0))
    assert mean == "mean |d| 2e-05 exceeds 1.01e-05 (float32, 1000 tokens)"
    assert "99th percentile of |d| 0.0002 exceeds 0.0001" in p99
    assert k3.startswith("k3 2e-08 exceeds 1e-08")


@pytest.mark.parametrize("dtype", STARTING_POINTS)
@pytest.mark.parametrize("count", [1, 3, 10, 50])
def test_one_token_in_the_tail_of_a_short_sample_is_no_alarm(dtype: str, count: int) -> None:
    budget = Budget.starting(dtype)
    d = torch.zeros(count, dtype=torch.float64)
    d[0] = budget.p99
    assert budget.exceeded(Difference.of(d)) == ()
    d[0] = 2.1 * budget.p99
    assert budget.exceeded(Difference.of(d))


def test_measured_widens_the_limits_up_to_a_ceiling() -> None:
    start = Budget.starting("float32")
    quiet = Difference(400, 1e-6, 1e-5, 1e-5, 1e-12, 0.0)
    assert start.widened(quiet) == Budget("float32", start.mean, start.p99, start.k3, quiet)
    noisy = Difference(400, 2e-5, 1e-4, 1e-3, 4e-9, 0.0)
    wide = start.widened(noisy)
    assert (wide.mean, wide.p99, wide.k3) == pytest.approx((6e-5, 3e-4, 3.6e-8))
    assert wide.exceeded(noisy) == ()
    broken = Difference(400, 0.3, 2.0, 5.0, 0.1, 0.2)
    capped = start.widened(broken)
    assert (capped.mean, capped.p99, capped.k3) == pytest.approx((1e-4, 1e-3, 1e-6))
    assert len(capped.exceeded(broken)) == 3
    assert "MORE THAN ROUNDING" in capped.describe() and "MORE" not in wide.describe()


def test_describe_and_dict() -> None:
    budget = Budget.starting("bfloat16").widened(Difference(7, 0.01, 0.1, 0.1, 1e-4, -0.002))
    text = budget.describe()
    assert "\n" not in text and "bfloat16" in text and "7 tokens" in text and "mean 0.06" in text
    assert Budget.from_dict(budget.as_dict()) == budget
    assert Budget.from_dict(Budget.starting("float32").as_dict()) == Budget.starting("float32")


# ---- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(torch.float64, 1e-17, 1e-13), (torch.float32, 1e-8, 1e-5), (torch.bfloat16, 1e-6, 0.06)],
    ids=["float64", "float32", "bfloat16"],
)
def test_measures_rounding(dtype: torch.dtype, least: float, most: float) -> None:
    loaded = tiny_model("mistral", dtype=dtype, initializer_range=0.3)
    budget = calibrate(loaded, SEQUENCES, temperature=0.7, token_budget=64)
    assert budget.measured is not None and budget.measured.count == 56
    assert least < budget.measured.mean < most
    assert budget.dtype == str(dtype).removeprefix("torch.")
    assert budget.exceeded(budget.measured) == ()


def test_a_wrong_decode_path_does_not_excuse_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention that misses a key: far beyond rounding, and the limits stay where they were."""
    loaded = tiny_model("llama")
    right = paged_attention.paged_decode

    def wrong(q: Any, k_pool: Any, v_pool: Any, tables: Any, lens: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(q, k_pool, v_pool, tables, (lens - 1).clamp(min=1), **options)

    monkeypatch.setattr(paged_attention, "paged_decode", wrong)
    budget = calibrate(loaded, SEQUENCES, temperature=1.0, token_budget=4096)
    assert budget.measured is not None and budget.measured.mean > 1e-2
    assert len(budget.exceeded(budget.measured)) == 3


def test_a_sampler_that_lies_cannot_widen_it() -> None:
    """The engine's report does not enter: budgets from its ids alone, whatever logprobs it gives."""
    case = tiny_llama_case()
    loaded = case.make()
    records = records_of(sample(loaded, case, SamplingParams(temperature=0.8)))
    lying = [Record(r.prompt_ids, r.completion_ids, tuple(x - 1 for x in r.logprobs)) for r in records]
    assert budget_of(loaded, records, 0.8) == budget_of(loaded, lying, 0.8)


def test_groups_share_their_prompt_and_long_sequences_fit() -> None:
    loaded = tiny_model("llama")
    pairs = [(SEQUENCES[1][0], ids) for _, ids in SEQUENCES]
    difference = packed_difference(loaded, pairs, temperature=1.0, token_budget=1)
    assert difference.count == 56 and difference.max < 1e-4


def test_nothing_to_measure_gives_the_starting_points() -> None:
    budget = calibrate(tiny_model("llama"), [([5], [])], temperature=1.0, token_budget=64)
    assert budget == Budget.starting("float32")


# ---- records --------------------------------------------------------------------------------------------------------


def test_records_of_our_engine_hold_the_acting_distribution() -> None:
    case = tiny_llama_case()
    pairs = sample(case.make(), case, SamplingParams(top_p=0.7, keep_sets=True))
    records = records_of(pairs)
    assert len(records) == len(pairs)
    for record, (prompt, completion) in zip(records, pairs):
        assert record.prompt_ids == prompt and record.completion_ids == completion.token_ids
        assert record.kept_ids == completion.kept_ids and record.finish_reason == completion.finish_reason
        for x, full, mass in zip(record.logprobs, completion.logprobs, completion.kept_mass, strict=True):
            assert math.exp(x) * mass == pytest.approx(math.exp(full), rel=1e-6)


def test_reads_a_file(tmp_path: object) -> None:
    file = tmp_path / "records.jsonl"  # type: ignore[operator]
    file.write_text(
        '{"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, null], "engine": "x"}\n\n'
        '{"prompt_ids": [1], "completion_ids": [3], "logprobs": [-1], "finish_reason": "stop", "text": "c"}\n'
    )
    first, second = read_records(file)
    assert (first.prompt_ids, first.completion_ids, first.finish_reason, first.text) == ((1, 2), (3, 4), "", None)
    assert first.logprobs[0] == -0.5 and math.isnan(first.logprobs[1])
    assert second == Record((1,), (3,), (-1.0,), "stop", "c")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: is list, not an object with prompt_ids"),
        ('{"prompt_ids": [1], "completion_ids": [2]}', "line 2: logprobs is missing"),
        ('{"prompt_ids": [], "completion_ids": [2], "logprobs": [-1]}', r"line 2: prompt_ids: \[\] is not a list with"),
        ('{"prompt_ids": "ab", "completion_ids": [2], "logprobs": [-1]}', "line 2: prompt_ids: 'ab' is not a list"),
        (
            '{"prompt_ids": [1], "completion_ids": ["b"], "logprobs": [-1]}',
            r"line 2: completion_ids\[0\]: 'b' is not a",
        ),
        ('{"prompt_ids": [1], "completion_ids": [-2], "logprobs": [-1]}', r"line 2: completion_ids\[0\]: -2"),
        ('{"prompt_ids": [true], "completion_ids": [2], "logprobs": [-1]}', r"line 2: prompt_ids\[0\]: True"),
        (
            '{"prompt_ids": [1], "completion_ids": [2], "logprobs": ["-1"]}',
            r"line 2: logprobs\[0\]: '-1' is not a number",
        ),
        ('{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1], "text": 3}', "line 2: text: 3 is not text"),
        pytest.param(
            f'{{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1{"0" * 400}]}}', "is not a number", id="huge"
        ),
        pytest.param(
            f'{{"prompt_ids": [1], "completion_ids": [1{"0" * 5000}], "logprobs": [-1]}}', "is not JSON", id="digits"
        ),
        pytest.param("[" * 100_000, "line 2: is not JSON", id="deep"),
        ('{"prompt_ids": [1], "completion_ids": [4294967296], "logprobs": [-1]}', "is not a token id"),
        (
            '{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1], "finish_reason": 3}',
            "line 2: finish_reason: 3",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: object, line: str, message: str) -> None:
    file = tmp_path / "records.jsonl"  # type: ignore[operator]
    file.write_text(f'{{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1]}}\n{line}\n')
    with pytest.raises(ConfigError, match=message) as caught:
        read_records(file)
    assert "records.jsonl" in str(caught.value)


def test_line_separators_inside_text_and_a_byte_order_mark_are_fine(tmp_path: object) -> None:
    file = tmp_path / "records.jsonl"  # type: ignore[operator]
    line = '{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1], "text": "a\u2028b\u0085c"}'
    file.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\n".encode())
    assert [record.text for record in read_records(file)] == ["a\u2028b\u0085c"] * 2


def test_a_missing_or_empty_file_is_named(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl' cannot be read \(No such file"):
        read_records(tmp_path / "none.jsonl")  # type: ignore[operator]
    empty = tmp_path / "empty.jsonl"  # type: ignore[operator]
    empty.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no records"):
        read_records(empty)
