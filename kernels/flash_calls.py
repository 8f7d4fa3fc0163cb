"""Calls of flash-attn 2, 3, 4 and of PyTorch's varlen attention, each in its own words.

`varlen` runs packed keys, forward and backward; `prefill` and `decode` run over pages, without a gradient. Arguments
are those of `attention.varlen_attention` and `paged_attention.paged_decode`; kernels/flash.py says what a library can
do.

A row's bits must not depend on its batch, so keys are never split by a heuristic that looks at the batch: num_splits is
1 in versions 2 and 3. PyTorch refuses num_splits unless flash-attn 3 was put behind it; it splits only where max_q is 1
and heads are grouped, so a decode call states the upper bound 2.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from rhotrain.kernels import flash
from rhotrain.kernels.flash import LIBRARIES, PAGE_MULTIPLE, Call, Library, Package, why_not


def _function(name: Library, kind: Literal["varlen", "kvcache"]) -> Callable[..., Any]:
    found = flash.package(name)
    assert isinstance(found, Package)
    function = getattr(found, kind)
    assert function is not None
    return function


def _options_of(scale: float, window: int | None, softcap: float | None) -> dict[str, Any]:
    """The keywords that versions 2, 3 and 4 share; -1 is no limit, and causal limits the right side to 0."""
    return {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": softcap or 0.0,
    }


def varlen(
    name: Library,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attention.varlen_attention` by this library, differentiable in q, k, v (and sinks): [T,H,E]."""
    function = _function(name, "varlen")
    if name == "torch_varlen":
        # 2.11 has no `enable_gqa`, so heads are repeated.
        grouped = {"enable_gqa": True} if q_THD.shape[1] != k_SKD.shape[1] else {}
        if grouped and "enable_gqa" not in inspect.signature(function).parameters:
            repeats = q_THD.shape[1] // k_SKD.shape[1]
            k_SKD, v_SKE, grouped = k_SKD.repeat_interleave(repeats, 1), v_SKE.repeat_interleave(repeats, 1), {}
        sides = (-1 if window is None else window - 1, 0)
        return function(q_THD, k_SKD, v_SKE, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sides, **grouped)
    options = _options_of(scale, window, softcap)
    if name == "flash_attn":
        options["dropout_p"] = dropout
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    if name == "flash_attn4":
        options["learnable_sink"] = sinks
    out = function(q_THD, k_SKD, v_SKE, **lengths, **options)
    return out[0] if isinstance(out, tuple) else out  # 4, and early builds of 3, return the logsumexp too


def decode(
    name: Library,
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`paged_attention.paged_decode` by this library: [B,H,E] in q's dtype. lens 0 gives 0.

    K and V were written before. The functions can append them themselves, but a padding row (length 0) would then get a
    token, and one launch already writes the new tokens of decode rows and prompts alike.
    """
    q = q_BHD.to(k_pool.dtype)
    if name == "torch_varlen":
        # Lengths come from seqused_k; of cu_seq_k only the shape counts, but it must be given.
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        out = _torch_pages(q, k_pool, v_pool, tables, lens, starts, starts, 2, scale, window)
        return out.to(q_BHD.dtype)
    key = "page_table" if name == "flash_attn3" else "block_table"
    options = {**_options_of(scale, window, softcap), key: tables, "cache_seqlens": lens, "num_splits": 1}
    return _function(name, "kvcache")(q[:, None], k_pool, v_pool, **options)[:, 0].to(q_BHD.dtype)


def prefill(
    name: Library,
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of several queries per sequence over its pages, without a gradient: [T,H,E] in q's dtype.

    tables int32 [B,W], lens int32 [B]; cu_q, cu_k int32 [B+1] and max_q, max_k as in `varlen`.
    """
    q = q_THD.to(k_pool.dtype)
    options = _options_of(scale, window, softcap)
    if name == "torch_varlen":
        out = _torch_pages(q, k_pool, v_pool, tables, lens, cu_q, cu_k, max_q, scale, window)
    elif name == "flash_attn3":  # its varlen function knows no pages, but this one knows packed queries
        options |= {"cache_seqlens": lens, "page_table": tables, "cu_seqlens_q": cu_q, "max_seqlen_q": max_q}
        out = _function(name, "kvcache")(q, k_pool, v_pool, num_splits=1, **options)
    elif name == "flash_attn4":
        options |= {"seqused_k": lens, "page_table": tables, "learnable_sink": sinks}
        lengths = {"cu_seqlens_q": cu_q, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        out = _function(name, "varlen")(q, k_pool, v_pool, **lengths, **options)[0]
    else:
        out = _function(name, "varlen")(q, k_pool, v_pool, cu_q, cu_k, max_q, max_k, block_table=tables, **options)
    return out.to(q_THD.dtype)


def _torch_pages(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    scale: float,
    window: int | None,
) -> Tensor:
    return _function("torch_varlen", "varlen")(
        q,
        k_pool,
        v_pool,
        cu_q,
        cu_k,
        max_q,
        tables.shape[1] * k_pool.shape[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k_pool.shape[2],
        seqused_k=lens,
        block_table=tables,
    )


# ---- the choice, and CUDA graphs ------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def first_fitting(call: Call) -> Library | None:
    """The preferred library that can run the call, if any; for decode, one that does not wait for the device."""
    for name in LIBRARIES:
        if why_not(name, call) is None and (not call.decode or graph_safe(name, call.device)):
            return name
    return None


def graph_safe(backend: str, device: torch.device | str = "cuda") -> bool:
    """True when decode by this backend never waits for the device, so that a CUDA graph can hold it.

    Triton and SDPA read nothing back. A library is tried once, on one token, with waiting made an error: flash-attn's
    development version reads the longest length back in its paged path (since #2711), its releases do not. Ask before
    a capture begins.
    """
    return backend not in LIBRARIES or not _waits(backend, torch.device(device))  # type: ignore[arg-type]


def capturing(device: torch.device) -> bool:
    """True inside of a CUDA graph's capture."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _waits(name: Library, device: torch.device) -> bool:
    query = torch.zeros(1, 1, 64, dtype=flash.HALF_TYPES[1], device=device)
    pool = torch.zeros(1, PAGE_MULTIPLE, 1, 64, dtype=flash.HALF_TYPES[1], device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    try:
        with waiting_raises(device):
            decode(name, query, pool, pool, table, length, scale=1.0, window=None, softcap=None)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    return False


@contextlib.contextmanager
def waiting_raises(device: torch.device) -> Iterator[None]:
    """Inside, whatever waits for a CUDA device raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
