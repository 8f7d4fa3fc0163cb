"""Rollouts that no engine made, a learner that only records gradients, and how two gradients are compared."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers_naive import Gradients, NaiveRollout, Row, padded_forward

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.train.advantages import group_advantages
from rhotrain.train.batching import TokenTable, Trajectory, make_table
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.inner_loop import Learner
from rhotrain.train.optim import Optimizer


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models are no faster on two threads, and many times slower where another process wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ---- rollouts that no engine made -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeRollout(NaiveRollout):
    """Groups of unequal completions with everything that can go wrong in them; see `fake_rollout`."""

    def table(self, algo: AlgoConfig, dtype: torch.dtype, order: Sequence[int] | None = None) -> TokenTable:
        """The project's table; `order` permutes the completions within their groups and the groups among themselves
        (the trajectories keep their numbers)."""
        groups: dict[int, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        pairs = [(rows[0].prompt, [r.completion for r in rows]) for _, rows in sorted(groups.items())]
        table = make_table(pairs, replay=self.replay, mask_truncated=algo.mask_truncated, dtype=dtype)
        if order is not None:
            table = reordered(table, order)
        by_name = {(r.group, r.member): r for r in self.rows}
        ref = [x for t in table.trajectories for x in by_name[t.group, t.member].ref_logprobs]
        if algo.beta > 0:
            table.ref_logprobs = torch.tensor(ref, dtype=torch.float64).to(dtype)
        advantages = group_advantages(self.rewards_PG, scale=algo.advantage_scale, std=algo.advantage_std)
        table.set_advantages(advantages.values_PG)
        return table


def reordered(table: TokenTable, order: Sequence[int]) -> TokenTable:
    """The same trajectories in another order."""
    trajectories: tuple[Trajectory, ...] = tuple(table.trajectories[i] for i in order)
    starts = [0]
    for t in trajectories:
        starts.append(starts[-1] + t.num_tokens)
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in order])
    return replace(
        table,
        trajectories=trajectories,
        starts=tuple(starts),
        token_ids=table.token_ids[rows],
        sampling_logprobs=table.sampling_logprobs[rows],
        kept_mass=table.kept_mass[rows],
        kept=None if table.kept is None else table.kept.select(rows),
        loss_mask=table.loss_mask[rows],
        advantages=table.advantages[rows],
    )


LENGTHS = ((5, 1, 9, 3), (4, 2, 6, 7), (8, 0, 3, 1), (1, 1, 1, 1), (9, 9, 2, 4), (2, 6, 1, 5))
PROMPTS = (7, 12, 1, 3, 5, 9)
NAN = math.nan
REWARDS = (
    (1.0, 0.0, 0.5, 0.0),
    (0.3, 0.3, 0.3, 0.3),  # no variance, and 0.3 is not exact in binary
    (NAN, NAN, 1.0, 0.25),  # one unscorable, one left out (error)
    (0.0, 1.0, 1.0, 1.0),  # four completions of one token
    (NAN, NAN, 2.0, NAN),  # a lone scorable one
    (1.0, -1.0, 0.0, 3.0),  # two of them truncated
)
TRUNCATED = {(0, 2), (5, 1), (5, 3), (1, 0)}
ERRORS = {(2, 1)}


def fake_rollout(
    model: Any,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    replay: bool = False,
    spread: float = 0.25,
    token_ids: int = 70,
    vocab_size: int,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    prompts: Sequence[int] = PROMPTS,
    rewards: Sequence[Sequence[float]] = REWARDS,
    truncated: set[tuple[int, int]] = TRUNCATED,
) -> FakeRollout:
    """Random prompts and completions with the policy's own logprobs (from the naive model) shifted by
    normal(0, spread): ratios inside and outside of 0.8 .. 1.2. Reference logprobs are shifted by normal(0, 0.5).

    token_ids: ids are drawn below this. Logprobs come from `model` in its own precision.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, token_ids, (count,), generator=generator).tolist())

    rows: list[Row] = []
    for p, group in enumerate(lengths):
        prompt = draw(prompts[p])
        for g, count in enumerate(group):
            ids = draw(count)
            kept = None
            if replay:
                kept = tuple(tuple(sorted({i, *draw(1 + (k * 7) % 12)})) for k, i in enumerate(ids))
            reason: Any = "error" if count == 0 else "length" if (p, g) in truncated else "stop"
            blank = (0.0,) * count
            completion = Completion(
                token_ids=ids,
                logprobs=blank,
                kept_mass=(1.0,) * count,
                finish_reason=reason,
                policy_version=0,
                sample=p * len(group) + g,
                kept_ids=kept,
                error="test" if reason == "error" else None,
            )
            rows.append(Row(p, g, prompt, completion, blank))
    real = [r for r in rows if r.length]
    with torch.no_grad():
        padded = padded_forward(model, real, temperature=temperature, vocab_size=vocab_size, replay=replay)
    shape = padded.logprobs.shape
    shift = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
    ref_shift = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
    logprobs, mass = padded.logprobs.double(), padded.kept_mass.double()
    sampled = (logprobs - shift).clamp(max=0.0) + (mass.log() if replay else 0.0)
    reference = (logprobs + ref_shift).clamp(max=0.0)
    done = iter(range(len(real)))
    filled: list[Row] = []
    for row in rows:
        if row.length:
            b = next(done)
            completion = replace(
                row.completion,
                logprobs=tuple(sampled[b, : row.length].tolist()),
                kept_mass=tuple(mass[b, : row.length].tolist()) if replay else row.completion.kept_mass,
            )
            row = replace(row, completion=completion, ref_logprobs=tuple(reference[b, : row.length].tolist()))
        filled.append(row)
    return FakeRollout(tuple(filled), torch.tensor(rewards, dtype=torch.float64), temperature, replay)


# ---- the project's side ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorder(Optimizer):
    """An optimizer that notes the gradients of every step instead of taking it."""

    loaded: LoadedModel
    taken: list[Gradients] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.loaded.parameters(), OptimConfig())

    def step(self, lr: float) -> float:
        self.taken.append(gradients_of(self.loaded))
        self.zero_grad()
        return 0.0


def gradients_of(loaded: LoadedModel) -> Gradients:
    """Copies of the gradients by parameter name."""
    return {name: p.grad.detach().clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def make_learner(
    loaded: LoadedModel,
    algo: AlgoConfig,
    *,
    optimizer: Optimizer | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 9,
    total_updates: int = 10,
    seed: int = 0,
    **optim: Any,
) -> Learner:
    """A Learner; without `optimizer` it records gradients and leaves the weights alone."""
    config = OptimConfig(**optim)
    return Learner(
        loaded=loaded,
        optimizer=optimizer or Recorder(loaded),
        algo=algo,
        optim=config,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        total_updates=total_updates,
        seed=seed,
    )


def whole_error(actual: Gradients, expected: Gradients) -> float:
    """L2 of the difference over the L2 of what was expected, over all parameters together, in float64.

    A parameter that only one of the two has counts as zeros in the other.
    """
    difference = norm = 0.0
    for name in {*actual, *expected}:
        like = expected.get(name, actual.get(name))
        assert like is not None
        a = actual.get(name, torch.zeros_like(like)).double()
        e = expected.get(name, torch.zeros_like(like)).double()
        difference += float((a - e).square().sum())
        norm += float(e.square().sum())
    assert norm > 0, "the expected gradient is 0: the comparison proves nothing"
    return math.sqrt(difference / norm)


def tensor_errors(actual: Gradients, expected: Gradients, floor: float = 1e-6) -> float:
    """Largest over the parameters of max |difference| / max |expected|. Tensors whose largest entry is below `floor`
    times the largest of all are left out: they are sums that cancel (a key bias shifts every score of a row alike)."""
    top = max(float(e.abs().max()) for e in expected.values())
    worst = 0.0
    for name, e in expected.items():
        scale = float(e.abs().max())
        if scale > floor * top:
            worst = max(worst, float((actual[name].double() - e.double()).abs().max()) / scale)
    return worst
