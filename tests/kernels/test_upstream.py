"""The upstream scalar: 1 costs nothing, anything else multiplies, and a second backward pass finds what it needs."""

import pytest
import torch
from torch import Tensor

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
        again = state._again(grad, torch.tensor(factor, device=device), state.applied[0], torch.float32)
        torch.testing.assert_close(again, factor * original, rtol=3e-7, atol=0)
    torch.testing.assert_close(grad, -3.0 * original, rtol=3e-7, atol=0)
    state._in_place(1, grad, torch.zeros((), device=device))
    if device == "cpu":  # on CUDA an asynchronous assert, which would end this process
        with pytest.raises(RuntimeError, match="compute the loss again"):
            state._again(grad, torch.ones((), device=device), state.applied[1], torch.float32)


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
