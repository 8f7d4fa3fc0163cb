"""Every dropout probability to 0, in train mode; and back up where a user asks for dropout by name.

`model.eval()` is no way out: transformers' gradient checkpointing silently does nothing without train mode.
And zeroing `nn.Dropout` modules alone misses opt, which calls `F.dropout(p=self.dropout)`, and llama, whose
attention dropout is only an argument of the attention function. So modules, functional attributes and config
attributes are zeroed, router jitter too; load.py proves it by two bit-equal forwards in train mode. (gpt2
with its default 0.1: gradients off by 84 %.)

Where dropout acts is tried, not believed: some fields are read by no layer (gpt2's summary_first_dropout,
gpt_bigcode's second copy of attn_pdrop), and persimmon reads its configuration in every forward. A site is what,
raised alone, changes the hidden states. Router jitter is noise but no dropout, and layerdrop skips whole layers
without a 1 / (1 - p): both stay 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NOISE_NAMES = ("drop", "jitter")
"""Attributes whose name holds one of these and whose value is a float in (0, 1] are probabilities of
noise."""

SKIPPING_NAMES = ("layerdrop", "drop_path")
"""Attributes whose name holds one of these skip whole layers."""

TRIAL = 0.5
"""Probability at which a place is tried; on a few tokens some weight or unit is dropped for certain."""


Place = tuple[Any, str]
"""(owner, attribute) of one probability; the owner is an nn.Dropout, another module, or a configuration."""


@dataclass(frozen=True, slots=True)
class DropoutSite:
    """Places of one kind, such as the `attn_dropout` of every layer. `name` is the attribute's, behind the class
    where it alone says little (`OPTDecoderLayer.dropout`)."""

    name: str
    places: tuple[Place, ...]


@contextmanager
def probabilities(places: Sequence[Place], p: float | None = None) -> Iterator[None]:
    """All `places` at `p` (None: as they are) until exit; what they were comes back."""
    before = [getattr(owner, name) for owner, name in places]
    try:
        if p is not None:
            for owner, name in places:
                setattr(owner, name, p)
        yield
    finally:
        for (owner, name), value in zip(places, before):
            setattr(owner, name, value)


def find_sites(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[DropoutSite, ...]:
    """The sites whose dropout changes what `forward` returns, by name. `model` must have every probability 0,
    and `forward` must be deterministic then. One forward per candidate; the random state is left as it was."""
    found: dict[str, list[Place]] = {}
    device = next(model.parameters()).device
    with torch.no_grad(), torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
        plain = forward()
        for site in _candidates(model):
            with probabilities(site.places, TRIAL):
                if not torch.equal(forward(), plain):
                    found.setdefault(site.name, []).extend(site.places)
    return tuple(DropoutSite(name, tuple(found[name])) for name in sorted(found))


def _candidates(model: nn.Module) -> list[DropoutSite]:
    """Every attribute that looks like a dropout probability, grouped by kind of owner and name."""
    groups: dict[tuple[str, str], dict[tuple[int, str], Place]] = {}

    def add(kind: str, name: str, place: Place) -> None:
        groups.setdefault((kind, name), {})[id(place[0]), place[1]] = place

    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.modules.dropout._DropoutNd):
                add("module", _label(module, name), (child, "p"))
        for name in _dropout_attributes(module):
            add("attribute", _label(module, name), (module, name))
    for config in _configs(model):
        for name in _dropout_attributes(config):
            add("config", _label(config, name), (config, name))
    return [DropoutSite(name, tuple(places.values())) for (_, name), places in groups.items()]


def _label(owner: Any, name: str) -> str:
    """`attn_dropout`; `GPT2MLP.dropout` and `Sequential.2`, where the name alone says little."""
    return f"{type(owner).__name__}.{name}" if name in ("drop", "dropout") or name.isdigit() else name


def _dropout_attributes(owner: Any) -> list[str]:
    """Names of the attributes of `owner` that may be dropout probabilities, 0 included (some are an int 0)."""
    return [
        name
        for name, value in vars(owner).items()
        if type(value) in (float, int)
        and 0 <= value <= 1
        and "drop" in name
        and not any(skipping in name for skipping in SKIPPING_NAMES)
    ]


def _configs(model: nn.Module) -> list[Any]:
    """The configurations that the modules hold, and their text parts, each once."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        while config is not None and id(config) not in configs:
            configs[id(config)] = config
            config = config.get_text_config()
    return list(configs.values())


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
        with probabilities([(config, name) for config, name, _ in self.values]):
            for config, name, value in self.values:
                setattr(config, name, value)
            yield


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
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, _ in _noise_attributes(module):
            setattr(module, name, 0.0)
    asked = []
    for config in _configs(model):
        for name, value in _noise_attributes(config):
            asked.append((config, name, value))
            setattr(config, name, 0.0)
    return ConfigDropout(tuple(asked))
