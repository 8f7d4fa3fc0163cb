"""A LoRA adapter in a model: off and on, saved in PEFT's format, and what stands for a layer and its adapter.

How it gets there, and what it computes: lora.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before every name in an adapter's file: its own two wrappers."""
NAME = "default"
ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """A new adapter: rank, alpha (0 takes twice the rank), targets (names of modules, or all-linear)."""

    rank: int
    alpha: float = 0.0
    targets: tuple[str, ...] = ALL_LINEAR

    @property
    def scale_alpha(self) -> float:
        """alpha, resolved."""
        return self.alpha or 2.0 * self.rank


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter in a model. layers: PEFT's modules. notes: for the log."""

    config: Any
    layers: tuple[Any, ...]
    notes: tuple[str, ...]

    @property
    def spec(self) -> LoraSpec:
        """What would make one like it."""
        targets = self.config.target_modules
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        return LoraSpec(rank=self.config.r, alpha=float(self.config.lora_alpha), targets=names)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model computes as its base does inside. Not for the sampler, whose recorded steps would be made anew."""
        for layer in self.layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.enable_adapters(True)

    def save(self, model: nn.Module, folder: Path) -> None:
        """adapter_config.json and adapter_model.safetensors, as PEFT writes them."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
        save_file({PREFIX + name: t.contiguous() for name, t in state.items()}, folder / ADAPTER_WEIGHTS)
        inference = self.config.inference_mode
        self.config.inference_mode = True  # what PEFT stores: loading it again freezes it unless asked
        try:
            self.config.save_pretrained(str(folder))
        finally:
            self.config.inference_mode = inference


# ---- what the packed weights of a CPU rollout need ------------------------------------------------------------------


def merges(module: nn.Module) -> bool:
    """Whether a module is a plain LoRA layer over float32 weights, whose sum may stand for it. In half precision the
    sum would lose the adapter's last bits: there it is applied."""
    layer: Any = module
    base: Any = getattr(layer, "base_layer", None)
    return (
        type(base) in (nn.Linear, Conv1D)
        and hasattr(layer, "lora_A")
        and list(layer.active_adapters) == list(layer.lora_A) == [NAME]
        and not layer.disable_adapters
        and not layer.merged
        and not layer.lora_variant
        and base.weight.dtype is torch.float32
    )


def sources(module: nn.Module) -> list[Tensor]:
    """W, A and B of a layer that `merges`."""
    layer: Any = module
    return [layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight]


def merged_weight(module: nn.Module) -> Tensor:
    """W + B A alpha / rank of a layer that `merges`, [out, in]."""
    layer: Any = module
    weight, a, b = (tensor.detach() for tensor in sources(module))
    weight = weight.t() if type(layer.base_layer) is Conv1D else weight
    return torch.addmm(weight, b, a, alpha=layer.scaling[NAME])
