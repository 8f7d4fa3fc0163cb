"""Prompts in, groups of completions out: schedule -> run -> postprocess over a paged KV pool of fixed size.

    engine = Engine(load_model("smollm2"), kv_memory_bytes=2 << 30)
    groups = engine.generate(prompts, SamplingParams(temperature=1.0), n=8)

The weights are the trainer's own tensors: nothing is copied or synchronised, and a generate call after an
optimiser step uses the new ones. No K/V outlives a call, so none can be stale. Random numbers are keyed by (seed,
sample, position in the completion); pool size, batch, preemption and neighbours do not enter. The model's bits do
depend on the shape of the batch, so tokens agree between settings unless a uniform lies within rounding of a
boundary.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.completion import Completion, FinishReason, SamplingParams
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.runner import Draw, Runner, SamplingPlan, page_bytes
from rhotrain.rollout.scheduler import Group, Scheduler, Sequence

OnFinish = Callable[[int, int, Completion], None]
OnTokens = Callable[[int], Any]

TAIL_TOKENS = 6
"""Tokens that are decoded again with each new one: bytes and leading spaces read differently on their own."""


@dataclass(slots=True)
class EngineStats:
    """Numbers of the latest `generate` call.

    prefill_tokens: prompt tokens run for the first time, once per group. recomputed_tokens: tokens run again after a
    preemption. decode_tokens: tokens drawn (a copied greedy group counts once). preemptions: sequences put back because
    the pool was full. peak_pages: most pages held.
    prefill_seconds: steps that ran at least one prompt or recomputed token; decode_seconds: the others.
    """

    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_pages: int = 0


class StopStrings:
    """Finds stop strings in one completion's text, token by token, across token boundaries.

    Only the tail is decoded. A text that ends in U+FFFD may hold half a character: what is complete is searched, and
    the tail is decoded again with the next token. Special tokens count as text: a stop string may name them.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.ids = prompt[-TAIL_TOKENS:]
        self.known = self._decode()
        self.tail = ""

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop string that ends first in the text it adds, or None."""
        self.ids.append(token_id)
        text = self._decode()
        window = self.tail + text[len(self.known) :]
        found = []
        for stop in self.stops:
            # A match must end in the new part; earlier ones were seen (or lie below min_new_tokens).
            at = window.find(stop, max(0, len(self.tail) - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), stop))
        # Endless broken bytes would let the tail grow with the completion; give up on them after a while.
        if not text.endswith("\ufffd") or len(self.ids) > 4 * TAIL_TOKENS:
            self.tail = window[-max(map(len, self.stops)) :]
            self.ids = self.ids[-TAIL_TOKENS:]
            self.known = self._decode()
        return min(found)[1] if found else None

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(slots=True)
class Job:
    """One `generate` call under way."""

    plan: SamplingPlan
    policy_version: int
    stop_strings: dict[Sequence, StopStrings]


class Engine:
    """Samples completions from `loaded`.

    The pool's size is `num_pages`, or what fits into `kv_memory_bytes`, or a quarter of the free memory, at most
    what max_running sequences of the model's full length take.
    page_size: tokens per page. max_batch_tokens: most tokens of one step; longer prompts run in chunks.
    max_running: most sequences that decode together.
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
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_running", max_running)):
            if value < 1:
                raise ValueError(f"Engine.{name}: {value} is too small; need at least 1")
        if kv_memory_bytes is not None and num_pages is not None:
            raise ValueError(
                f"Engine: both kv_memory_bytes={kv_memory_bytes} and num_pages={num_pages}; give one of them"
            )
        if num_pages is None:
            num_pages = _pages_in(loaded, kv_memory_bytes, page_size, max_running)
        self.loaded = loaded
        self.pool = KVPool(num_pages, page_size)
        self.scheduler = Scheduler(self.pool, max_batch_tokens, max_running)
        self.runner = Runner(loaded, num_pages, page_size)
        self.stats = EngineStats()
        self._job: Job | None = None

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        first_sample: int = 0,
        on_finish: OnFinish | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """n completions of every prompt: groups in the order of the prompts, sample number first_sample + p * n + g.

        prompts: token ids. on_finish(p, g, completion) is called as completions end, on_tokens(count) after every step
        (for example the `update` of a progress bar whose total is prompts x n x max_new_tokens).
        Greedy (temperature 0) draws each group once and copies it: all its members are the same.
        kept_ids are recorded only when `sampling` truncates; else the kept set is the whole vocabulary.
        Logits that are NaN or infinite end a completion with finish_reason `error`; the others go on.
        Raises ValueError, before anything runs, for a prompt or a setting that cannot work.
        """
        if n < 1:
            raise ValueError(f"generate: n={n}; need at least 1 completion per prompt")
        if self._job is not None:
            raise RuntimeError("generate: this engine is generating already; wait for that call to end")
        plan = self._plan(sampling)
        width = 1 if sampling.temperature == 0.0 else n
        for index, prompt in enumerate(prompts):
            self._check_fits(index, prompt, sampling)
        self._begin(plan, prompts, width, n, first_sample)
        groups: list[list[Completion | None]] = [[None] * n for _ in prompts]
        try:
            while self.scheduler.has_work:
                before = self.stats.decode_tokens
                for sequence, completion in self.step():
                    for g in range(sequence.member, n, width):
                        member = replace(completion, sample=first_sample + sequence.group.index * n + g)
                        groups[sequence.group.index][g] = member
                        if on_finish is not None:
                            on_finish(sequence.group.index, g, member)
                if on_tokens is not None:
                    on_tokens((self.stats.decode_tokens - before) * (n // width))
        finally:
            self.scheduler.clear()
            self._job = None
        return [[c for c in group if c is not None] for group in groups]

    def step(self) -> list[tuple[Sequence, Completion]]:
        """One step of the running call; returns what it finished."""
        if self._job is None:
            raise RuntimeError("Engine.step: no generate call is under way; call generate")
        start = perf_counter()
        batch = self.scheduler.schedule()
        draws = self.runner.run(batch, self._job.plan)
        counts = self.scheduler.advance(batch)
        finished = self._postprocess(draws, self._job)
        seconds = perf_counter() - start
        stats = self.stats
        stats.steps += 1
        stats.prefill_tokens += counts.prompt
        stats.recomputed_tokens += counts.again
        stats.decode_tokens += sum(not draw.error for draw in draws)
        stats.preemptions = self.scheduler.preemptions
        stats.peak_pages = self.pool.peak
        if counts.prompt or counts.again:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
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

    def _check_fits(self, index: int, prompt: SequenceOf[int], sampling: SamplingParams) -> None:
        """Refuse a prompt that can never run. Raises ValueError with the numbers."""
        rows = self.loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if len(prompt) == 0:
            raise ValueError(f"prompt {index}: it has no tokens; a prompt needs at least one (for example BOS)")
        if min(prompt) < 0 or max(prompt) >= rows:
            raise ValueError(
                f"prompt {index}: ids range from {min(prompt)} to {max(prompt)}; need ids from 0 to {rows - 1}"
            )
        total = len(prompt) + sampling.max_new_tokens
        named = f"prompt {index}: {len(prompt)} tokens + max_new_tokens {sampling.max_new_tokens} = {total}"
        limit = self.loaded.max_positions
        if limit is not None and total > limit:
            raise ValueError(f"{named}, but the model has {limit} positions; shorten one of them")
        pages = self.pool.pages_for(total - 1)
        if pages > self.pool.num_pages:
            raise ValueError(
                f"{named} takes {pages} pages of {self.pool.page_size} tokens, but the KV pool has "
                f"{self.pool.num_pages}; raise kv_memory_bytes or num_pages, or shorten one of them"
            )

    def _begin(
        self, plan: SamplingPlan, prompts: SequenceOf[SequenceOf[int]], width: int, n: int, first_sample: int
    ) -> None:
        """Queue one group of `width` members per prompt and start the counts anew."""
        self.stats = EngineStats()
        self.scheduler.preemptions = 0
        self.pool.peak = 0
        self._job = Job(plan, self.loaded.policy_version, {})
        for index, prompt in enumerate(prompts):
            first = first_sample + index * n
            samples = list(range(first, first + width))
            group = Group.make(index, list(prompt), samples, plan.params.max_new_tokens)
            self.scheduler.add(group)
            if plan.params.stop_strings:
                for member in group.members:
                    stops = StopStrings(self.loaded.tokenizer, plan.params.stop_strings, member.tokens)
                    self._job.stop_strings[member] = stops

    def _postprocess(self, draws: list[Draw], job: Job) -> list[tuple[Sequence, Completion]]:
        """Append the drawn tokens; take out and return the sequences that are complete."""
        finished = []
        for draw in draws:
            completion = self._append(draw, job)
            if completion is not None:
                freed = self.scheduler.finish(draw.sequence)
                if draw.error:
                    self.runner.scrub(freed)
                finished.append((draw.sequence, completion))
        return finished

    def _append(self, draw: Draw, job: Job) -> Completion | None:
        """Append one token to its sequence. Returns the completion when that ends it."""
        sequence, params = draw.sequence, job.plan.params
        if draw.error:
            message = (
                f"the logits of token {sequence.drawn} of sample {sequence.sample} are NaN or infinite "
                f"(policy_version {job.policy_version}); look at the weights and the last gradient norm"
            )
            return _completion(sequence, job, "error", error=message)
        below_minimum = sequence.drawn < params.min_new_tokens
        sequence.tokens.append(draw.token_id)
        sequence.logprobs.append(draw.logprob)
        sequence.kept_mass.append(draw.kept_mass)
        if draw.kept_ids is not None:
            sequence.kept_ids.append(draw.kept_ids)
        if draw.token_id in job.plan.stop_ids:
            return _completion(sequence, job, "stop", stop_reason=draw.token_id)
        if params.stop_strings:
            found = job.stop_strings[sequence].add(draw.token_id)
            if found is not None and not below_minimum:
                return _completion(sequence, job, "stop", stop_reason=found)
        if sequence.drawn == params.max_new_tokens:
            return _completion(sequence, job, "length")
        return None


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


def plan_pages(
    loaded: LoadedModel, prompt_lens: SequenceOf[int], n: int, max_new_tokens: int, page_size: int = 16
) -> int:
    """Pages with which n completions of every prompt run together and nothing is ever preempted.

    A group's full prompt pages count once. Lengths are capped at the model's positions.
    """
    limit = loaded.max_positions or float("inf")
    pages = 0
    for length in prompt_lens:
        shared = length // page_size
        stored = int(min(length + max_new_tokens, limit)) - 1
        pages += shared + n * max(0, -(-stored // page_size) - shared)
    return max(1, pages)


def affordable_pages(loaded: LoadedModel, wanted: int, page_size: int, memory: int = 0) -> int:
    """`wanted` pages, or what fits into `memory` bytes (0: a quarter of what is free) if that is less; at least 1."""
    limit = memory or free_memory(loaded.device) // 4
    return max(1, min(wanted, limit // page_bytes(loaded, page_size)))


def free_memory(device: torch.device) -> int:
    """Free bytes on the device that holds the model."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _pages_in(loaded: LoadedModel, memory: int | None, page_size: int, max_running: int) -> int:
    """Pages that fit into `memory` bytes (default: see Engine). Raises ValueError when not even one does."""
    if page_size < 1:
        raise ValueError(f"Engine.page_size: {page_size} is too small; need at least 1")
    size = page_bytes(loaded, page_size)
    pages = (free_memory(loaded.device) // 4 if memory is None else memory) // size
    if pages < 1:
        raise ValueError(f"Engine.kv_memory_bytes: {memory} holds no page; one page takes {size} bytes")
    if memory is None and loaded.max_positions is not None:
        pages = min(pages, max_running * -(-loaded.max_positions // page_size))
    return pages
