"""policy_loss against token_logprobs + policy_terms + autograd, and against the formulas written out in float64."""

import math
from typing import Any, cast

import pytest
import torch
from helpers_kernels import VOCABS, make_logits, ulp
from torch import Tensor

from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.objective import policy_terms
from rhotrain.kernels.policy_loss import PolicyInputs, PolicyLoss, policy_loss
from rhotrain.kernels.spec import CELLS, KL_KINDS, Cell, KLKind, Objective, ObjectiveKind, RatioLevel

METRICS = ("logprobs", "ratio", "kl", "entropy", "clipped_low", "clipped_high")


def make_inputs(logprobs_N: Tensor, seed: int = 1, spread: float = 0.4) -> PolicyInputs:
    """Constants around the given logprobs: ratios on both sides of the bounds, both signs of the advantage."""
    g = torch.Generator().manual_seed(seed)
    lp = logprobs_N.detach()

    def randn() -> Tensor:
        return torch.randn(lp.shape[0], generator=g, dtype=torch.float64).to(lp.dtype)

    return PolicyInputs(
        old_logprobs=lp + spread * randn(),
        advantages=randn(),
        weights=randn().abs() + 0.1,
        ref_logprobs=lp + spread * randn(),
        importance=randn().abs(),
        sequence_ids=torch.arange(lp.shape[0]) // 3 * 7 % 5,
    )


def unfused(logits: Tensor, ids: Tensor, inputs: PolicyInputs, objective: Objective, **kw: Any) -> dict[str, Tensor]:
    """Loss and metrics from the two ops and autograd. Rows without weight have to be masked by hand."""
    ids = torch.where(inputs.weights == 0, -100, ids)
    out = token_logprobs(logits, ids, entropy=True, **kw)
    assert out.entropy is not None
    weights = torch.where(ids == -100, 0.0, inputs.weights)
    terms = policy_terms(
        out.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        weights,
        objective,
        inputs.ref_logprobs,
        inputs.importance,
        out.entropy,
        inputs.sequence_ids,
    )
    result = {name: getattr(terms, name) for name in ("ratio", "kl", "clipped_low", "clipped_high")}
    return {"loss": terms.loss.sum(), "logprobs": out.logprobs, "entropy": out.entropy, **result}


def objective_of(cell: Cell, kl: KLKind, entropy_coef: float) -> Objective:
    """An objective of the cell, with a KL and bounds that some of `make_inputs`'s ratios cross."""
    return Objective(
        kind=cast(ObjectiveKind, cell.kind),
        ratio_level=cast(RatioLevel, cell.ratio_level),
        ratio_min=0.85,
        ratio_max=1.1,
        dual_clip=1.3 if cell.dual_clip else None,
        kl=kl,
        beta=0.0 if kl == "none" else 0.2,
        entropy_coef=entropy_coef,
    )


def problem(rows: int = 9, vocab: int = 61) -> tuple[Tensor, Tensor, PolicyInputs, dict[str, Any]]:
    """float64, with an ignored row, a row of weight 0, padding, per-row temperature and kept sets."""
    logits, ids = make_logits("randn", rows, vocab)
    ids.clamp_(max=vocab - 4)
    kept = KeptSet.from_lists([sorted({int(i), *range(k, vocab - 3, 2)}) for k, i in enumerate(ids)])
    ids[2] = -100
    temperature = torch.linspace(0.5, 2.0, rows, dtype=torch.float64)
    kw: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab - 3, "kept": kept}
    inputs = make_inputs(token_logprobs(logits, ids, **kw).logprobs)
    inputs.weights[5] = 0.0
    return logits, ids, inputs, kw


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_fused_is_unfused(cell: Cell, kl: KLKind, entropy_coef: float) -> None:
    objective = objective_of(cell, kl, entropy_coef)
    logits, ids, inputs, kw = problem()
    leaf = logits.clone().requires_grad_()
    ours = policy_loss(leaf, ids, inputs, objective, **kw)
    (grad,) = torch.autograd.grad(ours.loss, leaf)
    expected = unfused(leaf, ids, inputs, objective, **kw)
    (expected_grad,) = torch.autograd.grad(expected["loss"], leaf)
    torch.testing.assert_close(ours.loss, expected["loss"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-13)
    for name in METRICS:
        value = getattr(ours, name)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-12, atol=1e-13)
        assert bool((value[[2, 5]] == 0).all()), name
    assert bool((grad[[2, 5]] == 0).all()) and bool((grad[:, 58:] == 0).all())


def test_formula_written_out() -> None:
    """GRPO with asymmetric clip and DeepSeek's k3, in plain torch on tempered logits."""
    logits, ids = make_logits("randn", 40, 23)
    leaf = logits.clone().requires_grad_()
    logp = torch.log_softmax(leaf / 0.8, -1)
    lp = logp.gather(1, ids[:, None]).squeeze(1)
    inputs = make_inputs(lp)
    assert inputs.ref_logprobs is not None and inputs.importance is not None and inputs.old_logprobs is not None
    r = torch.exp(lp - inputs.old_logprobs)
    policy = -torch.min(r * inputs.advantages, torch.clamp(r, 0.8, 1.28) * inputs.advantages)
    k = inputs.ref_logprobs - lp
    entropy = -(logp.exp() * logp).sum(-1)
    per_token = inputs.importance * policy + 0.04 * (torch.exp(k) - k - 1) - 0.01 * entropy
    expected = (inputs.weights * per_token).sum()
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    objective = Objective(kind="grpo", ratio_min=0.8, ratio_max=1.28, kl="k3", beta=0.04, entropy_coef=0.01)
    ours = policy_loss(leaf, ids, inputs, objective, temperature=0.8)
    (grad,) = torch.autograd.grad(ours.loss, leaf)
    torch.testing.assert_close(ours.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-14)
    assert 0 < int(ours.clipped_high.sum()) < 40 and 0 < int(ours.clipped_low.sum()) < 40


@pytest.mark.parametrize("kind", ["grpo", "cispo", "reinforce"])
def test_gradcheck(kind: ObjectiveKind) -> None:
    """Numerical derivative of the loss itself; cispo's weight is a constant of it only where it is clamped."""
    logits, ids, inputs, kw = problem(rows=6, vocab=11)
    bounds = (0.0, 0.001) if kind == "cispo" else (0.5, 2.0)
    objective = Objective(kind=kind, ratio_min=bounds[0], ratio_max=bounds[1], kl="k3", beta=0.2, entropy_coef=0.1)

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, ids, inputs, objective, **kw).loss

    assert torch.autograd.gradcheck(loss, (logits.requires_grad_(),))


@pytest.mark.parametrize("case", ["randn", "peaked", "blocks", "equal"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_error_is_no_larger_than_eager(vocab: int, case: str) -> None:
    """logprob, entropy, gradient against float64: at most the same-dtype eager error + 4 ulp of the largest |x / T|."""
    exact, ids = make_logits(case, 3, vocab)
    objective = Objective(kind="reinforce", entropy_coef=0.1)

    def eager(dtype: torch.dtype, inputs: PolicyInputs) -> tuple[Tensor, Tensor, Tensor]:
        leaf = exact.to(dtype, copy=True).requires_grad_()
        logp = torch.log_softmax(leaf / 0.7, -1)
        lp, entropy = logp.gather(1, ids[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
        per_token = -inputs.advantages.to(dtype) * lp - 0.1 * entropy
        (grad,) = torch.autograd.grad((inputs.weights.to(dtype) * per_token).sum(), leaf)
        return lp.detach().double(), entropy.detach().double(), grad.double()

    g = torch.Generator().manual_seed(0)
    advantages, weights = torch.randn(3, generator=g), torch.rand(3, generator=g)
    inputs = PolicyInputs(old_logprobs=torch.zeros(3), advantages=advantages, weights=weights)
    truth = eager(torch.float64, inputs)
    allowance = 4 * ulp(float(exact.abs().max()) / 0.7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        leaf = exact.to(dtype).requires_grad_()
        out = policy_loss(leaf, ids, inputs, objective, temperature=0.7)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        assert out.loss.dtype == torch.float32 and grad.dtype == dtype
        for name, a, e, t in zip(
            ("logprob", "entropy", "grad"), (out.logprobs, out.entropy, grad), eager(dtype, inputs), truth
        ):
            error, bound = float((a.double() - t).abs().max()), float((e - t).abs().max()) + allowance
            assert error <= bound, (name, dtype)


def test_gradient_at_ratio_one_and_refusal_of_a_graph() -> None:
    """`old` taken with its graph is refused; detached, the gradient of grpo per logprob is -A * weight, not 0."""
    logits, ids = make_logits("randn", 6, 31)
    leaf = logits.requires_grad_()
    current = token_logprobs(leaf, ids).logprobs
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3, 0.0], dtype=torch.float64)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"old_logprobs: requires grad. exp\(logprob - old_logprob\) would be exp\(x - x\)"
    ):
        PolicyInputs(old_logprobs=current, advantages=advantages, weights=weights)
    inputs = PolicyInputs(old_logprobs=current.detach(), advantages=advantages, weights=weights)
    expected = torch.autograd.grad(current, leaf, -advantages * weights)[0]
    for kind in ("grpo", "cispo", "reinforce"):
        out = policy_loss(leaf, ids, inputs, Objective(kind=kind))  # type: ignore[arg-type]
        assert bool((out.ratio == 1.0).all())
        torch.testing.assert_close(torch.autograd.grad(out.loss, leaf)[0], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("log_ratio", [-50.0, 50.0])
def test_huge_log_ratios_stay_finite(log_ratio: float) -> None:
    logits, ids = make_logits("randn", 4, 31)
    leaf = logits.float().requires_grad_()
    lp = token_logprobs(leaf.detach(), ids).logprobs
    advantages = torch.tensor([1.0, -1.0, 3.0, -3.0])
    inputs = PolicyInputs(
        old_logprobs=lp - log_ratio, advantages=advantages, weights=torch.ones(4), ref_logprobs=lp + log_ratio
    )
    for kind in ("grpo", "cispo"):
        objective = Objective(kind=kind, kl="k3", beta=0.1)  # type: ignore[arg-type]
        out = policy_loss(leaf, ids, inputs, objective)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        assert bool(out.loss.isfinite()) and bool(grad.isfinite().all())
        if kind == "grpo":
            assert bool((grad == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_loss_are_never_read(bad: float) -> None:
    logits, ids, inputs, kw = problem()
    objective = Objective(kl="k3", beta=0.1, entropy_coef=0.1)
    leaf = logits.clone().requires_grad_()
    clean = policy_loss(leaf, ids, inputs, objective, **kw)
    (clean_grad,) = torch.autograd.grad(clean.loss, leaf)
    with torch.no_grad():
        leaf[[2, 5]] = bad
    for field in (inputs.old_logprobs, inputs.advantages, inputs.ref_logprobs, inputs.importance):
        assert field is not None
        field[[2, 5]] = bad
    ids[5] = 10**6  # a row of weight 0 may hold any id
    out = policy_loss(leaf, ids, inputs, objective, **kw)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert torch.equal(out.loss, clean.loss) and torch.equal(grad, clean_grad)
    for name in METRICS:
        assert torch.equal(getattr(out, name), getattr(clean, name))


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_do(rows: int) -> None:
    """N = 0, and every row masked: loss 0, gradient 0, no NaN."""
    leaf = torch.full((rows, 5), math.nan, requires_grad=True)
    zeros = torch.zeros(rows)
    inputs = PolicyInputs(old_logprobs=zeros, advantages=zeros, weights=zeros)
    out = policy_loss(leaf, torch.zeros(rows, dtype=torch.int64), inputs, Objective())
    out.loss.backward()
    assert out.loss.item() == 0.0 and out.logprobs.shape == (rows,)
    assert leaf.grad is not None and leaf.grad.shape == (rows, 5) and bool((leaf.grad == 0).all())


def test_split_and_order_change_nothing() -> None:
    logits, ids, inputs, kw = problem(rows=12)
    objective = Objective(kl="k3", beta=0.1, entropy_coef=0.1)

    def loss_and_grad(index: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        mine = {
            "temperature": kw["temperature"][index],
            "kept": kw["kept"].select(index),
            "vocab_size": kw["vocab_size"],
        }
        out = policy_loss(leaf[index], ids[index], inputs.select(index), objective, **mine)
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    whole, whole_grad = loss_and_grad(torch.arange(12))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    parts = [loss_and_grad(part) for part in (order[:1], order[1:6], order[6:])]
    torch.testing.assert_close(sum(p[0] for p in parts), whole, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sum(p[1] for p in parts), whole_grad, rtol=1e-12, atol=1e-15)


# ---- backward passes and in-place use -------------------------------------------------------------------------------


def fused_on_product(inplace: bool, scale: float = 1.0) -> tuple[PolicyLoss, Tensor, Tensor]:
    """(result, leaf, logits): logits = leaf * 2 is not a leaf."""
    base, ids, inputs, kw = problem()
    leaf = base.clone().requires_grad_()
    logits = leaf * 2.0
    return policy_loss(logits, ids, inputs, Objective(kl="k3", beta=0.1), inplace=inplace, **kw), leaf, logits


def test_second_backward_and_upstream_scale() -> None:
    for inplace in (False, True):
        out, leaf, _ = fused_on_product(inplace)
        (first,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
        (scaled,) = torch.autograd.grad(out.loss * -3.0, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(out.loss, leaf)
        torch.testing.assert_close(scaled, -3.0 * first)
        assert torch.equal(first, again) and float(first.abs().max()) > 0
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.loss, leaf)
    out, leaf, _ = fused_on_product(False)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(out.loss, leaf, create_graph=True)


def test_inplace_gives_the_same_and_overwrites() -> None:
    plain, leaf_a, logits_a = fused_on_product(False)
    fused, leaf_b, logits_b = fused_on_product(True)
    assert torch.equal(logits_a, 2 * leaf_a)
    (grad_a,) = torch.autograd.grad(plain.loss, leaf_a)
    assert torch.equal(logits_b.detach() * 2.0, grad_a)
    (grad_b,) = torch.autograd.grad(fused.loss, leaf_b)
    assert torch.equal(plain.loss, fused.loss) and torch.equal(grad_a, grad_b)
    assert bool((grad_b[[2, 5]] == 0).all())


def test_inplace_refusals() -> None:
    base, ids, inputs, kw = problem()
    leaf = base.clone().requires_grad_()
    with pytest.raises(ValueError, match="inplace: float16 logits cannot hold their own gradient"):
        policy_loss((leaf * 2.0).half(), ids, inputs, Objective(), inplace=True, vocab_size=58)
    with pytest.raises(ValueError, match="inplace: rows of the logits share memory"):
        policy_loss((leaf[:1] * 2.0).expand(9, 61), ids, inputs, Objective(), inplace=True, **kw)
    for logits in (leaf, leaf.view(9, 61), leaf[:]):
        with pytest.raises(ValueError, match="inplace: logits are a leaf that requires grad"):
            policy_loss(logits, ids, inputs, Objective(), inplace=True, **kw)
    assert torch.equal(leaf.detach(), base)
    logits = leaf * 2.0
    policy_loss(logits, ids, inputs, Objective(), inplace=True, **kw)
    for inplace in (False, True):
        with pytest.raises(ValueError, match="an earlier policy_loss"):
            policy_loss(logits, ids, inputs, Objective(), inplace=inplace, **kw)
        with pytest.raises(ValueError, match="an earlier policy_loss"):
            policy_loss(logits.view(9, 61), ids, inputs, Objective(), inplace=inplace, **kw)
    reused = (leaf * 2.0).detach()
    for _ in range(2):  # one static buffer for many steps is fine: its contents are new
        reused.copy_(base)
        step = reused + 0.0 * leaf
        policy_loss(step, ids, inputs, Objective(), inplace=True, **kw)


def test_inplace_on_slices_of_one_buffer() -> None:
    base, ids, inputs, kw = problem()
    leaf = base.clone().requires_grad_()
    kw = {"vocab_size": kw["vocab_size"]}
    whole = policy_loss(leaf * 2.0, ids, inputs, Objective(), **kw)
    (expected,) = torch.autograd.grad(whole.loss, leaf)
    logits = leaf * 2.0
    parts = [
        policy_loss(logits[a:b], ids[a:b], inputs.rows(a, b), Objective(), inplace=True, **kw)
        for a, b in ((0, 4), (4, 9))
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    assert torch.equal(logits.detach() * 2.0, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the second call touched the buffer
        (parts[0].loss + parts[1].loss).backward()
    again = leaf * 2.0
    grad = torch.zeros_like(leaf)
    for a, b in ((0, 4), (4, 9)):  # each backward pass before the next call
        part = policy_loss(again[a:b], ids[a:b], inputs.rows(a, b), Objective(), inplace=True, **kw)
        grad += torch.autograd.grad(part.loss, leaf, retain_graph=True)[0]
    assert torch.equal(grad, expected)


def test_inplace_is_noticed_by_whoever_kept_the_values() -> None:
    """exp keeps its result for its own backward pass; overwriting that must not give a wrong gradient silently."""
    base, ids, inputs, kw = problem()
    leaf = base.clone().requires_grad_()
    out = policy_loss(leaf.exp(), ids, inputs, Objective(), inplace=True, **kw)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_without_grad_nothing_is_overwritten() -> None:
    logits, ids, inputs, kw = problem()
    before = logits.clone()
    out = policy_loss(logits, ids, inputs, Objective(), inplace=True, **kw)
    with torch.no_grad():
        same = policy_loss(logits.requires_grad_(), ids, inputs, Objective(), inplace=True, **kw)
    assert torch.equal(logits.detach(), before)
    assert not out.loss.requires_grad and not same.loss.requires_grad and torch.equal(out.loss, same.loss)


# ---- PolicyInputs ---------------------------------------------------------------------------------------------------


def test_policy_inputs_rows_and_select() -> None:
    x = torch.arange(4.0)
    inputs = PolicyInputs(old_logprobs=x, advantages=x + 10, weights=x + 20, ref_logprobs=x + 30)
    assert len(inputs) == 4
    part = inputs.rows(1, 3)
    assert part.weights.tolist() == [21, 22] and part.importance is None and part.sequence_ids is None
    picked = inputs.select(torch.tensor([3, 0]))
    assert picked.ref_logprobs is not None and picked.ref_logprobs.tolist() == [33, 30]
    assert picked.old_logprobs is not None and picked.old_logprobs.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("old_logprobs", torch.zeros(3), r"old_logprobs: shape \[3\], but advantages has \[2\]"),
        ("weights", torch.zeros(2, 1), "weights: shape"),
        ("old_logprobs", torch.zeros(2, dtype=torch.bfloat16), "old_logprobs: torch.bfloat16 is refused"),
        ("weights", torch.ones(2, dtype=torch.bool), "weights: torch.bool is refused"),
        ("importance", torch.ones(2, requires_grad=True), "importance: requires grad"),
        ("sequence_ids", torch.zeros(2), "sequence_ids: torch.float32 is refused; pass int64"),
        ("weights", torch.zeros(2, device="meta"), "weights: on meta, but advantages are on cpu"),
        ("weights", None, "weights: need a tensor, got NoneType"),
        ("old_logprobs", [0.0, 0.0], "old_logprobs: need a tensor, got list"),
        ("advantages", torch.zeros(1, 2), "advantages: need one value per token"),
        ("ref_logprobs", torch.ones(2, requires_grad=True), "ref_logprobs: requires grad"),
    ],
)
def test_policy_inputs_refusals(field: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "old_logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
        "weights": torch.zeros(2),
        field: value,
    }
    with pytest.raises(ValueError, match=message):
        PolicyInputs(**arguments)


def test_policy_loss_refusals() -> None:
    zeros = torch.zeros(2)
    inputs = PolicyInputs(old_logprobs=zeros, advantages=zeros, weights=torch.ones(2))
    logits, ids = torch.zeros(2, 5), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="ref_logprobs: missing"):
        policy_loss(logits, ids, inputs, Objective(kl="k3", beta=0.1))
    with pytest.raises(ValueError, match="PolicyInputs has 2 rows for 3 token ids"):
        policy_loss(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), inputs, Objective())
    with pytest.raises(ValueError, match=r"row 1 has id 5, outside \[0, 5\)"):
        policy_loss(logits, torch.tensor([0, 5]), inputs, Objective())
    with pytest.raises(ValueError, match="backend: 'triton' cannot run here: float64 has no kernel"):
        policy_loss(logits.double(), ids, inputs, Objective(), backend="triton")
    with pytest.raises(ValueError, match="sequence_ids: missing"):
        policy_loss(logits, ids, inputs, Objective(ratio_level="sequence"))
