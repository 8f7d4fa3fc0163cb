"""GGUF files as ordinary Hugging Face models: dequantized by transformers, then freed of the mark of quantization."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhotrain.model.loaded import quiet_transformers


def rebuild(model: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model made from the configuration alone: one that was read from GGUF refuses
    save_pretrained because it counts as quantized, though its weights are dequantized."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write a .gguf file as a Hugging Face folder, float32 safetensors with tokenizer and generation config.

    The weights stay float32: Q4_1 blocks are a scale times 0..15 plus an offset, which bfloat16 would round.
    """
    place, file = str(gguf.parent), gguf.name
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
        model: Any = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
        rebuild(model, torch.float32).save_pretrained(target)
        tokenizer.save_pretrained(target)
