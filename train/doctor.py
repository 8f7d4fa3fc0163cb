"""`rhotrain doctor`: versions, devices, which backend every op will use and why, the cache, known hazards."""

import os
import platform
import sys
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
    "reasoning-gym",
    "math-verify",
    "datasets",
    "kernels",
)
"""Asked for by name; a package that is not installed is None."""

OPS = ("logprob", "policy_loss", "linear", "sampling", "paged_attention")
"""Ops whose backend kernels/backend.py chooses."""


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


def _backends() -> dict[str, dict[str, str]]:
    """Device -> op -> backend with its reason, as the package itself will choose."""
    import torch

    from rhotrain.kernels.attention import attention_backend
    from rhotrain.kernels.backend import resolve_backend, why_no_triton

    chosen = {}
    for name in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        device = torch.device(name)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        sample = torch.empty(0, device=device)
        ops = {}
        for op in OPS:
            choice = resolve_backend("auto", sample)
            why = "plain PyTorch is what runs on a CPU" if device.type == "cpu" else why_no_triton(sample)
            ops[op] = choice if choice == "triton" else f"reference ({why})"
        for label, softcap, sinks in (("", None, False), (" with softcap", 50.0, False), (" with sinks", None, True)):
            backend = attention_backend(device, dtype, softcap, sinks)
            ops[f"attention{label}"] = f"{backend} ({_why_attention(backend, device.type, label)})"
        chosen[name] = ops
    return chosen


def _why_attention(backend: str, device: str, label: str) -> str:
    if backend == "flash_attn":
        return "flash-attn is installed"
    if backend == "torch_varlen":
        return "PyTorch's own; flash-attn is not installed"
    if device == "cpu":
        return "the others need CUDA"
    return f"no other backend here runs bfloat16 attention{label} on this GPU"


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
        "backends": _backends(),
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
    models = ", ".join(cache["models"]) or "empty"
    lines += ["", f"cache: {cache['folder']} ({cache['from']}), {cache['size_mib']} MiB: {models}"]
    lines.append(f"Hugging Face's kernels package: {found['hf_kernels']}")
    lines += (
        ["", *(f"problem: {problem}" for problem in found["problems"])] if found["problems"] else ["", "no problems"]
    )
    return "\n".join(lines)
