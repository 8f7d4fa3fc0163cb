"""One step on the device: pack the scheduled tokens or take the rows of a burst, run the model, draw.

A mixed step packs all its rows into one forward, decode rows and prompt chunks alike; there is no padding. A step of a
burst runs what lies on the device already (`decode.py`). The head runs once, only on the rows whose next token is
drawn, and a group's first tokens all come from one row of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.kernels.paged_plan import SharedPages
from rhotrain.model.attention import PagedContext
from rhotrain.model.loaded import LoadedModel
from rhotrain.model.packed import packed_weights
from rhotrain.rollout.decode import DecodeRows, decode_logits, padded_tables, shared_pages
from rhotrain.rollout.graphs import CudaCapture, DecodeGraphs
from rhotrain.rollout.pools import Pools
from rhotrain.rollout.sampler import Draw, HostDraw, SamplingPlan, draw_tokens
from rhotrain.rollout.scheduler import Batch, Burst, Sequence
from rhotrain.rollout.tape import DecodeTapes


class Runner:
    """Runs batches and bursts over the pools of one engine. cuda_graphs: capture the decode step where the device is a
    GPU. tapes: record it where it is a CPU."""

    def __init__(
        self, loaded: LoadedModel, num_pages: int, page_size: int, *, cuda_graphs: bool = True, tapes: bool = True
    ) -> None:
        self.loaded = loaded
        self.pools = Pools(loaded, num_pages, page_size)
        self.graphs: DecodeGraphs | None = None
        if cuda_graphs and loaded.device.type == "cuda":
            self.graphs = DecodeGraphs(self.pools, CudaCapture(loaded.device))
        self.tapes = DecodeTapes(self.pools) if tapes and loaded.device.type == "cpu" else None

    @property
    def shares(self) -> bool:
        """True where reading shared pages once is worth looking for them: on a GPU the cache does it."""
        return self.loaded.device.type == "cpu"

    def allocate(self) -> None:
        """Make sure that the pool's tensors are there, and that no graph reads an address that has moved."""
        self.pools.allocate()
        if self.graphs is not None:
            self.graphs.check_addresses()
        if self.tapes is not None:
            self.tapes.check()

    def release_weights(self) -> None:
        """Free the derived layouts of the weights; the next call makes them anew, as it does after every update."""
        packed_weights(self.loaded).release()

    def release(self) -> None:
        """Free the pool's tensors, the graphs that hold their addresses, and derived layouts of the weights."""
        if self.graphs is not None:
            self.graphs.drop()
        if self.tapes is not None:
            self.tapes.drop()
        self.pools.release()
        self.release_weights()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The model as it runs a few steps: on a CPU with the weights in their fastest layout, and nowhere with
        checkpointed layers (transformers 5.17 asks for the random state there, which no graph can hold). Autograd must
        be off."""
        layers = self._checkpointed()
        for layer in layers:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            with packed_weights(self.loaded).using():
                yield
        finally:
            if self.tapes is not None:
                self.tapes.let_go()
            for layer in layers:
                layer.gradient_checkpointing = True  # type: ignore[assignment]

    def _checkpointed(self) -> list[nn.Module]:
        """Modules whose gradient checkpointing is on."""
        if not self.loaded.gradient_checkpointing:
            return []
        return [m for m in self.loaded.model.modules() if getattr(m, "gradient_checkpointing", False) is True]

    @property
    def pack_seconds(self) -> float:
        """Time that making those layouts took so far."""
        return packed_weights(self.loaded).pack_seconds

    @property
    def capture_seconds(self) -> float:
        """Time that capturing graphs took so far."""
        return 0.0 if self.graphs is None else self.graphs.seconds

    @torch.no_grad()
    def run(self, batch: Batch, plan: SamplingPlan) -> tuple[list[Sequence], HostDraw | None]:
        """Run one mixed step: the sequences that drew a token, `batch.draws()`, and what they drew.

        no_grad and not inference_mode: tensors made in inference mode may not enter autograd later.
        """
        self.pools.copy_pages(batch.copies)
        hidden_TH = self.pools.hidden(*self._pack(batch))
        draws = batch.draws()
        if not draws:
            return [], None
        rows = sorted({row for row, _ in draws})
        ends = [end - 1 for end in accumulate(count for _, count in batch.rows)]
        logits_RV = self.pools.logits(hidden_TH[self._ints([ends[row] for row in rows])])
        if len(rows) < len(draws):
            place = {row: index for index, row in enumerate(rows)}
            logits_RV = logits_RV.index_select(0, self._ints([place[row] for row, _ in draws]))
        sequences = [sequence for _, sequence in draws]
        samples, drawn = self._ints([[s.sample for s in sequences], [s.drawn for s in sequences]])
        short = np.array([s.drawn < plan.minimum for s in sequences])
        return sequences, draw_tokens(logits_RV, samples, drawn, plan, short).host()

    @torch.no_grad()
    def begin(self, burst: Burst) -> DecodeRows:
        """Bring the rows of a burst to the device."""
        self.pools.copy_pages(burst.copies)
        return DecodeRows.of(burst.sequences, self.pools.page_size, self.loaded.device, self.shares)

    @torch.no_grad()
    def decode(self, rows: DecodeRows, plan: SamplingPlan, short: np.ndarray) -> Draw:
        """One step of all rows; their newest tokens are then the drawn ones. short: rows below min_new_tokens."""
        if self.graphs is not None:
            logits_BV = self.graphs.logits(rows)
        elif self.tapes is not None:
            logits_BV = self.pools.logits(self.tapes.hidden(rows))
        else:
            logits_BV = decode_logits(self.pools, rows.inputs, rows.shared)
        draw = draw_tokens(logits_BV, rows.samples, rows.drawn, plan, short)
        rows.advance(draw.token_ids)
        return draw

    def keep(self, rows: DecodeRows, places: list[int]) -> DecodeRows:
        """The rows at these places; the others have ended."""
        return rows.keep(places, self.shares)

    def _pack(self, batch: Batch) -> tuple[PagedContext, Tensor, Tensor]:
        """The attention context, and ids and positions int64 [T] of the packed tokens."""
        size = self.pools.page_size
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
        sequences = [sequence for sequence, _ in batch.rows]
        counts = [count for _, count in batch.rows]
        lens_k = [sequence.cached + count for sequence, count in batch.rows]
        tables = padded_tables(sequences)
        pages_B = torch.from_numpy(tables).to(self.loaded.device, non_blocking=True)
        decode = sum(count == 1 for count in counts)
        shared: tuple[SharedPages, ...] = ()
        if self.shares:
            full = np.array([s.cached // size for s in sequences[:decode]])
            shared = shared_pages(tables[:decode], full, np.array([s.group.index for s in sequences[:decode]]))
        context = PagedContext(
            self.pools.keys,
            self.pools.values,
            packed_3T[2],
            PagedBatch.make(pages_B, counts, lens_k, size, shared=shared),
        )
        return context, packed_3T[0], packed_3T[1]

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        """int64 on the model's device."""
        return torch.tensor(values, dtype=torch.int64).to(self.loaded.device, non_blocking=True)
