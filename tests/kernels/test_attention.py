"""Varlen attention against a softmax written out per query, and the CUDA calls against stand-ins that record them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rhotrain.kernels import attention
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


# ---- the choice of a backend, with stand-ins for what a CPU cannot run ----


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A machine whose GPU, flash-attn and PyTorch can be set through the returned dict."""
    machine: dict[str, Any] = {"capability": (9, 0), "flash": None, "varlen": None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    monkeypatch.setattr(attention, "flash_attn_function", lambda: machine["flash"])
    monkeypatch.setattr(attention, "torch_varlen_function", lambda: machine["varlen"])
    yield machine


def anything(*args: Any, **kwargs: Any) -> None:
    return None


def test_choice_of_the_backend(fake_gpu: dict[str, Any]) -> None:
    half, full = torch.bfloat16, torch.float32
    assert attention_backend("cuda", half) == "sdpa"
    fake_gpu["varlen"] = anything
    assert attention_backend("cuda", half) == "torch_varlen"
    assert attention_backend("cuda", half, softcap=30.0) == "sdpa"
    assert attention_backend("cuda", half, dropout=0.1) == "sdpa"
    fake_gpu["flash"] = anything
    assert attention_backend("cuda", half, dropout=0.1) == "flash_attn"
    assert attention_backend("cuda", half, softcap=30.0, dropout=0.1) == "sdpa"
    assert attention_backend("cuda", half) == "flash_attn"
    assert attention_backend("cuda:1", torch.float16, softcap=30.0) == "flash_attn"
    assert attention_backend(torch.device("cuda"), half, sinks=torch.zeros(4)) == "sdpa"
    assert attention_backend("cuda", half, sinks=True) == "sdpa"
    assert attention_backend("cuda", half, key_dim=192, value_dim=128) == "sdpa"
    assert attention_backend("cuda", half, key_dim=512) == "sdpa"
    assert attention_backend("cuda", half, key_dim=60) == "sdpa"
    assert attention_backend("cuda", full) == "sdpa"
    assert attention_backend("cpu", half) == "sdpa"
    fake_gpu["capability"] = (7, 5)
    assert attention_backend("cuda", half) == "sdpa"


def test_this_pytorch_has_a_varlen_attention_that_we_can_call() -> None:
    assert attention.torch_varlen_function() is varlen_attn


def segments_by_window(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, window_size: tuple[int, int], scale: float
) -> Tensor:
    """What a varlen kernel computes for a window (left, right), -1 for no limit, bottom-right aligned."""
    left, right = window_size
    assert right == 0
    lens_q, lens_k = tuple(cu_q.diff().tolist()), tuple(cu_k.diff().tolist())
    return by_definition(q, k, v, lens_q, lens_k, scale=scale, window=None if left == -1 else left + 1)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("has_gqa", [True, False], ids=["2.12", "2.11"])
def test_call_of_torch_varlen(
    window: int | None, has_gqa: bool, fake_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins have the signatures of PyTorch 2.11 and 2.12 and compute what the documentation says."""

    def varlen_2_11(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (max_q, max_k) == (7, 9)
        assert scale is not None
        return segments_by_window(query, key, value, cu_seq_q, cu_seq_k, window_size, scale)

    def varlen_2_12(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert scale is not None
        assert cu_seq_k is not None
        return segments_by_window(query, key, value, cu_seq_q, cu_seq_k, window_size, scale)

    fake_gpu["varlen"] = varlen_2_12 if has_gqa else varlen_2_11
    monkeypatch.setattr(attention, "attention_backend", lambda *args, **kwargs: "torch_varlen")
    lens_q, lens_k = (4, 1, 7), (9, 6, 7)
    for groups in (6, 2):
        qkv = random_qkv(lens_q, lens_k, groups=groups)
        truth = by_definition(*qkv, lens_q, lens_k, scale=0.4, window=window)
        assert (run(qkv, lens_q, lens_k, host=False, scale=0.4, window=window) - truth).abs().max() < 1e-13


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("softcap", "dropout"), [(None, 0.0), (30.0, 0.0), (None, 0.1)])
def test_call_of_flash_attn(
    window: int | None,
    softcap: float | None,
    dropout: float,
    fake_gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in has flash-attn 2.8's signature; causal there means a right window of 0, and 0.0 no softcap."""
    calls = []

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (7, 9)
        assert softmax_scale is not None
        calls.append((softcap, dropout_p))
        return segments_by_window(q, k, v, cu_seqlens_q, cu_seqlens_k, (window_size[0], 0), softmax_scale)

    fake_gpu["flash"] = flash_attn_varlen_func
    monkeypatch.setattr(attention, "attention_backend", lambda *args, **kwargs: "flash_attn")
    lens_q, lens_k = (4, 1, 7), (9, 6, 7)
    qkv = random_qkv(lens_q, lens_k)
    out = run(qkv, lens_q, lens_k, host=False, scale=0.4, window=window, softcap=softcap, dropout=dropout)
    truth = by_definition(*qkv, lens_q, lens_k, scale=0.4, window=window)
    assert (out - truth).abs().max() < 1e-13
    assert calls == [(softcap or 0.0, dropout)]
    run(qkv, lens_q, lens_k, host=False, scale=0.4, backend="reference")
    assert len(calls) == 1, "backend='reference' must not reach flash-attn"


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
