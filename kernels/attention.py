"""Causal attention over packed segments of any length, on every backend; pure tensors, differentiable.

    out_j = sum_s softmax_s(cap(scale * q_j . k_s)) v_s        over the keys s that query j sees

Segment i owns the queries cu_q[i] .. cu_q[i+1] and the keys cu_k[i] .. cu_k[i+1]. Causality is aligned bottom-right:
with m queries and n >= m keys, query j stands at key position n - m + j and sees the keys up to there; with a window w,
the last w of them. So a completion whose keys are [prompt, own tokens] needs no queries for the prompt.
Grouped heads: query head h uses key head h // (H / Hk). cap(x) = softcap * tanh(x / softcap). A sink is one more logit
per head that takes part in the softmax and carries no value (gpt-oss).

Shapes: q [T,H,D], k [S,Hk,D], v [S,Hk,E], out [T,H,E]; T and S are sums over segments.
Dropout acts on the softmax weights, as in transformers: each is 0 with probability p, else divided by 1 - p, one mask
per query, head and key, drawn from torch's global generator. The expectation of out is out without dropout.
Numerics: SDPA and flash-attention accumulate in float32; softcap and sinks run here in float32; float64 stays float64.
Backends on CUDA, first that fits (kernels/flash.py): flash-attn 3, 4, 2, PyTorch's own varlen attention, all in fp16
and bf16, and a loop of SDPA over segments, which is the path of a CPU and the reference. For 32 segments of 20-80
tokens, forward and backward on a CPU, the loop takes 0.6 of the time of one padded call and is level with the best
bucketed one.
Sources: Dao, arXiv 2307.08691 (flash-attention 2); Gemma 2, arXiv 2408.00118 (softcap); gpt-oss (sinks).
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rhotrain.kernels import flash, flash_calls
from rhotrain.kernels.backend import promote, resolve_backend
from rhotrain.kernels.flash import LIBRARIES, AttentionChoice

AttentionBackend = Literal["flash_attn3", "flash_attn4", "flash_attn", "torch_varlen", "sdpa"]


def attention_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    *,
    key_dim: int = 64,
    value_dim: int | None = None,
    dropout: float = 0.0,
    backend: AttentionChoice = "auto",
) -> AttentionBackend:
    """The implementation that `varlen_attention` uses for such tensors; `key_dim`, `value_dim` are D and E.

    backend: "auto" (and "triton", which has no kernel for this) takes the first library that can run the call, else
    SDPA; "reference" and "sdpa" take SDPA; a library's name takes that one. ValueError when it cannot run the call.
    """
    flash.check_choice(backend)
    device = torch.device(device)
    if backend in ("reference", "sdpa") or (backend not in LIBRARIES and flash.capability(device) is None):
        return "sdpa"
    has_sinks = isinstance(sinks, Tensor) or bool(sinks)
    dims = (key_dim, value_dim or key_dim)
    call = flash.Call(device, dtype, *dims, softcap=softcap is not None, sinks=has_sinks, dropout=dropout > 0)
    if backend in LIBRARIES:
        flash.require(backend, call)  # type: ignore[arg-type]
        return backend  # type: ignore[return-value]
    return flash_calls.first_fitting(call) or "sdpa"


def causal_mask(m: int, n: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [m,n], True where a query sees a key, bottom-right aligned; None when every query sees all keys."""
    if m == 1 and (window is None or window >= n):
        return None
    mask = torch.ones(m, n, dtype=torch.bool, device=device).tril(n - m)
    return mask if window is None or window >= n else mask.triu(n - m - window + 1)


class SegmentMasks:
    """Additive masks of segments, one tensor for all that have the same number of keys before their first query.

    A segment of m queries over n keys takes the corner [:m, :n] of it. SDPA keeps its mask for the backward pass, and
    turns a bool mask into a float one of its own at every call: 32 completions of 1024 tokens after prompts of 512, 30
    layers, were 6 GB of masks. Make one per micro-batch and hand it to every layer.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}

    def get(self, m: int, n: int, longest: int, window: int | None, like: Tensor) -> Tensor | None:
        """[m,n] in the type and on the device of `like`: 0 where a query sees a key, -inf elsewhere; None when every
        query sees all keys. longest: most queries of any segment with n - m keys before them."""
        if m == 1 and (window is None or window >= n):
            return None
        key = (n - m, window, like.dtype)
        mask = self._masks.get(key)
        if mask is None or len(mask) < longest:
            columns = longest + n - m
            # Rows 16 numbers apart, whatever their length: SDPA on CUDA copies a mask that is not aligned.
            mask = like.new_full((longest, -(-columns // 16) * 16), -torch.inf)
            seen = causal_mask(longest, columns, window, like.device)
            assert seen is not None
            mask[:, :columns].masked_fill_(seen, 0.0)
            self._masks[key] = mask
        return mask[:m, :n]


def dense_attention(
    q_BHMD: Tensor,
    k_BGND: Tensor,
    v_BGNE: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over a dense batch: G key heads serve H query heads; returns [B,H,M,E].

    mask: broadcastable to [B,1,M,N]: bool, True where a query sees a key, or numbers added to the scores; None for all.
    is_causal: the lower triangle instead (M == N), without softcap or sinks.
    SDPA where it can express the call, explicit maths in float32 or wider otherwise.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q_BHMD,
            k_BGND,
            v_BGNE,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=q_BHMD.shape[1] != k_BGND.shape[1],
        )
    batch, heads, m, _ = q_BHMD.shape
    groups, n = k_BGND.shape[1:3]
    q = promote(q_BHMD).reshape(batch, groups, heads // groups * m, -1)
    scores = (q @ promote(k_BGND).transpose(2, 3)).view(batch, heads, m, n) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, m, 1)
        scores = torch.cat((scores, sink), dim=3)
    weights = F.dropout(scores.softmax(3)[..., :n], dropout).reshape(batch, groups, heads // groups * m, n)
    return (weights @ promote(v_BGNE)).view(batch, heads, m, -1).to(q_BHMD.dtype)


def _sdpa_loop(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    lens_q: tuple[int, ...],
    lens_k: tuple[int, ...],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    masks: SegmentMasks,
) -> Tensor:
    """One attention call per segment. `split` instead of slices: the backward of n slices fills n buffers of size T."""
    explicit = softcap is not None or sinks is not None
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    segments = zip(
        q_THD.transpose(0, 1)[None].split(lens_q, 2),
        k_SKD.transpose(0, 1)[None].split(lens_k, 2),
        v_SKE.transpose(0, 1)[None].split(lens_k, 2),
    )
    longest: dict[int, int] = {}
    for m, n in zip(lens_q, lens_k):
        longest[n - m] = max(m, longest.get(n - m, 1))
    out = []
    for q, k, v in segments:
        m, n = q.shape[2], k.shape[2]
        is_causal = m == n and m > 1 and (window is None or window >= n) and not explicit
        mask = None if is_causal else masks.get(m, n, longest[n - m], window, q)
        out.append(dense_attention(q, k, v, mask, is_causal=is_causal, **options))
    return torch.cat(out, 2)[0].transpose(0, 1)


def _lengths(cu: Tensor, lens: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(cu.diff().tolist()) if lens is None else tuple(lens)


def varlen_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    *,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    lens_q: tuple[int, ...] | None = None,
    lens_k: tuple[int, ...] | None = None,
    backend: AttentionChoice = "auto",
    masks: SegmentMasks | None = None,
) -> Tensor:
    """Causal attention of each segment's queries over its own keys: [T,H,E], differentiable in q, k, v and sinks.

    cu_q, cu_k: int32 [n+1], cumulative lengths from 0 to T and to S. max_q, max_k: largest lengths.
    scale: factor of the scores. window: keys a query sees at most, its own included. softcap, sinks [H]: see above.
    dropout: probability that a weight is dropped; other masks at every call, the same after the same torch.manual_seed.
    lens_q, lens_k: the lengths as Python numbers, so that the SDPA path need not read cu_q and cu_k back.
    masks: what the SDPA path made for this micro-batch in an earlier layer; kept and reused.
    backend: "reference" takes the SDPA loop everywhere; "auto" and names of libraries what `attention_backend` says.

    ValueError: a dropout outside of [0, 1), a backend that cannot run the call, more queries than keys in a segment, or
    (SDPA path) lengths that do not add up to T and S.
    """
    if backend == "triton":
        resolve_backend(backend, q_THD)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout: {dropout} is no probability of dropping a weight; need 0 <= dropout < 1")
    dims = {"key_dim": q_THD.shape[2], "value_dim": v_SKE.shape[2]}
    choice = attention_backend(q_THD.device, q_THD.dtype, softcap, sinks, dropout=dropout, backend=backend, **dims)
    if choice != "sdpa":
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "dropout": dropout}
        return flash_calls.varlen(choice, q_THD, k_SKD, v_SKE, cu_q, cu_k, max_q, max_k, **options)  # type: ignore[arg-type]
    m, n = _lengths(cu_q, lens_q), _lengths(cu_k, lens_k)
    if sum(m) != len(q_THD) or sum(n) != len(k_SKD):
        raise ValueError(
            f"cu_q, cu_k: segments hold {sum(m)} queries and {sum(n)} keys, the tensors {len(q_THD)} and {len(k_SKD)}"
        )
    if any(mi > ni for mi, ni in zip(m, n)):
        raise ValueError(
            "cu_q, cu_k: a segment has more queries than keys; causal alignment needs a key for every query"
        )
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    return _sdpa_loop(q_THD, k_SKD, v_SKE, m, n, masks=SegmentMasks() if masks is None else masks, **options)  # type: ignore[arg-type]
