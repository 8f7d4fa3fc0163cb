"""The token budget measured: what a forward and backward pass takes, and how many tokens the free memory holds.

Measuring: the peak memory of a forward and backward pass is a fixed part (gradients, a layer's work, the head's chunk)
plus so many bytes per packed token, so two synthetic micro-batches give the line. (Where softcap or sinks leave only
plain attention, its scores grow faster; then backing off has the last word.) On CUDA the allocator's own peak is read;
elsewhere every tensor is followed from its making to its end, which needs no clean process and repeats exactly. The
budget is what the free memory holds beside what is allocated later (KV pool, optimiser moments) and a margin.

On a CPU more than 1024 tokens, or one whole group, are not used: SmolLM2-135M in float32, 2048 tokens on two cores of
an AMD EPYC with torch 2.13 runs 112 to 128, 143, 134 and 134 tokens/s in micro-batches of 256, 512, 1024 and 2048
tokens, while the process grows from 2.3 to 2.8, 3.7 and 4.3 GiB.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rhotrain.rollout.completion import Completion
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.sizing import free_memory, page_bytes
from rhotrain.train.batching import TokenTable, make_batch, make_table, token_weights
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.inner_loop import Learner
from rhotrain.train.optim import moment_bytes
from rhotrain.train.step import TokenResults, run_batches
from rhotrain.train.token_budget import KNOBS, out_of_memory

MARGIN = 0.1
"""Share of the free memory that a measured budget leaves for fragmentation and the libraries' workspaces."""

CPU_TOKENS = 1024
"""Most tokens of a measured budget on a CPU, unless one group is longer; see above."""

MEASURED_TOKENS = {"cpu": 64, "cuda": 2048}
"""Size of the smaller of the two measured micro-batches, at most; the other is twice as large."""


@dataclass(frozen=True)
class Footprint:
    """Peak memory in bytes of a forward and backward pass over T packed tokens: fixed + per_token * T while the layers
    run, and at least `least`, which the gradient of the embedding takes at the end of any pass."""

    fixed: float
    per_token: float
    least: float = 0.0

    @staticmethod
    def through(small: tuple[int, int], large: tuple[int, int], least: float = 0.0) -> "Footprint":
        """The line through two measurements (tokens, bytes); neither part is negative."""
        slope = max(1.0, (large[1] - small[1]) / (large[0] - small[0]))
        return Footprint(max(0.0, small[1] - slope * small[0]), slope, least)

    def tokens_in(self, memory: float) -> int:
        """Most tokens whose pass fits into `memory` bytes."""
        return 0 if memory < self.least else max(0, int((memory - self.fixed) // self.per_token))

    def bytes_of(self, tokens: int) -> float:
        """The peak of so many tokens."""
        return max(self.least, self.fixed + self.per_token * tokens)


class PeakMemory(TorchDispatchMode):
    """Follows the storages that operators make inside, on any device, through backward passes too: `peak` is the most
    bytes of them that were alive at once. Scratch memory inside an operator is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor, before)
        return out

    def _follow(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in before:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class _AllocatorPeak(AbstractContextManager[None]):
    """The same of PyTorch's CUDA allocator, which knows everything."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        torch.cuda.empty_cache()
        self.start = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *error: object) -> None:
        torch.cuda.empty_cache()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.start


@dataclass(frozen=True)
class Shape:
    """The group that the measurement stands for: its prompt, its completions, and tokens of each. Completions of a
    quarter of max_new_tokens: shared prompts gather keys for every completion, so short ones cost most per token."""

    prompt_tokens: int
    new_tokens: int
    members: int

    @property
    def tokens(self) -> int:
        """Packed, with the prompt once."""
        return self.prompt_tokens + self.members * (self.new_tokens - 1)

    @staticmethod
    def scaled(prompt_tokens: int, max_new_tokens: int, members: int, limit: int) -> "Shape":
        """A group of about `limit` packed tokens at most, with the proportions of a long prompt's."""
        new = max(2, max_new_tokens // 4)
        share = min(1.0, limit / (prompt_tokens + members * new))
        return Shape(max(1, int(prompt_tokens * share)), max(2, int(new * share)), members)


def synthetic_table(learner: Learner, shape: Shape, groups: int) -> TokenTable:
    """Groups of ids spread over the vocabulary, every token with loss."""
    loaded = learner.loaded

    def ids(seed: int, number: int) -> tuple[int, ...]:
        return tuple((seed * 7919 + k * 104_729) % loaded.vocab_size for k in range(number))

    def completion(sample: int) -> Completion:
        return Completion(
            token_ids=ids(2 * sample, shape.new_tokens),
            logprobs=(-1.0,) * shape.new_tokens,
            kept_mass=(1.0,) * shape.new_tokens,
            finish_reason="length",
            policy_version=loaded.policy_version,
            sample=sample,
        )

    table = make_table(
        [
            (ids(2 * p + 1, shape.prompt_tokens), [completion(p * shape.members + g) for g in range(shape.members)])
            for p in range(groups)
        ],
        dtype=torch.promote_types(loaded.dtype, torch.float32),
    )
    table.set_advantages(torch.ones(groups, shape.members, dtype=torch.float64))
    table.old_logprobs = table.sampling_logprobs
    table.ref_logprobs = table.sampling_logprobs if learner.objective.uses_reference else None
    return table


def measure_footprint(learner: Learner, shape: Shape) -> Footprint:
    """Run one group and then two forward and backward. No step is taken, gradients are dropped, the random state stays.

    The line goes through the peaks before the embedding's backward pass: behind it lie whole gradients of the
    vocabulary's size, which hide the activations of a short pass. For the same reason a pass over a few tokens comes
    first: gradients that are there already are a fixed part. Raises what PyTorch raises when memory runs out.
    """
    device = learner.loaded.device
    peaks: _AllocatorPeak | PeakMemory = _AllocatorPeak(device) if device.type == "cuda" else PeakMemory()
    in_layers: list[int] = []
    points, least = [], 0

    def watch(module: Any, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: in_layers.append(peaks.peak))

    hook = learner.loaded.body.get_input_embeddings().register_forward_hook(watch)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), peaks:
            _pass(learner, synthetic_table(learner, Shape(1, 2, 1), 1))
            for groups in (1, 2):
                peaks.restart()
                in_layers.clear()
                _pass(learner, synthetic_table(learner, shape, groups))
                points.append((groups * shape.tokens, in_layers[0] if in_layers else peaks.peak))
                least = least or peaks.peak
    finally:
        hook.remove()
        learner.optimizer.zero_grad()
    return Footprint.through(points[0], points[1], least)


def _pass(learner: Learner, table: TokenTable) -> None:
    """Forward and backward over the whole table as one micro-batch; gradients stay."""
    everything = range(len(table.trajectories))
    weights = token_weights(table, everything, aggregation="token", max_new_tokens=1)
    results = TokenResults.empty(len(table.token_ids), table.dtype)
    batch, temperature = make_batch(table, everything), learner.temperature
    run_batches(learner.loaded, table, [batch], weights, learner.objective, results, temperature=temperature)


@dataclass(frozen=True)
class Room:
    """What a measured budget is chosen from; bytes. free: now, with the weights loaded. later: what is allocated after
    the measurement and stays (KV pool, optimiser moments). longest, group, rollout: tokens of one prompt with its
    completion, of one whole group, and of a whole rollout, at most. cpu: whether the model runs on one."""

    free: int
    later: int
    longest: int
    group: int
    rollout: int
    cpu: bool

    def budget(self, footprint: Footprint) -> int:
        """Most tokens of a micro-batch. Raises ConfigError, with the knobs, when not even one trajectory fits."""
        memory = self.free * (1.0 - MARGIN) - self.later
        fits = footprint.tokens_in(memory)
        if fits < self.longest:
            gib, need = 2.0**30, footprint.bytes_of(self.longest)
            raise ConfigError(
                f"token_budget: 0 does not work; {self.free / gib:.2f} GiB are free, KV pool and optimiser will take "
                f"{self.later / gib:.2f} of them, and a micro-batch of {self.longest} tokens (one prompt and its "
                f"completion) takes {need / gib:.2f} GiB; {KNOBS}, or set token_budget yourself"
            )
        most = min(self.rollout, max(CPU_TOKENS, self.group)) if self.cpu else self.rollout
        return max(self.longest, min(fits, most))


def measured(learner: Learner, room: Room, *, prompt_tokens: int, max_new_tokens: int, members: int) -> tuple[int, str]:
    """(token budget, a line for the log), measured on ever smaller groups where memory runs out.

    Raises ConfigError when one trajectory does not fit.
    """
    limit = MEASURED_TOKENS["cpu" if room.cpu else "cuda"]
    while True:
        shape = Shape.scaled(prompt_tokens, max_new_tokens, members, limit)
        try:
            footprint = measure_footprint(learner, shape)
            break
        except RuntimeError as error:
            if not out_of_memory(error) or limit < 32:
                raise
        limit //= 2
    tokens = room.budget(footprint)
    return tokens, (
        f"token_budget: {tokens} (a pass takes {footprint.fixed / 2**30:.2f} GiB + {footprint.per_token / 2**20:.2f} "
        f"MiB per token; {room.free / 2**30:.1f} GiB are free)"
    )


def resolve(learner: Learner, engine: Engine, config: Config, longest_prompt: int) -> str:
    """Measure where token_budget is 0 and set the learner's budget; a line for the log, empty where nothing was done.

    Raises ConfigError when one trajectory does not fit.
    """
    if learner.token_budget.tokens > 0:
        return ""
    rollout, device = config.rollout, learner.loaded.device
    pool = engine.pool.num_pages * page_bytes(learner.loaded, engine.pool.page_size)
    room = Room(
        free=free_bytes(device),
        later=moment_bytes(learner.loaded.parameters(), config.optim) + (0 if rollout.release_memory else pool),
        longest=longest_prompt + rollout.max_new_tokens - 1,
        group=longest_prompt + rollout.group_size * (rollout.max_new_tokens - 1),
        rollout=rollout.prompts_per_step * (longest_prompt + rollout.group_size * (rollout.max_new_tokens - 1)),
        cpu=device.type == "cpu",
    )
    learner.token_budget.tokens, note = measured(
        learner,
        room,
        prompt_tokens=longest_prompt,
        max_new_tokens=rollout.max_new_tokens,
        members=rollout.group_size,
    )
    return note


def free_bytes(device: torch.device) -> int:
    """What PyTorch can still allocate: free on the device, and what its allocator holds unused."""
    if device.type != "cuda":
        return free_memory(device)
    return free_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
