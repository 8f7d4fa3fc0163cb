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

import operator
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.burst import BurstRun, Drawn
from rhotrain.rollout.completion import Completion, FinishReason, SamplingParams
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.runner import Runner
from rhotrain.rollout.sampler import HostDraw, SamplingPlan
from rhotrain.rollout.scheduler import Group, Scheduler, Sequence
from rhotrain.rollout.sizing import pages_in
from rhotrain.rollout.stops import StopStrings

OnFinish = Callable[[int, int, Completion], None]
OnTokens = Callable[[int], Any]

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


@dataclass(slots=True)
class Job:
    """One `generate` call under way. width: completions drawn per prompt; a greedy group is drawn once and copied."""

    plan: SamplingPlan
    policy_version: int
    stop_strings: dict[Sequence, StopStrings]
    n: int
    width: int
    first_sample: int
    burst: BurstRun | None = None


class Engine:
    """Samples completions from `loaded`.

    The pool's size is `num_pages`, or what fits into `kv_memory_bytes`, or a quarter of the free memory, at most
    what max_running sequences of the model's full length take.
    page_size: tokens per page. max_batch_tokens: most tokens of one step; longer prompts run in chunks.
    max_running: most sequences that decode together.
    cuda_graphs: capture the decode step on a GPU. overlap: read a step's results after the next one was launched (None:
    on a GPU); the results are the same. threads: CPU threads of the steps, None for those that PyTorch has; see
    `threads.decode_threads`.
    Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_memory_bytes: int | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int = 4096,
        max_running: int = 256,
        cuda_graphs: bool = True,
        overlap: bool | None = None,
        threads: int | None = None,
    ) -> None:
        sizes = (("max_batch_tokens", max_batch_tokens), ("max_running", max_running), ("threads", threads))
        for name, value in sizes:
            if value is not None and value < 1:
                raise ValueError(f"Engine.{name}: {value} is too small; need at least 1")
        if kv_memory_bytes is not None and num_pages is not None:
            raise ValueError(
                f"Engine: both kv_memory_bytes={kv_memory_bytes} and num_pages={num_pages}; give one of them"
            )
        if num_pages is None:
            num_pages = pages_in(loaded, kv_memory_bytes, page_size, max_running)
        self.loaded = loaded
        self.pool = KVPool(num_pages, page_size)
        self.scheduler = Scheduler(self.pool, max_batch_tokens, max_running)
        self.runner = Runner(loaded, num_pages, page_size, cuda_graphs=cuda_graphs)
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
        how long its completions will probably be; the longest start first (default: the order of the prompts), which
        shortens the tail when not all of them run at once. Neither the order nor the neighbours change what is drawn.
        on_finish(p, g, completion) is called as completions end, on_tokens(count) after every step (for example the
        `update` of a progress bar whose total is prompts x n x max_new_tokens). Greedy (temperature 0) draws each group
        once and copies it: all its members are the same. kept_ids are recorded only when `sampling` truncates; else the
        kept set is the whole vocabulary. Logits that are NaN or infinite end a completion with finish_reason `error`;
        the others go on. Raises ValueError, before anything runs, for a prompt or a setting that cannot work.
        """
        groups: list[list[Completion | None]] = [[None] * max(n, 1) for _ in prompts]
        options = {"max_new_tokens": max_new_tokens, "expected_tokens": expected_tokens, "on_tokens": on_tokens}
        for done in self.stream(prompts, sampling, n=n, first_sample=first_sample, **options):  # type: ignore[arg-type]
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
        job, groups = self._prepare(prompts, sampling, n, first_sample, max_new_tokens, expected_tokens)
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
                _extend(sequence, run.drawn(sequence), self.scheduler)
            job.burst = None
        capturing = self.runner.capture_seconds - captured
        stats.peak_pages = self.pool.peak
        stats.capture_seconds += capturing
        stats.decode_seconds += perf_counter() - start - capturing
        return finished

    def _collect(self, job: Job, run: BurstRun) -> list[tuple[Sequence, Completion]]:
        """Read one step of a burst: the completions that ended in it."""
        step = run.collect()
        self.stats.decode_tokens += len(step.sequences) - len(step.errors)
        found: dict[Sequence, str] = {}
        if job.stop_strings:
            for sequence, token in zip(step.sequences, step.tokens):
                if sequence not in step.errors and token not in job.plan.stop_ids:
                    stop = job.stop_strings[sequence].add(token)
                    if stop is not None and run.drawn_count(sequence) > job.plan.params.min_new_tokens:
                        found[sequence] = stop
                        run.end(sequence)
        finished = []
        for sequence in dict.fromkeys((*step.ended, *found)):
            _extend(sequence, run.drawn(sequence), self.scheduler)
            failed = sequence in step.errors
            completion = self._failed(sequence, job) if failed else _ended(sequence, job, found.get(sequence))
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
                finished.append((sequence, self._failed(sequence, job)))
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
            completion = _ended(sequence, job, None if below_minimum else stop)
            if completion is not None:
                finished.append((sequence, completion))
        self._take_out(finished)
        return finished

    def _plan(self, sampling: SamplingParams) -> SamplingPlan:
        """The sampler's plan. Raises ValueError for stop ids outside the vocabulary."""
        vocab = self.loaded.vocab_size
        outside = [i for i in sampling.stop_token_ids if i >= vocab]
        if outside:
            raise ValueError(
                f"SamplingParams.stop_token_ids: {outside} are outside the vocabulary of {vocab} ids; remove them"
            )
        own = () if sampling.ignore_eos else self.loaded.stop_token_ids
        stops = frozenset(own) | frozenset(sampling.stop_token_ids)
        if sampling.min_new_tokens and len(stops) >= vocab:
            raise ValueError(
                f"SamplingParams.min_new_tokens: {sampling.min_new_tokens}, but all {vocab} ids are stop ids; "
                "set it to 0"
            )
        return SamplingPlan(sampling, stops, vocab, self.loaded.device)

    def _check_fits(self, index: int, prompt: SequenceOf[int], max_new_tokens: int) -> None:
        """Refuse a prompt that can never run. Raises ValueError with the numbers."""
        rows = self.loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if len(prompt) == 0:
            raise ValueError(f"prompt {index}: it has no tokens; a prompt needs at least one (for example BOS)")
        if min(prompt) < 0 or max(prompt) >= rows:
            raise ValueError(
                f"prompt {index}: ids range from {min(prompt)} to {max(prompt)}; need ids from 0 to {rows - 1}"
            )
        total = len(prompt) + max_new_tokens
        named = f"prompt {index}: {len(prompt)} tokens + max_new_tokens {max_new_tokens} = {total}"
        limit = self.loaded.max_positions
        if limit is not None and total > limit:
            raise ValueError(f"{named}, but the model has {limit} positions; shorten one of them")
        pages = self.pool.pages_for(total - 1)
        if pages > self.pool.num_pages:
            raise ValueError(
                f"{named} takes {pages} pages of {self.pool.page_size} tokens, but the KV pool has "
                f"{self.pool.num_pages}; raise kv_memory_bytes or num_pages, or shorten one of them"
            )

    def _prepare(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams,
        n: int,
        first_sample: int,
        max_new_tokens: SequenceOf[int] | None,
        expected_tokens: SequenceOf[float] | None,
    ) -> tuple[Job, list[Group]]:
        """The job and its groups in the order in which they start. Raises ValueError for what cannot work."""
        if n < 1:
            raise ValueError(f"generate: n={n}; need at least 1 completion per prompt")
        self._check_idle()
        for name, values in (("max_new_tokens", max_new_tokens), ("expected_tokens", expected_tokens)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"generate: {len(values)} {name} for {len(prompts)} prompts; need one for each")
        limits = _limits(max_new_tokens, sampling, len(prompts))
        for index, (prompt, limit) in enumerate(zip(prompts, limits)):
            self._check_fits(index, prompt, limit)
        for index, value in enumerate(expected_tokens or ()):
            if not value >= 0:
                raise ValueError(f"generate: expected_tokens[{index}]: {value} is no length; need a number >= 0")
        order = list(range(len(prompts)))
        if expected_tokens is not None:
            order.sort(key=lambda index: -expected_tokens[index])
        width = 1 if sampling.temperature == 0.0 else n
        groups = []
        for rank, index in enumerate(order):
            first = first_sample + index * n
            samples = list(range(first, first + width))
            groups.append(Group.make(index, list(prompts[index]), samples, limits[index], rank=rank))
        return Job(self._plan(sampling), self.loaded.policy_version, {}, n, width, first_sample), groups

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

    def _failed(self, sequence: Sequence, job: Job) -> Completion:
        """The completion of a sequence whose next logits were NaN or infinite."""
        message = (
            f"the logits of token {sequence.drawn} of sample {sequence.sample} are NaN or infinite "
            f"(policy_version {job.policy_version}); look at the weights and the last gradient norm"
        )
        return _completion(sequence, job, "error", error=message)


def _limits(given: SequenceOf[int] | None, sampling: SamplingParams, prompts: int) -> list[int]:
    """max_new_tokens of every prompt. Raises ValueError for what is no number of tokens."""
    if given is None:
        return [sampling.max_new_tokens] * prompts
    least, limits = max(1, sampling.min_new_tokens), []
    for index, value in enumerate(given):
        try:
            limits.append(operator.index(value))
        except TypeError:
            raise ValueError(f"generate: max_new_tokens[{index}]: {value!r} is no integer") from None
        if limits[-1] < least:
            raise ValueError(f"generate: max_new_tokens[{index}]: {value} is too small; need at least {least}")
    return limits


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


def _extend(sequence: Sequence, drawn: Drawn, scheduler: Scheduler) -> None:
    """Append what a sequence drew in a burst."""
    scheduler.settle(sequence, drawn.token_ids)
    sequence.logprobs += drawn.logprobs
    sequence.kept_mass += drawn.kept_mass
    if drawn.kept_ids is not None:
        sequence.kept_ids += drawn.kept_ids


def _ended(sequence: Sequence, job: Job, stop_string: str | None) -> Completion | None:
    """The completion that the newest token ends: by a stop id, a stop string or its number; None when it goes on."""
    if sequence.tokens[-1] in job.plan.stop_ids:
        return _completion(sequence, job, "stop", stop_reason=sequence.tokens[-1])
    if stop_string is not None:
        return _completion(sequence, job, "stop", stop_reason=stop_string)
    return _completion(sequence, job, "length") if sequence.left == 0 else None


def _completion(
    sequence: Sequence,
    job: Job,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    error: str | None = None,
) -> Completion:
    return Completion(
        token_ids=tuple(sequence.tokens[sequence.group.prompt_len :]),
        logprobs=tuple(sequence.logprobs),
        kept_mass=tuple(sequence.kept_mass),
        finish_reason=reason,
        policy_version=job.policy_version,
        sample=sequence.sample,
        stop_reason=stop_reason,
        kept_ids=tuple(sequence.kept_ids) if job.plan.records_sets else None,
        error=error,
    )
