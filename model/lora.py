"""LoRA adapters on a loaded model: PEFT's layers in the same modules, trained instead of the weights.

    y = x W^T + (x A^T) B^T alpha / rank          A [rank, in], B [out, rank], float32 under a half-precision W

Source: Hu et al., arXiv 2106.09685; the layers are PEFT's own, put in place with `inject_adapter_in_model`, so that the
model stays the Hugging Face class it is. B starts at 0: before the first step the policy is the base. Dropout in the
adapter stays 0, since sampler and trainer must compute the same. The head and the embedding carry no adapter: the
trainer reads the head's weight as it is.

Adapters are stored in PEFT's format (adapter_config.json, adapter_model.safetensors): `PeftModel.from_pretrained`
opens them, and `load_model` opens what PEFT wrote.
"""

import difflib
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rhotrain.model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ALL_LINEAR, NAME, PREFIX, Adapter, LoraSpec
from rhotrain.model.loaded import LoadError, quiet_bitsandbytes
from rhotrain.model.quantized import num_weights

KEEPS_BASE = ("true", "false", "gaussian", "orthogonal", "eva")
"""PEFT's init_lora_weights under which the base keeps its weights; pissa, olora and others subtract the first B A."""


def lora_of(rank: int, alpha: float, targets: tuple[str, ...]) -> LoraSpec | None:
    """What a run's settings ask for: None at rank 0, where all weights are trained."""
    return LoraSpec(rank=rank, alpha=alpha, targets=targets) if rank > 0 else None


def is_adapter_folder(folder: Path) -> bool:
    """Whether it holds an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """The model that an adapter belongs to. Raises LoadError where the adapter does not say or is not LoRA."""
    try:
        content = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise LoadError(f"model: {folder / ADAPTER_CONFIG} cannot be read: {error}") from error
    if content.get("peft_type") != "LORA":
        raise LoadError(
            f"model: the adapter in {folder} is {content.get('peft_type')!r}; only LORA adapters are loaded"
        )
    base = content.get("base_model_name_or_path")
    if not base:
        raise LoadError(
            f"model: the adapter in {folder} does not name its base; "
            f"write base_model_name_or_path into {ADAPTER_CONFIG}"
        )
    return str(base)


def spec_of(folder: Path) -> LoraSpec:
    """What would make an adapter like the one in `folder`, of its configuration alone. Raises LoadError."""
    base_of(folder)
    content = json.loads((folder / ADAPTER_CONFIG).read_text())
    try:
        targets = content["target_modules"]
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        return LoraSpec(rank=int(content["r"]), alpha=float(content["lora_alpha"]), targets=names)
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"model: {folder / ADAPTER_CONFIG} lacks a usable r, lora_alpha or target_modules") from error


def require_peft(spec: str) -> None:
    """LoadError without PEFT."""
    if find_spec("peft") is None:
        raise LoadError(f"{spec}: LoRA needs PEFT; pip install 'rhotrain[lora]'")
    with quiet_bitsandbytes():
        import peft  # noqa: F401


def add_adapter(model: Any, lora: LoraSpec, *, spec: str, base: str) -> Adapter:
    """Put a new adapter into `model`: every other parameter is frozen. base: what adapter_config.json names.

    A is drawn from torch's global generator. Raises LoadError for targets that are not there.
    """
    require_peft(spec)
    from peft import LoraConfig

    wanted: Any = "all-linear" if lora.targets == ALL_LINEAR else sorted(lora.targets)
    _check_targets(model, lora.targets, spec)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale_alpha,  # type: ignore[arg-type] # PEFT divides it, whole or not
        target_modules=wanted,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    return _inject(model, config, spec)


def open_adapter(model: Any, folder: Path, *, spec: str) -> Adapter:
    """Put the adapter of `folder` into `model`, trainable. Raises LoadError for what cannot be trained honestly and
    for weights that are missing or left over."""
    require_peft(spec)
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    config: Any = LoraConfig.from_pretrained(str(folder))
    refused = {
        "use_dora": config.use_dora,
        "modules_to_save": config.modules_to_save,
        "bias": config.bias != "none",
        "lora_bias": getattr(config, "lora_bias", False),
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        f"init_lora_weights {config.init_lora_weights!r} (it changes the base, which then is no reference)": (
            str(config.init_lora_weights).lower() not in KEEPS_BASE
        ),
    }
    found = [name for name, value in refused.items() if value]
    if found:
        raise LoadError(f"{spec}: the adapter uses {', '.join(found)}, which is not supported; train plain LoRA")
    config.inference_mode = False
    config.lora_dropout = 0.0
    adapter = _inject(model, config, spec)
    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError) as error:
        raise LoadError(f"{spec}: {folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    state = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    try:
        result: Any = set_peft_model_state_dict(model, state, adapter_name=NAME)
    except RuntimeError as error:  # sizes
        raise LoadError(f"{spec}: the adapter does not fit its base: {str(error).splitlines()[-1].strip()}") from error
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        first = (missing or result.unexpected_keys)[0]
        raise LoadError(f"{spec}: the adapter's weights do not fit its base, first {first}")
    return adapter


def _inject(model: Any, config: Any, spec: str) -> Adapter:
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    tables = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # before PEFT puts its layers there
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # gpt2's Conv1D, which PEFT then handles
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # of experts, see the note
        try:
            inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise LoadError(f"{spec}: lora_targets: {str(error).splitlines()[0]}") from error
    layers: tuple[Any, ...] = tuple(m for m in model.modules() if isinstance(m, LoraLayer))
    if any(id(getattr(layer, "base_layer", None)) in tables for layer in layers):
        raise LoadError(f"{spec}: lora_targets: the head and the embedding carry no adapter; leave them out")
    variants = sorted({type(v).__name__ for layer in layers for v in layer.lora_variant.values()})
    if variants:  # aLoRA for one computes nothing without what PeftModel's own forward hands it
        raise LoadError(f"{spec}: the adapter uses {', '.join(variants)}, which is not supported; train plain LoRA")
    for layer in layers:
        for part in (*layer.lora_A.values(), *layer.lora_B.values()):
            if part.weight.dtype in (torch.bfloat16, torch.float16):
                part.weight.data = part.weight.data.float()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rank = config.r
    notes = [
        f"LoRA: rank {rank}, alpha {config.lora_alpha:g}, {len(layers)} modules, {trained:,} of "
        f"{sum(map(num_weights, model.parameters())):,} parameters are trained"
    ]
    experts = sum(p.dim() == 3 for n, p in model.named_parameters() if not p.requires_grad)
    if experts:
        notes.append(f"LoRA: {experts} tensors that hold all experts of a layer carry no adapter")
    return Adapter(config, layers, tuple(notes))


def _check_targets(model: Any, targets: tuple[str, ...], spec: str) -> None:
    """Every name must end the name of a linear layer of the body."""
    if targets == ALL_LINEAR:
        return
    head = model.get_output_embeddings()
    names = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            known = sorted({name.rsplit(".", 1)[-1] for name in names})
            near = difflib.get_close_matches(target, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise LoadError(f"{spec}: lora_targets: {target!r} is no linear layer; {hint}there are {', '.join(known)}")
