"""What a `generate` call asks for: checked before anything runs, and made into groups in the order in which they
start."""

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.burst import BurstRun
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.kv_pool import KVPool
from rhotrain.rollout.sampler import SamplingPlan
from rhotrain.rollout.scheduler import Group
from rhotrain.rollout.scheduler import Sequence as Row
from rhotrain.rollout.stops import StopStrings


@dataclass(slots=True)
class Job:
    """One `generate` call under way. width: completions drawn per prompt; a greedy group is drawn once and copied."""

    plan: SamplingPlan
    policy_version: int
    stop_strings: dict[Row, StopStrings]
    n: int
    width: int
    first_sample: int
    burst: BurstRun | None = None


def prepare(
    loaded: LoadedModel,
    pool: KVPool,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    n: int,
    first_sample: int,
    max_new_tokens: Sequence[int] | None,
    expected_tokens: Sequence[float] | None,
) -> tuple[Job, list[Group]]:
    """The job and its groups in the order in which they start. Raises ValueError for what cannot work."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"generate: sampling is {sampling!r:.60}; need SamplingParams(...)")
    if type(n) is not int or n < 1:
        raise ValueError(f"generate: n={n!r}; need at least 1 completion per prompt, as an integer")
    if type(first_sample) is not int or not 0 <= first_sample < 2**62:
        raise ValueError(f"generate: first_sample={first_sample!r}; need an integer from 0 to 2**62 - 1")
    for name, given in (("prompts", prompts), ("max_new_tokens", max_new_tokens), ("expected_tokens", expected_tokens)):
        if given is not None and (isinstance(given, str) or not hasattr(given, "__len__")):
            raise ValueError(f"generate: {name} is {given!r:.60}; need a list with an entry per prompt")
    for name, values in (("max_new_tokens", max_new_tokens), ("expected_tokens", expected_tokens)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"generate: {len(values)} {name} for {len(prompts)} prompts; need one for each")
    limits = _limits(max_new_tokens, sampling, len(prompts))
    for index, (prompt, limit) in enumerate(zip(prompts, limits)):
        _check_fits(loaded, pool, index, prompt, limit)
    expected = None if expected_tokens is None else list(expected_tokens)
    for index, value in enumerate(expected or ()):
        if not isinstance(value, (int, float, np.number)) or not value >= 0:
            raise ValueError(f"generate: expected_tokens[{index}]: {value!r} is no length; need a number >= 0")
    order = list(range(len(prompts)))
    if expected is not None:
        order.sort(key=lambda index: -expected[index])
    width = 1 if sampling.temperature == 0.0 else n
    groups = []
    for rank, index in enumerate(order):
        first = first_sample + index * n
        samples = list(range(first, first + width))
        groups.append(Group.make(index, list(prompts[index]), samples, limits[index], rank=rank))
    return Job(_plan(loaded, sampling), loaded.policy_version, {}, n, width, first_sample), groups


def _plan(loaded: LoadedModel, sampling: SamplingParams) -> SamplingPlan:
    """The sampler's plan. Raises ValueError for stop ids outside the vocabulary."""
    vocab = loaded.vocab_size
    outside = [i for i in sampling.stop_token_ids if i >= vocab]
    if outside:
        raise ValueError(
            f"SamplingParams.stop_token_ids: {outside} are outside the vocabulary of {vocab} ids; remove them"
        )
    own = () if sampling.ignore_eos else loaded.stop_token_ids
    stops = frozenset(own) | frozenset(sampling.stop_token_ids)
    if sampling.min_new_tokens and len(stops) >= vocab:
        raise ValueError(
            f"SamplingParams.min_new_tokens: {sampling.min_new_tokens}, but all {vocab} ids are stop ids; set it to 0"
        )
    return SamplingPlan(sampling, stops, vocab, loaded.device)


def _check_fits(loaded: LoadedModel, pool: KVPool, index: int, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Refuse a prompt that can never run. Raises ValueError with the numbers."""
    if isinstance(prompt, str):
        raise ValueError(f"prompt {index}: {prompt!r:.40} is text; encode it first, for example tokenizer.encode(text)")
    try:
        array("q", prompt)
    except (TypeError, OverflowError):
        raise ValueError(f"prompt {index}: {prompt!r:.60} is no list of token ids; need integers") from None
    rows = loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(prompt) == 0:
        raise ValueError(f"prompt {index}: it has no tokens; a prompt needs at least one (for example BOS)")
    if min(prompt) < 0 or max(prompt) >= rows:
        raise ValueError(
            f"prompt {index}: ids range from {min(prompt)} to {max(prompt)}; need ids from 0 to {rows - 1}"
        )
    total = len(prompt) + max_new_tokens
    named = f"prompt {index}: {len(prompt)} tokens + max_new_tokens {max_new_tokens} = {total}"
    limit = loaded.max_positions
    if limit is not None and total > limit:
        raise ValueError(f"{named}, but the model has {limit} positions; shorten one of them")
    pages = pool.pages_for(total - 1)
    if pages > pool.num_pages:
        raise ValueError(
            f"{named} takes {pages} pages of {pool.page_size} tokens, but the KV pool has "
            f"{pool.num_pages}; raise kv_memory_bytes or num_pages, or shorten one of them"
        )


def _limits(given: Sequence[int] | None, sampling: SamplingParams, prompts: int) -> list[int]:
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
