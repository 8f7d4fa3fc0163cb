"""Decode attention where the history lies: shared pages, parts and pool layouts against a softmax in float64."""

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels import paged_cpu, paged_plan
from rhotrain.kernels.paged_attention import PagedBatch, paged_attention, write_kv
from rhotrain.kernels.paged_cpu import DecodePlans, cpu_pool, decode_reference, plan_shape
from rhotrain.kernels.paged_plan import SharedPages

HEADS, GROUPS, DIM, VALUE_DIM = 6, 2, 8, 8


@dataclass
class Decode:
    """B sequences with one query each; `tokens` [B] are the slots of each one's tokens."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    tables: Tensor
    lens: Tensor
    shared: tuple[SharedPages, ...]
    tokens: list[list[int]]

    def run(self, **options: Any) -> Tensor:
        hints = {"shared": self.shared, **options}
        return decode_reference(self.q, self.k_pool, self.v_pool, self.tables, self.lens, **hints)

    def parts(self, window: int | None = None) -> tuple[paged_plan.Part, ...]:
        shape = plan_shape(self.q, self.k_pool, self.v_pool, window)
        assert shape is not None
        return DecodePlans(self.tables, self.lens, self.shared).of(shape).parts

    def cast(self, dtype: torch.dtype) -> "Decode":
        return replace(self, q=self.q.to(dtype), k_pool=self.k_pool.to(dtype), v_pool=self.v_pool.to(dtype))


def make(
    groups: list[tuple[int, int]],
    own: list[int],
    page_size: int,
    *,
    shuffled: bool = True,
    heads_first: bool = False,
    sizes: tuple[int, int, int, int] = (HEADS, GROUPS, DIM, VALUE_DIM),
) -> Decode:
    """groups: (sequences, shared pages), in the order of the batch; own: each sequence's tokens after its shared pages.
    Sequences after the groups share nothing. Slots of nobody hold NaN."""
    g = torch.Generator().manual_seed(len(own) + page_size)
    layout = [(rows, pages) for rows, pages in groups] + [(1, 0)] * (len(own) - sum(rows for rows, _ in groups))
    needed = sum(pages for _, pages in layout) + sum(-(-n // page_size) for n in own) + 1
    numbers = torch.randperm(needed, generator=g) if shuffled else torch.arange(needed)
    free = iter(numbers.tolist())
    tables: list[list[int]] = []
    lens: list[int] = []
    for rows, pages in layout:
        prefix = [next(free) for _ in range(pages)]
        for _ in range(rows):
            tables.append(prefix + [next(free) for _ in range(-(-own[len(lens)] // page_size))])
            lens.append(pages * page_size + own[len(lens)])
    tokens = [[t[i // page_size] * page_size + i % page_size for i in range(n)] for t, n in zip(tables, lens)]
    used = torch.tensor(sorted({slot for row in tokens for slot in row}), dtype=torch.int64)
    heads, kv_heads, dim, value_dim = sizes
    pools = []
    for size in (dim, value_dim):
        contiguous = torch.zeros(needed, page_size, kv_heads, size, dtype=torch.float64)
        pool = cpu_pool(needed, page_size, kv_heads, size, torch.float64) if heads_first else contiguous
        pool.view(-1, kv_heads, size).fill_(torch.nan)
        pool.view(-1, kv_heads, size)[used] = torch.randn(len(used), kv_heads, size, generator=g, dtype=torch.float64)
        pools.append(pool)
    width = max(len(t) for t in tables) + 1
    padded = torch.tensor([t + [t[0] if t else 0] * (width - len(t)) for t in tables], dtype=torch.int32)
    stops = [0]
    for rows, _ in groups:
        stops.append(stops[-1] + rows)
    shared = tuple(SharedPages(a, b, pages) for (a, b), (_, pages) in zip(pairwise(stops), groups) if pages)
    q = torch.randn(len(own), heads, dim, generator=g, dtype=torch.float64)
    return Decode(q, pools[0], pools[1], padded, torch.tensor(lens, dtype=torch.int32), shared, tokens)


def by_definition(
    case: Decode,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence at a time in float64."""
    heads, kv_heads = case.q.shape[1], case.k_pool.shape[2]
    out = torch.zeros(len(case.q), heads, case.v_pool.shape[3], dtype=torch.float64)
    k_slots, v_slots = (p.double().reshape(-1, *p.shape[2:]) for p in (case.k_pool, case.v_pool))
    for b, slots in enumerate(case.tokens):
        seen = slots[-window:] if window else slots
        if not seen:
            continue
        keys, values = (s[seen].repeat_interleave(heads // kv_heads, 1) for s in (k_slots, v_slots))
        scores = scale * torch.einsum("hd,thd->ht", case.q[b].double(), keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum(1) + (0.0 if sinks is None else sinks.exp())
        out[b] = torch.einsum("ht,thd->hd", weights, values) / total[:, None]
    return out


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares and cuts whatever it can, so that small tensors take the paths of large ones."""
    monkeypatch.setattr(paged_plan, "SHARING_PAYS", 1)
    monkeypatch.setattr(paged_plan, "CUT_PAYS", 1)
    monkeypatch.setattr(paged_plan, "LEAST_QUERIES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are not split to occupy more."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


BATCHES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "one group": ([(5, 3)], [1, 7, 16, 17, 2]),
    "several": ([(3, 4), (2, 5), (3, 4)], [1, 2, 3, 30, 5, 6, 7, 8]),
    "with others": ([(2, 3), (1, 0), (2, 3)], [4, 0, 70, 9, 2, 1, 64, 3]),
    "one row": ([(1, 4)], [5]),
    "very different": ([(4, 6), (2, 1), (4, 5)], [3, 1, 1, 2, 5, 4, 3, 2, 1, 9]),
    "nothing shared": ([], [1, 33, 16, 17, 5]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window within": {"window": 4},
    "window across": {"window": 21},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 2, HEADS, dtype=torch.float64)},
    "all": {"window": 19, "softcap": 1.5, "sinks": torch.linspace(-1, 1, HEADS, dtype=torch.float64)},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_the_definition(
    eager: None, batch: str, options: str, page_size: int, heads_first: bool, shuffled: bool
) -> None:
    case = make(*BATCHES[batch], page_size, shuffled=shuffled, heads_first=heads_first)
    out = case.run(scale=0.4, **OPTIONS[options])
    assert out.shape == (len(case.q), HEADS, VALUE_DIM)
    assert (out - by_definition(case, scale=0.4, **OPTIONS[options])).abs().max() < 1e-12


@pytest.mark.parametrize("heads_first", [False, True])
def test_value_heads_of_another_size(eager: None, heads_first: bool) -> None:
    case = make(*BATCHES["several"], 4, heads_first=heads_first, sizes=(6, 3, 8, 5))
    assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


def test_one_key_head_and_a_head_of_its_own_for_every_query(eager: None) -> None:
    for heads, groups in ((4, 1), (4, 4)):
        case = make(*BATCHES["several"], 4, sizes=(heads, groups, 8, 8))
        assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_shared_tokens_are_read_once_per_group_and_key_head(one_thread: None) -> None:
    case = make([(16, 16), (16, 16)], [20] * 32 + [500], 16, sizes=(9, 3, 8, 8))
    groups, alone = case.parts()
    assert groups.shared.shape == (2 * 3 * 16 * 16,) and groups.shared.unique().numel() == len(groups.shared)
    assert len(groups.columns) == 2 * 9 * 16 * 20
    assert alone.shared.numel() == 0 and len(alone.columns) == 9 * 500
    assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


def test_little_is_not_shared() -> None:
    for rows, pages in ((6, 2), (5, 90)):
        case = make([(rows, pages)], [20] * rows, 16, sizes=(9, 3, 8, 8))
        (part,) = case.parts()
        assert part.shared.numel() == 0 and len(part.columns) == rows * 9 * (16 * pages + 20)


def test_a_group_that_would_be_mostly_padding_is_left_out(one_thread: None) -> None:
    case = make([(16, 40), (3, 40), (16, 6)], [20] * 35, 16, sizes=(9, 3, 8, 8))
    groups, *alone = case.parts()
    assert groups.mask.shape == (1, 1, 16, 1, 40 * 16 + 20)
    assert sum(len(part.queries) for part in alone) == 19 * 3
    assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


def test_one_group_is_split_to_occupy_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([(36, 16)], [20] * 36, 16, sizes=(9, 3, 8, 8))
    for threads, items in ((1, 1), (2, 2), (4, 3), (64, 6)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        (part,) = case.parts()
        assert part.mask.shape[0] == items
        assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


def test_pages_before_the_window_are_not_read(one_thread: None) -> None:
    case = make([(16, 40)], [16] * 16, 16, sizes=(9, 3, 8, 8))
    (part,) = case.parts(window=36 * 16 + 1)
    assert part.mask.shape[-1] == 36 * 16 + 16
    (part,) = case.parts(window=16)
    assert part.shared.numel() == 0 and part.mask.shape[-1] == 16


def test_lengths_that_differ_much_are_cut_into_parts() -> None:
    case = make([], [30, 900, 31, 29, 905] * 8, 16, sizes=(9, 3, 8, 8))
    short, long = case.parts()
    assert short.mask.shape == (24, 1, 1, 1, 31) and long.mask.shape == (16, 1, 1, 1, 905)
    assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


def test_a_part_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([], [40] * 13, 16)
    monkeypatch.setattr(paged_plan, "MAX_ENTRIES", 40 * HEADS * 4)
    assert max(len(part.columns) for part in case.parts()) <= 40 * HEADS * 4
    assert (case.run(scale=0.3) - by_definition(case, scale=0.3)).abs().max() < 1e-12


# ---- what must not leak ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["own tokens", "query"])
def test_nan_of_one_sequence_spares_its_group(eager: None, what: str) -> None:
    case = make(*BATCHES["several"], 4)
    clean = case.run(scale=0.4)
    for row in (0, 3, 7):
        spoilt = replace(case, q=case.q.clone(), k_pool=case.k_pool.clone(), v_pool=case.v_pool.clone())
        if what == "query":
            spoilt.q[row] = torch.nan
        else:
            for pool in (spoilt.k_pool, spoilt.v_pool):
                pool.view(-1, GROUPS, DIM)[case.tokens[row][-1]] = torch.nan
        out = spoilt.run(scale=0.4)
        others = [b for b in range(len(clean)) if b != row]
        assert out[row].isnan().all()
        assert (out[others] - clean[others]).abs().max() < 1e-12


def test_nan_of_one_layer_does_not_stay_in_the_buffers(eager: None) -> None:
    case = make(*BATCHES["several"], 4)
    plans = DecodePlans(case.tables, case.lens, case.shared)
    clean = case.run(scale=0.4, plans=plans)
    spoilt = replace(case, q=torch.full_like(case.q, torch.nan))
    assert spoilt.run(scale=0.4, plans=plans).isnan().all()
    assert torch.equal(case.run(scale=0.4, plans=plans), clean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sequences_without_tokens_give_zero(eager: None, dtype: torch.dtype) -> None:
    case = make([(2, 3)], [4, 1, 70, 9], 4)
    case.tables[2] = case.tables[3, 0] if dtype == torch.bfloat16 else case.tables.max() + 1 - 1
    case.lens[2], case.tokens[2] = 0, []
    case = replace(case, k_pool=case.k_pool.nan_to_num(0.0), v_pool=case.v_pool.nan_to_num(0.0)).cast(dtype)
    several: list[dict[str, Any]] = [{}, {"window": 3}, {"softcap": 1.0}]
    for options in several:
        out = case.run(scale=0.4, **options)
        assert not out[2].any()
        assert (out - by_definition(case, scale=0.4, **options)).abs().max() < (1e-12 if dtype.itemsize == 8 else 0.05)
    nobody = replace(case, lens=torch.zeros(4, dtype=torch.int32), shared=())
    assert not nobody.run(scale=0.4).any()


def test_no_gradient() -> None:
    case = make(*BATCHES["several"], 4)
    case.q.requires_grad_(True)
    sinks = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    assert not case.run(scale=0.4, sinks=sinks).requires_grad


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [[], [(16, 16), (16, 16)]])
def test_float32_is_as_precise_as_gathering(groups: list[tuple[int, int]]) -> None:
    own = torch.randint(1, 65, (32,), generator=torch.Generator().manual_seed(2)).tolist()
    case = make(groups, own if groups else [n + 256 for n in own], 16, sizes=(9, 3, 64, 64))
    case = replace(case, q=4 * case.q, k_pool=case.k_pool.nan_to_num(0.0), v_pool=case.v_pool.nan_to_num(0.0))
    case = case.cast(torch.float32)
    assert any(part.shared.numel() for part in case.parts()) == bool(groups)
    truth = by_definition(case, scale=0.125)
    gathered = paged_cpu._gathered(
        case.q, case.k_pool, case.v_pool, case.tables, case.lens, scale=0.125, window=None, softcap=None, sinks=None
    )
    bound = (gathered - truth).abs().max()
    assert 0 < bound < 1e-5
    assert (case.run(scale=0.125) - truth).abs().max() <= 2 * bound


def test_bf16_is_gathered_and_ignores_the_hint() -> None:
    case = make([(4, 3)], [5, 6, 7, 8], 16, sizes=(4, 2, 16, 16))
    case = replace(case, k_pool=case.k_pool.nan_to_num(0.0), v_pool=case.v_pool.nan_to_num(0.0)).cast(torch.bfloat16)
    out = case.run(scale=0.25)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, replace(case, shared=()).run(scale=0.25))
    assert (out - by_definition(case, scale=0.25)).abs().max() < 0.02


# ---- plans and pools -------------------------------------------------------------------------------------------------


def test_a_step_is_planned_once_for_every_window() -> None:
    case = make(*BATCHES["several"], 4)
    plans = DecodePlans(case.tables, case.lens, case.shared)
    for window in (None, 5, None, 5):
        for seed in range(3):
            noise = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            layer = replace(case, q=noise)
            out = layer.run(scale=0.4, window=window, plans=plans)
            assert (out - by_definition(layer, scale=0.4, window=window)).abs().max() < 1e-12
    shape = plan_shape(case.q, case.k_pool, case.v_pool, 5)
    assert shape is not None and plans.of(shape) is plans.of(shape)
    assert len(plans._made) == 2


def test_a_batch_takes_its_shared_pages_along() -> None:
    case = make([(16, 8)], [20] * 16, 16, sizes=(9, 3, 64, 64), heads_first=True)
    batch = PagedBatch(case.tables, case.lens, 16, len(case.lens), shared=case.shared)
    assert (
        paged_attention(case.q, case.k_pool, case.v_pool, batch, scale=0.1) - by_definition(case, scale=0.1)
    ).abs().max() < 1e-12


@pytest.mark.parametrize(("width", "step"), [(2 * DIM, 2), (DIM + 1, 1)])
def test_pools_of_other_layouts_are_gathered(width: int, step: int) -> None:
    case = make([(4, 3)], [5, 6, 7, 8], 4)
    wide = case.k_pool.new_zeros(*case.k_pool.shape[:3], width)
    k_pool, v_pool = wide[..., : DIM * step : step], case.v_pool.nan_to_num(0.0)
    k_pool.copy_(case.k_pool.nan_to_num(0.0))
    case = replace(case, k_pool=k_pool, v_pool=v_pool)
    assert plan_shape(case.q, case.k_pool, case.v_pool, None) is None
    assert (case.run(scale=0.4) - by_definition(case, scale=0.4)).abs().max() < 1e-12


def test_a_pool_that_is_part_of_a_larger_tensor(eager: None) -> None:
    case = make(*BATCHES["several"], 4)
    both = torch.stack((case.k_pool, case.v_pool), 2).flatten(2, 3)
    joined = replace(case, k_pool=both[:, :, :GROUPS], v_pool=both[:, :, GROUPS:])
    assert joined.parts() and not joined.v_pool.is_contiguous()
    assert (joined.run(scale=0.4) - by_definition(case, scale=0.4)).abs().max() < 1e-12


def test_cpu_pool_is_a_pool() -> None:
    k_pool, v_pool = cpu_pool(5, 4, 3, 8), cpu_pool(5, 4, 3, 6)
    assert k_pool.shape == (5, 4, 3, 8) and not k_pool.any() and k_pool.dtype == torch.float32
    k, v = torch.randn(3, 3, 8), torch.randn(3, 3, 6)
    write_kv(k_pool, v_pool, k, v, torch.tensor([9, 0, 4]))
    for place, (page, offset) in enumerate([(2, 1), (0, 0), (1, 0)]):
        assert torch.equal(k_pool[page, offset], k[place]) and torch.equal(v_pool[page, offset], v[place])
    assert int((k_pool != 0).sum()) == k.numel()
    k_pool[torch.tensor([3])] = k_pool[torch.tensor([2])]
    assert torch.equal(k_pool[3, 1], k[0])


def test_prefill_reads_a_cpu_pool() -> None:
    case = make([], [9, 12], 4, heads_first=True)
    batch = PagedBatch.make(case.tables, (2, 3), case.lens.tolist(), 4)
    q = torch.randn(5, HEADS, DIM, dtype=torch.float64)
    out = paged_attention(q, case.k_pool, case.v_pool, batch, scale=0.4)
    newest = replace(case, q=q[[1, 4]])
    assert (out[[1, 4]] - by_definition(newest, scale=0.4)).abs().max() < 1e-12


def test_no_warning_about_sparse_tensors() -> None:
    code = (
        "import torch\nfrom rhotrain.kernels.paged_cpu import cpu_pool, decode_reference\npool = cpu_pool(2, 4, 1, 8)\n"
        "one = torch.ones(1, 1, dtype=torch.int32)\n"
        "assert not decode_reference(torch.ones(1, 2, 8), pool, pool, one, one[0], scale=1.0).any()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "Sparse" not in run.stderr, run.stderr
