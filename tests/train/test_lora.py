"""LoRA in a run: gradients by the chain rule from the naive trainer's, a ratio of 1, the base as reference, resumed."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import save_tiny, tiny_model
from helpers_naive import model_pair, naive_step
from helpers_train import Recorder, fake_rollout, make_learner, one_thread
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rhotrain.model.adapter import ADAPTER_WEIGHTS, LoraSpec, merged_weight
from rhotrain.model.load import load_model
from rhotrain.model.quantized import is_quantized
from rhotrain.train.cli import main
from rhotrain.train.config import AlgoConfig, Config, ConfigError
from rhotrain.train.foreign import earlier_weights
from rhotrain.train.inner_loop import run_updates
from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.trainer import Trainer
from rhotrain.train.variants import using_weights

pytest.importorskip("peft")

ALGO = AlgoConfig(old_logprobs="sampler", beta=0.1, entropy_coef=0.01)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_gradients_are_the_chain_rule_of_the_naive_ones() -> None:
    """dA = s B^T dW and dB = s dW A^T, with dW of the naive padded trainer on the merged weights; float64, 1e-10."""
    for family in ("llama", "qwen3", "gemma2", "gpt2"):
        for checkpointing in (False, True):
            check_gradients(family, checkpointing)


def check_gradients(family: str, checkpointing: bool) -> None:
    spec = LoraSpec(rank=3, alpha=4.0)
    loaded = tiny_model(family, 0, torch.float64, lora=spec, gradient_checkpointing=checkpointing)
    _, naive = model_pair(family, torch.float64)
    from helpers_naive import exact_norms

    exact_norms(loaded.model)
    layers = {n: m for n, m in loaded.model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}
    modules = dict(naive.named_modules())
    with torch.no_grad():
        for name, layer in layers.items():
            target: Any = modules[name]
            w = layer.base_layer.weight
            delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            target.weight.copy_(w + (delta.t() if isinstance(target, Conv1D) else delta))
    rollout = fake_rollout(naive, vocab_size=77)
    truth = naive_step(naive, rollout, ALGO, vocab_size=77, max_new_tokens=9)
    for budget, share in ((10_000, True), (40, False), (24, True)):
        recorder = Recorder(loaded)
        learner = make_learner(loaded, ALGO, optimizer=recorder, token_budget=budget, share_prompts=share)
        run_updates(learner, rollout.table(ALGO, torch.float64), rollout.num_groups, rollout_index=0)
        assert set(recorder.taken[0]) == {f"{n}.lora_{x}.default.weight" for n in layers for x in "AB"}
        for name, layer in layers.items():
            dw: Tensor = truth.gradients[f"{name}.weight"]
            dw = dw.t() if isinstance(modules[name], Conv1D) else dw
            scale = layer.scaling["default"]
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            for part, expected in (("A", scale * b.t() @ dw), ("B", scale * dw @ a.t())):
                actual = recorder.taken[0][f"{name}.lora_{part}.default.weight"]
                error = float(((actual - expected).norm() / expected.norm().clamp(min=1e-6)).detach())
                assert error <= 1e-10, (family, checkpointing, budget, name, part)


def config(out: Path, **values: Any) -> Config:
    small = {"train_size": 60, "threads": 1, "prompts_per_step": 4, "group_size": 6, "eval_size": 0, "steps": 4}
    lora = {"lora_rank": 4, "lr": 5e-3, "beta": 0.05, "out": str(out), "save_every": 2}
    return build(merge([preset("tiny-sums").layer, small, lora, values]))


def run(settings: Config, steps: int) -> tuple[Trainer, list[dict[str, Any]]]:
    trainer = Trainer(settings)
    done = [dict(trainer.step()) for _ in range(steps)]
    trainer.save()
    trainer.folder.close()
    trainer.parts.rewards.close()
    return trainer, done


def quantized(folder: Path) -> dict[str, Any]:
    """Settings of a run over a random base of which every linear layer is in 4 bits. Rewarded are short completions."""
    pytest.importorskip("bitsandbytes")
    base = folder / "base"
    if not base.exists():
        save_tiny(base, "llama", hidden_size=64, intermediate_size=128, initializer_range=0.1)
    rewarded = {"rewards": ("length",), "reward_args": {"length": {"max_tokens": 3, "soft": 8}}, "max_new_tokens": 12}
    return {"model": str(base), "quantize_base": "nf4", "max_prompt_tokens": 32, **rewarded}


def test_a_run_trains_the_adapter_alone_with_a_ratio_of_one(tmp_path: Path) -> None:
    settings = config(tmp_path / "run")
    base = {name: p.clone() for name, p in load_model("tiny-sums").model.named_parameters()}
    trainer, steps = run(settings, 4)
    loaded, reference = trainer.parts.loaded, trainer.parts.reference
    assert reference is not None and reference.model is loaded.model, "no second model"
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["over_numerics_budget"] == []
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9), "the policy starts as its reference"
    assert steps[-1]["kl"] > 1e-6, "and leaves it"
    after = dict(loaded.model.named_parameters())
    frozen = [n for n in after if ".lora_" not in n]
    assert {n.replace(".base_layer", "") for n in frozen} == set(base)
    assert all(torch.equal(after[n], base[n.replace(".base_layer", "")]) for n in frozen)
    assert trainer.parts.learner.optimizer.masters == loaded.parameters()
    stored = load_file(tmp_path / "run" / "checkpoints" / "step-000004" / "model" / ADAPTER_WEIGHTS)
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in loaded.parameters())


@pytest.mark.parametrize("quantize_base", ["none", "nf4"])
def test_a_resumed_run_is_the_whole_run_bit_for_bit(tmp_path: Path, quantize_base: str) -> None:
    values = {} if quantize_base == "none" else quantized(tmp_path)
    _, whole = run(config(tmp_path / "whole", **values), 4)
    run(config(tmp_path / "part", **values), 2)
    resumed = Trainer(config(tmp_path / "part", resume=True, **values))
    rest = [dict(resumed.step()) for _ in range(2)]
    resumed.save()
    resumed.parts.rewards.close()
    clocks = ("time/", "step_time", "tok_per_s", "memory/")
    strip = [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in (*whole[2:], *rest)]
    assert strip[:2] == strip[2:]
    a, b = (
        load_file(tmp_path / name / "checkpoints" / "step-000004" / "model" / ADAPTER_WEIGHTS)
        for name in ("whole", "part")
    )
    assert all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def test_a_trained_adapter_is_trained_on_and_its_reference_is_the_base(tmp_path: Path) -> None:
    run(config(tmp_path / "run"), 2)
    folder = tmp_path / "run" / "checkpoints" / "step-000002" / "model"
    trainer, steps = run(config(tmp_path / "more", model=str(folder), lora_rank=0, steps=1), 1)
    assert trainer.parts.loaded.adapter is not None and steps[0]["kl"] > 1e-7


def test_merged_and_applied_adapters_sample_the_same_distribution() -> None:
    """What a CPU rollout packs is the sum; what the trainer scores is applied: the ratio is 1 within float32."""
    loaded = tiny_model("llama", lora=LoraSpec(rank=4))
    assert loaded.adapter is not None
    merged = copy.deepcopy(loaded.model)
    layers: list[Any] = [m for m in merged.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    with torch.no_grad():
        for layer in layers:
            layer.base_layer.weight.copy_(merged_weight(layer))
            layer.lora_B["default"].weight.zero_()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad(), loaded.config_dropout.restored():
        for model in (loaded.model, merged):
            model.set_attn_implementation("eager")  # type: ignore[operator]
        a, b = (m(ids).logits.log_softmax(-1) for m in (loaded.model, merged))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


# ---- over a base in 4 bits ------------------------------------------------------------------------------------------


def test_a_run_over_4_bit_weights_has_a_ratio_of_one_and_their_model_as_reference(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", **quantized(tmp_path))
    trainer, steps = run(settings, 3)
    loaded, reference = trainer.parts.loaded, trainer.parts.reference
    assert reference is not None and reference.model is loaded.model
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["over_numerics_budget"] == []
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9), "the policy starts as its reference"
    assert steps[-1]["kl"] > 1e-6, "and leaves it"
    fresh = dict(load_model(settings.model.model, quantize_base="nf4").model.named_parameters())
    frozen = {n.replace(".base_layer", ""): p for n, p in loaded.model.named_parameters() if ".lora_" not in n}
    assert frozen.keys() == fresh.keys() and sum(p.dtype is torch.uint8 for p in frozen.values()) == 14
    assert all(torch.equal(p, fresh[n]) for n, p in frozen.items())
    assert trainer.parts.learner.optimizer.masters == loaded.parameters()

    folder = tmp_path / "run" / "checkpoints" / "step-000003" / "model"
    more = config(tmp_path / "more", **{**quantized(tmp_path), "model": str(folder), "lora_rank": 0, "steps": 1})
    opened, steps = run(more, 1)
    assert is_quantized(opened.parts.loaded.model) and steps[0]["kl"] > 1e-7, "trained on, against the base"
    apart = config(tmp_path / "apart", **{**quantized(tmp_path), "ref_model": settings.model.model, "steps": 1})
    other, steps = run(apart, 1)
    assert other.parts.reference is not None and is_quantized(other.parts.reference.model)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9), "a ref_model is quantised as well"
    earlier = earlier_weights([str(folder.parent)], opened.parts.loaded)[str(folder.parent)]
    with using_weights(opened.parts.loaded, earlier):
        pass


def test_the_audit_is_clean_over_4_bit_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = quantized(tmp_path)
    flags = ["--model", values["model"], "--quantize-base", "nf4", "--lora-rank", "4", "--max-new-tokens", "12"]
    sizes = ["--threads", "1", "--group-size", "4", "--train-size", "60", "--updates", "1", "--eval-size", "0"]
    assert main(["audit", *flags, *sizes]) == 0
    assert "verdict: clean" in capsys.readouterr().out
    assert main(["sample", "1+1=", "--quantize-base", "nf4", *flags[:2], "--max-new-tokens", "3"]) == 0


def test_4_bit_weights_without_an_adapter_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "quantize_base: 'nf4' does not work; 4-bit weights are not trained; set lora_rank"
    with pytest.raises(ConfigError, match=words):
        Trainer(config(tmp_path / "run", quantize_base="nf4", lora_rank=0))
    with pytest.raises(SystemExit):
        main(["train", "--quantize-base", "nf4", "--dry-run"])
    assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="quantize_base: 'nf4' does not work; it computes in float32 or bfloat16"):
        config(tmp_path / "run", quantize_base="nf4", dtype="float64")
