"""The load-time probe: proof that a model works through our attention function, or a refusal by name and reason.

`set_attn_implementation` silently succeeds on architectures that never call the function (bloom, mpt, xglm), and linear
attention, mamba and K/V shared between layers keep state that it does not see. So nothing is believed, it is tried:
one call per layer, without mask; packed logits == separate eager logits; body + head == the model's own logits; two
train-mode forwards bit-equal; under checkpointing, twice the calls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rhotrain.model.attention import ATTENTION_NAME, LayerCall, PackedContext
from rhotrain.model.loaded import LoadedModel, LoadError, quiet_transformers

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "full", "sliding"})
STATEFUL_MODULES = re.compile(
    r"Mamba|SSM|DeltaNet|RecurrentBlock|RGLRU|RgLru|ShortConv|LinearAttention|LightningAttention|Rwkv|RWKV|xLSTM|mLSTM"
)
"""Class names of modules that carry state from token to token outside attention."""

PROBE_LENS = (7, 5)
"""Lengths of the two probe sequences; long enough for a leak between them to show."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest relative L2 difference between two paths that should agree: measured 4e-7 (float32, 30 layers); what is wrong
differs by 0.1 or more. HF's eager softmax is float32, so float64 is no tighter than that."""
HALF_TOLERANCE = 0.3
"""In half precision two right paths lie far apart: SmolLM2 in bfloat16 on a CPU 0.09 (each 0.11 from float32), and that
grows with the layers. A sequence that sees its neighbour differs by 0.98 there. Smaller faults show in float32 only."""


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse what the configuration already gives away, before any weight is read. Raises LoadError."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(f"{name} ({config.model_type}): is an encoder-decoder; only decoder-only models can be trained")
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(
            f"{name} ({config.model_type}): its weights are quantized, and gradients need real ones; take the "
            "unquantized checkpoint (GGUF files are the exception: they are dequantized)"
        )
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if foreign:
        raise LoadError(
            f"{name} ({config.model_type}): has layers of type {', '.join(foreign)}; they keep state or masks "
            "that packed attention does not see. Use a model with full or sliding attention only"
        )
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if shared:
        raise LoadError(
            f"{name} ({config.model_type}): {shared} layers share keys and values of other layers through "
            "transformers' cache (num_kv_shared_layers), which packed training and the paged pool do not use"
        )


def refuse_by_modules(model: nn.Module) -> None:
    """Refuse models with modules that carry recurrent state. Raises LoadError."""
    found = sorted({type(m).__name__ for m in model.modules() if STATEFUL_MODULES.search(type(m).__name__)})
    if found:
        raise LoadError(
            f"{type(model).__name__}: {', '.join(found)} keep a recurrent state that would run across packed "
            "sequences; use a model with attention only"
        )


def probe(loaded: LoadedModel) -> None:
    """Try the model as trainer and engine will use it. Raises LoadError with the architecture and the reason."""
    refuse_by_modules(loaded.model)
    try:
        with quiet_transformers():
            _probe(loaded)
    except LoadError:
        raise
    except Exception as error:  # whatever a foreign forward raises is a reason to refuse it, and is chained
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LoadError(f"{loaded.architecture}: does not run on packed tokens: {reason}") from error


def _probe(loaded: LoadedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = loaded.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    high = min(loaded.vocab_size, rows)
    sequences = [torch.randint(0, high, (n,), generator=generator).to(loaded.device) for n in PROBE_LENS]
    with torch.no_grad():
        check_calls(loaded, loaded.layer_calls(sequences[0]))
        hidden_TH = packed_hidden(loaded, sequences)
        if not torch.isfinite(hidden_TH).all():
            raise LoadError(
                f"{loaded.spec}: its hidden states are NaN or infinite on plain token ids; its weights are damaged, "
                "take an earlier checkpoint"
            )
        if not torch.equal(hidden_TH, packed_hidden(loaded, sequences)):
            raise LoadError(
                f"{loaded.architecture}: two forwards in train mode differ, so dropout or other noise is left that "
                "zero_dropout does not reach; the ratio would measure that noise"
            )
        _compare(loaded, hidden_TH, sequences)
    if loaded.gradient_checkpointing:
        _check_recompute(loaded, sequences)


def packed_hidden(loaded: LoadedModel, sequences: list[Tensor]) -> Tensor:
    """Hidden states [T, H] of the sequences packed into one row."""
    lens = [s.numel() for s in sequences]
    positions_T = torch.cat([torch.arange(n, device=loaded.device) for n in lens])
    with loaded.with_attention(PackedContext.make(lens, device=loaded.device)):
        return loaded.hidden(torch.cat(sequences), positions_T)


def check_calls(loaded: LoadedModel, calls: list[LayerCall]) -> None:
    """One call per layer, numbered, with the window that the configuration promises and nothing unknown."""
    name, layers = loaded.architecture, loaded.num_layers
    if len(calls) != layers:
        raise LoadError(
            f"{name}: the attention function was called {len(calls)} times for {layers} layers; this architecture "
            "computes attention by itself in the others, so packed sequences would see each other"
        )
    if sorted(call.layer if call.layer is not None else -1 for call in calls) != list(range(layers)):
        raise LoadError(f"{name}: its attention modules are not numbered 0..{layers - 1} by layer_idx")
    unknown = sorted({argument for call in calls for argument in call.unknown})
    if unknown:
        raise LoadError(f"{name}: attention takes {', '.join(unknown)}, which our attention does not honour")
    _check_windows(loaded, calls)


def _check_windows(loaded: LoadedModel, calls: list[LayerCall]) -> None:
    """A window that lives only in transformers' mask would be lost, and short probes would not notice."""
    config = loaded.config
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = getattr(config, "layer_types", None) or [None] * loaded.num_layers
    for call in calls:
        layer_type = types[call.layer or 0]
        expected = window if layer_type is None or "sliding" in layer_type else None
        if call.window != expected:
            raise LoadError(
                f"{loaded.architecture}: layer {call.layer} attends over a window of {expected} by its configuration, "
                f"but tells the attention function {call.window}"
            )


def _compare(loaded: LoadedModel, hidden_TH: Tensor, sequences: list[Tensor]) -> None:
    """Packed == separate eager, and body + head == logits."""
    with _eager_attention(loaded):
        separate_TV = torch.cat([_model_logits(loaded, sequence) for sequence in sequences])
    packed_TV = loaded.head.logits(hidden_TH)
    lens = [s.numel() for s in sequences]
    context = PackedContext.make([lens[0]], device=loaded.device)
    with loaded.with_attention(context):
        own_TV = _model_logits(loaded, sequences[0])
    allowed = TOLERANCE.get(loaded.dtype, HALF_TOLERANCE)
    head_error = relative_l2(packed_TV[: lens[0]], own_TV)
    if not head_error <= allowed:
        raise LoadError(
            f"{loaded.architecture}: body + head gives other logits than the model itself (relative difference "
            f"{head_error:.1e}, allowed {allowed:.0e}): it does something to its logits unknown to model/head.py"
        )
    error = relative_l2(packed_TV, separate_TV)
    if not error <= allowed:
        raise LoadError(
            f"{loaded.architecture}: packed sequences give other logits than separate ones (relative difference "
            f"{error:.1e}, allowed {allowed:.0e}): it keeps state or positions that packing breaks"
        )


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth - its row means||: softmax does not see a row's mean, it must not hide errors."""
    truth = truth.to(torch.float64)
    spread = (truth - truth.mean(-1, keepdim=True)).norm()
    return float((value.to(torch.float64) - truth).norm() / spread.clamp(min=1e-30))


def _model_logits(loaded: LoadedModel, ids_T: Tensor) -> Tensor:
    return loaded.model(input_ids=ids_T[None], use_cache=False).logits[0]


@contextmanager
def _eager_attention(loaded: LoadedModel) -> Iterator[None]:
    """transformers' own eager attention inside, ours again after."""
    model: Any = loaded.model
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _check_recompute(loaded: LoadedModel, sequences: list[Tensor]) -> None:
    """Checkpointing that does not recompute saves nothing (silent without train mode)."""
    before = loaded.attention.calls
    lens = [s.numel() for s in sequences]
    positions_T = torch.cat([torch.arange(n, device=loaded.device) for n in lens])
    with torch.enable_grad(), loaded.with_attention(PackedContext.make(lens, device=loaded.device)):
        hidden_TH = loaded.hidden(torch.cat(sequences), positions_T)
        torch.autograd.grad(hidden_TH.sum(), loaded.parameters(), allow_unused=True)
    calls = loaded.attention.calls - before
    if calls != 2 * loaded.num_layers:
        raise LoadError(
            f"{loaded.architecture}: gradient_checkpointing is on, but forward and backward called attention {calls} "
            f"times for {loaded.num_layers} layers instead of twice each; train it without gradient_checkpointing"
        )
