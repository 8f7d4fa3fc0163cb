"""The Triton kernel of policy_loss, and linear_* over Triton rows: every cell of the objective, against float64."""

import math
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from helpers_kernels import VOCABS, make_logits, relative_l2, ulp
from torch import Tensor

from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, PolicyLoss, policy_loss
from rhotrain.kernels.policy_rows import FUSED
from rhotrain.kernels.spec import CELLS, KL_KINDS, Cell, KLKind, Objective, ObjectiveKind, RatioLevel

METRICS = ("logprobs", "ratio", "kl", "entropy", "clipped_low", "clipped_high")
ROWS = 12


def objective_of(cell: Cell, kl: KLKind, entropy_coef: float) -> Objective:
    """Bounds that some of the ratios of `problem` lie beyond, on both sides."""
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


def problem(vocab: int = 61, *, kept: bool = False) -> tuple[Tensor, Tensor, PolicyInputs, dict[str, Any]]:
    """Exact logits and float32 constants: both signs of the advantage and 0, ratios around 1 and e^+-50, an ignored
    row, a row of weight 0 that holds NaN everywhere, padding, per-row temperature."""
    logits, ids = make_logits("randn", ROWS, vocab + 3)
    ids.clamp_(max=vocab - 1)
    g = torch.Generator().manual_seed(1)
    kw: dict[str, Any] = {"temperature": torch.linspace(0.5, 2.0, ROWS), "vocab_size": vocab}
    if kept:
        kw["kept"] = KeptSet.from_lists([sorted({int(i), *range(k % 3, vocab, 2)}) for k, i in enumerate(ids)])
    lp = token_logprobs(logits.float(), ids, **kw).logprobs
    spread = 0.3 * torch.randn(2, ROWS, generator=g)
    spread[0, 8], spread[0, 9] = 50.0, -50.0
    advantages = torch.randn(ROWS, generator=g)
    advantages[7] = 0.0
    weights = torch.rand(ROWS, generator=g) + 0.1
    inputs = PolicyInputs(
        old_logprobs=lp + spread[0],
        advantages=advantages,
        weights=weights,
        ref_logprobs=lp + spread[1],
        importance=torch.rand(ROWS, generator=g),
        sequence_ids=torch.arange(ROWS) // 3 * 7 % 5,
    )
    ids[2] = -100
    weights[5] = 0.0
    for field in (inputs.old_logprobs, inputs.advantages, inputs.ref_logprobs, inputs.importance):
        assert field is not None
        field[5] = math.nan
    logits[2] = logits[5] = math.nan
    return logits, ids, inputs, kw


def to(device: str, value: Any) -> Any:
    """Tensors, kept sets and inputs on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, KeptSet | PolicyInputs):
        return type(value)(**{f.name: to(device, getattr(value, f.name)) for f in fields(value)})
    return value


def double(inputs: PolicyInputs) -> PolicyInputs:
    named = inputs.named().items()
    return PolicyInputs(**{n: x.double() if x is not None and x.is_floating_point() else x for n, x in named})  # type: ignore[arg-type]


def run(
    device: str,
    logits: Tensor,
    ids: Tensor,
    inputs: PolicyInputs,
    objective: Objective,
    *,
    inplace: bool = False,
    **kw: Any,
) -> tuple[PolicyLoss, Tensor]:
    """Result and dlogits of the kernels, on the CPU."""
    leaf = logits.to(device).clone().requires_grad_()
    moved = {name: to(device, value) for name, value in kw.items()}
    source = leaf * 1.0 if inplace else leaf
    out = policy_loss(source, ids.to(device), to(device, inputs), objective, inplace=inplace, backend="triton", **moved)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return PolicyLoss(**{f.name: getattr(out, f.name).detach().cpu() for f in fields(out)}), grad.cpu()


def truth_of(
    logits: Tensor, ids: Tensor, inputs: PolicyInputs, objective: Objective, **kw: Any
) -> tuple[PolicyLoss, Tensor]:
    """The float64 reference, which test_policy_loss.py holds to the formulas."""
    leaf = logits.double().clone().requires_grad_()
    out = policy_loss(leaf, ids, double(inputs), objective, backend="reference", **kw)
    return out, torch.autograd.grad(out.loss, leaf)[0]


def assert_close(
    ours: tuple[PolicyLoss, Tensor], truth: tuple[PolicyLoss, Tensor], tolerance: float, what: object
) -> None:
    """Relative to the largest true value of each field; clip flags exactly."""
    (out, grad), (true, true_grad) = ours, truth
    pairs = {name: (getattr(out, name), getattr(true, name).detach()) for name in ("loss", *METRICS)}
    for name, (a, t) in {**pairs, "dlogits": (grad, true_grad)}.items():
        if a.dtype == torch.bool:
            assert torch.equal(a, t), (name, what)
        else:
            error = float((a.double() - t).abs().max()) / max(1.0, float(t.abs().max()))
            assert error <= tolerance, (name, what, error)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell(device: str, cell: Cell, kl: KLKind, entropy_coef: float) -> None:
    objective = objective_of(cell, kl, entropy_coef)
    logits, ids, inputs, kw = problem()
    truth = truth_of(logits, ids, inputs, objective, **kw)
    ours = run(device, logits.float(), ids, inputs, objective, **kw)
    # r = e^20 multiplies the rounding of k3 ~ k^2 / 2, that is twice the relative one of k
    assert_close(ours, truth, 4e-6 if kl == "k3_unbiased" else 2e-6, objective)
    out, grad = ours
    assert all(bool((getattr(out, name)[[2, 5]] == 0).all()) for name in METRICS)
    assert bool((grad[[2, 5]] == 0).all()) and bool((grad[:, 61:] == 0).all())
    again, overwritten = run(device, logits.float(), ids, inputs, objective, inplace=True, **kw)
    assert torch.equal(overwritten, grad) and torch.equal(again.loss, out.loss)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("inplace", [False, True])
def test_kept_sets(device: str, inplace: bool, level: RatioLevel) -> None:
    """Sets longer than a block among them; outside the sets the gradient is exactly 0."""
    objective = Objective(ratio_level=level, kl="k3", beta=0.1, entropy_coef=0.05)
    logits, ids, inputs, kw = problem(vocab=3000, kept=True)
    truth = truth_of(logits, ids, inputs, objective, **kw)
    ours = run(device, logits.float(), ids, inputs, objective, inplace=inplace, **kw)
    assert_close(ours, truth, 2e-6, level)
    outside = ~torch.cat([kw["kept"].mask(3000), torch.zeros(ROWS, 3, dtype=torch.bool)], 1)
    assert bool((ours[1][outside] == 0).all())


@pytest.mark.parametrize("case", ["randn", "peaked", "blocks", "inf_first", "inf_last", "equal"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_error_is_no_larger_than_eager(device: str, vocab: int, case: str) -> None:
    """Gradient of reinforce with an entropy bonus: at most eager's error in the same dtype + 4 ulp of max |x / T|."""
    exact, ids = make_logits(case, 3, vocab)
    g = torch.Generator().manual_seed(0)
    advantages, weights = torch.randn(3, generator=g), torch.rand(3, generator=g)
    inputs = PolicyInputs(old_logprobs=torch.zeros(3), advantages=advantages, weights=weights)
    objective = Objective(kind="reinforce", entropy_coef=0.1)

    def eager(dtype: torch.dtype) -> list[Tensor]:
        finite = torch.isfinite(exact).all(0).nonzero().squeeze(1)
        leaf = exact[:, finite].to(dtype, copy=True).requires_grad_()
        logp = torch.log_softmax(leaf / 0.7, -1)
        lp = logp.gather(1, torch.searchsorted(finite, ids)[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        per_token = -advantages.to(dtype) * lp - 0.1 * entropy
        grad = torch.zeros(exact.shape, dtype=torch.float64)
        grad[:, finite] = torch.autograd.grad((weights.to(dtype) * per_token).sum(), leaf)[0].double()
        return [lp.detach().double(), entropy.detach().double(), grad]

    truth = eager(torch.float64)
    allowance = 4 * ulp(float(exact[torch.isfinite(exact)].abs().max()) / 0.7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out, grad = run(device, exact.to(dtype), ids, inputs, objective, temperature=0.7)
        assert grad.dtype == dtype
        for name, a, e, t in zip(
            ("logprob", "entropy", "grad"), (out.logprobs, out.entropy, grad), eager(dtype), truth
        ):
            error, bound = float((a.double() - t).abs().max()), float((e - t).abs().max()) + allowance
            assert error <= bound, (name, dtype, error, bound)


@pytest.mark.parametrize(("rows", "vocab"), [(129, 17), (2, 49152), (2, 151936)])
def test_many_rows_and_real_vocabularies(device: str, rows: int, vocab: int) -> None:
    exact, ids = make_logits("blocks", rows, vocab)
    g = torch.Generator().manual_seed(2)
    lp = token_logprobs(exact.float(), ids, temperature=0.8).logprobs
    noise = torch.randn(4, rows, generator=g)
    inputs = PolicyInputs(
        old_logprobs=lp + 0.3 * noise[0],
        advantages=noise[1],
        weights=noise[2].abs(),
        ref_logprobs=lp + 0.3 * noise[3],
    )
    objective = Objective(kl="k3", beta=0.1, entropy_coef=0.05)
    truth = truth_of(exact, ids, inputs, objective, temperature=0.8)
    assert_close(run(device, exact.float(), ids, inputs, objective, temperature=0.8), truth, 1e-5, (rows, vocab))


def test_absent_inputs(device: str) -> None:
    """Fresh anchors (ratio exactly 1), no reference, no importance weight, and no gradient wanted."""
    logits, ids, inputs, kw = problem(vocab=4097)
    bare = PolicyInputs(old_logprobs=None, advantages=inputs.advantages, weights=inputs.weights)
    truth = truth_of(logits, ids, bare, Objective(), **kw)
    ours = run(device, logits.float(), ids, bare, Objective(), **kw)
    assert_close(ours, truth, 2e-6, "bare")
    live = [i for i in range(ROWS) if i not in (2, 5)]
    assert bool((ours[0].ratio[live] == 1.0).all()) and bool((ours[0].kl == 0).all())
    moved = {name: to(device, value) for name, value in kw.items()}
    none = policy_loss(
        logits.float().to(device), ids.to(device), to(device, bare), Objective(), backend="triton", **moved
    )
    assert not none.loss.requires_grad and torch.equal(none.logprobs.cpu(), ours[0].logprobs)


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_inplace_on_views(device: str, layout: str) -> None:
    """The gradient lands in the view's own elements and nowhere else."""
    logits, ids, inputs, kw = problem()
    base = torch.full((2 * ROWS, 64) if layout == "rows" else (64, 2 * ROWS), 7.0, device=device)
    at = (slice(None, None, 2), slice(None)) if layout == "rows" else (slice(None), slice(None, ROWS))
    base[at] = (logits if layout == "rows" else logits.t()).float().to(device)
    leaf = base.clone().requires_grad_()
    buffer = leaf * 1.0
    view = buffer[at] if layout == "rows" else buffer[at].t()
    moved = {name: to(device, value) for name, value in kw.items()}
    out = policy_loss(view, ids.to(device), to(device, inputs), Objective(), inplace=True, backend="triton", **moved)
    _, expected = run(device, logits.float(), ids, inputs, Objective(), **kw)
    assert torch.equal(view.detach().cpu(), expected) and bool(out.loss.isfinite())
    rest = torch.ones_like(base, dtype=torch.bool)
    rest[at] = False
    assert bool((buffer.detach()[rest] == 7.0).all())


def test_nothing_to_do(device: str) -> None:
    for rows in (0, 3):
        leaf = torch.full((rows, 5), math.nan, device=device, requires_grad=True)
        zeros = torch.zeros(rows, device=device)
        inputs = PolicyInputs(old_logprobs=zeros, advantages=zeros, weights=zeros)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        out = policy_loss(leaf, ids, inputs, Objective(), backend="triton")
        out.loss.backward()
        assert out.loss.item() == 0.0 and out.logprobs.shape == (rows,)
        assert leaf.grad is not None and bool((leaf.grad == 0).all())


def test_rows_do_not_depend_on_their_batch(device: str) -> None:
    logits, ids, inputs, kw = problem(vocab=FUSED.block + 5)
    objective = Objective(kl="k3", beta=0.1, entropy_coef=0.05)

    def bits(index: Tensor) -> list[Tensor]:
        mine = {"temperature": kw["temperature"][index], "vocab_size": kw["vocab_size"]}
        out, grad = run(device, logits[index].float(), ids[index], inputs.select(index), objective, **mine)
        return [x.view(torch.int32) for x in (out.logprobs, out.ratio, out.kl, out.entropy, grad)]

    whole = bits(torch.arange(ROWS))
    for index in (torch.tensor([4]), torch.tensor([9, 0]), torch.randperm(ROWS)):
        assert all(torch.equal(a[index], b) for a, b in zip(whole, bits(index)))


# ---- through the head -----------------------------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": 1.5, "bias": True},
}


def head_problem(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, PolicyInputs, dict[str, Any]]:
    """hidden [ROWS, 8], weight [64, 8] and bias [64] beside `problem`'s rows."""
    _, ids, inputs, kw = problem()
    g = torch.Generator().manual_seed(7)
    shapes = {"hidden": (ROWS, 8), "weight": (64, 8), "bias": (64,)}
    leaves = {name: torch.randn(*shape, generator=g).bfloat16().to(dtype) for name, shape in shapes.items()}
    leaves["hidden"][[2, 5]] = math.nan
    return leaves, ids, inputs, kw


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("head", HEADS)
def test_linear_policy_loss(device: str, head: str, chunk: int | None, level: RatioLevel) -> None:
    objective = Objective(ratio_level=level, kl="k3", beta=0.1, entropy_coef=0.05)
    results = []
    for dtype, where, backend in ((torch.float64, "cpu", "reference"), (torch.float32, device, "triton")):
        leaves, ids, inputs, kw = head_problem(dtype)
        leaves = {name: x.to(where).requires_grad_() for name, x in leaves.items()}
        arguments = {**HEADS[head], "bias": leaves["bias"] if "bias" in HEADS[head] else None}
        moved = {name: to(where, value) for name, value in kw.items()}
        out = linear_policy_loss(
            leaves["hidden"],
            leaves["weight"],
            ids.to(where),
            to(where, double(inputs) if dtype == torch.float64 else inputs),
            objective,
            chunk=chunk,
            backend=backend,  # type: ignore[arg-type]
            **arguments,
            **moved,
        )
        used = [leaves["hidden"], leaves["weight"], *([leaves["bias"]] if "bias" in HEADS[head] else [])]
        grads = torch.autograd.grad(out.loss, used)
        results.append([out.loss.detach(), *(getattr(out, name) for name in METRICS), *grads])
    for true, ours in zip(*results):
        error = float((ours.cpu().double() - true.double()).abs().max())
        assert error <= 3e-6 * max(1.0, float(true.double().abs().max()))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
def test_linear_token_logprobs(device: str, chunk: int | None, kept: bool) -> None:
    leaves, ids, _, kw = head_problem(torch.float32)
    if kept:
        kw["kept"] = problem(kept=True)[3]["kept"]
    upstream = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(2))
    ids[5] = -100
    results = []
    for dtype, where, backend in ((torch.float64, "cpu", "reference"), (torch.float32, device, "triton")):
        h, w = (leaves[name].to(where, dtype).requires_grad_() for name in ("hidden", "weight"))
        moved = {name: to(where, value) for name, value in kw.items()}
        out = linear_token_logprobs(h, w, ids.to(where), entropy=True, chunk=chunk, backend=backend, **moved)  # type: ignore[arg-type]
        assert out.entropy is not None
        values = torch.stack([out.logprobs, out.entropy, out.logsumexp])
        results.append([values.detach(), *torch.autograd.grad((upstream.to(values) * values).sum(), (h, w))])
    for true, ours in zip(*results):
        assert relative_l2(ours.cpu(), true) < 2e-6


def test_half_gemms(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 inputs where the GEMMs take them: float32 logits, dlogits rounded once to bf16, weight sum in float32.

    On a CPU the two operators with out_dtype, which only CUDA has, are stood in for by their definition.
    """
    library = torch.library.Library("aten", "IMPL")
    if device == "cpu":
        monkeypatch.setattr("rhotrain.kernels.linear_rows.takes_half", lambda hidden, _: hidden.dtype == torch.bfloat16)

        def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
            assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
            return out.copy_(a.float() @ b.float())

        def addmm(
            c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: int = 1, alpha: int = 1, out: Tensor
        ) -> Tensor:
            assert a.dtype == b.dtype == torch.bfloat16 and c is out and out.dtype == out_dtype == torch.float32
            return out.copy_(c + a.float() @ b.float())

        library.impl("mm.dtype_out", mm, "CPU")
        library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        for head in HEADS:
            exact, ids, inputs, kw = head_problem(torch.float64)
            half = {name: x.bfloat16().to(device).requires_grad_() for name, x in exact.items()}
            truth = {name: x.requires_grad_() for name, x in exact.items()}
            results = []
            for leaves, values, where in ((truth, double(inputs), "cpu"), (half, inputs, device)):
                arguments = {**HEADS[head], "bias": leaves["bias"] if "bias" in HEADS[head] else None}
                moved = {name: to(where, value) for name, value in kw.items()}
                out = linear_policy_loss(
                    leaves["hidden"],
                    leaves["weight"],
                    ids.to(where),
                    to(where, values),
                    Objective(kl="k3", beta=0.1),
                    chunk=5,
                    backend="reference" if leaves is truth else "triton",
                    **arguments,
                    **moved,
                )
                results.append([out.logprobs, *torch.autograd.grad(out.loss, (leaves["hidden"], leaves["weight"]))])
            (true_lp, *true_grads), (lp, *grads) = results
            assert lp.dtype == torch.float32 and float((lp.cpu() - true_lp).abs().max()) < 1e-5
            for grad, true in zip(grads, true_grads):
                assert grad.dtype == torch.bfloat16 and relative_l2(grad.cpu(), true) < 2**-8
    finally:
        library._destroy()


def test_fused_equals_the_logits_version(device: str) -> None:
    """linear_* and the op on the GEMM's logits, both by the kernels: the same numbers to rounding."""
    leaves, ids, inputs, kw = head_problem(torch.float32)
    hidden, weight = leaves["hidden"].to(device), leaves["weight"].to(device)
    inputs = replace(inputs, weights=inputs.weights.masked_fill(ids == -100, 0.0))
    moved = {name: to(device, value) for name, value in kw.items()}
    ours = linear_policy_loss(
        hidden, weight, ids.to(device), to(device, inputs), Objective(), backend="triton", **moved
    )
    logits = policy_loss(
        hidden @ weight.t(), ids.to(device), to(device, inputs), Objective(), backend="triton", **moved
    )
    for name in ("loss", *METRICS):
        torch.testing.assert_close(getattr(ours, name), getattr(logits, name), rtol=2e-6, atol=2e-6)
