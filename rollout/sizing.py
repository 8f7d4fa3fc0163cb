"""How large the KV pool is: pages that a crowd of prompts needs, pages that the memory holds."""

from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]
import torch

from rhotrain.model.loaded import LoadedModel


def page_bytes(loaded: LoadedModel, page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    values = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in loaded.kv_shapes)
    return values * page_size * loaded.dtype.itemsize


def plan_pages(
    loaded: LoadedModel, prompt_lens: Sequence[int], n: int, max_new_tokens: int, page_size: int = 16
) -> int:
    """Pages with which n completions of every prompt run together and nothing is ever preempted.

    A group's full prompt pages count once. Lengths are capped at the model's positions.
    """
    limit = loaded.max_positions or float("inf")
    pages = 0
    for length in prompt_lens:
        shared = length // page_size
        stored = int(min(length + max_new_tokens, limit)) - 1
        pages += shared + n * max(0, -(-stored // page_size) - shared)
    return max(1, pages)


def affordable_pages(loaded: LoadedModel, wanted: int, page_size: int, memory: int = 0) -> int:
    """`wanted` pages, or what fits into `memory` bytes (0: a quarter of what is free) if that is less; at least 1."""
    limit = memory or free_memory(loaded.device) // 4
    return max(1, min(wanted, limit // page_bytes(loaded, page_size)))


def free_memory(device: torch.device) -> int:
    """Free bytes on the device that holds the model."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def pages_in(loaded: LoadedModel, memory: int | None, page_size: int, max_running: int) -> int:
    """Pages that fit into `memory` bytes (default: see Engine). Raises ValueError when not even one does."""
    if page_size < 1:
        raise ValueError(f"Engine.page_size: {page_size} is too small; need at least 1")
    size = page_bytes(loaded, page_size)
    pages = (free_memory(loaded.device) // 4 if memory is None else memory) // size
    if pages < 1:
        raise ValueError(f"Engine.kv_memory_bytes: {memory} holds no page; one page takes {size} bytes")
    if memory is None and loaded.max_positions is not None:
        pages = min(pages, max_running * -(-loaded.max_positions // page_size))
    return pages
