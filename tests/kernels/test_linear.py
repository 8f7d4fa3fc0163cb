"""linear_token_logprobs and linear_policy_loss against the logits versions, and the promise never to hold [N, V]."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_kernels import relative_l2
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.spec import Objective

N, V, H = 23, 67, 12
OBJECTIVE = Objective(kind="grpo", kl="k3", beta=0.1, entropy_coef=0.05)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gemma2": {"softcap": 5.0},
    "cohere": {"logit_scale": 0.0625},
    "phi": {"bias": True},
    "all": {"softcap": 3.0, "logit_scale": 1.5, "bias": True},
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor, PolicyInputs, dict[str, Any]]:
    """(leaves hidden, weight, bias), ids, inputs, keywords; an ignored row, a row of weight 0, padding, kept sets."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(torch.bfloat16).to(dtype)

    leaves = {"hidden": randn(N, H), "weight": randn(V, H), "bias": randn(V)}
    ids = torch.randint(0, V - 3, (N,), generator=g)
    kept = KeptSet.from_lists([sorted({int(i), *range(k % 3, V - 3, 2)}) for k, i in enumerate(ids)])
    ids[2] = -100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    floats = torch.randn(5, N, generator=g, dtype=torch.float64).to(wide)
    inputs = PolicyInputs(
        old_logprobs=-2.0 + floats[0],
        advantages=floats[1],
        weights=floats[2].abs() + 0.1,
        ref_logprobs=-2.0 + floats[3],
        importance=floats[4].abs(),
    )
    inputs.weights[5] = 0.0
    kw = {"temperature": torch.linspace(0.5, 2.0, N, dtype=wide), "vocab_size": V - 3, "kept": kept}
    return leaves, ids, inputs, kw


def head_logits(leaves: dict[str, Tensor], head: dict[str, Any]) -> Tensor:
    """The head in plain torch."""
    x = leaves["hidden"] @ leaves["weight"].t()
    if "bias" in head:
        x = x + leaves["bias"]
    x = x * head.get("logit_scale", 1.0)
    if "softcap" in head:
        x = head["softcap"] * torch.tanh(x / head["softcap"])
    return x


def head_arguments(leaves: dict[str, Tensor], head: dict[str, Any]) -> dict[str, Any]:
    return {**head, "bias": leaves["bias"]} if "bias" in head else dict(head)


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """By autograd, zeros where a leaf is not used."""
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), grads)}


def require_grad(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-11, atol: float = 1e-12) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("chunk", [None, 1, 3, 16, 1000])
@pytest.mark.parametrize("head", HEADS)
def test_policy_loss_equals_the_logits_version(head: str, chunk: int | None) -> None:
    plain, ids, inputs, kw = problem()
    leaves = require_grad(plain)
    expected = policy_loss(head_logits(leaves, HEADS[head]), ids, inputs, OBJECTIVE, **kw)
    arguments = head_arguments(leaves, HEADS[head])
    ours = linear_policy_loss(
        leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, chunk=chunk, **arguments, **kw
    )
    assert_same(gradients(ours.loss, leaves), gradients(expected.loss, leaves))
    for name in ("loss", "logprobs", "ratio", "kl", "entropy", "clipped_low", "clipped_high"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 1, 3, 16, 1000])
@pytest.mark.parametrize("head", HEADS)
def test_token_logprobs_equal_the_logits_version(head: str, chunk: int | None) -> None:
    plain, ids, _, kw = problem()
    leaves = require_grad(plain)
    upstream = torch.randn(3, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = token_logprobs(head_logits(leaves, HEADS[head]), ids, entropy=True, **kw)
    arguments = head_arguments(leaves, HEADS[head])
    ours = linear_token_logprobs(leaves["hidden"], leaves["weight"], ids, entropy=True, chunk=chunk, **arguments, **kw)
    totals = []
    for out in (ours, expected):
        assert out.entropy is not None
        totals.append((upstream * torch.stack([out.logprobs, out.entropy, out.logsumexp])).sum())
    assert_same(gradients(totals[0], leaves), gradients(totals[1], leaves))
    torch.testing.assert_close(ours.logprobs, expected.logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.logsumexp, expected.logsumexp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.entropy, expected.entropy, rtol=1e-12, atol=1e-12)
    without = linear_token_logprobs(leaves["hidden"], leaves["weight"], ids, chunk=chunk, **arguments, **kw)
    assert without.entropy is None and torch.equal(without.logprobs, ours.logprobs)


def test_float32_chunks_agree_to_rounding() -> None:
    """Real chunk borders in float32: chunk size and row order change nothing beyond rounding; truth is float64."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(300, 64, generator=g), 0.3 * torch.randn(5000, 64, generator=g)
    ids = torch.randint(0, 5000, (300,), generator=g)
    inputs = PolicyInputs(
        old_logprobs=token_logprobs(hidden @ weight.t(), ids).logprobs + 0.2 * torch.randn(300, generator=g),
        advantages=torch.randn(300, generator=g),
        weights=torch.rand(300, generator=g),
    )

    def run(order: Tensor, dtype: torch.dtype, chunk: int | None) -> list[Tensor]:
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        out = linear_policy_loss(h[order], w, ids[order], inputs.select(order), Objective(), chunk=chunk)
        return list(torch.autograd.grad(out.loss, (h, w)))

    order = torch.randperm(300, generator=g)
    truth = run(torch.arange(300), torch.float64, None)
    for chunk, rows in ((None, torch.arange(300)), (37, torch.arange(300)), (128, order)):
        for ours, true in zip(run(rows, torch.float32, chunk), truth):
            assert relative_l2(ours, true) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_give_float32_logits(dtype: torch.dtype) -> None:
    """bf16 and fp16 weights on a CPU: logits are not rounded to the half type, gradients are rounded once."""
    plain, ids, inputs, kw = problem(dtype)
    exact, _, exact_inputs, exact_kw = problem()
    leaves, truth = require_grad(plain), require_grad(exact)
    ours = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, chunk=5, **kw)
    expected = policy_loss(head_logits(truth, {}), ids, exact_inputs, OBJECTIVE, **exact_kw)
    assert ours.logprobs.dtype == torch.float32
    assert float((ours.logprobs - expected.logprobs).abs().max()) < 1e-5
    ours_grads, true_grads = gradients(ours.loss, leaves), gradients(expected.loss, truth)
    half_ulp = torch.finfo(dtype).eps / 2
    for name in ("hidden", "weight"):
        assert ours_grads[name].dtype == dtype
        error = (ours_grads[name].double() - true_grads[name]).abs()
        assert bool((error <= half_ulp * true_grads[name].abs() + 2e-5).all()), name


def test_half_weights_are_cast_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one tile gives the same numbers as one."""
    plain, ids, inputs, kw = problem(torch.bfloat16)
    leaves = require_grad(plain)
    results = []
    for tile in (2**22, 10 * H):
        monkeypatch.setattr("rhotrain.kernels.head_gemm.WEIGHT_TILE_ELEMENTS", tile)
        out = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
        results.append({"loss": out.loss.detach(), **gradients(out.loss, leaves)})
    assert_same(results[0], results[1], rtol=2**-7, atol=1e-5)


def test_autocast_does_not_reach_the_head() -> None:
    plain, ids, inputs, kw = problem(torch.float32)
    leaves = require_grad(plain)
    outside = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
    with torch.autocast("cpu", torch.bfloat16):
        inside = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
        tokens = linear_token_logprobs(leaves["hidden"], leaves["weight"], ids, **kw)
    assert torch.equal(inside.loss, outside.loss) and inside.logprobs.dtype == torch.float32
    rows = inputs.weights != 0
    assert torch.equal(tokens.logprobs[rows], outside.logprobs[rows])


@pytest.mark.parametrize("head", ["plain", "all"])
def test_gradcheck(head: str) -> None:
    plain, ids, inputs, kw = problem()
    leaves = {"hidden": plain["hidden"][:6], "weight": plain["weight"][:11, :4], "bias": plain["bias"][:11]}
    leaves["hidden"] = leaves["hidden"][:, :4]
    leaves = require_grad(leaves)
    ids = ids[:6].clamp(max=9)
    ids[2] = -100
    inputs = inputs.rows(0, 6)
    objective = replace(OBJECTIVE, ratio_min=0.01, ratio_max=100.0)
    kw = {"temperature": kw["temperature"][:6], "vocab_size": 10, "chunk": 2}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        arguments = head_arguments({"bias": bias}, HEADS[head])
        return linear_policy_loss(hidden, weight, ids, inputs, objective, **arguments, **kw).loss

    def tokens(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arguments = head_arguments({"bias": bias}, HEADS[head])
        out = linear_token_logprobs(hidden, weight, ids, entropy=True, **arguments, **kw)
        assert out.entropy is not None
        return out.logprobs, out.entropy, out.logsumexp

    at = (leaves["hidden"], leaves["weight"], leaves["bias"])
    assert torch.autograd.gradcheck(loss, at)
    assert torch.autograd.gradcheck(tokens, at)


# ---- heads that are tied or frozen, rows without loss ---------------------------------------------------------------


def test_tied_head_gets_both_gradients() -> None:
    """The same Parameter as embedding upstream and as head."""
    plain, ids, inputs, kw = problem()
    tied = torch.nn.Parameter(plain["weight"].clone())
    tokens = torch.arange(N)
    ours = linear_policy_loss(torch.tanh(tied[tokens]), tied, ids, inputs, OBJECTIVE, chunk=4, **kw)
    ours.loss.backward()
    expected = policy_loss(torch.tanh(tied[tokens]) @ tied.t(), ids, inputs, OBJECTIVE, **kw)
    (grad,) = torch.autograd.grad(expected.loss, tied)
    assert tied.grad is not None
    torch.testing.assert_close(tied.grad, grad, rtol=1e-11, atol=1e-12)
    again = linear_token_logprobs(torch.tanh(tied[tokens]), tied, ids, **kw)
    (token_grad,) = torch.autograd.grad(again.logprobs.sum(), tied)
    reference = token_logprobs(torch.tanh(tied[tokens]) @ tied.t(), ids, **kw)
    (expected_grad,) = torch.autograd.grad(reference.logprobs.sum(), tied)
    torch.testing.assert_close(token_grad, expected_grad, rtol=1e-11, atol=1e-12)


class Shapes(TorchDispatchMode):
    """Every operator's name with the shapes of its tensor results; our own operators are looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rhotrain":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.seen.append((str(func), tuple(x.shape)))
        return out


def test_frozen_head_and_frozen_hidden_cost_nothing() -> None:
    """Only what requires grad is computed: no [V, H] result for a frozen head, and with neither, no gradient at all."""
    plain, ids, inputs, kw = problem()
    leaves = require_grad(plain)
    with Shapes() as shapes:
        out = linear_policy_loss(leaves["hidden"], plain["weight"], ids, inputs, OBJECTIVE, **kw)
        (hidden_grad,) = torch.autograd.grad(out.loss, leaves["hidden"])
    views = ("slice", "detach", "alias", "aten.to.")  # a `to` that changes something is a _to_copy
    results = [shape for name, shape in shapes.seen if not any(view in name for view in views)]
    assert (V, H) not in results and (V - 3, H) not in results
    full = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
    grads = gradients(full.loss, leaves)
    torch.testing.assert_close(hidden_grad, grads["hidden"], rtol=1e-13, atol=1e-14)
    only_weight = linear_policy_loss(plain["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
    (weight_grad,) = torch.autograd.grad(only_weight.loss, leaves["weight"])
    torch.testing.assert_close(weight_grad, grads["weight"], rtol=1e-13, atol=1e-14)
    assert bool((weight_grad[V - 3 :] == 0).all())
    with Shapes() as shapes:
        none = linear_policy_loss(plain["hidden"], plain["weight"], ids, inputs, OBJECTIVE, **kw)
    assert not none.loss.requires_grad and torch.equal(none.loss, full.loss.detach())
    assert sum("mm" in name for name, _ in shapes.seen) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_loss_are_dropped_before_the_gemm(bad: float) -> None:
    plain, ids, inputs, kw = problem()
    leaves = require_grad(plain)
    clean = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, chunk=6, **kw)
    with torch.no_grad():
        leaves["hidden"][[2, 5]] = bad
    with Shapes() as shapes:
        out = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, chunk=6, **kw)
    assert torch.equal(out.loss, clean.loss) and torch.equal(out.logprobs, clean.logprobs)
    grads = gradients(out.loss, leaves)
    assert all(bool(g.isfinite().all()) for g in grads.values())
    assert bool((grads["hidden"][[2, 5]] == 0).all())
    rows = [shape[0] for name, shape in shapes.seen if "mm.out" in name and shape[1] == V - 3]
    assert sum(rows) == N - 2 and max(rows) <= 6


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_do(rows: int) -> None:
    """N = 0 and every row masked, over NaN hidden states."""
    hidden = torch.full((rows, H), math.nan, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    zeros, ids = torch.zeros(rows), torch.full((rows,), -100)
    inputs = PolicyInputs(old_logprobs=zeros, advantages=zeros, weights=torch.ones(rows))
    out = linear_policy_loss(hidden, weight, ids, inputs, Objective())
    out.loss.backward()
    tokens = linear_token_logprobs(hidden, weight, ids)
    tokens.logprobs.sum().backward()
    assert out.loss.item() == 0.0 and tokens.logprobs.shape == (rows,)
    for grad in (hidden.grad, weight.grad):
        assert grad is not None and bool((grad == 0).all())


def test_second_backward_and_upstream_scale() -> None:
    plain, ids, inputs, kw = problem()
    leaves = require_grad(plain)
    out = linear_policy_loss(leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE, **kw)
    first = gradients(out.loss, leaves)
    scaled = gradients(-3.0 * out.loss, leaves)
    assert_same(scaled, {name: -3.0 * g for name, g in first.items()}, rtol=1e-14)
    assert_same(gradients(out.loss, leaves), first, rtol=0, atol=0)
    for times in (1, 2):  # accumulated twice into .grad: autograd must not add into what the graph still keeps
        out.loss.backward(retain_graph=True)
        kept = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert_same(kept, {name: times * first[name] for name in kept}, rtol=1e-14)
    out.loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()
    tokens = linear_token_logprobs(leaves["hidden"], leaves["weight"], ids, **kw)
    for value in (tokens.logprobs.sum(), linear_policy_loss(*_positional(leaves, ids, inputs), **kw).loss):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(value, leaves["hidden"], create_graph=True)


def _positional(leaves: dict[str, Tensor], ids: Tensor, inputs: PolicyInputs) -> tuple[Any, ...]:
    return leaves["hidden"], leaves["weight"], ids, inputs, OBJECTIVE


def test_first_update_has_ratio_one_exactly() -> None:
    """Old logprobs from linear_token_logprobs with the same chunks: not nearly 1 but 1."""
    plain, ids, inputs, kw = problem(torch.float32)
    old = linear_token_logprobs(plain["hidden"], plain["weight"], ids, chunk=7, **kw).logprobs
    ids = torch.where(inputs.weights == 0, -100, ids)
    inputs = replace(inputs, old_logprobs=old, weights=torch.ones(N))
    old = linear_token_logprobs(plain["hidden"], plain["weight"], ids, chunk=7, **kw).logprobs
    inputs = replace(inputs, old_logprobs=old)
    out = linear_policy_loss(plain["hidden"], plain["weight"], ids, inputs, OBJECTIVE, chunk=7, **kw)
    assert bool((out.ratio[ids != -100] == 1.0).all())


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_no_tensor_of_all_rows_and_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of both ops with the default chunk rule: nothing is larger than the chunk."""
    vocab, rows, limit = 2**13, 300, 2**19
    monkeypatch.setattr("rhotrain.kernels.head_gemm.CHUNK_ELEMENTS", limit)
    hidden = torch.randn(rows, 2, requires_grad=True)
    weight = torch.randn(vocab, 2, requires_grad=True)
    ids, zeros = torch.randint(0, vocab, (rows,)), torch.zeros(rows)
    inputs = PolicyInputs(old_logprobs=zeros - 11, advantages=zeros + 1, weights=zeros + 1)
    with Shapes() as shapes:
        linear_policy_loss(hidden, weight, ids, inputs, Objective()).loss.backward()
        linear_token_logprobs(hidden, weight, ids).logprobs.sum().backward()
    assert sum("mm" in name for name, _ in shapes.seen) > 12  # the mode saw inside
    assert max(math.prod(shape) for _, shape in shapes.seen) <= limit < rows * vocab / 4


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.zeros(5, 4)},
            r"hidden, lm_head: need \[N, H\] and \[V, H\], H > 0, got \[2, 3\] and \[5, 4\]",
        ),
        ({"hidden": torch.zeros(1, 2, 3)}, "hidden, lm_head: need"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, "token_ids: shape"),
        ({"ids": torch.tensor([0, 5])}, r"row 1 has id 5, outside \[0, 5\)"),
        ({"bias": torch.zeros(4)}, r"bias: need floating point of shape \[5\], got torch.float32 \[4\]"),
        ({"bias": torch.zeros(5, dtype=torch.int64)}, "bias: need floating point"),
        ({"bias": torch.zeros(5, device="meta")}, "bias: on meta, but lm_head is on cpu"),
        ({"hidden": torch.zeros(2, 0), "weight": torch.zeros(5, 0)}, "hidden, lm_head: need"),
        ({"weight": torch.nn.Linear(3, 5)}, "lm_head: need a tensor, got Linear"),
        ({"bias": [0.0] * 5}, "bias: need a tensor, got list"),
        ({"softcap": 0.0}, "softcap: 0.0 must be > 0"),
        ({"chunk": 0}, "chunk: 0 must be at least 1"),
        ({"vocab_size": 9}, "vocab_size: 9 is not in"),
        ({"temperature": 0.0}, "temperature: 0.0 must be"),
        ({"weight": torch.zeros(5, 3, device="meta")}, "on cpu, meta and cpu"),
        ({"weight": torch.zeros(5, 3, dtype=torch.float64), "backend": "triton"}, "backend: 'triton' cannot run here"),
        ({"weight": torch.zeros(5, 3, dtype=torch.int64)}, "hidden, lm_head: need floating point"),
        ({"softcap": math.inf}, "softcap: inf must be > 0 and finite"),
        ({"logit_scale": math.nan}, "logit_scale: nan must be finite"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "ids": torch.tensor([0, 1]),
        **change,
    }
    hidden, weight, ids = (arguments.pop(name) for name in ("hidden", "weight", "ids"))
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(hidden, weight, ids, **arguments)
    if ids.shape[0] == 2:
        zeros = torch.zeros(2)
        inputs = PolicyInputs(old_logprobs=zeros, advantages=zeros, weights=zeros + 1)
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(hidden, weight, ids, inputs, Objective(), **arguments)
