"""Dropout of varlen attention: which weights are dropped, the expectation, the gradient; on every path of a CPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.attention import varlen_attention

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 6, dtype=torch.float64)},
    "all": {"window": 4, "softcap": 1.5, "sinks": torch.linspace(-1, 1, 6, dtype=torch.float64)},
}


def random_qkv(
    lens_q: tuple[int, ...], lens_k: tuple[int, ...], *, heads: int = 6, groups: int = 2, dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((sum(lens_q), heads), (sum(lens_k), groups), (sum(lens_k), groups))
    q, k, v = (torch.randn(*shape, dim, generator=g, dtype=torch.float64) for shape in shapes)
    return q, k, v


def run(qkv: tuple[Tensor, Tensor, Tensor], lens_q: tuple[int, ...], lens_k: tuple[int, ...], **options: Any) -> Tensor:
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (lens_q, lens_k))
    return varlen_attention(*qkv, cu_q=cu_q, cu_k=cu_k, max_q=max(lens_q), max_k=max(lens_k), **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_drops_single_weights(options: str) -> None:
    """With the unit matrix as values an output is a row of weights: each is 0 or its plain value / (1 - p)."""
    p, lens_q, lens_k = 0.3, (9, 5), (30, 30)
    q, k, _ = random_qkv(lens_q, lens_k)
    unit = torch.eye(30, dtype=torch.float64)[:, None].expand(30, 2, 30).repeat(2, 1, 1)
    settings = {"scale": 0.4, **OPTIONS[options]}
    torch.manual_seed(0)
    plain = run((q, k, unit), lens_q, lens_k, **settings)
    drawn = [run((q, k, unit), lens_q, lens_k, dropout=p, **settings) for _ in range(20)]
    for out in drawn:
        kept = out != 0
        assert torch.allclose(out[kept] * (1 - p), plain[kept], rtol=1e-12, atol=0)
    masks = torch.stack([out != 0 for out in drawn])[:, plain > 0].double()
    # One mask per draw, query, head and key: all independent, so every mean is binomial.
    assert abs(masks.mean() - (1 - p)) < 4 * (p * (1 - p) / masks.numel()) ** 0.5
    pairs = [(a != b).double().mean() for a, b in ((masks[0], masks[1]), (masks[2][1:], masks[2][:-1]))]
    assert all(abs(share - 2 * p * (1 - p)) < 5 * (0.25 / masks.shape[1]) ** 0.5 for share in pairs)


@pytest.mark.parametrize("options", OPTIONS)
def test_keeps_the_expectation(options: str) -> None:
    lens_q, lens_k, draws = (4, 1, 7), (9, 6, 7), 400
    qkv = random_qkv(lens_q, lens_k)
    settings = {"scale": 0.4, **OPTIONS[options]}
    torch.manual_seed(1)
    plain = run(qkv, lens_q, lens_k, **settings).sum(2)
    drawn = torch.stack([run(qkv, lens_q, lens_k, dropout=0.2, **settings).sum(2) for _ in range(draws)])
    error = drawn.std(0) / draws**0.5
    assert (error > 0).all()
    assert ((drawn.mean(0) - plain).abs() < 4 * error).all()


def test_masks_follow_the_global_generator_and_gradients_are_exact() -> None:
    """After one seed the masks are constants, so the function of q, k, v is smooth and its gradient can be checked."""
    lens_q, lens_k = (3, 2), (3, 4)
    inputs = random_qkv(lens_q, lens_k, heads=2, groups=1, dim=2)
    variants: tuple[dict[str, Any], ...] = ({}, {"softcap": 2.0}, {"window": 2})
    for options in variants:

        def seeded(*tensors: Tensor, options: dict[str, Any] = options) -> Tensor:
            torch.manual_seed(5)
            return run(tensors, lens_q, lens_k, scale=0.7, dropout=0.4, **options)  # type: ignore[arg-type]

        assert torch.equal(seeded(*inputs), seeded(*inputs))
        assert torch.autograd.gradcheck(seeded, tuple(t.clone().requires_grad_() for t in inputs))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 20.0}], ids=str)
def test_cuda_drops_single_weights(options: dict[str, Any]) -> None:
    """As above, in bf16, by whichever implementation the machine has."""
    p, lens = 0.25, (64, 64)
    q, k, _ = (t.to("cuda", torch.bfloat16) for t in random_qkv(lens, lens, heads=8, dim=64))
    unit = torch.eye(64, dtype=torch.bfloat16, device="cuda")[:, None].expand(64, 2, 64).repeat(2, 1, 1)
    cu = torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")
    settings: dict[str, Any] = {"cu_q": cu, "cu_k": cu, "max_q": 64, "max_k": 64, "scale": 0.02, **options}
    torch.manual_seed(0)
    plain = varlen_attention(q, k, unit, **settings).float()
    out = varlen_attention(q, k, unit, dropout=p, **settings).float()
    kept = out != 0
    assert torch.allclose(out[kept] * (1 - p), plain[kept], rtol=0.03, atol=0)
    share = kept[plain > 0].double().mean()
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / (plain > 0).sum()) ** 0.5


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_out_of_range_is_named(dropout: float) -> None:
    with pytest.raises(ValueError, match="0 <= dropout < 1"):
        run(random_qkv((3,), (3,)), (3,), (3,), scale=1.0, dropout=dropout)
