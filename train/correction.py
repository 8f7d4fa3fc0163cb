"""Off-policy correction: a constant weight per token for samples that another policy drew.

    w = exp(frozen_logprob - sampling_logprob)

frozen_logprob is the trainer's, under the weights of the rollout's first update; sampling_logprob is the sampler's. The
policy term of the loss is multiplied by what the rule makes of w; KL and entropy terms are not. Levels:

    token      each token's own w: low variance, biased, since the prefix was drawn by the other policy too
    sequence   the product over the completion, for all of its tokens: unbiased when it is left open above
    geometric  the product's L-th root: compares completions of any length; only ever a mask

Rules: `truncate` takes min(max(w, low), high) (TIS, Yao et al. 2025; Ionides 2008), `mask` takes w inside [low, high]
and 0 outside (MIS and IcePop, arXiv 2510.18855), `geometric_mask` 1 inside and 0 outside. What is cut stays in the
denominator of the loss. Log-weights are clamped to +-20 before exp, as the ratio's are.
With `sampler` anchors the ratio's denominator is the sampler's and contains w already: AlgoConfig refuses both at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.spec import LOG_RATIO_LIMIT
from rhotrain.train.batching import TokenTable
from rhotrain.train.config import AlgoConfig


@dataclass(frozen=True)
class Importance:
    """weights: [N] in the table's dtype, what multiplies the policy term; 1 in rows that were not scored.

    raw: float64, one per token (level `token`) or per completion, before any bound acted. cut: bool like raw, True
    where a bound acted.
    """

    weights: Tensor
    raw: Tensor
    cut: Tensor


def sequence_log_weights(log_weights_N: Tensor, table: TokenTable, trajectories: Sequence[int]) -> Tensor:
    """float64 [len(trajectories)]: the sum of token log-weights [N] over each completion."""
    return torch.stack([log_weights_N[table.rows(i)].double().sum() for i in trajectories])


def effective_sample_size(log_weights_C: Tensor) -> float:
    """(sum w)^2 / (C sum w^2) of C weights exp(log_weights_C), in (0, 1]: the share of samples that the weights leave
    (Kong 1992). 1 when all weights are equal; 1 for no weights at all."""
    if not len(log_weights_C):
        return 1.0
    w = (log_weights_C.double() - log_weights_C.double().max()).exp()
    return float(w.sum() ** 2 / (len(w) * w.square().sum()))


def importance_weights(
    table: TokenTable, frozen_logprobs: Tensor, trajectories: Sequence[int], algo: AlgoConfig
) -> Importance | None:
    """The weights that `algo.correction` asks for, None when it asks for none.

    frozen_logprobs: [N], scored under the frozen weights in the rows of `trajectories`; other rows are not read.
    """
    if algo.correction == "none" or not trajectories:
        return None
    level, rule = algo.correction.split("_")
    low, high = algo.correction_bounds
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in trajectories])
    lengths = torch.tensor([table.trajectories[i].num_tokens for i in trajectories])
    log_w = (frozen_logprobs - table.sampling_logprobs).double()
    logs = log_w[rows] if level == "token" else sequence_log_weights(log_w, table, trajectories)
    if level == "geometric":
        logs = logs / lengths
    raw = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    cut = (raw < low) | (raw > high)
    kept = torch.ones_like(raw) if level == "geometric" else raw
    used = raw.clamp(low, high) if rule == "truncate" else kept.masked_fill(cut, 0.0)
    weights = torch.ones_like(table.sampling_logprobs)
    weights[rows] = (used if level == "token" else used.repeat_interleave(lengths)).to(weights)
    return Importance(weights, raw, cut)
