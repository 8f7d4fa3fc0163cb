"""Graphs of the decode step: replay equals eager at every bucket edge, padding is harmless, moved tensors are noticed.

On the CPU the capture is a stand-in that remembers the step; a replay runs it again into the buffer of the first run,
and fails when a tensor lies elsewhere than at the capture, where a CUDA graph would read freed memory."""

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import Groups, assert_same, double_model, make_prompts, one_thread, tokens  # noqa: F401

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.decode import DecodeRows, decode_logits
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.graphs import DecodeGraphs, Step, bucket_for, width_for
from rhotrain.rollout.pools import Pools
from rhotrain.rollout.scheduler import Group, Sequence

EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
PLAIN: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.3, "ignore_eos": True, "seed": 2}


class StandIn:
    """A capture without CUDA. fails_at: the number of the capture that raises. seconds: what a capture takes."""

    def __init__(self, pools: Pools, fails_at: int | None = None, seconds: float = 0.0) -> None:
        self.pools, self.fails_at, self.seconds = pools, fails_at, seconds
        self.captures = self.replays = 0
        self.rows: list[int] = []

    def addresses(self) -> list[int]:
        model = self.pools.loaded.model
        return [t.data_ptr() for t in (*model.parameters(), *model.buffers(), *self.pools.keys, *self.pools.values)]

    def __call__(self, step: Step) -> tuple[Callable[[], Any], torch.Tensor]:
        self.captures += 1
        if self.captures == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        time.sleep(self.seconds)
        out, at = step().clone(), self.addresses()
        self.rows.append(len(out))

        def replay() -> None:
            assert self.addresses() == at, "the graph reads a tensor that has moved"
            self.replays += 1
            out.copy_(step())

        return replay, out


def graphed(loaded: LoadedModel, **options: Any) -> tuple[Engine, StandIn]:
    """An engine whose decode steps are replayed."""
    size = {key: options.pop(key) for key in list(options) if key in ("fails_at", "seconds")}
    engine = Engine(loaded, **{"num_pages": 300, "page_size": 4, **options})
    stand_in = StandIn(engine.runner.pools, **size)
    engine.runner.graphs = DecodeGraphs(engine.runner.pools, stand_in)
    return engine, stand_in


def prompts_of(rows: int) -> list[list[int]]:
    return make_prompts(*[3 + row % 9 for row in range(rows)])


def eager(loaded: LoadedModel, prompts: list[list[int]], params: SamplingParams, **options: Any) -> Groups:
    return Engine(loaded, num_pages=300, page_size=4).generate(prompts, params, **options)


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 48), (48, 48), (49, 64)],
)
def test_buckets(rows: int, bucket: int) -> None:
    assert bucket_for(rows) == bucket


def test_widths() -> None:
    assert [width_for(pages) for pages in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]


@pytest.mark.parametrize("overlap", [False, True])
def test_replay_equals_eager_at_every_bucket_edge(overlap: bool) -> None:
    """One engine for all of them, so that a graph meets the rows of other calls in its buffers."""
    engine, stand_in = graphed(double_model(), overlap=overlap)
    params = SamplingParams(**PLAIN)
    for count, rows in enumerate(EDGES):
        before = stand_in.replays
        found = engine.generate(prompts_of(rows), params)
        assert_same(found, eager(double_model(), prompts_of(rows), params))
        assert stand_in.replays == before + 5, "every step after the prompts' is a replay"
        assert len(set(stand_in.rows)) == len(stand_in.rows) <= count + 1
    assert stand_in.rows == [1, 2, 4, 8, 16, 32, 48]
    assert engine.runner.graphs is not None and engine.runner.graphs.captures == len(engine.runner.graphs) == 7


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt2"])
def test_replay_equals_eager_with_windows_and_softcap(family: str) -> None:
    engine, _ = graphed(double_model(family))
    params = SamplingParams(**{**PLAIN, "max_new_tokens": 12})
    assert_same(engine.generate(prompts_of(5), params), eager(double_model(family), prompts_of(5), params))


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_leave_shrink_the_bucket(overlap: bool) -> None:
    limits = [2, 3, 3, 4, 5, 6, 7, 7, 9]
    engine, stand_in = graphed(double_model(), overlap=overlap)
    params = SamplingParams(**PLAIN)
    for _ in range(2):
        found = engine.generate(prompts_of(9), params, max_new_tokens=limits)
        assert_same(found, eager(double_model(), prompts_of(9), params, max_new_tokens=limits))
    assert stand_in.rows == [16, 8, 4, 1], "three rows leave 4 at once for 1"
    stops = SamplingParams(**PLAIN, stop_token_ids=tuple(range(5, 30)))
    assert_same(engine.generate(prompts_of(17), stops), eager(double_model(), prompts_of(17), stops))


def test_narrow_and_wide_tables() -> None:
    """Width 8 and 16 are graphs of their own; a narrow burst after a wide one meets no page of it."""
    engine, stand_in = graphed(double_model())
    params = SamplingParams(**{**PLAIN, "max_new_tokens": 9})
    for lengths in ((3, 4), (25, 5), (3, 4), (30, 31), (3, 60), (4, 3)):
        prompts = make_prompts(*lengths)
        assert_same(engine.generate(prompts, params), eager(double_model(), prompts, params))
    assert stand_in.captures == 3, "8, 16 and 32 pages"


# ---- padding --------------------------------------------------------------------------------------------------------


def hand_made(pools: Pools, lengths: list[int], *, first_page: int = 0, seed: int = 0) -> DecodeRows:
    """Rows with random contents in the pool: row i has lengths[i] tokens cached, in pages of its own."""
    rng, page = random.Random(seed), first_page
    sequences: list[Sequence] = []
    for index, length in enumerate(lengths):
        sequence = Group.make(index, [rng.randrange(5, 70) for _ in range(length + 1)], [index], 9).members[0]
        pages = length // pools.page_size + 1
        sequence.cached, sequence.pages = length, list(range(page, page + pages))
        page += pages
        sequences.append(sequence)
    assert page <= pools.spare_page
    return DecodeRows.of(sequences, pools.page_size, torch.device("cpu"), share=False)


def filled_pools(pages: int) -> Pools:
    pools = Pools(double_model(), pages, 4)
    generator = torch.Generator().manual_seed(3)
    for pool in (*pools.keys, *pools.values):
        pool.copy_(torch.randn(pool.shape, generator=generator, dtype=pool.dtype))
    return pools


@torch.no_grad()
def test_padding_writes_the_spare_page_alone() -> None:
    pools = filled_pools(40)
    lengths = [3, 17, 8, 12, 31]
    rows = hand_made(pools, lengths)
    own = [int(rows.inputs.tables[row, n // 4]) * 4 + n % 4 for row, n in enumerate(lengths)]
    others = [slot for slot in range(40 * 4) if slot not in own]
    before = [pool.clone().flatten(0, 1) for pool in (*pools.keys, *pools.values)]
    found = DecodeGraphs(pools, StandIn(pools)).logits(rows).clone()
    after = [pool.clone().flatten(0, 1) for pool in (*pools.keys, *pools.values)]
    torch.testing.assert_close(found, decode_logits(pools, hand_made(pools, lengths).inputs), rtol=0, atol=1e-12)
    for pool, old, new in zip((*pools.keys, *pools.values), before, after):
        assert torch.equal(new[others], old[others])
        assert not torch.equal(new[160:], old[160:]), "padding does write"
        # Bits depend on how many rows there are, so the rows' own slots are equal to rounding.
        torch.testing.assert_close(new[own], pool.flatten(0, 1)[own], rtol=0, atol=1e-12)
    assert len(rows.inputs.ids) == 8 and rows.inputs.live.tolist() == [1] * 5 + [0] * 3
    rows.advance(torch.arange(5) + 10)
    assert rows.inputs.cached.tolist() == [4, 18, 9, 13, 32, 0, 0, 0]
    assert rows.inputs.ids.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]


@torch.no_grad()
def test_buffers_hold_nothing_of_the_rows_before() -> None:
    pools = filled_pools(80)
    graphs = DecodeGraphs(pools, StandIn(pools))
    graphs.check_addresses()
    wide = hand_made(pools, [30] * 8)
    graphs.logits(wide)
    narrow = hand_made(pools, [2, 9, 3, 1, 5], first_page=64)
    found = graphs.logits(narrow).clone()
    assert narrow.inputs is wide.inputs, "one graph for both"
    tables = narrow.inputs.tables
    for row, pages in enumerate((1, 3, 1, 1, 2)):
        assert bool((tables[row, :pages] >= 64).all()) and not bool((tables[row] < 64).any())
    assert bool((tables[5:] == pools.spare_page).all())
    assert narrow.inputs.live.tolist() == [1] * 5 + [0] * 3 and narrow.inputs.cached.tolist() == [
        2,
        9,
        3,
        1,
        5,
        0,
        0,
        0,
    ]
    assert narrow.inputs.ids[5:].tolist() == [0] * 3
    alone = hand_made(pools, [2, 9, 3, 1, 5], first_page=64)
    torch.testing.assert_close(found, decode_logits(pools, alone.inputs), rtol=0, atol=1e-12)


def test_padding_that_is_nan_reaches_no_row() -> None:
    """Padding rows run id 0 at position 0; where its embedding is NaN the spare page is, too."""
    loaded = tiny_model("qwen2", dtype=torch.float64)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[0] = float("nan")  # type: ignore[operator]
    params = SamplingParams(**PLAIN)
    expected = eager(loaded, prompts_of(5), params)
    assert all(0 not in group[0].token_ids[:-1] for group in expected)
    engine, stand_in = graphed(loaded)
    assert_same(engine.generate(prompts_of(5), params), expected)
    assert stand_in.rows == [8]


# ---- what moves -----------------------------------------------------------------------------------------------------


def test_in_place_updates_are_seen_without_a_new_capture() -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    engine, stand_in = graphed(loaded)
    params = SamplingParams(**PLAIN)
    before = engine.generate(prompts_of(3), params)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.05)
            parameter.data.add_(0.001)
    loaded.policy_version += 1
    after = engine.generate(prompts_of(3), params)
    assert_same(after, eager(loaded, prompts_of(3), params))
    assert tokens(after) != tokens(before) and stand_in.captures == 1


@pytest.mark.parametrize("what", ["parameter", "buffer", "pool", "release"])
def test_a_tensor_that_moved_is_captured_anew(what: str) -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    engine, stand_in = graphed(loaded)
    params = SamplingParams(**PLAIN)
    expected = engine.generate(prompts_of(3), params)
    engine.generate(prompts_of(2), params)
    assert stand_in.captures == 2
    old: list[torch.Tensor] = []  # kept, so that nothing new can lie at its address
    if what == "parameter":
        parameter = next(iter(loaded.parameters()))
        old.append(parameter.data)
        parameter.data = parameter.data.clone()
    elif what == "buffer":
        buffer = next(iter(loaded.model.buffers()))
        old.append(buffer.data)
        buffer.data = buffer.data.clone()
    elif what == "pool":
        old.append(engine.runner.pools.keys[1])
        engine.runner.pools.keys[1] = old[0].clone()
    else:
        engine.release()
        assert engine.runner.graphs is not None and len(engine.runner.graphs) == 0
    assert_same(engine.generate(prompts_of(3), params), expected)
    assert stand_in.captures == 3, "when it is needed, and only then"
    engine.generate(prompts_of(2), params)
    engine.generate(prompts_of(3), params)
    assert stand_in.captures == 4


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_model_that_cannot_be_captured_runs_without_graphs(fails_at: int) -> None:
    """At once, or in the middle of a call, when the rows lie in the buffers of a graph already."""
    engine, stand_in = graphed(double_model(), fails_at=fails_at)
    params, limits = SamplingParams(**PLAIN), [6, 6, 2]
    expected = eager(double_model(), prompts_of(3), params, max_new_tokens=limits)
    with pytest.warns(
        UserWarning, match=r"cannot be captured in a CUDA graph: operation not permitted .* slower"
    ) as seen:
        assert_same(engine.generate(prompts_of(3), params, max_new_tokens=limits), expected)
    assert len(seen) == 1
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.why_not is not None and "not permitted" in graphs.why_not
    assert (len(graphs), graphs.captures) == (0, fails_at - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(engine.generate(prompts_of(3), params, max_new_tokens=limits), expected)
    assert stand_in.captures == fails_at, "not tried again"


def test_capture_seconds_stand_apart() -> None:
    engine, _ = graphed(double_model(), seconds=0.3)
    engine.generate(prompts_of(3), SamplingParams(**PLAIN))
    assert 0.3 <= engine.stats.capture_seconds < 0.6 and engine.stats.decode_seconds < 0.3
    engine.generate(prompts_of(3), SamplingParams(**PLAIN))
    assert engine.stats.capture_seconds == 0


def test_an_engine_on_a_cpu_has_no_graphs() -> None:
    assert Engine(double_model(), num_pages=4).runner.graphs is None


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def on_cuda(dtype: torch.dtype = torch.float32) -> LoadedModel:
    loaded = tiny_model("llama", dtype=dtype)
    loaded.model.to("cuda")
    return loaded


@pytest.mark.cuda
@pytest.mark.parametrize("overlap", [False, True])
def test_cuda_replay_equals_eager_at_every_bucket_edge(overlap: bool) -> None:
    loaded, params = on_cuda(), SamplingParams(**PLAIN)
    engine = Engine(loaded, num_pages=600, overlap=overlap)
    plain = Engine(loaded, num_pages=600, overlap=overlap, cuda_graphs=False)
    for rows in EDGES:
        found, expected = engine.generate(prompts_of(rows), params), plain.generate(prompts_of(rows), params)
        assert_same(found, expected, atol=1e-5)
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.why_not is None and graphs.captures == 7
    assert plain.runner.graphs is None


@pytest.mark.cuda
def test_cuda_graphs_follow_moved_tensors_and_shrinking_rows() -> None:
    loaded, params, limits = on_cuda(), SamplingParams(**PLAIN), [2, 3, 3, 4, 5, 6, 7, 7, 9]
    engine, plain = Engine(loaded, num_pages=600), Engine(loaded, num_pages=600, cuda_graphs=False)
    graphs = engine.runner.graphs
    assert graphs is not None

    def compare() -> None:
        found = engine.generate(prompts_of(9), params, max_new_tokens=limits)
        assert_same(found, plain.generate(prompts_of(9), params, max_new_tokens=limits), atol=1e-5)

    compare()
    captures = graphs.captures
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.05)
    compare()
    assert graphs.captures == captures
    engine.release()
    compare()
    assert graphs.captures == 2 * captures
    parameter = next(iter(loaded.parameters()))
    old, parameter.data = parameter.data, parameter.data.clone()
    compare()
    assert graphs.captures == 3 * captures and graphs.why_not is None and old is not None
