"""What `codegen.py` looks for in PTX and in Triton's first IR, as text: memory accesses by loop, and 32-bit offsets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """One innermost loop: bytes of each access to global memory, and exponentials per thread and turn."""

    loads: tuple[int, ...]
    stores: tuple[int, ...]
    exponentials: int

    @property
    def wide(self) -> bool:
        """It reads, and only 16 bytes or more at a time."""
        return bool(self.loads) and min(self.loads) >= 16

    @property
    def paged(self) -> bool:
        """The same but for page numbers: loads of 4 bytes, at most one for each of the others."""
        narrow = [size for size in self.loads if size < 16]
        return set(narrow) == {4} and 2 * len(narrow) <= len(self.loads)

    @property
    def wide_stores(self) -> bool:
        """It writes, and only 16 bytes or more at a time."""
        return bool(self.stores) and min(self.stores) >= 16


_LABEL = re.compile(r"\s*(\$L\w+):")
_JUMP = re.compile(r"\bbra\S*\s+(\$L\w+);")
_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[busf]+(\d+)\s")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[.*?\], \[.*?\], (0x[0-9a-f]+|\d+)")


def innermost_loops(ptx: str) -> list[Loop]:
    """The loops that hold no other loop: from a label to a jump back to it."""
    lines = ptx.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    jumps = [(labels[found[1]], i) for i, line in enumerate(lines) if (found := _JUMP.search(line))]
    back = {(start, stop) for start, stop in jumps if start <= stop}
    inner = [a for a in back if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in back)]
    return [_loop("\n".join(lines[start:stop])) for start, stop in sorted(inner)]


def _loop(text: str) -> Loop:
    access = [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in _ACCESS.findall(text)]
    async_loads = [int(size, 0) for size in _ASYNC.findall(text)]
    return Loop(
        tuple([size for kind, size in access if kind == "ld"] + async_loads),
        tuple(size for kind, size in access if kind == "st"),
        len(re.findall(r"\bex2\.approx", text)),
    )


_RESULT = re.compile(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?\s*(.*?)\s*(?:loc\(.*)?$")
_CARRIED = re.compile(r"(%\w+) = (%\w+)")
_SAME_NUMBER = ("arith.", "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans")


def narrow_offsets(ttir: str, strides: Sequence[str] = ()) -> list[str]:
    """32-bit products of a row number or a stride, and strides (names of arguments) that are used, but in no 64-bit
    product.

    A row number is a program's id and what 32-bit arithmetic makes of it, loop counters that start there included.
    """
    growing, used, widened, found = set[str](), set[str](), set[str](), []
    stands_for = {f"%{name}": name for name in strides}
    for line in ttir.splitlines():
        if "scf.for" in line or "scf.while" in line:
            growing |= {name for name, first in _CARRIED.findall(line) if first in growing}
        result = _RESULT.match(line)
        if result is None:
            continue
        name, op, rest = result.groups()
        kind = re.split(r" : | to |-> ", rest)[-1]
        operands = set(re.findall(r"%\w+", rest))
        wide = re.search(r"(?:\b|x)i64\b", kind) is not None
        rows, of_stride = operands & growing, {stands_for[x] for x in operands if x in stands_for}
        used |= of_stride
        if op in ("arith.muli", "arith.shli") and not wide and (rows or of_stride):
            found.append(f"{op} {rest}")
        elif op == "arith.muli":
            widened |= of_stride
        if op in ("arith.extsi", "tt.splat") and of_stride:
            stands_for[name] = of_stride.pop()
        elif op == "tt.get_program_id" or (rows and not wide and op != "arith.cmpi" and op.startswith(_SAME_NUMBER)):
            growing.add(name)
    return found + [f"{name} takes part in no 64-bit product" for name in strides if name in used - widened]


def summed_layouts(ttgir: str, block: int) -> tuple[str, ...]:
    """Layouts of the tensors of `block` elements that are reduced, each once, as Triton's GPU IR writes them."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    reduced = re.findall(rf"\}}\)\s*: \(tensor<{block}x\w+, (#\w+)>", ttgir)
    return tuple(sorted({layouts.get(name, name) for name in reduced}))
