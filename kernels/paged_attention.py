"""KV cache in pages: write keys and values into a pool, attend over it through block tables.

The pool of a layer is one tensor [pages, page_size, Hk, D]. Token t of sequence b lies in page
tables[b, t // page_size] at offset t % page_size; its slot is page * page_size + offset. So sequences share pages by
naming the same page. No gradient: the pool is written in place. Slots that hold no token must be finite (allocate with
zeros, not empty): they get weight 0, and 0 * NaN is NaN.

Sequences with one query (decode) are a batch of their own, which reads lengths and pages from the device and so can be
captured in a CUDA graph. Those with several (prompts, in chunks or whole) are read from their pages by a library that
can, else their keys are gathered once per layer for `varlen_attention`.
Decode on CUDA takes the first that fits of our Triton kernel, flash-attn 3, 2, PyTorch's varlen attention, and
`decode_reference`, which is the path of a CPU. Triton comes first because its split of the keys depends on nothing but
a token's position: a row has the same bits in every batch, and the last rows of a rollout still fill the GPU. The
libraries keep the first property only unsplit (num_splits 1), where 4 rows of 8 key heads occupy 32 of an H200's 132
processors.
Source: PagedAttention, Kwon et al., arXiv 2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from rhotrain.kernels import flash, flash_calls
from rhotrain.kernels.attention import varlen_attention
from rhotrain.kernels.backend import Backend, resolve_backend
from rhotrain.kernels.flash import LIBRARIES, AttentionChoice
from rhotrain.kernels.paged_cpu import decode_reference
from rhotrain.kernels.paged_kernels import decode_triton, write_triton
from rhotrain.kernels.paged_plan import DecodePlans, SharedPages

DecodeBackend = Literal["triton", "flash_attn3", "flash_attn", "torch_varlen", "sdpa"]
PrefillBackend = Literal["flash_attn3", "flash_attn4", "flash_attn", "torch_varlen", "gather"]


@dataclass(frozen=True, slots=True)
class Starts:
    """Cumulative lengths of sequences with several queries, int32 [n+1]: of their queries and of their keys."""

    cu_q: Tensor
    cu_k: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """B sequences whose new tokens are packed one after the other; K/V of all their tokens are in the pool.

    tables: int32 [B,W], the pages of each sequence. Columns past its last page are not read as tokens, but must name
        some page (0 will do).
    lens: int32 [B], tokens of each sequence, the new ones included. 0: a padding row; its output is 0.
    page_size: tokens per page.
    decode: the first `decode` sequences have one new token each.
    lens_q, lens_k: of the sequences after those, as Python numbers: new tokens and all tokens.
    shared: which decode rows share pages.
    """

    tables: Tensor
    lens: Tensor
    page_size: int
    decode: int
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    shared: tuple[SharedPages, ...] = ()

    @classmethod
    def make(
        cls,
        tables: Tensor,
        lens_q: Sequence[int],
        lens_k: Sequence[int],
        page_size: int,
        *,
        shared: tuple[SharedPages, ...] = (),
    ) -> "PagedBatch":
        """From the lengths of all sequences; those with one query must come first.

        Raises ValueError for lengths that contradict each other, the order, or the tables.
        """
        _check_lengths(lens_q, lens_k, tables, page_size)
        decode = next((b for b, m in enumerate(lens_q) if m > 1), len(lens_q))
        lens = torch.tensor(list(lens_k), dtype=torch.int32).to(tables.device, non_blocking=True)
        return cls(tables.int(), lens, page_size, decode, tuple(lens_q[decode:]), tuple(lens_k[decode:]), shared)

    @property
    def tokens(self) -> int:
        """How many queries the batch has."""
        return self.decode + sum(self.lens_q)

    @cached_property
    def plans(self) -> DecodePlans:
        """Tables and lengths of the first `decode` sequences, and what layers share in decoding them on a CPU."""
        return DecodePlans(self.tables[: self.decode], self.lens[: self.decode], self.shared)  # type: ignore[arg-type]

    @cached_property
    def starts(self) -> Starts:
        """Of the sequences after the first `decode`; computed once for all layers."""
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(self.tables.device, non_blocking=True)
            for lens in (self.lens_q, self.lens_k)
        )
        return Starts(cu_q, cu_k)

    @cached_property
    def key_slots(self) -> Tensor:
        """int64 [sum(lens_k)]: where the keys of those sequences lie; computed once for all layers."""
        tables = self.tables[self.decode :]
        return torch.cat([token_slots(table, n, self.page_size) for table, n in zip(tables, self.lens_k)])


def _check_lengths(lens_q: Sequence[int], lens_k: Sequence[int], tables: Tensor, page_size: int) -> None:
    if not len(lens_q) == len(lens_k) == len(tables):
        raise ValueError(
            f"lens_q, lens_k: {len(lens_q)} and {len(lens_k)} sequences do not fit {len(tables)} block tables"
        )
    capacity = tables.shape[1] * page_size
    for b, (m, n) in enumerate(zip(lens_q, lens_k)):
        if not 1 <= m <= n <= capacity:
            raise ValueError(
                f"lens_q, lens_k: sequence {b} has {m} queries and {n} keys; need 1 <= queries <= keys <= {capacity}, "
                f"the tokens that {tables.shape[1]} pages of {page_size} hold"
            )
    single = [m == 1 for m in lens_q]
    if single != sorted(single, reverse=True):
        raise ValueError(f"lens_q: {tuple(lens_q)}; sequences with one query must come before those with several")


def token_slots(table: Tensor, length: int, page_size: int) -> Tensor:
    """Slots int64 [length] of a sequence's tokens from its pages [W]."""
    pages = -(-length // page_size)
    offsets = torch.arange(page_size, device=table.device)
    return (table[:pages, None].long() * page_size + offsets).view(-1)[:length]


def _kernel_choice(backend: AttentionChoice) -> Backend:
    """The choice of an op that only Triton and the reference have."""
    flash.check_choice(backend)
    if backend in ("auto", "triton", "reference"):
        return backend  # type: ignore[return-value]
    return "reference" if backend == "sdpa" else "auto"


def write_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    slots: Tensor,
    *,
    backend: AttentionChoice = "auto",
) -> None:
    """Store keys and values of T tokens in slots (int64 [T]) of the pool, in place, in the pool's dtype.

    Slots are distinct, but for those of padding rows, whose page nobody reads. Pools may be views of any strides (for
    Triton, which takes one launch for both: with a contiguous last dimension).
    """
    if resolve_backend(_kernel_choice(backend), k_pool) == "triton":
        write_triton(k_pool, v_pool, k_TGD, v_TGE, slots)
        return
    for pool, new in ((k_pool, k_TGD), (v_pool, v_TGE)):
        if _slots_are_rows(pool):
            pool.flatten(0, 1).index_copy_(0, slots, new.to(pool.dtype))
        else:
            pool[slots // pool.shape[1], slots % pool.shape[1]] = new.to(pool.dtype)


def _slots_are_rows(pool: Tensor) -> bool:
    """True when `flatten(0, 1)` is a view; otherwise it would copy the pool."""
    return pool.shape[0] == 1 or pool.stride(0) == pool.shape[1] * pool.stride(1)


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """What lies in these slots: [S,Hk,D]."""
    if _slots_are_rows(pool):
        return pool.flatten(0, 1).index_select(0, slots)
    return pool[slots // pool.shape[1], slots % pool.shape[1]]


def _call(
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    softcap: float | None,
    sinks: Tensor | bool | None,
    dims: tuple[int, int],
    decode: bool,
) -> flash.Call:
    has_sinks = isinstance(sinks, Tensor) or bool(sinks)
    options = {"softcap": softcap is not None, "sinks": has_sinks, "decode": decode}
    return flash.Call(device, dtype, *dims, page_size=page_size, **options)


def decode_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    page_size: int,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    *,
    key_dim: int = 64,
    value_dim: int | None = None,
    backend: AttentionChoice = "auto",
) -> DecodeBackend:
    """What `paged_decode` uses for pools of such dtype, page size and dimensions.

    "auto" passes over libraries that wait for the device (`flash_calls.graph_safe`), captured or not, so that a graph
    and the same step without one run the same. "reference" is "sdpa". ValueError when the named one cannot run the
    call, or would wait inside of a capture.
    """
    device = torch.device(device)
    if backend in ("reference", "sdpa") or (backend == "auto" and flash.capability(device) is None):
        return "sdpa"
    call = _call(device, dtype, page_size, softcap, sinks, (key_dim, value_dim or key_dim), decode=True)
    if backend in LIBRARIES:
        flash.require(backend, call)  # type: ignore[arg-type]
        if not flash_calls.graph_safe(backend, call.device) and flash_calls.capturing(call.device):
            raise ValueError(
                f"backend: {backend!r} waits for the device here, which no CUDA graph can hold; use 'auto'"
            )
        return backend  # type: ignore[return-value]
    if resolve_backend(_kernel_choice(backend), torch.empty(0, dtype=dtype, device=device)) == "triton":
        return "triton"
    return flash_calls.first_fitting(call) or "sdpa"  # type: ignore[return-value]


def prefill_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    page_size: int,
    softcap: float | None = None,
    sinks: Tensor | bool | None = None,
    *,
    key_dim: int = 64,
    value_dim: int | None = None,
    backend: AttentionChoice = "auto",
) -> PrefillBackend:
    """What reads the keys of sequences with several queries: a library that reads pages, or "gather", after which
    `varlen_attention` runs. A named library that reads no such pages gathers, too."""
    flash.check_choice(backend)
    device = torch.device(device)
    if backend in ("reference", "sdpa") or flash.capability(device) is None:
        return "gather"
    call = _call(device, dtype, page_size, softcap, sinks, (key_dim, value_dim or key_dim), decode=False)
    if backend in LIBRARIES:
        return "gather" if flash.why_not(backend, call) else backend  # type: ignore[return-value, arg-type]
    return flash_calls.first_fitting(call) or "gather"


def paged_decode(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: tuple[SharedPages, ...] = (),
    plans: DecodePlans | None = None,
    backend: AttentionChoice = "auto",
) -> Tensor:
    """Attention of the newest token of each sequence over its pages: [B,H,E] in q's dtype.

    tables int32 [B,W], lens int32 [B], shared: as in `PagedBatch`; on CUDA nothing of them is read on the host.
    plans: `PagedBatch.plans`, so that a CPU plans a step once for all layers; counts for its own tables and lens only.
    scale, window, softcap, sinks: as in `varlen_attention`. backend: as in `decode_backend`.
    """
    _check_scores(window, softcap)
    pages: dict = {"key_dim": k_pool.shape[3], "value_dim": v_pool.shape[3], "backend": backend}
    choice = decode_backend(q_BHD.device, k_pool.dtype, k_pool.shape[1], softcap, sinks, **pages)
    options: dict = {"scale": scale, "window": window, "softcap": softcap}
    if choice == "triton":
        return decode_triton(q_BHD, k_pool, v_pool, tables, lens, sinks=sinks, **options)
    if choice == "sdpa":
        known = plans is not None and plans.tables is tables and plans.lens is lens
        hints: dict = {"shared": shared, "plans": plans if known else None}
        return decode_reference(q_BHD, k_pool, v_pool, tables, lens, sinks=sinks, **hints, **options)
    return flash_calls.decode(choice, q_BHD, k_pool, v_pool, tables, lens, **options)


def _check_scores(window: int | None, softcap: float | None) -> None:
    """A window without keys or a cap of nothing would give NaN."""
    if window is not None and window < 1:
        raise ValueError(f"window: {window}; a query sees at least its own key, so need window >= 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: {softcap}; need a number above 0, or None")


def _paged_prefill(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    backend: AttentionChoice,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The queries of the sequences that have several, after the first `batch.decode` sequences."""
    starts, max_q, max_k = batch.starts, max(batch.lens_q), max(batch.lens_k)
    options: dict = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    pages: dict = {"key_dim": k_pool.shape[3], "value_dim": v_pool.shape[3], "backend": backend}
    choice = prefill_backend(q_THD.device, k_pool.dtype, k_pool.shape[1], softcap, sinks, **pages)
    if choice != "gather":
        tables, lens = batch.tables[batch.decode :], batch.lens[batch.decode :]
        lengths = (starts.cu_q, starts.cu_k, max_q, max_k)
        return flash_calls.prefill(choice, q_THD, k_pool, v_pool, tables, lens, *lengths, **options)
    keys, values = (_gather(pool, batch.key_slots) for pool in (k_pool, v_pool))
    return varlen_attention(
        q_THD,
        keys,
        values,
        cu_q=starts.cu_q,
        cu_k=starts.cu_k,
        max_q=max_q,
        max_k=max_k,
        lens_q=batch.lens_q,
        lens_k=batch.lens_k,
        backend=backend,
        **options,
    )


def paged_attention(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: AttentionChoice = "auto",
) -> Tensor:
    """Causal attention of packed queries over pages; returns [T,H,E].

    q_THD: the new tokens of all sequences, one after the other: the last of each, in the order of `batch`.
    scale, window, softcap, sinks: as in `varlen_attention`. backend: as in `decode_backend` and `prefill_backend`.
    Raises ValueError when the number of queries is not that of the batch, or a named backend cannot run here.
    """
    _check_scores(window, softcap)
    if len(q_THD) != batch.tokens:
        raise ValueError(f"q_THD: {len(q_THD)} queries, but the batch has {batch.tokens} new tokens")
    if batch.page_size != k_pool.shape[1]:
        raise ValueError(f"PagedBatch.page_size: {batch.page_size}, but the pool's pages have {k_pool.shape[1]} slots")
    options: dict = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    parts, d = [], batch.decode
    if d:
        plans = batch.plans
        hints: dict = {"shared": batch.shared, "plans": plans, "backend": backend}
        parts.append(paged_decode(q_THD[:d], k_pool, v_pool, plans.tables, plans.lens, **hints, **options))
    if batch.lens_q:
        parts.append(_paged_prefill(q_THD[d:], k_pool, v_pool, batch, backend, **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
