"""LoRA adapters: PEFT's files in and out, the base as reference, packed weights that are the sum, what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import save_tiny, tiny_model
from helpers_train import one_thread
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rhotrain.model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraSpec, merged_weight, merges
from rhotrain.model.attention import PackedContext
from rhotrain.model.fused import fuse_layers
from rhotrain.model.load import LoadedModel, LoadError, load_model, save_model
from rhotrain.model.packed import PackedWeights

pytest.importorskip("peft")

IDS = torch.arange(5, 17)
RANK4 = LoraSpec(rank=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def logits(loaded: LoadedModel) -> Tensor:
    with torch.no_grad(), loaded.with_attention(PackedContext.make([len(IDS)], device=loaded.device)):
        return loaded.head.logits(loaded.hidden(IDS, torch.arange(len(IDS))))


def randomise(loaded: LoadedModel, std: float = 0.2) -> None:
    assert loaded.adapter is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in loaded.adapter.layers:
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", "llama")


# ---- in and out -----------------------------------------------------------------------------------------------------


def test_before_the_first_step_the_policy_is_the_base_and_only_the_adapter_is_trained(base: Path) -> None:
    plain, loaded = load_model(str(base)), load_model(str(base), lora=RANK4)
    assert torch.equal(logits(loaded), logits(plain))
    trained = {name for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)  # seven linears in two layers
    assert {p.data_ptr() for p in loaded.parameters()} == {
        p.data_ptr() for name, p in loaded.model.named_parameters() if name in trained
    }
    assert any("LoRA: rank 4, alpha 8, 14 modules" in note for note in loaded.notes)


def test_peft_opens_what_we_save_and_so_do_we(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    loaded = load_model(str(base), lora=LoraSpec(rank=3, alpha=5.0, targets=("q_proj", "down_proj")))
    randomise(loaded)
    folder = save_model(loaded, tmp_path / "adapter")
    stored = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert stored["base_model_name_or_path"] == str(base.resolve()) and stored["r"] == 3 and stored["lora_alpha"] == 5
    assert not (folder / "config.json").exists() and (folder / "tokenizer_config.json").exists()
    theirs: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
    torch.testing.assert_close(logits(loaded)[:, :77], expected[:, :77], rtol=0, atol=2e-5)
    again = load_model(str(folder))
    assert torch.equal(logits(again), logits(loaded)), "bit for bit"
    assert save_model(again, folder) == folder, "an adapter's folder is replaced as a whole"
    assert load_file(folder / ADAPTER_WEIGHTS).keys() == {
        f"base_model.model.model.layers.{i}.{part}.lora_{x}.weight"
        for i in range(2)
        for part in ("self_attn.q_proj", "mlp.down_proj")
        for x in "AB"
    }


def test_we_open_what_peft_saves(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=7, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
    loaded = load_model(str(tmp_path / "theirs"))
    torch.testing.assert_close(logits(loaded)[:, :77], expected[:, :77], rtol=0, atol=2e-5)
    assert all(".lora_" in n for n, p in loaded.model.named_parameters() if p.requires_grad) and loaded.parameters()


def test_the_base_view_is_the_base_and_leaves_no_trace(base: Path) -> None:
    plain, loaded = load_model(str(base)), load_model(str(base), lora=RANK4)
    randomise(loaded)
    own = logits(loaded)
    assert float((own - logits(plain)).abs().max()) > 0.1
    reference = loaded.base()
    assert torch.equal(logits(reference), logits(plain))
    assert torch.equal(logits(loaded), own) and len(loaded.parameters()) == 28
    with pytest.raises(RuntimeError, match="stop"), reference.with_attention(PackedContext.make([1])):
        raise RuntimeError("stop")
    assert torch.equal(logits(loaded), own), "an error inside switches it on again"
    with pytest.raises(LoadError, match="has no adapter"):
        plain.base()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi3"])
def test_an_adapter_passes_the_probe_and_is_float32_over_half_precision(family: str) -> None:
    loaded = tiny_model(family, dtype=torch.bfloat16, lora=RANK4, probe=True, gradient_checkpointing=True)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.get_output_embeddings().weight.requires_grad is False  # type: ignore[operator]


def test_fused_layers_run_the_adapter() -> None:
    """A gated MLP under an adapter stays plain: what is fused is proven for plain projections only."""
    plain, fused = (tiny_model("llama", lora=RANK4) for _ in range(2))
    done = fuse_layers(fused, "torch")
    assert {kind for _, kind, _ in done.fused} == {"norm", "rotary"}
    torch.testing.assert_close(logits(fused), logits(plain), rtol=0, atol=1e-4)
    assert float((logits(fused.base()) - logits(fused)).abs().max()) > 0.1


def test_experts_in_one_tensor_are_named_as_not_adapted() -> None:
    loaded = tiny_model("qwen3_moe", lora=RANK4)
    assert any("hold all experts of a layer carry no adapter" in note for note in loaded.notes)


# ---- packed weights -------------------------------------------------------------------------------------------------


def hidden(loaded: LoadedModel) -> Tensor:
    with torch.no_grad(), loaded.with_attention(PackedContext.make([len(IDS)], device=loaded.device)):
        return loaded.hidden(IDS, torch.arange(len(IDS)))


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "up_proj")], ids="+".join)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_weights_are_the_sum(family: str, targets: tuple[str, ...]) -> None:
    loaded = tiny_model(family, lora=LoraSpec(rank=4, targets=targets))
    assert loaded.adapter is not None and all(merges(layer) for layer in loaded.adapter.layers)
    packed, applied = PackedWeights(loaded, min_elements=1), hidden(loaded)
    if packed.why_not is not None:
        pytest.skip(packed.why_not)
    with torch.no_grad(), packed.using():
        torch.testing.assert_close(hidden(loaded), applied, rtol=0, atol=5e-5 * float(applied.abs().max()))
    inner = [n for n, m in loaded.model.named_modules() if "forward" in vars(m)]
    assert inner == [], "nothing stays replaced"
    assert packed.packs == 1
    with torch.no_grad(), packed.using():
        hidden(loaded)
    assert packed.packs == 1
    for part in ("lora_A", "lora_B"):
        with torch.no_grad():
            getattr(loaded.adapter.layers[3], part)["default"].weight.mul_(1.5)
        changed, before = hidden(loaded), packed.packs
        with torch.no_grad(), packed.using():
            torch.testing.assert_close(hidden(loaded), changed, rtol=0, atol=5e-5 * float(changed.abs().max()))
        assert packed.packs == before + 1, f"{part} is watched"


def test_conv1d_under_an_adapter_is_packed_the_right_way_round() -> None:
    loaded = tiny_model("gpt2", lora=RANK4)
    packed, applied = PackedWeights(loaded, min_elements=1), hidden(loaded)
    if packed.why_not is not None:
        pytest.skip(packed.why_not)
    with torch.no_grad(), packed.using():
        torch.testing.assert_close(hidden(loaded), applied, rtol=0, atol=5e-5 * float(applied.abs().max()))


def test_the_sum_by_hand_and_when_it_stands_for_nothing() -> None:
    loaded = tiny_model("llama", lora=LoraSpec(rank=2, alpha=3.0))
    assert loaded.adapter is not None
    layer = loaded.adapter.layers[0]
    w, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(merged_weight(layer), w + 1.5 * b @ a)
    with loaded.adapter.off():
        assert not merges(layer)
    assert merges(layer) and not merges(layer.base_layer)
    half = tiny_model("llama", dtype=torch.bfloat16, lora=RANK4)
    assert half.adapter is not None and not any(merges(layer) for layer in half.adapter.layers)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_prj",), "lora_targets: 'q_prj' is no linear layer; did you mean 'q_proj'"),
        (("q_proj", "lm_head"), "lora_targets: 'lm_head' is no linear layer"),
        (("embed_tokens",), "lora_targets: 'embed_tokens' is no linear layer"),
    ],
)
def test_targets_that_cannot_be(base: Path, targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        load_model(str(base), lora=LoraSpec(rank=2, targets=targets))


def edit(folder: Path, **values: Any) -> None:
    content = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "is 'IA3'; only LORA"),
        ({"base_model_name_or_path": ""}, "does not name its base"),
        ({"base_model_name_or_path": "/nowhere/base"}, "/nowhere/base does not exist .*adapter_config.json names"),
        ({"use_dora": True}, "the adapter uses use_dora"),
        ({"modules_to_save": ["lm_head"]}, "the adapter uses modules_to_save"),
        ({"r": 5}, "does not fit its base"),
        ({"target_modules": ["q_proj"]}, "do not fit its base"),
    ],
)
def test_adapters_that_are_not_taken(base: Path, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    folder = save_model(load_model(str(base), lora=RANK4), tmp_path / "adapter")
    edit(folder, **values)
    with pytest.raises(LoadError, match=words):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "the head and the embedding carry no adapter"),
        ({"target_modules": ["q_proj", "lm_head"]}, "the head and the embedding carry no adapter"),
        ({"alora_invocation_tokens": [8, 9]}, "uses ALoraLinearVariant"),
        ({"use_dora": True}, "uses use_dora"),
        ({"init_lora_weights": "pissa"}, "uses init_lora_weights 'pissa'"),
        ({"init_lora_weights": "olora"}, "uses init_lora_weights 'olora'"),
    ],
    ids=str,
)
def test_adapters_of_peft_that_are_not_plain_lora(
    base: Path, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], **values}
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    with pytest.raises(LoadError, match=words):
        load_model(str(tmp_path / "theirs"))


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal"])
def test_an_adapter_that_is_opened_leaves_the_base_as_it_is(base: Path, tmp_path: Path, start: bool | str) -> None:
    from peft import LoraConfig, get_peft_model

    settings: Any = {"init_lora_weights": start}
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **settings)
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    loaded = load_model(str(tmp_path / "theirs"))
    assert torch.equal(logits(loaded.base()), logits(load_model(str(base))))


def test_damaged_adapters_are_told(base: Path, tmp_path: Path) -> None:
    folder = save_model(load_model(str(base), lora=RANK4), tmp_path / "adapter")
    weights = load_file(folder / ADAPTER_WEIGHTS)
    save_file(dict(list(weights.items())[1:]), folder / ADAPTER_WEIGHTS)
    with pytest.raises(LoadError, match=r"do not fit its base, first .*lora_"):
        load_model(str(folder))
    (folder / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(LoadError, match=r"adapter_model.safetensors cannot be read"):
        load_model(str(folder))
    (folder / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(LoadError, match=r"adapter_config.json cannot be read"):
        load_model(str(folder))


def test_an_adapter_has_its_own_rank_and_no_adapter_below_it(base: Path, tmp_path: Path) -> None:
    folder = save_model(load_model(str(base), lora=RANK4), tmp_path / "adapter")
    with pytest.raises(LoadError, match="leave lora_rank at 0"):
        load_model(str(folder), lora=RANK4)
    second = save_model(load_model(str(folder)), tmp_path / "second")
    edit(second, base_model_name_or_path=str(folder))
    with pytest.raises(LoadError, match="is an adapter itself"):
        load_model(str(second))


def test_without_peft_the_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rhotrain.model.lora.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install 'rhotrain\[lora\]'"):
        load_model(str(base), lora=RANK4)
