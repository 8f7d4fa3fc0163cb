"""Stand-ins for flash-attn 2, 3, 4 and PyTorch's varlen attention, so that our calls of them run without a GPU.

    with flash_stand_in("flash_attn3") as library:    # the CPU now looks like a GPU on which this library is installed
        ...
    assert library.calls["flash_attn_with_kvcache"] > 0

A call is bound to the recorded signature of the real function (tests/kernels/data/flash_signatures.json, held to the
source distributions by tests/kernels/test_flash.py), so unknown keywords are refused. The stand-ins make the checks
that the real ones make, and compute what their documentation says: one sequence and one head at a time, by a formula
of their own. Packed keys are differentiable; pages have no gradient, as in the real ones.
float32 and float64 are let through, so that results can be compared exactly; `half_only=True` refuses them as the real
libraries do.
"""

import ast
import contextlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rhotrain.kernels import flash, flash_calls

KINDS = ("flash_attn3", "flash_attn4", "flash_attn", "torch_varlen", "torch_varlen 2.11")
HALF = (torch.float16, torch.bfloat16)
SIGNATURES = Path(__file__).parent / "kernels" / "data" / "flash_signatures.json"

Keys = Callable[[int], tuple[Tensor, Tensor]]


def to_signature(text: str) -> inspect.Signature:
    """From source text such as "(q, k, causal=False, *, scale=None)"; defaults are literals."""
    found = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(found, ast.FunctionDef)
    plain = found.args.args
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(found.args.defaults)) + list(found.args.defaults)
    either, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    places: list[tuple[ast.arg, ast.expr | None, Any]] = [(a, d, either) for a, d in zip(plain, defaults)]
    places += [(a, d, named) for a, d in zip(found.args.kwonlyargs, found.args.kw_defaults)]
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [inspect.Parameter(a.arg, k, default=empty if d is None else ast.literal_eval(d)) for a, d, k in places]
    )


def recorded() -> dict[str, dict[str, Any]]:
    """Kind -> distribution, version, file, functions (name -> signature as text)."""
    return json.loads(SIGNATURES.read_text())


# ---- the mathematics ------------------------------------------------------------------------------------------------


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    left: int,
    right: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """One sequence: q [m,H,D], k [n,Hk,D], v [n,Hk,E] -> [m,H,E]. left, right: keys seen on each side, -1 for all.

    Query i stands at key i + n - m. A query that sees no key gives 0.
    """
    m, n, per_group = len(q), len(k), q.shape[1] // k.shape[1]
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    distance = torch.arange(n)[None, :] - (torch.arange(m)[:, None] + n - m)
    seen = (distance >= -left if left >= 0 else distance == distance) & (distance <= right if right >= 0 else True)
    rows = []
    for h in range(q.shape[1]):
        scores = factor * q[:, h] @ k[:, h // per_group].T
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        top = scores.detach().masked_fill(~seen, -1e4).amax(1, keepdim=True) if n else torch.zeros(m, 1, dtype=wide)
        weights = torch.exp((scores - top).masked_fill(~seen, -torch.inf))
        total = weights.sum(1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[h].to(wide) - top)
        share = weights / torch.where(total == 0, torch.ones_like(total), total)
        rows.append(F.dropout(share, dropout) @ v[:, h // per_group])
    return torch.stack(rows, 1)


def sides(window_size: tuple[int | None, int | None], causal: bool) -> dict[str, int]:
    """Keys on either side, -1 for all; causal is a right side of 0."""
    left, right = (-1 if side is None else side for side in window_size)
    return {"left": left, "right": 0 if causal else right}


def by_sequence(q: Tensor, cu_q: Tensor, keys: Keys, **options: Any) -> Tensor:
    """Packed queries [T,H,D]; `keys(b)` gives K and V of sequence b."""
    parts = [attend(q[a:z], *keys(b), **options) for b, (a, z) in enumerate(pairwise(cu_q.tolist()))]
    return torch.cat(parts).to(q.dtype)


def packed(k: Tensor, v: Tensor, cu_k: Tensor) -> Keys:
    starts = cu_k.tolist()
    return lambda b: (k[starts[b] : starts[b + 1]], v[starts[b] : starts[b + 1]])


def paged(k_pool: Tensor, v_pool: Tensor, table: Tensor, lens: list[int]) -> Keys:
    """Token by token from the pages."""
    page_size = k_pool.shape[1]
    assert max(lens) <= table.shape[1] * page_size, "a sequence is longer than its block table"

    def one(pool: Tensor, b: int) -> Tensor:
        places = [divmod(t, page_size) for t in range(lens[b])]
        found = [pool[int(table[b, page]), offset] for page, offset in places]
        return torch.stack(found) if found else pool[:0, 0]

    return lambda b: (one(k_pool, b), one(v_pool, b))


# ---- what the real functions check ----------------------------------------------------------------------------------


class StandIn:
    """One library. calls: how often each function ran, but for the trial that looks whether it waits. asked: the bound
    arguments of each function's last call. waits: its paged path reads a length back, as flash-attn's development
    version does."""

    def __init__(self, kind: str, half_only: bool, waits: bool) -> None:
        self.kind, self.half_only, self.waits = kind, half_only, waits
        self.calls: Counter[str] = Counter()
        self.asked: dict[str, SimpleNamespace] = {}
        self.waiting_is_error = False

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, *, pages: bool, multiple: int = 1) -> None:
        """RuntimeError for tensors that the libraries refuse."""
        dims = 4 if pages else 3
        types = HALF if self.half_only else (*HALF, torch.float32, torch.float64)
        problems = {
            "only supports fp16 and bf16": q.dtype not in types,
            "query, key and value must have the same dtype": not q.dtype == k.dtype == v.dtype,
            "last dimensions must be contiguous": not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1,
            "head dimension at most 256, a multiple of 8": q.shape[-1] > 256 or q.shape[-1] % 8 > 0,
            "key heads must divide query heads": q.shape[-2] % k.shape[-2] > 0,
            "shapes of query, key and value": k.dim() != dims or k.shape != v.shape or k.shape[-1] != q.shape[-1],
            f"page size must be divisible by {multiple}": pages and k.shape[1] % multiple > 0,
            "pages have no backward": pages and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
        }
        self.refuse([text for text, wrong in problems.items() if wrong])

    def offsets(self, size: int, *pairs: tuple[Tensor, int | None]) -> None:
        """Contiguous int32 [size], and no sequence longer than stated: a kernel does not look past that."""
        for cu, most in pairs:
            self.ints(cu, size)
            assert most is not None and int(cu.diff().max()) <= most, f"a sequence is longer than the stated {most}"

    def ints(self, tensor: Tensor, size: int) -> None:
        self.refuse(["need contiguous int32 lengths"] if not self.is_int(tensor, 1, size) else [])

    def table(self, table: Tensor, batch: int) -> None:
        self.refuse(["need an int32 block table"] if not self.is_int(table, 2, batch) else [])

    @staticmethod
    def is_int(tensor: Tensor, dims: int, size: int) -> bool:
        is_right = tensor.dtype == torch.int32 and tensor.dim() == dims and len(tensor) == size
        return is_right and tensor.stride(-1) == 1

    def refuse(self, problems: list[str]) -> None:
        if problems:
            raise RuntimeError(f"{self.kind}: {'; '.join(problems)}")

    def unused(self, a: SimpleNamespace, *names: str) -> None:
        """What the stand-in does not do."""
        for name in names:
            if getattr(a, name) not in (None, False, 0):
                raise NotImplementedError(f"{self.kind}: {name}")

    def read_back(self) -> None:
        if self.waits and self.waiting_is_error:
            raise RuntimeError("called a synchronizing CUDA operation")


# ---- the functions; `a` holds the bound arguments -------------------------------------------------------------------


def varlen_2(lib: StandIn, a: SimpleNamespace) -> Tensor:
    pages, batch = a.block_table is not None, len(a.cu_seqlens_q) - 1
    lib.unused(a, "alibi_slopes", "return_attn_probs")
    lib.tensors(a.q, a.k, a.v, pages=pages, multiple=256)
    lib.offsets(batch + 1, (a.cu_seqlens_q, a.max_seqlen_q), (a.cu_seqlens_k, a.max_seqlen_k))
    lib.refuse(["Softcapping does not support dropout for now"] if a.softcap > 0 and a.dropout_p > 0 else [])
    keys = packed(a.k, a.v, a.cu_seqlens_k)
    if pages:
        lib.table(a.block_table, batch)
        keys = paged(a.k, a.v, a.block_table, a.cu_seqlens_k.diff().tolist())
    options = {"scale": a.softmax_scale, "softcap": a.softcap, "dropout": a.dropout_p}
    return by_sequence(a.q, a.cu_seqlens_q, keys, **options, **sides(a.window_size, a.causal))


def varlen_3(lib: StandIn, a: SimpleNamespace) -> Tensor:
    lib.unused(a, "seqused_q", "seqused_k", "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "sm_margin")
    lib.tensors(a.q, a.k, a.v, pages=False)
    lib.offsets(len(a.cu_seqlens_q), (a.cu_seqlens_q, a.max_seqlen_q), (a.cu_seqlens_k, a.max_seqlen_k))
    options = {"scale": a.softmax_scale, "softcap": a.softcap, **sides(a.window_size, a.causal)}
    return by_sequence(a.q, a.cu_seqlens_q, packed(a.k, a.v, a.cu_seqlens_k), **options)


def varlen_4(lib: StandIn, a: SimpleNamespace) -> tuple[Tensor, None]:
    pages, batch = a.page_table is not None, len(a.cu_seqlens_q) - 1
    lib.unused(a, "qv", "seqused_q", "score_mod", "mask_mod", "return_lse", "gather_kv_indices")
    lib.refuse(["SplitKV not supported on SM 9.0"] if a.num_splits != 1 else [])
    lib.tensors(a.q, a.k, a.v, pages=pages)
    lib.offsets(batch + 1, (a.cu_seqlens_q, a.max_seqlen_q))
    if a.learnable_sink is not None:
        assert a.learnable_sink.shape == (a.q.shape[1],)
        assert not lib.half_only or a.learnable_sink.dtype in (*HALF, torch.float32)
    if pages:
        lib.refuse(["page_table is not supported with cu_seqlens_k"] if a.cu_seqlens_k is not None else [])
        lib.table(a.page_table, batch)
        lib.ints(a.seqused_k, batch)
        keys = paged(a.k, a.v, a.page_table, a.seqused_k.tolist())
    else:
        lib.unused(a, "seqused_k")
        lib.offsets(batch + 1, (a.cu_seqlens_k, a.max_seqlen_k))
        keys = packed(a.k, a.v, a.cu_seqlens_k)
    options = {"scale": a.softmax_scale, "softcap": a.softcap, "sinks": a.learnable_sink}
    return by_sequence(a.q, a.cu_seqlens_q, keys, **options, **sides(a.window_size, a.causal)), None


def varlen_torch(lib: StandIn, a: SimpleNamespace) -> Tensor:
    newer, batch = hasattr(a, "block_table"), len(a.cu_seq_q) - 1
    pages = newer and isinstance(a.block_table, Tensor)
    lib.refuse(["num_splits requires FA3"] if newer and a.num_splits is not None else [])
    lib.refuse(["cu_seq_q and cu_seq_k must be both set"] if not isinstance(a.cu_seq_k, Tensor) else [])
    lib.refuse(
        ["need as many heads, or enable_gqa"]
        if a.query.shape[1] != a.key.shape[-2] and newer and not a.enable_gqa
        else []
    )
    lib.tensors(a.query, a.key, a.value, pages=pages, multiple=256)
    lib.offsets(batch + 1, (a.cu_seq_q, a.max_q), (a.cu_seq_k, a.max_k))
    keys = packed(a.key, a.value, a.cu_seq_k)
    if pages:
        lib.table(a.block_table, batch)
        lib.ints(a.seqused_k, batch)
        assert int(a.seqused_k.max()) <= a.max_k
        keys = paged(a.key, a.value, a.block_table, a.seqused_k.tolist())
    lib.unused(a, "return_aux")
    return by_sequence(a.query, a.cu_seq_q, keys, scale=a.scale, **sides(a.window_size, False))


@torch.no_grad()
def kvcache_2(lib: StandIn, a: SimpleNamespace) -> Tensor:
    """k and v [B,n,Hk,D], where given, are appended at cache_seqlens; then q [B,m,H,D] attends to all."""
    lib.unused(a, "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "alibi_slopes", "return_softmax_lse")
    lib.tensors(a.q, a.k_cache, a.v_cache, pages=True, multiple=256)
    return _cached(lib, a, a.block_table)


@torch.no_grad()
def kvcache_3(lib: StandIn, a: SimpleNamespace) -> Tensor:
    """The same with pages of any size; q may be packed, [T,H,D] with cu_seqlens_q."""
    lib.unused(a, "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "qv", "cu_seqlens_k_new", "q_descale")
    lib.unused(a, "attention_chunk", "scheduler_metadata", "sm_margin", "return_softmax_lse")
    lib.tensors(a.q, a.k_cache, a.v_cache, pages=True)
    return _cached(lib, a, a.page_table)


def _cached(lib: StandIn, a: SimpleNamespace, table: Tensor) -> Tensor:
    batch, cu_q = len(table), getattr(a, "cu_seqlens_q", None)
    lib.ints(a.cache_seqlens, batch)
    lib.table(table, batch)
    lib.read_back()
    lens = a.cache_seqlens.tolist()
    if a.k is not None:
        for b, length in enumerate(lens):
            for i in range(a.k.shape[1]):
                page, offset = divmod(length + i, a.k_cache.shape[1])
                a.k_cache[table[b, page], offset], a.v_cache[table[b, page], offset] = a.k[b, i], a.v[b, i]
        lens = [length + a.k.shape[1] for length in lens]
    keys = paged(a.k_cache, a.v_cache, table, lens)
    options = {"scale": a.softmax_scale, "softcap": a.softcap, **sides(a.window_size, a.causal)}
    if cu_q is not None:
        lib.offsets(batch + 1, (cu_q, a.max_seqlen_q))
        return by_sequence(a.q, cu_q, keys, **options)
    return torch.stack([attend(rows, *keys(b), **options) for b, rows in enumerate(a.q)]).to(a.q.dtype)


FUNCTIONS: dict[str, dict[str, Callable[[StandIn, SimpleNamespace], Any]]] = {
    "flash_attn": {"flash_attn_varlen_func": varlen_2, "flash_attn_with_kvcache": kvcache_2},
    "flash_attn3": {"flash_attn_varlen_func": varlen_3, "flash_attn_with_kvcache": kvcache_3},
    "flash_attn4": {"flash_attn_varlen_func": varlen_4},
    "torch_varlen": {"varlen_attn": varlen_torch},
    "torch_varlen 2.11": {"varlen_attn": varlen_torch},
}


def make_function(lib: StandIn, kind: str, name: str) -> Callable[..., Any]:
    """The stand-in under the real signature; TypeError for what does not bind."""
    signature = to_signature(recorded()[kind]["functions"][name])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = SimpleNamespace(**bound.arguments)
        if not lib.waiting_is_error:
            lib.calls[name] += 1
            lib.asked[name] = asked
        return FUNCTIONS[kind][name](lib, asked)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@contextlib.contextmanager
def flash_stand_in(
    kind: str, *, half_only: bool = False, waits: bool = False, capability: tuple[int, int] = (9, 0)
) -> Iterator[StandIn]:
    """Inside, the CPU counts as a GPU of this compute capability on which the one library `kind` is installed.

    kind: one of KINDS. half_only: float32 and float64 are refused, as by the real ones. waits: see StandIn.
    """
    library = kind.split()[0]
    lib = StandIn(kind, half_only, waits)
    functions = [make_function(lib, kind, name) for name in FUNCTIONS[kind]]
    found = flash.Package(functions[0], functions[1] if len(functions) > 1 else None, recorded()[kind]["version"])

    @contextlib.contextmanager
    def waiting_raises(device: torch.device) -> Iterator[None]:
        lib.waiting_is_error = True
        try:
            yield
        finally:
            lib.waiting_is_error = False

    def forget() -> None:
        for cached in (flash_calls.first_fitting, flash_calls._waits):
            cached.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "capability", lambda device: capability)
        patch.setattr(flash, "package", lambda name: found if name == library else f"{name} is not installed")
        patch.setattr(flash_calls, "waiting_raises", waiting_raises)
        if not half_only:
            patch.setattr(flash, "HALF_TYPES", (*HALF, torch.float32, torch.float64))
        forget()
        try:
            yield lib
        finally:
            forget()
