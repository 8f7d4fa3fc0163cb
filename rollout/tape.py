"""The decode step of a CPU as a tape: a flat list of operators in place of the modules' Python.

CUDA graphs replay what the device ran; a tape replays what the dispatcher ran. A step of many rows is a thousand calls
of PyTorch operators, and Hugging Face's modules around them (calls, keywords, views of shapes) take 5 to 10 ms of it at
30 layers. While one step runs as always, `Recorder` writes down every operator with its arguments. Out of that comes a
function of straight-line Python that calls the same operators on the same weights in the same order: the same bits.
Attention is one call on the tape (it reads the page tables of its step), and packed weights are looked up anew in every
call of the engine, so an optimiser step leaves tapes valid.

What depends on values of the step cannot be recorded: reading a number on the host (dynamic rotary scaling), shapes
that depend on data (experts picked by `nonzero`), random numbers. Such a model decodes without, and `why_not` says so.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rhotrain.kernels.paged_plan import SharedPages
from rhotrain.model.attention import run_paged
from rhotrain.model.packed import packed_weights
from rhotrain.rollout.decode import DecodeInputs, DecodeRows, decode_hidden, paged_context
from rhotrain.rollout.pools import Pools

PATIENCE = 8
"""Steps that a number of rows runs before it is recorded: recording takes what some 15 replays save."""

MOST_TAPES = 16
"""Tapes that are kept, by number of rows; one is a Python function without tensors of its own."""

PLAIN = (bool, int, float, str, type(None))

VALUE_DEPENDENT = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


class NotRecordable(RuntimeError):
    """The step did something that another step would do otherwise. The message names the operator."""


@dataclass(slots=True)
class _Call:
    """One entry: function, arguments with tensors replaced by `_Ref`, and the names that its results get."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list["_Ref"]
    is_sequence: bool


@dataclass(frozen=True, slots=True)
class _Ref:
    """The tensor number `index` of the tape."""

    index: int


class Recorder(TorchDispatchMode):
    """Writes down the operators that run inside; they run as without it.

    tensors: every tensor that was met, by number; held until the end, so that no identity is used twice.
    made: the numbers of those that the step made; the others are inputs, weights and constants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.tensors: list[Tensor] = []
        self.made: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._inside_opaque = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside_opaque:
            return func(*args, **kwargs)
        if any(tag in func.tags for tag in VALUE_DEPENDENT) and not _picks_rows(func, args):
            raise NotRecordable(f"{func} depends on the values of the step")
        return self._run(func, args, kwargs)

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as one entry, whatever it does inside."""

        def call(*args: Any) -> Any:
            return self._run(function, args, {})

        return call

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor; a new one for a tensor that was not met before."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        named = self._named(args), self._named(kwargs)
        outer, self._inside_opaque = self._inside_opaque, True
        try:
            out = function(*args, **kwargs)
        finally:
            self._inside_opaque = outer
        is_sequence = isinstance(out, (tuple, list))
        results = list(out) if is_sequence else [out]
        if not all(isinstance(result, Tensor) for result in results):
            raise NotRecordable(f"{function} gives something else than tensors")
        refs = [_Ref(self.number(result)) for result in results]
        # What an in-place operator returns has its name already.
        self.made |= {ref.index for ref in refs if ref.index >= 0 and not _holds(named, ref)}
        self.calls.append(_Call(function, *named, refs, is_sequence))
        return out

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Ref(self.number(value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._named(item) for item in value)
        if isinstance(value, dict):
            return {key: self._named(item) for key, item in value.items()}
        return value


def _picks_rows(function: Any, args: Any) -> bool:
    """True for `x[index]` with numbers: its shape depends on values with a mask only."""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


def _refs(value: Any) -> Iterator[_Ref]:
    if isinstance(value, _Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        yield from _refs(tuple(value.values()))


def _holds(value: Any, ref: _Ref) -> bool:
    return any(other == ref for other in _refs(value))


class Tape:
    """A recorded step as a function of its inputs. outside: the tensors that it reads besides them, by name. size: how
    many calls it makes."""

    def __init__(self, recorder: Recorder, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        self._names: dict[str, Any] = {}
        given = {recorder.number(tensor): f"a{k}" for k, tensor in enumerate(inputs)}
        self.outside = {
            f"t{k}": tensor for k, tensor in enumerate(recorder.tensors) if k not in recorder.made and k not in given
        }
        result = recorder.number(out)
        needed = _needed(recorder.calls, result)
        last = {ref.index: k for k, call in enumerate(needed) for ref in _refs((call.args, call.kwargs))}
        self.size = len(needed)
        lines = [f"def run({', '.join(given.values())}):"]
        for k, call in enumerate(needed):
            lines.append(f"    {self._statement(call, given)}")
            over = {ref.index for ref in (*_refs((call.args, call.kwargs)), *call.results)}
            over = {i for i in over if i in recorder.made and last.get(i, k) <= k and i != result}
            if over:
                lines.append(f"    del {', '.join(f't{i}' for i in sorted(over))}")
        lines.append(f"    return {given.get(result, f't{result}')}")
        self._names |= self.outside
        exec("\n".join(lines), self._names)
        self.run: Callable[..., Tensor] = self._names["run"]

    def forget_outside(self) -> None:
        """Drop the second reference to weights and constants; the function has its own."""
        self.outside = {}

    def bind(self, name: str, tensor: Tensor) -> None:
        """Read `tensor` under this name from now on."""
        self._names[name] = tensor

    def unbind(self, name: str) -> None:
        """Hold what stands under this name no longer; the tape does not run until it is bound again."""
        self._names[name] = None

    def _statement(self, call: _Call, given: dict[int, str]) -> str:
        write = self._writer(given)
        arguments = [write(value) for value in call.args]
        arguments += [f"{name}={write(value)}" for name, value in call.kwargs.items()]
        names = [self._target(ref.index, given) for ref in call.results]
        targets = "".join(f"{name}, " for name in names) if call.is_sequence else names[0]
        return f"{targets} = {self._constant(call.function)}({', '.join(arguments)})"

    def _target(self, index: int, given: dict[int, str]) -> str:
        """What a result is called. An operator that returns a weight or constant changed it in place: no new name."""
        return given.get(index, "_" if f"t{index}" in self.outside else f"t{index}")

    def _writer(self, given: dict[int, str]) -> Callable[[Any], str]:
        def write(value: Any) -> str:
            if isinstance(value, _Ref):
                return given.get(value.index, f"t{value.index}")
            if isinstance(value, list):
                return f"[{', '.join(map(write, value))}]"
            if isinstance(value, tuple):
                return f"({''.join(f'{write(item)}, ' for item in value)})"
            if isinstance(value, dict):
                return f"{{{', '.join(f'{key!r}: {write(item)}' for key, item in value.items())}}}"
            return self._constant(value)

        return write

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def _needed(calls: list[_Call], result: int) -> list[_Call]:
    """The calls without those whose results nobody reads. What writes in place, and attention, which writes the pool,
    always stays."""
    wanted = {result}
    kept: list[_Call] = []
    for call in reversed(calls):
        refs = list(_refs((call.args, call.kwargs)))
        pure = isinstance(call.function, torch._ops.OpOverload) and not call.function._schema.is_mutable
        if pure and not any(ref.index in wanted for ref in call.results):
            continue
        wanted |= {ref.index for ref in refs}
        kept.append(call)
    return kept[::-1]


@dataclass(slots=True)
class _Bound:
    """A tape and the packed weights that it reads: name -> place in `PackedWeights.copies()`, as of pack number
    `packs`."""

    tape: Tape
    packed: dict[str, int]
    packs: int


UNBOUND = -1
"""The pack number of a tape that holds no packed weights."""


class DecodeTapes:
    """Tapes of `decode_hidden` over `pools`, by number of rows.

    recorded: how many there were; seconds: the time they took. why_not: why none is used, None while they are.
    """

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.recorded = 0
        self.seconds = 0.0
        self.why_not: str | None = None
        self._tapes: OrderedDict[int, _Bound] = OrderedDict()
        self._rows, self._steps = 0, 0
        self._state: tuple[Any, ...] = ()
        self._usable = True

    def __len__(self) -> int:
        return len(self._tapes)

    def check(self) -> None:
        """Drop the tapes when something that they rest on has changed. Called once per call of the engine."""
        model = self.pools.loaded.model
        state = (*_addresses(model), *_python_state(model))
        if state != self._state:
            self.drop()
            self._state = state
        self._usable = not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def drop(self) -> None:
        """Forget the tapes; they are recorded anew when it pays."""
        self._tapes.clear()
        self._rows, self._steps = 0, 0

    def hidden(self, rows: DecodeRows) -> Tensor:
        """Hidden [B,H] of the rows' newest tokens, as `decode_hidden` gives it."""
        inputs = rows.inputs
        plain = torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
        if plain or self.why_not is not None or not self._usable:
            return decode_hidden(self.pools, inputs, rows.shared)
        tape = self._tapes.get(len(rows))
        if tape is not None:
            self._tapes.move_to_end(len(rows))
            self._rebind(tape)
            with self.pools.loaded.with_attention(paged_context(self.pools, inputs, rows.shared)):
                return tape.tape.run(inputs.ids, inputs.cached)
        self._steps = self._steps + 1 if len(rows) == self._rows else 1
        self._rows = len(rows)
        if self._steps <= PATIENCE:
            return decode_hidden(self.pools, inputs, rows.shared)
        return self._record(inputs, rows.shared)

    def _record(self, inputs: DecodeInputs, shared: tuple[SharedPages, ...]) -> Tensor:
        """Run the step, and keep its tape."""
        start, count = perf_counter(), len(inputs.ids)
        recorder, attention = Recorder(), self.pools.loaded.attention
        recorder.number(inputs.ids)
        recorder.number(inputs.cached)
        attention.paged = recorder.opaque(run_paged)
        try:
            with recorder:
                hidden = self.pools.hidden(paged_context(self.pools, inputs, shared), inputs.ids, inputs.cached)
        except NotRecordable as reason:
            self.why_not = f"{self.pools.loaded.architecture} cannot be recorded: {reason}"
            self.drop()
            return decode_hidden(self.pools, inputs, shared)
        finally:
            attention.paged = run_paged
        tape = Tape(recorder, (inputs.ids, inputs.cached), hidden)
        places = {id(copy): place for place, copy in enumerate(self._copies()) if copy is not None}
        packed = {name: places[id(tensor)] for name, tensor in tape.outside.items() if id(tensor) in places}
        tape.forget_outside()
        self._tapes[count] = _Bound(tape, packed, packed_weights(self.pools.loaded).packs)
        while len(self._tapes) > MOST_TAPES:
            self._tapes.popitem(last=False)
        self.recorded += 1
        self.seconds += perf_counter() - start
        return hidden

    def _copies(self) -> list[Tensor | None]:
        return packed_weights(self.pools.loaded).copies()

    def let_go(self) -> None:
        """Hold no packed weights until the next step: tapes of several numbers of rows would hold those of several
        policy versions, half a gigabyte each for SmolLM2."""
        for bound in self._tapes.values():
            for name in bound.packed:
                bound.tape.unbind(name)
            bound.packs = UNBOUND

    def _rebind(self, bound: _Bound) -> None:
        """Read the packed weights of now."""
        packs = packed_weights(self.pools.loaded).packs
        if bound.packs == packs:
            return
        copies = self._copies()
        for name, place in bound.packed.items():
            copy = copies[place]
            assert copy is not None
            bound.tape.bind(name, copy)
        bound.packs = packs


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


def _python_state(model: nn.Module) -> tuple[Any, ...]:
    """The plain values among the modules' attributes, since what switches an adapter or a mode changes one of them, and
    the forwards that modules were given."""
    return tuple(
        (name, value if isinstance(value, PLAIN) or name == "forward" else repr(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN)
        or name == "forward"
        or (name not in OWN and isinstance(value, (dict, list, set, tuple)) and _is_plain(value))
    )


OWN = frozenset(vars(nn.Module()))
"""What every module has: parameters, hooks, submodules. All but `training` is looked at elsewhere or is a container."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, PLAIN)
