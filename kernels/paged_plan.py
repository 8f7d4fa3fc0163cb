"""What decode attention on a CPU computes once per step for all layers: which keys each query meets, and the buffers.

The sequences of a step are cut into parts. Groups that share enough tokens make one: a GEMM per key head and group, of
all its queries with the shared keys, in one batch, beside each sequence's own tokens. The other sequences are cut into
parts of similar length, so that little of a part is padding. Padding, of patterns and of batches, names tokens of the
same sequence: they are in the cache, and their NaN is the row's own.

Which groups share and where parts are cut follows from lengths and the number of threads; the constants were measured
with two.
"""

import warnings
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

SHARING_PAYS = 60_000
"""Scores of shared keys from which on a batch of GEMMs pays: 1.7 ns saved for each, against about 0.1 ms a layer."""

CUT_PAYS = 30_000
"""Padding entries that another part must save: 3 ns for each (they are in the cache), against 0.07 ms a layer."""

LEAST_QUERIES = 16
"""Queries of one key head below which a GEMM is no faster than the sparse operators, which find the keys in the cache:
with 12 (16 groups of 4, 512 tokens) 2.4 ms a layer against 2.2, with 24 1.6 against 1.9."""

MAX_ENTRIES = 2**24
"""Entries of one part's pattern, 12 bytes each; more sequences are cut into parts."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """The sequences start <= b < stop of a batch have the same first `pages` pages, all of them full. A hint: a backend
    may read them once for all of these sequences."""

    start: int
    stop: int
    pages: int


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A pool as a matrix [rows, D]: slot s of head h is row s * slot_step + h * head_step."""

    slot_step: int
    head_step: int
    rows: int

    @classmethod
    def of(cls, pool: Tensor) -> "PoolLayout | None":
        """None where the slots of a head do not lie at one distance from each other, in multiples of D."""
        pages, size, heads, dim = pool.shape
        by_page, by_slot, by_head, by_value = pool.stride()
        if size == 1:
            by_slot = by_page
        if heads == 1:
            by_head = 0
        if (by_value != 1 and dim > 1) or (pages > 1 and by_page != size * by_slot) or by_slot % dim or by_head % dim:
            return None
        slot_step, head_step = by_slot // dim, by_head // dim
        return cls(slot_step, head_step, (pages * size - 1) * slot_step + (heads - 1) * head_step + 1)

    def matrix(self, pool: Tensor) -> Tensor:
        """[rows, D], a view."""
        dim = pool.shape[3]
        return pool.as_strided((self.rows, dim), (dim, 1))

    def columns(self, slots: Tensor, groups: int) -> Tensor:
        """int32 [I,Hk,N]: the matrix rows of slots [I,N] in each head."""
        heads = torch.arange(groups, dtype=torch.int32)[:, None] * self.head_step
        return slots.int()[:, None] * self.slot_step + heads


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What plans depend on besides tables and lengths. heads: query heads; groups: key heads."""

    heads: int
    groups: int
    page_size: int
    layout: PoolLayout
    window: int | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one layer for some sequences, with its buffers; layers run one after the other and reuse them.

    I items have R sequences each: a group that shares S tokens, or (R 1, S 0) a sequence alone. Queries come in the
    order [I, Hk, R, H/Hk]. Each has W columns of scores: S shared tokens, then N of its own.
    queries: int64 [I*Hk*R], where they lie in [B*Hk, H/Hk, D].
    pattern: CSR [I*Hk*R*H/Hk, layout.rows] with N entries in each row; values are its entries, in one dimension.
    columns, offsets int32: the same for embedding_bag.
    scores, weights: [I*Hk, R*H/Hk, W]; scores is a view of `values` where nothing is shared.
    products: [I*Hk, R*H/Hk, S]. Into a strided part of `scores` a batch of GEMMs runs as a loop, half as fast.
    mask: [I,1,R,1,W], 0 or -inf. masks_shared: some of it is -inf among the shared tokens.
    shared: int32 [I*Hk*S], the matrix rows of the shared tokens.
    """

    layout: PoolLayout
    queries: Tensor
    pattern: Tensor
    values: Tensor
    columns: Tensor
    offsets: Tensor
    scores: Tensor
    weights: Tensor
    products: Tensor
    mask: Tensor
    masks_shared: bool
    shared: Tensor
    _buffers: dict[int, Tensor] = field(default_factory=dict, init=False)

    def gather(self, pool: Tensor) -> Tensor:
        """The shared rows [I*Hk,S,D] of a pool. Into a buffer: page faults of fresh memory cost more than the copy."""
        dim = pool.shape[3]
        if dim not in self._buffers:
            self._buffers[dim] = pool.new_empty(len(self.shared), dim)
        torch.index_select(self.layout.matrix(pool), 0, self.shared, out=self._buffers[dim])
        return self._buffers[dim].view(len(self.scores), -1, dim)


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts, and how their outputs go back into the batch's order.

    back: int64 [B*Hk], for each place the row of the parts' outputs; None for one part in the batch's order.
    empty: bool [B,1,1], sequences without tokens; None where there are none.
    """

    parts: tuple[Part, ...]
    back: Tensor | None
    empty: Tensor | None


@dataclass(frozen=True, slots=True)
class _Item:
    """Sequences of a batch that meet the tokens start <= t < stop together."""

    rows: tuple[int, ...]
    start: int
    stop: int

    def split(self, pieces: int) -> list["_Item"]:
        """The same sequences as several items of about equal size."""
        step = -(-len(self.rows) // max(1, pieces))
        return [_Item(self.rows[i : i + step], self.start, self.stop) for i in range(0, len(self.rows), step)]


@dataclass(frozen=True, eq=False)
class DecodePlans:
    """The plans of one step, each made when first asked for: one for every window that the layers have.

    tables int32 [B,W], lens int32 [B], shared: as in `PagedBatch`, of the sequences with one query. They must not
    change while the object is in use. Layers write into its buffers, so it serves one thread.
    """

    tables: Tensor
    lens: Tensor
    shared: tuple[SharedPages, ...] = ()
    _made: dict[PlanShape, Plan] = field(default_factory=dict, init=False, repr=False)

    def of(self, shape: PlanShape) -> Plan:
        """The plan of all layers with this shape."""
        if shape not in self._made:
            self._made[shape] = self._make(shape)
        return self._made[shape]

    def _make(self, shape: PlanShape) -> Plan:
        lens = self.lens.numpy()
        first = np.zeros_like(lens) if shape.window is None else np.maximum(lens - shape.window, 0)
        groups = _groups(self.shared, first, shape)
        alone = np.ones(len(lens), dtype=bool)
        for item in groups:
            alone[list(item.rows)] = False
        cuts = _cuts(lens - first, np.flatnonzero(alone), shape.heads)
        tensors = self.tables.long(), self.lens.long(), torch.from_numpy(first)
        made = [_part(*_together(groups), *tensors, shape)] if groups else []
        made += [_part(*_each(rows), *tensors, shape) for rows in cuts]
        in_order = not groups and len(cuts) == 1
        return Plan(
            tuple(part for part, _ in made),
            None if in_order else _way_back([(part.queries, real) for part, real in made], len(lens) * shape.groups),
            (self.lens == 0)[:, None, None] if not lens.all() else None,
        )


def _groups(shared: tuple[SharedPages, ...], first: np.ndarray, shape: PlanShape) -> list[_Item]:
    """The groups that one batch of GEMMs serves. first: the earliest token that each sequence sees."""
    items, repeats = [], shape.heads // shape.groups
    for run in shared:
        if (run.stop - run.start) * repeats < LEAST_QUERIES:
            continue
        seen = int(first[run.start : run.stop].min()) // shape.page_size * shape.page_size
        items.append(_Item(tuple(range(run.start, run.stop)), seen, max(seen, run.pages * shape.page_size)))
    sizes = tuple((len(item.rows), item.stop - item.start) for item in items)
    common = _common_size(sizes)
    fitting = [(item, rows * tokens) for item, (rows, tokens) in zip(items, sizes) if _fits(rows, tokens, *common)]
    if sum(saved for _, saved in fitting) * shape.heads < SHARING_PAYS:
        return []
    # One group with three key heads leaves one of two threads idle for half of the time.
    pieces = -(-2 * torch.get_num_threads() // (len(fitting) * shape.groups))
    return [half for item, _ in fitting for half in item.split(min(pieces, len(item.rows) * repeats // LEAST_QUERIES))]


def _fits(rows: int, tokens: int, most_rows: int, most_tokens: int) -> bool:
    """Whether a group fills at least half of its place in the batch."""
    inside = rows <= most_rows and 0 < tokens <= most_tokens
    return inside and 2 * rows * tokens >= most_rows * most_tokens


@lru_cache(maxsize=64)
def _common_size(sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The rows and tokens to which groups (rows, tokens) are padded, so that most is shared. Cached: a batch's groups
    stay for many steps."""
    candidates = sorted({(rows, tokens) for rows, _ in sizes for _, tokens in sizes})
    return max(candidates, key=lambda size: sum(r * t for r, t in sizes if _fits(r, t, *size)), default=(0, 0))


def _cuts(tokens: np.ndarray, rows: np.ndarray, heads: int) -> list[np.ndarray]:
    """Sequences `rows`, each ascending, cut where the padding that is saved pays for another part. tokens [B]: what
    each sequence of the batch sees."""
    pending, done = [rows[np.argsort(tokens[rows], kind="stable")]] if len(rows) else [], []
    while pending:
        part = pending.pop()
        sizes = tokens[part]
        longest, n = int(sizes[-1]), len(part)
        saved = np.arange(n) * (longest - np.concatenate((sizes[:1], sizes[:-1])).astype(np.int64))
        cut = int(saved.argmax())
        if saved[cut] * heads < CUT_PAYS:
            cut = n // 2 if n * longest * heads > MAX_ENTRIES else 0
        if cut:
            pending += [part[cut:], part[:cut]]
        else:
            done.append(np.sort(part))
    return done


def _each(rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `_part` for sequences that share nothing."""
    none = torch.zeros(len(rows), dtype=torch.int64)
    return torch.from_numpy(rows)[:, None], none + 1, none, none


def _together(items: list[_Item]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `_part` for groups: padding repeats the first sequence of each."""
    most = max(len(item.rows) for item in items)
    rows_IR = torch.tensor([item.rows + item.rows[:1] * (most - len(item.rows)) for item in items])
    count_I, start_I, stop_I = torch.tensor([(len(item.rows), item.start, item.stop) for item in items]).t()
    return rows_IR, count_I, start_I, stop_I


def _part(
    rows_IR: Tensor,
    count_I: Tensor,
    start_I: Tensor,
    stop_I: Tensor,
    tables_BW: Tensor,
    lens_B: Tensor,
    first_B: Tensor,
    shape: PlanShape,
) -> tuple[Part, Tensor]:
    """A part, and bool [I*Hk*R]: which of its queries are not padding.

    rows_IR: the sequences of each item. count_I: how many of them are real. start_I, stop_I: the tokens that they meet
    together.
    """
    items, most = rows_IR.shape
    lens_IR, first_IR = lens_B[rows_IR], first_B[rows_IR]

    own_IR = first_IR.maximum(stop_I[:, None])
    own, sees_own = _slots(own_IR.view(-1), lens_IR.view(-1), tables_BW[rows_IR.view(-1)], shape.page_size, least=1)
    common, exists = _slots(start_I, stop_I, tables_BW[rows_IR[:, 0]], shape.page_size, least=0)
    token_IS = torch.arange(common.shape[1]) + start_I[:, None]
    sees_common = exists[:, None] & (token_IS[:, None] >= first_IR[:, :, None])
    sees = torch.cat((sees_common, sees_own.view(*rows_IR.shape, -1)), 2)

    pattern, columns, offsets = _pattern(own.view(*rows_IR.shape, -1), shape)
    values = pattern.values()
    sizes = (items * shape.groups, most * (shape.heads // shape.groups), sees.shape[2])
    scores = values.new_empty(sizes) if common.shape[1] else values.view(sizes)
    part = Part(
        layout=shape.layout,
        queries=(rows_IR[:, None] * shape.groups + torch.arange(shape.groups)[:, None]).view(-1),
        pattern=pattern,
        values=values,
        columns=columns,
        offsets=offsets,
        scores=scores,
        weights=torch.empty_like(scores),
        products=values.new_empty(*sizes[:2], common.shape[1]),
        mask=torch.zeros(sees.shape, dtype=shape.dtype).masked_fill_(~sees, -torch.inf)[:, None, :, None],
        masks_shared=not bool(sees_common.all()),
        shared=shape.layout.columns(common, shape.groups).view(-1),
    )
    real_IR = torch.arange(most) < count_I[:, None]
    return part, real_IR[:, None].expand(-1, shape.groups, -1).reshape(-1)


def _slots(start: Tensor, stop: Tensor, tables: Tensor, page_size: int, least: int) -> tuple[Tensor, Tensor]:
    """Slots int64 [n,N] of the tokens start <= t < stop of n sequences, and which exist; N: the most, or `least`.

    A token that does not exist names the sequence's first one in the range, or its last one at all.
    """
    count = max(least, int((stop - start).max()))
    token = start[:, None] + torch.arange(count)
    exists = token < stop[:, None]
    token = torch.where(exists, token, start.minimum((stop - 1).clamp_(min=0))[:, None])
    pages = tables.gather(1, token.div(page_size, rounding_mode="floor"))
    return pages * page_size + token % page_size, exists


@cache
def _settle_sparse() -> None:
    """PyTorch says once per process, at its first CSR tensor, that the layout is young, and 2.11 that nobody checks it.
    Neither is the user's choice, and the indices are right by construction."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        torch.sparse_csr_tensor([0, 1], [0], [0.0], size=(1, 1), check_invariants=False)


def _pattern(slots_IRN: Tensor, shape: PlanShape) -> tuple[Tensor, Tensor, Tensor]:
    """The CSR pattern, its columns and its row starts."""
    items, most, tokens = slots_IRN.shape
    by_head = shape.layout.columns(slots_IRN.flatten(0, 1), shape.groups).view(items, most, shape.groups, tokens)
    repeats = shape.heads // shape.groups
    columns = by_head.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, repeats, -1).reshape(-1)
    starts = torch.arange(0, len(columns) + 1, tokens, dtype=torch.int32)
    _settle_sparse()
    values = torch.zeros(len(columns), dtype=shape.dtype)
    size = (len(starts) - 1, shape.layout.rows)
    pattern = torch.sparse_csr_tensor(starts, columns, values, size=size, check_invariants=False)
    return pattern, columns, starts[:-1]


def _way_back(parts: list[tuple[Tensor, Tensor]], places: int) -> Tensor:
    """For each of the batch's places, the row of the parts' outputs; parts are (place of each row, which are real)."""
    place, real = (torch.cat(tensors) for tensors in zip(*parts))
    back = torch.empty(places, dtype=torch.int64)
    back[place[real]] = real.nonzero()[:, 0]
    return back
