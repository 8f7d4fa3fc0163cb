"""FlashAttention where it is found: the packages flash-attn 2, 3 and 4, and the copy of 2 inside PyTorch.

None is a dependency. This module finds what is installed and knows what it can do for a call (`why_not`);
`kernels/flash_calls.py` calls it. All compute bottom-right aligned causal attention in float16 or bfloat16, accumulate
in float32, and serve H query heads from Hk key heads.

    name          where from                     GPUs      packed keys with          keys in pages
    flash_attn3   flash_attn_interface           9.x       softcap                   any size
    flash_attn4   flash_attn.cute                9.x-12.x  softcap, sinks (to 11.x)  any size, prompts only, to 11.x
    flash_attn    flash_attn 2.8                 from 8.0  softcap or dropout        multiples of 256
    torch_varlen  torch.nn.attention.varlen      from 8.0  -                         multiples of 256, PyTorch 2.12

Packed keys have a backward pass, keys in pages have none. Head dimensions are multiples of 8 up to 256 (version 4 on
10.x and above: 128), the same for keys and values.
Read in: flash-attn 2.8.3.post2 (flash_attn_interface.py, hopper/, csrc/), flash-attn-4 4.0.0b36, PyTorch 2.11 and 2.13.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal, get_args

import torch

Library = Literal["flash_attn3", "flash_attn4", "flash_attn", "torch_varlen"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
"""In order of preference: 3 is the one made for the GPUs it runs on, and older there than 4."""

AttentionChoice = Literal[
    "auto", "triton", "reference", "flash_attn3", "flash_attn4", "flash_attn", "torch_varlen", "sdpa"
]
"""What `backend=` of an attention function accepts. sdpa is what the reference is made of."""

HALF_TYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

PAGE_MULTIPLE = 256
"""Page sizes that flash-attn 2 can read are multiples of this."""

MAJORS: dict[Library, tuple[int, int]] = {"flash_attn3": (9, 9), "flash_attn4": (9, 12)}
"""First and last compute capability, forward and backward; the others run on 8.0 and above."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a library is. functions: name -> keywords that a version must know for our calls."""

    title: str
    module: str
    distributions: tuple[str, ...]
    varlen: tuple[str, frozenset[str]]
    kvcache: tuple[str, frozenset[str]] | None = None


SOURCES: dict[Library, Source] = {
    "flash_attn3": Source(
        "flash-attn 3",
        "flash_attn_interface",
        ("flash_attn_3", "flash-attn-3"),
        ("flash_attn_varlen_func", frozenset({"softcap", "window_size"})),
        ("flash_attn_with_kvcache", frozenset({"page_table", "cu_seqlens_q", "max_seqlen_q", "num_splits"})),
    ),
    # flash-attn 2.8 carries an early flash_attn/cute, which knows no max_seqlen_q and has another backward pass.
    "flash_attn4": Source(
        "flash-attn 4",
        "flash_attn.cute",
        ("flash-attn-4",),
        ("flash_attn_varlen_func", frozenset({"max_seqlen_q", "page_table", "seqused_k", "learnable_sink"})),
    ),
    "flash_attn": Source(
        "flash-attn 2",
        "flash_attn",
        ("flash-attn",),
        ("flash_attn_varlen_func", frozenset({"softcap", "block_table", "dropout_p"})),
        ("flash_attn_with_kvcache", frozenset({"softcap", "block_table", "num_splits"})),
    ),
    "torch_varlen": Source(
        "PyTorch's varlen attention",
        "torch.nn.attention.varlen",
        ("torch",),
        ("varlen_attn", frozenset({"window_size"})),
    ),
}


@dataclass(frozen=True, slots=True)
class Package:
    """An importable library. varlen: over packed keys. kvcache: over pages, where that is another function."""

    varlen: Callable[..., Any]
    kvcache: Callable[..., Any] | None
    version: str


@cache
def package(name: Library) -> Package | str:
    """The library, or why it cannot be used."""
    source = SOURCES[name]
    try:
        module = importlib.import_module(source.module)
    except ModuleNotFoundError as error:
        if error.name and (source.module + ".").startswith(error.name + "."):
            return f"{source.title} is not installed"
        return f"{source.title} cannot be imported: {error}"
    except Exception as error:  # built for another PyTorch or CUDA; what that raises is up to the loader
        return f"{source.title} cannot be imported: {(str(error).splitlines() or [type(error).__name__])[0]}"
    found: list[Callable[..., Any] | None] = []
    for wanted in (source.varlen, source.kvcache):
        if wanted is None:
            found.append(None)
            continue
        function = getattr(module, wanted[0], None)
        if function is None:
            return f"{source.title} is not installed" if name == "flash_attn" else f"{source.title} has no {wanted[0]}"
        missing = sorted(wanted[1] - inspect.signature(function).parameters.keys())
        if missing:
            return f"{source.title} is too old: its {wanted[0]} has no {', '.join(missing)}"
        found.append(function)
    varlen, kvcache = found
    assert varlen is not None
    return Package(varlen, kvcache, _version(source.distributions))


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "unknown version"


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Call:
    """What a call asks of a library. page_size: None for packed keys. decode: one query per sequence, over pages."""

    device: torch.device
    dtype: torch.dtype
    key_dim: int = 64
    value_dim: int = 64
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    page_size: int | None = None
    decode: bool = False


def why_not(name: Library, call: Call) -> str | None:
    """Why the library cannot run the call; None when it can."""
    gpu = capability(call.device)
    if gpu is None:
        return f"it needs CUDA, and the tensors are on {call.device}"
    if call.dtype not in HALF_TYPES:
        return f"{str(call.dtype).removeprefix('torch.')}; it takes float16 and bfloat16"
    low, high = MAJORS.get(name, (8, None))
    if gpu[0] < low or (high is not None and gpu[0] > high):
        runs = f"{low}.0 and above" if high is None else f"{low}.x" if low == high else f"{low}.x to {high}.x"
        return f"compute capability {gpu[0]}.{gpu[1]}; {SOURCES[name].title} runs on {runs}"
    found = package(name)
    if isinstance(found, str):
        return found
    return _dims(name, call, gpu[0]) or _options(name, call, gpu[0]) or _pages(name, call, gpu[0], found)


def _dims(name: Library, call: Call, major: int) -> str | None:
    if call.key_dim != call.value_dim:
        return f"head dimensions {call.key_dim} of keys and {call.value_dim} of values; it needs them equal"
    largest = 128 if name == "flash_attn4" and major >= 10 else 256
    if call.key_dim % 8 or call.key_dim > largest:
        return f"head dimension {call.key_dim}; it takes multiples of 8 up to {largest}"
    return None


def _options(name: Library, call: Call, major: int) -> str | None:
    title = SOURCES[name].title
    if call.softcap and name == "torch_varlen":
        return f"{title} has no softcap"
    if call.sinks and (name != "flash_attn4" or major == 12):
        return f"{title} has no sinks{' on 12.x' if name == 'flash_attn4' else ''}"
    if call.dropout and name != "flash_attn":
        return f"{title} has no dropout"
    if call.dropout and call.softcap:
        return f"{title} refuses softcap and dropout together"
    return None


def _pages(name: Library, call: Call, major: int, found: Package) -> str | None:
    if call.page_size is None:
        return None
    if name == "flash_attn4":
        if call.decode:
            return "flash-attn 4 has no function for one query per sequence"
        return "flash-attn 4 reads no pages on 12.x" if major == 12 else None
    if name == "flash_attn3":
        return None
    if name == "torch_varlen" and "block_table" not in inspect.signature(found.varlen).parameters:
        return f"PyTorch {found.version} has no block tables; 2.12 has"
    if call.page_size % PAGE_MULTIPLE:
        return f"pages of {call.page_size} tokens; it reads multiples of {PAGE_MULTIPLE}"
    return None


def check_choice(backend: str) -> None:
    """ValueError for a name that no attention function knows."""
    if backend not in get_args(AttentionChoice):
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(get_args(AttentionChoice))}")


def require(name: Library, call: Call) -> None:
    """ValueError when a library that was asked for by name cannot run the call."""
    why = why_not(name, call)
    if why is not None:
        raise ValueError(f"backend: {name!r} cannot run here: {why}; use backend='auto'")
