"""How many CPU threads the engine decodes with: measured once, because it is not the number of cores everywhere.

Decode runs products of a few rows. Where cores are hardware threads of one another, or another process is busy, fewer
threads wait less for each other: two on two busy cores took ten times the time of one.
"""

import os
from statistics import median
from time import perf_counter

import torch

ROWS, INPUTS, OUTPUTS = 16, 1024, 4096
"""A decode step's typical product: 16 rows through one matrix of 16 MiB, larger than a core's own cache."""

ROUNDS = 7
WORTH = 0.9
"""Fewer threads are taken when their time is below this share of that of more: a tie keeps the cores."""


def candidates(cores: int) -> list[int]:
    """Powers of two below `cores`, and `cores`."""
    return [n for n in (1 << i for i in range(cores.bit_length())) if n < cores] + [cores]


def decode_seconds(threads: list[int]) -> dict[int, float]:
    """Median seconds of a decode step's product by number of threads; the rounds alternate, so a busy moment hits
    all."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    found: dict[int, list[float]] = {n: [] for n in threads}
    try:
        with torch.no_grad():
            for _ in range(ROUNDS + 1):
                for n in threads:
                    torch.set_num_threads(n)
                    torch.nn.functional.linear(x, weight)
                    start = perf_counter()
                    for _ in range(3):
                        torch.nn.functional.linear(x, weight)
                    found[n].append(perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return {n: median(times[1:]) / 3 for n, times in found.items()}


def choose(seconds: dict[int, float]) -> int:
    """The number of threads to take: the most, unless fewer are clearly faster."""
    best = max(seconds)
    for n in sorted(seconds, reverse=True):
        if seconds[n] < WORTH * seconds[best]:
            best = n
    return best


def check_threads(name: str, threads: int | None) -> None:
    """ValueError for more threads than the machine can have: OpenMP ends the process there."""
    most = 4 * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise ValueError(f"{name}: {threads} threads on {os.cpu_count()} cores; need at most {most}, 0 or None chooses")


def decode_threads(cores: int) -> int:
    """The number of threads to decode with on `cores` cores; about 0.1 s. 1 on one core, without a measurement."""
    return choose(decode_seconds(candidates(cores))) if cores > 1 else 1
