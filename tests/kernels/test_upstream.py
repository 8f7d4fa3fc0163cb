"""The upstream scalar: 1 costs nothing, anything else multiplies, and a second backward pass finds what it needs."""

from typing import Any

import pytest
import torch
from helpers_kernels import relative_l2
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rhotrain.kernels.backend import Backend
from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.spec import Objective
from rhotrain.kernels.upstream import Upstream


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (2, 4096), (3, 9001)])
def test_the_kernel_scales_in_place(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of any length and stride; a factor of 1 leaves every bit, NaN among them."""
    storage = torch.randn(shape[0], shape[1] + 3, device=device).to(dtype)
    grad, before = storage[:, : shape[1]], storage.clone()
    if grad.numel():
        grad[0, 0] = before[0, 0] = torch.nan
    state = Upstream()
    same = state._in_place(0, grad, torch.ones((), device=device))
    assert same is grad and torch.equal(storage.view(torch.uint8), before.view(torch.uint8))
    state._in_place(1, grad, torch.tensor(-0.3, device=device))
    expected = (before[:, : shape[1]].float() * torch.tensor(-0.3, device=device)).to(dtype)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(storage[:, shape[1] :], before[:, shape[1] :])


def test_a_later_pass_undoes_what_the_first_applied(device: str) -> None:
    state, grad = Upstream(), torch.randn(3, 7, device=device)
    original = grad.clone()
    state._in_place(0, grad, torch.tensor(-3.0, device=device))
    for factor in (1.0, 0.5, 0.0):
        again = state._again(grad, torch.tensor(factor, device=device), state.applied[0])
        torch.testing.assert_close(again, factor * original, rtol=3e-7, atol=0)
    torch.testing.assert_close(grad, -3.0 * original, rtol=3e-7, atol=0)
    state._in_place(1, grad, torch.zeros((), device=device))
    if device == "cpu":  # on CUDA an asynchronous assert, which would end this process
        with pytest.raises(RuntimeError, match="compute the loss again"):
            state._again(grad, torch.ones((), device=device), state.applied[1])


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_passes_of_one_graph(device: str, inplace: bool) -> None:
    """Different scalars one after the other, through autograd.grad and into .grad, where autograd accumulates."""
    base = torch.randn(4, 33, device=device, generator=torch.Generator(device).manual_seed(0))
    leaf = base.clone().requires_grad_()
    rows = torch.arange(4.0, device=device)
    inputs = PolicyInputs(old_logprobs=rows - 6, advantages=rows - 1.5, weights=torch.ones_like(rows))
    ids = torch.tensor([3, 0, 32, 7], device=device)

    def loss() -> Tensor:
        return policy_loss(leaf * 2.0, ids, inputs, Objective(), inplace=inplace, backend="triton").loss

    (expected,) = torch.autograd.grad(loss(), leaf)
    graph = loss()
    for factor in (1.0, -3.0, 0.25):
        (grad,) = torch.autograd.grad(factor * graph, leaf, retain_graph=True)
        torch.testing.assert_close(grad, factor * expected, rtol=1e-6, atol=1e-7)
    graph = loss()
    for times in (1, 2, 3):
        graph.backward(retain_graph=True)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, times * expected, rtol=1e-6, atol=1e-7)


# ---- half types, where the scalar and the gradient are easily lost --------------------------------------------------


def rows_problem(rows: int = 16, vocab: int = 3000) -> tuple[Tensor, Tensor, Tensor, Tensor, PolicyInputs]:
    """hidden, weight, logits (float64, exact in bf16), ids and inputs whose weights are those of 65536 tokens."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=g, dtype=torch.float64).bfloat16().double()
    weight = torch.randn(vocab, 8, generator=g, dtype=torch.float64).bfloat16().double()
    ids = torch.randint(0, vocab, (rows,), generator=g)
    noise = torch.randn(2, rows, generator=g)
    inputs = PolicyInputs(old_logprobs=None, advantages=noise[0], weights=torch.full((rows,), 2.0**-16))
    return hidden, weight, hidden @ weight.t(), ids, inputs


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 65536.0), (torch.float16, 2.0**20), (torch.bfloat16, 1 / 3)]
)
def test_loss_scale(device: str, dtype: torch.dtype, scale: float, backend: Backend) -> None:
    """The gradient times a scale equals the float64 one to the half type's own rounding: no inf, no underflow before
    the scale acts, no scalar rounded to 8 bits."""
    hidden, weight, logits, ids, inputs = rows_problem()
    logits = logits.to(dtype).double()
    there = PolicyInputs(old_logprobs=None, advantages=inputs.advantages.to(device), weights=inputs.weights.to(device))
    kw: dict[str, Any] = {"backend": backend}
    leaf = logits.to(device, dtype).requires_grad_()
    (grad,) = torch.autograd.grad(policy_loss(leaf, ids.to(device), there, Objective(), **kw).loss * scale, leaf)
    exact = logits.clone().requires_grad_()
    (true,) = torch.autograd.grad(policy_loss(exact, ids, inputs, Objective()).loss * scale, exact)
    floor = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # spacing of the subnormals
    rounding = torch.finfo(dtype).eps / 2
    error = (grad.cpu().double() - true).abs()
    assert bool((error <= 1.01 * (2 if dtype == torch.bfloat16 else 1) * rounding * true.abs() + floor).all())

    leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
    out = linear_policy_loss(leaves[0], leaves[1], ids.to(device), there, Objective(), **kw)
    grads = torch.autograd.grad(out.loss * scale, leaves)
    truths = [x.to(dtype).double().requires_grad_() for x in (hidden, weight)]
    true_grads = torch.autograd.grad(
        linear_policy_loss(truths[0], truths[1], ids, inputs, Objective()).loss * scale, truths
    )
    for ours, reference in zip(grads, true_grads):
        assert ours.dtype == dtype and relative_l2(ours.cpu(), reference) < 2 * rounding


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_activation_checkpointing(device: str, reentrant: bool, backend: Backend) -> None:
    """Non-reentrant checkpointing gives each saved tensor out once."""
    hidden, weight, logits, ids, inputs = rows_problem(rows=5, vocab=31)
    there = PolicyInputs(old_logprobs=None, advantages=inputs.advantages.to(device), weights=inputs.weights.to(device))
    values = [v.float().to(device) for v in (logits, hidden, weight)]
    t = ids.to(device)
    for op in (
        lambda x, h, w: token_logprobs(x, t, entropy=True, backend=backend).logprobs.sum(),
        lambda x, h, w: policy_loss(x, t, there, Objective(), backend=backend).loss,
        lambda x, h, w: linear_token_logprobs(h, w, t, backend=backend).logprobs.sum(),
        lambda x, h, w: linear_policy_loss(h, w, t, there, Objective(), backend=backend).loss,
    ):
        leaves = [v.clone().requires_grad_() for v in values]
        plain = torch.autograd.grad(op(*leaves), leaves, allow_unused=True)
        checkpoint(op, *leaves, use_reentrant=reentrant).backward()
        for leaf, expected in zip(leaves, plain):
            if expected is not None:
                torch.testing.assert_close(leaf.grad, expected)


def test_meta_tensors_have_a_backward_pass() -> None:
    leaf = torch.zeros(3, 5, device="meta", requires_grad=True)
    rows = torch.zeros(3, device="meta")
    inputs = PolicyInputs(old_logprobs=rows, advantages=rows, weights=rows)
    policy_loss(leaf, torch.zeros(3, dtype=torch.int64, device="meta"), inputs, Objective()).loss.backward()
    assert leaf.grad is not None and leaf.grad.shape == (3, 5)
