"""Helpers of the engine's tests, and a pool with contents but without a model.

The simulated forward writes the token itself into the pool, so every read can be checked.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from helpers_model import tiny_hf_model

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.scheduler import Batch, Group, Scheduler, Sequence


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models on one thread: beside any other process, two threads wait for each other up to ten times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Groups = list[list[Completion]]


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(5, 70) for _ in range(n)] for n in lengths]


def tokens(groups: Groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def model_logits(prompt: list[int], ids: tuple[int, ...], loaded: LoadedModel) -> torch.Tensor:
    """Logits [N, vocab] before each of `ids`, by transformers alone."""
    model = tiny_hf_model("llama").eval()
    with torch.no_grad():
        out = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits
    return out[0, len(prompt) - 1 : -1, : loaded.vocab_size].double()


def token_of(sample: int, position: int) -> int:
    """The token that the simulated model draws: depends on sample and position only, as the engine promises."""
    return (sample * 7919 + position * 104729 + 13) % 1000003


@dataclass
class Simulator:
    """Runs a scheduler as the engine does. `slots` is the pool's content; every cached token is read back each step."""

    scheduler: Scheduler
    lengths: dict[int, int]
    """New tokens until a sample ends, by sample number."""
    slots: dict[int, int] = field(default_factory=dict)
    completions: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    again_tokens: int = 0
    copies: int = 0
    mixed_steps: int = 0
    largest_batch: int = 0
    most_running: int = 0
    watch: Callable[[Batch], None] | None = None

    @property
    def pool(self) -> KVPool:
        return self.scheduler.pool

    def run(self, limit: int = 100_000) -> None:
        """Step until all work is done; fails when that takes more than `limit` steps."""
        while self.scheduler.has_work:
            assert self.steps < limit, "the scheduler does not end"
            self.step()

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch.rows, "an empty step: nothing would ever change"
        self._execute(batch)
        draws = batch.draws()
        counts = self.scheduler.advance(batch)
        self._check_contents()
        if self.watch is not None:
            self.watch(batch)
        self.steps += 1
        self.prompt_tokens += counts.prompt
        self.again_tokens += counts.again
        self.copies += len(batch.copies)
        sizes = [count for _, count in batch.rows]
        self.mixed_steps += min(sizes) == 1 and max(sizes) > 1
        self.largest_batch = max(self.largest_batch, batch.tokens)
        self.most_running = max(self.most_running, len(batch.rows))
        for _, sequence in draws:
            sequence.tokens.append(token_of(sequence.sample, sequence.drawn))
            if sequence.drawn == self.lengths[sequence.sample]:
                self.completions[sequence.sample] = sequence.tokens[sequence.group.prompt_len :]
                self.scheduler.finish(sequence)

    def _slot(self, sequence: Sequence, index: int) -> int:
        size = self.pool.page_size
        return sequence.pages[index // size] * size + index % size

    def _execute(self, batch: Batch) -> None:
        size = self.pool.page_size
        read = [[self.slots.get(s * size + i) for i in range(size)] for s, _ in batch.copies]
        for (_, target), contents in zip(batch.copies, read):
            for i, content in enumerate(contents):
                if content is not None:
                    self.slots[target * size + i] = content
        written = [
            (self._slot(sequence, i), sequence.tokens[i])
            for sequence, count in batch.rows
            for i in range(sequence.cached, sequence.cached + count)
        ]
        assert len({slot for slot, _ in written}) == len(written), "two tokens of one step share a slot"
        self.slots.update(written)

    def _check_contents(self) -> None:
        for sequence in self.scheduler.running:
            content = [self.slots[self._slot(sequence, i)] for i in range(sequence.cached)]
            assert content == sequence.tokens[: sequence.cached]


def simulate(
    prompts: list[list[int]],
    lengths: list[list[int]],
    *,
    num_pages: int,
    page_size: int = 4,
    max_batch_tokens: int = 64,
    max_running: int = 64,
    watch: Callable[[Batch], None] | None = None,
) -> Simulator:
    """Run groups to the end: prompt p has len(lengths[p]) members, member g ends after lengths[p][g] tokens."""
    scheduler = Scheduler(KVPool(num_pages, page_size), max_batch_tokens, max_running)
    simulator = Simulator(scheduler, {}, watch=watch)
    sample = 0
    for index, (prompt, members) in enumerate(zip(prompts, lengths)):
        samples = list(range(sample, sample + len(members)))
        simulator.lengths.update(zip(samples, members))
        scheduler.add(Group.make(index, prompt, samples, max(members)))
        sample += len(members)
    simulator.run()
    return simulator
