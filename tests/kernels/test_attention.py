"""Varlen attention against a softmax written out per query, and the libraries of a GPU through stand-ins."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_flash import KINDS, flash_stand_in
from torch import Tensor

from rhotrain.kernels import flash
from rhotrain.kernels.attention import attention_backend, varlen_attention

FLOAT32_TOLERANCE = 2e-6  # outputs are averages of values near 1


def cumulative(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def random_qkv(
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    *,
    heads: int = 6,
    groups: int = 2,
    dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lens_q), heads, dim, generator=g, dtype=torch.float64)
    k = torch.randn(sum(lens_k), groups, dim, generator=g, dtype=torch.float64)
    v = torch.randn(sum(lens_k), groups, value_dim or dim, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query and one head at a time, in float64, with no matrix product over more than one query."""
    q, k, v = q.double(), k.double(), v.double()
    per_group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    start_q = start_k = 0
    for m, n in zip(lens_q, lens_k):
        for j in range(m):
            position = n - m + j
            first = 0 if window is None else max(0, position - window + 1)
            for h in range(q.shape[1]):
                keys = k[start_k + first : start_k + position + 1, h // per_group]
                scores = scale * keys @ q[start_q + j, h]
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - 10.0)
                total = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[h]) - 10.0))
                values = v[start_k + first : start_k + position + 1, h // per_group]
                out[start_q + j, h] = (weights / total) @ values
        start_q, start_k = start_q + m, start_k + n
    return out


def run(
    qkv: tuple[Tensor, Tensor, Tensor], lens_q: tuple[int, ...], lens_k: tuple[int, ...], *, host: bool, **options: Any
) -> Tensor:
    lens: dict[str, Any] = {"lens_q": lens_q, "lens_k": lens_k} if host else {}
    q, k, v = qkv
    return varlen_attention(
        q,
        k,
        v,
        cu_q=cumulative(lens_q),
        cu_k=cumulative(lens_k),
        max_q=max(lens_q),
        max_k=max(lens_k),
        **lens,
        **options,
    )


SEGMENTS = {
    "equal": ((5, 1, 12, 3), (5, 1, 12, 3)),
    "longer keys": ((4, 1, 7, 1, 2), (9, 6, 7, 1, 30)),
    "one": ((1,), (1,)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "window 1": {"window": 1},
    "wide window": {"window": 100},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -8.0], dtype=torch.float64)},
    "all": {"window": 4, "softcap": 1.5, "sinks": torch.linspace(-1, 1, 6, dtype=torch.float64)},
}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("host", [True, False], ids=["host lengths", "cu_seqlens only"])
def test_equals_the_definition(segments: str, options: str, host: bool) -> None:
    lens_q, lens_k = SEGMENTS[segments]
    settings = {"scale": 0.4, **OPTIONS[options]}
    for groups, value_dim in ((6, 8), (2, 8), (1, 5), (2, 12)):
        qkv = random_qkv(lens_q, lens_k, groups=groups, value_dim=value_dim)
        truth = by_definition(*qkv, lens_q, lens_k, **settings)
        out = run(qkv, lens_q, lens_k, host=host, **settings)
        assert out.dtype == torch.float64
        assert (out - truth).abs().max() < 1e-13
        single = (qkv[0].float(), qkv[1].float(), qkv[2].float())
        out32 = run(single, lens_q, lens_k, host=host, **settings)
        assert out32.dtype == torch.float32
        assert (out32 - truth).abs().max() < FLOAT32_TOLERANCE


def test_realistic_heads_in_float32() -> None:
    lens_q, lens_k = (23, 1, 40, 8), (23, 1, 60, 66)
    qkv = random_qkv(lens_q, lens_k, heads=9, groups=3, dim=64, dtype=torch.float32)
    out = run(qkv, lens_q, lens_k, host=True, scale=0.125)
    assert (out - by_definition(*qkv, lens_q, lens_k, scale=0.125)).abs().max() < FLOAT32_TOLERANCE


def test_half_precision_error_is_that_of_the_last_rounding() -> None:
    lens = (9, 4)
    settings: tuple[dict[str, Any], ...] = ({}, {"softcap": 3.0})
    for options in settings:
        qkv = random_qkv(lens, lens, dtype=torch.bfloat16)
        out = run(qkv, lens, lens, host=True, scale=0.3, **options)
        assert out.dtype == torch.bfloat16
        truth = by_definition(*qkv, lens, lens, scale=0.3, **options)
        # Weights, too, are rounded to bf16 by SDPA: 2^-8 each way.
        assert (out.double() - truth).abs().max() < 2 * 2**-8 * truth.abs().max()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options: str) -> None:
    lens_q, lens_k = (3, 1, 2), (3, 2, 4)
    settings = dict(OPTIONS[options])
    inputs = list(random_qkv(lens_q, lens_k, heads=2, groups=1, dim=2, value_dim=1))
    if "sinks" in settings:
        inputs.append(settings.pop("sinks")[:2].clone())

    def function(*tensors: Tensor) -> Tensor:
        extra = {"sinks": tensors[3]} if len(tensors) == 4 else {}
        return run(tensors[:3], lens_q, lens_k, host=True, scale=0.7, **settings, **extra)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(function, tuple(t.requires_grad_() for t in inputs))


def test_segments_do_not_see_each_other() -> None:
    lens = (4, 6, 3)
    q, k, v = random_qkv(lens, lens)
    before = run((q, k, v), lens, lens, host=True, scale=0.4)
    k[4:10], v[4:10] = torch.nan, torch.nan
    after = run((q, k, v), lens, lens, host=True, scale=0.4)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert after[4:10].isnan().all()


def test_future_keys_are_not_seen() -> None:
    lens_q, lens_k = (3,), (8,)
    q, k, v = random_qkv(lens_q, lens_k)
    before = run((q, k, v), lens_q, lens_k, host=True, scale=0.4)
    k[6:] += 5.0
    v[6:] += 5.0
    after = run((q, k, v), lens_q, lens_k, host=True, scale=0.4)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_wrong_lengths_are_named() -> None:
    qkv = random_qkv((3, 2), (3, 2))
    with pytest.raises(ValueError, match="5 queries and 4 keys"):
        run(qkv, (3, 2), (2, 2), host=True, scale=1.0)
    with pytest.raises(ValueError, match="more queries than keys"):
        run(qkv, (3, 2), (2, 3), host=True, scale=1.0)
    with pytest.raises(ValueError, match="backend"):
        run(qkv, (3, 2), (3, 2), host=True, scale=1.0, backend="triton")


# ---- the libraries, through stand-ins (helpers_flash.py) -------------------------------------------------------------


def test_choice_of_the_backend() -> None:
    half, full = torch.bfloat16, torch.float32
    with flash_stand_in("torch_varlen", half_only=True):
        assert attention_backend("cuda", half) == "torch_varlen"
        assert attention_backend("cuda", half, softcap=30.0) == "sdpa"
        assert attention_backend("cuda", half, dropout=0.1) == "sdpa"
    with flash_stand_in("flash_attn", half_only=True):
        assert attention_backend("cuda", half) == "flash_attn"
        assert attention_backend("cuda", half, dropout=0.1) == "flash_attn"
        assert attention_backend("cuda", half, softcap=30.0, dropout=0.1) == "sdpa"
        assert attention_backend("cuda:1", torch.float16, softcap=30.0) == "flash_attn"
        assert attention_backend(torch.device("cuda"), half, sinks=torch.zeros(4)) == "sdpa"
        assert attention_backend("cuda", half, sinks=True) == "sdpa"
        assert attention_backend("cuda", half, key_dim=192, value_dim=128) == "sdpa"
        assert attention_backend("cuda", half, key_dim=512) == "sdpa"
        assert attention_backend("cuda", half, key_dim=60) == "sdpa"
        assert attention_backend("cuda", full) == "sdpa"
        assert attention_backend("cuda", half, backend="reference") == "sdpa"
    with flash_stand_in("flash_attn", half_only=True, capability=(7, 5)):
        assert attention_backend("cuda", half) == "sdpa"
    with flash_stand_in("flash_attn4", half_only=True):
        assert attention_backend("cuda", half, sinks=True) == "flash_attn4"
    assert attention_backend("cpu", half) == "sdpa"


def test_the_preferred_library_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All installed: 3 on its own GPUs, 4 on newer ones, 2 on older ones, each where its options allow."""
    functions: dict[str, Any] = {}
    for kind in ("flash_attn3", "flash_attn4", "flash_attn", "torch_varlen"):
        with flash_stand_in(kind):
            functions[kind] = flash.package(kind)  # type: ignore[arg-type]
    for capability, plain, capped, sinks, dropped in (
        ((9, 0), "flash_attn3", "flash_attn3", "flash_attn4", "flash_attn"),
        ((10, 0), "flash_attn4", "flash_attn4", "flash_attn4", "flash_attn"),
        ((8, 0), "flash_attn", "flash_attn", "sdpa", "flash_attn"),
    ):
        with flash_stand_in("flash_attn", half_only=True, capability=capability), monkeypatch.context() as patch:
            patch.setattr(flash, "package", functions.get)
            found = [
                attention_backend("cuda", torch.bfloat16, **options)  # type: ignore[arg-type]
                for options in ({}, {"softcap": 30.0}, {"sinks": True}, {"dropout": 0.1})
            ]
            assert found == [plain, capped, sinks, dropped]


def fits(kind: str, options: dict[str, Any]) -> bool:
    """Whether a library has these options; otherwise SDPA must run."""
    has_no_softcap = kind.startswith("torch_varlen")
    return not ("sinks" in options and kind != "flash_attn4") and not ("softcap" in options and has_no_softcap)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_library_equals_the_definition(kind: str, options: str, segments: str) -> None:
    lens_q, lens_k = SEGMENTS[segments]
    settings = {"scale": 0.4, **OPTIONS[options]}
    for groups in (6, 2):
        qkv = random_qkv(lens_q, lens_k, groups=groups)
        truth = by_definition(*qkv, lens_q, lens_k, **settings)
        with flash_stand_in(kind) as library:
            assert (run(qkv, lens_q, lens_k, host=False, **settings) - truth).abs().max() < 1e-13
            assert bool(library.calls) == fits(kind, OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_every_library(kind: str, options: str) -> None:
    """Equal to those of the SDPA path, in q, k, v and sinks."""
    lens_q, lens_k = (3, 1, 4), (3, 2, 6)
    settings = dict(OPTIONS[options])
    inputs = list(random_qkv(lens_q, lens_k, heads=6, groups=2))
    if "sinks" in settings:
        inputs.append(settings.pop("sinks").clone())

    def gradients() -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        extra = {"sinks": leaves[3]} if len(leaves) == 4 else {}
        q, k, v = leaves[:3]
        out = run((q, k, v), lens_q, lens_k, host=True, scale=0.7, **settings, **extra)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return torch.autograd.grad((out * weights).sum(), leaves)

    expected = gradients()
    with flash_stand_in(kind) as library:
        found = gradients()
        assert bool(library.calls) == fits(kind, OPTIONS[options])
    for grad, right in zip(found, expected):
        assert (grad - right).abs().max() < 1e-12


def test_dropout_reaches_flash_attn_2_only() -> None:
    lens_q, lens_k = (4, 1, 7), (9, 6, 7)
    qkv = random_qkv(lens_q, lens_k)
    for kind in KINDS:
        with flash_stand_in(kind) as library:
            run(qkv, lens_q, lens_k, host=False, scale=0.4, dropout=0.25)
            assert [asked.dropout_p for asked in library.asked.values()] == ([0.25] if kind == "flash_attn" else [])


def test_reference_does_not_reach_a_library() -> None:
    qkv = random_qkv((3,), (5,))
    for kind in KINDS:
        with flash_stand_in(kind) as library:
            run(qkv, (3,), (5,), host=False, scale=0.4, backend="reference")
            assert not library.calls


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 20.0}], ids=str)
def test_cuda_backend_forward_and_backward(options: dict[str, Any]) -> None:
    lens_q, lens_k = (33, 1, 64, 5), (33, 17, 64, 90)
    qkv = random_qkv(lens_q, lens_k, heads=8, groups=2, dim=64, dtype=torch.bfloat16)

    def move(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return tuple(function(t).detach().requires_grad_() for t in qkv)

    gpu, truth = move(lambda t: t.cuda()), move(lambda t: t.double())
    out = varlen_attention(
        *gpu,
        cu_q=cumulative(lens_q).cuda(),
        cu_k=cumulative(lens_k).cuda(),
        max_q=64,
        max_k=90,
        scale=0.125,
        **options,
    )
    expected = run(truth, lens_q, lens_k, host=True, scale=0.125, **options)  # type: ignore[arg-type]
    assert (out.cpu().double() - expected).abs().max() < 0.02
    grads = torch.autograd.grad(out.float().square().sum(), gpu)
    exact = torch.autograd.grad(expected.square().sum(), truth)
    for grad, right in zip(grads, exact):
        assert (grad.cpu().double() - right).norm() / right.norm() < 0.02
