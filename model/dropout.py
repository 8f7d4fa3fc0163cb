"""Every dropout probability to 0, in train mode.

`model.eval()` is no way out: transformers' gradient checkpointing silently does nothing without train mode.
And zeroing `nn.Dropout` modules alone misses opt, which calls `F.dropout(p=self.dropout)`, and llama, whose
attention dropout is only an argument of the attention function. So modules, functional attributes and config
attributes are zeroed, router jitter too; load.py proves it by two bit-equal forwards in train mode. (gpt2
with its default 0.1: gradients off by 84 %.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

NOISE_NAMES = ("drop", "jitter")
"""Attributes whose name holds one of these and whose value is a float in (0, 1] are probabilities of
noise."""


@dataclass(frozen=True, slots=True)
class ConfigDropout:
    """What the configuration asked for: (config object, attribute, value), so that saving can put it back."""

    values: tuple[tuple[Any, str, float], ...] = ()

    def describe(self) -> str:
        """`attn_pdrop=0.1, embd_pdrop=0.1`, or an empty string."""
        return ", ".join(sorted({f"{name}={value}" for _, name, value in self.values}))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The configuration as it came, for the time of saving."""
        for config, name, value in self.values:
            setattr(config, name, value)
        try:
            yield
        finally:
            for config, name, _ in self.values:
                setattr(config, name, 0.0)


def _noise_attributes(owner: Any) -> list[tuple[str, float]]:
    """(name, value) of the float attributes of `owner` that are probabilities of noise above 0."""
    return [
        (name, value)
        for name, value in vars(owner).items()
        if type(value) is float and 0.0 < value <= 1.0 and any(noise in name for noise in NOISE_NAMES)
    ]


def zero_dropout(model: nn.Module) -> ConfigDropout:
    """Zero every dropout and jitter probability of `model` in place; return what the configuration had asked
    for."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, _ in _noise_attributes(module):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        while config is not None and id(config) not in configs:
            configs[id(config)] = config
            config = config.get_text_config()
    asked = []
    for config in configs.values():
        for name, value in _noise_attributes(config):
            asked.append((config, name, value))
            setattr(config, name, 0.0)
    return ConfigDropout(tuple(asked))
