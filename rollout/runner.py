"""One step on the device: pack the scheduled tokens, run the model's body over the paged pool, sample.

All rows of a step are packed into one forward, decode rows and prompt chunks alike; there is no padding. The head runs
once, only on the rows whose next token is drawn, and a group's first tokens all come from one row of it. Sampler and
trainer share the function: log_softmax(logits / temperature) over the real vocabulary, float32.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rhotrain.kernels.logprob import KeptSet
from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.kernels.sampling import Sample, sample_tokens
from rhotrain.model.attention import PagedContext
from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.scheduler import Batch, Sequence


def page_bytes(loaded: LoadedModel, page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    values = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in loaded.kv_shapes)
    return values * page_size * loaded.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token. `error`: the logits were NaN or infinite, and the other fields mean nothing."""

    sequence: Sequence
    token_id: int
    logprob: float
    kept_mass: float
    kept_ids: tuple[int, ...] | None
    error: bool


@dataclass(frozen=True)
class SamplingPlan:
    """What one `generate` call asks of the sampler. stop_ids: every id that ends a completion."""

    params: SamplingParams
    stop_ids: frozenset[int]
    vocab_size: int
    device: torch.device

    @property
    def records_sets(self) -> bool:
        """True when the kept ids of every token are recorded; without truncation there is nothing to record."""
        return self.params.keep_sets and self.params.truncates

    @property
    def cuts_tail(self) -> bool:
        """True when top-k, top-p or min-p are on, so that every token has a kept set of its own."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @cached_property
    def all_ids(self) -> tuple[int, ...]:
        """The real vocabulary. One object for every token with this kept set, else each would cost V ints."""
        return tuple(range(self.vocab_size))

    @cached_property
    def allowed_ids(self) -> tuple[int, ...]:
        """What may be drawn below min_new_tokens: the real vocabulary without the stop ids."""
        return tuple(i for i in range(self.vocab_size) if i not in self.stop_ids)

    @cached_property
    def allowed_tensor(self) -> Tensor:
        """`allowed_ids`, int32 on the device."""
        return torch.tensor(self.allowed_ids, dtype=torch.int32, device=self.device)

    def allowed(self, rows: int) -> KeptSet:
        """`allowed_ids` for each of `rows` rows."""
        size = len(self.allowed_ids)
        offsets = torch.arange(rows + 1, dtype=torch.int64, device=self.device) * size
        return KeptSet(offsets, self.allowed_tensor.repeat(rows))


class Runner:
    """Owns the pool's tensors and runs batches. k_pools, v_pools: [num_pages, page_size, Hk, D] per layer.

    The pool starts as zeros: decode attention multiplies masked slots by weight 0, and 0 * NaN is NaN.
    """

    def __init__(self, loaded: LoadedModel, num_pages: int, page_size: int) -> None:
        self.loaded = loaded
        self.page_size = page_size

        def pool(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_pages, page_size, heads, dim, dtype=loaded.dtype, device=loaded.device)

        self.k_pools = [pool(heads, key_dim) for heads, key_dim, _ in loaded.kv_shapes]
        self.v_pools = [pool(heads, value_dim) for heads, _, value_dim in loaded.kv_shapes]

    @torch.no_grad()
    def run(self, batch: Batch, plan: SamplingPlan) -> list[Draw]:
        """Run one step and draw a token for every sequence in `batch.draws()`, in that order.

        no_grad and not inference_mode: tensors made in inference mode may not enter autograd later.
        """
        self._copy_pages(batch.copies)
        context, input_ids_T, position_ids_T = self._pack(batch)
        with self.loaded.with_attention(context):
            hidden_TH = self.loaded.hidden(input_ids_T, position_ids_T)
        draws = batch.draws()
        if not draws:
            return []
        rows = sorted({row for row, _ in draws})
        ends = [end - 1 for end in accumulate(count for _, count in batch.rows)]
        hidden_RH = hidden_TH[self._ints([ends[row] for row in rows])]
        logits_RV = self.loaded.head.logits(hidden_RH)
        if len(rows) < len(draws):
            place = {row: index for index, row in enumerate(rows)}
            logits_RV = logits_RV.index_select(0, self._ints([place[row] for row, _ in draws]))
        return self._draw(logits_RV, [sequence for _, sequence in draws], plan)

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that held NaN or inf, before somebody else gets them."""
        self._each_page(pages, pages, scale=0)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages, all sources read before any target is written."""
        if copies:
            self._each_page([source for source, _ in copies], [target for _, target in copies], scale=1)

    def _each_page(self, sources: list[int], targets: list[int], scale: int) -> None:
        source, target = self._ints(sources), self._ints(targets)
        for pool in (*self.k_pools, *self.v_pools):
            pool[target] = pool[source] if scale else 0

    def _pack(self, batch: Batch) -> tuple[PagedContext, Tensor, Tensor]:
        """The attention context, and ids and positions int64 [T] of the packed tokens."""
        size = self.page_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in batch.rows:
            start, pages = sequence.cached, sequence.pages
            stop = start + count
            ids += sequence.tokens[start:stop]
            positions += range(start, stop)
            slots += [pages[i // size] * size + i % size for i in range(start, stop)]
        # One transfer for the three; one more for the page tables.
        packed_3T = self._ints([ids, positions, slots])
        lens_k = tuple(sequence.cached + count for sequence, count in batch.rows)
        width = -(-max(lens_k) // size)
        # Padding repeats the sequence's own first page: what lies there cannot be another sequence's NaN.
        tables = [(s.pages + s.pages[:1] * (width - len(s.pages)))[:width] for s, _ in batch.rows]
        context = PagedContext(
            k_pools=self.k_pools,
            v_pools=self.v_pools,
            slots=packed_3T[2],
            batch=PagedBatch.make(self._ints(tables), [count for _, count in batch.rows], lens_k, size),
        )
        return context, packed_3T[0], packed_3T[1]

    def _draw(self, logits_BV: Tensor, sequences: list[Sequence], plan: SamplingPlan) -> list[Draw]:
        """One token per row. Rows below min_new_tokens, where stop ids are not allowed, are a call of their own."""
        minimum = plan.params.min_new_tokens if plan.stop_ids else 0
        short = [i for i, s in enumerate(sequences) if s.drawn < minimum]
        if not short:
            return self._draw_rows(logits_BV, sequences, plan, restricted=False)
        held = set(short)
        long = [i for i in range(len(sequences)) if i not in held]
        found: dict[int, Draw] = {}
        for rows, restricted in ((short, True), (long, False)):
            if rows:
                part = logits_BV if len(rows) == len(sequences) else logits_BV[self._ints(rows)]
                drawn = self._draw_rows(part, [sequences[i] for i in rows], plan, restricted)
                found.update(zip(rows, drawn))
        return [found[i] for i in range(len(sequences))]

    def _draw_rows(
        self, logits_BV: Tensor, sequences: list[Sequence], plan: SamplingPlan, restricted: bool
    ) -> list[Draw]:
        params = plan.params
        counters_2B = self._ints([[s.drawn for s in sequences], [s.sample for s in sequences]])
        sample = sample_tokens(
            logits_BV,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seeds=torch.full_like(counters_2B[0], params.seed),
            positions=counters_2B[0],
            samples=counters_2B[1],
            vocab_size=plan.vocab_size,
            allowed=plan.allowed(len(sequences)) if restricted else None,
            keep_sets=plan.records_sets and plan.cuts_tail,
        )
        kept = self._kept_ids(sample, len(sequences), plan, restricted)
        # One transfer: float64 holds the ids and the float32 values exactly.
        columns = (sample.token_ids, sample.logprobs, sample.kept_mass, sample.error)
        values = torch.stack([column.double() for column in columns]).tolist()
        return [
            Draw(sequence, int(token), logprob, mass, ids, bool(error))
            for sequence, token, logprob, mass, error, ids in zip(sequences, *values, kept)
        ]

    def _kept_ids(
        self, sample: Sample, rows: int, plan: SamplingPlan, restricted: bool
    ) -> list[tuple[int, ...] | None]:
        """The kept ids of every row, None when they are not recorded."""
        if not plan.records_sets:
            return [None] * rows
        if sample.kept is None:
            return [plan.allowed_ids if restricted else plan.all_ids] * rows
        offsets, ids = sample.kept.offsets.tolist(), sample.kept.ids.tolist()
        return [tuple(ids[a:b]) for a, b in pairwise(offsets)]

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        """int64 on the model's device."""
        return torch.tensor(values, dtype=torch.int64).to(self.loaded.device, non_blocking=True)
