"""The attention function that transformers calls, and the context that tells it what the packed tokens mean.

`transformers` computes q, k, v and calls one function per layer, picked by name. Ours, registered as
`rhotrain`, looks at the context of the model it is called from: `PackedContext` (training: varlen, causal,
differentiable) or `PagedContext` (rollout: write K/V into the pool, attend over pages). One set of weights
and one set of kernels serves both.

The context is an attribute of an `AttentionState` that every module of the model holds. A ContextVar or a
keyword would be lost: checkpointing recomputes on autograd's thread, after the `with` around the forward,
and stablelm drops keywords. For the same reason the context must stay set until backward has ended.

No mask function is registered under our name, so transformers builds no mask at all (no [T, T] tensor, no
sync). Signature: transformers 5.17 to 5.24, https://huggingface.co/docs/transformers/attention_interface
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rhotrain.kernels.attention import AttentionBackend, SegmentMasks, attention_backend, varlen_attention
from rhotrain.kernels.flash import AttentionChoice
from rhotrain.kernels.gather import GatherPlan, gather_rows
from rhotrain.kernels.paged_attention import PagedBatch, paged_attention, write_kv

ATTENTION_NAME = "rhotrain"

HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "deterministic",
        "target_dtype",
        "head_mask",
        "past_key_values",
        "past_key_value",
        "cache",
        "position_embeddings",
        "cos",
        "sin",
        "layer_idx",
        "is_training",
        "num_items_in_batch",
    }
)
"""Keywords that do not change what attention computes on packed tokens without a cache. Others are reported
to the probe."""


def _cumulative(lens: Sequence[int], device: torch.device | str | None) -> Tensor:
    """Start offsets int32 [n + 1] of segments with these lengths."""
    total, starts = 0, [0]
    for length in lens:
        total += length
        starts.append(total)
    return torch.tensor(starts, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Training: T = sum(lens_q) packed tokens; segment i's queries are the last lens_q[i] of its lens_k[i]
    keys.

    kv_index None: the keys are the packed tokens themselves (lens_k == lens_q).
    kv_index int64 [sum(lens_k)]: which packed token each key is. A completion that shares its prompt lists
    the prompt's tokens and then its own, so the prompt is computed once and its gradient is the sum over the
    group. gather: its plan, for the deterministic backward pass. masks: of SDPA, the same for all layers.
    cu_q, cu_k: int32 [n + 1] start offsets on the device of the tokens.
    """

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    kv_index: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    gather: GatherPlan | None = None
    masks: SegmentMasks = field(default_factory=SegmentMasks, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        lens_q: Sequence[int],
        lens_k: Sequence[int] | None = None,
        kv_index: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> "PackedContext":
        """Check the lengths and compute the offsets. `device` is where the tokens are (default: kv_index's,
        else the CPU).

        Raises ValueError when the lengths contradict each other.
        """
        queries = tuple(int(n) for n in lens_q)
        keys = queries if lens_k is None else tuple(int(n) for n in lens_k)
        if len(queries) != len(keys) or any(q < 1 or k < q for q, k in zip(queries, keys)):
            raise ValueError(
                f"PackedContext: lens_q {queries} and lens_k {keys}; every segment needs 1 <= lens_q <= lens_k"
            )
        if kv_index is None and queries != keys:
            raise ValueError(
                f"PackedContext: lens_k {keys} differs from lens_q {queries}; pass kv_index to name the keys"
            )
        if kv_index is not None and kv_index.numel() != sum(keys):
            raise ValueError(f"PackedContext: kv_index has {kv_index.numel()} entries; need sum(lens_k) = {sum(keys)}")
        if device is None and kv_index is not None:
            device = kv_index.device
        plan = None if kv_index is None else GatherPlan.of(kv_index, sum(queries))
        return cls(queries, keys, kv_index, _cumulative(queries, device), _cumulative(keys, device), plan)


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Rollout: K/V of the packed tokens are written into the pool, then each attends over its sequence's pages.

    k_pools, v_pools: one [pages, page_size, Hk, D] and [pages, page_size, Hk, E] per layer.
    slots: int64 [T], where each packed token's K/V goes. batch: the sequences and their pages.
    """

    k_pools: Sequence[Tensor]
    v_pools: Sequence[Tensor]
    slots: Tensor
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asked of the attention function; the load-time probe and the KV pool read it. `backend` is the
    implementation that packed attention takes for it."""

    layer: int | None
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    unknown: tuple[str, ...]
    backend: AttentionBackend


@dataclass(eq=False)
class AttentionState:
    """Shared by all modules of one model. `calls` counts calls of the attention function; `record`, when a
    list, gets one LayerCall per call. `paged` runs paged attention, `packed` that of training; a recorder of decode
    steps (rollout/tape.py) and a sketch without memory (train/memory_sketch.py) put themselves in their places.
    `dropout` is above 0 while `LoadedModel.with_dropout` is open. `backend` is what packed and paged attention are
    asked to run by ("auto": the best that is here)."""

    context: PackedContext | PagedContext | None = None
    dropout: float = 0.0
    backend: AttentionChoice = "auto"
    calls: int = 0
    record: list[LayerCall] | None = field(default=None, repr=False)
    paged: "PagedFunction" = field(default_factory=lambda: run_paged, repr=False)
    packed: "PackedFunction" = field(default_factory=lambda: run_packed, repr=False)

    @contextmanager
    def using(self, context: PackedContext | PagedContext) -> Iterator[None]:
        """Set the context until exit. Nests: the previous context comes back."""
        previous, self.context = self.context, context
        try:
            yield
        finally:
            self.context = previous


PackedFunction = Callable[[PackedContext, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
PagedFunction = Callable[[AttentionState, int | None, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]


def run_paged(
    state: AttentionState, layer: int | None, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, options: dict[str, Any]
) -> Tensor:
    """Write this layer's K/V into the pool of `state.context`, then attend over the pages."""
    context = state.context
    assert isinstance(context, PagedContext)
    if layer is None:
        raise ValueError("paged attention: this attention module has no layer_idx, so its KV pool is unknown")
    k_pool, v_pool = context.k_pools[layer], context.v_pools[layer]
    write_kv(k_pool, v_pool, k_THD, v_THE, context.slots)
    return paged_attention(q_THD, k_pool, v_pool, context.batch, **options)


def attach_state(model: nn.Module) -> AttentionState:
    """Give every module of `model` one new shared AttentionState, and return it."""
    state = AttentionState()
    for module in model.modules():
        module.rhotrain_attention = state  # type: ignore[assignment]
    return state


def _check_call(
    module: nn.Module, state: AttentionState, attention_mask: Any, dropout: float, causal: bool, tokens: int
) -> None:
    """Refuse what packed causal attention cannot honour. Raises ValueError that names the layer's class."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name}: an attention mask was passed; packed tokens need none (leave out attention_mask)")
    if dropout and not state.dropout:
        raise ValueError(
            f"{name}: attention dropout {dropout} would reach the ratio; load with adopt_model, and ask for dropout "
            "with `loaded.with_dropout()`"
        )
    if state.dropout and isinstance(state.context, PagedContext):
        raise ValueError(
            f"{name}: dropout {state.dropout} in a rollout; the policy that samples has none, close with_dropout first"
        )
    if not causal and tokens > 1:
        raise ValueError(f"{name}: asks for bidirectional attention; only causal decoders can be trained")


def rhotrain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, E], q and k already rotated -> ([1, T, H, E],
    None).

    Raises RuntimeError without a context, ValueError for a mask, a call that is not causal, dropout outside of
    `LoadedModel.with_dropout`, and a PagedContext inside of it.
    """
    state: AttentionState | None = getattr(module, "rhotrain_attention", None)
    if state is None or state.context is None:
        raise RuntimeError(
            f"{type(module).__name__}: no attention context; run the model inside `with "
            "loaded.with_attention(context):` and keep it open until backward has ended"
        )
    state.calls += 1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check_call(module, state, attention_mask, dropout, causal, query.shape[2])
    layer = getattr(module, "layer_idx", None)
    if state.record is not None:
        unknown = tuple(sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS_ARGUMENTS))
        key_dim, value_dim = key.shape[3], value.shape[3]
        asked: dict[str, Any] = {
            "key_dim": key_dim,
            "value_dim": value_dim,
            "dropout": dropout,
            "backend": state.backend,
        }
        backend = attention_backend(query.device, query.dtype, softcap, s_aux, **asked)
        state.record.append(LayerCall(layer, key.shape[1], key_dim, value_dim, sliding_window, unknown, backend))
    q_THD, k_THD, v_THE = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = {
        "scale": scale,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
        "backend": state.backend,
    }
    if isinstance(state.context, PagedContext):
        out_THE = state.paged(state, layer, q_THD, k_THD, v_THE, options)
    else:
        out_THE = state.packed(state.context, q_THD, k_THD, v_THE, {**options, "dropout": float(dropout)})
    return out_THE[None], None


def run_packed(context: PackedContext, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, options: dict) -> Tensor:
    """Causal attention within each segment, differentiable."""
    if q_THD.shape[0] != sum(context.lens_q):
        raise ValueError(f"PackedContext describes {sum(context.lens_q)} tokens, the model was given {q_THD.shape[0]}")
    if context.kv_index is not None:
        assert context.gather is not None
        k_THD = gather_rows(k_THD, context.gather)
        v_THE = gather_rows(v_THE, context.gather)
    return varlen_attention(
        q_THD,
        k_THD,
        v_THE,
        cu_q=context.cu_q,
        cu_k=context.cu_k,
        max_q=max(context.lens_q),
        max_k=max(context.lens_k),
        lens_q=context.lens_q,
        lens_k=context.lens_k,
        masks=context.masks,
        **options,
    )


AttentionInterface.register(ATTENTION_NAME, rhotrain_attention)
