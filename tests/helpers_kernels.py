"""Float64 truth and awkward inputs for the kernel tests, written from the formulas."""

import math
from typing import Any

import torch
from torch import Tensor

from rhotrain.kernels.logprob import token_logprobs

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


def upstream_for(rows: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Non-uniform upstream gradients of (logprobs, entropy, logsumexp), float64, exact in bf16."""
    g = torch.Generator().manual_seed(seed)
    a, b, c = torch.randn(3, rows, generator=g, dtype=torch.float64).to(torch.bfloat16).double()
    return a, b, c


def run_token_logprobs(
    logits: Tensor, ids: Tensor, upstream: tuple[Tensor, ...], **kw: Any
) -> tuple[list[Tensor], Tensor]:
    """([logprobs, entropy, logsumexp], dlogits) of our op."""
    leaf = logits.clone().requires_grad_()
    out = token_logprobs(leaf, ids, entropy=True, **kw)
    assert out.entropy is not None
    values = [out.logprobs, out.entropy, out.logsumexp]
    torch.autograd.backward(values, [u.to(v) for u, v in zip(upstream, values)])
    assert leaf.grad is not None
    return [v.detach() for v in values], leaf.grad


def run_plain(
    logits: Tensor, ids: Tensor, upstream: tuple[Tensor, ...], temperature: float | Tensor
) -> tuple[list[Tensor], Tensor]:
    """The same through torch's own functions and autograd, in the logits' dtype, on the finite columns."""
    columns = finite_columns(logits)
    leaf = logits[:, columns].clone().requires_grad_()
    t = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    values = list(plain_logprobs(leaf / t, torch.searchsorted(columns, ids)))
    torch.autograd.backward(values, [u.to(v) for u, v in zip(upstream, values)])
    assert leaf.grad is not None
    grad = torch.zeros_like(logits)
    grad[:, columns] = leaf.grad
    return [v.detach() for v in values], grad
