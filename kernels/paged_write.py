"""Triton kernel that writes new keys and values into pages, and what every kernel over pages asks of its tensors.

One program per token and block of heads: K and V in one launch, from any layout (transformers hands them over with the
heads before the tokens) into pools of any layout, in the pools' types.
"""

from torch import Tensor

from rhotrain.kernels.backend import Launch, jit, tl

WRITE = Launch(block=2048, num_warps=4, num_stages=1)
"""block: padded elements of K that a program holds."""


# ---- geometry -------------------------------------------------------------------------------------------------------


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(size: int) -> int:
    """The power of two that a dimension is padded to, 16 at least: `tl.dot` takes no less."""
    return max(16, 1 << (size - 1).bit_length())


def row_strides(x: Tensor) -> tuple[int, int]:
    """Strides of the first two of three dimensions; those of a single row or head are as if there were more, since
    PyTorch leaves them open and a kernel is compiled for what divides them."""
    heads = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2], heads


def unit_columns(x: Tensor) -> Tensor:
    """x, copied if its last dimension does not lie side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """ValueError unless both are [pages, page_size, heads, dims] alike, with the dims side by side."""
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dim() != 4 or (pool.stride(3) != 1 and pool.shape[3] != 1):
            raise ValueError(
                f"{name}: shape {tuple(pool.shape)}, strides {pool.stride()}; need [pages, page_size, heads, dims] "
                "with the dims side by side"
            )
    if k_pool.shape[:3] != v_pool.shape[:3]:
        raise ValueError(
            f"k_pool, v_pool: {tuple(k_pool.shape)} and {tuple(v_pool.shape)}; pages, page size and heads must agree"
        )


# ---- write ----------------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["slots"])
def write_kernel(
    k: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    slots: tl.tensor,
    k_pool: tl.tensor,
    k_page_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_pool_stride: tl.tensor,
    v_pool: tl.tensor,
    v_page_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_pool_stride: tl.tensor,
    heads: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Grid (tokens, blocks of heads). k_pool_stride, v_pool_stride: from head to head in the pools."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    page, offset = slot // PAGE, slot % PAGE
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < heads) & (dims < D)
    new = tl.load(k + token * k_token_stride + head * k_head_stride + dims, mask=inside, other=0.0)
    place = k_pool + page * k_page_stride + offset * k_slot_stride + head * k_pool_stride + dims
    tl.store(place, new.to(k_pool.dtype.element_ty), mask=inside)
    dims = tl.arange(0, BLOCK_E)[None, :]
    inside = (head < heads) & (dims < E)
    new = tl.load(v + token * v_token_stride + head * v_head_stride + dims, mask=inside, other=0.0)
    place = v_pool + page * v_page_stride + offset * v_slot_stride + head * v_pool_stride + dims
    tl.store(place, new.to(v_pool.dtype.element_ty), mask=inside)


def write_triton(k_pool: Tensor, v_pool: Tensor, k_TGD: Tensor, v_TGE: Tensor, slots: Tensor) -> None:
    """Store keys and values of T tokens in slots (int64 [T]) of the pools, in place, in their dtypes: one launch.

    k, v and the pools may have any strides but the last. Slots are distinct, but for those of padding rows.
    Raises ValueError for shapes that do not fit.
    """
    check_pools(k_pool, v_pool)
    count, (_, page_size, heads, dim), value_dim = len(slots), k_pool.shape, v_pool.shape[3]
    if k_TGD.shape != (count, heads, dim) or v_TGE.shape != (count, heads, value_dim):
        raise ValueError(
            f"k_TGD, v_TGE: {tuple(k_TGD.shape)} and {tuple(v_TGE.shape)}; one row per slot needs "
            f"[{count}, {heads}, {dim}] and [{count}, {heads}, {value_dim}]"
        )
    k_TGD, v_TGE, slots = unit_columns(k_TGD), unit_columns(v_TGE), unit_columns(slots)
    per_program = max(1, WRITE.block // max(padded(dim), padded(value_dim)))
    WRITE(
        write_kernel,
        (count, cdiv(heads, per_program)),
        k_pool.device,
        k_TGD,
        *row_strides(k_TGD),
        v_TGE,
        *row_strides(v_TGE),
        slots,
        k_pool,
        *k_pool.stride()[:3],
        v_pool,
        *v_pool.stride()[:3],
        heads,
        D=dim,
        E=value_dim,
        BLOCK_D=padded(dim),
        BLOCK_E=padded(value_dim),
        PAGE=page_size,
        HEADS=per_program,
    )
