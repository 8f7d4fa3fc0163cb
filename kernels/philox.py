"""Philox4x32-10, the counter-based generator behind every draw: in PyTorch and as a Triton device function.

A uniform is a function of (seed, sample, position) alone: key = seed, counter = (position, sample low, sample high, 0).
Ten rounds, each two 32 x 32 -> 64 bit products whose halves are crossed and mixed with the key. Both forms work on the
same words, so they give the same bits: PyTorch in int64 (it has no uint32 product), Triton in uint32.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

from rhotrain.kernels.backend import jit, tl

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(_MULTIPLIERS[0]), tl.constexpr(_MULTIPLIERS[1])
_WEYL_0, _WEYL_1 = tl.constexpr(_WEYL[0]), tl.constexpr(_WEYL[1])


def philox4x32(counter_4B: Tensor, key_2B: Tensor) -> Tensor:
    """Philox4x32-10: four 32-bit words per column from a 128-bit counter and a 64-bit key.

    counter_4B, key_2B: int64 [4,B] and [2,B] holding words in [0, 2^32). Returns int64 [4,B] of such words.
    Products wrap modulo 2^64, so the high word is the arithmetic shift with its sign bits masked off.
    """
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=counter_4B.device)[:, None]
    weyl = torch.tensor(_WEYL, dtype=torch.int64, device=counter_4B.device)[:, None]
    even, odd, key = counter_4B[0::2], counter_4B[1::2], key_2B
    for _ in range(10):
        product = even * multipliers
        even = ((product >> 32) & _MASK32).flip(0) ^ odd ^ key
        odd = (product & _MASK32).flip(0)
        key = (key + weyl) & _MASK32
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def philox_uniform(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """One uniform in [0, 1) per row: the top 24 bits of Philox's first word, exact in float32.

    seeds, samples, positions: int64 [B]; seeds are the key, positions the counter's first word, samples the next two.
    Returns float32 [B].
    """
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & _MASK32, samples & _MASK32, (samples >> 32) & _MASK32, zero))
    key = torch.stack((seeds & _MASK32, (seeds >> 32) & _MASK32))
    return (philox4x32(counter, key)[0] >> 8).to(torch.float32) * 2.0**-24


@jit
def uniform(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`philox_uniform` of int64 scalars or blocks, float32, the same bits."""
    k0 = seed.to(tl.uint32)  # a narrowing cast keeps the low word
    k1 = (seed >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = sample.to(tl.uint32)
    c2 = (sample >> 32).to(tl.uint32)
    c3 = c0 ^ c0
    a = c3 + _MULTIPLIER_0
    b = c3 + _MULTIPLIER_1
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(a, c0)
        high_1 = tl.umulhi(b, c2)
        low_0 = a * c0
        low_1 = b * c2
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 += _WEYL_0
        k1 += _WEYL_1
    return (c0 >> 8).to(tl.float32) * 2.0**-24
