"""The Triton kernels over pages against a softmax written out in float64, and one row's bits in any company."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels import paged_kernels as module
from rhotrain.kernels.attention import dense_attention
from rhotrain.kernels.paged_kernels import SPLIT, decode_triton, split_grid
from rhotrain.kernels.paged_write import write_kernel, write_triton


@dataclass(frozen=True)
class Case:
    """Rows with one query each over pools of shuffled pages; `own`: the slots of each row's tokens."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    tables: Tensor
    lens: Tensor
    own: list[Tensor]

    def decode(self, **options: Any) -> Tensor:
        return decode_triton(self.q, self.k_pool, self.v_pool, self.tables, self.lens, **options)

    def rows(self, *rows: int) -> "Case":
        """These rows alone, over the same pool."""
        at = list(rows)
        own = [self.own[b] for b in at]
        return replace(self, q=self.q[at], tables=self.tables[at], lens=self.lens[at], own=own)

    def keys_and_values(self, b: int) -> tuple[Tensor, Tensor]:
        """[n,Hk,D], [n,Hk,E] of one row."""
        keys, values = (pool.flatten(0, 1)[self.own[b]] for pool in (self.k_pool, self.v_pool))
        return keys, values


def make_case(
    lens: tuple[int, ...],
    page_size: int,
    device: str = "cpu",
    *,
    heads: int = 6,
    key_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    spare: float = 1e3,
    seed: int = 0,
) -> Case:
    """Pages in random order, but page 0 is nobody's. Slots without a token are `spare`: any weight on them shows."""
    g = torch.Generator().manual_seed(seed)
    width = max(-(-n // page_size) for n in lens) + 1
    tables = torch.randperm(len(lens) * width, generator=g).view(len(lens), width) + 1
    pools = []
    token = torch.arange(max(lens))
    own = [table[token[:n] // page_size] * page_size + token[:n] % page_size for table, n in zip(tables, lens)]
    for size in (dim, value_dim or dim):
        pool = torch.full(((tables.numel() + 1) * page_size, key_heads, size), spare, dtype=dtype)
        for slots in own:
            pool[slots] = torch.randn(len(slots), key_heads, size, generator=g).to(dtype)
        pools.append(pool.unflatten(0, (-1, page_size)).to(device))
    q = torch.randn(len(lens), heads, dim, generator=g).to(dtype)
    return Case(
        q.to(device),
        pools[0],
        pools[1],
        tables.int().to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        [slots.to(device) for slots in own],
    )


def by_definition(
    case: Case, *, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Row by row in float64; a row without tokens is 0."""
    rows = []
    for b, query in enumerate(case.q.double()):
        keys, values = (x.double()[-(window or len(x)) :] for x in case.keys_and_values(b))
        per_group = len(query) // keys.shape[1]
        scores = scale * torch.einsum("nhd,hd->hn", keys.repeat_interleave(per_group, 1), query)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores)
        total = weights.sum(1) + (0.0 if sinks is None else sinks.double().exp())
        out = torch.einsum("hn,nhe->he", weights, values.repeat_interleave(per_group, 1))
        rows.append(out / total[:, None] if len(keys) else torch.zeros_like(out))
    return torch.stack(rows)


def eager(case: Case, *, window: int | None = None, **options: Any) -> Tensor:
    """PyTorch in the inputs' own type, row by row."""
    rows = []
    for b, query in enumerate(case.q):
        keys, values = (x[None, -(window or len(x)) :].transpose(1, 2) for x in case.keys_and_values(b))
        rows.append(dense_attention(query[None, :, None], keys, values, None, **options)[0, :, 0])
    return torch.stack(rows)


def lengths(page_size: int) -> tuple[int, ...]:
    """Nothing, one token, around a page, one whole split, and several splits."""
    return (0, 1, max(1, page_size - 1), page_size, page_size + 1, SPLIT, 2 * SPLIT + 70)


FAR = "softcap far above"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "window over splits": {"window": SPLIT + 40},
    "softcap": {"softcap": 2.0},
    FAR: {"softcap": 50.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 4)},
    "all": {"window": SPLIT + 3, "softcap": 1.5, "sinks": torch.linspace(-1, 3, 4)},
}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "options"), [(16, name) for name in OPTIONS if name != FAR] + [(1, "all"), (24, "all")]
)
def test_equals_the_definition_over_shuffled_pages(device: str, page_size: int, options: str) -> None:
    case = make_case(lengths(page_size), page_size, device, heads=4, key_heads=1, value_dim=8)
    chosen = on(device, OPTIONS[options])
    out = case.decode(scale=0.4, **chosen)
    assert out.shape == (7, 4, 8) and not out[0].any()
    assert (out - by_definition(case, scale=0.4, **chosen)).abs().max() < 2e-6


@pytest.mark.parametrize("page_size", [4, 64, 256])
def test_page_sizes(device: str, page_size: int) -> None:
    case = make_case((page_size - 1, page_size + 1), page_size, device, heads=1, key_heads=1)
    assert (case.decode(scale=0.4) - by_definition(case, scale=0.4)).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim"),
    [
        (3, 3, 64, 64),
        (4, 2, 80, 80),
        (9, 3, 96, 96),
        (7, 1, 24, 40),
        (8, 1, 192, 128),
        (20, 1, 64, 64),
        (2, 1, 576, 512),
    ],
)
def test_shapes_of_heads(device: str, heads: int, key_heads: int, dim: int, value_dim: int) -> None:
    """1, 2, 3, 7, 8 and 20 query heads per key head, dims that are no powers of two, values of other dims."""
    shape: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "dim": dim, "value_dim": value_dim}
    case = make_case((70, SPLIT + 5), 16, device, **shape)
    out = case.decode(scale=dim**-0.5)
    assert (out - by_definition(case, scale=dim**-0.5)).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(dtype, name) for dtype in (torch.float32, torch.float16, torch.bfloat16) for name in ("plain", "all")]
    + [(torch.float32, FAR)],
    ids=str,
)
def test_as_accurate_as_eager_pytorch_in_the_same_type(device: str, dtype: torch.dtype, options: str) -> None:
    """Against float64. Eager has no more to round: float32 maths with sinks and softcap, SDPA without."""
    case = make_case((1, 33, 90, SPLIT + 100, 2 * SPLIT + 1), 16, device, heads=4, dim=32, dtype=dtype, seed=3)
    chosen = on(device, OPTIONS[options])
    if "sinks" in chosen:
        chosen["sinks"] = chosen["sinks"].to(dtype)
    truth = by_definition(case, scale=0.3, **chosen)
    ours, theirs = (
        (out.double() - truth).abs() for out in (case.decode(scale=0.3, **chosen), eager(case, scale=0.3, **chosen))
    )
    assert ours.max() <= 1.05 * theirs.max() and ours.mean() <= 1.02 * theirs.mean()


def test_reads_nothing_but_its_own_tokens(device: str) -> None:
    """Other sequences' pages and the free slots of its own may hold NaN, and table entries behind a row anything."""
    case = make_case((5, 20, SPLIT + 3), 16, device, spare=float("nan"))
    alone = make_case((5, 20, SPLIT + 3), 16, device)
    options: dict[str, Any] = {"scale": 0.4, "window": SPLIT - 30}
    expected = alone.decode(**options)
    for pool in (case.k_pool, case.v_pool):
        pool.flatten(0, 1)[case.own[1]] = float("nan")
    case.tables[0, 1:] = 2**31 - 1
    out = case.decode(**options)
    assert torch.equal(out[[0, 2]], expected[[0, 2]]) and bool(out[1].isnan().all())


def test_a_length_beyond_the_table_reads_no_further(device: str) -> None:
    case = make_case((20, 7), 4, device)
    case.lens.fill_(1000)
    case.tables[1] = case.tables[0]
    full = replace(case, lens=torch.full_like(case.lens, case.tables.shape[1] * 4))
    assert torch.equal(case.decode(scale=0.4), full.decode(scale=0.4))


# ---- bits -----------------------------------------------------------------------------------------------------------

BATCH = (2 * SPLIT + 70, 0, 3, SPLIT, SPLIT + 1, 17)


@pytest.fixture
def batch(device: str) -> Case:
    return make_case(BATCH, 16, device, heads=2, key_heads=1, dtype=torch.bfloat16, seed=5)


ALL: dict[str, Any] = {"scale": 0.5, "softcap": 3.0}


@pytest.mark.parametrize(("programs", "window"), [(1, None), (7, None), (1, SPLIT + 100), (7, SPLIT + 100)])
def test_bits_do_not_depend_on_how_a_row_is_shared(
    batch: Case, programs: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program per row, which adds up the splits itself, and two splits to a program, beside one to a program."""
    options = on(str(batch.q.device), ALL | {"window": window, "sinks": torch.linspace(-1, 1, 2)})
    expected = batch.decode(**options)
    assert split_grid(len(BATCH), batch.tables.shape[1] * 16, window)[1] == 3
    monkeypatch.setattr(module, "PROGRAMS", programs)
    assert split_grid(len(BATCH), batch.tables.shape[1] * 16, window)[1] == (2 if programs > 1 else 1)
    assert torch.equal(batch.decode(**options), expected)


def test_bits_do_not_depend_on_the_buffer(batch: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of partial sums that would be too large leaves each row to one program."""
    expected = batch.decode(**ALL)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(module, "combine_kernel", None)
    assert torch.equal(batch.decode(**ALL), expected)


def test_bits_do_not_depend_on_company(batch: Case) -> None:
    """Alone, in another order, in a smaller batch, beside other keys, and with pages elsewhere in the pool."""
    expected = batch.decode(**ALL)
    for rows in ((0,), (5, 3, 1, 0, 4, 2), (0, 4)):
        assert torch.equal(batch.rows(*rows).decode(**ALL), expected[list(rows)])
    moved = torch.randperm(len(batch.k_pool), generator=torch.Generator().manual_seed(0)).to(batch.k_pool.device)
    k_pool, v_pool = torch.empty_like(batch.k_pool), torch.empty_like(batch.v_pool)
    k_pool[moved], v_pool[moved] = batch.k_pool, batch.v_pool
    elsewhere = replace(batch, k_pool=k_pool, v_pool=v_pool, tables=moved[batch.tables.long()].int())
    assert torch.equal(elsewhere.decode(**ALL), expected)


def test_bits_do_not_depend_on_the_width_of_the_tables(batch: Case) -> None:
    expected = batch.decode(**ALL)
    wide = torch.cat((batch.tables, batch.tables.new_zeros(len(BATCH), 40)), 1)
    assert torch.equal(replace(batch, tables=wide).decode(**ALL), expected)
    rows = batch.rows(1, 2, 5)
    narrow = replace(rows, tables=rows.tables[:, :2])  # one split: nothing to combine
    assert narrow.tables.stride(0) > 2
    assert torch.equal(narrow.decode(**ALL), expected[[1, 2, 5]])


def test_the_grid_follows_from_shapes() -> None:
    """(splits, programs per row): enough programs for few rows, one for many, none for what a window leaves out."""
    assert split_grid(8, 4096, None) == (16, 16)
    assert split_grid(64 * 8, 40960, None) == (160, 4)
    assert split_grid(256 * 8, 40960, None) == (160, 1)
    assert split_grid(8, 40960, 1) == (1, 1)
    assert split_grid(8, 40960, 2) == (2, 2)
    assert split_grid(8, 40960, SPLIT + 1) == (2, 2)
    assert split_grid(8, 40960, SPLIT + 2) == (3, 3)
    for window in (1, 2, SPLIT, SPLIT + 1, SPLIT + 2, 3 * SPLIT):
        touched = max((n - 1) // SPLIT - (n - window) // SPLIT + 1 for n in range(window, window + SPLIT))
        assert split_grid(1, 10**6, window)[0] == touched


# ---- strides --------------------------------------------------------------------------------------------------------


def test_strides_of_queries_and_pools(device: str) -> None:
    """Queries with heads first, pools with heads first, and keys beside values in one tensor."""
    case = make_case((40, SPLIT + 5, 3), 16, device, heads=4, key_heads=2, dim=16)
    expected = case.decode(scale=0.4)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(0, -2).contiguous().transpose(0, -2)

    both = torch.cat((case.k_pool, case.v_pool), 3)
    halves = replace(case, q=heads_first(case.q), k_pool=both[..., :16], v_pool=both[..., 16:])
    assert torch.equal(halves.decode(scale=0.4), expected)
    first = replace(case, k_pool=heads_first(case.k_pool), v_pool=heads_first(case.v_pool))
    assert not first.k_pool.is_contiguous() and torch.equal(first.decode(scale=0.4), expected)
    apart = case.q.new_zeros(3, 4, 32)[..., ::2].copy_(case.q)
    lens = case.lens.repeat_interleave(2)[::2]
    assert torch.equal(replace(case, q=apart, lens=lens).decode(scale=0.4), expected)


def test_queries_of_another_type_than_the_pool(device: str) -> None:
    """Multiplied in float32: nothing is rounded on the way in."""
    case = make_case((40, 5), 16, device, dtype=torch.bfloat16)
    mixed = replace(case, q=case.q.float() * 1.001)
    out = mixed.decode(scale=0.4)
    assert out.dtype == torch.float32 and (out - by_definition(mixed, scale=0.4)).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(3, 20, 20), (2, 64, 16), (30, 128, 128)])
def test_write_equals_index_copy(device: str, dtype: torch.dtype, heads: int, dim: int, value_dim: int) -> None:
    """From transposed keys into pools of any strides, in the pools' type; nothing else is touched."""
    g = torch.Generator().manual_seed(0)
    slots = torch.tensor([47, 0, 16, 5, 31], device=device)
    new = [torch.randn(1, heads, 5, size, generator=g).to(device).transpose(1, 2)[0] for size in (dim, value_dim)]
    filled = torch.randn(2, 3, 16, heads, dim + value_dim, generator=g).to(device, dtype)
    contiguous = [filled[0, ..., :dim].contiguous(), filled[0, ..., dim:].contiguous()]
    slices = [filled[1, ..., :dim], filled[1, ..., dim:]]
    first = [pool.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for pool in contiguous]
    for pools in (contiguous, slices, first):
        expected = [pool.flatten(0, 1).index_copy(0, slots, x.to(dtype)) for pool, x in zip(pools, new)]
        write_triton(pools[0], pools[1], new[0], new[1], slots)
        assert all(torch.equal(pool.flatten(0, 1), x) for pool, x in zip(pools, expected))
    before = filled.clone()
    write_triton(slices[0], slices[1], new[0][:0], new[1][:0], slots[:0])
    assert torch.equal(filled, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 6, 8)}, "q_BHD: 6 heads of 8 dims do not fit 2 key heads of 16"),
        ({"q": torch.zeros(2, 5, 16)}, "q_BHD: 5 heads of 16 dims"),
        ({"lens": torch.ones(3)}, r"tables, lens: shapes \(2, 3\) and \(3,\) do not fit 2 queries"),
        ({"sinks": torch.zeros(2)}, r"sinks: shape \(2,\); need \[6\]"),
        ({"v_pool": torch.zeros(9, 4, 2, 16)}, r"k_pool, v_pool: .* must agree"),
        ({"k_pool": torch.zeros(6, 4, 16, 2).transpose(2, 3)}, "k_pool: .* side by side"),
    ],
)
def test_what_does_not_fit_is_named(device: str, change: dict[str, Any], message: str) -> None:
    case = make_case((3, 5), 4, device)
    options = {name: change[name] for name in change if name == "sinks"}
    with pytest.raises(ValueError, match=message):
        replace(case, **{name: change[name] for name in change if name != "sinks"}).decode(scale=1.0, **options)
    with pytest.raises(ValueError, match=r"k_TGD, v_TGE: .* one row per slot needs \[1, 2, 16\]"):
        write_triton(case.k_pool, case.v_pool, case.q, case.q, torch.zeros(1, dtype=torch.int64))


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def replayed(case: Case, graph: torch.cuda.CUDAGraph, static: Case, out: Tensor) -> Tensor:
    """The captured call with the contents of `case`."""
    for mine, other in zip((static.q, static.tables, static.lens), (case.q, case.tables, case.lens)):
        mine.copy_(other)
    graph.replay()
    return out.clone()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [6, 300])
def test_a_graph_replays_other_lengths_and_tables(rows: int) -> None:
    """Captured with lengths of 0; nothing waits; 300 rows of 8 key heads go without a second kernel."""
    shape: dict[str, Any] = {"heads": 16, "key_heads": 8, "dim": 128, "dtype": torch.bfloat16}
    cases = [
        make_case((*((37 * b + 600 * i) % 900 for b in range(rows)), 900), 16, "cuda", **shape, seed=i)
        for i in range(2)
    ]
    k_pool, v_pool = cases[0].k_pool, cases[0].v_pool
    cases[1] = replace(cases[1], k_pool=k_pool, v_pool=v_pool)
    static = replace(cases[0], q=cases[0].q.clone(), tables=torch.zeros_like(cases[0].tables))
    static = replace(static, lens=torch.zeros_like(cases[0].lens))
    new = torch.randn(2, rows + 1, 8, 128, device="cuda").bfloat16()
    slots = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    options: dict[str, Any] = {"scale": 0.1, "sinks": torch.linspace(-1, 1, 16, device="cuda")}

    def step() -> Tensor:
        write_triton(k_pool, v_pool, new[0], new[1], slots)
        return static.decode(**options)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph, stream=stream):
                out = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    slots.copy_(cases[0].own[-1][torch.zeros(rows + 1, dtype=torch.int64)])
    slots[1:] = k_pool.shape[0] * 16 - 1
    new[:, 1:] = new[:, 1:2]  # the other rows write one padding slot, all the same
    for case in (*cases, cases[0]):
        mine = replayed(case, graph, static, out)
        assert torch.equal(mine, case.decode(**options))
        assert torch.equal(k_pool.flatten(0, 1)[slots[0]], new[0, 0])
    truth = by_definition(cases[0].rows(0, 1, 2, rows), **options)
    assert (cases[0].rows(0, 1, 2, rows).decode(**options) - truth).abs().max() < 2e-2


@pytest.mark.cuda
def test_one_binary_for_every_batch_and_table() -> None:
    case = make_case((300, 20, 5, 600), 16, "cuda", heads=4, dtype=torch.bfloat16)
    wide = torch.cat((case.tables, case.tables.new_zeros(4, 33)), 1)

    def compiled() -> int:
        kernels = (module.decode_kernel, module.combine_kernel, write_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def call(rows: list[int], tables: Tensor, window: int) -> None:
        replace(case.rows(*rows), tables=tables[rows]).decode(scale=0.3 * window, window=window)
        write_triton(case.k_pool, case.v_pool, case.q[rows, :2], case.q[rows, 2:], torch.zeros(len(rows)).long().cuda())

    call([0, 1, 2, 3], case.tables, 100)
    before = compiled()
    for rows in ([0], [1, 2], [1, 3, 2]):
        for tables in (case.tables, wide, wide[:, 1:]):
            call(rows, tables, 1 + len(rows))
    assert compiled() == before
