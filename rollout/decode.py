"""One decode step of many rows: everything that it needs lies on the device, and what changes is changed there.

A row's newest token, its position and its page table are tensors; a step computes slots and lengths from them, so the
host neither packs nor counts. On CUDA the same function is captured into graphs (`graphs.py`), whose buffers are larger
than the rows: padding rows write into a page that nobody reads and have length 0.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.kernels.paged_plan import SharedPages
from rhotrain.model.attention import PagedContext
from rhotrain.rollout.pools import Pools
from rhotrain.rollout.scheduler import Sequence


@dataclass(slots=True)
class DecodeInputs:
    """What the model reads, per row: ids int64 [B], cached int64 [B] (tokens in the pool, so the new token's position),
    live int32 [B] (0 for padding), tables int32 [B,W]. Changed in place."""

    ids: Tensor
    cached: Tensor
    live: Tensor
    tables: Tensor


@dataclass(slots=True)
class DecodeRows:
    """The rows of a burst.

    inputs: at least B rows; graphs put their own buffers, which may be larger, in their place.
    samples, drawn: int64 [B], the counters of the random numbers.
    groups [B], host_tables [B,W], full [B]: group, pages and number of full pages on the host, for `shared_pages`.
    """

    inputs: DecodeInputs
    samples: Tensor
    drawn: Tensor
    groups: np.ndarray
    host_tables: np.ndarray
    full: np.ndarray
    shared: tuple[SharedPages, ...]

    @classmethod
    def of(cls, sequences: SequenceOf[Sequence], page_size: int, device: torch.device, share: bool) -> "DecodeRows":
        """From sequences that have one token left to run; two transfers. share: look for shared pages."""
        columns = [[s.tokens[-1] for s in sequences], [s.cached for s in sequences]]
        columns += [[s.sample for s in sequences], [s.drawn for s in sequences]]
        ids, cached, samples, drawn = torch.tensor(columns, dtype=torch.int64).to(device, non_blocking=True)
        tables = padded_tables(sequences)
        groups = np.array([s.group.index for s in sequences])
        full = np.array([s.cached // page_size for s in sequences])
        inputs = DecodeInputs(
            ids,
            cached,
            torch.ones(len(sequences), dtype=torch.int32, device=device),
            torch.from_numpy(tables).to(device, non_blocking=True),
        )
        shared = shared_pages(tables, full, groups) if share else ()
        return cls(inputs, samples, drawn, groups, tables, full, shared)

    def __len__(self) -> int:
        return len(self.samples)

    def keep(self, places: list[int], share: bool) -> "DecodeRows":
        """The rows at these places, in this order."""
        index = torch.tensor(places).to(self.samples.device, non_blocking=True)
        old = self.inputs
        inputs = DecodeInputs(*(t.index_select(0, index) for t in (old.ids, old.cached, old.live, old.tables)))
        groups, tables, full = self.groups[places], self.host_tables[places], self.full[places]
        shared = shared_pages(tables, full, groups) if share else ()
        samples, drawn = self.samples.index_select(0, index), self.drawn.index_select(0, index)
        return DecodeRows(inputs, samples, drawn, groups, tables, full, shared)

    def advance(self, token_ids: Tensor) -> None:
        """The drawn tokens become the newest ones."""
        self.inputs.ids[: len(self)].copy_(token_ids)
        self.inputs.cached += self.inputs.live
        self.drawn += 1


def padded_tables(sequences: SequenceOf[Sequence]) -> np.ndarray:
    """Page tables int32 [B,W]. Padding repeats the sequence's own first page: what lies there cannot be another
    sequence's NaN."""
    width = max(len(s.pages) for s in sequences)
    tables = np.empty((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(tables, sequences):
        row[: len(sequence.pages)] = sequence.pages
        row[len(sequence.pages) :] = sequence.pages[0]
    return tables


def shared_pages(tables: np.ndarray, full: np.ndarray, groups: np.ndarray) -> tuple[SharedPages, ...]:
    """Runs of neighbouring rows with the same first pages, so that a backend can read those once.

    tables [B,W], full [B]: pages that are full, groups [B]: which group a row belongs to. Of two ways to part the rows,
    by group or by any common start (a system prompt), the one that saves more page reads is taken, for each common
    start.
    """
    if len(tables) < 2:
        return ()
    alike = np.logical_and.accumulate(tables[1:] == tables[:-1], axis=1).sum(1)
    alike = np.minimum(alike, np.minimum(full[1:], full[:-1]))
    found: list[SharedPages] = []
    for start, stop in _runs(alike > 0):
        whole = [SharedPages(start, stop, int(alike[start : stop - 1].min()))]
        inside = (groups[start + 1 : stop] == groups[start : stop - 1]) & (alike[start : stop - 1] > 0)
        parts = [
            SharedPages(start + a, start + b, int(alike[start + a : start + b - 1].min())) for a, b in _runs(inside)
        ]
        found += max((whole, parts), key=lambda runs: sum((r.stop - r.start - 1) * r.pages for r in runs))
    return tuple(found)


def _runs(joined: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of the maximal runs of at least two rows, where joined[i] says that row i + 1 goes with row i."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], joined, [False])).astype(np.int8)))
    return [(int(a), int(b) + 1) for a, b in zip(edges[::2], edges[1::2])]


def paged_context(pools: Pools, inputs: DecodeInputs, shared: tuple[SharedPages, ...] = ()) -> PagedContext:
    """Where the newest token of every row is written, and what it attends to."""
    size = pools.page_size
    page = inputs.tables.gather(1, (inputs.cached // size)[:, None])[:, 0]
    slots = page.long() * size + inputs.cached % size
    lens = (inputs.cached + 1).int() * inputs.live
    batch = PagedBatch(inputs.tables, lens, size, decode=len(lens), shared=shared)
    return PagedContext(pools.keys, pools.values, slots, batch)


def decode_hidden(pools: Pools, inputs: DecodeInputs, shared: tuple[SharedPages, ...] = ()) -> Tensor:
    """Run the newest token of every row through the body: hidden [B,H]. Nothing waits for the device."""
    return pools.hidden(paged_context(pools, inputs, shared), inputs.ids, inputs.cached)


def decode_logits(pools: Pools, inputs: DecodeInputs, shared: tuple[SharedPages, ...] = ()) -> Tensor:
    """The same and the head: logits [B,V]."""
    return pools.logits(decode_hidden(pools, inputs, shared))
