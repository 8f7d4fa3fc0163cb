"""Gathered rows: values, gradients against float64 sums by hand, the order of addition, and repeated runs on a GPU."""

import pytest
import torch

from rhotrain.kernels.gather import GatherPlan, gather_rows

INDEXES = {
    "a prompt with three readers": [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5],
    "each row once": [2, 0, 1, 5, 4, 3],
    "rows that nobody reads": [3, 3, 0],
    "nothing": [],
    "one row for all": [4] * 9,
}


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    index = torch.tensor(INDEXES[name], dtype=torch.int64)
    x = torch.randn(6, 2, 3, dtype=torch.float64).to(dtype).requires_grad_()
    out = gather_rows(x, GatherPlan.of(index, 6))
    assert torch.equal(out, x[index])
    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    (found,) = torch.autograd.grad(out, x, grad)
    expected = torch.zeros(6, 2, 3, dtype=torch.float64)
    for j, t in enumerate(INDEXES[name]):
        expected[t] += grad[j].double()
    assert found.dtype == dtype
    rounded_once = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert (found.double() - expected).abs().max() <= rounded_once * max(1.0, float(expected.abs().max()))


def test_gradcheck() -> None:
    plan = GatherPlan.of(torch.tensor(INDEXES["a prompt with three readers"]), 6)
    x = torch.randn(6, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, plan), (x,))


def test_strided_rows_and_gradients() -> None:
    """K and V are views of one projection, and attention may hand back a transposed gradient."""
    plan = GatherPlan.of(torch.tensor([1, 0, 1]), 2)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    out = gather_rows(x[:, 2:6].view(2, 2, 2), plan)
    grad = torch.randn(2, 3, 2, dtype=torch.float64).transpose(0, 1)
    out.backward(grad)
    assert x.grad is not None
    assert torch.allclose(x.grad[:, 2:6].view(2, 2, 2), torch.stack([grad[1], grad[0] + grad[2]]))


def test_many_bf16_readers_are_summed_in_float32() -> None:
    """256 + 1 + 1 + ... in bf16 stays 256; the sum is 512."""
    plan = GatherPlan.of(torch.zeros(257, dtype=torch.int64), 1)
    x = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones(257, 4, dtype=torch.bfloat16)
    grad[0] = 256
    gather_rows(x, plan).backward(grad)
    assert x.grad is not None and x.grad.tolist() == [[512.0] * 4]


def test_readers_are_listed_in_ascending_order() -> None:
    plan = GatherPlan.of(torch.tensor([2, 0, 2, 1, 0]), 4)
    assert plan.readers.tolist() == [1, 4, 3, 0, 2] and plan.starts.tolist() == [0, 2, 3, 5]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"index: need int64 \[n\], got torch.int32"):
        GatherPlan.of(torch.tensor([0], dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="x: has 3 rows, the plan was made for 2"):
        gather_rows(torch.zeros(3, 1), GatherPlan.of(torch.tensor([0]), 2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_run_has_the_same_bits_on_a_gpu() -> None:
    index = torch.cat([torch.arange(512).repeat(16), torch.arange(2048)]).cuda()
    plan = GatherPlan.of(index, 2048)
    x = torch.randn(2048, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(len(index), 8, 64, device="cuda", dtype=torch.bfloat16)
    first = torch.autograd.grad(gather_rows(x, plan), x, grad)[0]
    for _ in range(10):
        assert torch.equal(torch.autograd.grad(gather_rows(x, plan), x, grad)[0], first)
    exact = torch.zeros(2048, 8, 64, device="cuda", dtype=torch.float64).index_add_(0, index, grad.double())
    assert (first.double() - exact).abs().max() <= 2**-8 * float(exact.abs().max())
