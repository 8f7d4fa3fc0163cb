"""Decode attention over pages in plain PyTorch: the reference, and the path of a CPU.

Whole pages are gathered into [B,N,Hk,D], and the heads of a group become the queries of one key head. On a CPU the batch
is cut so that a gathered tensor stays in the cache: 64 rows x 100 tokens took 4.8 ms a layer at once (page faults of
fresh memory), 1.0 ms by 1 MiB, 3 ms row by row.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rhotrain.kernels.attention import dense_attention

if TYPE_CHECKING:
    from rhotrain.kernels.paged_attention import SharedPages

_CHUNK_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of a gathered tensor of keys (or values)."""


def _chunk(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query per sequence over its pages; the padding of the last page is masked."""
    shape = (len(tables), tables.shape[1] * k_pool.shape[1])
    keys, values = (pool.index_select(0, tables.reshape(-1)) for pool in (k_pool, v_pool))
    keys, values = keys.reshape(*shape, *keys.shape[2:]), values.reshape(*shape, *values.shape[2:])
    lens_B = lens[:, None, None, None]
    position = torch.arange(shape[1], device=q_BHD.device)
    mask = position < lens_B
    if window is not None:
        mask &= position >= lens_B - window
    explicit = softcap is not None or sinks is not None
    out = dense_attention(
        q_BHD[:, :, None] if explicit else q_BHD.unflatten(1, (keys.shape[2], -1)),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    return out.reshape(*q_BHD.shape[:2], -1)


def decode_reference(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: tuple["SharedPages", ...] = (),
) -> Tensor:
    """One query per sequence over its pages: [B,H,E]. Arguments as in `paged_attention.paged_decode`.

    On CUDA nothing waits: the width of the tables bounds the work, not the lengths.
    """
    device = q_BHD.device.type
    if device == "cpu":
        width = -(-int(lens.max()) // k_pool.shape[1])
        tables = tables[:, : max(1, width)]
    row_bytes = tables.shape[1] * k_pool[0].numel() * k_pool.element_size()
    step = max(1, _CHUNK_BYTES.get(device, 2**28) // row_bytes)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    chunks = [slice(start, start + step) for start in range(0, len(tables), step)]
    out = torch.cat([_chunk(q_BHD[c], k_pool, v_pool, tables[c], lens[c], **options) for c in chunks])  # type: ignore[arg-type]
    return out.masked_fill_((lens == 0)[:, None, None], 0.0)
