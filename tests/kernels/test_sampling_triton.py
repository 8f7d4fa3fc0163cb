"""The sampling kernels against the reference and float64. In Triton's interpreter a row takes 20 to 200 ms."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_kernels import LOGIT_CASES, VOCABS, make_logits
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from rhotrain.kernels import philox
from rhotrain.kernels.backend import INTERPRETED, Launch, jit, tl
from rhotrain.kernels.philox import philox_uniform
from rhotrain.kernels.rows import KeptSet
from rhotrain.kernels.sampling import Sample, sample_tokens
from rhotrain.kernels.sampling_kernels import draw_rows
from rhotrain.kernels.sampling_params import RowParams, check_logits, checked, may_draw_mask, row_param, set_tensors
from rhotrain.kernels.sampling_row import first_above

pytestmark = pytest.mark.usefixtures("device")  # skips what cannot run here; unwritten memory holds NaN
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FIELDS = ("token_ids", "logprobs", "kept_mass", "kept_count", "error")

TABLE = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.5, 0, 1.0, 0.1),
    (0.5, 50, 0.8, 0.01),
    (2.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 10**6, 0.5, 0.0),
    (1.0, 2500, 0.95, 0.0),
    (1.0, 1, 1.0, 0.0),
    (3.0, 0, 0.3, 0.02),
    (1.0, 3, 1.0, 1.0),
]
"""Every kind of truncation alone and mixed; 2500 ids do not fit the kernel's buffer."""


def parameters(rows: int, table: list[tuple[float, int, float, float]] = TABLE, shift: int = 0) -> dict[str, Any]:
    columns = list(zip(*(table[(row + shift) % len(table)] for row in range(rows))))
    return {
        "temperature": torch.tensor(columns[0], device=DEVICE),
        "top_k": torch.tensor(columns[1], device=DEVICE),
        # Rounded to float32 here, as in the kernel: the reference would take the float64 numbers.
        "top_p": torch.tensor(columns[2], device=DEVICE, dtype=torch.float32),
        "min_p": torch.tensor(columns[3], device=DEVICE, dtype=torch.float32),
    }


def counters(rows: int, seed: int = 0) -> dict[str, Any]:
    return {
        "seeds": torch.full((rows,), seed, dtype=torch.int64, device=DEVICE),
        "samples": torch.arange(rows, device=DEVICE),
        "positions": torch.arange(rows, device=DEVICE) % 7,
    }


def kept_row(sample: Sample, row: int) -> list[int]:
    assert sample.kept is not None
    return sample.kept.ids[sample.kept.offsets[row] : sample.kept.offsets[row + 1]].tolist()


def bounds_of_kept(
    x: Tensor, top_k: int, top_p: float, min_p: float, may_draw: Tensor | None
) -> tuple[set[int], set[int]]:
    """(ids that are surely kept, ids that may be) of one float64 row: they differ where a sum is within rounding."""
    x = x if may_draw is None else x.masked_fill(~may_draw, -math.inf)
    values, order = x.sort(descending=True, stable=True)  # ties: the smaller id first
    found = int((values > -math.inf).sum())
    limit = min(top_k, found) if top_k else found
    weights = (values - values[0]).exp()[:limit]
    before, mark = weights.cumsum(0) - weights, top_p * weights.sum()
    slack_p, slack_m = 2e-6 * weights.sum(), 1e-5 * min_p
    sure, maybe = torch.ones(limit, dtype=torch.bool), torch.ones(limit, dtype=torch.bool)
    if top_p < 1.0:
        sure, maybe = before < mark - slack_p, before < mark + slack_p
        sure[0] = True
    if min_p > 0.0:
        sure, maybe = sure & (weights >= min_p + slack_m), maybe & (weights >= min_p - slack_m)
        sure[0] = True
    return set(order[:limit][sure].tolist()), set(order[:limit][maybe].tolist())


def check(
    logits: Tensor,
    options: dict[str, Any],
    at: dict[str, Any],
    may_draw: Tensor | None = None,
    **sets: Any,
) -> Sample:
    """Kernel against reference, and both against the definitions in float64; returns the kernel's sample."""
    rows, vocab = logits.shape
    before = logits.clone()
    ours = sample_tokens(logits, **options, **at, **sets, keep_sets=True, backend="triton")
    theirs = sample_tokens(logits, **options, **at, **sets, keep_sets=True, backend="reference")
    assert torch.equal(logits, before)
    assert torch.equal(ours.error, theirs.error)
    u = philox_uniform(at["seeds"], at["samples"], at["positions"]).double()
    for row in range(rows):
        t, k, p, m = (float(options[name][row]) for name in ("temperature", "top_k", "top_p", "min_p"))
        inverse = torch.tensor(t if t else 1.0, dtype=torch.float32).reciprocal()
        x = (logits[row].cpu().float() * inverse).double()
        logp = torch.log_softmax(x, 0)
        token, where = int(ours.token_ids[row]), f"row {row}: {(t, k, p, m)}"
        kept = kept_row(ours, row)
        if t == 0.0:
            drawable = x if may_draw is None else x.masked_fill(~may_draw[row].cpu(), -math.inf)
            assert token == int((drawable == drawable.max()).nonzero()[0]), where
            assert kept == [token], where
        elif (k == 0 or k >= vocab) and p == 1.0 and m == 0.0:
            assert kept == (list(range(vocab)) if may_draw is None else may_draw[row].nonzero()[:, 0].tolist()), where
        else:
            k = 0 if k >= vocab else k
            sure, maybe = bounds_of_kept(x, int(k), p, m, None if may_draw is None else may_draw[row].cpu())
            assert kept == sorted(kept), where
            assert sure <= set(kept) <= maybe, where
            if sure == maybe:
                assert kept == kept_row(theirs, row), where
        assert int(ours.kept_count[row]) == len(kept), where
        weights = torch.zeros(vocab, dtype=torch.float64)
        weights[kept] = logp[kept].exp()
        mass = float(weights.sum())
        if t:
            cdf = weights.cumsum(0) / mass
            lower, upper = float(cdf[token] - weights[token] / mass), float(cdf[token])
            assert lower - 1e-6 <= float(u[row]) <= upper + 1e-6, where
            assert weights[token] > 0, where
            if kept == kept_row(theirs, row) and min(u[row] - lower, upper - u[row]) > 1e-6:
                assert token == int(theirs.token_ids[row]), where
        # 4 ulp of the logprob or of 1, whichever is larger: the sum of exp carries a few ulp of its own.
        truth = float(logp[token])
        assert abs(float(ours.logprobs[row]) - truth) <= 4 * 2**-23 * max(1.0, abs(truth)), where
        expected = mass if t else 1.0
        assert abs(float(ours.kept_mass[row]) - expected) <= 8 * 2**-23 * expected, where
    return ours


# ---- random numbers -------------------------------------------------------------------------------------------------


@jit
def uniform_kernel(
    seeds: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    lane = tl.arange(0, BLOCK)
    u = philox.uniform(tl.load(seeds + lane), tl.load(samples + lane), tl.load(positions + lane))
    tl.store(out + lane, u)


def test_uniforms_have_the_bits_of_the_reference() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3, 512), generator=torch.Generator().manual_seed(1))
    words[:, :4] = torch.tensor([0, 1, -1, 2**32])
    seeds, samples, positions = words.to(DEVICE)
    out = torch.empty(512, device=DEVICE)
    Launch(block=512, num_warps=4)(uniform_kernel, (1,), DEVICE, seeds, samples, positions, out)
    expected = philox_uniform(seeds, samples, positions)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    assert len(set(out.tolist())) > 500


@jit
def first_above_kernel(
    weights: tl.tensor, targets: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    tl.store(out + row, first_above(tl.load(weights + lane), tl.load(targets + row), lane))


def test_rounding_past_the_end_draws_the_last_positive_weight() -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0], device=DEVICE)
    targets = torch.tensor([0.0, 0.25, 0.5, 0.7, 0.75, 0.8], device=DEVICE)
    out = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
    Launch(block=8, num_warps=1)(first_above_kernel, (6,), DEVICE, weights, targets, out)
    assert out.tolist() == [1, 1, 3, 3, 3, 3]


def test_the_token_changes_where_the_uniform_crosses_the_cdf() -> None:
    p = torch.tensor([0.1, 0.2, 0.0, 0.4, 0.3, 0.0])
    marks = [0.1, 0.3, 0.7]
    positions = torch.arange(200_000)
    zeros = torch.zeros_like(positions)
    u = philox_uniform(zeros + 5, zeros, positions).double()
    chosen = [int(u.argmin()), int(u.argmax())]
    expected = [0, 4]
    for mark, below, above in zip(marks, (0, 1, 3), (1, 3, 4)):
        chosen += [int(torch.where(u < mark - 1e-6, u, -1).argmax()), int(torch.where(u > mark + 1e-6, u, 2).argmin())]
        expected += [below, above]
    assert all(min(abs(float(u[i]) - mark) for i in chosen) < 1e-4 for mark in marks)
    rows = len(chosen)
    options_list: tuple[dict[str, Any], ...] = ({}, {"top_k": 4})
    for options in options_list:
        sample = sample_tokens(
            p.log().expand(rows, 6).to(DEVICE),
            seeds=torch.full((rows,), 5, device=DEVICE),
            samples=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            positions=positions[chosen].to(DEVICE),
            backend="triton",
            **options,
        )
        assert sample.token_ids.tolist() == expected


# ---- against the reference ------------------------------------------------------------------------------------------


def mixed_logits(rows: int, vocab: int, shift: int = 0) -> Tensor:
    """A row of each kind in turn."""
    kinds = [make_logits(case, rows, vocab)[0] for case in LOGIT_CASES]
    return torch.stack([kinds[(row + shift) % len(kinds)][row] for row in range(rows)])


@pytest.mark.parametrize(
    ("vocab", "dtype"), list(zip(VOCABS, 2 * [torch.float32, torch.bfloat16, torch.float16])), ids=str
)
def test_mixed_rows_equal_the_reference(vocab: int, dtype: torch.dtype) -> None:
    half = len(TABLE) // 2
    shift = half * (VOCABS.index(vocab) % 2)
    check(mixed_logits(half, vocab, shift).to(DEVICE, dtype), parameters(half, shift=shift), counters(half, vocab))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", range(6))
def test_every_kind_of_row_with_every_truncation(vocab: int, dtype: torch.dtype, shift: int) -> None:
    rows = len(TABLE)
    check(mixed_logits(rows, vocab, shift).to(DEVICE, dtype), parameters(rows), counters(rows, vocab + shift))


def test_a_real_vocabulary() -> None:
    logits = make_logits("randn", 2, 49152)[0].float().to(DEVICE)
    options = parameters(2, [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0)])
    sample = check(logits, options, counters(2, seed=3))
    assert sample.kept_count.tolist() != [49152, 49152]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_at_the_boundary_keep_the_smaller_ids(dtype: torch.dtype) -> None:
    """Values on a grid of 1/2, so that a boundary has hundreds of ties: inside the buffer, past it, in a full one."""
    table = [(1.0, 30, 1.0, 0.0), (1.0, 2600, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 2600, 0.9, 0.0), (1.0, 0, 0.97, 0.0)]
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(len(table), 3000, generator=generator) * 2).round() / 2
    logits[4] = 1.5  # one value, more ties than the buffer holds
    logits[3, :10] = -0.0
    sample = check(logits.to(DEVICE, dtype), parameters(len(table), table), counters(len(table)))
    assert sample.kept_count.tolist()[:2] == [30, 2600]
    assert kept_row(sample, 4) == list(range(2910))  # 3000 * 0.97 are enough


def test_top_p_marks_that_are_exact_sums() -> None:
    """Eight ids of 1/8 each: no sum rounds, and the id that crosses the mark is kept."""
    logits = torch.full((5, 2000), -torch.inf)
    ids = [3, 900, 1023, 1024, 1025, 1700, 1998, 1999]
    logits[:, ids] = 0.5
    marks = torch.tensor([0.5, 0.5001, 0.125, 0.1, 0.99], device=DEVICE)
    sample = sample_tokens(logits.to(DEVICE), top_p=marks, keep_sets=True, backend="triton", **counters(5))
    assert [kept_row(sample, row) for row in range(5)] == [ids[:4], ids[:5], ids[:1], ids[:1], ids]


def test_sets_larger_than_the_buffer() -> None:
    """Flat rows: the cut lies among ids of which neither all above nor all below it fit the buffer."""
    table = [(2.0, 0, 0.9, 0.0), (1.0, 4000, 1.0, 0.0), (1.0, 4000, 0.95, 0.0), (1.0, 0, 1.0, 0.02)]
    logits = torch.randn(len(table), 6000, generator=torch.Generator().manual_seed(6))
    sample = check(logits.to(DEVICE), parameters(len(table), table), counters(len(table)))
    assert all(2048 < count < 6000 for count in sample.kept_count.tolist())


@pytest.mark.parametrize("case", ["wide", "tiny", "few", "outlier", "zeros"])
def test_awkward_scales_end(case: str) -> None:
    """Rows that no split by value narrows quickly: the search goes on in the order of float32 numbers."""
    vocab, generator = 3000, torch.Generator().manual_seed(2)
    x = torch.randn(1, vocab, generator=generator)
    top_k = 40
    if case == "wide":
        x = x.sign() * 10.0 ** (x * 12.0).clamp(-37, 37)
    elif case == "tiny":
        x = x * 1e-30
    elif case == "few":  # fewer finite values than top_k
        x[:, 17:] = -torch.inf
    elif case == "zeros":  # two zeros of one value, and the float32 number after them
        x = torch.full((1, vocab), -5.0)
        x[0, [10, 20, 30]] = torch.tensor([-0.0, 2.0**-149, 0.0])
        top_k = 2
    else:
        x = x * 1e-4
        x[0, 5] = 1000.0
    options = parameters(1, [(1.0, top_k, 1.0, 0.0)])
    sample = check(x.to(DEVICE), options, counters(1))
    assert int(sample.kept_count) == (17 if case == "few" else top_k)
    if case == "zeros":
        assert kept_row(sample, 0) == [10, 20]


# ---- rules ----------------------------------------------------------------------------------------------------------


def equal_bits(a: Sample, b: Sample, a_rows: Any = slice(None), b_rows: Any = slice(None)) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(a, field)[a_rows], getattr(b, field)[b_rows]), field


def test_truncation_that_cuts_nothing_changes_no_bit() -> None:
    logits = mixed_logits(3, 2053).float().to(DEVICE)
    plain = sample_tokens(logits, backend="triton", **counters(3))
    noop = parameters(3, [(1.0, 2053, 1.0, 0.0)])
    equal_bits(plain, sample_tokens(logits, **noop, backend="triton", **counters(3)))
    assert plain.kept_mass.tolist() == [1.0] * 3
    assert plain.kept_count.tolist() == [2053] * 3


def test_top_k_1_and_min_p_1_keep_the_maximum() -> None:
    logits = mixed_logits(2, 1000).float().to(DEVICE)
    logits[1, [40, 7, 900]] = 60.0
    one = sample_tokens(logits, top_k=1, keep_sets=True, backend="triton", **counters(2))
    best = sample_tokens(logits, temperature=0.0, backend="triton", **counters(2))
    assert torch.equal(one.token_ids, best.token_ids)
    ties = sample_tokens(logits, min_p=1.0, keep_sets=True, backend="triton", **counters(2))
    assert kept_row(ties, 1) == [7, 40, 900]
    assert int(one.token_ids[1]) == 7


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocab = 5, 1025
    logits = mixed_logits(rows, vocab).float().to(DEVICE)
    options, at = parameters(rows, shift=1), counters(rows, seed=4)
    whole = sample_tokens(logits, **options, **at, keep_sets=True, backend="triton")

    def part(index: list[int], bad: float | None = None) -> Sample:
        x = logits[index].clone()
        if bad is not None:
            x[-1, 3] = bad
        chosen = {name: values[index] for name, values in (options | at).items()}
        return sample_tokens(x, **chosen, keep_sets=True, backend="triton")

    shuffled = [4, 0, 2, 1, 3]
    mixed = part(shuffled)
    equal_bits(mixed, whole, b_rows=shuffled)
    for place, row in enumerate(shuffled):
        assert kept_row(mixed, place) == kept_row(whole, row)
    equal_bits(part([3]), whole, b_rows=[3])
    for bad in (math.nan, math.inf):
        beside = part([0, 1], bad)
        equal_bits(beside, whole, [0], [0])
        assert beside.error.tolist() == [False, True]


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_rows_without_a_distribution_are_flagged(options: dict[str, Any]) -> None:
    logits = mixed_logits(6, 1000).float().to(DEVICE)
    logits[1] = -torch.inf
    logits[2, 990] = torch.nan
    logits[4, 3] = torch.inf
    logits[5] = torch.nan
    sample = sample_tokens(logits, keep_sets=True, backend="triton", **options, **counters(6))
    bad = [1, 2, 4, 5]
    assert sample.error.tolist() == [False, True, True, False, True, True]
    for field in ("token_ids", "logprobs", "kept_mass", "kept_count"):
        assert getattr(sample, field)[bad].tolist() == [0, 0, 0, 0], field
    assert [len(kept_row(sample, row)) for row in bad] == [0, 0, 0, 0]
    assert kept_row(sample, 3)


def test_allowed_and_banned_restrict_the_draw_but_not_the_logprob() -> None:
    vocab = 1200
    logits = make_logits("randn", 6, vocab)[0].float().to(DEVICE)
    logits[0, 50] = -70.0  # all that row 0 may draw, at a mass of exp(-90)
    logits[4, 5] = -torch.inf
    allowed = [[50], [5, 600, 601, 1199], list(range(0, vocab, 3)), [7, 8, 9], [5, 6, 7], [3, 4]]
    banned: list[list[int]] = [[], [601], [0, 3, 6], [7], [], []]
    may_draw = torch.zeros(6, vocab, dtype=torch.bool)
    for row in range(6):
        may_draw[row, allowed[row]] = True
        may_draw[row, banned[row]] = False
    table = [
        (1.0, 0, 1.0, 0.0),
        (1.0, 2, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (0.0, 0, 1.0, 0.0),
        TABLE[0],
        (1.5, 0, 1.0, 0.3),
    ]
    sets = {"allowed": KeptSet.from_lists(allowed, DEVICE), "banned": KeptSet.from_lists(banned, DEVICE)}
    sample = check(logits, parameters(6, table), counters(6), may_draw, **sets)
    assert kept_row(sample, 4) == [5, 6, 7]
    nothing = sample_tokens(
        logits[:2], allowed=KeptSet.from_lists([[], [3]], DEVICE), top_k=2, backend="triton", **counters(2)
    )
    assert nothing.error.tolist() == [True, False]
    assert nothing.token_ids.tolist() == [0, 3]


def test_strides_padding_and_empty_batches() -> None:
    logits = mixed_logits(4, 2600).float().to(DEVICE)
    options, at = parameters(2, shift=1), counters(2)
    view = logits[::2, 100:1400]
    plain = sample_tokens(view.contiguous(), **options, **at, backend="triton")
    equal_bits(plain, sample_tokens(view, **options, **at, backend="triton"))
    equal_bits(plain, sample_tokens(view.t().contiguous().t(), **options, **at, backend="triton"))
    padded = torch.full((2, 1500), 80.0, device=DEVICE)
    padded[:, :1300] = view
    equal_bits(plain, sample_tokens(padded, vocab_size=1300, **options, **at, backend="triton"))
    empty = sample_tokens(torch.zeros(0, 10, device=DEVICE), top_k=2, keep_sets=True, backend="triton", **counters(0))
    assert empty.token_ids.shape == (0,)
    assert empty.kept is not None
    assert len(empty.kept) == 0


def test_float64_and_wrong_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        sample_tokens(torch.zeros(1, 4, dtype=torch.float64, device=DEVICE), backend="triton", **counters(1))
    if INTERPRETED:
        with pytest.raises(ValueError, match="top_p"):
            sample_tokens(torch.zeros(1, 4), top_p=1.5, backend="triton", **counters(1))


def test_the_launcher_asks_the_device_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data cannot be read: an `item`, a `bool` or a `nonzero` on the way would raise."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, kernel, grid, *args, **constexprs: launched.append(grid))
    meta = torch.device("meta")
    numbers: list[tuple[str, float, torch.dtype]] = [
        ("temperature", 0.7, torch.float32),
        ("top_k", 5, torch.int64),
        ("top_p", 0.9, torch.float32),
        ("min_p", 0.1, torch.float32),
        *((name, 3, torch.int64) for name in ("seeds", "samples", "positions")),
    ]
    logits = torch.empty(3, 100, device=meta)
    check_logits(logits, 90)
    sets = KeptSet(torch.empty(4, dtype=torch.int64, device=meta), torch.empty(9, dtype=torch.int32, device=meta))
    assert set_tensors("allowed", sets, 3, meta) == [sets.offsets, sets.ids]
    for may_draw in (None, may_draw_mask(100, sets, sets)):
        for shape in (None, (), (3,)):
            params = RowParams(
                *(
                    row_param(
                        name, value if shape is None else torch.empty(shape, device=meta).to(dtype), 3, dtype, meta
                    )
                    for name, value, dtype in numbers
                )
            )
            drawn = draw_rows(logits, may_draw, checked(params, 100), truncates=True)
            assert drawn.values.shape == (7, 3)
    assert launched == [(3,)] * 12


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_one_graph_under_torch_compile(compiler: str, backend: Any) -> None:
    logits = mixed_logits(2, 17).float().to(DEVICE)
    at = counters(2)
    allowed = KeptSet.from_lists([[1, 2, 3], [16]], DEVICE)

    def draw(x: Tensor, top_p: Tensor) -> tuple[Tensor, ...]:
        plain = sample_tokens(x * 2.0, temperature=0.8, top_k=9, top_p=top_p, backend=backend, **at)
        restricted = sample_tokens(x, allowed=allowed, backend=backend, **at)
        return (*(getattr(s, field) for s in (plain, restricted) for field in FIELDS),)

    top_p = torch.tensor([0.5, 1.0], device=DEVICE)
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(draw, fullgraph=True, backend=compiler)
    for ours, expected in zip(compiled(logits, top_p), draw(logits, top_p), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_numbers_may_change_under_torch_compile(backend: Any) -> None:
    """From the second call on they are symbols: the checks must trace then, too, and not compile once per number."""
    counter = CompileCounter()

    def draw(x: Tensor, seeds: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        temperature, top_k, top_p, min_p, position, vocab_size = numbers
        return sample_tokens(
            x,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=position,
            vocab_size=vocab_size,
            backend=backend,
        ).token_ids

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(draw, fullgraph=True, backend=counter)
    logits = mixed_logits(4, 17).float().to(DEVICE)
    cases: list[tuple[Any, ...]] = [
        (0.7, 9, 0.9, 0.1, 3, 17),
        (0.8, 8, 0.8, 0.2, -5, 16),
        (1.3, 7, 0.7, 0.3, 2**40, 15),
        (1.4, 6, 0.6, 0.4, 7, 14),
    ]
    for rows, numbers in zip((2, 3, 4, 3), cases, strict=True):
        at = logits[:rows], torch.arange(rows, device=DEVICE), numbers
        assert torch.equal(compiled(*at), draw(*at))
    assert counter.frame_count == 2
