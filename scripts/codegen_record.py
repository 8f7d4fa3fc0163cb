"""What `codegen.py` compiles: launches recorded from the public functions, specialised by Triton itself."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rhotrain.kernels import backend
from rhotrain.kernels.backend import Launch

KERNELS = Path(__file__).resolve().parent.parent / "kernels"

OPTIONAL = ("old_logprobs", "ref_logprobs", "importance", "softcap", "sinks")
"""Arguments whose absence no constexpr tells."""
SIZES = ("BLOCKS", "GROUP", "D", "E", "PAGE")
"""Constexprs that tell variants apart and are neither switches nor names."""

# Signatures, constexprs and attributes do not depend on the architecture; options are parsed again for each.
_CUDA = make_backend(GPUTarget("cuda", 90, 32))


@dataclass(frozen=True, eq=False)
class Variant:
    """One thing for Triton to compile. options: num_warps and the like, as the launch gave them."""

    kernel: Any
    options: dict[str, Any]
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    @property
    def key(self) -> str:
        """Equal for two launches exactly when Triton takes one binary for both."""
        return repr((self.name, self.options, self.signature, self.constexprs, self.attributes))

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments by name, also those that are so because they are None or 1."""
        names = list(self.signature)
        return {names[path[0]]: value for path, value in self.constexprs.items()}

    @property
    def strides(self) -> list[str]:
        """Arguments that a row number is multiplied by."""
        return [name for name, kind in self.signature.items() if name.endswith("stride") and kind != "constexpr"]

    @property
    def unaligned(self) -> list[str]:
        """Strides that may be any number, so that a row of logits or of their gradient may start anywhere."""
        names = list(self.signature)
        known = {names[path[0]] for path, found in self.attributes.items() if ["tt.divisibility", 16] in found}
        fixed = {param.name for param in self.kernel.params if param.do_not_specialize}
        return [name for name in self.strides if name not in known | fixed]

    @property
    def label(self) -> str:
        """The type of the logits and, if another, of their gradient; what is on, absent and not aligned."""
        types = {name: kind.removeprefix("*") for name, kind in self.signature.items() if kind.startswith("*")}
        logits = next((kind for name, kind in types.items() if name.endswith("logits")), next(iter(types.values())))
        words = [logits]
        if types.get("out", logits) != logits and not self.constants.get("KEPT"):
            words.append(f"-> {types['out']}")
        for name, value in self.constants.items():
            if value is True:
                words.append(name)
            elif isinstance(value, str):
                words.append(value)
            elif name in SIZES:
                words.append(f"{name}={value}")
        absent = [name for name, value in self.constants.items() if value is None]
        return " ".join(words + [f"-{name}" for name in absent if name in OPTIONAL] + [f"~{n}" for n in self.unaligned])


@cache
def _binder(kernel: Any) -> Callable[..., Any]:
    binder: Callable[..., Any] = create_function_from_signature(kernel.signature, kernel.params, _CUDA)
    return binder


def specialize(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """What `kernel[grid](*args, **options)` would compile; options hold the constexpr arguments too."""
    bound, specialization, rest = _binder(kernel)(*args, **options)
    _, signature, constexprs, attributes = kernel._pack_args(_CUDA, dict(options), bound, specialization, rest)
    return Variant(kernel, rest, signature, constexprs, attributes)


@dataclass(eq=False)
class Recorder:
    """What was launched: variants by key, Launch objects by identity, and the keys of each case by kernel."""

    variants: dict[str, Variant] = field(default_factory=dict)
    launches: set[int] = field(default_factory=set)
    cases: dict[str, dict[str, set[str]]] = field(default_factory=dict)

    @contextmanager
    def recording(self, case: str) -> Iterator[None]:
        """Inside, launches are recorded as those of `case` and nothing runs; CPU tensors count as a GPU's.

        Fresh tensors are zeros, since no kernel fills them: what a launcher computes from them stays harmless.
        """
        launch = Launch.__call__

        def launched(config: Launch, *args: Any, **kwargs: Any) -> None:
            self.launches.add(id(config))
            launch(config, *args, **kwargs)

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            variant = specialize(kernel, args, options)
            self.variants.setdefault(variant.key, variant)
            self.cases.setdefault(case, {}).setdefault(variant.name, set()).add(variant.key)

        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(Launch, "__call__", launched),
            mock.patch.object(backend, "INTERPRETED", True),
            mock.patch.object(torch, "empty", torch.zeros),
            mock.patch.object(torch, "empty_like", torch.zeros_like),
        ):
            yield

    def recompiled(self) -> list[str]:
        """Cases that need more than one binary of a kernel, though each is one kind of call; with the arguments."""
        return [
            f"{case}: {len(keys)} binaries of {name}; they differ in {self._difference(keys)}"
            for case, kernels in self.cases.items()
            for name, keys in kernels.items()
            if len(keys) > 1
        ]

    def _difference(self, keys: set[str]) -> str:
        first, *others = (self.variants[key] for key in sorted(keys))
        names = list(first.signature)
        at = set()
        for other in others:
            at |= {name for name in names if first.signature[name] != other.signature[name]}
            for a, b in ((first.constexprs, other.constexprs), (first.attributes, other.attributes)):
                at |= {names[path[0]] for path in a.keys() | b.keys() if a.get(path) != b.get(path)}
            at |= {key for key in first.options if first.options[key] != other.options[key]}
        return ", ".join(sorted(at))

    def unrecorded(self) -> list[str]:
        """Kernels and Launch objects of the kernels folder that no case has reached."""
        names, found = {variant.name for variant in self.variants.values()}, []
        for path in sorted(KERNELS.glob("*.py")):
            module = importlib.import_module(f"rhotrain.kernels.{path.stem}")
            for name, value in vars(module).items():
                own = isinstance(value, JITFunction) and value.module == module.__name__
                if own and name.endswith("_kernel") and "STAGES" in value.arg_names and name not in names:
                    found.append(f"unrecorded: {path.stem}.{name} is launched by no case")
                if isinstance(value, Launch) and id(value) not in self.launches:
                    found.append(f"unrecorded: {path.stem}.{name} launches nothing in any case")
        return found
