"""From what a user names to Hugging Face objects: presets, folders, hub ids, GGUF files; errors in our words."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rhotrain.model import smollm2, tiny
from rhotrain.model.adapter import ADAPTER_CONFIG
from rhotrain.model.gguf_files import rebuild
from rhotrain.model.loaded import LoadError
from rhotrain.model.lora import base_of, is_adapter_folder
from rhotrain.model.probe import refuse_by_config

PRESETS: dict[str, Callable[[], Path]] = {"tiny-sums": tiny.folder, "smollm2": smollm2.folder}
"""Preset -> function that returns its Hugging Face folder in the cache, making it on first use."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

T = TypeVar("T")


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises LoadError for a device that does not exist here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise LoadError(f"device: {device!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda"):
        raise LoadError(f"device: {device!r} is not supported; use auto, cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device: {device!r} asks for a GPU that PyTorch does not see; use device='cpu' or 'auto'")
    return place


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on a CPU. Raises LoadError for an unknown name."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise LoadError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_spec(spec: str) -> tuple[str, dict[str, str]]:
    """(source for from_pretrained, its further options); of an adapter's folder, its base's. Raises LoadError for what
    is neither there nor a hub id."""
    if spec in PRESETS:
        return str(PRESETS[spec]()), {}
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise LoadError(f"model: the GGUF file {spec} does not exist")
        return str(path.resolve().parent), {"gguf_file": path.name}
    if is_adapter_folder(path):
        base = base_of(path)
        if is_adapter_folder(Path(base).expanduser()):
            raise LoadError(f"model: the base of the adapter in {spec} is an adapter itself, {base}; merge that first")
        try:
            return resolve_spec(base)
        except LoadError as error:
            raise LoadError(f"{error} (it is the base that {path / ADAPTER_CONFIG} names)") from None
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LoadError(
                f"model: the folder {spec} has no config.json and no {ADAPTER_CONFIG}, so it is no Hugging Face model "
                "and no adapter"
            )
        return str(path), {}
    if path.exists():
        raise LoadError(f"model: {spec} is a file; name its folder, or a .gguf file")
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1 or "\\" in spec:
        raise LoadError(f"model: the folder {spec} does not exist")
    near = difflib.get_close_matches(spec, PRESETS, n=1, cutoff=0.75)
    if near:  # asking the hub about a typo takes 23 s without a network
        raise LoadError(f"model: {spec!r} is no folder and no preset; did you mean {near[0]!r}?")
    return spec, {}


def first_line(error: BaseException) -> str:
    """The gist of a foreign error: its first line, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def attempt(spec: str, what: str, action: Callable[[], T]) -> T:
    """Run a call into transformers; whatever it raises becomes one LoadError line (the original is chained)."""
    try:
        return action()
    except LoadError:
        raise
    except Exception as error:  # transformers, hub, safetensors and tokenizers raise all sorts
        reason = first_line(error)
        if "connect" in reason and "huggingface.co" in reason:
            presets = ", ".join(PRESETS)
            raise LoadError(
                f"model: {spec!r} is no local folder or preset ({presets}), and the Hugging Face hub cannot be "
                "reached to look it up; check the name or the network, or download it and name its folder"
            ) from error
        raise LoadError(f"model: the {what} of {spec} cannot be read: {reason}") from error


def read_config(spec: str, source: str, options: dict[str, str]) -> Any:
    """The configuration, refused early where it shows that the model cannot be used."""
    config = attempt(spec, "configuration", lambda: AutoConfig.from_pretrained(source, **options))
    refuse_by_config(config, spec)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise LoadError(f"{spec} ({config.model_type}): transformers has no causal language model of this type")
    return config


def read_tokenizer(spec: str, source: str, options: dict[str, str]) -> Any:
    """The tokenizer. Raises LoadError where there is none."""
    try:
        return attempt(spec, "tokenizer", lambda: AutoTokenizer.from_pretrained(source, **options))
    except LoadError as error:
        raise LoadError(f"{error}; save one into the model's folder") from error.__cause__


def read_weights(spec: str, source: str, dtype: torch.dtype, options: dict[str, str]) -> tuple[Any, tuple[str, ...]]:
    """(model, notes). Weights that the files lack are refused: transformers would fill them with random numbers."""
    model, info = attempt(  # pyright: ignore
        spec,
        "weights",
        lambda: AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options),
    )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise LoadError(
            f"model: {spec} lacks {len(missing)} weights, first {missing[0]}; transformers would make them up at "
            "random. Name a checkpoint of the whole causal LM"
        )
    unused = sorted(info.get("unexpected_keys", ()))
    notes = (f"{len(unused)} weights of the checkpoint are not used, first {unused[0]}",) if unused else ()
    return (rebuild(model, dtype) if "gguf_file" in options else model), notes


def only_ids(generation_config: Any) -> Any:
    """A generation_config that keeps the special ids and asks for no sampling setting."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(generation_config, name, None) for name in names})
