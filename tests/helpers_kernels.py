"""Float64 truth and awkward inputs for the kernel tests, written from the formulas: no code shared with kernels."""

import math

import torch
from torch import Tensor

VOCABS = (1, 17, 1000, 1024, 2053, 4097)
LOGIT_CASES = ("randn", "peaked", "blocks", "inf_first", "inf_last", "equal")


def make_logits(case: str, rows: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float64 logits [rows, vocab] that are exact in bf16, and int64 ids of finite logits.

    peaked: one logit 30 above the rest; blocks: thirds of the row at +20, -20, 0; inf_first, inf_last: a third of it
    (never the whole row) is -inf.
    """
    g = torch.Generator().manual_seed(seed + 1000 * vocab)
    x = 3.0 * torch.randn(rows, vocab, generator=g, dtype=torch.float64)
    third = vocab // 3
    ids = torch.randint(0, vocab, (rows,), generator=g)
    if case == "peaked":
        x[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=g)] += 30.0
        ids[0] = x[0].argmax()
    elif case == "blocks":
        x[:, :third] += 20.0
        x[:, third : 2 * third] -= 20.0
    elif case == "inf_first":
        x[:, :third] = -math.inf
        ids = ids.clamp(min=third)
    elif case == "inf_last":
        x[:, vocab - third :] = -math.inf
        ids = ids.clamp(max=vocab - third - 1)
    elif case == "equal":
        x.fill_(2.5)
    return x.to(torch.bfloat16).double(), ids


def finite_columns(logits_NV: Tensor) -> Tensor:
    """Indices of the columns that are finite in every row; -inf columns have p = 0 and may as well not exist."""
    return torch.isfinite(logits_NV).all(0).nonzero().squeeze(1)


def plain_logprobs(x_NV: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, logsumexp) by torch's own functions in x's dtype; `x` is tempered and finite."""
    logp = torch.log_softmax(x_NV, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, ids_N[:, None]).squeeze(1), entropy, torch.logsumexp(x_NV, -1)


def ulp(value: float) -> float:
    """Spacing of float32 numbers at `value`."""
    return 2.0 ** (math.floor(math.log2(max(abs(value), 1e-30))) - 23)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-300))
