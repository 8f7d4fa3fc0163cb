"""The losses of TRL and of the papers, on padded batches as they write them, against policy_terms on packed tokens.

Each formula is written here once, in float64 on [B, T] with masks, without rhotrain; `weights` carries its reduction.
Value and gradient in the logprobs agree to 1e-12. The log-ratios stay inside +-20, where the guard does nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rhotrain.kernels.objective import policy_terms
from rhotrain.kernels.spec import Objective

LENGTHS = (7, 1, 4, 0, 6, 2)  # the fourth completion is masked whole (cut off at its limit, say)
MAX_LENGTH = 9
TOKENS_OF_THE_STEP = 41.0  # more than are in this batch: the denominator of several micro-batches


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded [B, T]; advantages [B, 1]. Padding holds numbers that would show."""

    logps: Tensor
    old: Tensor
    ref: Tensor
    mask: Tensor
    advantages: Tensor
    correction: Tensor


def make_batch(spread: float, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS) + 1)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    mask[0, 3] = 0.0  # a tool's token inside a completion
    old = -0.1 - 3 * torch.rand(shape, generator=g, dtype=torch.float64)
    logps = (old + spread * randn(*shape) + torch.where(mask == 0, 3.0, 0.0)).requires_grad_()
    advantages = torch.tensor([1.2, -0.7, -1.5, 0.9, 0.4, 0.0], dtype=torch.float64)[:, None]
    ref = old + 0.8 * randn(*shape)
    correction = torch.rand(shape, generator=g, dtype=torch.float64) * 2
    return Batch(logps, old, ref, mask, advantages, correction)


# ---- the published per-token losses, [B, T] -------------------------------------------------------------------------

PerToken = Callable[[Batch], Tensor]


def token_ratio(b: Batch) -> Tensor:
    return torch.exp(b.logps - b.old)


def sequence_ratio(b: Batch) -> Tensor:
    """GSPO: the mean over the completion's tokens, broadcast over them."""
    mean = ((b.logps - b.old) * b.mask).sum(-1, keepdim=True) / b.mask.sum(-1, keepdim=True).clamp(min=1.0)
    return torch.exp(mean).expand_as(b.logps)


def clipped(ratio: Callable[[Batch], Tensor], low: float, high: float, delta: float | None = None) -> PerToken:
    """GRPO's surrogate; TRL's delta (INTELLECT-2) bounds the unclipped ratio from above."""

    def loss(b: Batch) -> Tensor:
        r = ratio(b)
        first = r if delta is None else torch.clamp(r, max=delta)
        return -torch.min(first * b.advantages, torch.clamp(r, 1 - low, 1 + high) * b.advantages)

    return loss


def cispo(ratio: Callable[[Batch], Tensor], high: float) -> PerToken:
    """TRL: epsilon_high is the bound itself, there is none below."""
    return lambda b: -torch.clamp(ratio(b), max=high).detach() * b.advantages * b.logps


def sapo(b: Batch) -> Tensor:
    tau = torch.where(b.advantages > 0, torch.ones_like(b.advantages), torch.full_like(b.advantages, 1.05))
    return -torch.sigmoid(tau * (token_ratio(b) - 1)) * 4 / tau * b.advantages


def k3(b: Batch) -> Tensor:
    """DeepSeekMath eq. 4."""
    return torch.exp(b.ref - b.logps) - (b.ref - b.logps) - 1


def with_kl(policy: PerToken, beta: float, estimate: PerToken) -> PerToken:
    """TRL: the KL is added after the sampler correction has scaled the policy term."""
    return lambda b: policy(b) * b.correction + beta * estimate(b)


# ---- the published reductions: of [B, T] losses, and the same as a weight per token ---------------------------------


def reduce_grpo(loss: Tensor, mask: Tensor) -> Tensor:
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def reduce_bnpo(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)


def reduce_dr_grpo(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / (loss.shape[0] * MAX_LENGTH)


def reduce_dapo(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / TOKENS_OF_THE_STEP


REDUCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "grpo": (reduce_grpo, lambda mask: mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / mask.shape[0]),
    "bnpo": (reduce_bnpo, lambda mask: mask / mask.sum()),
    "dr_grpo": (reduce_dr_grpo, lambda mask: mask / (mask.shape[0] * MAX_LENGTH)),
    "dapo": (reduce_dapo, lambda mask: mask / TOKENS_OF_THE_STEP),
}


@dataclass(frozen=True)
class Peer:
    """A published loss, its reduction, the Objective that should equal it, and how far the ratios go."""

    loss: PerToken
    reduction: str
    objective: Objective
    spread: float = 0.6


DAPO = Objective(ratio_min=1 - 0.2, ratio_max=1 + 0.28)
GSPO = Objective(ratio_level="sequence", ratio_min=1 - 3e-4, ratio_max=1 + 4e-4)
PEERS: dict[str, Peer] = {
    "trl-grpo": Peer(clipped(token_ratio, 0.2, 0.2), "grpo", Objective()),
    "trl-bnpo": Peer(clipped(token_ratio, 0.2, 0.2), "bnpo", Objective()),
    "trl-dr_grpo": Peer(clipped(token_ratio, 0.2, 0.2), "dr_grpo", Objective()),
    "trl-dapo": Peer(clipped(token_ratio, 0.2, 0.28), "dapo", DAPO),
    "trl-delta": Peer(
        clipped(token_ratio, 0.2, 0.28, delta=1.6),
        "dapo",
        Objective(ratio_min=1 - 0.2, ratio_max=1 + 0.28, dual_clip=1.6),
    ),
    "trl-cispo": Peer(cispo(token_ratio, 1.5), "dapo", Objective(kind="cispo", ratio_min=0.0, ratio_max=1.5)),
    "trl-sapo": Peer(sapo, "grpo", Objective(kind="sapo")),
    "gspo": Peer(clipped(sequence_ratio, 3e-4, 4e-4), "grpo", GSPO, spread=1e-3),
    "gspo-wide": Peer(
        clipped(sequence_ratio, 0.2, 0.2, delta=1.3),
        "dapo",
        Objective(ratio_level="sequence", dual_clip=1.3),
    ),
    "cispo-sequence": Peer(
        cispo(sequence_ratio, 1.1),
        "dapo",
        Objective(kind="cispo", ratio_level="sequence", ratio_min=0.0, ratio_max=1.1),
    ),
    "deepseek-k3": Peer(
        with_kl(clipped(token_ratio, 0.2, 0.2), 0.04, k3), "grpo", Objective(kl="k3", beta=0.04)
    ),
    "v3.2-unbiased-kl": Peer(
        with_kl(clipped(token_ratio, 0.2, 0.2), 0.04, lambda b: token_ratio(b) * k3(b)),
        "grpo",
        Objective(kl="k3_unbiased", beta=0.04),
    ),
    "gspo-unbiased-kl": Peer(
        with_kl(clipped(sequence_ratio, 3e-4, 4e-4), 0.04, lambda b: token_ratio(b) * k3(b)),
        "grpo",
        Objective(ratio_level="sequence", ratio_min=1 - 3e-4, ratio_max=1 + 4e-4, kl="k3_unbiased", beta=0.04),
        spread=1e-3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_loss_and_gradient_are_the_peers(name: str) -> None:
    peer = PEERS[name]
    reduction, weights_of = REDUCTIONS[peer.reduction]
    cut = 0
    for seed in range(4):
        b = make_batch(peer.spread, seed)
        has_kl = peer.objective.kl != "none"
        expected = reduction(peer.loss(b), b.mask)
        (gradient,) = torch.autograd.grad(expected, b.logps)
        flat = b.logps.detach().flatten()
        count, width = b.mask.shape
        terms = policy_terms(
            flat,
            b.old.flatten(),
            b.advantages.expand_as(b.mask).flatten(),
            weights_of(b.mask).flatten(),
            peer.objective,
            b.ref.flatten() if has_kl else None,
            b.correction.flatten() if has_kl else None,
            sequence_ids=torch.arange(count).repeat_interleave(width),
        )
        torch.testing.assert_close(terms.loss.sum(), expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.dlogprob.view_as(gradient), gradient, rtol=1e-12, atol=1e-12)
        assert float(gradient.abs().max()) > 1e-3  # there was something to compare
        cut += int(terms.clipped_high.sum())
    assert (cut > 0) == (peer.objective.kind != "sapo")


def test_packed_tokens_are_the_padded_batch() -> None:
    """Padding removed: the same loss and gradient, whichever rows the sequences are in."""
    b = make_batch(1e-3)
    keep = b.mask.flatten().bool()
    ids = torch.arange(len(LENGTHS)).repeat_interleave(b.mask.shape[1])
    weights = REDUCTIONS["grpo"][1](b.mask).flatten()
    advantages = b.advantages.expand_as(b.mask).flatten()
    flat, old = b.logps.detach().flatten(), b.old.flatten()
    padded = policy_terms(flat, old, advantages, weights, GSPO, sequence_ids=ids)
    packed = policy_terms(flat[keep], old[keep], advantages[keep], weights[keep], GSPO, sequence_ids=ids[keep])
    assert torch.equal(packed.loss, padded.loss[keep]) and torch.equal(packed.dlogprob, padded.dlogprob[keep])
    assert not padded.dlogprob[~keep].any()


@settings(deadline=None, max_examples=100)
@given(st.floats(0, 30), st.floats(-5, 5), st.floats(0, 1), st.floats(1, 3), st.floats(0, 3))
def test_dual_clip_is_delta(ratio: float, advantage: float, low: float, high: float, above: float) -> None:
    """Ye et al.'s max(min(r A, clip A), c A) for A < 0 and INTELLECT-2's min(min(r, c) A, clip A) are one function."""
    cap = max(high + above, 1.0 + 1e-9)
    r, a = torch.tensor([max(ratio, 1e-6)]).double(), torch.tensor([advantage]).double()
    clip_a = torch.clamp(r, low, high) * a
    dual = torch.min(r * a, clip_a)
    dual = torch.where(a < 0, torch.max(dual, cap * a), dual)
    delta = torch.min(torch.clamp(r, max=cap) * a, clip_a)
    assert torch.equal(dual, delta)
    objective = Objective(ratio_min=low, ratio_max=high, dual_clip=cap)
    ours = policy_terms(r.log(), torch.zeros_like(r), a, torch.ones_like(r), objective)
    torch.testing.assert_close(ours.loss, -delta, rtol=1e-12, atol=1e-12)
