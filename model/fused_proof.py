"""Which modules may be fused: those that are proven, one by one, to compute the formula of fused_ops.py.

A name is only a reason to look. A candidate's own forward is run on random numbers and must be the formula to the last
digits: in float32 for norms, which round to it inside, in float64 for the rest, whatever the model's dtype (a bfloat16
gemma2's gelu passed for silu). Then its fused form is compared with it in the model's dtype, both against the formula
in float64, and may be off by no more than twice as much. What fails stays plain, with the reason. float64 models stay
plain.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rhotrain.model.fused_ops import ACTIVATIONS, Activation

EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest error of the formula itself, relative to the largest result: measured at most 2e-7 and 3e-16. The nearest
wrong formulas (eps outside of the root, silu for gelu) are off by 1e-2 and more."""

ROUNDINGS = 2
"""Root mean square error of a plain layer in its own dtype, in units of that dtype's epsilon; measured at most 0.6."""

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")
ROTARY_NAME = "apply_rotary_pos_emb"


class NotFusable(Exception):
    """Why a candidate stays plain; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A proven RMSNorm: its formula has this eps, and `offset` + weight as the scale."""

    name: str
    module: nn.Module
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Gate:
    """A proven MLP: down_proj(act(gate) * up). `projections` are the modules that read x: two, or phi3's single one
    whose halves are gate and up."""

    name: str
    module: nn.Module
    projections: tuple[str, ...]
    activation: Activation


@dataclass(frozen=True, slots=True)
class Rotary:
    """An attention module whose forward calls the global function `apply_rotary_pos_emb` (`plain`), proven to be the
    formula on what the module really gave it (`call`: q, k, cos, sin)."""

    name: str
    module: nn.Module
    plain: Callable[..., Any]
    call: tuple[Tensor, Tensor, Tensor, Tensor]


Candidate = Norm | Gate | Rotary


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||; infinite for another shape or a value that is not finite."""
    if value.shape != truth.shape or not bool(torch.isfinite(value).all()):
        return float("inf")
    return float((value.double() - truth).norm() / truth.norm().clamp(min=1e-300))


def check_fused(fused: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Raises NotFusable unless plain is the formula but for rounding, and fused has its dtype and at most twice its
    error, half a rounding granted."""
    epsilon = torch.finfo(plain.dtype).eps
    plain_error = relative_error(plain, truth)
    if not plain_error <= ROUNDINGS * epsilon:
        raise NotFusable(f"in {plain.dtype} it is off by {plain_error:.1e} of the result")
    if fused.dtype != plain.dtype:
        raise NotFusable(f"its fused form gives {fused.dtype}, the plain one {plain.dtype}")
    error, allowed = relative_error(fused, truth), 2 * plain_error + epsilon / 2
    if not error <= allowed:
        raise NotFusable(f"its fused form is off by {error:.1e} of the result (allowed {allowed:.1e})")


def _random(*shape: int, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """The same normal numbers on every device, rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _is_formula(plain: Any, truth: Tensor) -> bool:
    if not isinstance(plain, Tensor) or plain.dtype not in EXACT or plain.shape != truth.shape:
        return False
    return bool((plain - truth).abs().max() <= EXACT[plain.dtype] * truth.abs().max())


def _takes_one_tensor(module: nn.Module) -> None:
    """Raises NotFusable for a forward that was replaced, takes more than one argument, or knows of dropout: a
    probability of 0 would hide that."""
    if "forward" in vars(module):
        raise NotFusable("its forward was replaced already")
    forward = type(module).forward
    if len(inspect.signature(forward).parameters) != 2:
        raise NotFusable("its forward takes more than one argument")
    if any("drop" in name for name in inspect.unwrap(forward).__code__.co_names):
        raise NotFusable("its forward knows of dropout")


# ---- norm -----------------------------------------------------------------------------------------------------------


def prove_norm(name: str, module: nn.Module) -> Norm:
    """A module called *RMSNorm with one parameter, `weight` [H], and an eps. Raises NotFusable with the reason."""
    _takes_one_tensor(module)
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.dim() != 1 or len(list(module.parameters())) != 1 or list(module.buffers()):
        raise NotFusable("it holds something else than one weight vector")
    found = [value for value in (getattr(module, key, None) for key in EPS_NAMES) if isinstance(value, float)]
    if len(found) != 1:
        raise NotFusable(f"its eps is not one of {', '.join(EPS_NAMES)}")
    eps = found[0]
    for offset in (0.0, 1.0):
        if all(_is_formula(plain, truth) for plain, truth, *_ in norm_trials(module, eps, offset, torch.float32)):
            return Norm(name, module, eps, offset)
    raise NotFusable("it computes something else than x * rsqrt(mean(x^2) + eps) * (0 or 1 + weight)")


def norm_trials(
    module: nn.Module, eps: float, offset: float, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(plain, truth float64, x, weight) on random x and weights, at x of size 1 and of size sqrt(eps), where eps shows.
    The module's own weights would prove little: ones hide a square. They are not touched."""
    own: Any = module.weight
    width, options = own.numel(), {"device": own.device, "dtype": dtype}
    weight = _random(width, **options, seed=1)
    trials = []
    for size in (1.0, eps**0.5):
        x = _random(4, width, **options, seed=2) * size
        plain = torch.func.functional_call(module, {"weight": weight}, (x,))
        x64 = x.double()
        truth = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.double())
        trials.append((plain, truth, x, weight))
    return trials


# ---- gate -----------------------------------------------------------------------------------------------------------


def projections_of(module: nn.Module) -> tuple[str, ...] | None:
    """Names of the projections of what looks like a gated MLP."""
    children = dict(module.named_children())
    for names in (("gate_proj", "up_proj"), ("gate_up_proj",)):
        if all(name in children for name in (*names, "down_proj")):
            return names
    return None


def prove_gate(name: str, module: nn.Module) -> Gate:
    """A module with gate_proj and up_proj, or gate_up_proj, and with down_proj and an activation, nothing else. Its
    plain forward is run and watched: what goes into down_proj, and that nothing comes after it. Raises NotFusable."""
    _takes_one_tensor(module)
    names = projections_of(module)
    assert names is not None
    extra = {key for key, _ in module.named_children()} - {*names, "down_proj", *ACTIVATION_NAMES}
    if extra or not all(isinstance(module.get_submodule(key), nn.Linear) for key in (*names, "down_proj")):
        raise NotFusable(f"it holds something else than linear projections: {', '.join(sorted(extra)) or names}")
    if not all(p.is_floating_point() for p in module.parameters()):
        raise NotFusable("its projections are in 4 bits")
    gate, up, product = gate_trial(module, names, torch.float64)
    for activation, act in ACTIVATIONS.items():
        if _is_formula(product, act(gate) * up):
            return Gate(name, module, names, activation)
    raise NotFusable(f"it computes something else than down_proj(act(gate) * up), act one of {', '.join(ACTIVATIONS)}")


def gate_trial(module: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, what down_proj is given) of one plain forward in which the projections return random numbers of size 2
    and of this dtype. Raises NotFusable when they are not called on the input itself, or the result is not down_proj's.
    """
    first: Any = module.get_submodule(names[0])
    device, own = first.weight.device, first.weight.dtype
    x = _random(4, first.in_features, device=device, dtype=own, seed=3)
    read: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def replace(key: str, _: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        read[key] = given[0]
        outputs[key] = 2 * _random(*out.shape, device=device, dtype=dtype, seed=4 + len(outputs))
        return outputs[key]

    def note(_: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        outputs["down_proj"] = out

    def narrow(_: nn.Module, given: tuple[Any, ...]) -> Tensor:
        read["down_proj"] = given[0]
        return given[0].to(own)

    down = module.get_submodule("down_proj")
    parts = [module.get_submodule(key) for key in names]
    if any(part._forward_hooks or part._forward_pre_hooks for part in (*parts, down)):
        raise NotFusable("its projections have hooks")
    handles = [down.register_forward_pre_hook(narrow), down.register_forward_hook(note)]
    handles += [part.register_forward_hook(partial(replace, key)) for key, part in zip(names, parts)]
    try:
        result = module(x)
    finally:
        for handle in handles:
            handle.remove()
    if set(read) != {*names, "down_proj"} or any(read[key] is not x for key in names):
        raise NotFusable(f"{' and '.join(names)} are not called on its input")
    if not isinstance(result, Tensor) or not torch.equal(result, outputs["down_proj"]):
        raise NotFusable("its result is not that of down_proj")
    gate, up = [outputs[key] for key in names] if len(names) == 2 else outputs[names[0]].chunk(2, -1)
    return gate, up, read["down_proj"]


# ---- rotary ---------------------------------------------------------------------------------------------------------


def global_of(function: Any, name: str) -> Any:
    """What `function`, or what it wraps, finds under the global `name`; None where it does not look for it."""
    while isinstance(function, FunctionType):
        if name in function.__code__.co_names:
            return function.__globals__.get(name)
        function = getattr(function, "__wrapped__", None)
    return None


def with_globals(function: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """A copy of `function` that finds `values` where the original finds the globals of these names. Decorators that
    keep what they wrap in a closure (functools.wraps) are copied around it. Nobody else's globals change.

    Raises NotFusable where a decorator keeps it elsewhere.
    """
    inner = getattr(function, "__wrapped__", None)
    module_globals, closure = function.__globals__, function.__closure__
    if any(name in function.__code__.co_names for name in values):
        module_globals = {**module_globals, **values}
    else:
        cells = closure or ()
        if not isinstance(inner, FunctionType) or sum(_holds(cell, inner) for cell in cells) != 1:
            raise NotFusable("its forward is wrapped by a decorator that cannot be copied")
        copy = with_globals(inner, values)
        closure = tuple(CellType(copy) if _holds(cell, inner) else cell for cell in cells)
    own = FunctionType(function.__code__, module_globals, function.__name__, function.__defaults__, closure)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    return own


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # a cell that is not filled yet
        return False


def prove_rotary(name: str, module: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Rotary:
    """`calls`: what the module gave to `apply_rotary_pos_emb` in one forward. Raises NotFusable unless that was once
    (q, k, cos, sin) with whole heads rotated and cos and sin repeating, and the function is the formula."""
    if len(calls) != 1 or len(calls[0][0]) != 4 or calls[0][1]:
        raise NotFusable(f"it does not call {ROTARY_NAME} once with q, k, cos and sin")
    q, k, cos, sin = call = calls[0][0]
    if not rotates_whole_heads(q, k, cos, sin):
        raise NotFusable(f"q {tuple(q.shape)} and cos {tuple(cos.shape)} are not [1, heads, T, D] and [1, T, D]")
    half = cos.shape[-1] // 2
    if not all(torch.equal(part[..., :half], part[..., half:]) for part in (cos, sin)):
        raise NotFusable("its cos and sin do not repeat after half of a head")
    function = global_of(type(module).forward, ROTARY_NAME)
    exact: Any = tuple(part.double() for part in call)
    for plain, truth in zip(function(*exact), rotary_truth(*exact)):
        if not _is_formula(plain, truth):
            raise NotFusable("it rotates in another way than x * cos + rotate_half(x) * sin")
    return Rotary(name, module, function, call)


def rotates_whole_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True for q, k [1, heads, T, D] and cos, sin [1, T, D] of one dtype: what the fused operations are proven for."""
    shape = (1, q.shape[-2], q.shape[-1])
    return q.dim() == k.dim() == 4 and cos.shape == sin.shape == shape and q.dtype is k.dtype is cos.dtype is sin.dtype


def rotary_truth(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The formula in float64."""

    def turn(x: Tensor) -> Tensor:
        low, high = x.double().chunk(2, -1)
        cos64, sin64 = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((low, high), -1) * cos64 + torch.cat((-high, low), -1) * sin64

    return turn(q), turn(k)
