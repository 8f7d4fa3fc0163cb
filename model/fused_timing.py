"""How long the plain and the fused forms of a model's small layers take on its device: what `auto` decides by.

Both sides run alternately in one measurement, because a machine's speed drifts by more than they differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.fused_ops import ACTIVATIONS, Implementation, gate_op, norm_op, rotary_op
from rhotrain.model.fused_proof import ACTIVATION_NAMES, Candidate, Gate, Norm, Rotary

Calls = dict[str, Callable[..., Any]]
Make = Callable[[int], list[Tensor]]

DECODE_ROWS, TRAIN_ROWS = {"cpu": 16, "cuda": 64}, {"cpu": 256, "cuda": 8192}
ROUNDS, DECODE_CALLS, TRAIN_CALLS = 7, 8, 2

GAIN, LOSS = 0.97, 1.1
"""A fused form is taken when decode takes at most GAIN of the plain time and forward + backward at most LOSS: closer
than that is noise, and a choice that flips between runs would change their bits for nothing."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians in microseconds: one call on decode's few rows without autograd, and forward + backward on many."""

    kind: str
    implementation: str
    decode_us: float
    train_us: float

    def __str__(self) -> str:
        return f"{self.kind} {self.implementation} {self.decode_us:.0f}/{self.train_us:.0f} us"


def fastest(kind: str, timings: Sequence[Timing]) -> str:
    """The implementation with the shortest decode time among those that beat plain; `plain` where none does."""
    by_name = {timing.implementation: timing for timing in timings if timing.kind == kind}
    plain = by_name.pop("plain", None)
    if plain is None:
        return "plain"
    better = [
        timing
        for timing in by_name.values()
        if timing.decode_us <= GAIN * plain.decode_us and timing.train_us <= LOSS * plain.train_us
    ]
    return min(better, key=lambda timing: timing.decode_us).implementation if better else "plain"


def time_all(
    candidates: Sequence[Candidate], implementations: Sequence[Implementation], device: torch.device
) -> tuple[Timing, ...]:
    """Plain and each of `implementations`, on the widest candidate of each kind. Empty without implementations."""
    timings: list[Timing] = []
    if not implementations:
        return ()
    problems: tuple[tuple[str, type, Callable[..., tuple[Calls, Make]]], ...]
    problems = (("norm", Norm, _norm), ("gate", Gate, _gate), ("rotary", Rotary, _rotary))
    for kind, cls, problem in problems:
        chosen = [candidate for candidate in candidates if isinstance(candidate, cls)]
        if chosen:
            widest: Any = max(chosen, key=_width)
            calls: Calls
            make: Make
            calls, make = problem(widest, implementations, device)
            decode = _decode_times(calls, make(DECODE_ROWS.get(device.type, 64)), device)
            train = _train_times(calls, make(TRAIN_ROWS.get(device.type, 256)), device)
            timings += [Timing(kind, name, decode[name], train[name]) for name in calls]
    return tuple(timings)


def _random(*shape: int, like: Tensor) -> Tensor:
    """Normal numbers that leave torch's global generators, which dropout draws from, as they were."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=like.device, dtype=like.dtype)


def _width(candidate: Candidate) -> int:
    return 0 if isinstance(candidate, Rotary) else max(p.numel() for p in candidate.module.parameters())


def _norm(norm: Norm, names: Sequence[Implementation], device: torch.device) -> tuple[Calls, Make]:
    weight: Any = norm.module.weight
    plain = type(norm.module).forward
    options: dict[str, Any] = {"size": weight.numel(), "eps": norm.eps, "offset": norm.offset, "device": device}
    calls: Calls = {"plain": lambda x, _: plain(norm.module, x)}
    calls.update({name: norm_op(name, **options) for name in names})
    return calls, lambda rows: [_random(1, rows, weight.numel(), like=weight), weight]


def _gate(gate: Gate, names: Sequence[Implementation], device: torch.device) -> tuple[Calls, Make]:
    act = next((m for key, m in gate.module.named_children() if key in ACTIVATION_NAMES), ACTIVATIONS[gate.activation])
    ops: Calls = {"plain": lambda left, up: act(left) * up}
    ops.update({name: gate_op(name, activation=gate.activation) for name in names})
    down: Any = gate.module.down_proj
    # Some write into what they are given, forward or backward: every call gets copies.
    calls = {name: lambda left, up, op=op: op(left.clone(), up.clone()) for name, op in ops.items()}
    return calls, lambda rows: [_random(1, rows, down.in_features, like=down.weight) for _ in range(2)]


def _rotary(rotary: Rotary, names: Sequence[Implementation], device: torch.device) -> tuple[Calls, Make]:
    q, k, cos, sin = rotary.call
    calls: Calls = {"plain": rotary.plain, **{name: rotary_op(name) for name in names}}

    def make(rows: int) -> list[Tensor]:
        heads = [_random(1, rows, x.shape[1], x.shape[3], like=x) for x in (q, k)]
        return [*(x.transpose(1, 2) for x in heads), *(x[:, :1].expand(1, rows, -1).contiguous() for x in (cos, sin))]

    return calls, make


def _decode_times(calls: Calls, inputs: list[Tensor], device: torch.device) -> dict[str, float]:
    with torch.no_grad():
        return _times({name: partial(call, *inputs) for name, call in calls.items()}, DECODE_CALLS, device)


def _train_times(calls: Calls, inputs: list[Tensor], device: torch.device) -> dict[str, float]:
    leaves = [x.detach().requires_grad_() for x in inputs[:2]]

    def step(call: Callable[..., Any]) -> None:
        with torch.enable_grad():
            out = call(*leaves, *inputs[2:])
            parts = out if isinstance(out, tuple) else (out,)
            torch.autograd.grad(parts, leaves, [torch.ones_like(part) for part in parts], allow_unused=True)

    return _times({name: partial(step, call) for name, call in calls.items()}, TRAIN_CALLS, device)


def _times(calls: dict[str, Callable[[], Any]], count: int, device: torch.device) -> dict[str, float]:
    """Median microseconds per call; the first calls, which may compile, are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            _wait(device)
            start = perf_counter()
            for _ in range(count):
                call()
            _wait(device)
            seconds[name].append((perf_counter() - start) / count)
    return {name: median(values) * 1e6 for name, values in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
