"""What a `generate` call asks for: checked before anything runs, and made into groups in the order in which they
start."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

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
    if n < 1:
        raise ValueError(f"generate: n={n}; need at least 1 completion per prompt")
    for name, values in (("max_new_tokens", max_new_tokens), ("expected_tokens", expected_tokens)):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"generate: {len(values)} {name} for {len(prompts)} prompts; need one for each")
    limits = _limits(max_new_tokens, sampling, len(prompts))
    for index, (prompt, limit) in enumerate(zip(prompts, limits)):
        _check_fits(loaded, pool, index, prompt, limit)
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
