"""Kernels with one fault each, to show that scripts/codegen.py sees it, and the run behind test_codegen.py.

python -m tests.helpers_codegen FILE     from the repository's root, without TRITON_INTERPRET: results as JSON
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rhotrain.kernels.backend import Launch, jit, tl
from rhotrain.kernels.spec import Objective

FAULTS = {
    "none": (),
    "int32": ("offsets",),
    "masked": ("loads",),
    "float64": ("float64",),
    "twice": ("exponentials",),
    "unpipelined": (),
    "spills": ("spills",),
    "shared": ("registers, shared", "shared"),
    "dot": (),
    "dot without tensor cores": ("tensor cores",),
    "dot meant exact": (),
}
"""Fault -> the checks that must fail for it, and no other."""


@jit(do_not_specialize=["vocab"])
def row_sum_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab: tl.tensor,
    out: tl.tensor,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per row: sum of exp2 of its logits, by the rules of this folder but for the fault."""
    row = tl.program_id(0)
    if FAULT != "int32":
        row = row.to(tl.int64)
    row_ptr = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    total = 0.0
    whole = vocab // BLOCK * BLOCK
    if FAULT == "masked":
        whole = vocab
        for c in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row_ptr + c + lane, mask=c + lane < vocab, other=float("-inf")).to(tl.float32)
            total += tl.sum(tl.exp2(x), 0)
    else:
        for c in tl.range(0, whole, BLOCK, num_stages=STAGES):
            x = tl.load(row_ptr + c + lane).to(tl.float32)
            if FAULT == "float64":
                total += tl.sum(x.to(tl.float64) * 0.5, 0).to(tl.float32)
            if FAULT == "twice":
                total += tl.sum(tl.exp2(x * 0.5), 0)
            if FAULT == "spills":
                x = x - tl.max(x, 0)
                x = x - tl.sum(x, 0)
            total += tl.sum(tl.exp2(x), 0)
    x = tl.load(row_ptr + whole + lane, mask=whole + lane < vocab, other=float("-inf")).to(tl.float32)
    tl.store(out + row, total + tl.sum(tl.exp2(x), 0))


@jit
def dot_kernel(
    logits: tl.tensor, out: tl.tensor, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> None:
    """A [BLOCK, BLOCK] matrix times itself; float32 with the precision `ieee` has no tensor core instruction."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + at)
    tl.store(out + at, tl.dot(x, x, input_precision=PRECISION))


@jit
def counting_kernel(out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, STAGES: tl.constexpr) -> None:
    """Triton makes a binary each for a count of 1, multiples of 16 and other numbers."""
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, count, mask=lane < count)


def toy_launch(fault: str) -> Launch:
    """Sizes that only the faults about sizes change."""
    if fault == "spills":
        return Launch(block=16384, num_warps=1, num_stages=1)
    if fault == "shared":
        return Launch(block=16384, num_warps=8, num_stages=8)
    if fault == "unpipelined":
        return Launch(block=4096, num_warps=8, num_stages=1)
    if fault.startswith("dot"):
        return Launch(block=32, num_warps=4)
    return Launch(block=4096, num_warps=8)


def launch_toy(fault: str, logits: torch.Tensor, out: torch.Tensor) -> None:
    """One launch; logits [N, V] with unit column strides."""
    if fault.startswith("dot"):
        precision = "tf32" if fault == "dot" else "ieee"
        toy_launch(fault)(dot_kernel, (1,), logits.device, logits, out, PRECISION=precision)
        return
    count, vocab = logits.shape
    toy_launch(fault)(row_sum_kernel, (count,), logits.device, logits, logits.stride(0), vocab, out, FAULT=fault)


def run() -> dict[str, Any]:
    """The quick variants, the toys' violations by fault (sm_90), and what the tests of recompilation need."""
    from scripts import codegen, codegen_cases
    from scripts.codegen_record import Recorder

    quick = Recorder()
    codegen_cases.record(quick, quick=True)
    pieces = Recorder()
    codegen_cases.record_pieces(pieces)
    counted = Recorder()
    with counted.recording("counting_kernel"):
        for count in (1, 2, 16):
            Launch(block=128, num_warps=4)(counting_kernel, (1,), torch.device("cpu"), torch.zeros(128), count)

    binaries: dict[str, set[str]] = {}
    for rows in codegen_cases.all_rows(torch.bfloat16):
        one = Recorder()
        with one.recording("one N, one temperature"):
            codegen_cases.logprobs(rows, entropy=True)
            codegen_cases.policy(rows, Objective(), all_inputs=True, inplace=False)
        for variant in one.variants.values():
            binaries.setdefault(variant.name, set()).add(codegen.compile_variant(variant, 90, None).binary)

    toys: dict[str, list[str]] = {}
    for fault in FAULTS:
        recorder = Recorder()
        with recorder.recording(fault):
            launch_toy(fault, torch.zeros(2, 1024, dtype=torch.float32), torch.zeros(1024))
        (variant,) = recorder.variants.values()
        loops, sizes = int(not fault.startswith("dot")), toy_launch(fault)
        elements = 0 if fault == "spills" else sizes.block // (32 * sizes.num_warps)
        bound = codegen.Bound(
            registers=255, unaligned=0, reading=loops, exponentials=loops * elements, exact="exact" in fault
        )
        toys[fault] = list(codegen.compile_variant(variant, 90, bound).violations)
    return {
        "compiled": [asdict(it) for it in codegen.compile_all(quick)],
        "unrecorded": quick.unrecorded(),
        "all_unrecorded": Recorder().unrecorded(),
        "recompiled": quick.recompiled(),
        "pieces": pieces.recompiled(),
        "counted": counted.recompiled(),
        "binaries": {name: sorted(hashes) for name, hashes in binaries.items()},
        "toys": toys,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run(), indent=1))
