"""A base in 4 bits: its numbers against NF4 by hand and a dense model, what is freed, what stays, what is refused."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from helpers_model import save_tiny, tiny_config, tiny_hf_model, tiny_model
from helpers_train import one_thread
from torch import Tensor, nn

from rhotrain.model import sources
from rhotrain.model.adapter import LoraSpec, merges
from rhotrain.model.attention import PackedContext
from rhotrain.model.fused import fuse_layers
from rhotrain.model.gguf_files import rebuild
from rhotrain.model.load import LoadedModel, LoadError, load_model, save_model
from rhotrain.model.offload import ParkedModel
from rhotrain.model.packed import PackedWeights
from rhotrain.model.quantized import (
    is_quantized,
    largest_dequantized,
    num_weights,
    quantize_linears,
    weight_bytes,
)
from rhotrain.train.memory_sketch import sketch_model
from rhotrain.train.variants import rounded_weights, using_weights

pytest.importorskip("peft")
functional: Any = pytest.importorskip("bitsandbytes.functional")

CPU = torch.device("cpu")
IDS = torch.arange(5, 17)
RANK4 = LoraSpec(rank=4)
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def hidden(loaded: LoadedModel) -> Tensor:
    with loaded.with_attention(PackedContext.make([len(IDS)])):
        return loaded.hidden(IDS, torch.arange(len(IDS)))


@torch.no_grad()
def logits(loaded: LoadedModel) -> Tensor:
    return loaded.head.logits(hidden(loaded))


def four_bit(model: nn.Module) -> dict[str, Any]:
    """The 4-bit layers by the names that their plain ones had."""
    found = {n.replace(".base_layer", ""): m for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"}
    return {name: m for name, m in found.items() if not hasattr(m, "lora_A")}


def dense(family: str, quantized: LoadedModel, **options: Any) -> LoadedModel:
    """The same model with the weights that bitsandbytes dequantises, in nn.Linear, under the same adapter."""
    plain = tiny_model(family, lora=RANK4, **WIDE, **options)
    modules = {n.replace(".base_layer", ""): m for n, m in plain.model.named_modules() if type(m) is nn.Linear}
    with torch.no_grad():
        for name, layer in four_bit(quantized.model).items():
            weight: Any = modules[name].weight
            weight.copy_(functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    return plain


# ---- numbers --------------------------------------------------------------------------------------------------------


def nf4() -> Tensor:
    """The 16 values by QLoRA's appendix E: quantiles of a normal distribution, 7 below zero, 8 above, scaled to 1."""
    offset, quantile = 1 - (1 / 32 + 1 / 30) / 2, NormalDist().inv_cdf
    below = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    above = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    code = torch.tensor([*below, 0.0, *above])
    return (code / code.max()).sort().values


@pytest.mark.parametrize("shape", [(64, 128), (40, 64), (3, 192), (96, 320)], ids=str)
def test_weights_are_the_nearest_of_sixteen_values_in_blocks_of_64(shape: tuple[int, int]) -> None:
    """As near as NF4 can be, but for the 8 bits of the block's largest weight: 0.9 % of it at most where measured."""
    torch.manual_seed(0)
    model = tiny_hf_model("llama", **WIDE)
    model.model.layers[0].mlp.up_proj = nn.Linear(shape[1], shape[0], bias=False)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantize_linears(model, CPU, spec="x")
    packed = model.model.layers[0].mlp.up_proj.weight
    stored = functional.dequantize_4bit(packed.data, packed.quant_state)
    blocks, largest = weight.view(-1, 64), weight.view(-1, 64).abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] - largest[..., None] * nf4()).abs().amin(-1)
    assert ((stored.view(-1, 64) - blocks).abs() <= nearest + 0.02 * largest).all()
    assert float((stored - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_logits_are_those_of_the_dequantized_weights(family: str) -> None:
    loaded = tiny_model(family, lora=RANK4, quantized=True, **WIDE)
    expected = logits(dense(family, loaded))
    assert len(four_bit(loaded.model)) == {"phi3": 8, "gemma2": 12}.get(family, 14)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    whole = logits(tiny_model(family, lora=RANK4, **WIDE))
    assert float((whole - expected).abs().max()) > 0.05, "and not of the whole ones"


def test_half_precision_computes_in_half_precision() -> None:
    loaded = tiny_model("qwen2", dtype=torch.bfloat16, lora=RANK4, quantized=True, probe=True, **WIDE)
    layers = four_bit(loaded.model).values()
    assert {layer.compute_dtype for layer in layers} == {torch.bfloat16} == {hidden(loaded).dtype}
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}, "the adapter"
    expected = logits(dense("qwen2", loaded, dtype=torch.bfloat16))
    assert float((logits(loaded) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_gradients_of_the_adapter_are_those_of_the_dense_model(checkpointing: bool) -> None:
    for family in ("llama", "gemma2"):
        options: dict[str, Any] = {"gradient_checkpointing": checkpointing}
        loaded = tiny_model(family, lora=RANK4, quantized=True, probe=True, **WIDE, **options)
        plain = dense(family, loaded, **options)
        for model in (loaded, plain):
            with model.with_attention(PackedContext.make([len(IDS)])):
                states = model.hidden(IDS, torch.arange(len(IDS)))
                model.head.logits(states).log_softmax(-1)[:-1].gather(1, IDS[1:, None]).sum().backward()
        truth = {n: p.grad for n, p in plain.model.named_parameters() if p.grad is not None}
        trained = {n: p.grad for n, p in loaded.model.named_parameters() if p.requires_grad}
        assert trained.keys() == truth.keys() and len(truth) == 28
        for name, gradient in trained.items():
            assert gradient is not None, name
            torch.testing.assert_close(gradient, truth[name], rtol=0, atol=1e-5 * float(truth[name].abs().max()))


def test_eval_mode_changes_nothing() -> None:
    """bitsandbytes lays the weight out anew there, for good, where the CPU multiplies bfloat16."""
    loaded = tiny_model("llama", lora=RANK4, quantized=True, **WIDE)
    before = logits(loaded)
    loaded.model.eval()
    assert torch.equal(logits(loaded), before)
    loaded.model.train()
    assert torch.equal(logits(loaded), before)
    hidden(loaded).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


# ---- beside everything else -----------------------------------------------------------------------------------------


def test_the_reference_is_the_quantized_base_and_without_an_adapter_nothing_is_trained(tmp_path: Path) -> None:
    base = str(save_tiny(tmp_path / "base", "llama", **WIDE))
    loaded = load_model(base, lora=RANK4, quantize_base="nf4")
    alone = load_model(base, quantize_base="nf4")
    assert torch.equal(logits(loaded), logits(alone)), "B starts at 0"
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.1)
    assert not torch.equal(logits(loaded), logits(alone)) and torch.equal(logits(loaded.base()), logits(alone))
    assert alone.parameters() == [] and is_quantized(alone.model)
    assert any(note.startswith("quantize_base: nf4 holds 14 linear layers, 73,728 weights") for note in loaded.notes)
    total = sum(p.numel() for p in load_model(base).parameters()) + sum(p.numel() for p in loaded.parameters())
    assert sum(map(num_weights, loaded.model.parameters())) == total
    assert any(f"of {total:,} parameters are trained" in note for note in loaded.notes)
    with pytest.raises(LoadError, match="its weights are in 4 bits"):
        save_model(alone, tmp_path / "no")


def test_an_adapter_is_saved_and_opened_bit_for_bit(tmp_path: Path) -> None:
    from peft import PeftConfig

    base = save_tiny(tmp_path / "base", "qwen2", **WIDE)
    loaded = load_model(str(base), lora=RANK4, quantize_base="nf4")
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.05)
    folder = save_model(loaded, tmp_path / "adapter")
    assert PeftConfig.from_pretrained(str(folder)).base_model_name_or_path == str(base.resolve())
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".jinja"}
    again = load_model(str(folder), quantize_base="nf4")
    assert torch.equal(logits(again), logits(loaded))
    assert not is_quantized(load_model(str(folder)).model), "the adapter runs over the whole base too"


def test_packed_weights_leave_4_bit_layers_alone() -> None:
    loaded = tiny_model("llama", lora=RANK4, quantized=True, **WIDE)
    assert loaded.adapter is not None and not any(map(merges, loaded.adapter.layers))
    assert {type(layer).__module__ for layer in loaded.adapter.layers} == {"peft.tuners.lora.bnb"}
    packed, applied = PackedWeights(loaded, min_elements=1), logits(loaded)
    if packed.why_not is not None:
        pytest.skip(packed.why_not)
    with torch.no_grad(), packed.using():
        torch.testing.assert_close(logits(loaded), applied, rtol=0, atol=1e-5 * float(applied.abs().max()))
        replaced = [type(m).__name__ for m in loaded.model.modules() if "forward" in vars(m)]
    assert set(replaced) <= {"Linear"}, "the adapter's own"


def test_fused_layers_leave_a_4_bit_mlp_plain() -> None:
    loaded = tiny_model("llama", lora=LoraSpec(rank=4, targets=("q_proj",)), quantized=True, **WIDE)
    before, done = logits(loaded), fuse_layers(loaded, "torch")
    assert {kind for _, kind, _ in done.fused} == {"norm", "rotary"}
    torch.testing.assert_close(logits(loaded), before, rtol=0, atol=1e-4)


def test_weights_that_are_tried_in_their_place_leave_4_bit_ones_out() -> None:
    loaded = tiny_model("llama", lora=RANK4, quantized=True, **WIDE)
    before, rounded = logits(loaded), rounded_weights(loaded)
    assert {value.dtype for value in rounded.values()} == {torch.bfloat16} and "lora_A" in " ".join(rounded)
    with using_weights(loaded, rounded, keep_dtype=True):
        assert hidden(loaded).dtype == torch.bfloat16
    with using_weights(loaded, rounded):
        assert 0 < float((logits(loaded) - before).abs().max()) < 1.0
    assert torch.equal(logits(loaded), before)


def test_a_resting_model_wakes_as_it_was() -> None:
    loaded = tiny_model("llama", quantized=True, **WIDE)
    before = logits(loaded)
    parked = ParkedModel(loaded.model, CPU)
    with parked.awake():
        assert torch.equal(logits(loaded), before)
    assert parked.nbytes == sum(p.nbytes for p in loaded.model.parameters()) + sum(
        b.nbytes for b in loaded.model.buffers()
    )


def test_a_gguf_file_is_quantized_like_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are dequantised by transformers into a plain model, which `read_weights` hands on."""
    base = save_tiny(tmp_path / "base", "llama", **WIDE)
    read = sources.read_weights

    def rebuilt(spec: str, source: str, dtype: torch.dtype, options: dict[str, str]) -> Any:
        model, notes = read(spec, source, dtype, options)
        return rebuild(model, dtype), notes

    expected = logits(load_model(str(base), quantize_base="nf4"))
    monkeypatch.setattr(sources, "read_weights", rebuilt)
    assert torch.equal(logits(load_model(str(base), quantize_base="nf4")), expected)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_every_weight_is_freed_before_the_next_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hf_model("llama", **WIDE)
    whole = [weakref.ref(m.weight) for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    alive: list[int] = []
    quantize = functional.quantize_4bit

    def counting(weight: Tensor, **options: Any) -> Any:
        alive.append(sum(reference() is not None for reference in whole))
        return quantize(weight, **options)

    monkeypatch.setattr(functional, "quantize_4bit", counting)
    quantize_linears(model, CPU, spec="x")
    assert alive == list(range(14, 0, -1))
    assert not any(reference() for reference in whole)


def test_a_weight_takes_four_bits_and_an_eighth_and_the_plan_knows() -> None:
    """Section 3 of the paper: 4 bits and 0.127 of scales. The tables of a layer are 1088 bytes."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    loaded = tiny_model("llama", lora=RANK4, quantized=True, **sizes)
    rest = sum(p.nbytes for p in loaded.model.parameters() if p.is_floating_point())
    count = sum(num_weights(p) for p in loaded.model.parameters() if not p.is_floating_point())
    assert weight_bytes(loaded.model) - rest == pytest.approx(count * (4 + 0.127) / 8, rel=0.005)
    sketched = sketch_model(
        "x", torch.float32, hf_config=tiny_config("llama", **sizes), lora=RANK4, quantize_base="nf4"
    )
    assert weight_bytes(sketched.model) == weight_bytes(loaded.model)
    assert largest_dequantized(sketched.model) == 4 * 1024 * 2048 and largest_dequantized(nn.Linear(2, 2)) == 0
    assert {p.device.type for p in sketched.model.parameters()} == {"meta"}


# ---- what stays, what is refused ------------------------------------------------------------------------------------


def test_layers_that_cannot_be_quantized_stay_and_are_named() -> None:
    loaded = tiny_model("llama", lora=RANK4, quantized=True, hidden_size=64, intermediate_size=48, probe=True)
    assert len(four_bit(loaded.model)) == 12
    odd = [n for n, p in loaded.model.named_parameters() if "down_proj.base_layer" in n and p.is_floating_point()]
    assert len(odd) == 2
    model = tiny_hf_model("llama", hidden_size=64, intermediate_size=48)
    notes = quantize_linears(model, CPU, spec="x")
    assert "2 linear layers stay as they are, inputs no multiple of 64 (model.layers.0.mlp.down_proj: 48)" in notes[1]
    experts = quantize_linears(tiny_hf_model("qwen3_moe", hidden_size=64), CPU, spec="x")
    assert any("4 tensors that hold all experts of a layer stay as they are" in note for note in experts)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "no layer to quantize in GPT2LMHeadModel: 8 Conv1D layers stay as they are"),
        ("llama", r"no layer to quantize in LlamaForCausalLM: 14 linear .* \(model.layers.0.self_attn.q_proj: 32\)"),
    ],
)
def test_models_without_a_layer_to_quantize(family: str, words: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", family)
    with pytest.raises(LoadError, match=words + ".* Leave quantize_base at none"):
        load_model(str(base), lora=RANK4, quantize_base="nf4")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(save_tiny(tmp_path / "base", "llama", **WIDE))
    with pytest.raises(LoadError, match="quantize_base: nf4 does not go with dtype float64"):
        load_model(base, dtype="float64", quantize_base="nf4")
    with pytest.raises(LoadError, match="gradient_checkpointing: nothing is trained in a model of 4-bit weights"):
        load_model(base, gradient_checkpointing=True, quantize_base="nf4")
    wrong: Any = "nf8"
    with pytest.raises(LoadError, match="quantize_base: 'nf8' is not one of none, nf4"):
        load_model(base, quantize_base=wrong)
    monkeypatch.setattr("rhotrain.model.quantized.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"quantize_base: nf4 needs bitsandbytes.*pip install 'rhotrain\[optim\]'"):
        load_model(base, lora=RANK4, quantize_base="nf4")
