"""Which tokens carry the policy term of an optimiser step.

Two rules take tokens out of it. KL and entropy terms stay, and so does the denominator: what is taken out adds 0.

    off-policy mask    a completion with negative advantage whose mean over its tokens of sampling_logprob - logprob
                       exceeds off_policy_mask (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): the policy has moved
                       away from it already, and pushing on is what makes runs unstable
    top entropy        all but the share top_entropy of the step's tokens, those of highest entropy (Wang et al.,
                       arXiv 2506.01939): the few positions where the policy really chooses

Both look at the current policy before the update, over the whole step, never a micro-batch, so that the split into
micro-batches changes nothing. That is one more forward pass over the step's tokens, without gradient, for each update
(about a third of the update's compute); the off-policy mask alone uses the frozen logprobs of the first update where
they are there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.train.batching import TokenTable
from rhotrain.train.config import AlgoConfig


@dataclass(frozen=True)
class Selection:
    """keep: bool [N], False in rows whose policy term is taken out. off_policy: the share of the completions that the
    off-policy mask took. threshold: the lowest entropy that was kept, in nats, None when all were."""

    keep: Tensor
    off_policy: float = 0.0
    threshold: float | None = None

    def apply(self, importance: Tensor | None) -> Tensor:
        """What the policy term is multiplied by: `importance` [N] (None: 1) where a row is kept, else 0.

        Without an importance weight the result is float64 0 and 1, which the step rounds to its own type.
        """
        if importance is None:
            return self.keep.double()
        return importance * self.keep


def selects(algo: AlgoConfig) -> bool:
    """Whether any rule is on."""
    return algo.off_policy_mask > 0.0 or algo.top_entropy < 1.0


def select_tokens(
    table: TokenTable,
    trajectories: Sequence[int],
    logprobs: Tensor,
    entropies: Tensor | None,
    algo: AlgoConfig,
) -> Selection:
    """The rows of `trajectories`, those of one optimiser step, whose policy term stays.

    logprobs, entropies: [N] under the current policy, read in the rows of `trajectories`. entropies may be None with
    top_entropy 1. Of n tokens ceil(top_entropy n) are kept, and those that tie with the last of them.
    """
    keep = torch.ones(len(table.token_ids), dtype=torch.bool)
    masked = 0
    if algo.off_policy_mask > 0.0:
        distance = (table.sampling_logprobs - logprobs).double()
        for i in trajectories:
            rows = table.rows(i)
            if float(table.advantages[rows][0]) < 0 and float(distance[rows].mean()) > algo.off_policy_mask:
                keep[rows] = False
                masked += 1
    threshold = None
    if algo.top_entropy < 1.0 and trajectories:
        assert entropies is not None
        rows_M = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in trajectories])
        values = entropies[rows_M]
        threshold = float(values.sort(descending=True).values[math.ceil(algo.top_entropy * len(values)) - 1])
        keep[rows_M] &= values >= threshold
    return Selection(keep, masked / max(1, len(trajectories)), threshold)
