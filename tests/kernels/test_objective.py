"""policy_terms against the published formulas, written out here, and against autograd."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.objective import PolicyTerms, policy_terms
from rhotrain.kernels.spec import KLKind, Objective, ObjectiveKind

KINDS: tuple[ObjectiveKind, ...] = ("grpo", "cispo", "reinforce")
KLS: tuple[KLKind, ...] = ("none", "k2", "k3", "k3_k2grad")
LOG_RATIOS = (-50.0, -20.5, -3.0, -0.5, -0.1, 0.0, 0.1, 0.17, 0.5, 3.0, 20.5, 50.0)
ADVANTAGES = (-1.7, -0.3, 0.0, 0.4, 2.1)


def grid() -> dict[str, Tensor]:
    """Every log-ratio x advantage x weight (0 among them) as rows, float64, with varied ref, importance and entropy."""
    cells = list(product(LOG_RATIOS, ADVANTAGES, (0.0, 0.25, 1.0)))
    log_ratio, advantages, weights = torch.tensor(cells, dtype=torch.float64).unbind(1)
    g = torch.Generator().manual_seed(0)
    count = len(cells)
    old = -5.0 * torch.rand(count, generator=g, dtype=torch.float64) - 0.05
    logprobs = old + log_ratio
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - log_ratio,
        "advantages": advantages,
        "weights": weights,
        "ref_logprobs": logprobs + torch.randn(count, generator=g, dtype=torch.float64) * 2,
        "importance": torch.rand(count, generator=g, dtype=torch.float64) * 3,
        "entropy": torch.rand(count, generator=g, dtype=torch.float64),
    }


def published(data: dict[str, Tensor], objective: Objective) -> Tensor:
    """Per-token loss by the papers' formulas, with the guard of +-20 on log-ratios; differentiable."""
    lp, advantages = data["logprobs"], data["advantages"]
    ratio = torch.exp(torch.clamp(lp - data["old_logprobs"], -20.0, 20.0))
    lo, hi = objective.ratio_min, objective.ratio_max
    if objective.kind == "grpo":  # DeepSeekMath eq. 3; TRL: min(coef_1 A, clamp(coef_1, 1 - eps, 1 + eps_high) A)
        loss = -torch.min(ratio * advantages, torch.clamp(ratio, lo, hi) * advantages)
    elif objective.kind == "cispo":  # MiniMax-M1 eq. 4-5; TRL: clamp(coef_1, max=epsilon_high).detach()
        loss = -torch.clamp(ratio, lo, hi).detach() * advantages * lp
    else:
        loss = -advantages * lp
    loss = loss * data["importance"]
    k = torch.clamp(data["ref_logprobs"] - lp, -20.0, 20.0)
    k2, k3 = k**2 / 2, torch.exp(k) - k - 1  # k3: DeepSeekMath eq. 4
    if objective.kl == "k2":
        loss = loss + objective.beta * k2
    elif objective.kl == "k3":
        loss = loss + objective.beta * k3
    elif objective.kl == "k3_k2grad":
        loss = loss + objective.beta * (k2 + (k3 - k2).detach())
    return data["weights"] * (loss - objective.entropy_coef * data["entropy"])


def terms_of(data: dict[str, Tensor], objective: Objective) -> PolicyTerms:
    return policy_terms(objective=objective, **data)


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_against_the_published_formula(kind: ObjectiveKind, kl: KLKind) -> None:
    """Value, closed form and autograd through `loss`, over log-ratio x advantage x weight, entropy on and off."""
    beta = 0.0 if kl == "none" else 0.3
    lo, hi = (0.0, 5.0) if kind == "cispo" else (0.8, 1.28)
    for entropy_coef in (0.0, 0.07):
        objective = Objective(kind=kind, ratio_min=lo, ratio_max=hi, kl=kl, beta=beta, entropy_coef=entropy_coef)
        data = grid()
        data["logprobs"].requires_grad_()
        data["entropy"].requires_grad_()
        expected = published(data, objective)
        dlp, dent = torch.autograd.grad(expected.sum(), (data["logprobs"], data["entropy"]))
        terms = terms_of(data, objective)
        torch.testing.assert_close(terms.loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.dlogprob, dlp, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.dentropy, dent, rtol=1e-12, atol=1e-15)
        assert not terms.dlogprob.requires_grad and not terms.ratio.requires_grad and not terms.kl.requires_grad
        (through,) = torch.autograd.grad(terms.loss.sum(), data["logprobs"])
        torch.testing.assert_close(through, dlp, rtol=1e-12, atol=1e-12)


def test_trl_and_deepseek_numbers() -> None:
    """A row worked out by hand from TRL's lines, so that the transcription above is itself checked."""
    lp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.5, -1.5, -0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    grpo = policy_terms(lp, old, advantages, ones, Objective(ratio_min=0.8, ratio_max=1.28))
    expected = torch.tensor([-2.56, 2 * math.exp(0.5), -math.exp(-0.5)], dtype=torch.float64)
    torch.testing.assert_close(grpo.loss, expected)
    torch.testing.assert_close(grpo.dlogprob, torch.tensor([0.0, 2 * math.exp(0.5), -math.exp(-0.5)]).double())
    cispo = policy_terms(lp, old, advantages, ones, Objective(kind="cispo", ratio_min=0.0, ratio_max=1.28))
    torch.testing.assert_close(cispo.loss, torch.tensor([2.56, -2.56, math.exp(-0.5)], dtype=torch.float64))
    kl = policy_terms(lp, old, 0 * ones, ones, Objective(kl="k3", beta=0.5), ref_logprobs=lp + math.log(3.0))
    torch.testing.assert_close(kl.kl, (3.0 - math.log(3.0) - 1.0) * ones)
    torch.testing.assert_close(kl.loss, 0.5 * (3.0 - math.log(3.0) - 1.0) * ones)
    torch.testing.assert_close(kl.dlogprob, 0.5 * (1.0 - 3.0) * ones)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_are_closed(kind: ObjectiveKind) -> None:
    """A ratio exactly at a bound: the gradient passes and nothing counts as clipped; one step outside it is clipped."""
    lp = torch.tensor([-1.0, -1.0])
    old = torch.tensor([-1.2, -0.7])
    ratio = torch.exp(lp - old)
    advantages = torch.tensor([1.0, -1.0])
    at = Objective(kind=kind, ratio_min=float(ratio[1]), ratio_max=float(ratio[0]))
    terms = policy_terms(lp, old, advantages, torch.ones(2), at)
    assert not bool(terms.clipped_low.any()) and not bool(terms.clipped_high.any())
    assert torch.equal(terms.dlogprob, -advantages if kind == "reinforce" else -ratio * advantages)
    inside = Objective(kind=kind, ratio_min=float(ratio[1]) * (1 + 1e-6), ratio_max=float(ratio[0]) * (1 - 1e-6))
    terms = policy_terms(lp, old, advantages, torch.ones(2), inside)
    clips = kind != "reinforce"
    assert terms.clipped_high.tolist() == [clips, False] and terms.clipped_low.tolist() == [False, clips]
    if kind == "grpo":
        assert terms.dlogprob.tolist() == [0.0, 0.0]


def test_limit_of_the_log_ratio_is_closed() -> None:
    """At exactly 20 the derivative passes, beyond it is 0; the value stays exp(20)."""
    lp = torch.tensor([20.0, math.nextafter(20.0, 21.0), 50.0, -50.0], dtype=torch.float64)
    zeros, minus = torch.zeros_like(lp), -torch.ones_like(lp)
    terms = policy_terms(lp, zeros, minus, -minus, Objective(ratio_min=0.0, ratio_max=1.2))
    assert terms.dlogprob.tolist() == [math.exp(20.0), 0.0, 0.0, 0.0]
    torch.testing.assert_close(terms.ratio, torch.tensor([20.0, 20.0, 20.0, -20.0]).double().exp())
    kl = policy_terms(zeros, zeros, zeros, -minus, Objective(kl="k3", beta=1.0), ref_logprobs=lp)
    torch.testing.assert_close(kl.dlogprob[0], torch.tensor(-math.expm1(20.0), dtype=torch.float64))
    assert kl.dlogprob[1:].tolist() == [0.0, 0.0, 0.0] and bool(kl.loss.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_clip_flags(kind: ObjectiveKind) -> None:
    """grpo: the bound cuts the gradient (depends on A's sign); cispo: the weight is clamped; reinforce: never."""
    log_ratio = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    terms = policy_terms(log_ratio, torch.zeros(5), advantages, torch.ones(5), Objective(kind=kind))
    low = {"grpo": [0, 1, 0, 0, 0], "cispo": [1, 1, 0, 0, 0], "reinforce": [0] * 5}[kind]
    high = {"grpo": [0, 0, 0, 1, 0], "cispo": [0, 0, 0, 1, 1], "reinforce": [0] * 5}[kind]
    assert terms.clipped_low.int().tolist() == low and terms.clipped_high.int().tolist() == high


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_zero_contributes_nothing(kind: ObjectiveKind, bad: float) -> None:
    objective = Objective(kind=kind, kl="k3", beta=0.1, entropy_coef=0.1)
    data = {name: values.clone() for name, values in grid().items()}
    dead = data["weights"] == 0
    clean = terms_of(data, objective)
    for name in data:
        if name != "weights":
            data[name][dead] = bad
    data["logprobs"].requires_grad_()
    terms = terms_of(data, objective)
    for name in ("loss", "dlogprob", "dentropy", "ratio", "kl", "clipped_low", "clipped_high"):
        value = getattr(terms, name).detach()
        assert bool((value[dead] == 0).all()), name
        assert torch.equal(value[~dead], getattr(clean, name)[~dead]), name
    (grad,) = torch.autograd.grad(terms.loss.sum(), data["logprobs"])
    assert bool((grad[dead] == 0).all()) and bool(grad.isfinite().all())


def test_at_ratio_one_all_kinds_have_the_same_gradient() -> None:
    lp = torch.tensor([-0.5, -2.0, -7.0])
    advantages, weights = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.1, 0.2, 0.0])
    for kind in KINDS:
        terms = policy_terms(lp, lp.clone(), advantages, weights, Objective(kind=kind))
        assert torch.equal(terms.dlogprob, -advantages * weights)
        assert terms.ratio.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_on_policy(kind: ObjectiveKind) -> None:
    data = grid()
    logprobs = data["logprobs"].requires_grad_()
    got = policy_terms(logprobs, None, data["advantages"], data["weights"], Objective(kind=kind))
    assert torch.equal(got.ratio, (data["weights"] != 0).double())
    assert not got.clipped_low.any() and not got.clipped_high.any()
    (gradient,) = torch.autograd.grad(got.loss.sum(), logprobs)
    expected = -data["advantages"] * data["weights"]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    torch.testing.assert_close(got.dlogprob, expected, rtol=0, atol=0)


def test_old_logprobs_with_a_graph_are_refused() -> None:
    """The trap itself (exp(x - x) has gradient 0), its refusal, and the gradient with a detached snapshot."""
    lp = torch.tensor([-0.5, -2.0], requires_grad=True)
    advantages, weights = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    (trap,) = torch.autograd.grad((-torch.exp(lp - lp) * advantages * weights).sum(), lp)
    assert trap.tolist() == [0.0, 0.0]
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"old_logprobs: requires grad. .*1 with zero gradient.*detach"):
            policy_terms(lp, lp, advantages, weights, Objective(kind=kind))
        terms = policy_terms(lp, lp.detach(), advantages, weights, Objective(kind=kind))
        (grad,) = torch.autograd.grad(terms.loss.sum(), lp)
        assert torch.equal(grad, -advantages * weights)


@pytest.mark.parametrize("name", ["advantages", "weights", "ref_logprobs", "importance"])
def test_other_constants_with_a_graph_are_refused(name: str) -> None:
    data = grid()
    data[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name}: requires grad. it is a constant"):
        terms_of(data, Objective(kl="k3", beta=0.1))


def test_missing_inputs() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="ref_logprobs: missing"):
        policy_terms(x, x, x, x, Objective(kl="k3", beta=0.1))
    with pytest.raises(ValueError, match="entropy: missing"):
        policy_terms(x, x, x, x, Objective(entropy_coef=0.1))
    with pytest.raises(ValueError, match="'k1' is refused as a loss: its expected gradient is exactly 0"):
        replace(Objective(), kl="k1")  # type: ignore[arg-type]


@pytest.mark.parametrize("kl", ["k2", "k3", "k3_k2grad"])
def test_expected_gradient_of_the_kl(kl: KLKind) -> None:
    """Summed over the vocabulary with p as weights: k2's gradient is that of KL(p || q), k3's is not, k1's is 0."""
    g = torch.Generator().manual_seed(1)
    z = torch.randn(9, generator=g, dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(9, generator=g, dtype=torch.float64), -1)
    logp = torch.log_softmax(z, -1)
    p = logp.detach().exp()
    (truth,) = torch.autograd.grad((logp.exp() * (logp - log_q)).sum(), z, retain_graph=True)
    (k1,) = torch.autograd.grad((p * (logp - log_q)).sum(), z, retain_graph=True)
    assert float(k1.abs().max()) < 1e-15
    objective = Objective(kl=kl, beta=1.0)
    terms = policy_terms(logp, logp.detach(), torch.zeros_like(p), p, objective, ref_logprobs=log_q)
    (ours,) = torch.autograd.grad(terms.loss.sum(), z)
    assert bool(torch.allclose(ours, truth, rtol=1e-12, atol=1e-14)) == (kl != "k3")
    k1_value = (p * (logp.detach() - log_q)).sum()
    if kl != "k2":
        torch.testing.assert_close((p * terms.kl).sum(), k1_value)
