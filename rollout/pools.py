"""The KV pool's tensors, and the model run over them."""

import torch
from torch import Tensor

from rhotrain.kernels.paged_cpu import cpu_pool
from rhotrain.model.attention import PagedContext
from rhotrain.model.loaded import LoadedModel
from rhotrain.model.packed import packed_weights


class Pools:
    """keys, values: [num_pages + 1, page_size, Hk, D] per layer. The last page is nobody's: padding rows write there.

    On a CPU their memory is laid out as decode attention reads it fastest (`cpu_pool`). They start as zeros: decode
    attention multiplies unused slots by weight 0, and 0 * NaN is NaN.
    """

    def __init__(self, loaded: LoadedModel, num_pages: int, page_size: int) -> None:
        self.loaded = loaded
        self.page_size = page_size
        self.spare_page = num_pages
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.allocate()

    def allocate(self) -> None:
        """Allocate the tensors unless they are there."""
        if not self.keys:
            shapes = self.loaded.kv_shapes
            self.keys = [self._pool(heads, key_dim) for heads, key_dim, _ in shapes]
            self.values = [self._pool(heads, value_dim) for heads, _, value_dim in shapes]

    def release(self) -> None:
        """Free the tensors."""
        self.keys, self.values = [], []

    def _pool(self, heads: int, dim: int) -> Tensor:
        shape = (self.spare_page + 1, self.page_size, heads, dim)
        if self.loaded.device.type == "cpu" and self.loaded.full_precision:
            return cpu_pool(*shape, dtype=self.loaded.dtype)
        return torch.zeros(shape, dtype=self.loaded.dtype, device=self.loaded.device)

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return sum(pool.numel() * pool.element_size() for pool in (*self.keys, *self.values))

    def hidden(self, context: PagedContext, input_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """The model's body over the pages: hidden [T,H]."""
        with self.loaded.with_attention(context):
            return self.loaded.hidden(input_ids_T, position_ids_T)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The head: logits [N,V]."""
        return packed_weights(self.loaded).head_logits(hidden_NH)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, target), all sources read before any target is written."""
        if copies:
            source, target = torch.tensor(copies).to(self.loaded.device, non_blocking=True).t()
            for pool in (*self.keys, *self.values):
                pool[target] = pool[source]

    def scrub(self, pages: list[int]) -> None:
        """Zero pages that held NaN or inf, before somebody else gets them."""
        if pages:
            target = torch.tensor(pages).to(self.loaded.device, non_blocking=True)
            for pool in (*self.keys, *self.values):
                pool[target] = 0
