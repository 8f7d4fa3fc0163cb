"""The memory plan: sketched activations against measured ones, counted parts against real ones, refusals that help."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import save_tiny, tiny_config, tiny_model
from helpers_train import make_learner, one_thread

from rhotrain.model.adapter import LoraSpec
from rhotrain.model.loaded import LoadError
from rhotrain.model.packed import PackedWeights
from rhotrain.rollout.sizing import page_bytes
from rhotrain.train import memory_plan, memory_sketch
from rhotrain.train.cli import main
from rhotrain.train.config import AlgoConfig, Config, ConfigError
from rhotrain.train.footprint import CPU_TOKENS, Shape, measure_footprint
from rhotrain.train.memory_plan import GIB, MemoryPlan, Part, Sketches, check_possible, make_plan
from rhotrain.train.memory_sketch import context_of, sketch_activations, sketch_model
from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.setup import build as build_parts
from rhotrain.train.trainer import Trainer

QWEN3_SMALL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_LARGE = {
    **QWEN3_SMALL,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
}
WIDE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 160}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def folder(path: Path, content: dict[str, Any]) -> str:
    """A model folder with nothing but its configuration."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(content))
    return str(path)


def settings(model: str, **values: Any) -> Config:
    lengths = {"task": "chain_sum", "max_prompt_tokens": 512, "max_new_tokens": 1024}
    return build({"model": model, **lengths, **values})


@cache
def sketches(model: str) -> Sketches:
    """A sketch takes a second: one per model of a test."""
    return {}


def plan(config: Config, gib: float) -> MemoryPlan:
    known = sketches(config.model.model)
    return make_plan(config, device="cuda", capacity=int(gib * GIB), longest_prompt=512, sketches=known)


def size(made: MemoryPlan, name: str) -> int:
    return sum(part.nbytes for part in made.parts if part.name == name)


# ---- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_sketched_activations_are_the_measured_ones(family: str, checkpointing: bool) -> None:
    """Bytes per packed token without any data against the real step's, within 10 %: what SDPA's masks add on a CPU."""
    loaded = tiny_model(family, gradient_checkpointing=checkpointing, **WIDE)
    learner = make_learner(loaded, AlgoConfig(), token_budget=4096, max_new_tokens=64)
    measured = measure_footprint(learner, Shape.scaled(60, 256, 8, 1024))
    model = sketch_model(
        "x", torch.float32, hf_config=tiny_config(family, **WIDE), gradient_checkpointing=checkpointing
    )
    sketch = sketch_activations(model, prompt_tokens=60, max_new_tokens=256, members=8, share_prompts=True)
    assert sketch.footprint is not None
    assert sketch.footprint.per_token == pytest.approx(measured.per_token, rel=0.1)
    assert sketch.footprint.least == loaded.model.get_input_embeddings().weight.nbytes  # type: ignore[operator]


def test_frozen_weights_keep_fewer_activations_than_trained_ones_and_no_table() -> None:
    lora = sketch_model("x", torch.float32, hf_config=tiny_config("llama", **WIDE), lora=LoraSpec(rank=2))
    sketch = sketch_activations(lora, prompt_tokens=60, max_new_tokens=256, members=8, share_prompts=True)
    assert sketch.footprint is not None and sketch.footprint.least == 0
    assert all(".lora_" in n for n, p in lora.model.named_parameters() if p.requires_grad)


def test_the_sketch_packs_as_the_trainer_does() -> None:
    shape = Shape(5, 4, 2)
    shared = context_of(shape, 2, True)
    assert shared.lens_q == (5, 3, 3) * 2 and shared.lens_k == (5, 8, 8) * 2
    assert shared.kv_index is not None
    assert shared.kv_index[:21].tolist() == [*range(5), *range(5), 5, 6, 7, *range(5), 8, 9, 10]
    assert context_of(shape, 2, False).lens_q == (8,) * 4


def test_gpt2_is_sketched_although_it_looks_for_padding() -> None:
    model = sketch_model("x", torch.float32, hf_config=tiny_config("gpt2", **WIDE))
    sketch = sketch_activations(model, prompt_tokens=60, max_new_tokens=64, members=8, share_prompts=True)
    assert sketch.footprint is not None and sketch.footprint.per_token > 6 * 64 * 4


def test_a_model_that_looks_at_values_is_planned_for_without_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none to look at on the meta device."""

    def look(loaded: Any, context: Any) -> int:
        return int(torch.zeros(1, device="meta").item())

    monkeypatch.setattr(memory_sketch, "_peak", look)
    made = make_plan(
        settings(folder(tmp_path / "q", QWEN3_SMALL)), device="cuda", capacity=24 * GIB, longest_prompt=512
    )
    assert "meta" in made.unknown and size(made, "activations") == 0 and size(made, "weights") > 0
    assert "activations are not counted" in made.table() and made.possible

    def none(*_: Any) -> Any:
        raise NotImplementedError("no values")

    monkeypatch.setattr(memory_sketch, "flash_like", none)
    with pytest.raises(LoadError, match="no memory plan can be made, no values"):
        sketch_model("x", torch.float32, hf_config=tiny_config("llama"))
    loaded = tiny_model("llama")
    monkeypatch.setattr(memory_plan, "WORTH_PLANNING", 0)
    assert memory_plan.plan_of_run(settings("x"), loaded, 5) == (None, "x: no memory plan can be made, no values")


# ---- counted parts --------------------------------------------------------------------------------------------------


def test_half_precision_takes_eighteen_bytes_a_parameter(tmp_path: Path) -> None:
    """Four layers of Qwen3-0.6B have 218,507,264 parameters: 2 weight, 4 master, 8 moments, 4 gradient."""
    model, count = folder(tmp_path / "q", QWEN3_SMALL), 218_507_264
    made = plan(settings(model), 80)
    float16 = make_plan(settings(model, dtype="float16"), device="cuda", capacity=80 * GIB, longest_prompt=512)
    assert made.parts == float16.parts
    assert size(made, "weights") == 2 * count and size(made, "masters") == 4 * count
    assert size(made, "moments") == 8 * count and size(made, "gradients") == 4 * count
    eight = plan(settings(model, optimizer="adamw_8bit"), 80)
    assert 2.0 * count < size(eight, "moments") < 2.1 * count
    apart = plan(settings(model, optimizer="adamw_offload"), 80)
    assert (size(apart, "masters"), size(apart, "moments"), size(apart, "gradients")) == (0, 0, 4 * count)
    assert size(plan(settings(model, beta=0.1), 80), "reference") == 2 * count
    assert size(plan(settings(model, beta=0.1, offload_reference=True), 80), "reference") == 0
    adapted = plan(settings(model, beta=0.1, lora_rank=8), 80)
    trained = 8 * 4 * sum((1024 + 2048, 2 * (1024 + 1024), 2048 + 1024, 3 * (1024 + 3072)))
    assert size(adapted, "gradients") == 4 * trained and size(adapted, "moments") == 8 * trained
    assert size(adapted, "reference") == 0 and size(adapted, "masters") == 0
    assert size(adapted, "weights") == 2 * count + 4 * trained


def test_a_base_in_4_bits_takes_an_eighth_and_more_of_float32(tmp_path: Path) -> None:
    """By QLoRA's count, 4.127 bits a weight of a linear layer; the rest stays in bf16, the adapter is float32."""
    pytest.importorskip("bitsandbytes")
    model, count = folder(tmp_path / "q", QWEN3_SMALL), 218_507_264
    linear = 4 * 1024 * (2048 + 2 * 1024 + 2048 + 3 * 3072)
    adapter = 4 * 8 * 4 * sum((1024 + 2048, 2 * (1024 + 1024), 2048 + 1024, 3 * (1024 + 3072)))
    values = {"lora_rank": 8, "quantize_base": "nf4", "beta": 0.1, "ref_model": model}
    made = plan(settings(model, **values), 80)
    expected = linear * 4.127 / 8 + 2 * (count - linear) + adapter
    assert size(made, "weights") == pytest.approx(expected, rel=0.005)
    assert size(made, "reference") == size(made, "weights") - adapter
    assert size(made, "dequantized weight") == 2 * 1024 * 3072
    assert f"{(count + adapter // 4) / 1e6:,.0f} M parameters" in made.table()
    whole = plan(settings(model, **{**values, "quantize_base": "none"}), 80)
    assert size(whole, "weights") == 2 * count + adapter and size(whole, "dequantized weight") == 0
    assert size(made, "activations") >= size(whole, "activations")
    assert size(made, "moments") == size(whole, "moments") and size(made, "masters") == 0


def test_offloaded_activations_leave_a_layers_work(tmp_path: Path) -> None:
    model = folder(tmp_path / "q", QWEN3_SMALL)
    kept = plan(settings(model, gradient_checkpointing=True), 80)
    moved = plan(settings(model, gradient_checkpointing=True, offload_activations=True), 80)
    assert size(kept, "activations") - size(moved, "activations") == pytest.approx(4 * 1024 * 2 * 4096, rel=1e-6)
    assert size(moved, "activations") > 0


def test_the_pool_takes_a_quarter_of_what_weights_masters_and_reference_leave(tmp_path: Path) -> None:
    """Which is what is free when the engine asks; moments and gradients come later."""
    config = settings(folder(tmp_path / "q", QWEN3_SMALL), prompts_per_step=64, beta=0.1)
    made, count = plan(config, 10), 218_507_264
    page = page_bytes(sketches(config.model.model)[False, None, "none"][0], config.rollout.page_size)
    assert size(made, "KV pool") == (10 * GIB - (2 + 4 + 2) * count) // 4 // page * page


def test_a_budget_that_is_measured_is_planned_for_as_what_fits(tmp_path: Path) -> None:
    config = settings(folder(tmp_path / "q", QWEN3_SMALL), token_budget=0)
    made = plan(config, 8)
    assert made.fits and made.longest < made.budget < 8 * (512 + 8 * 1023)
    assert "halved" not in made.table() and f"measured at start, about {made.budget} tokens" in made.table()
    more = plan(settings(config.model.model, token_budget=made.budget + 1), 8)
    assert not more.fits and more.budget == made.budget + 1
    everything = plan(config, 500)
    assert everything.budget == config.rollout.prompts_per_step * (512 + config.rollout.group_size * 1023)
    short = settings(config.model.model, token_budget=0, group_size=2, max_new_tokens=64, dtype="bfloat16")
    known = sketches(config.model.model + " short")
    on_cpu = make_plan(short, device="cpu", capacity=200 * GIB, longest_prompt=100, sketches=known)
    assert on_cpu.budget == CPU_TOKENS


@pytest.mark.parametrize(
    "values",
    [{}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"lora_rank": 2}, {"lora_rank": 2, "quantize_base": "nf4"}],
    ids=str,
)
def test_parts_are_those_of_the_run(values: dict[str, Any], tmp_path: Path) -> None:
    """KV pool, weights, masters, gradients and moments of a tiny run on this CPU, after a step."""
    config = build(merge([preset("tiny-sums").layer, {"threads": 1, "steps": 1, "out": str(tmp_path / "r"), **values}]))
    parts = build_parts(config)
    longest = max(len(p.token_ids) for p in (*parts.stream.prompts, *parts.held_out))
    made = make_plan(
        config,
        device="cpu",
        capacity=64 * GIB,
        longest_prompt=longest,
        hf_config=parts.loaded.model.config,
        lora=None if parts.loaded.adapter is None else parts.loaded.adapter.spec,
    )
    engine, optimizer = parts.engine, parts.learner.optimizer
    assert size(made, "KV pool") == engine.pool.num_pages * page_bytes(parts.loaded, engine.pool.page_size)
    scales = [s for m in parts.loaded.model.modules() if (s := vars(m).get("quant_state")) is not None]
    tables = sum(t.nbytes for s in scales for t in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code))
    assert size(made, "weights") == sum(p.nbytes for p in parts.loaded.model.parameters()) + tables
    assert bool(tables) == ("quantize_base" in values)
    owned = [m for p, m in zip(optimizer.parameters, optimizer.masters) if m is not p]
    assert size(made, "masters") == sum(m.nbytes for m in owned)
    for master in optimizer.masters:
        master.grad = torch.zeros_like(master)
    assert size(made, "gradients") == sum(m.grad.nbytes for m in optimizer.masters if m.grad is not None)
    optimizer.step(0.0)
    moments = [t for s in optimizer.adamw.state.values() for n, t in s.items() if n != "step"]
    assert size(made, "moments") == sum(t.nbytes for t in moments)
    packed = PackedWeights(parts.loaded, min_elements=1024)  # no adapter by itself, which oneDNN pads
    if packed.why_not is None:
        packed.refresh()
        assert size(made, "packed weights") == pytest.approx(packed.packed_bytes, rel=0.15)
    elif parts.loaded.dtype == torch.float16:
        assert size(made, "packed weights") == 0
    parts.rewards.close()


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_fit_names_what_would(tmp_path: Path) -> None:
    """Four layers of Qwen3-4B, 793 M parameters, on 10 GiB: 13 of weights, masters, moments and gradients alone."""
    config = settings(folder(tmp_path / "q4", QWEN3_LARGE))
    with pytest.raises(ConfigError) as caught:
        check_possible(plan(config, 10), config, lambda other: plan(other, 10))
    text = str(caught.value)
    assert "does not fit; with micro-batches of one prompt and its completion (1535 tokens)" in text
    assert "lora_rank 16 (saves " in text and "optimizer adamw_8bit (" not in text
    assert "792.7 M trained" in text
    lora = settings(config.model.model, lora_rank=16)
    check_possible(plan(lora, 10), lora, lambda other: plan(other, 10))
    assert "quantize_base" not in text, "what keeps the weights whole is enough"
    with pytest.raises(ConfigError, match="no single setting makes it fit; take a smaller model"):
        check_possible(plan(config, 1), config, lambda other: plan(other, 1))


def test_4_bits_are_proposed_where_nothing_that_keeps_the_weights_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers of Qwen3-4B: 1.5 GiB of weights in bf16, 0.9 with the linears in 4 bits."""
    pytest.importorskip("bitsandbytes")
    config = settings(folder(tmp_path / "q4", QWEN3_LARGE), lora_rank=16, kv_memory_gib=0.1, max_running=1)

    def advice(gib: float) -> str:
        with pytest.raises(ConfigError) as caught:
            check_possible(plan(config, gib), config, lambda other: plan(other, gib))
        return str(caught.value).splitlines()[0]

    assert advice(2.0).endswith("makes it fit: quantize_base nf4 and gradient_checkpointing (saves 1.5 GiB)")
    assert "gradient_checkpointing (saves 0.9 GiB)" in advice(2.5) and "quantize_base" not in advice(2.5)
    monkeypatch.setattr("rhotrain.model.quantized.find_spec", lambda name: None)
    known = sketches(config.model.model)
    for key in [key for key in known if key[2] == "nf4"]:
        del known[key]
    assert "no single setting makes it fit" in advice(2.0), "without bitsandbytes it is no help"


def test_the_smaller_pool_comes_first(tmp_path: Path) -> None:
    """Where the quarter of the memory that K/V would take is what is too much."""
    config = settings(folder(tmp_path / "q", QWEN3_SMALL), prompts_per_step=64)
    small = settings(config.model.model, prompts_per_step=64, kv_memory_gib=1)
    gib = next(
        g / 4 for g in range(8, 80) if plan(small, g / 4).possible and size(plan(config, g / 4), "KV pool") > GIB
    )
    assert not plan(config, gib).possible
    with pytest.raises(ConfigError, match=r"one of these makes it fit: kv_memory_gib 1 \(saves"):
        check_possible(plan(config, gib), config, lambda other: plan(other, gib))


def test_a_budget_that_does_not_fit_is_told_and_not_refused(tmp_path: Path) -> None:
    config = settings(folder(tmp_path / "q", QWEN3_SMALL))
    made = plan(config, 8)
    assert not made.fits and made.possible
    assert "it will be halved until it does not" in made.table()
    check_possible(made, config, lambda other: plan(other, 8))
    assert made.line().startswith("memory plan, GiB: weights 0.41, masters 0.81, moments 1.63")


def test_phases_are_added_up_apart() -> None:
    parts = (Part("a", 3, ("rollout",)), Part("b", 5), Part("c", 7, ("update",)))
    made = MemoryPlan(parts, "cuda", 100, budget=8, longest=4, least=9)
    assert (made.total("rollout"), made.total("update"), made.room) == (8, 12, 93)
    assert made.fits and made.as_dict()["totals"] == {"rollout": 8, "update": 12}


def test_doctor_plans_without_weights_or_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "q", QWEN3_SMALL)
    words = ["doctor", "--plan", "--model", model, "--task", "chain_sum", "--max-new-tokens", "256"]
    assert main([*words, "--gpu-gib", "80"]) == 0
    table = capsys.readouterr().out
    assert "219 M parameters" in table and "of 80.00 GiB" in table
    assert main([*words, "--gpu-gib", "80", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    with pytest.raises(SystemExit):
        main([*words, "--gpu-gib", "80", "--quantize-base", "nf4"])
    assert "quantize_base: 'nf4' does not work; 4-bit weights are not trained" in capsys.readouterr().err
    if find_spec("bitsandbytes") is not None:
        assert main([*words, "--gpu-gib", "80", "--quantize-base", "nf4", "--lora-rank", "8"]) == 0
        assert "dequantized weight" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--gpu-gib", "2"])
    assert stopped.value.code == 2 and "does not fit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--gpu-gib", "-1"])
    assert "gpu_gib: -1 does not work" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu-gib", "8"])


def test_an_adapters_folder_is_planned_for_as_its_adapter(tmp_path: Path) -> None:
    """As its base with lora_rank set, without weights of either; and no other adapter is offered."""
    base = folder(tmp_path / "q", QWEN3_SMALL)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    content: dict[str, Any] = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 8, "lora_alpha": 16}
    content["target_modules"] = ["q_proj", "down_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    opened = memory_plan.plan_for(settings(str(adapter)), gpu_gib=24)
    made = memory_plan.plan_for(settings(base, lora_rank=8, lora_targets=("q_proj", "down_proj")), gpu_gib=24)
    assert opened.parts == made.parts
    assert size(opened, "gradients") == 4 * 4 * 8 * (1024 + 2048 + 3072 + 1024)
    assert not any("lora_rank" in text for text, _ in memory_plan.knobs(settings(str(adapter)), 0.0))
    del content["r"]
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"adapter_config\.json lacks a usable r, lora_alpha or target_modules"):
        memory_plan.plan_for(settings(str(adapter)), gpu_gib=24)


def test_a_plan_is_for_the_device_of_the_settings(tmp_path: Path) -> None:
    model = folder(tmp_path / "q", QWEN3_SMALL)
    with pytest.raises(ConfigError, match="gpu_gib: 24 does not go with device cpu"):
        memory_plan.plan_for(settings(model, device="cpu"), gpu_gib=24)
    made = memory_plan.plan_for(settings(model, device="cpu", gradient_checkpointing=True, lora_rank=1), gpu_gib=0)
    assert made.device == "cpu" and size(made, "packed weights") > 0


def test_a_run_writes_its_plan_and_is_refused_before_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_plan, "WORTH_PLANNING", 0)
    small = {"threads": 1, "steps": 1, "train_size": 40, "eval_size": 0, "prompts_per_step": 2, "group_size": 2}
    config = build(merge([preset("tiny-sums").layer, small, {"out": str(tmp_path / "run")}]))
    trainer = Trainer(config)
    stored = json.loads((tmp_path / "run" / "memory_plan.json").read_text())
    assert stored["possible"] and {part["name"] for part in stored["parts"]} >= {"weights", "KV pool", "activations"}
    trainer.parts.rewards.close()
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="model: tiny-sums does not fit"):
        Trainer(build(merge([preset("tiny-sums").layer, small, {"out": str(tmp_path / "other")}])))
    assert not (tmp_path / "other").exists()


def test_small_models_on_a_cpu_are_not_planned_for(tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    config = build(merge([preset("tiny-sums").layer, {"model": str(save_tiny(tmp_path / "m", "llama"))}]))
    assert memory_plan.plan_of_run(config, loaded, 5) == (None, "")
