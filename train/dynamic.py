"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2, eq. 11): groups whose rewards are all equal teach nothing and
are replaced by groups of freshly drawn prompts, before any denominator is set.

A rollout is drawn as ever and scored. While fewer than P of its groups carry signal, another call of the engine draws
as many prompts as will probably do, missing / (share of the groups so far that carry signal), at least as many as are
missing, at most P, and P while no group has carried any; `dynamic_sampling` such calls at most. The rollout is then the
first P groups with signal in the order of drawing; what lies beyond is dropped. Where the last call leaves fewer, the
first groups without signal fill the rollout, so that its shape and its minibatches hold. Everything is drawn between
two updates, by the same weights. Every drawn prompt moves the data cursor, and no sample number is used twice.

The mean reward of such a rollout is that of questions which are neither too easy nor too hard; `dynamic/reward` is the
mean over everything that was drawn, and the curve to watch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rhotrain.rollout.completion import Completion
from rhotrain.train.data import EncodedPrompt
from rhotrain.train.rewards import Rewards
from rhotrain.train.rollouts import Rollout

Draw = Callable[[int], tuple[list[EncodedPrompt], list[list[Completion]]]]
"""So many further prompts and their groups, by the weights that drew the rollout."""

Score = Callable[[Sequence[EncodedPrompt], Sequence[Sequence[Completion]]], tuple[list[list[str]], Rewards]]
"""The texts and rewards of groups."""


@dataclass(frozen=True)
class Scored:
    """A rollout with the texts [P][G] of its completions and their scores. drawn_tokens: sampled in this step, 0 when
    the rollout had been drawn ahead. sampling: what dynamic sampling did, None without it."""

    rollout: Rollout
    texts: list[list[str]]
    rewards: Rewards
    drawn_tokens: int
    sampling: "DynamicSampling | None" = None


@dataclass(frozen=True)
class DynamicSampling:
    """What it took to fill a rollout. groups: drawn in all; with_signal: of them; filled: groups of the rollout that
    carry none; refills: engine calls after the first; reward: the mean over all that was drawn, None when nothing was
    scorable."""

    groups: int
    with_signal: int
    dropped: int
    filled: int
    refills: int
    reward: float | None

    def metrics(self) -> dict[str, Any]:
        return {
            "dynamic/groups_drawn": self.groups,
            "dynamic/groups_dropped": self.dropped,
            "dynamic/groups_filled": self.filled,
            "dynamic/refills": self.refills,
            "dynamic/signal_rate": self.with_signal / max(1, self.groups),
            "dynamic/reward": self.reward,
        }


def refill_size(missing: int, with_signal: int, groups: int, most: int) -> int:
    """Prompts of the next call: those that are missing over the share of groups that carried signal so far, rounded up;
    `most` while none has."""
    expected = -(-missing * groups // with_signal) if with_signal else most
    return max(missing, min(most, expected))


def choose_groups(signal: Sequence[bool], wanted: int) -> list[int]:
    """Numbers of the groups that are kept, in the order of drawing: the first `wanted` with signal and, where they are
    too few, the first ones without."""
    ranked = sorted(range(len(signal)), key=lambda p: (not signal[p], p))
    return sorted(ranked[:wanted])


def fill_with_signal(
    first: Scored, *, limit: int, draw: Draw, score: Score, signal: Callable[[Rewards], Tensor]
) -> Scored:
    """`first` with its groups without signal replaced, by at most `limit` calls of `draw`.

    signal: bool [P], which groups of some rewards carry any. The rollout keeps its index, its place in the stream and
    its number of groups; failures and reasons of the rewards count everything that was scored.
    """
    rollout, wanted = first.rollout, len(first.rollout.groups)
    prompts, groups, texts = list(rollout.prompts), list(rollout.groups), list(first.texts)
    rewards, carries = first.rewards, signal(first.rewards).tolist()
    refills, tokens = 0, first.drawn_tokens
    while sum(carries) < wanted and refills < limit:
        missing = wanted - sum(carries)
        more, drawn = draw(refill_size(missing, sum(carries), len(carries), wanted))
        written, scores = score(more, drawn)
        prompts, groups, texts = prompts + more, groups + drawn, texts + written
        rewards, carries = _joined(rewards, scores), carries + signal(scores).tolist()
        tokens += sum(len(c.token_ids) for group in drawn for c in group)
        refills += 1
    kept = choose_groups(carries, wanted)
    known = rewards.total[~rewards.total.isnan()]
    done = DynamicSampling(
        groups=len(groups),
        with_signal=sum(carries),
        dropped=len(groups) - wanted,
        filled=sum(not carries[p] for p in kept),
        refills=refills,
        reward=float(known.mean()) if known.numel() else None,
    )
    return Scored(
        replace(rollout, prompts=[prompts[p] for p in kept], groups=[groups[p] for p in kept]),
        [texts[p] for p in kept],
        _selected(rewards, kept),
        tokens,
        done,
    )


def _joined(first: Rewards, more: Rewards) -> Rewards:
    return replace(
        first,
        total=torch.cat([first.total, more.total]),
        parts={name: torch.cat([part, more.parts[name]]) for name, part in first.parts.items()},
        failures=first.failures + more.failures,
        reasons=tuple(dict.fromkeys((*first.reasons, *more.reasons))),
    )


def _selected(rewards: Rewards, groups: list[int]) -> Rewards:
    return replace(
        rewards,
        total=rewards.total[groups],
        parts={name: part[groups] for name, part in rewards.parts.items()},
    )
