"""Derived weight layouts on a CPU: the body's linear layers and the head, packed for oneDNN once per policy version.

y = x @ W^T + b is the same product either way; F.linear lays W out anew in every call, which at decode's few rows costs
as much as the product. Measured (AVX-512, 2 threads, float32, 16 rows): gate_up 576 x 3072 625 us plain, 300 packed;
head 576 x 49152 19.4 and 5.8 ms; gpt2's 768 x 3072 1001 and 367 us. Nothing of that size was slower up to 1024 rows.
The error against float64 is 1.0 to 1.6 times F.linear's at 64 to 576 inputs, 2.1 at 1536, 2.3 at 4096: oneDNN sums each
output in one chain, MKL in blocks.

Linears that read the very same tensor one after the other (q, k, v; gate, up) are one GEMM. They are found by running
the body once, not by their names. The first computes the merged product, the others take their columns of it.
Inside `using()` the `forward` of module instances is replaced, never that of a class; outside nothing differs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rhotrain.model.adapter import merged_weight, merges, sources
from rhotrain.model.attention import PackedContext
from rhotrain.model.head import Head
from rhotrain.model.loaded import LoadedModel

MIN_ELEMENTS = 1 << 18
"""Smallest product that is packed. oneDNN's call costs 14-20 us, F.linear's 2: 256 x 256 takes 6.1 us plain and 19.4
packed at 1 row, 85 and 59 at 64; 256 x 1024 takes 26.5 and 28.4 at 1 row, 77 and 41 at 8."""

PACK_ROWS = 64
"""The number of rows that the layout is chosen for. 16, 64 and 512 measured the same, 1 is slower from 16 rows on."""

PACKED_TYPES = (torch.float32, torch.bfloat16)

SAMPLES = 17
"""Elements per tensor that are compared. Prime, so that the stride walks through the columns of usual widths. An edit
of half of the elements goes unseen once in 130,000 times."""

TRIAL_TOKENS = 8
"""Length of the sequence on which siblings are found."""

Stamp = tuple[int, tuple[tuple[int, int, torch.dtype], ...]]


class _Product:
    """One packed GEMM, of one module or of siblings that read the same input.

    packed: the merged weight in oneDNN's layout, None while there is none; then every module runs its own forward.
    input, version, parts: the tensor that the first sibling read, its version then, and what the others have not taken.
    """

    __slots__ = ("bias", "elements", "input", "modules", "packed", "parts", "sizes", "version")

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self.elements = sum(_shape(module).numel() for module in modules)
        self.empty()

    def empty(self) -> None:
        """Free the packed copy."""
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        self.sizes: list[int] = []
        self.forget()

    def fill(self, packed: Tensor) -> None:
        """Take a packed copy of the modules' weights; their biases go side by side, 0 for a module that has none."""
        biases = [_bias(module) for module in self.modules]
        self.packed, self.sizes = packed, [_shape(module)[0] for module in self.modules]
        given = next((bias for bias in biases if bias is not None), None)
        if given is not None:
            columns = [given.new_zeros(n) if b is None else b for n, b in zip(self.sizes, biases)]
            self.bias = torch.cat(columns)

    def forget(self) -> None:
        """Drop what was kept for siblings that did not come."""
        self.input: Tensor | None = None
        self.version = 0
        self.parts: dict[int, Tensor] = {}

    def forwards(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Every module with its replacement forward."""
        others = [partial(self._follow, i) for i in range(1, len(self.modules))]
        return list(zip(self.modules, [self._lead, *others]))

    def _alone(self, index: int, x: Tensor) -> Tensor:
        """The module's own forward, differentiable and at any dtype."""
        module = self.modules[index]
        return type(module).forward(module, x)

    def _lead(self, x: Tensor) -> Tensor:
        packed = self.packed
        if packed is None or x.dtype is not packed.dtype or x.dim() < 2 or _needs_torch():
            return self._alone(0, x)
        if len(self.modules) == 1:
            return _linear(x, packed, self.bias)
        if x.is_inference():  # has no version, so an edit between two siblings could not be seen
            return self._alone(0, x)
        # Views, not copies: rotary and the MLP's product read strided rows as fast (201 against 221 us at 16 rows).
        parts = _linear(x, packed, self.bias).split(self.sizes, -1)
        self.input, self.version, self.parts = x, x._version, dict(enumerate(parts[1:], 1))
        return parts[0]

    def _follow(self, index: int, x: Tensor) -> Tensor:
        """This sibling's columns, once, if the first one read this very tensor as it is now."""
        if x is not self.input or x._version != self.version or index not in self.parts or _needs_torch():
            return self._alone(index, x)
        part = self.parts.pop(index)
        if not self.parts:
            self.input = None
        return part


class PackedWeights:
    """Packed copies of `loaded`'s linear layers and head. Make one per model, and share it.

        packed = PackedWeights(loaded)
        with torch.no_grad(), packed.using(), loaded.with_attention(context):
            logits_NV = packed.head_logits(loaded.hidden(input_ids_T, position_ids_T)[rows])

    Packs nn.Linear and gpt2's Conv1D of the body, in float32 and, where oneDNN has it, bfloat16; a LoRA layer over
    float32 weights as the sum of both (adapter.py). The head is packed in
    float32 for either, a tied one apart from the embedding. Left alone: products of fewer than `min_elements` weights,
    subclasses, modules with hooks or a replaced forward, the fused expert weights of transformers' MoE layers.
    packs: how often the weights were packed; pack_seconds: the seconds of all of them together.
    Results differ from the plain ones by rounding; a row's bits may depend on the number of rows, as they always do.
    """

    def __init__(self, loaded: LoadedModel, *, min_elements: int = MIN_ELEMENTS) -> None:
        self.loaded = loaded
        self.min_elements = min_elements
        self.packs = 0
        self.pack_seconds = 0.0
        self._products: list[_Product] | None = None
        self._head: Tensor | None = None
        self._stamp: Stamp | None = None
        self._sampled: Tensor | None = None
        if self._unsupported is None:
            self._find()

    @property
    def _unsupported(self) -> str | None:
        """The reason why this device or dtype is not packed."""
        device, dtype = self.loaded.device, self.loaded.dtype
        if device.type != "cpu":
            return f"the model is on {device}; packed weights are for a CPU"
        if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[attr-defined]
            return "this PyTorch has no oneDNN (torch.backends.mkldnn), or it is switched off"
        if dtype not in PACKED_TYPES:
            return f"the model is {dtype}; packed weights are for torch.float32 and torch.bfloat16"
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bfloat16 in oneDNN; load the model in torch.float32"
        return None

    @property
    def why_not(self) -> str | None:
        """Why nothing is packed; None if something is. Then `using` does nothing and `head_logits` is Head.logits."""
        reason = self._unsupported
        if reason is None and not self._find() and self.loaded.head.weight.numel() < self.min_elements:
            return f"no linear layer of the model has {self.min_elements} weights or more; plain ones are faster"
        return reason

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies, shared ones once."""
        copies = [product.packed for product in self._products or ()] + [self._head]
        distinct = {id(copy): copy for copy in copies if copy is not None}
        return sum(int(torch.ops.mkldnn._nbytes(copy)) for copy in distinct.values())

    def copies(self) -> list[Tensor | None]:
        """The packed weight and the bias of every product, in an order that does not change; None where there is none.
        Another `packs` means other tensors."""
        return [tensor for product in self._products or () for tensor in (product.packed, product.bias)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack if the weights changed since the last time: by policy_version, an address, a version counter (every
        in-place operation raises it, those through `.data` do not), or one of a few sampled elements.

        1 to 3 ms for SmolLM2 when nothing changed. The old copies are freed first. `using` calls it.
        """
        if self.why_not is not None:
            self.release()
            return
        head = self.loaded.head
        tensors = self._tensors(head)
        stamp, sampled = _stamp(self.loaded.policy_version, tensors), _sample(tensors)
        if self._stamp == stamp and self._sampled is not None and torch.equal(self._sampled, sampled):
            return
        start = perf_counter()
        self.release()
        self._pack_all(head)
        # Last, so that an error on the way (no memory) leaves no stamp of copies that are not there.
        self._stamp, self._sampled = stamp, sampled
        self.packs += 1
        self.pack_seconds += perf_counter() - start

    def release(self) -> None:
        """Free the packed copies. Inside of `using` the modules then run their own forwards."""
        self._stamp = self._sampled = self._head = None
        for product in self._products or ():
            product.empty()

    @contextmanager
    def using(self) -> Iterator[None]:
        """The body's linear layers run packed inside, after a `refresh`. Nests: the outermost acts, since a module with
        a forward of its own is left alone.

        Do not change the weights inside without a `refresh`. Code inside that switches autograd on, or autocast,
        gets the modules' own forwards. In torch.inference_mode siblings run plain: merging needs version counters.
        Raises RuntimeError when autograd is on: packed products have no gradient.
        """
        if self.why_not is not None:
            yield
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "PackedWeights.using: autograd is on; packed products have no gradient. Use torch.no_grad()"
            )
        self.refresh()
        products = [p for p in self._find() if p.packed is not None and all(map(_untouched, p.modules))]
        installed = [pair for product in products for pair in product.forwards()]
        try:
            for module, forward in installed:
                module.__dict__["forward"] = forward  # nn.Module.__setattr__ takes ten times as long
            yield
        finally:
            for module, forward in installed:
                if module.__dict__.get("forward") is forward:
                    del module.__dict__["forward"]
            for product in products:
                product.forget()

    def head_logits(self, hidden_NH: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V] float32, as Head.logits: bias, logit_scale and softcap included.

        Refreshes when the head's weight or policy_version is another than packed. Under autograd or autocast it is
        Head.logits.
        """
        head = self.loaded.head
        if _needs_torch() or self._unsupported is not None or head.weight.numel() < self.min_elements:
            return head.logits(hidden_NH)
        stamp = _stamp(self.loaded.policy_version, [head.weight])
        if self._stamp is None or (self._stamp[0], self._stamp[1][0]) != (stamp[0], stamp[1][0]):
            self.refresh()
        assert self._head is not None
        return head.finish(_linear(hidden_NH.float(), self._head, None))

    def _find(self) -> list[_Product]:
        """The products that are packed; all of them are found at the first call."""
        if self._products is None:
            self._products = [_Product(group) for group in _siblings(self.loaded)]
        return [product for product in self._products if product.elements >= self.min_elements]

    def _tensors(self, head: Head) -> list[Tensor]:
        """What the packed copies are made of; the head's weight comes first."""
        tensors: list[Tensor | None] = [head.weight]
        for product in self._find():
            for module in product.modules:
                tensors += [*_sources(module), _bias(module)]
        return [tensor.detach() for tensor in tensors if tensor is not None]

    def _pack_all(self, head: Head) -> None:
        """Pack everything; equal groups of weights once."""
        done: dict[tuple[tuple[int, torch.Size], ...], Tensor] = {}
        for product in self._find():
            weights = [_weight(module) for module in product.modules]
            if any(weight.dtype != self.loaded.dtype for weight in weights):
                continue
            # By address: parameters are replaced, and two of them may share one storage.
            parts = [part for module in product.modules for part in _sources(module)]
            key = tuple((part.data_ptr(), part.shape) for part in parts)
            if key not in done:
                done[key] = _pack(weights[0] if len(weights) == 1 else torch.cat(weights))
            product.fill(done[key])
        if head.weight.numel() >= self.min_elements:
            # float32 for bfloat16 weights too: Head.logits multiplies in float32 on a CPU.
            self._head = _pack(head.weight.float())


_PACKED: WeakKeyDictionary[LoadedModel, PackedWeights] = WeakKeyDictionary()


def packed_weights(loaded: LoadedModel) -> PackedWeights:
    """The packed copies of this model, one object for everybody who runs it. They go when the model goes."""
    if loaded not in _PACKED:
        _PACKED[loaded] = PackedWeights(proxy(loaded))
    return _PACKED[loaded]


def _weight(module: nn.Module) -> Tensor:
    """The weight as [out, in]; Conv1D keeps it transposed. Detached: the packed copy is outside of autograd."""
    if merges(module):
        return merged_weight(module)
    weight: Any = module.weight
    return weight.detach().t() if type(module) is Conv1D else weight.detach()


def _sources(module: nn.Module) -> list[Tensor]:
    """The tensors that `_weight` is made of."""
    if merges(module):
        return sources(module)
    weight: Any = module.weight
    return [weight]


def _plain(module: nn.Module) -> nn.Module:
    """The nn.Linear or Conv1D: the module itself, or the one under its adapter."""
    base: Any = module
    return base.base_layer if merges(module) else module


def _shape(module: nn.Module) -> torch.Size:
    """[out, in]."""
    shape = _sources(module)[0].shape
    return torch.Size(reversed(shape)) if type(_plain(module)) is Conv1D else shape


def _parts(module: nn.Module) -> list[nn.Module]:
    """The plain layers inside of a LoRA layer that is packed as one."""
    return [part for part in module.modules() if type(part) in (nn.Linear, Conv1D)] if merges(module) else []


def _untouched(module: nn.Module) -> bool:
    """True without hooks, without a forward of its own (the class's is known), and with a weight that is a parameter
    and not computed in a hook; for a LoRA layer the same of what is in it."""
    if parts := _parts(module):
        plain = not (module._forward_hooks or module._forward_pre_hooks) and "forward" not in module.__dict__
        return plain and all(map(_untouched, parts))
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in module.__dict__ and "weight" in module._parameters


def _bias(module: nn.Module) -> Tensor | None:
    bias: Any = module.bias
    return None if bias is None else bias.detach()


def _pack(weight: Tensor) -> Tensor:
    # Pages of 2 MiB would make products of 16 rows 7 % faster, but finding them takes 0.1 to 0.8 s for 513 MB, each
    # time: more than a rollout gains.
    return torch.ops.mkldnn._reorder_linear_weight.default(weight, PACK_ROWS)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _needs_torch() -> bool:
    """True where only the module's own forward is right: autograd or autocast is on."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


def _stamp(policy_version: int, tensors: Sequence[Tensor]) -> Stamp:
    """What changes when weights move or are edited with autograd's knowledge."""
    return policy_version, tuple((t.data_ptr(), _version(t), t.dtype) for t in tensors)


def _version(tensor: Tensor) -> int:
    """The in-place counter, 0 for inference tensors: they have none."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """SAMPLES elements of each tensor, evenly spread, as bits: NaN equals itself there."""
    flat = [tensor.flatten() for tensor in tensors]  # views: parameters are contiguous
    pieces = [values[:: max(1, len(values) // SAMPLES)][:SAMPLES].float() for values in flat]
    return torch.cat(pieces).view(torch.int32)


def _siblings(loaded: LoadedModel) -> list[tuple[nn.Module, ...]]:
    """The body's plain linears in groups: those of one group read the same tensor, one after the other, always.

    Found by one small forward. A linear that it does not call (an expert) is alone.
    """
    modules = list(loaded.body.modules())
    inside = {part for module in modules for part in _parts(module)}
    candidates = [m for m in modules if (type(m) in (nn.Linear, Conv1D) and m not in inside) or merges(m)]
    candidates = [module for module in candidates if _untouched(module)]
    runs: list[list[nn.Module]] = []
    latest: list[tuple[Tensor, int]] = []
    odd: set[nn.Module] = set()

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != 1:
            odd.add(module)  # called by keyword: the replacement forwards take one positional argument
            return
        x = arguments[0]
        same = bool(latest) and latest[0][0] is x and latest[0][1] == _version(x)
        if same and module not in runs[-1] and _alike(runs[-1][0], module):
            runs[-1].append(module)
        else:
            runs.append([module])
        latest[:] = [(x, _version(x))]  # holds the tensor, so that no other can get its identity

    _trial(loaded, candidates, lambda module: module.register_forward_pre_hook(note))
    groups = list(dict.fromkeys(map(tuple, runs)))
    memberships = Counter(module for group in groups for module in group)
    merged = [g for g in groups if len(g) > 1 and all(memberships[m] == 1 and m not in odd for m in g)]
    merged = merged if _accepts_strided(loaded, merged) else []
    placed = odd.union(*merged)
    return merged + [(module,) for module in candidates if module not in placed]


def _alike(first: nn.Module, second: nn.Module) -> bool:
    same_type = _sources(first)[0].dtype == _sources(second)[0].dtype
    return type(_plain(first)) is type(_plain(second)) and same_type and _shape(first)[1] == _shape(second)[1]


def _accepts_strided(loaded: LoadedModel, groups: list[tuple[nn.Module, ...]]) -> bool:
    """Whether the body runs when siblings give columns of a wider tensor, which `view` may refuse."""

    def widen(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        wide = output.new_empty(*output.shape[:-1], 2 * output.shape[-1])
        return wide[..., : output.shape[-1]].copy_(output)

    try:
        _trial(loaded, [m for group in groups for m in group], lambda module: module.register_forward_hook(widen))
    except RuntimeError:  # what `view` raises; the same body ran without the hooks
        return False
    return True


@torch.no_grad()
def _trial(loaded: LoadedModel, modules: list[nn.Module], hook: Callable[[nn.Module], Any]) -> None:
    """One small forward of the body with a hook on each of `modules`. The count of attention calls stays."""
    positions_T = torch.arange(min(TRIAL_TOKENS, loaded.vocab_size), device=loaded.device)
    calls = loaded.attention.calls
    handles = [hook(module) for module in modules]
    try:
        with loaded.with_attention(PackedContext.make([positions_T.numel()], device=loaded.device)):
            loaded.hidden(positions_T, positions_T)
    finally:
        loaded.attention.calls = calls
        for handle in handles:
            handle.remove()
