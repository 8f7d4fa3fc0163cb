"""Helpers of the engine's tests, and a pool with contents but without a model.

The simulated forward writes the token itself into the pool, so every read can be checked.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from helpers_model import tiny_hf_model, tiny_model

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.scheduler import Batch, Burst, Group, Scheduler, Sequence


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


def facts(groups: Groups) -> list[tuple[object, ...]]:
    """Everything about the completions that is exact, in order."""
    return [
        (c.token_ids, c.finish_reason, c.stop_reason, c.kept_ids, c.sample, c.error, c.policy_version)
        for group in groups
        for c in group
    ]


def values(groups: Groups) -> torch.Tensor:
    """Logprobs and kept masses of all completions in one row, float64."""
    numbers = [x for group in groups for c in group for x in (*c.logprobs, *c.kept_mass)]
    return torch.tensor(numbers, dtype=torch.float64)


def assert_same(found: Groups, expected: Groups, atol: float = 1e-11) -> None:
    """Equal completions; logprobs and kept masses to rounding (the default is for float64 models)."""
    assert facts(found) == facts(expected)
    torch.testing.assert_close(values(found), values(expected), rtol=0, atol=atol)


@cache
def double_model(family: str = "llama") -> LoadedModel:
    """A tiny float64 model, shared by tests: two computations of one thing agree to 1e-11. Do not change it."""
    return tiny_model(family, dtype=torch.float64)


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
    """Runs a scheduler as the engine does. `slots` is the pool's content; every cached token is read back each step.

    burst: most steps of a burst, 0 for none. late: a row of a burst is known to have ended one step after it did, and
    has written once more by then. prefixes: per key the tokens of the page that it names.
    """

    scheduler: Scheduler
    lengths: dict[int, int]
    """New tokens until a sample ends, by sample number."""
    burst: int = 0
    late: bool = False
    prefixes: dict[bytes, list[int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    completions: dict[int, list[int]] = field(default_factory=dict)
    trace: list[tuple[tuple[int, int, tuple[int, ...]], ...]] = field(default_factory=list)
    """Per mixed step and per burst: sample, tokens to run and pages of every row."""
    steps: int = 0
    burst_steps: int = 0
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

    def add(self, group: Group) -> None:
        """Queue a group and remember what its pages hold."""
        size = self.pool.page_size
        prompt = group.members[0].tokens
        self.scheduler.add(group)
        for index, key in enumerate(group.keys):
            self.prefixes[key] = prompt[index * size : (index + 1) * size]

    def run(self, limit: int = 100_000) -> None:
        """Step until all work is done; fails when that takes more than `limit` steps."""
        while self.scheduler.has_work:
            assert self.steps < limit, "the scheduler does not end"
            self.step()

    def step(self) -> None:
        """A mixed step, or a whole burst."""
        burst = self.scheduler.burst(self.burst) if self.burst else None
        if burst is None:
            self._mixed_step()
        else:
            self._run_burst(burst)
        self._check_contents()
        self._check_ages()

    def _mixed_step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch.rows, "an empty step: nothing would ever change"
        self.trace.append(tuple((s.sample, count, tuple(s.pages)) for s, count in batch.rows))
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
                self._finish(sequence)

    def _run_burst(self, burst: Burst) -> None:
        """The steps of a burst; it stops early when a row has ended and somebody waits."""
        assert burst.steps >= 1 and burst.sequences == self.scheduler.running
        self.trace.append(tuple((s.sample, burst.steps, tuple(s.pages)) for s in burst.sequences))
        self.copies += len(burst.copies)
        self.most_running = max(self.most_running, len(burst.sequences))
        self._copy_pages(burst.copies)
        for s in burst.sequences:
            assert self.pool.pages_for(s.cached + 1) <= len(s.pages) <= self.pool.pages_for(s.group.limit)
        drawn: dict[Sequence, list[int]] = {s: [] for s in burst.sequences}
        # Ended in the step before, and nobody knows it yet.
        ended: list[Sequence] = []
        for _ in range(burst.steps):
            unknown = list(ended) if self.late else []
            rows = [s for s in drawn if len(drawn[s]) < s.left and (s not in ended or s in unknown)]
            if not rows:
                break
            self._write_newest(rows, drawn)
            self.steps += 1
            self.burst_steps += 1
            for s in rows:
                if s not in ended:
                    drawn[s].append(token_of(s.sample, s.drawn + len(drawn[s])))
            new = [s for s in rows if s not in ended and s.drawn + len(drawn[s]) == self.lengths[s.sample]]
            known, ended = (ended, new) if self.late else (new, [])
            self._settle(known, drawn)
            if known and self.scheduler.waiting:
                break
        self._settle(ended, drawn)
        for s, new_tokens in drawn.items():
            self.scheduler.settle(s, new_tokens)

    def _settle(self, ended: list[Sequence], drawn: dict[Sequence, list[int]]) -> None:
        """Finish rows of a burst."""
        for s in ended:
            self.scheduler.settle(s, drawn.pop(s))
            self._finish(s)

    def _finish(self, sequence: Sequence) -> None:
        self.completions[sequence.sample] = sequence.tokens[sequence.group.prompt_len :]
        self.scheduler.finish(sequence)

    def _write_newest(self, rows: list[Sequence], drawn: dict[Sequence, list[int]]) -> None:
        """One step of a burst: each row writes its newest token where nobody else looks."""
        size = self.pool.page_size
        for s in rows:
            tokens = [*s.tokens, *drawn[s]]
            at = len(tokens) - 1
            assert self.pool.holders(s.pages[at // size]) == 1, "a shared page would be written"
            self.slots[self._slot(s, at)] = tokens[-1]
            assert [self.slots[self._slot(s, i)] for i in range(len(tokens))] == tokens

    def _slot(self, sequence: Sequence, index: int) -> int:
        size = self.pool.page_size
        return sequence.pages[index // size] * size + index % size

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        size = self.pool.page_size
        read = [[self.slots.get(source * size + i) for i in range(size)] for source, _ in copies]
        for (_, target), contents in zip(copies, read):
            for i, content in enumerate(contents):
                if content is not None:
                    self.slots[target * size + i] = content

    def _execute(self, batch: Batch) -> None:
        self._copy_pages(batch.copies)
        written = [
            (self._slot(sequence, i), sequence.tokens[i])
            for sequence, count in batch.rows
            for i in range(sequence.cached, sequence.cached + count)
        ]
        assert len({slot for slot, _ in written}) == len(written), "two tokens of one step share a slot"
        self.slots.update(written)

    def _check_contents(self) -> None:
        """Page tables and named pages hold what they promise."""
        for sequence in self.scheduler.running:
            content = [self.slots[self._slot(sequence, i)] for i in range(sequence.cached)]
            assert content == sequence.tokens[: sequence.cached]
        size = self.pool.page_size
        for key, expected in self.prefixes.items():
            for page in self.pool.find([key]):
                assert [self.slots[page * size + i] for i in range(size)] == expected

    def _check_ages(self) -> None:
        """Whoever runs is older than whoever waits, so the oldest always moves."""
        ages = [s.age for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert ages == sorted(ages)


def simulate(
    prompts: list[list[int]],
    lengths: list[list[int]],
    *,
    num_pages: int,
    page_size: int = 4,
    max_batch_tokens: int = 64,
    max_running: int = 64,
    burst: int = 0,
    late: bool = False,
    spare: int = 0,
    watch: Callable[[Batch], None] | None = None,
) -> Simulator:
    """Run groups to the end: prompt p has len(lengths[p]) members, member g ends after lengths[p][g] tokens.

    spare: how many more tokens than its longest member a group might have drawn (they end by a stop id then).
    """
    scheduler = Scheduler(KVPool(num_pages, page_size), max_batch_tokens, max_running)
    simulator = Simulator(scheduler, {}, burst=burst, late=late, watch=watch)
    sample = 0
    for index, (prompt, members) in enumerate(zip(prompts, lengths)):
        samples = list(range(sample, sample + len(members)))
        simulator.lengths.update(zip(samples, members))
        simulator.add(Group.make(index, prompt, samples, max(members) + spare))
        sample += len(members)
    simulator.run()
    return simulator
