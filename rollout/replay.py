"""Logprobs of given completions, computed the way the engine decodes: paged K/V, the prompt first, then token by token.

Nothing is drawn here, and page tables, slots and positions are made by other code than the engine's. So a difference
between these logprobs and the trainer's packed forward is numerics alone, and one between these and the engine's report
is a fault of scheduler, runner or sampler.

    logprob_i = log_softmax(logits_i / temperature)[token_i] over the real vocabulary, as in kernels/logprob.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.model.attention import PagedContext
from rhotrain.model.loaded import LoadedModel
from rhotrain.model.packed import packed_weights

PROMPT_TOKENS = 4096
"""Most prompt tokens in one forward; a single longer prompt still runs whole."""

Pair = tuple[Sequence[int], Sequence[int]]
"""(prompt ids, completion ids)."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence and its pages, which are its own and follow each other in the pool."""

    index: int
    tokens: tuple[int, ...]
    prompt_len: int
    pages: range

    @property
    def drawn(self) -> int:
        """Length of the completion."""
        return len(self.tokens) - self.prompt_len


class _Pool:
    """The pool's tensors, and one forward over it."""

    def __init__(self, loaded: LoadedModel, num_pages: int, page_size: int) -> None:
        self.loaded = loaded
        self.page_size = page_size
        # Zeros, not empty: decode attention gives unused slots weight 0, and 0 * NaN is NaN.
        self.k_pools, self.v_pools = (
            [
                torch.zeros(num_pages, page_size, shape[0], shape[side], dtype=loaded.dtype, device=loaded.device)
                for shape in loaded.kv_shapes
            ]
            for side in (1, 2)
        )

    def last_logits(self, rows: Sequence[_Row], spans: Sequence[range]) -> Tensor:
        """Run the tokens spans[i] of rows[i]; earlier ones are in the pool. Returns the logits [rows, V] of the last
        token of each."""
        size, device = self.page_size, self.loaded.device
        order = sorted(range(len(rows)), key=lambda i: len(spans[i]) > 1)  # decode rows come first
        rows, spans = [rows[i] for i in order], [spans[i] for i in order]
        width = -(-max(span.stop for span in spans) // size)
        # Padding repeats the sequence's own last page: what lies there cannot be another sequence's NaN.
        tables = [[row.pages[min(i, len(row.pages) - 1)] for i in range(width)] for row in rows]
        slots = [row.pages[i // size] * size + i % size for row, span in zip(rows, spans) for i in span]
        lens_q, lens_k = [len(span) for span in spans], [span.stop for span in spans]
        context = PagedContext(
            k_pools=self.k_pools,
            v_pools=self.v_pools,
            slots=torch.tensor(slots, device=device),
            batch=PagedBatch.make(torch.tensor(tables, dtype=torch.int32, device=device), lens_q, lens_k, size),
        )
        ids = torch.tensor([row.tokens[i] for row, span in zip(rows, spans) for i in span], device=device)
        positions = torch.tensor([i for span in spans for i in span], device=device)
        with self.loaded.with_attention(context):
            hidden_TH = self.loaded.hidden(ids, positions)
        ends = torch.tensor(lens_q, device=device).cumsum(0) - 1
        logits_BV = packed_weights(self.loaded).head_logits(hidden_TH[ends])
        return logits_BV[torch.tensor(order, device=device).argsort()]


def _rows(loaded: LoadedModel, sequences: Sequence[Pair], page_size: int) -> list[_Row]:
    """The sequences with their pages. ValueError for an empty prompt, a missing position or an id without embedding."""
    embedded = loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    rows, free = [], 0
    for index, (prompt, completion) in enumerate(sequences):
        tokens = (*prompt, *completion)
        if not len(prompt):
            raise ValueError(f"sequence {index}: its prompt has no tokens; a prompt needs at least one")
        if min(tokens) < 0 or max(tokens) >= embedded:
            raise ValueError(
                f"sequence {index}: ids range from {min(tokens)} to {max(tokens)}; need ids from 0 to {embedded - 1}"
            )
        if loaded.max_positions is not None and len(tokens) > loaded.max_positions:
            raise ValueError(
                f"sequence {index}: {len(tokens)} tokens, but the model has {loaded.max_positions} positions; "
                "shorten it"
            )
        pages = -(-(len(tokens) - 1) // page_size) or 1  # the last token is never run
        rows.append(_Row(index, tokens, len(prompt), range(free, free + pages)))
        free += pages
    return rows


def _prompt_batches(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows whose prompts run together."""
    batch: list[_Row] = []
    for row in rows:
        if batch and sum(r.prompt_len for r in batch) + row.prompt_len > PROMPT_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.no_grad()
def decode_logprobs(
    loaded: LoadedModel, sequences: Sequence[Pair], *, temperature: float, page_size: int = 16
) -> list[Tensor]:
    """Logprobs of the completions' tokens along the decode path, one tensor [completion length] each, on the CPU.

    sequences: (prompt ids, completion ids); a completion may be empty. float32, or float64 for a float64 model.
    Every sequence has a pool of its own pages; finished ones drop out of the steps that follow.
    Raises ValueError for an empty prompt, ids outside the vocabulary, too many positions, temperature or page_size
    that are not positive.
    """
    if page_size < 1:
        raise ValueError(f"page_size: {page_size} is too small; need at least 1")
    rows = [row for row in _rows(loaded, sequences, page_size) if row.drawn]
    found: list[list[Tensor]] = [[] for _ in sequences]
    if rows:
        pool = _Pool(loaded, rows[-1].pages.stop, page_size)

    def keep(batch: Sequence[_Row], logits_BV: Tensor, step: int) -> None:
        ids = torch.tensor([r.tokens[r.prompt_len + step] for r in batch], device=loaded.device)
        out = token_logprobs(logits_BV, ids, temperature=temperature, vocab_size=loaded.vocab_size)
        for row, value in zip(batch, out.logprobs.cpu()):
            found[row.index].append(value)

    with packed_weights(loaded).using():
        for batch in _prompt_batches(rows):
            keep(batch, pool.last_logits(batch, [range(row.prompt_len) for row in batch]), 0)
        for step in range(1, max((row.drawn for row in rows), default=0)):
            rows = [row for row in rows if row.drawn > step]
            spans = [range(row.prompt_len + step - 1, row.prompt_len + step) for row in rows]
            keep(rows, pool.last_logits(rows, spans), step)
    dtype = torch.promote_types(loaded.dtype, torch.float32)
    return [torch.stack(values) if values else torch.zeros(0, dtype=dtype) for values in found]
