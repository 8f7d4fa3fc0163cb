"""From completions to packed micro-batches under a token budget.

A rollout becomes one `TokenTable`: a row per completion token, N rows in all, in the order of the completions. What is
known per token (old, reference and current logprobs, advantages, weights) is a column of it, so a micro-batch needs
only the numbers of its rows, and results are written back by row. Masks come from lengths, never from token values.

Packing: the hidden row of the last prompt token predicts the first completion token, and so on, so R completion tokens
need P + R - 1 inputs. With shared prompts a group is laid out as [prompt, completion 1, ..., completion G] and each
completion's queries attend to the prompt's keys and to their own: P + sum(R - 1) inputs for the group.

Denominators (one per optimiser step, fixed before its first micro-batch, so that any split gives the same gradient):
token 1/sum(R) (DAPO, arXiv 2503.14476, eq. 8), sequence 1/(C R) (GRPO, arXiv 2402.03300, eq. 3), constant
1/(C max_new_tokens) (Dr. GRPO, arXiv 2503.20783), C counting the completions that carry loss.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rhotrain.kernels.logprob import KeptSet
from rhotrain.rollout.completion import Completion
from rhotrain.train.config import Aggregation
from rhotrain.train.optim import StepError

POSITIVE_LIMIT = 1e-4
"""A logprob above 0 by less than this is rounding and counts as 0; above, something is wrong (a fused kernel of another
trainer once returned +123, and the reward collapsed: verl issue 2656)."""


def bad_logprobs(values: Tensor) -> Tensor:
    """bool, True where a value cannot be a logprob: not finite, or positive beyond rounding."""
    return ~torch.isfinite(values) | (values > POSITIVE_LIMIT)


@dataclass(frozen=True)
class Trajectory:
    """A completion with its prompt; `group` is the prompt's number in the rollout, `member` its number in the group."""

    group: int
    member: int
    prompt_ids: tuple[int, ...]
    completion: Completion

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)


@dataclass
class TokenTable:
    """All completion tokens of a rollout; every column is [N] on the CPU, float columns in `dtype`.

    starts: first row of each trajectory (len(trajectories) + 1 values).
    sampling_logprobs: of the distribution that was sampled: over the kept set when `kept` is there, else the full one.
    kept: the kept set per token, or None when nothing was truncated or truncation is ignored.
    loss_mask: bool, False for completions that carry no loss.
    old_logprobs, ref_logprobs: None until they are known. importance: off-policy weights, None without a correction.
    """

    trajectories: tuple[Trajectory, ...]
    starts: tuple[int, ...]
    token_ids: Tensor
    sampling_logprobs: Tensor
    kept_mass: Tensor
    kept: KeptSet | None
    loss_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    importance: Tensor | None = None
    signal_groups: frozenset[int] = field(default_factory=frozenset)

    @property
    def dtype(self) -> torch.dtype:
        return self.sampling_logprobs.dtype

    def rows(self, trajectory: int) -> slice:
        """The rows of one trajectory."""
        return slice(self.starts[trajectory], self.starts[trajectory + 1])

    def staleness(self, version: int) -> list[int]:
        """Per trajectory, the policy version `version` minus the one that sampled it."""
        return [version - t.completion.policy_version for t in self.trajectories]

    def sequence_ids(self) -> Tensor:
        """int64 [N]: the trajectory that a row belongs to."""
        lengths = torch.tensor([t.num_tokens for t in self.trajectories], dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def carries_loss(self, trajectory: int) -> bool:
        return bool(self.loss_mask[self.starts[trajectory]])

    def set_advantages(self, values_PG: Tensor) -> None:
        """Spread [P, G] advantages over the tokens and note which groups carry signal."""
        for i, trajectory in enumerate(self.trajectories):
            self.advantages[self.rows(i)] = float(values_PG[trajectory.group, trajectory.member])
        signal = (values_PG != 0).any(dim=1)
        self.signal_groups = frozenset(torch.nonzero(signal).flatten().tolist())


def make_table(
    groups: Sequence[tuple[tuple[int, ...], Sequence[Completion]]],
    *,
    replay: bool = False,
    mask_truncated: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TokenTable:
    """The table of P groups, given as (prompt ids, completions). Completions with finish_reason `error` are left out.

    replay: normalise over the recorded kept sets; needs completions that were sampled with `keep_sets`.
    mask_truncated: completions that ended by length carry no loss.
    Raises StepError for a sampling logprob that is not finite or is positive beyond rounding.
    """
    trajectories = tuple(
        Trajectory(p, g, tuple(prompt), completion)
        for p, (prompt, completions) in enumerate(groups)
        for g, completion in enumerate(completions)
        if completion.finish_reason != "error"
    )
    starts = [0]
    for trajectory in trajectories:
        starts.append(starts[-1] + trajectory.num_tokens)
    completions = [t.completion for t in trajectories]
    mass = torch.tensor([m for c in completions for m in c.kept_mass], dtype=torch.float64)
    logprobs = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float64)
    kept = None
    if replay:
        kept = KeptSet.from_lists([ids for c in completions for ids in _kept_ids(c)], torch.device("cpu"))
        logprobs = logprobs - mass.log()
    _check_sampling(logprobs, mass, trajectories, starts)
    mask = [not (mask_truncated and c.finish_reason == "length") for c in completions for _ in c.token_ids]
    return TokenTable(
        trajectories=trajectories,
        starts=tuple(starts),
        token_ids=torch.tensor([i for c in completions for i in c.token_ids], dtype=torch.int64),
        sampling_logprobs=logprobs.clamp(max=0.0).to(dtype),
        kept_mass=mass.to(dtype),
        kept=kept,
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        advantages=torch.zeros(starts[-1], dtype=dtype),
    )


def _check_sampling(logprobs: Tensor, mass: Tensor, trajectories: Sequence[Trajectory], starts: Sequence[int]) -> None:
    """StepError for what cannot be a logprob, or a kept mass, of a sampler."""
    for name, values, bad, rule in (
        ("kept_mass", mass, ~((mass > 0) & (mass < 1 + POSITIVE_LIMIT)), "the mass of a kept set lies in (0, 1]"),
        ("logprobs", logprobs, bad_logprobs(logprobs), "a logprob is finite and at most 0"),
    ):
        if bad.any():
            row = int(bad.nonzero()[0])
            i = bisect_right(starts, row) - 1
            raise StepError(
                f"{name}: the sampler gave {float(values[row])} for token {row - starts[i]} of sample "
                f"{trajectories[i].completion.sample} (prompt {trajectories[i].group}, completion "
                f"{trajectories[i].member}); {rule}. Its logits were probably not finite, or it reports something else "
                "than logprobs"
            )


def _kept_ids(completion: Completion) -> tuple[tuple[int, ...], ...]:
    if completion.kept_ids is None:
        raise ValueError(
            f"kept_ids: completion {completion.sample} has none; sample with keep_sets=True to replay truncation"
        )
    return completion.kept_ids


def token_weights(
    table: TokenTable, trajectories: Iterable[int], *, aggregation: Aggregation, max_new_tokens: int
) -> Tensor:
    """Weights [N]: loss mask times normaliser for the trajectories of one optimiser step, 0 elsewhere."""
    weights = torch.zeros(len(table.token_ids), dtype=torch.float64)
    counted = [i for i in trajectories if table.carries_loss(i)]
    num_tokens = sum(table.trajectories[i].num_tokens for i in counted)
    for i in counted:
        denominator = {
            "token": num_tokens,
            "sequence": len(counted) * table.trajectories[i].num_tokens,
            "constant": len(counted) * max_new_tokens,
        }[aggregation]
        weights[table.rows(i)] = 1.0 / max(1, denominator)
    return weights.to(table.dtype)


@dataclass(frozen=True)
class MicroBatch:
    """Packed inputs of one forward and backward pass.

    input_ids, position_ids: int64 [T]; lens_q, lens_k: tokens and keys per segment; kv_index: int64 [sum(lens_k)], the
    rows of the packed keys that each segment attends to, None when they are the segment's own.
    hidden_rows: int64 [M] rows of hidden that predict; table_rows: int64 [M] the table's rows that they predict.
    """

    input_ids: Tensor
    position_ids: Tensor
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    kv_index: Tensor | None
    hidden_rows: Tensor
    table_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def packed_tokens(table: TokenTable, trajectory: int, *, with_prompt: bool) -> int:
    """Inputs that a trajectory adds to a micro-batch; without its prompt where a shared one stands there already."""
    one = table.trajectories[trajectory]
    return one.num_tokens - 1 + (len(one.prompt_ids) if with_prompt else 0)


def longest_trajectory(table: TokenTable, trajectories: Iterable[int]) -> int:
    """Packed tokens of the longest of them, prompt included; no budget can be smaller. 0 of none."""
    return max((packed_tokens(table, i, with_prompt=True) for i in trajectories), default=0)


class _Packer:
    """Collects the segments of one micro-batch."""

    def __init__(self, table: TokenTable, share_prompts: bool) -> None:
        self.table = table
        self.share_prompts = share_prompts
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[int, range, range]] = []  # (queries, prompt keys, own keys)
        self.hidden_rows: list[int] = []
        self.table_rows: list[int] = []
        self.prompts: dict[int, range] = {}

    def add(self, i: int) -> None:
        trajectory = self.table.trajectories[i]
        prompt, own = trajectory.prompt_ids, trajectory.completion.token_ids[:-1]
        if not self.share_prompts:
            start = self._append(prompt + own, 0)
            self.segments.append((len(prompt) + len(own), range(0), range(start, start + len(prompt) + len(own))))
            first = start + len(prompt) - 1
            rows = list(range(first, first + trajectory.num_tokens))
        else:
            if trajectory.group not in self.prompts:
                start = self._append(prompt, 0)
                self.prompts[trajectory.group] = range(start, start + len(prompt))
                self.segments.append((len(prompt), range(0), self.prompts[trajectory.group]))
            keys = self.prompts[trajectory.group]
            start = self._append(own, len(prompt))
            if own:
                self.segments.append((len(own), keys, range(start, start + len(own))))
            rows = [keys[-1], *range(start, start + len(own))]
        self.hidden_rows.extend(rows)
        here = self.table.rows(i)
        self.table_rows.extend(range(here.start, here.stop))

    def _append(self, ids: tuple[int, ...], first_position: int) -> int:
        start = len(self.ids)
        self.ids.extend(ids)
        self.positions.extend(range(first_position, first_position + len(ids)))
        return start

    def finish(self) -> MicroBatch:
        gathers = any(len(prompt_keys) for _, prompt_keys, _ in self.segments)
        index = [k for _, prompt_keys, own in self.segments for k in (*prompt_keys, *own)] if gathers else None
        return MicroBatch(
            input_ids=torch.tensor(self.ids, dtype=torch.int64),
            position_ids=torch.tensor(self.positions, dtype=torch.int64),
            lens_q=tuple(queries for queries, _, _ in self.segments),
            lens_k=tuple(len(prompt_keys) + len(own) for _, prompt_keys, own in self.segments),
            kv_index=None if index is None else torch.tensor(index, dtype=torch.int64),
            hidden_rows=torch.tensor(self.hidden_rows, dtype=torch.int64),
            table_rows=torch.tensor(self.table_rows, dtype=torch.int64),
        )


def make_batch(table: TokenTable, trajectories: Iterable[int], *, share_prompts: bool = True) -> MicroBatch:
    """The packed inputs of these trajectories together, in the order given."""
    packer = _Packer(table, share_prompts)
    for i in trajectories:
        packer.add(i)
    return packer.finish()


def split_in_order(
    table: TokenTable, trajectories: Iterable[int], *, token_budget: int, share_prompts: bool = True
) -> list[list[int]]:
    """`trajectories`, in the order given, cut where the next one would exceed `token_budget` packed tokens.

    Raises ValueError when one trajectory alone is longer than the budget.
    """
    parts: list[list[int]] = []
    prompts: set[int] = set()
    used = 0
    for i in trajectories:
        group = table.trajectories[i].group
        more = packed_tokens(table, i, with_prompt=not (share_prompts and group in prompts))
        if not parts or used + more > token_budget:
            parts.append([])
            prompts, used = set(), 0
            more = packed_tokens(table, i, with_prompt=True)
        if more > token_budget:
            raise ValueError(
                f"token_budget: {token_budget} is less than the {more} tokens of one prompt and completion; "
                "raise token_budget or lower max_prompt_tokens and max_new_tokens"
            )
        parts[-1].append(i)
        prompts.add(group)
        used += more
    return parts


def pack(
    table: TokenTable, trajectories: Iterable[int], *, token_budget: int, share_prompts: bool = True
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` packed tokens, in the order given; a group may be split over several.
    Training packs by cost (balance.py).

    Raises ValueError when one trajectory alone is longer than the budget.
    """
    parts = split_in_order(table, trajectories, token_budget=token_budget, share_prompts=share_prompts)
    return [make_batch(table, part, share_prompts=share_prompts) for part in parts]
