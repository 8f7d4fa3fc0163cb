"""What may be fused: modules that only look like RMSNorms, gated MLPs and rotary attention stay plain."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_model import tiny_model
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from rhotrain.model.fused import FusedLayers, _find, _gate_method, _norm_method, fuse_layers
from rhotrain.model.fused_proof import Gate

LLAMA = {"norm": 5, "gate": 2, "rotary": 2}


def count(fused: FusedLayers) -> dict[str, int]:
    kinds = [kind for _, kind, _ in fused.fused]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


class Centred(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class EpsOutside(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        rms = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (rms + self.variance_epsilon)


class SquaredRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * super().forward(hidden_states)


class GatedRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out = super().forward(hidden_states)
        return out if gate is None else out * F.silu(gate)


class Swapped(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Clamped(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=0.5))


class Scaled(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Dropping(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.0, self.training))


class Twice(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(2 * x))


Centred.__name__, EpsOutside.__name__ = "CentredRMSNorm", "EpsOutsideRMSNorm"


@pytest.mark.parametrize("cls", [Centred, EpsOutside, SquaredRMSNorm, GatedRMSNorm])
def test_look_alike_norms_stay_plain(cls: type) -> None:
    loaded = tiny_model("llama")
    norm: Any = loaded.body.norm
    nn.init.ones_(norm.weight)  # a square of ones is no square
    norm.__class__ = cls
    fused = fuse_layers(loaded, "torch")
    assert "model.norm" in dict(fused.plain) and "forward" not in vars(norm)
    assert count(fused) == {**LLAMA, "norm": 4}


@pytest.mark.parametrize("cls", [Swapped, Clamped, Scaled, Dropping, Twice])
def test_look_alike_mlps_stay_plain(cls: type) -> None:
    loaded = tiny_model("llama")
    mlp = loaded.body.layers[1].mlp
    mlp.__class__ = cls
    fused = fuse_layers(loaded, "torch")
    assert [name for name, _ in fused.plain] == ["model.layers.1.mlp"] and "forward" not in vars(mlp)
    assert count(fused) == {**LLAMA, "gate": 1}


def test_other_activations_and_hooks_stay_plain() -> None:
    loaded = tiny_model("llama", hidden_act="relu")
    assert "gate" not in count(fuse_layers(loaded, "torch"))
    loaded = tiny_model("llama")
    loaded.body.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    assert count(fuse_layers(loaded, "torch"))["gate"] == 1


def test_gelu_is_not_taken_for_silu() -> None:
    """In bfloat16 they are within a few roundings of each other on small numbers."""
    for seed in (0, 1):
        for dtype in (torch.float32, torch.bfloat16):
            loaded = tiny_model("gemma2", seed, dtype=dtype)
            gates = [c for c in _find(loaded)[0] if isinstance(c, Gate)]
            assert [gate.activation for gate in gates] == ["gelu_tanh"] * 2
    gates = [c for c in _find(tiny_model("phi3", dtype=torch.bfloat16))[0] if isinstance(c, Gate)]
    assert [gate.activation for gate in gates] == ["silu"] * 2


@pytest.mark.parametrize("rotate", ["interleaved", "backwards", "shifted"])
def test_look_alike_rotary_stays_plain(rotate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            if rotate == "interleaved":
                turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            elif rotate == "backwards":
                turned = -modeling_llama.rotate_half(x)
            else:
                turned = modeling_llama.rotate_half(x) + 1e-3
            return x * cos[:, None] + turned * sin[:, None]

        return turn(q), turn(k)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    fused = fuse_layers(tiny_model("llama"), "torch")
    assert "rotary" not in count(fused) and len(fused.plain) == 2


def test_partial_rotary_stays_plain() -> None:
    fused = fuse_layers(tiny_model("phi3", partial_rotary_factor=0.5), "torch")
    assert "rotary" not in count(fused) and count(fused)["norm"] == 5


def test_float64_models_stay_plain() -> None:
    fused = fuse_layers(tiny_model("llama", dtype=torch.float64), "torch")
    assert not fused.fused and "float64" in fused.describe()


def test_foreign_dtypes_take_the_plain_forward() -> None:
    """Only one dtype was proven; Liger's kernels would round float64 to float32."""

    def never(*_: Tensor) -> Tensor:
        raise AssertionError("the fused operation was called")

    layer = tiny_model("llama").body.layers[0].double()
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    for module, method in ((layer.mlp, _gate_method), (layer.input_layernorm, _norm_method)):
        plain: Any = type(module).forward
        forward: Any = method(plain, never, torch.float32)
        assert torch.equal(forward(module, x), module(x))
        with pytest.raises(AssertionError, match="was called"):
            forward(module.float(), x.float())
