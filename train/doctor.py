"""`rhotrain doctor`: versions, devices, which backend every op will use and why, the cache, known hazards."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

PACKAGES = (
    "rhotrain",
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "gguf",
    "numpy",
    "tyro",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "peft",
    "bitsandbytes",
    "reasoning-gym",
    "math-verify",
    "datasets",
    "kernels",
)
"""Asked for by name; a package that is not installed is None."""

OPS = ("logprob", "policy_loss", "linear", "sampling")
"""Ops whose backend kernels/backend.py chooses."""

PAGE_SIZES = (16, 256)
"""Attention over pages is told for these: flash-attn 2 and PyTorch read only multiples of 256."""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _outdated() -> list[str]:
    """What the package requires and the environment does not have."""
    from packaging.requirements import Requirement

    found = []
    for line in metadata.requires("rhotrain") or ():
        need = Requirement(line)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None:
            found.append(f"{need.name} is not installed; pip install '{need.name}{need.specifier}'")
        elif not need.specifier.contains(version, prereleases=True):
            found.append(f"{need.name} {version} is too old; pip install '{need.name}{need.specifier}'")
    return found


def hf_kernels(search: list[str] | None = None) -> tuple[str, bool]:
    """(what `import kernels` gives, whether that breaks transformers).

    Hugging Face's package of that name must win over our folder: a regular package of ours on sys.path, say from an
    `__init__.py` in kernels/, would shadow it and crash `import transformers`.
    """
    PathFinder.invalidate_caches()
    spec = PathFinder.find_spec("kernels", [*(search or ()), *sys.path])
    installed = _version("kernels")
    if spec is None or spec.origin is None:
        if installed is not None:
            return f"{installed} is installed, but a folder without files of its name is found first", True
        return "not installed; a folder of that name on the path is ignored, as it should be", False
    place = Path(spec.origin).parent
    ours = (place / "spec.py").is_file() and (place / "objective.py").is_file()
    if ours:
        return f"SHADOWED by {place}: remove its __init__.py", True
    return f"{installed or 'unknown version'} at {place}", False


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _devices() -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    cpu = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "memory_gib": round(_memory_gib(), 1)}
    return {"cpu": cpu, "cuda": gpus}


def _device_names() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def _backends(attention: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Device -> op -> backend with its reason, as the package itself will choose."""
    import torch

    from rhotrain.kernels.backend import resolve_backend, why_no_triton

    chosen = {}
    for name in _device_names():
        sample = torch.empty(0, device=name)
        ops = {}
        for op in OPS:
            choice = resolve_backend("auto", sample)
            why = "plain PyTorch is what runs on a CPU" if name == "cpu" else why_no_triton(sample)
            ops[op] = choice if choice == "triton" else f"reference ({why})"
        chosen[name] = ops | {use: _in_words(found) for use, found in attention[name].items()}
    return chosen


def _in_words(found: dict[str, Any]) -> str:
    """A backend and why those that are preferred to it do not run."""
    why = found["passed_over"]
    if not why:
        return found["backend"]
    if all("needs CUDA" in reason for name, reason in why.items() if name != "triton"):
        return f"{found['backend']} (the others need CUDA)"
    return f"{found['backend']} (" + "; ".join(f"not {name}: {reason}" for name, reason in why.items()) + ")"


def _attention() -> dict[str, dict[str, Any]]:
    """Device -> use -> backend, and passed_over: each preferred one with the reason that it does not run.

    "attention" is over packed tokens: training, and prompts whose keys are gathered. Head dimension 64, in bfloat16 on
    CUDA and float32 on a CPU.
    """
    import torch

    from rhotrain.kernels.attention import attention_backend
    from rhotrain.kernels.flash import LIBRARIES, Call
    from rhotrain.kernels.paged_attention import decode_backend, prefill_backend

    chosen: dict[str, dict[str, Any]] = {}
    for name in _device_names():
        device = torch.device(name)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        uses: dict[str, Any] = {}
        for label, softcap, sinks in (("", None, False), (" with softcap", 50.0, False), (" with sinks", None, True)):
            call = Call(device, dtype, softcap=softcap is not None, sinks=sinks)
            taken: str = attention_backend(device, dtype, softcap, sinks)
            uses[f"attention{label}"] = _choice(taken, LIBRARIES, call)
        for size in PAGE_SIZES:
            call = Call(device, dtype, page_size=size)
            uses[f"prompts, pages of {size}"] = _choice(prefill_backend(device, dtype, size), LIBRARIES, call)
        for size in PAGE_SIZES:
            call = Call(device, dtype, page_size=size, decode=True)
            order = ("triton", *(library for library in LIBRARIES if library != "flash_attn4"))
            uses[f"decode, pages of {size}"] = _choice(decode_backend(device, dtype, size), order, call)
        chosen[name] = uses
    return chosen


def _choice(taken: str, order: Sequence[str], call: Any) -> dict[str, Any]:
    """`order` ends where the one taken stands in it."""
    preferred = order[: order.index(taken)] if taken in order else order
    return {"backend": taken, "passed_over": {name: _why_not(name, call) for name in preferred}}


def _why_not(name: str, call: Any) -> str:
    import torch

    from rhotrain.kernels.backend import why_no_triton
    from rhotrain.kernels.flash import why_not

    if name == "triton":
        why = why_no_triton(torch.empty(0, dtype=call.dtype, device=call.device))
        return why or "plain PyTorch is what runs on a CPU"
    return why_not(name, call) or "it waits for the device, which no CUDA graph can hold"  # type: ignore[arg-type]


def _rollout() -> dict[str, str]:
    """What the rollout engine does here besides attention: graphs, packed weights, threads (measured, about 0.1 s)."""
    import torch

    from rhotrain.rollout.threads import candidates, choose, decode_seconds

    graphs = "captured for the decode step" if torch.cuda.is_available() else "none (they need CUDA)"
    packed = torch.backends.mkldnn.is_available()
    seconds = decode_seconds(candidates(torch.get_num_threads()))
    times = ", ".join(f"{n}: {1e3 * time:.2g} ms" for n, time in seconds.items())
    return {
        "CUDA graphs": graphs,
        "packed weights on a CPU": "float32 and bfloat16, by oneDNN" if packed else "none (PyTorch has no oneDNN here)",
        "threads to decode with": f"{choose(seconds)} of those that PyTorch has are fastest now ({times} a product)",
    }


def _cache() -> dict[str, Any]:
    from rhotrain.model.folders import cache_dir

    folder = cache_dir()
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    return {
        "folder": str(folder),
        "from": "RHOTRAIN_CACHE" if os.environ.get("RHOTRAIN_CACHE") else "default",
        "models": sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else [],
        "size_mib": round(size / 2**20, 1),
        "writable": os.access(existing, os.W_OK),
    }


def report() -> dict[str, Any]:
    """Everything that `doctor` prints. problems: what will not work, each with its fix."""
    kernels, shadowed = hf_kernels()
    attention = _attention()
    problems = _outdated()
    cache = _cache()
    if shadowed:
        problems.append(f"kernels: {kernels}")
    if not cache["writable"]:
        problems.append(f"cache: {cache['folder']} cannot be written; set RHOTRAIN_CACHE to another folder")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "backends": _backends(attention),
        "attention": attention,
        "rollout": _rollout(),
        "cache": cache,
        "hf_kernels": kernels,
        "problems": problems,
    }


def as_text(found: dict[str, Any]) -> str:
    """The report for people."""
    devices, cache = found["devices"], found["cache"]
    cpu = devices["cpu"]
    lines = [f"python {found['python']} on {found['platform']}", "", "packages"]
    lines += [f"  {name:14} {version or '-'}" for name, version in found["packages"].items()]
    lines += ["", "devices", f"  cpu: {cpu['cores']} cores, {cpu['threads']} threads, {cpu['memory_gib']} GiB"]
    for index, gpu in enumerate(devices["cuda"]):
        lines.append(f"  cuda:{index}: {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB")
    if not devices["cuda"]:
        lines.append("  no CUDA device that PyTorch sees")
    for device, ops in found["backends"].items():
        lines += ["", f"backends on {device}"]
        lines += [f"  {op:23} {backend}" for op, backend in ops.items()]
    lines += ["", "rollout", *(f"  {name:23} {value}" for name, value in found["rollout"].items())]
    models = ", ".join(cache["models"]) or "empty"
    lines += ["", f"cache: {cache['folder']} ({cache['from']}), {cache['size_mib']} MiB: {models}"]
    lines.append(f"Hugging Face's kernels package: {found['hf_kernels']}")
    lines += (
        ["", *(f"problem: {problem}" for problem in found["problems"])] if found["problems"] else ["", "no problems"]
    )
    return "\n".join(lines)
