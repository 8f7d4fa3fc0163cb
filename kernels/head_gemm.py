"""The three GEMMs around a chunk of logits: hidden [C, H] and lm_head [V, H] to logits, and dlogits to both gradients.

    logits = softcap tanh((hidden lm_head^T + bias) logit_scale / softcap)

A chunk's logits are one buffer that every chunk reuses, and every call under a `Workspace`. Numerics: logits come out
of the GEMM in float32 (bf16 logits near 20 carry +-0.06): float32 inputs as they are; half types on CUDA through
`torch.mm(out_dtype=float32)`, elsewhere by casting the weight one tile at a time. float64 stays. Where the GEMMs take
half types, dlogits are rounded to the half type for their two GEMMs; products are accumulated in float32, the weight's
gradient over all chunks too (Liger #512, axolotl #1601: a bf16 accumulator diverges).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rhotrain.kernels.rows import ActiveRows
from rhotrain.kernels.workspace import call_buffers

CHUNK_ELEMENTS = 2**24
"""Default size of the logits buffer on a CPU, 64 MiB in float32: larger ones gain little in the GEMMs."""
CHUNK_ROWS_CUDA = 8192
"""Most rows of a default chunk on CUDA. Adding a chunk's weight gradient to the sum costs 8VH bytes beside 6CVH FLOP:
3 % of the time at 8192 rows, 24 % at 1024."""
CHUNK_SHARE_CUDA = 32
"""A default chunk takes at most this fraction (one in 32) of a GPU's memory: 4.4 GB of 141."""
WEIGHT_TILE_ELEMENTS = 2**22
"""Elements of the weight that are cast at a time where the GEMM cannot take half types and return float32."""


def takes_half(hidden: Tensor, weight: Tensor) -> bool:
    """True where a GEMM takes half types as they are and returns float32: CUDA from sm_80 on."""
    return (
        hidden.is_cuda
        and hidden.dtype == weight.dtype
        and weight.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(hidden.device) >= (8, 0)
    )


@dataclass(frozen=True, eq=False)
class Head:
    """The real vocabulary's part of the head, and how its output becomes logits in `dtype`.

    half: the GEMM takes the inputs' half type (`takes_half`); half_grad: so do the gradient's two.
    """

    weight_VH: Tensor
    bias_V: Tensor | None
    softcap: float | None
    logit_scale: float | None
    dtype: torch.dtype
    half: bool
    half_grad: bool

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, rows start..stop of the weight in `dtype`): one tile where nothing has to be cast."""
        vocab, hidden = self.weight_VH.shape
        step = vocab if self.weight_VH.dtype == self.dtype else max(1, WEIGHT_TILE_ELEMENTS // hidden)
        for start in range(0, vocab, step):
            yield start, min(start + step, vocab), self.weight_VH[start : start + step].to(self.dtype)

    def logits_into(self, hidden_CH: Tensor, out_CV: Tensor, tanh_CV: Tensor | None = None) -> None:
        """Fill `out_CV` with logits and, with a softcap, `tanh_CV` with its tanh, which the gradient needs."""
        if self.half:
            torch.mm(hidden_CH, self.weight_VH.t(), out_dtype=torch.float32, out=out_CV)
        else:
            hidden = hidden_CH.to(self.dtype)
            for start, stop, weight in self.tiles():
                torch.mm(hidden, weight.t(), out=out_CV[:, start:stop])
        if self.bias_V is not None:
            out_CV.add_(self.bias_V)
        if self.logit_scale is not None:
            out_CV.mul_(self.logit_scale)
        if self.softcap is not None:
            out_CV.div_(self.softcap).tanh_()
            if tanh_CV is not None:
                tanh_CV.copy_(out_CV)
            out_CV.mul_(self.softcap)

    @property
    def plain(self) -> bool:
        """True when the gradient of the logits is the gradient of the GEMM's output, and nothing sums it."""
        return self.bias_V is None and self.softcap is None and self.logit_scale is None

    def through_transform_(self, dlogits_CV: Tensor, tanh_CV: Tensor | None) -> None:
        """Gradient of the logits in, gradient of the GEMM's output out, in place."""
        if tanh_CV is not None:
            dlogits_CV.mul_(tanh_CV.square_().neg_().add_(1.0))
        if self.logit_scale is not None:
            dlogits_CV.mul_(self.logit_scale)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some active rows with their hidden states and logits; both buffers are the next chunk's too.

    logits_CV is read and then overwritten with its gradient, unless grad_CV, in the GEMMs' half type, takes that.
    tanh_CV: of the softcap, or None.
    """

    rows: ActiveRows
    hidden_CH: Tensor
    logits_CV: Tensor
    grad_CV: Tensor
    tanh_CV: Tensor | None


def _chunk_rows(head: Head, vocab: int, device: torch.device) -> int:
    """Default rows of a chunk; depends on the device and the head alone."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return default_chunk_rows(vocab, plain=head.plain, cuda_memory=memory)


def default_chunk_rows(vocab: int, *, plain: bool, cuda_memory: int | None) -> int:
    """Rows of a chunk on a GPU with so many bytes, or (None) on a CPU. plain: of `Head`."""
    if cuda_memory is None:
        return max(16, CHUNK_ELEMENTS // vocab)
    bytes_each = 6 if plain else 14  # float32 logits and a half-type gradient; tanh and a float32 copy besides
    return min(CHUNK_ROWS_CUDA, max(128, cuda_memory // CHUNK_SHARE_CUDA // (bytes_each * vocab) // 128 * 128))


def chunks(hidden_NH: Tensor, head: Head, rows: ActiveRows, chunk: int | None, *, want_grad: bool) -> Iterator[Chunk]:
    """The active rows in evenly sized chunks of at most `chunk` rows (None: a default)."""
    total, device = len(rows), hidden_NH.device
    if total == 0:
        return
    limit = _chunk_rows(head, rows.vocab, device) if chunk is None else chunk
    size = -(-total // -(-total // limit))
    if device.type == "cuda" and size > 128:  # whole tiles of the GEMM
        size = min(limit, -(-size // 128) * 128)
    stride = -(-rows.vocab // 16) * 16  # rows begin at multiples of 16 bytes, whatever V is
    with call_buffers(device) as buffers:
        # A shared buffer has the largest size at once where there are several chunks: other calls' are of other sizes.
        length = limit if buffers.shared and total > limit else size

        def block(use: str, dtype: torch.dtype) -> Tensor:
            flat = buffers.empty(use, length * stride, dtype, device)
            return flat[: size * stride].view(size, stride)[:, : rows.vocab]

        logits = block("logits", head.dtype)
        tanh = block("tanh", head.dtype) if want_grad and head.softcap is not None else None
        grads = logits
        if want_grad and head.half_grad and head.plain:  # one kernel reads float32 and writes the half type
            grads = block("grads", hidden_NH.dtype)
        for start in range(0, total, size):
            part = rows.rows(start, min(start + size, total))
            hidden_CH = hidden_NH.index_select(0, part.index)
            taken = slice(len(part))
            tanh_CV = None if tanh is None else tanh[taken]
            head.logits_into(hidden_CH, logits[taken], tanh_CV)
            logits_CV = logits[taken]
            yield Chunk(part, hidden_CH, logits_CV, logits_CV if grads is logits else grads[taken], tanh_CV)


class Gradients:
    """Accumulates the gradients of one call, chunk by chunk; what is not needed stays None.

    hidden_NH in the wanted dtype; weight_VH and bias_V in the head's (float32 or wider), whole (padded ids are 0).
    """

    def __init__(
        self, hidden_NH: Tensor, lm_head_VH: Tensor, head: Head, needs: list[bool], hidden_dtype: torch.dtype
    ) -> None:
        def zeros(shape: torch.Size | tuple[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=hidden_NH.device)

        self.head = head
        self.hidden_NH = zeros(hidden_NH.shape, hidden_dtype) if needs[0] else None
        self.bias_V = zeros((lm_head_VH.shape[0],), head.dtype) if needs[2] else None
        self.weight_VH = None
        if needs[1]:
            self.weight_VH = torch.empty(lm_head_VH.shape, dtype=head.dtype, device=hidden_NH.device)
            self.weight_VH[head.weight_VH.shape[0] :].zero_()
        self._first = True

    def add(self, chunk: Chunk) -> None:
        """One chunk whose `grad_CV` holds the gradient of the logits; it is overwritten."""
        head, grad_CV = self.head, chunk.grad_CV
        head.through_transform_(grad_CV, chunk.tanh_CV)
        if self.bias_V is not None:
            self.bias_V[: chunk.rows.vocab] += grad_CV.sum(0)
        if head.half_grad:
            grad_CV = grad_CV.to(chunk.hidden_CH.dtype)
        if self.hidden_NH is not None:
            dhidden = self._hidden_rows(grad_CV)
            self.hidden_NH.index_copy_(0, chunk.rows.index, dhidden.to(self.hidden_NH.dtype))
        if self.weight_VH is not None:
            self._add_weight(self.weight_VH[: chunk.rows.vocab], grad_CV.t(), chunk.hidden_CH)
        self._first = False

    def finish(self) -> "Gradients":
        """After the last chunk: without one (no active rows) the weight's gradient is 0."""
        if self._first and self.weight_VH is not None:
            self.weight_VH.zero_()
        return self

    def _hidden_rows(self, grad_CV: Tensor) -> Tensor:
        if self.head.half_grad:
            return torch.mm(grad_CV, self.head.weight_VH)
        dhidden = torch.zeros(
            grad_CV.shape[0], self.head.weight_VH.shape[1], dtype=self.head.dtype, device=grad_CV.device
        )
        for start, stop, weight in self.head.tiles():
            dhidden.addmm_(grad_CV[:, start:stop], weight)
        return dhidden

    def _add_weight(self, out_VH: Tensor, grad_VC: Tensor, hidden_CH: Tensor) -> None:
        """The first chunk writes, so nothing is filled with zeros first (PyTorch #196134: 6 % on an H100)."""
        if self.head.half_grad and self._first:
            torch.mm(grad_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
        elif self.head.half_grad:
            torch.addmm(out_VH, grad_VC, hidden_CH, out_dtype=torch.float32, out=out_VH)
        elif self._first:
            torch.mm(grad_VC, hidden_CH.to(self.head.dtype), out=out_VH)
        else:
            out_VH.addmm_(grad_VC, hidden_CH.to(self.head.dtype))
