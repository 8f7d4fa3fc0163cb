"""Sampling against Random123's vectors, the float64 softmax and a brute-force kept set written from the definitions."""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from rhotrain.kernels import sampling
from rhotrain.kernels.logprob import KeptSet
from rhotrain.kernels.philox import philox4x32, philox_uniform
from rhotrain.kernels.sampling import Sample, sample_tokens

CHI_SQUARE_P = 1e-3
"""A right sampler fails one chi-square test with this probability for a random seed: 0.6 % for the six together.

The seeds are fixed, so the outcome does not change from run to run.
"""


def counters(rows: int, seed: int = 0) -> dict[str, Any]:
    return {
        "seeds": torch.full((rows,), seed, dtype=torch.int64),
        "samples": torch.arange(rows),
        "positions": torch.arange(rows) % 7,
    }


def options_list(*options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return options


def random_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    """Float32 logits on a grid of 1/8, so that equal values are common."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return (x * 8).round() / 8


def kept_by_definition(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, may_draw: set[int] | None = None
) -> tuple[list[int], float]:
    """Kept ids (ascending) and their mass under the full tempered softmax, in Python floats."""
    values = [v / temperature for v in logits.double().tolist()]
    total = sum(math.exp(v - max(values)) for v in values)
    p = [math.exp(v - max(values)) / total for v in values]
    drawable = range(len(p)) if may_draw is None else may_draw
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        return sorted(drawable), sum(p[i] for i in drawable)
    order = sorted((i for i in drawable if values[i] > -math.inf), key=lambda i: (-values[i], i))
    kept = order[:top_k] if top_k else order
    if top_p < 1.0:
        mass, mark = 0.0, top_p * sum(p[i] for i in kept)
        crossed = []
        for i in kept:
            if mass >= mark:
                break
            crossed.append(i)
            mass += p[i]
        kept = crossed
    kept = [i for i in kept if p[i] >= min_p * p[order[0]]]
    return sorted(kept), sum(p[i] for i in kept)


def kept_row(sample: Sample, row: int) -> list[int]:
    assert sample.kept is not None
    return sample.kept.ids[sample.kept.offsets[row] : sample.kept.offsets[row + 1]].tolist()


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 with Python's integers, as in Salmon et al. 2011, section 3.3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    def column(text: str) -> Tensor:
        return torch.tensor([[int(word, 16)] for word in text.split()])

    # A second column shows that rows do not mix.
    both = philox4x32(torch.cat((column(counter), column("1 2 3 4")), 1), torch.cat((column(key), column("5 6")), 1))
    assert both[:, 0].tolist() == column(words)[:, 0].tolist()
    assert both[:, 1].tolist() == philox_in_python([1, 2, 3, 4], [5, 6])


def test_philox_uniform_uses_all_64_bits_of_seed_and_sample() -> None:
    words = torch.randint(-(2**62), 2**62, (3, 200), generator=torch.Generator().manual_seed(1))
    seeds, samples = words[0], words[1]
    positions = words[2] % 2**31
    expected = []
    for seed, sample, position in zip(seeds.tolist(), samples.tolist(), positions.tolist()):
        counter = [position, sample & 0xFFFFFFFF, (sample >> 32) & 0xFFFFFFFF, 0]
        word = philox_in_python(counter, [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])[0]
        expected.append((word >> 8) / 2**24)
    uniform = philox_uniform(seeds, samples, positions)
    assert uniform.dtype == torch.float32
    assert uniform.tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 200, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_20000_samples_follow_the_float64_softmax(options: dict[str, Any]) -> None:
    truncates = len(options.keys() - {"temperature"}) > 0
    vocab, n = (300 if truncates else 1100), 20_000  # more than one block where the CDF has two levels
    logits = random_logits(1, vocab, seed=2)
    sample = sample_tokens(logits.expand(n, vocab), **counters(n, seed=11), **options)
    temperature = options.get("temperature", 1.0)
    kept, mass = kept_by_definition(
        logits[0], temperature, int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    p = torch.softmax(logits[0].double() / temperature, 0)[kept] / mass
    drawn = torch.bincount(sample.token_ids, minlength=vocab)
    assert int(drawn[kept].sum()) == n, "a token outside the kept set was drawn"
    large = p * n >= 5
    observed = [*drawn[kept][large].tolist(), int(drawn[kept][~large].sum())]
    expected = [*(p[large] * n).tolist(), float(p[~large].sum() * n)]
    if expected[-1] < 5:
        observed, expected = [*observed[:-2], sum(observed[-2:])], [*expected[:-2], sum(expected[-2:])]
    assert len(observed) > 5
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > CHI_SQUARE_P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 17, 1024, 2053])
def test_kept_sets_equal_brute_force_with_mixed_parameters(vocab: int, dtype: torch.dtype) -> None:
    table = [
        (1.0, 0, 1.0, 0.0),
        (0.5, 5, 1.0, 0.0),
        (2.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.0, 50, 0.7, 0.0),
        (0.25, 1, 1.0, 0.0),
        (1.0, vocab, 1.0, 0.0),
        (4.0, 1000, 0.95, 0.01),
        (1.0, 0, 1e-9, 0.0),
        (1.25, 200, 0.9, 0.02),
        # In float32 the far tail of a nucleus is decided by rounding.
        (1.0, 0, 0.999999 if dtype == torch.float64 else 0.99, 0.0),
        (2.0, 0, 0.5, 0.3),
        (1.0, 3, 1.0, 1.0),
    ]
    logits = random_logits(len(table), vocab, seed=vocab).to(dtype)
    logits[4, : vocab // 2] = -torch.inf
    columns = list(zip(*table))
    sample = sample_tokens(
        logits,
        temperature=torch.tensor(columns[0]),
        top_k=torch.tensor(columns[1]),
        top_p=torch.tensor(columns[2], dtype=torch.float64),
        min_p=torch.tensor(columns[3], dtype=torch.float64),
        keep_sets=True,
        **counters(len(table)),
    )
    assert not sample.error.any()
    for row, (temperature, top_k, top_p, min_p) in enumerate(table):
        top_k = 0 if top_k >= vocab else top_k
        kept, mass = kept_by_definition(logits[row], temperature, top_k, top_p, min_p)
        assert kept_row(sample, row) == kept, table[row]
        assert int(sample.kept_count[row]) == len(kept)
        assert float(sample.kept_mass[row]) == pytest.approx(mass, rel=1e-5)
        assert int(sample.token_ids[row]) in kept


def test_ties_keep_the_smaller_ids_at_the_top_k_boundary() -> None:
    logits = torch.full((1, 3000), -5.0)
    logits[0, [2500, 7, 1500, 40, 2900]] = torch.tensor([2.0, 1.0, 1.0, 1.0, 3.0])
    sample = sample_tokens(logits, top_k=4, keep_sets=True, **counters(1))
    assert kept_row(sample, 0) == [7, 40, 2500, 2900]
    equal = sample_tokens(torch.zeros(1, 3000), top_k=3, keep_sets=True, **counters(1))
    assert kept_row(equal, 0) == [0, 1, 2]


def test_ties_keep_the_smaller_ids_at_the_top_p_boundary_and_the_crossing_token_is_kept() -> None:
    # Eight ids of 1/8 each, the others impossible: every sum is exact.
    logits = torch.full((5, 2000), -torch.inf)
    ids = [3, 900, 1023, 1024, 1025, 1700, 1998, 1999]
    logits[:, ids] = 0.5
    marks = torch.tensor([0.5, 0.5001, 0.125, 0.1, 0.99], dtype=torch.float64)
    sample = sample_tokens(logits, top_p=marks, keep_sets=True, **counters(5))
    assert [kept_row(sample, row) for row in range(5)] == [ids[:4], ids[:5], ids[:1], ids[:1], ids]


def test_top_p_is_taken_of_the_renormalised_top_k_set() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    # Of all: 0.4 + 0.2 + 0.2 reach 0.65. Of the top two, 0.4 / 0.6 alone does.
    assert kept_row(sample_tokens(logits, top_p=0.65, keep_sets=True, **counters(1)), 0) == [0, 1, 2]
    assert kept_row(sample_tokens(logits, top_k=2, top_p=0.65, keep_sets=True, **counters(1)), 0) == [0]


def test_tokens_are_the_inverse_cdf_in_id_order() -> None:
    rows, vocab = 32, 49152
    logits = random_logits(rows, vocab, seed=5)
    for options in options_list({}, {"temperature": 0.6}, {"top_p": 0.9}):
        sample = sample_tokens(logits, keep_sets=True, **counters(rows, seed=3), **options)
        assert sample.kept is not None
        x = logits.double() / options.get("temperature", 1.0)
        p = torch.softmax(x.masked_fill(~sample.kept.mask(vocab), -torch.inf), 1)
        cdf = p.cumsum(1)
        at = counters(rows, seed=3)
        u = philox_uniform(at["seeds"], at["samples"], at["positions"]).double()[:, None]
        upper = cdf.gather(1, sample.token_ids[:, None])
        lower = upper - p.gather(1, sample.token_ids[:, None])
        # u lies in the token's interval, up to the rounding of float32 block sums.
        assert ((u > lower - 1e-6) & (u < upper + 1e-6)).all()


@pytest.mark.parametrize("vocab", [17, 1024, 2053, 49152])
def test_a_row_does_not_depend_on_its_batch(vocab: int) -> None:
    rows = 24
    logits = random_logits(rows, vocab, seed=9)
    mixed: dict[str, Any] = {
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.5]).repeat(6),
        "top_k": torch.tensor([0, 0, 20, 0, 300, 0]).repeat(4),
        "top_p": torch.tensor([1.0, 0.9, 0.5]).repeat(8),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0]).repeat(3),
        **counters(rows, seed=4),
    }
    whole = sample_tokens(logits, keep_sets=True, **mixed)
    fields = ("token_ids", "logprobs", "kept_mass", "kept_count", "error")

    def rows_of(index: list[int], neighbour: float | None = None) -> Sample:
        x = logits[index].clone()
        options = {name: values[index] for name, values in mixed.items()}
        if neighbour is not None:
            x = torch.cat((x, torch.full((3, vocab), neighbour)))
            options = {name: torch.cat((v, v[:1].expand(3))) for name, v in options.items()}
        return sample_tokens(x, keep_sets=True, **options)

    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [([row], None) for row in range(8)] + [(shuffled, None), ([3, 1], math.nan), (shuffled[:7], math.inf)]
    for index, neighbour in batches:
        part = rows_of(index, neighbour)
        for field in fields:
            assert torch.equal(getattr(part, field)[: len(index)], getattr(whole, field)[index]), (index, field)
        for place, row in enumerate(index):
            assert kept_row(part, place) == kept_row(whole, row)


def test_greedy_takes_the_smallest_id_of_the_largest_value() -> None:
    logits = random_logits(4, 3000, seed=1)
    logits[0, [2999, 1400, 70]] = 30.0
    logits[1, 2999] = 40.0
    sample = sample_tokens(logits, temperature=0.0, top_k=5, top_p=0.5, keep_sets=True, **counters(4))
    expected = [min(range(3000), key=lambda i: (-float(row[i]), i)) for row in logits]
    assert sample.token_ids.tolist() == expected
    assert sample.token_ids[:2].tolist() == [70, 2999]
    truth = torch.log_softmax(logits.double(), 1).gather(1, sample.token_ids[:, None])[:, 0]
    assert torch.allclose(sample.logprobs.double(), truth, atol=5e-6, rtol=0)
    assert sample.kept_mass.tolist() == [1.0] * 4
    assert [kept_row(sample, row) for row in range(4)] == [[i] for i in expected]
    assert sample.kept_count.tolist() == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [17, 49152])
def test_logprobs_equal_the_float64_log_softmax(dtype: torch.dtype, vocab: int) -> None:
    rows = 12
    logits = (random_logits(rows, vocab, seed=3, scale=6.0)).to(dtype)
    temperature = torch.tensor([0.6, 1.0, 1.3]).repeat(4)
    top_k = torch.tensor([0, 0, 0, 10]).repeat(3)
    before = logits.clone()
    sample = sample_tokens(logits, temperature=temperature, top_k=top_k, **counters(rows))
    x = logits.double() / temperature.double()[:, None]
    truth = torch.log_softmax(x, 1).gather(1, sample.token_ids[:, None])[:, 0]
    eps = 2**-52 if dtype == torch.float64 else 2**-23
    assert sample.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # The kernels' bound: 4 ulp of the largest |x / T|.
    assert (sample.logprobs.double() - truth).abs().max() <= 4 * eps * x.abs().max()
    assert torch.equal(logits, before)


def test_padded_vocabulary_is_never_drawn_and_carries_no_mass() -> None:
    rows, vocab, real = 500, 1300, 1100
    logits = random_logits(rows, vocab, seed=6)
    logits[:, real:] = 50.0
    for options in options_list({}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}):
        sample = sample_tokens(logits, vocab_size=real, **counters(rows), **options)
        short = sample_tokens(logits[:, :real].clone(), **counters(rows), **options)
        assert int(sample.token_ids.max()) < real
        assert torch.equal(sample.token_ids, short.token_ids)
        assert torch.equal(sample.logprobs, short.logprobs)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_rows_without_a_distribution_are_flagged(options: dict[str, Any]) -> None:
    logits = random_logits(6, 1500, seed=8)
    good = logits.clone()
    logits[1] = -torch.inf
    logits[2, 1400] = torch.nan
    logits[4, 3] = torch.inf
    sample = sample_tokens(logits, keep_sets=True, **counters(6), **options)
    clean = sample_tokens(good, keep_sets=True, **counters(6), **options)
    bad = [1, 2, 4]
    assert sample.error.tolist() == [False, True, True, False, True, False]
    assert sample.token_ids[bad].tolist() == [0, 0, 0]
    assert sample.logprobs[bad].tolist() == sample.kept_mass[bad].tolist() == [0.0, 0.0, 0.0]
    assert sample.kept_count[bad].tolist() == [0, 0, 0]
    for row in range(6):
        assert kept_row(sample, row) == ([] if row in bad else kept_row(clean, row))
    assert torch.equal(sample.token_ids[[0, 3, 5]], clean.token_ids[[0, 3, 5]])


@pytest.mark.parametrize("vocab", [17, 1024, 2053, 5000])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_zero_probability_is_never_drawn_at_the_ends_of_the_uniform(
    vocab: int, uniform: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
        return torch.full((len(seeds),), uniform)

    monkeypatch.setattr(sampling, "philox_uniform", constant)
    logits = torch.full((2, vocab), -torch.inf)
    logits[1] = -300.0  # exp underflows to 0 in float32
    middle = vocab // 2
    logits[:, [middle - 2, middle, middle + 3]] = torch.tensor([1.0, 0.0, -3.0])
    expected = middle - 2 if uniform == 0.0 else middle + 3
    for options in options_list({}, {"top_k": 9}, {"top_p": 0.9999}, {"min_p": 1e-4}):
        sample = sample_tokens(logits, **counters(2), **options)
        assert sample.token_ids.tolist() == [expected, expected], options


def test_allowed_and_banned_restrict_the_draw_but_not_the_logprob() -> None:
    rows, vocab = 40, 1200
    logits = random_logits(rows, vocab, seed=12)
    logits[:, 50] = -160.0  # underflows next to the others, and is all that row 0 may draw
    sets = [[50], *([5, 600, 601, 1199] for _ in range(rows - 1))]
    banned = [[], *([601] for _ in range(rows - 1))]
    truth = torch.log_softmax(logits.double(), 1)
    sample = sample_tokens(logits, allowed=KeptSet.from_lists(sets), keep_sets=True, **counters(rows))
    assert int(sample.token_ids[0]) == 50
    assert set(sample.token_ids[1:].tolist()) == {5, 600, 601, 1199}
    assert kept_row(sample, 1) == [5, 600, 601, 1199]
    assert torch.allclose(
        sample.logprobs.double(), truth.gather(1, sample.token_ids[:, None])[:, 0], atol=1e-5, rtol=1e-7
    )
    assert torch.allclose(sample.kept_mass[1:].double(), truth[1:, [5, 600, 601, 1199]].exp().sum(1), rtol=1e-5)

    both = sample_tokens(
        logits, allowed=KeptSet.from_lists(sets), banned=KeptSet.from_lists(banned), top_k=2, **counters(rows)
    )
    for row in range(1, rows):
        kept, mass = kept_by_definition(logits[row], 1.0, 2, 1.0, 0.0, may_draw={5, 600, 1199})
        assert int(both.token_ids[row]) in kept
        assert float(both.kept_mass[row]) == pytest.approx(mass, rel=1e-5)

    greedy = sample_tokens(logits, temperature=0.0, allowed=KeptSet.from_lists(sets), **counters(rows))
    best = [max(ids, key=lambda i: (float(logits[row, i]), -i)) for row, ids in enumerate(sets)]
    assert greedy.token_ids.tolist() == best


def test_nothing_left_to_draw_is_an_error_row() -> None:
    logits = random_logits(3, 40, seed=1)
    sample = sample_tokens(logits, allowed=KeptSet.from_lists([[], [3], [4]]), **counters(3))
    assert sample.error.tolist() == [True, False, False]
    assert sample.token_ids.tolist() == [0, 3, 4]
    banned = sample_tokens(logits, banned=KeptSet.from_lists([[], list(range(40)), [0]]), **counters(3))
    assert banned.error.tolist() == [False, True, False]


def test_truncation_that_cuts_nothing_changes_no_bit() -> None:
    logits = random_logits(32, 3000, seed=14)
    plain = sample_tokens(logits, **counters(32))
    noop = sample_tokens(logits, top_k=3000, top_p=1.0, min_p=0.0, temperature=torch.ones(32), **counters(32))
    for field in ("token_ids", "logprobs", "kept_mass", "kept_count", "error"):
        assert torch.equal(getattr(plain, field), getattr(noop, field))
    assert plain.kept is None
    assert plain.kept_mass.tolist() == [1.0] * 32


def test_strided_rows_gradients_and_empty_batches() -> None:
    logits = random_logits(16, 2500, seed=15)
    plain = sample_tokens(logits[::2, 100:1400].contiguous(), top_p=0.9, **counters(8))
    strided = sample_tokens(logits.requires_grad_()[::2, 100:1400], top_p=0.9, **counters(8))
    assert torch.equal(plain.token_ids, strided.token_ids)
    assert not strided.logprobs.requires_grad
    empty = sample_tokens(torch.zeros(0, 10), top_k=2, keep_sets=True, **counters(0))
    assert empty.token_ids.shape == (0,)
    assert empty.kept is not None
    assert len(empty.kept) == 0


def test_samples_are_zero_unless_given() -> None:
    logits, rows = torch.randn(5, 30), torch.arange(5)
    ours = sample_tokens(logits, seeds=rows, positions=rows)
    same = sample_tokens(logits, seeds=rows, positions=rows, samples=torch.zeros(5, dtype=torch.int64))
    assert torch.equal(ours.token_ids, same.token_ids)
