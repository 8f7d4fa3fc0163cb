"""Prompts in, groups of completions out: schedule -> run -> postprocess over a paged KV pool of fixed size.

    engine = Engine(load_model("smollm2"), kv_memory_bytes=2 << 30)
    groups = engine.generate(prompts, SamplingParams(temperature=1.0), n=8)
    for done in engine.stream(prompts, SamplingParams(temperature=1.0), n=8):
        reward(done.completion)

The weights are the trainer's own tensors: nothing is synchronised, and a generate call after an optimiser step uses the
new ones (layouts derived from them on a CPU are made anew). No K/V outlives a call, so none can be stale. Random
numbers are keyed by (seed, sample, position in the completion); pool size, batch, preemption and neighbours do not
enter. The model's bits do depend on the shape of the batch, so tokens agree between settings unless a uniform lies
within rounding of a boundary.
"""

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.burst import BurstRun
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.endings import ended, extend, failed
from rhotrain.rollout.job import Job, prepare
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.runner import Runner
from rhotrain.rollout.sampler import HostDraw
from rhotrain.rollout.scheduler import Group, Scheduler, Sequence
from rhotrain.rollout.sizing import pages_in
from rhotrain.rollout.stops import StopStrings
from rhotrain.rollout.threads import check_threads

OnFinish = Callable[[int, int, Completion], None]
OnTokens = Callable[[int], Any]

BATCH_TOKENS = {"cuda": 4096, "cpu": 1536}
"""Most tokens of a step where nothing is said. Prompts run 4 to 8 % faster on a CPU in
pieces that fit its cache."""

BURST_STEPS = 32
"""Most decode steps between two looks at the sequences; their pages are reserved, two of 16 tokens each at most."""


@dataclass(slots=True)
class EngineStats:
    """Numbers of the latest `generate` call.

    prefill_tokens: prompt tokens run for the first time, once per group. found_tokens: prompt tokens that were not run,
    because another prompt begins with the same pages. recomputed_tokens: tokens run again after a preemption.
    decode_tokens: tokens drawn (a copied greedy group counts once). preemptions: sequences put back because the pool
    was full. peak_pages: most pages held. prefill_seconds: steps that ran at least one prompt or recomputed token;
    decode_seconds: the others, without capture_seconds, which CUDA graphs took; pack_seconds: making derived layouts of
    the weights.
    """

    prefill_tokens: int = 0
    found_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capture_seconds: float = 0.0
    pack_seconds: float = 0.0
    peak_pages: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion that has ended: number `member` of prompt number `prompt`."""

    prompt: int
    member: int
    completion: Completion


class Engine:
    """Samples completions from `loaded`.

    The pool's size is `num_pages`, or what fits into `kv_memory_bytes`, or a quarter of the free memory, at most
    what max_running sequences of the model's full length take.
    page_size: tokens per page. max_batch_tokens: most tokens of one step, longer prompts run in chunks; None takes
    BATCH_TOKENS.
    max_running: most sequences that decode together.
    cuda_graphs: capture the decode step on a GPU. overlap: read a step's results after the next one was launched (None:
    on a GPU); the results are the same. threads: CPU threads of the steps, None for those that PyTorch has; see
    `threads.decode_threads`. tapes: on a CPU, replay recorded decode steps (`tape.py`); the results are the same.
    Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_memory_bytes: int | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int | None = None,
        max_running: int = 256,
        cuda_graphs: bool = True,
        overlap: bool | None = None,
        threads: int | None = None,
        tapes: bool = True,
    ) -> None:
        if not isinstance(loaded, LoadedModel):
            raise ValueError(
                f"Engine: {type(loaded).__name__} is no LoadedModel; take load_model(SPEC) or adopt_model(...)"
            )
        if max_batch_tokens is None:
            max_batch_tokens = BATCH_TOKENS["cpu" if loaded.device.type == "cpu" else "cuda"]
        sizes = {"max_batch_tokens": max_batch_tokens, "max_running": max_running, "page_size": page_size}
        given = {"threads": threads, "num_pages": num_pages, "kv_memory_bytes": kv_memory_bytes}
        for name, value in {**sizes, **{name: value for name, value in given.items() if value is not None}}.items():
            if type(value) is not int:
                raise ValueError(f"Engine.{name}: {value!r} is no integer; need a whole number of at least 1")
            if value < 1:
                raise ValueError(f"Engine.{name}: {value} is too small; need at least 1")
        check_threads("Engine.threads", threads)
        if kv_memory_bytes is not None and num_pages is not None:
            raise ValueError(
                f"Engine: both kv_memory_bytes={kv_memory_bytes} and num_pages={num_pages}; give one of them"
            )
        if num_pages is None:
            num_pages = pages_in(loaded, kv_memory_bytes, page_size, max_running)
        self.loaded = loaded
        self.pool = KVPool(num_pages, page_size)
        self.scheduler = Scheduler(self.pool, max_batch_tokens, max_running)
        self.runner = Runner(loaded, num_pages, page_size, cuda_graphs=cuda_graphs, tapes=tapes)
        self.stats = EngineStats()
        self.threads = threads
        self._ahead = int(loaded.device.type == "cuda" if overlap is None else overlap)
        self._job: Job | None = None

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        first_sample: int = 0,
        max_new_tokens: SequenceOf[int] | None = None,
        expected_tokens: SequenceOf[float] | None = None,
        on_finish: OnFinish | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """n completions of every prompt: groups in the order of the prompts, sample number first_sample + p * n + g.

        prompts: token ids. max_new_tokens: per prompt, in place of the one in `sampling`. expected_tokens: per prompt,
            how long its completions will probably be; the longest start first (default: the order of the prompts),
            which shortens the tail when not all of them run at once. Neither changes what is drawn.
        on_finish(p, g, completion) is called as completions end, on_tokens(count) after every step (for example the
            `update` of a progress bar whose total is prompts x n x max_new_tokens).
        Greedy (temperature 0) draws each group once and copies it: all its members are the same.
        kept_ids are recorded only when `sampling` truncates; else the kept set is the whole vocabulary.
        Logits that are NaN or infinite end a completion with finish_reason `error`; the others go on.

        Raises ValueError, before anything runs, for a prompt or a setting that cannot work.
        """
        options = {"max_new_tokens": max_new_tokens, "expected_tokens": expected_tokens, "on_tokens": on_tokens}
        steps = self.stream(prompts, sampling, n=n, first_sample=first_sample, **options)  # type: ignore[arg-type]
        groups: list[list[Completion | None]] = [[None] * n for _ in prompts]
        for done in steps:
            groups[done.prompt][done.member] = done.completion
            if on_finish is not None:
                on_finish(done.prompt, done.member, done.completion)
        return [[c for c in group if c is not None] for group in groups]

    def stream(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        first_sample: int = 0,
        max_new_tokens: SequenceOf[int] | None = None,
        expected_tokens: SequenceOf[float] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generator[Finished, None, None]:
        """As `generate`, but yields each completion as it ends. Steps run while the caller waits for the next one
        (`rollout/stream.py` runs them in a thread of their own); closing the iterator gives the pages back."""
        self._check_idle()
        job, groups = prepare(
            self.loaded, self.pool, prompts, sampling, n, first_sample, max_new_tokens, expected_tokens
        )
        return self._run(job, groups, on_tokens)

    def _run(self, job: Job, groups: list[Group], on_tokens: OnTokens | None) -> Generator[Finished, None, None]:
        """Queue the groups and step until all of them have ended."""
        self._check_idle()
        self._job = job
        self.stats = EngineStats()
        self.scheduler.preemptions = self.scheduler.found = self.pool.peak = 0
        try:
            self.runner.allocate()
            for group in groups:
                self.scheduler.add(group)
                if job.plan.params.stop_strings:
                    for member in group.members:
                        stops = StopStrings(self.loaded.tokenizer, job.plan.params.stop_strings, member.tokens)
                        job.stop_strings[member] = stops
            while self.scheduler.has_work:
                for sequence, completion in self._until_finished(job, on_tokens):
                    index = sequence.group.index
                    for g in range(sequence.member, job.n, job.width):
                        sample = job.first_sample + index * job.n + g
                        yield Finished(index, g, replace(completion, sample=sample))
        finally:
            self.scheduler.clear()
            self.pool.forget()
            self._clean()
            self._job = None

    def _until_finished(self, job: Job, on_tokens: OnTokens | None) -> list[tuple[Sequence, Completion]]:
        """Steps until one finishes something; between them the weights keep their layout."""
        packed = self.runner.pack_seconds
        with _threads(self.threads), torch.no_grad(), self.runner.weights():
            self.stats.pack_seconds += self.runner.pack_seconds - packed
            finished: list[tuple[Sequence, Completion]] = []
            while self.scheduler.has_work and not finished:
                before = self.stats.decode_tokens
                finished = self.step()
                if on_tokens is not None:
                    on_tokens((self.stats.decode_tokens - before) * (job.n // job.width))
        return finished

    def release(self) -> None:
        """Free the KV pool, captured graphs and derived layouts, say for the training phase; the next call allocates
        them again. Raises RuntimeError while a call is under way."""
        if self._job is not None:
            raise RuntimeError("Engine.release: a generate call is under way; close it first")
        self.pool.forget()
        self.runner.release()

    def release_weights(self) -> None:
        """Free the derived layouts of the weights alone. An update makes them stale anyway, so a training loop that
        calls this before it has their memory for the update at no cost. Raises RuntimeError while a call is under
        way."""
        if self._job is not None:
            raise RuntimeError("Engine.release_weights: a generate call is under way; close it first")
        self.runner.release_weights()

    def step(self) -> list[tuple[Sequence, Completion]]:
        """One step of the running call; returns what it finished.

        Raises RuntimeError when no call is under way, or when the weights moved on since it began.
        """
        job = self._job
        if job is None:
            raise RuntimeError("Engine.step: no generate call is under way; call generate")
        if self.loaded.policy_version != job.policy_version:
            raise RuntimeError(
                f"the weights went from policy_version {job.policy_version} to {self.loaded.policy_version} during a "
                "rollout; end it (close the stream) before the optimiser steps"
            )
        if job.burst is None:
            start = perf_counter()
            burst = self.scheduler.burst(BURST_STEPS)
            if burst is None:
                return self._mixed_step(job)
            job.burst = BurstRun(self.runner, burst, job.plan)
            self.stats.decode_seconds += perf_counter() - start
        return self._burst_step(job, job.burst)

    def _mixed_step(self, job: Job) -> list[tuple[Sequence, Completion]]:
        """A step that the scheduler composes anew: prompts, chunks, and decode rows beside them."""
        start, stats = perf_counter(), self.stats
        batch = self.scheduler.schedule()
        self._clean()
        sequences, host = self.runner.run(batch, job.plan)
        counts = self.scheduler.advance(batch)
        finished = [] if host is None else self._append(sequences, host, job)
        stats.steps += 1
        stats.prefill_tokens += counts.prompt
        stats.recomputed_tokens += counts.again
        stats.found_tokens = self.scheduler.found
        stats.preemptions = self.scheduler.preemptions
        stats.peak_pages = self.pool.peak
        seconds = perf_counter() - start
        if counts.prompt or counts.again:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
        return finished

    def _burst_step(self, job: Job, run: BurstRun) -> list[tuple[Sequence, Completion]]:
        """Launch a step of the burst and read what is due; at its end the sequences get what they drew."""
        start, stats, captured = perf_counter(), self.stats, self.runner.capture_seconds
        finished: list[tuple[Sequence, Completion]] = []
        if run.can_launch:
            run.launch()
            stats.steps += 1
        while run.pending > (self._ahead if run.can_launch else 0):
            finished += self._collect(job, run)
        if not run.can_launch or (finished and self.scheduler.interrupts()):
            while run.pending:
                finished += self._collect(job, run)
            for sequence in run.survivors():
                extend(sequence, run.drawn(sequence), self.scheduler)
            job.burst = None
        capturing = self.runner.capture_seconds - captured
        stats.peak_pages = self.pool.peak
        stats.capture_seconds += capturing
        stats.decode_seconds += perf_counter() - start - capturing
        return finished

    def _collect(self, job: Job, run: BurstRun) -> list[tuple[Sequence, Completion]]:
        """Read one step of a burst: the completions that ended in it."""
        step = run.collect()
        self.stats.decode_tokens += step.drawn
        found: dict[Sequence, str] = {}
        if job.stop_strings:
            for sequence, token in run.tokens(step):
                if token not in job.plan.stop_ids:
                    stop = job.stop_strings[sequence].add(token)
                    if stop is not None and run.drawn_count(sequence) > job.plan.params.min_new_tokens:
                        found[sequence] = stop
                        run.end(sequence)
        finished = []
        for sequence in dict.fromkeys((*step.ended, *found)):
            extend(sequence, run.drawn(sequence), self.scheduler)
            completion = failed(sequence, job) if sequence in step.errors else ended(sequence, job, found.get(sequence))
            assert completion is not None
            finished.append((sequence, completion))
        self._take_out(finished)
        return finished

    def _append(self, sequences: list[Sequence], host: HostDraw, job: Job) -> list[tuple[Sequence, Completion]]:
        """Append the tokens of a mixed step; the completions that ended in it."""
        finished = []
        columns = (host.token_ids.tolist(), host.logprobs.tolist(), host.kept_mass.tolist(), host.error.tolist())
        for index, (sequence, token, logprob, mass, error) in enumerate(zip(sequences, *columns)):
            if error:
                finished.append((sequence, failed(sequence, job)))
                continue
            self.stats.decode_tokens += 1
            below_minimum = sequence.drawn < job.plan.params.min_new_tokens
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.kept_mass.append(mass)
            if host.kept_ids is not None:
                sequence.kept_ids.append(host.kept_ids[index])
            stop = None
            if job.stop_strings and token not in job.plan.stop_ids:
                stop = job.stop_strings[sequence].add(token)
            completion = ended(sequence, job, None if below_minimum else stop)
            if completion is not None:
                finished.append((sequence, completion))
        self._take_out(finished)
        return finished

    def _check_idle(self) -> None:
        if self._job is not None:
            raise RuntimeError("generate: this engine is generating already; wait for that call to end")

    def _clean(self) -> None:
        """Zero the pages that were given up before anybody looked whether their logits were NaN."""
        if self.scheduler.left_behind:
            self.runner.pools.scrub(self.scheduler.left_behind)
            self.scheduler.left_behind.clear()

    def _take_out(self, finished: list[tuple[Sequence, Completion]]) -> None:
        """Free the pages of what ended."""
        for sequence, completion in finished:
            spoilt = completion.finish_reason == "error"
            freed = self.scheduler.finish(sequence, spoilt=spoilt)
            if spoilt:
                self.runner.pools.scrub(freed)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """PyTorch runs with this many threads inside; None leaves it alone."""
    before = torch.get_num_threads()
    if number is not None and number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
