"""Compile every kernel variant ahead of time, without a GPU, and check what came out.

    python -m scripts.codegen                one line per kernel, variant and architecture; exit code 1 on a violation
    python -m scripts.codegen --quick        the variants of the default tests
    python -m scripts.codegen --json FILE    the same as data

Nothing here knows a signature. The public functions are called on small CPU tensors (codegen_cases.py) with the last
step of a launch replaced (codegen_record.py): what Triton would have compiled for these very arguments (types,
alignments, constexprs, number of warps) is recorded, and nothing runs. So a variant is here because a launcher asks
for it, and a case that is launched with several N, temperatures and bounds shows whether those recompile anything.

Each variant is compiled for each architecture and held to BOUNDS:
    spills        no stack in the binary: what does not fit in registers goes there
    float64       no instruction on float64 in PTX
    loads         so many loops that read only 16 bytes at a time (ld.global.v4.b32 and the like, or cp.async of 16
                  bytes), and so many of these that write only 16 bytes at a time, when rows start at multiples of 16
                  elements; the length of a row does not matter
    exponentials  no more than so many per thread in one turn of such a loop
    registers     per thread; and at least two programs fit on a multiprocessor
    shared        memory of a program
    offsets       no 32-bit product of a row number or a stride in Triton's IR, and a 64-bit one for every stride: N V
                  passes 2^31 at 14135 rows of 151936 logits
    tensor cores  wgmma, mma.sync or tcgen05.mma wherever there is a dot; not for float32 where a kernel means it so
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rhotrain.kernels.backend import INTERPRETED
from scripts.codegen_cases import record
from scripts.codegen_read import innermost_loops, narrow_offsets, summed_layouts
from scripts.codegen_record import Recorder, Variant

ARCHS = (80, 90, 100)


@dataclass(frozen=True)
class Bound:
    """What a kernel may need at most, and must have at least.

    registers: where rows are aligned; rows that are not are read in small pieces, and `unaligned` holds for them.
    reading: loops that read 16 bytes at a time. writing: further loops that write so too, absent where GRAD is off.
    exponentials: in one turn of such a loop; 0 where that depends on what the loop does.
    paged: such loops read page numbers too. exact: dots of float32 stay float32, without tensor cores.
    """

    registers: int
    unaligned: int
    reading: int = 0
    writing: int = 0
    exponentials: int = 0
    paged: bool = False
    exact: bool = False


BOUNDS = {
    "forward_kernel": Bound(registers=96, unaligned=160, reading=1, exponentials=33),
    "backward_kernel": Bound(registers=64, unaligned=112, writing=1, exponentials=16),
    "policy_loss_kernel": Bound(registers=96, unaligned=160, reading=1, writing=1, exponentials=33),
    "scatter_kernel": Bound(registers=64, unaligned=64),
    "scale_kernel": Bound(registers=64, unaligned=128, writing=1),
    "draw_kernel": Bound(registers=96, unaligned=128, reading=1),
    "truncate_kernel": Bound(registers=255, unaligned=255, reading=1),  # 4 warps: 255 still leave room for two programs
    "kept_kernel": Bound(registers=128, unaligned=128, reading=1),
    "decode_kernel": Bound(registers=255, unaligned=255, reading=1, paged=True, exact=True),
    "combine_kernel": Bound(registers=64, unaligned=64),
    "write_kernel": Bound(registers=64, unaligned=96),
}
"""For Triton 3.6 to 3.9, which differ: forward 96 and 56, backward 40. At 64 registers a multiprocessor holds eight
programs of 4 warps, at 96 five. One loop per pass over whole blocks of logits; an
exponential per element, 32 of a block of 4096 on 128 threads, and one per block."""

GATHERING = ("KEPT", "RESTRICTED")
"""Switches with which a loop reads ids, or which ids are allowed, beside the logits."""


@dataclass(frozen=True)
class Processor:
    """A streaming multiprocessor: KiB of shared memory in all and for one program."""

    shared: int
    shared_program: int
    registers: int = 65536
    threads: int = 2048

    def programs(self, registers: int, warps: int, shared_bytes: int) -> int:
        """How many programs are resident at a time; registers are handed out to a warp in units of 256."""
        a_warp = -(-32 * registers // 256) * 256
        by_shared = self.shared * 1024 // (shared_bytes + 1024)
        return min(self.threads // (32 * warps), self.registers // (a_warp * warps), by_shared)


PROCESSORS = {80: Processor(164, 163), 90: Processor(228, 227), 100: Processor(228, 227)}


# ---- compiling ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """One variant for one architecture, and what is wrong with it.

    loops, stores: how many loops must read, and of those write, 16 bytes at a time.
    layouts: of the whole blocks that are summed up, which decides the order of the sums.
    binary: start of the SHA-256 of the cubin.
    """

    kernel: str
    variant: str
    arch: int
    aligned: bool
    loops: int
    stores: int
    registers: int
    stack: int
    shared: int
    programs: int
    wide_loops: int
    wide_stores: int
    exponentials: int
    float64: int
    dots: int
    tensor_core: int
    narrow: tuple[str, ...]
    layouts: tuple[str, ...]
    binary: str
    violations: tuple[str, ...] = ()


def compile_variant(variant: Variant, arch: int, bound: Bound | None) -> Compiled:
    """Through Triton's compiler, or its cache, to a binary; judged by `bound`."""
    source = ASTSource(variant.kernel, variant.signature, variant.constexprs, variant.attributes)
    out = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(variant.options))
    ttir, ptx, shared = str(out.asm["ttir"]), str(out.asm["ptx"]), int(out.metadata.shared)
    registers, stack = resources(out.asm["cubin"])
    wide = [loop for loop in innermost_loops(ptx) if loop.wide or (bound and bound.paged and loop.paged)]
    regular = not variant.unaligned and not any(variant.constants.get(name) for name in GATHERING)
    writing = bound.writing if bound and regular and variant.constants.get("GRAD", True) else 0
    result = Compiled(
        kernel=variant.name,
        variant=variant.label,
        arch=arch,
        aligned=not variant.unaligned,
        loops=writing + (bound.reading if bound and regular else 0),
        stores=writing,
        registers=registers,
        stack=stack,
        shared=shared,
        programs=PROCESSORS[arch].programs(registers, int(out.metadata.num_warps), shared),
        wide_loops=len(wide),
        wide_stores=sum(loop.wide_stores for loop in wide),
        exponentials=max((loop.exponentials for loop in wide), default=0),
        float64=len(re.findall(r"\.f64\b", ptx)),
        dots=len(re.findall(r"\btt\.dot", ttir)),
        tensor_core=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx)),
        narrow=tuple(narrow_offsets(ttir, variant.strides)),
        layouts=summed_layouts(str(out.asm["ttgir"]), int(variant.constants.get("BLOCK", 0))),
        binary=hashlib.sha256(out.asm["cubin"]).hexdigest()[:12],
    )
    return replace(result, violations=tuple(violations(result, bound)))


def violations(it: Compiled, bound: Bound | None) -> list[str]:
    """One line per promise that does not hold, beginning with its name."""
    if bound is None:
        return [f"bounds: {it.kernel} has no line in BOUNDS"]
    registers, limit = register_limit(it, bound), PROCESSORS[it.arch].shared_program * 1024
    checks = {
        f"spills: {it.stack} bytes of stack a thread": it.stack == 0,
        f"float64: {it.float64} uses": it.float64 == 0,
        f"loads: {it.wide_loops} loops of 16-byte loads, not {it.loops}": it.wide_loops >= it.loops,
        f"loads: {it.wide_stores} of them with 16-byte stores, not {it.stores}": it.wide_stores >= it.stores,
        f"exponentials: {it.exponentials} in a turn, more than {bound.exponentials}": (
            not bound.exponentials or it.exponentials <= bound.exponentials
        ),
        f"registers: {it.registers}, more than {registers}": it.registers <= registers,
        f"registers, shared: {it.programs} programs on a multiprocessor, fewer than 2": it.programs >= 2,
        f"shared: {it.shared} bytes, more than {limit}": it.shared <= limit,
        f"tensor cores: {it.dots} dots without them": (
            it.tensor_core > 0 or it.dots == 0 or (bound.exact and it.variant.startswith("fp32"))
        ),
    }
    return [line for line, holds in checks.items() if not holds] + [f"offsets: {line}" for line in it.narrow]


def register_limit(it: Compiled, bound: Bound) -> int:
    """Which of a kernel's two limits holds for a variant."""
    return bound.registers if it.aligned else bound.unaligned


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) of a thread, as the binary declares them; by Triton's cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage names no resources:\n{text}")
    return int(found[1]), int(found[2]) + int(found[3])


# ---- the table ------------------------------------------------------------------------------------------------------

HEAD = (
    f"{'kernel':18} {'variant':50} {'sm':>3} {'registers':>9} {'stack':>5} {'shared KiB':>10} {'programs':>8} "
    f"{'16-byte loops':>13} {'ex2':>3} {'f64':>3}  verdict"
)


def line(it: Compiled) -> str:
    """One line of the table; registers and 16-byte loops with the limit beside them."""
    bound = BOUNDS.get(it.kernel, Bound(0, 0))
    loops = f"{it.wide_loops}/{it.loops}"
    return (
        f"{it.kernel:18} {it.variant:50} {it.arch:3} {it.registers:5}/{register_limit(it, bound):3} {it.stack:5} "
        f"{it.shared / 1024:10.1f} {it.programs:8} {loops:>13} {it.exponentials:3} {it.float64:3}  "
        f"{'; '.join(it.violations) or 'ok'}"
    )


def compile_all(recorder: Recorder) -> Iterator[Compiled]:
    """Every recorded variant for every architecture, kernel by kernel."""
    for variant in sorted(recorder.variants.values(), key=lambda variant: (variant.name, variant.label)):
        for arch in ARCHS:
            yield compile_variant(variant, arch, BOUNDS.get(variant.name))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile every kernel variant ahead of time and check what came out.")
    parser.add_argument("--quick", action="store_true", help="the variants of the default tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set, and interpreted kernels do not compile; unset it")
    recorder = Recorder()
    record(recorder, quick=args.quick)
    failures = recorder.recompiled() + recorder.unrecorded()
    compiled = []
    print(HEAD)
    for it in compile_all(recorder):
        print(line(it), flush=True)
        compiled.append(it)
        failures += [f"{it.kernel} {it.variant} sm_{it.arch}: {found}" for found in it.violations]
    if args.json:
        args.json.write_text(json.dumps({"failures": failures, "compiled": [asdict(it) for it in compiled]}, indent=1))
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(recorder.variants)} variants, {len(compiled)} binaries, {len(failures)} violations")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
