"""Hugging Face folder, hub id, GGUF file or preset -> LoadedModel; and back to a folder."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rhotrain.kernels.flash import AttentionChoice
from rhotrain.model import sources
from rhotrain.model.adapter import ADAPTER_CONFIG, Adapter, LoraSpec
from rhotrain.model.attention import ATTENTION_NAME, attach_state
from rhotrain.model.dropout import zero_dropout
from rhotrain.model.folders import write_folder
from rhotrain.model.fused import fuse_layers
from rhotrain.model.head import head_of
from rhotrain.model.loaded import LoadedModel, LoadError, check_dropout, quiet_transformers
from rhotrain.model.lora import add_adapter, is_adapter_folder, open_adapter
from rhotrain.model.probe import probe as run_probe
from rhotrain.model.probe import refuse_by_config
from rhotrain.model.quantized import QuantizeBase, check_quantize, is_quantized, quantize_linears
from rhotrain.model.vocabulary import generation_notes, real_vocabulary, stop_ids

__all__ = ["LoadError", "LoadedModel", "adopt_model", "load_model", "save_model"]


def load_model(
    spec: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str | None = None,
    gradient_checkpointing: bool = False,
    offload_activations: bool = False,
    need_chat_template: bool = False,
    dropout: float = 0.0,
    fused_layers: str = "off",
    attention: AttentionChoice = "auto",
    lora: LoraSpec | None = None,
    quantize_base: QuantizeBase = "none",
    probe: bool = True,
) -> LoadedModel:
    """Load `spec`: a Hugging Face folder, a hub id, a .gguf file, a preset (`tiny-sums`, `smollm2`), or the folder of a
    PEFT adapter, which names its base.

    device `auto`: CUDA where there is one. dtype `auto`: bfloat16 on CUDA, float32 on a CPU.
    offload_activations: with gradient_checkpointing, layer inputs wait for the backward pass on the CPU.
    tokenizer: folder or hub id of another tokenizer. need_chat_template: refuse a tokenizer without one.
    dropout: what `LoadedModel.with_dropout` puts in; outside of it every probability is 0, asked for or not.
    fused_layers: how RMSNorm, gated MLP and rotary run, in training and rollout alike: `off`, `auto` (measured),
    `liger`,
        `compile`, `torch`, or what `LoadedModel.fused_layers` of an earlier load says.
    attention: force an attention backend; `auto` takes the best that is here.
    lora: put a new adapter into the model, to be trained instead of the weights.
    quantize_base: `nf4` holds the body's linear layers in 4 bits (quantized.py), one after the other,
        so that the device never holds them all in `dtype`; the CPU does, when the files have been read. Nothing but an
        adapter can then be trained.
    Raises LoadError; its message names the model and the reason or the fix.
    """
    check_dropout(spec, dropout)
    if offload_activations and not gradient_checkpointing:
        raise LoadError(
            f"{spec}: offload_activations moves the inputs that gradient_checkpointing keeps; set that too, or neither"
        )
    place = sources.resolve_device(device)
    kind = sources.resolve_dtype(dtype, place)
    check_quantize(spec, quantize_base, kind)
    folder = Path(spec).expanduser()
    opened = folder if is_adapter_folder(folder) else None
    if quantize_base != "none" and gradient_checkpointing and opened is None and lora is None:
        raise LoadError(
            f"{spec}: gradient_checkpointing: nothing is trained in a model of 4-bit weights (quantize_base) without "
            "an adapter; leave it out, or take a LoraSpec"
        )
    if opened is not None and lora is not None:
        raise LoadError(f"{spec}: is an adapter with a rank of its own; leave lora_rank at 0 to go on with it")
    with quiet_transformers():
        source, options = sources.resolve_spec(spec)
        sources.read_config(spec, source, options)
        text = sources.read_tokenizer(tokenizer or spec, *_tokenizer_source(tokenizer, source, options))
        model, notes = sources.read_weights(spec, source, kind, options)
        if quantize_base != "none":
            notes = (*notes, *quantize_linears(model, place, spec=spec))
        model = model.to(place)
        adapter = None
        if opened is not None:
            adapter = open_adapter(model, opened, spec=spec)
        elif lora is not None:
            named = spec if spec.endswith(".gguf") else source
            adapter = add_adapter(model, lora, spec=spec, base=_lasting(named))
    return adopt_model(
        model,
        text,
        spec=spec,
        gradient_checkpointing=gradient_checkpointing,
        need_chat_template=need_chat_template,
        dropout=dropout,
        fused_layers=fused_layers,
        attention=attention,
        adapter=adapter,
        offload_activations=offload_activations,
        probe=probe,
        notes=notes,
    )


def adopt_model(
    model: nn.Module,
    tokenizer: Any,
    *,
    spec: str = "model in memory",
    gradient_checkpointing: bool = False,
    need_chat_template: bool = False,
    dropout: float = 0.0,
    fused_layers: str = "off",
    attention: AttentionChoice = "auto",
    adapter: Adapter | None = None,
    offload_activations: bool = False,
    probe: bool = True,
    notes: tuple[str, ...] = (),
) -> LoadedModel:
    """Turn a Hugging Face causal LM in memory into a LoadedModel, changing it in place: our attention, train
    mode, no dropout, neutral generation settings. adapter: what `add_adapter` put into it. `dropout`, `fused_layers`,
    `attention` as in `load_model`: a model
    without a place for dropout is refused. Raises LoadError for what cannot be trained or sampled honestly."""
    hf: Any = model
    check_dropout(spec, dropout)
    refuse_by_config(hf.config, spec)
    if tokenizer is None:
        raise LoadError(f"{spec}: has no tokenizer; save one into the model's folder")
    if need_chat_template and not getattr(tokenizer, "chat_template", None):
        raise LoadError(f"{spec}: its tokenizer has no chat template; use template='raw', or save one with a template")
    config_dropout = zero_dropout(model)
    use_our_attention(hf)
    hf.train()
    if gradient_checkpointing:
        enable_checkpointing(hf, keep_random_state=dropout > 0)
    generation = getattr(hf, "generation_config", None)
    hf.generation_config = sources.only_ids(generation)
    positions, position_notes = _max_positions(hf.config.get_text_config())
    rows = _head_rows(model)
    embedded = hf.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedded:
        raise LoadError(
            f"{spec}: its tokenizer has {len(tokenizer)} ids, but the model embeds {embedded}; the two do not fit"
        )
    asked = config_dropout.describe()
    instead = (
        f"the configuration's dropout is not used ({asked})" if dropout else f"dropout set to 0 (asked for: {asked})"
    )
    dropout_notes = (instead,) if asked else ()
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=spec,
        attention=attach_state(model),
        vocab_size=real_vocabulary(tokenizer, rows),
        stop_token_ids=stop_ids(tokenizer, hf.config.get_text_config(), generation, rows),
        max_positions=positions,
        generation_config=generation,
        config_dropout=config_dropout,
        dropout=dropout,
        notes=(*notes, *dropout_notes, *generation_notes(generation), *position_notes, *_notes_of(adapter)),
        gradient_checkpointing=gradient_checkpointing,
        adapter=adapter,
        offload_activations=offload_activations,
    )
    loaded.attention.backend = attention
    if fused_layers != "off":
        fused = fuse_layers(loaded, fused_layers)
        loaded.fused_layers = fused.spec
        loaded.notes = (*loaded.notes, fused.describe())
    if probe:
        run_probe(loaded)
    if dropout:
        loaded.notes = (*loaded.notes, _dropout_note(loaded))
    return loaded


def _notes_of(adapter: Adapter | None) -> tuple[str, ...]:
    return () if adapter is None else adapter.notes


def _lasting(source: str) -> str:
    """A local path as an absolute one, since an adapter outlives the folder that it was started in; hub ids stay."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _dropout_note(loaded: LoadedModel) -> str:
    """Where the dropout that was asked for acts, and by which attention; LoadError where there is no such place."""
    ids_T = torch.zeros(2, dtype=torch.int64, device=loaded.device)
    devices = [loaded.device.index] if loaded.device.type == "cuda" else []
    with torch.no_grad(), quiet_transformers(), torch.random.fork_rng(devices=devices):
        without = {call.backend for call in loaded.layer_calls(ids_T)}
        with loaded.with_dropout():
            within = {call.backend for call in loaded.layer_calls(ids_T)}
    note = f"dropout {loaded.dropout} in the current policy's forward only, at {', '.join(loaded.dropout_sites)}"
    if within == without:
        return note
    return f"{note}; attention there by {', '.join(sorted(within))} instead of {', '.join(sorted(without))}"


def enable_checkpointing(model: Any, *, keep_random_state: bool = False) -> None:
    """Recompute each layer in backward, non-reentrant; the only place that knows both names of the method
    (5.24 renamed it). Only dropout needs `keep_random_state`, so that a layer draws the same mask again: reading
    the state costs a sync on CUDA."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise LoadError(f"{type(model).__name__}: does not support gradient_checkpointing; train it without")
    options = {"use_reentrant": False, "preserve_rng_state": keep_random_state}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def save_model(loaded: LoadedModel, folder: str | os.PathLike[str]) -> Path:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer open: weights, config as it came,
    tokenizer, generation config. With an adapter: the adapter in PEFT's format, and the tokenizer.
    Atomic: a temporary folder beside it is renamed. An earlier model folder of
    that name is replaced as a whole.

    Raises LoadError when `folder` holds something that is not a model, and for 4-bit weights without an adapter.
    """
    target = Path(folder)
    if loaded.adapter is None and is_quantized(loaded.model):
        raise LoadError(
            f"{loaded.spec}: its weights are in 4 bits (quantize_base), which are not saved; take its source"
        )
    known = any((target / name).exists() for name in ("config.json", ADAPTER_CONFIG))
    if target.exists() and any(target.iterdir()) and not known:
        raise LoadError(f"{target}: is not empty and holds no model (no config.json); choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)

    def write(temporary: Path) -> None:
        model: Any = loaded.model
        if loaded.adapter is not None:
            loaded.adapter.save(model, temporary)
            with quiet_transformers():
                loaded.tokenizer.save_pretrained(temporary)
            return
        with quiet_transformers(), loaded.with_dropout(0.0), loaded.config_dropout.restored():
            model.save_pretrained(temporary)
            loaded.tokenizer.save_pretrained(temporary)
        if loaded.generation_config is not None:
            # not save_pretrained: it refuses settings that contradict each other, and these are only passed on
            loaded.generation_config.to_json_file(temporary / "generation_config.json")

    write_folder(target, write)
    return target


def _tokenizer_source(tokenizer: str | None, source: str, options: dict[str, str]) -> tuple[str, dict[str, str]]:
    return (source, options) if tokenizer is None else sources.resolve_spec(tokenizer)


def _head_rows(model: nn.Module) -> int:
    try:
        return head_of(model).weight.shape[0]
    except ValueError as error:
        raise LoadError(str(error)) from None


def use_our_attention(model: Any) -> None:
    """Select our attention function; where an architecture ignores it, the probe finds out."""
    model.set_attn_implementation(ATTENTION_NAME)
    if next(model.parameters()).dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped_mm refuses float64


def _max_positions(config: Any) -> tuple[int | None, tuple[str, ...]]:
    """(longest sequence, notes). longrope switches its frequencies when any sequence of the batch outgrows
    the original length, so a token's logprob would depend on its neighbours: the original length is the
    limit."""
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    if any(v.get("rope_type") == "longrope" for v in variants):
        name = "original_max_position_embeddings"
        original = [v[name] for v in variants if name in v]
        original.append(getattr(config, name, None) or positions)
        limit = min(original)
        return limit, (f"longrope: sequences are limited to the original {limit} positions of {positions}",)
    return positions, ()
