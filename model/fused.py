"""Fused layers: the RMSNorms, gated MLPs and rotary functions of a loaded Hugging Face model in fewer operations.

A decoder layer of transformers is 37 to 53 small operations besides attention. No model code is written and no class or
module of transformers is changed: instances get a `forward` of their own, and only those that are proven to compute the
formula (fused_proof.py). Rollout and training run the very same functions, so the ratio sees no difference.

The residual addition before a norm stays an operation of its own: it is a line inside the decoder layer's forward, and
fusing it would take a forward of ours per family.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rhotrain.model.attention import PackedContext
from rhotrain.model.fused_ops import (
    ACTIVATIONS,
    IMPLEMENTATIONS,
    GateOp,
    Implementation,
    NormOp,
    RotaryOp,
    gate_op,
    norm_op,
    rotary_op,
    why_unavailable,
)
from rhotrain.model.fused_proof import (
    ROTARY_NAME,
    Candidate,
    Gate,
    Norm,
    NotFusable,
    Rotary,
    check_fused,
    gate_trial,
    global_of,
    norm_trials,
    projections_of,
    prove_gate,
    prove_norm,
    prove_rotary,
    rotary_truth,
    rotates_whole_heads,
    with_globals,
)
from rhotrain.model.fused_timing import Timing, fastest, time_all
from rhotrain.model.loaded import LoadedModel, LoadError

Kind = Literal["norm", "gate", "rotary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
TRIAL_TOKENS = 8
"""Length of the sequence on which the rotary function is watched."""


@dataclass(frozen=True)
class FusedLayers:
    """What `fuse_layers` did.

    chosen: the implementation per kind, `plain` included. fused: (module's name, kind, implementation).
    plain: (module's name, reason) of the candidates that were left as they are. timings: what `auto` measured.
    """

    asked: str
    chosen: Mapping[Kind, str]
    fused: tuple[tuple[str, Kind, Implementation], ...] = ()
    plain: tuple[tuple[str, str], ...] = ()
    timings: tuple[Timing, ...] = ()
    _modules: tuple[nn.Module, ...] = field(default=(), repr=False)

    @property
    def spec(self) -> str:
        """`norm=torch,gate=torch,rotary=plain`: asked for that, `fuse_layers` does the same again without measuring.
        A run that is resumed must, or it would not be the same run bit for bit."""
        return ",".join(f"{kind}={self.chosen[kind]}" for kind in KINDS)

    def describe(self) -> str:
        """For the log: what runs fused, what `auto` measured, what stays plain and why."""
        counts = Counter((kind, implementation) for _, kind, implementation in self.fused)
        parts = [f"{count} {kind} by {implementation}" for (kind, implementation), count in sorted(counts.items())]
        text = f"fused layers ({self.asked}): {', '.join(parts) or 'none'}"
        if self.timings:
            text += "; measured " + ", ".join(str(timing) for timing in self.timings)
        reasons = Counter(reason for _, reason in self.plain)
        return "; ".join([text, *(f"{count} plain: {reason}" for reason, count in sorted(reasons.items()))])

    def undo(self) -> None:
        """Every module that was fused has its class's forward again: the plain layers, bit for bit."""
        for module in self._modules:
            vars(module).pop("forward", None)


def fuse_layers(loaded: LoadedModel, how: str = "auto") -> FusedLayers:
    """Fuse what can be proven. Call it once, after the model is on its device and before the load-time probe.

    how: `off`; `torch`, `liger` or `compile` for all kinds; `auto`, the fastest of those that are there, measured (on a
    CPU without torch.compile, which takes 20 s there and loses); or a `FusedLayers.spec`.
    The fused forwards are differentiable once, in train and eval mode and under checkpointing; copies of the model
    (copy.deepcopy) are fused too; parameters, their names and everything that is saved stay as they are. Tensors of
    another dtype than the model's take the plain forward. A gated MLP calls its projections with the same x, one after
    the other, and may write into what gate_proj returns when autograd is off.
    Raises LoadError for an unknown `how`, and for an implementation that is asked for by name and is not there.
    """
    wanted = _parse(loaded, how)
    if loaded.dtype not in HALF_AND_SINGLE or set(wanted.values()) == {"plain"}:
        reasons = () if loaded.dtype in HALF_AND_SINGLE else ((loaded.spec, f"{loaded.dtype} models stay plain"),)
        unfused: dict[Kind, str] = dict.fromkeys(KINDS, "plain")
        return FusedLayers(how, unfused, plain=reasons)
    with torch.no_grad():
        candidates, plain = _find(loaded)
    timings: tuple[Timing, ...] = ()
    if "auto" in wanted.values():
        timings = time_all(candidates, _worth_timing(loaded.device), loaded.device)
        for kind in KINDS:
            wanted[kind] = fastest(kind, timings)
    with torch.no_grad():
        fused, failed = _bind(candidates, wanted)
    present = {kind for _, kind, _ in fused}
    chosen: dict[Kind, str] = {kind: wanted[kind] if kind in present else "plain" for kind in KINDS}
    return FusedLayers(
        asked=how,
        chosen=chosen,
        fused=tuple((candidate.name, kind, implementation) for candidate, kind, implementation in fused),
        plain=tuple(plain + failed),
        timings=timings,
        _modules=tuple(candidate.module for candidate, _, _ in fused),
    )


def _parse(loaded: LoadedModel, how: str) -> dict[Kind, str]:
    """The choice per kind: an implementation that is available, `plain`, or `auto`."""
    names: dict[str, str] = {"off": "plain", "auto": "auto", **{name: name for name in IMPLEMENTATIONS}}
    if how in names:
        wanted: dict[Kind, str] = dict.fromkeys(KINDS, names[how])
    else:
        pairs = dict(part.split("=", 1) for part in how.split(",") if "=" in part)
        if set(pairs) != set(KINDS) or not set(pairs.values()) <= {"plain", *IMPLEMENTATIONS}:
            raise LoadError(f"{loaded.spec}: fused_layers {how!r} is unknown; need one of {', '.join(names)}")
        wanted = {kind: pairs[kind] for kind in KINDS}
    for implementation in IMPLEMENTATIONS:
        reason = why_unavailable(implementation, loaded.device) if implementation in wanted.values() else None
        if reason:
            raise LoadError(f"{loaded.spec}: fused_layers {how!r} cannot be had: {reason}; take 'auto' or 'off'")
    return wanted


def _worth_timing(device: torch.device) -> list[Implementation]:
    names: list[Implementation] = [name for name in IMPLEMENTATIONS if why_unavailable(name, device) is None]
    return names if device.type == "cuda" else [name for name in names if name == "torch"]


# ---- finding --------------------------------------------------------------------------------------------------------


def _kind(candidate: Candidate) -> Kind:
    return {Norm: "norm", Gate: "gate", Rotary: "rotary"}[type(candidate)]  # type: ignore[return-value]


def _find(loaded: LoadedModel) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """What is proven, and (name, reason) of what looked like it and is not."""
    found: list[Candidate] = []
    plain: list[tuple[str, str]] = []

    def take(name: str, prove: Callable[[], Candidate]) -> None:
        try:
            found.append(prove())
        except NotFusable as reason:
            plain.append((name, str(reason)))

    calls = _rotary_calls(loaded, plain)
    for name, module in loaded.model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            take(name, lambda name=name, module=module: prove_norm(name, module))  # type: ignore[misc]
        elif projections_of(module):
            take(name, lambda name=name, module=module: prove_gate(name, module))  # type: ignore[misc]
        elif module in calls:
            take(name, lambda name=name, module=module: prove_rotary(name, module, calls[module]))  # type: ignore[misc]
    return found, plain


def _rotary_calls(loaded: LoadedModel, plain: list[tuple[str, str]]) -> dict[nn.Module, list[Any]]:
    """What each attention module gives to its rotary function: one small forward with a watcher in its place."""
    calls: dict[nn.Module, list[Any]] = {}
    try:
        for name, module in loaded.model.named_modules():
            function = global_of(type(module).forward, ROTARY_NAME)
            if function is None:
                continue
            if "forward" in vars(module):
                plain.append((name, "its forward was replaced already"))
                continue
            given = calls.setdefault(module, [])

            def watch(*args: Any, _given: list[Any] = given, _function: Any = function, **kwargs: Any) -> Any:
                _given.append((args, kwargs))
                return _function(*args, **kwargs)

            try:
                own: Any = type(module).forward
                _replace(module, with_globals(own, {ROTARY_NAME: watch}))
            except NotFusable as reason:
                plain.append((name, str(reason)))
                del calls[module]
        if calls:
            _forward(loaded)
    finally:
        for module in calls:
            vars(module).pop("forward", None)
    return calls


def _forward(loaded: LoadedModel) -> None:
    """One small forward of the body; the count of attention calls stays."""
    positions_T = torch.arange(min(TRIAL_TOKENS, loaded.vocab_size), device=loaded.device)
    before = loaded.attention.calls
    with loaded.with_attention(PackedContext.make([positions_T.numel()], device=loaded.device)):
        loaded.hidden(positions_T, positions_T)
    loaded.attention.calls = before


# ---- binding --------------------------------------------------------------------------------------------------------


def _bind(
    candidates: list[Candidate], wanted: Mapping[Kind, str]
) -> tuple[list[tuple[Candidate, Kind, Implementation]], list[tuple[str, str]]]:
    """Prove each candidate's fused form and put it in. Returns what was fused, and (name, reason) of what was not."""
    fused: list[tuple[Candidate, Kind, Implementation]] = []
    failed: list[tuple[str, str]] = []
    copies: dict[Any, FunctionType] = {}
    for candidate in candidates:
        kind = _kind(candidate)
        choice = wanted[kind]
        if choice == "plain":
            continue
        implementation: Implementation = choice  # type: ignore[assignment]
        try:
            if isinstance(candidate, Norm):
                forward = _norm_forward(candidate, implementation)
            elif isinstance(candidate, Gate):
                forward = _gate_forward(candidate, implementation)
            else:
                forward = _rotary_forward(candidate, implementation, copies)
        except NotFusable as reason:
            failed.append((candidate.name, f"{implementation}: {reason}"))
            continue
        _replace(candidate.module, forward)
        fused.append((candidate, kind, implementation))
    return fused, failed


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """A bound method, so that copy.deepcopy binds the copy's to the copy."""
    vars(module)["forward"] = MethodType(forward, module)


def _norm_forward(norm: Norm, implementation: Implementation) -> Callable[..., Tensor]:
    weight: Any = norm.module.weight
    op = norm_op(implementation, size=weight.numel(), eps=norm.eps, offset=norm.offset, device=weight.device)
    for plain, truth, x, trial_weight in norm_trials(norm.module, norm.eps, norm.offset, weight.dtype):
        check_fused(op(x, trial_weight), plain, truth)
    return _norm_method(type(norm.module).forward, op, weight.dtype)


def _norm_method(plain: Callable[..., Any], op: NormOp, dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        return op(x, weight) if x.dtype is dtype and weight.dtype is dtype else plain(self, x)

    return forward


def _gate_forward(gate: Gate, implementation: Implementation) -> Callable[..., Tensor]:
    op = gate_op(implementation, activation=gate.activation)
    down: Any = gate.module.down_proj
    left, up, plain = gate_trial(gate.module, gate.projections, down.weight.dtype)
    truth = ACTIVATIONS[gate.activation](left.double()) * up.double()
    check_fused(op(left.clone(), up), plain, truth)
    method = _gate_method if len(gate.projections) == 2 else _halves_method
    return method(type(gate.module).forward, op, left.dtype)


def _gate_method(plain: Callable[..., Any], op: GateOp, dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype is not dtype:
            return plain(self, x)
        return self.down_proj(op(self.gate_proj(x), self.up_proj(x)))

    return forward


def _halves_method(plain: Callable[..., Any], op: GateOp, dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype is not dtype:
            return plain(self, x)
        return self.down_proj(op(*self.gate_up_proj(x).chunk(2, -1)))

    return forward


def _rotary_forward(
    rotary: Rotary, implementation: Implementation, copies: dict[Any, FunctionType]
) -> Callable[..., Any]:
    """`copies`: one copy of each class's forward is enough, and one function for all layers of a kind."""
    op = rotary_op(implementation)
    q, k, cos, sin = rotary.call
    turned = q.roll(1, -1), k.roll(1, -2), cos.roll(1, -1) * 1.25, sin.roll(1, -1) * 1.25  # yarn scales cos and sin
    for call in (rotary.call, turned):
        plain, truth = rotary.plain(*call), rotary_truth(*call)
        for part in zip(op(call[0].clone(), call[1].clone(), *call[2:]), plain, truth):
            check_fused(*part)
    key = type(rotary.module), q.dtype
    if key not in copies:
        function = _rotary_function(rotary.plain, op, q.dtype)
        own: Any = type(rotary.module).forward
        copies[key] = with_globals(own, {ROTARY_NAME: function})
    return copies[key]


def _rotary_function(plain: Callable[..., Any], op: RotaryOp, dtype: torch.dtype) -> Callable[..., Any]:
    def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.dtype is not dtype or not rotates_whole_heads(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **kwargs)
        return op(q, k, cos, sin)

    return apply_rotary
