"""The load-time probe lets through what works and refuses the rest by name and reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import FAMILIES, SHARED, tiny_hf_model, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from rhotrain.model import load as load_module
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadError, adopt_model, load_model
from rhotrain.model.probe import check_calls, probe

SMALL_HEADS = {"head_dim": 8}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": SMALL_HEADS,
    "gemma3_text": {"sliding_window": 6, **SMALL_HEADS},
    "cohere": {},
    "cohere2": {"sliding_window": 6},
    "granite": {},
    "olmo2": {},
    "phi": {},
    "stablelm": {},
    "starcoder2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, **SMALL_HEADS},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}

SELF_MADE = "called 0 times for 2 layers"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {"n_head": 4}, "BloomForCausalLM.*" + SELF_MADE),
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "MptForCausalLM.*" + SELF_MADE),
    ("xglm", {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2}, "XGLMForCausalLM.*" + SELF_MADE),
    ("bert", {}, "BertLMHeadModel.*bidirectional"),
]
REFUSED_BY_CONFIG: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "mamba.*linear_attention"),
    ("falcon_h1", {}, "falcon_h1.*hybrid"),
    ("qwen3_next", {}, "qwen3_next.*linear_attention"),
    ("gemma3n_text", {"num_kv_shared_layers": 1}, "gemma3n_text.*share keys and values"),
    ("llama4_text", {}, "llama4_text.*chunked_attention"),
]


def random_model(family: str, options: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SHARED, "initializer_range": 0.3, **options})
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_eight_families_pass(family: str, checkpointing: bool) -> None:
    loaded = tiny_model(family, gradient_checkpointing=checkpointing, probe=True)
    assert loaded.model.training
    assert all(p.grad is None for p in loaded.parameters())
    assert loaded.attention.context is None and loaded.attention.record is None


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_more_families_pass(family: str) -> None:
    loaded = adopt_model(random_model(family, MORE_FAMILIES[family]), tiny_tokenizer(), spec=family)
    assert len(loaded.kv_shapes) == 2
    if family == "deepseek_v3":
        assert loaded.kv_shapes[0] == (4, 16, 12)


def test_half_precision_passes() -> None:
    assert tiny_model("qwen2", dtype=torch.bfloat16, probe=True).dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "options", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_trying(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        adopt_model(random_model(family, options), tiny_tokenizer(), spec=family)


@pytest.mark.parametrize(("family", "options", "message"), REFUSED_BY_CONFIG, ids=[row[0] for row in REFUSED_BY_CONFIG])
def test_refused_before_weights_are_read(family: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The folder holds a configuration only."""
    AutoConfig.for_model(family, **{**SHARED, **options}).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=message):
        load_model(str(tmp_path))


def test_recurrent_modules_are_refused() -> None:
    class MambaMixer(torch.nn.Identity):
        pass

    model = tiny_hf_model("llama")
    model.get_submodule("model.layers.0").mixer = MambaMixer()
    with pytest.raises(LoadError, match="LlamaForCausalLM: MambaMixer keep a recurrent state"):
        adopt_model(model, tiny_tokenizer())


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", d_model=32, num_layers=1, vocab_size=96).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"\(t5\): is an encoder-decoder"):
        load_model(str(tmp_path))


def test_a_type_without_causal_lm_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("clip").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"\(clip\).*no causal language model"):
        load_model(str(tmp_path))


def test_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SHARED)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="quantized"):
        load_model(str(tmp_path))


def test_noise_that_is_left_is_refused() -> None:
    loaded = tiny_model("llama")
    layer = loaded.model.get_submodule("model.layers.0.mlp")
    layer.register_forward_hook(lambda module, args, output: output + 1e-6 * torch.randn_like(output))  # pyright: ignore
    with pytest.raises(LoadError, match="two forwards in train mode differ"):
        probe(loaded)


def test_a_head_that_is_not_known_is_refused() -> None:
    loaded = tiny_model("llama")
    model: Any = loaded.model
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(LoadError, match=r"body \+ head gives other logits"):
        probe(loaded)


def test_a_lost_window_is_refused() -> None:
    loaded = tiny_model("mistral", sliding_window=64)  # longer than the probe's sequences
    loaded.config.sliding_window = 32
    for module in loaded.model.modules():
        if type(module).__name__ == "MistralAttention":
            module.config = type("NoWindow", (), {"_attn_implementation": "rhotrain", "sliding_window": None})()  # pyright: ignore
    with pytest.raises(LoadError, match="window of 32 by its configuration, but tells the attention function None"):
        probe(loaded)


def test_calls_are_judged() -> None:
    """An argument that our attention does not know, a layer without number, a missing call."""
    loaded = tiny_model("llama")
    first, second = loaded.layer_calls(torch.arange(5, 9))
    check_calls(loaded, [first, second])
    with pytest.raises(LoadError, match="attention takes position_bias, which our attention does not honour"):
        check_calls(loaded, [first, replace(second, unknown=("position_bias",))])
    with pytest.raises(LoadError, match=r"not numbered 0\.\.1 by layer_idx"):
        check_calls(loaded, [first, replace(second, layer=None)])
    with pytest.raises(LoadError, match="called 1 times for 2 layers"):
        check_calls(loaded, [first])


def test_unknown_arguments_are_recorded() -> None:
    loaded = tiny_model("llama")
    with loaded.with_attention(PackedContext.make([4])):
        loaded.attention.record = []
        ids = torch.arange(5, 9)[None]
        loaded.body(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False, position_bias=torch.ones(1))
    assert [call.unknown for call in loaded.attention.record] == [("position_bias",)] * 2


def test_state_across_sequences_is_refused() -> None:
    loaded = tiny_model("llama")

    def running_sum(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * output.cumsum(1)

    loaded.model.get_submodule("model.layers.1.mlp").register_forward_hook(running_sum)
    with pytest.raises(LoadError, match="packed sequences give other logits"):
        probe(loaded)


def test_checkpointing_that_does_nothing_is_refused() -> None:
    loaded = tiny_model("llama", gradient_checkpointing=True)
    loaded.model.eval()
    with pytest.raises(LoadError, match=r"called attention 2 times for 2 layers instead of twice each"):
        probe(loaded)


def test_a_model_without_checkpointing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hf_model("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(LoadError, match=r"LlamaForCausalLM: does not support gradient_checkpointing"):
        adopt_model(model, tiny_tokenizer(), gradient_checkpointing=True)


@pytest.mark.parametrize("old_name_only", [False, True])
def test_checkpointing_helper_knows_both_names(old_name_only: bool) -> None:
    """5.17 has only gradient_checkpointing_enable; 5.24 deprecates it."""

    class Fake:
        supports_gradient_checkpointing = True
        asked: Any = None

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            self.asked = gradient_checkpointing_kwargs

    class New(Fake):
        def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None) -> None:
            self.asked = activation_checkpointing_kwargs

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            raise AssertionError("deprecated name")

    model = Fake() if old_name_only else New()
    load_module.enable_checkpointing(model)
    assert model.asked["use_reentrant"] is False


def test_an_error_inside_the_model_becomes_one_line() -> None:
    loaded = tiny_model("llama")

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    loaded.model.get_submodule("model.layers.0").register_forward_pre_hook(fail)
    with pytest.raises(LoadError, match=r"^LlamaForCausalLM: does not run on packed tokens: first line$"):
        probe(loaded)


def test_weights_that_are_nan_are_named_as_such() -> None:
    loaded = tiny_model("llama")
    with torch.no_grad():
        loaded.parameters()[0].fill_(float("nan"))
    with pytest.raises(LoadError, match="NaN or infinite on plain token ids; its weights are damaged"):
        probe(loaded)
