"""policy_terms against the published formulas, written out here, against autograd and against finite differences."""

import math
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rhotrain.kernels.objective import PolicyTerms, policy_terms
from rhotrain.kernels.spec import CELLS, KL_KINDS, OBJECTIVE_KINDS, RATIO_LEVELS, Cell, KLKind, Objective, ObjectiveKind

KINDS = cast(tuple[ObjectiveKind, ...], OBJECTIVE_KINDS)
LOG_RATIOS = (-50.0, -20.0, -3.0, -0.5, -0.125, 0.0, 0.125, 0.1875, 0.25, 0.5, 3.0, 20.0, 50.0)
ADVANTAGES = (-1.7, -0.3, 0.0, 0.4, 2.1)
SPREADS = ((0.0,), (-0.25, 0.25), (0.5, -0.125, -0.375))


def grid(log_ratios: tuple[float, ...] = LOG_RATIOS) -> dict[str, Tensor]:
    """float64 rows: for every log-ratio x advantage one sequence of 1 to 3 tokens with that mean, and a dead row.

    The sequences are interleaved and their labels arbitrary. Differences are exact: log-ratios and old logprobs are
    multiples of 1/16, so that +-20 is met exactly.
    """
    rows: list[tuple[float, float, float, int]] = []
    for i, (d, a) in enumerate(product(log_ratios, ADVANTAGES)):
        label = 7 * ((i * 29) % 101) - 300
        rows += [(d + s, a, (0.25, 1.0, 0.5)[j], label) for j, s in enumerate(SPREADS[i % 3])] + [(1.0, a, 0.0, label)]
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=g).tolist()
    log_ratio, advantages, weights = torch.tensor([rows[i][:3] for i in order], dtype=torch.float64).unbind(1)
    count = len(rows)
    old = -torch.randint(1, 80, (count,), generator=g).double() / 16
    logprobs = old + log_ratio
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantages,
        "weights": weights,
        "ref_logprobs": logprobs + torch.randn(count, generator=g, dtype=torch.float64) * 2,
        "importance": torch.rand(count, generator=g, dtype=torch.float64) * 3,
        "entropy": torch.rand(count, generator=g, dtype=torch.float64),
        "sequence_ids": torch.tensor([rows[i][3] for i in order]),
    }


def objective_of(cell: Cell, kl: str, **changes: Any) -> Objective:
    lo, hi = (0.0, 5.0) if cell.kind == "cispo" and cell.ratio_level == "token" else (0.8, 1.28)
    base = Objective(
        kind=cast(ObjectiveKind, cell.kind),
        ratio_level=cast(Any, cell.ratio_level),
        ratio_min=lo,
        ratio_max=hi,
        dual_clip=3.0 if cell.dual_clip else None,
        sapo_tau_pos=0.7,
        kl=cast(KLKind, kl),
        beta=0.0 if kl == "none" else 0.3,
        entropy_coef=0.07,
    )
    return replace(base, **changes)


def published(data: dict[str, Tensor], objective: Objective, lp: Tensor, held: Tensor) -> Tensor:
    """Per-token loss by the papers' formulas, with the guard of +-20 on log-ratios; lp [..., N].

    What the papers detach is evaluated at `held`, so that differences in lp see it as a constant.
    """
    advantages, lo, hi = data["advantages"], objective.ratio_min, objective.ratio_max
    alive, ids = data["weights"] != 0, data["sequence_ids"]
    together = ((ids[:, None] == ids) & alive).double()
    average = together / together.sum(1, keepdim=True).clamp(min=1)

    def token_ratio(x: Tensor) -> Tensor:
        return torch.exp(torch.clamp(x - data["old_logprobs"], -20.0, 20.0))

    def used_ratio(x: Tensor) -> Tensor:
        if objective.ratio_level == "token":
            return token_ratio(x)
        return torch.exp(torch.clamp((x - data["old_logprobs"]) @ average.T, -20.0, 20.0))  # GSPO

    ratio = used_ratio(lp)
    if objective.kind == "grpo":  # DeepSeekMath eq. 3; the dual clip as Ye et al. write it
        gain = torch.min(ratio * advantages, torch.clamp(ratio, lo, hi) * advantages)
        if objective.dual_clip is not None:
            gain = torch.where(advantages < 0, torch.max(gain, objective.dual_clip * advantages), gain)
        loss = -gain
    elif objective.kind == "cispo":  # MiniMax-M1 eq. 4-5
        loss = -torch.clamp(used_ratio(held), lo, hi) * advantages * lp
    elif objective.kind == "sapo":  # SAPO
        tau = torch.full_like(advantages, objective.sapo_tau_neg)
        tau[advantages > 0] = objective.sapo_tau_pos
        loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    else:
        loss = -advantages * lp
    loss = loss * data["importance"]

    def k3(x: Tensor) -> Tensor:  # DeepSeekMath eq. 4
        k = torch.clamp(data["ref_logprobs"] - x, -20.0, 20.0)
        return torch.exp(k) - k - 1

    k2 = torch.clamp(data["ref_logprobs"] - lp, -20.0, 20.0) ** 2 / 2
    k2_held = torch.clamp(data["ref_logprobs"] - held, -20.0, 20.0) ** 2 / 2
    kl = {"none": 0 * k2, "k2": k2, "k3": k3(lp), "k3_k2grad": k3(held) + k2 - k2_held}
    kl["k3_unbiased"] = token_ratio(lp) * k3(lp)  # DeepSeek-V3.2
    return data["weights"] * (loss + objective.beta * kl[objective.kl] - objective.entropy_coef * data["entropy"])


def terms_of(data: dict[str, Tensor], objective: Objective) -> PolicyTerms:
    return policy_terms(objective=objective, **data)


@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_against_the_published_formula(cell: Cell, kl: str) -> None:
    """Value, closed form and autograd through `loss`, over log-ratio x advantage x weight, entropy on and off."""
    for entropy_coef in (0.0, 0.07):
        objective = objective_of(cell, kl, entropy_coef=entropy_coef)
        data = grid()
        lp = data["logprobs"].requires_grad_()
        data["entropy"].requires_grad_()
        expected = published(data, objective, lp, lp.detach())
        dlp, dent = torch.autograd.grad(expected.sum(), (lp, data["entropy"]))
        terms = terms_of(data, objective)
        torch.testing.assert_close(terms.loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.dlogprob, dlp, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.dentropy, dent, rtol=1e-12, atol=1e-15)
        assert not any(t.requires_grad for t in (terms.dlogprob, terms.dentropy, terms.ratio, terms.kl))
        (through,) = torch.autograd.grad(terms.loss.sum(), lp)
        torch.testing.assert_close(through, dlp, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_against_finite_differences(cell: Cell, kl: str) -> None:
    """Central differences of the published loss in each logprob, in float64; +-20 is a kink and left out.

    Beside a policy term of exp(20) the difference of a KL term has no digits left, so +50 goes with kl = none.
    """
    data = grid((-50.0, -3.0, -0.5, 0.0, 0.125, 0.5, 3.0, *((50.0,) if kl == "none" else ())))
    objective, lp, h = objective_of(cell, kl), data["logprobs"], 1e-5
    steps = h * torch.eye(len(lp), dtype=torch.float64)
    difference = published(data, objective, lp + steps, lp) - published(data, objective, lp - steps, lp)
    terms = terms_of(data, objective)
    torch.testing.assert_close(terms.dlogprob, difference.sum(1) / (2 * h), rtol=1e-7, atol=1e-8)
    assert int((terms.dlogprob != 0).sum()) > 20


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradcheck(cell: Cell) -> None:
    """autograd's own check, of the second derivative too where nothing is detached."""
    data = grid((-0.5, 0.125, 0.5))
    lp = data.pop("logprobs").requires_grad_()
    if cell.kind != "cispo":
        objective = objective_of(cell, "k3_unbiased")
        assert torch.autograd.gradcheck(lambda x: policy_terms(x, objective=objective, **data).loss, lp)
        assert torch.autograd.gradgradcheck(lambda x: policy_terms(x, objective=objective, **data).loss, lp)
    else:  # the derivative of the value is not the gradient: the weight is detached
        terms = policy_terms(lp, objective=objective_of(cell, "none"), **data)
        torch.testing.assert_close(
            terms.dlogprob * lp.detach(), (terms.loss - terms.dentropy * data["entropy"]).detach()
        )


def test_numbers_by_hand() -> None:
    """Rows worked out by hand, so that the transcription above is itself checked."""
    lp = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-1.5, -1.5, -0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)
    ones, up, down = torch.ones(3, dtype=torch.float64), math.exp(0.5), math.exp(-0.5)

    def check(objective: Objective, loss: list[float], gradient: list[float], **kw: Tensor) -> PolicyTerms:
        terms = policy_terms(lp, old, advantages, ones, objective, **kw)
        torch.testing.assert_close(terms.loss, torch.tensor(loss, dtype=torch.float64))
        torch.testing.assert_close(terms.dlogprob, torch.tensor(gradient, dtype=torch.float64))
        return terms

    check(Objective(ratio_max=1.28), [-2.56, 2 * up, -down], [0.0, 2 * up, -down])
    dual = check(Objective(ratio_max=1.28, dual_clip=1.5), [-2.56, 3.0, -down], [0.0, 0.0, -down])
    assert dual.clipped_high.tolist() == [True, True, False] and not dual.clipped_low.any()
    cispo = Objective(kind="cispo", ratio_min=0.0, ratio_max=1.28)
    check(cispo, [2.56, -2.56, down], [-2.56, 2.56, -down])
    gates = [1 / (1 + math.exp(-t * (r - 1))) for t, r in ((1.0, up), (1.05, up), (1.0, down))]
    check(
        Objective(kind="sapo"),
        [-8 * gates[0], 8 / 1.05 * gates[1], -4 * gates[2]],
        [-a * r * 4 * g * (1 - g) for a, r, g in zip((2, -2, 1), (up, up, down), gates)],
    )
    mean = math.exp(1 / 6)  # of the log-ratios 0.5, 0.5, -0.5
    one = torch.zeros(3, dtype=torch.int64)
    wide = Objective(ratio_level="sequence", ratio_min=0.0, ratio_max=9.0)
    terms = check(wide, [-2 * mean, 2 * mean, -mean], [-mean / 3] * 3, sequence_ids=one)
    torch.testing.assert_close(terms.ratio, mean * ones)
    held = replace(wide, kind="cispo")
    check(held, [2 * mean, -2 * mean, mean], [-2 * mean, 2 * mean, -mean], sequence_ids=one)
    two = torch.tensor([5, 5, -9])  # 0.5 in the first, -0.5 in the second; A = 2 - 2 cancels in the first
    check(wide, [-2 * up, 2 * up, -down], [0.0, 0.0, -down], sequence_ids=two)
    advantages, log3 = 0 * ones, math.log(3.0)
    k3, ref = 3.0 - log3 - 1.0, {"ref_logprobs": lp + log3}
    check(Objective(kl="k3", beta=0.5), [0.5 * k3] * 3, [-1.0] * 3, **ref)
    unbiased = [r * -0.5 * log3 for r in (up, up, down)]
    terms = check(Objective(kl="k3_unbiased", beta=0.5), [0.5 * r * k3 for r in (up, up, down)], unbiased, **ref)
    torch.testing.assert_close(terms.kl, torch.tensor([up * k3, up * k3, down * k3], dtype=torch.float64))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_intervals_are_closed(cell: Cell) -> None:
    """A ratio exactly at a bound: the gradient passes and nothing counts as clipped; one step outside it is clipped."""
    lp = torch.tensor([-1.0, -1.0, -1.0])
    old = torch.tensor([-1.25, -0.75, -2.0])
    ratio = torch.exp(lp - old)
    up, down, cap = ratio.tolist()
    advantages, ids = torch.tensor([1.0, -1.0, -1.0]), torch.arange(3)
    at = objective_of(cell, "none", ratio_min=down, ratio_max=up, dual_clip=cap if cell.dual_clip else None)
    at = replace(at, entropy_coef=0.0, **({} if cell.kind == "grpo" else {"ratio_max": cap}))
    terms = policy_terms(lp, old, advantages, torch.ones(3), at, sequence_ids=ids)
    assert not terms.clipped_low.any() and not terms.clipped_high.any()
    if cell.kind in ("grpo", "cispo"):
        assert torch.equal(terms.dlogprob, -ratio * advantages)
    less = 1 - 1e-6
    inside = replace(at, ratio_min=down / less, ratio_max=at.ratio_max * less)
    inside = replace(inside, dual_clip=cap * less if cell.dual_clip else None)
    terms = policy_terms(lp, old, advantages, torch.ones(3), inside, sequence_ids=ids)
    low, high = {
        "grpo": ([False, True, False], [True, False, cell.dual_clip]),
        "cispo": ([False, True, False], [False, False, True]),
    }.get(cell.kind, ([False] * 3, [False] * 3))
    assert terms.clipped_low.tolist() == low and terms.clipped_high.tolist() == high
    if cell.kind == "grpo":
        assert terms.dlogprob.tolist() == [0.0, 0.0, 0.0 if cell.dual_clip else cap]


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_limit_of_the_log_ratio_is_closed(level: str) -> None:
    """At exactly 20 the derivative passes, beyond it is 0; the value stays exp(20). Of a sequence the mean counts."""
    lp = torch.tensor([20.0, math.nextafter(20.0, 21.0), 50.0, -50.0], dtype=torch.float64)
    zeros, minus = torch.zeros_like(lp), -torch.ones_like(lp)
    objective = Objective(ratio_min=0.0, ratio_max=1.2, ratio_level=cast(Any, level))
    terms = policy_terms(lp, zeros, minus, -minus, objective, sequence_ids=torch.arange(4))
    assert terms.dlogprob.tolist() == [math.exp(20.0), 0.0, 0.0, 0.0]
    torch.testing.assert_close(terms.ratio, torch.tensor([20.0, 20.0, 20.0, -20.0]).double().exp())
    if level == "sequence":
        half = torch.tensor([40.0, 0.0, 41.0, 0.0], dtype=torch.float64)
        terms = policy_terms(half, zeros, minus, -minus, objective, sequence_ids=torch.tensor([0, 0, 1, 1]))
        assert terms.dlogprob.tolist() == [math.exp(20.0)] * 2 + [0.0, 0.0]
    kl = policy_terms(zeros, zeros, zeros, -minus, Objective(kl="k3", beta=1.0), ref_logprobs=lp)
    torch.testing.assert_close(kl.dlogprob[0], torch.tensor(-math.expm1(20.0), dtype=torch.float64))
    assert kl.dlogprob[1:].tolist() == [0.0, 0.0, 0.0] and bool(kl.loss.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_clip_flags(kind: ObjectiveKind) -> None:
    """grpo: the bound cuts the gradient (depends on A's sign); cispo: the weight is clamped; the others: never."""
    log_ratio = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    terms = policy_terms(log_ratio, torch.zeros(5), advantages, torch.ones(5), Objective(kind=kind))
    low = {"grpo": [0, 1, 0, 0, 0], "cispo": [1, 1, 0, 0, 0]}.get(kind, [0] * 5)
    high = {"grpo": [0, 0, 0, 1, 0], "cispo": [0, 0, 0, 1, 1]}.get(kind, [0] * 5)
    assert terms.clipped_low.int().tolist() == low and terms.clipped_high.int().tolist() == high


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_weight_zero_contributes_nothing(cell: Cell, bad: float) -> None:
    objective = objective_of(cell, "k3_unbiased")
    data = {name: values.clone() for name, values in grid().items()}
    dead = data["weights"] == 0
    clean = terms_of(data, objective)
    for name in data:
        if name not in ("weights", "sequence_ids"):
            data[name][dead] = bad
    data["logprobs"].requires_grad_()
    terms = terms_of(data, objective)
    for name in ("loss", "dlogprob", "dentropy", "ratio", "kl", "clipped_low", "clipped_high"):
        value = getattr(terms, name).detach()
        assert bool((value[dead] == 0).all()), name
        assert torch.equal(value[~dead], getattr(clean, name)[~dead]), name
    (grad,) = torch.autograd.grad(terms.loss.sum(), data["logprobs"])
    assert bool((grad[dead] == 0).all()) and bool(grad.isfinite().all())
    if cell.kind == "grpo":  # its bounds must hold the 1 of such a row
        return
    for low, high in ((0.0, 0.5), (1.5, 2.0)):  # bounds that it would break
        terms = terms_of(data, replace(objective, ratio_min=low, ratio_max=high))
        assert not terms.clipped_low[dead].any() and not terms.clipped_high[dead].any()


@pytest.mark.parametrize("kind", ["grpo", "cispo"])
def test_a_sequence_does_not_see_the_others(kind: ObjectiveKind) -> None:
    """float32: alone, in a batch, in another order of sequences and under other labels the bits are the same."""
    data = {name: v.float() if v.is_floating_point() else v for name, v in grid().items()}
    data["old_logprobs"] = data["old_logprobs"] + 1e-3 * torch.rand(len(data["weights"]))
    objective = Objective(kind=kind, ratio_level="sequence", kl="k3", beta=0.1)
    whole, ids = terms_of(data, objective), data["sequence_ids"]
    alone = [torch.nonzero(ids == label).squeeze(1) for label in ids.unique()[:9]]
    for rows in [torch.argsort(-ids, stable=True), *alone]:
        part = {name: values[rows] for name, values in data.items()} | {"sequence_ids": 1000 - ids[rows]}
        terms = terms_of(part, objective)
        for name in ("loss", "dlogprob", "ratio", "clipped_low", "clipped_high"):
            assert torch.equal(getattr(terms, name), getattr(whole, name)[rows]), name
    nothing = {name: values[:0] for name, values in data.items()}
    assert terms_of(nothing, objective).dlogprob.shape == (0,)


FINITE = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-90, 0, width=32), FINITE, FINITE), min_size=1, max_size=8))
def test_on_policy_all_cells_have_the_same_gradient(rows: list[tuple[float, float, float]]) -> None:
    """old_logprobs None, or equal to the logprobs: ratio exactly 1, nothing clipped, gradient -A w."""
    lp, advantages, weights = torch.tensor(rows).unbind(1)
    leaf, alone = lp.clone().requires_grad_(), torch.arange(len(rows))  # a sequence of one token is that token
    for cell, old in product(CELLS, (None, lp)):
        objective = objective_of(cell, "none", entropy_coef=0.0)
        got = policy_terms(leaf, old, advantages, weights, objective, sequence_ids=alone)
        assert torch.equal(got.ratio, (weights != 0).float())
        assert not got.clipped_low.any() and not got.clipped_high.any()
        (gradient,) = torch.autograd.grad(got.loss.sum(), leaf)
        torch.testing.assert_close(gradient, -advantages * weights, rtol=3e-7, atol=1e-37)
        torch.testing.assert_close(got.dlogprob, -advantages * weights, rtol=0, atol=0)


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
    with pytest.raises(ValueError, match=r"sequence_ids: missing, but objective\.ratio_level='sequence'"):
        policy_terms(x, x, x, x, Objective(ratio_level="sequence"))
    for ids in (torch.zeros(2), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"sequence_ids: need int64 \[2\], got torch"):
            policy_terms(x, x, x, x, Objective(ratio_level="sequence"), sequence_ids=ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_does_not_cancel(dtype: torch.dtype) -> None:
    """Value and slope are good to a few ulp of themselves, from |k| = 1e-6 to the limit, also through autograd."""
    k = torch.cat([sign * torch.logspace(-6, math.log10(19.9), 200, dtype=dtype) for sign in (1, -1)])
    ones, lp = torch.ones_like(k), torch.zeros_like(k).requires_grad_()
    terms = policy_terms(lp, None, 0 * k, ones, Objective(kl="k3", beta=1.0), ref_logprobs=k)
    (through,) = torch.autograd.grad(terms.loss.sum(), lp)
    exact = k.double()
    value = torch.tensor([_k3(x) for x in exact.tolist()], dtype=torch.float64)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(terms.kl.double(), value, rtol=tolerance, atol=0)
    torch.testing.assert_close(terms.dlogprob.double(), -torch.expm1(exact), rtol=tolerance, atol=0)
    torch.testing.assert_close(through.double(), -torch.expm1(exact), rtol=tolerance, atol=0)


def _k3(k: float) -> float:
    """By the power series with an exact sum, or by expm1 where that has not lost a bit worth having."""
    return math.fsum(k**n / math.factorial(n) for n in range(2, 30)) if abs(k) < 2 else math.expm1(k) - k


@pytest.mark.parametrize("kl", ["k2", "k3", "k3_k2grad", "k3_unbiased"])
def test_expected_gradient_of_the_kl(kl: KLKind) -> None:
    """Summed over the vocabulary with p as weights: k2's gradient is that of KL(p || q), as r k3's; k3's is not.

    k1's is 0. k3_unbiased keeps its promise off-policy too: the tokens are weighted with the old policy's p.
    """
    g = torch.Generator().manual_seed(1)
    z = torch.randn(9, generator=g, dtype=torch.float64, requires_grad=True)
    log_q, log_old = torch.log_softmax(torch.randn(2, 9, generator=g, dtype=torch.float64), -1)
    logp = torch.log_softmax(z, -1)
    p = logp.detach().exp()
    (truth,) = torch.autograd.grad((logp.exp() * (logp - log_q)).sum(), z, retain_graph=True)
    (k1,) = torch.autograd.grad((p * (logp - log_q)).sum(), z, retain_graph=True)
    assert float(k1.abs().max()) < 1e-15
    objective, k1_value = Objective(kl=kl, beta=1.0), (p * (logp.detach() - log_q)).sum()
    for old in (logp.detach(), log_old):
        terms = policy_terms(logp, old, torch.zeros_like(p), old.exp(), objective, ref_logprobs=log_q)
        (ours,) = torch.autograd.grad(terms.loss.sum(), z, retain_graph=True)
        right = kl == "k3_unbiased" or (kl != "k3" and old is not log_old)
        assert bool(torch.allclose(ours, truth, rtol=1e-12, atol=1e-14)) == right
        if kl == "k3_unbiased" or (kl != "k2" and old is not log_old):
            torch.testing.assert_close((old.exp() * terms.kl).sum(), k1_value)
