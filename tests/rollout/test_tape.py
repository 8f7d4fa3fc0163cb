"""Recorded decode steps: the same bits as the modules, noticed changes, and models that cannot be recorded."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import Groups, double_model, make_prompts, one_thread  # noqa: F401

from rhotrain.model.adapter import LoraSpec
from rhotrain.model.load import LoadedModel
from rhotrain.model.packed import packed_weights
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.tape import MOST_TAPES, PATIENCE, NotRecordable, Recorder, Tape

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3", "qwen3_moe")
LONG = SamplingParams(max_new_tokens=PATIENCE + 12, temperature=1.2, ignore_eos=True, seed=5)


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, **{"num_pages": 300, "page_size": 4, **options})


def bits(groups: Groups) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.kept_mass, c.finish_reason) for group in groups for c in group]


def tapes_of(engine: Engine) -> Any:
    assert engine.runner.tapes is not None
    return engine.runner.tapes


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tape_gives_the_same_bits(family: str, packed: bool) -> None:
    loaded = tiny_model(family)
    packed_weights(loaded).min_elements = 1 if packed else 1 << 40
    prompts = make_prompts(3, 9, 5)
    engine = engine_of(loaded)
    recorded = engine.generate(prompts, LONG, n=2)
    assert tapes_of(engine).recorded == 1 and len(tapes_of(engine)) == 1, "it ran and was kept"
    assert bits(recorded) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, n=2))
    assert bits(engine.generate(prompts, LONG, n=2)) == bits(recorded), "from the first step on"
    assert tapes_of(engine).recorded == 1


def test_a_base_in_4_bits_is_recorded() -> None:
    pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"lora": LoraSpec(rank=4), "quantized": True}
    loaded = tiny_model("llama", hidden_size=64, intermediate_size=128, **options)
    engine, prompts = engine_of(loaded), make_prompts(3, 9, 5)
    recorded = engine.generate(prompts, LONG, n=2)
    assert tapes_of(engine).recorded == 1
    assert bits(recorded) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, n=2))


def test_rows_that_end_take_the_tape_of_the_rows_left() -> None:
    loaded = double_model()
    prompts = make_prompts(3, 9, 5, 6)
    bounds = [12, 24, 24, 40]
    engine = engine_of(loaded)
    found = engine.generate(prompts, LONG, max_new_tokens=bounds)
    assert tapes_of(engine).recorded == 3
    assert bits(found) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, max_new_tokens=bounds))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_new_weights_are_used_without_a_new_tape(packed: bool) -> None:
    """As after an optimiser step: the tensors stay, their values and the packed copies do not."""
    loaded = tiny_model("qwen2")
    packed_weights(loaded).min_elements = 1 if packed else 1 << 40
    engine, prompts = engine_of(loaded), make_prompts(3, 9)
    before = engine.generate(prompts, LONG, n=2)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.5)
    loaded.policy_version += 1
    after = engine.generate(prompts, LONG, n=2)
    assert tapes_of(engine).recorded == 1
    assert bits(after) != bits(before)
    assert bits(after) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, n=2))


def test_tapes_hold_no_packed_weights_between_calls() -> None:
    """Those of several numbers of rows would hold as many policy versions; released ones are gone before an update."""
    loaded = tiny_model("llama")
    weights = packed_weights(loaded)
    weights.min_elements = 1
    engine, prompts = engine_of(loaded), make_prompts(3, 9, 5, 6)
    if weights.why_not is not None:
        pytest.skip(weights.why_not)

    def rollout(count: int) -> list[weakref.ref[torch.Tensor]]:
        engine.generate(prompts[:count], LONG)
        return [weakref.ref(copy) for copy in weights.copies() if copy is not None]

    first = rollout(2)
    assert tapes_of(engine).recorded == 1 and all(ref() is not None for ref in first)
    loaded.policy_version += 1
    second = rollout(4)
    assert tapes_of(engine).recorded == 2 and not any(ref() is not None for ref in first)
    engine.release_weights()
    assert not any(ref() is not None for ref in second) and weights.packed_bytes == 0
    again = bits(engine.generate(prompts, LONG))
    assert tapes_of(engine).recorded == 2
    assert again == bits(engine_of(loaded, tapes=False).generate(prompts, LONG))
    stream = engine.stream(prompts, LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="a generate call is under way"):
        engine.release_weights()
    stream.close()


def replace_a_parameter(loaded: LoadedModel) -> None:
    norm: Any = loaded.body.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 3)


def set_an_attribute(loaded: LoadedModel) -> None:
    for module in loaded.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.variance_epsilon = 0.3  # type: ignore[assignment]


def replace_a_forward(loaded: LoadedModel) -> None:
    norm: Any = loaded.body.norm
    plain = type(norm).forward
    norm.forward = lambda x: plain(norm, x) * 3


def add_a_hook(loaded: LoadedModel) -> None:
    loaded.body.norm.register_forward_hook(lambda module, arguments, output: output * 3)


@pytest.mark.parametrize("change", [replace_a_parameter, set_an_attribute, replace_a_forward, add_a_hook])
def test_a_model_that_was_changed_is_noticed(change: Callable[[LoadedModel], None]) -> None:
    loaded = tiny_model("llama")
    engine, prompts = engine_of(loaded), make_prompts(3, 9)
    before = engine.generate(prompts, LONG, n=2)
    change(loaded)
    after = engine.generate(prompts, LONG, n=2)
    assert bits(after) != bits(before)
    assert bits(after) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, n=2))


@pytest.mark.parametrize("reads", ["a number", "a shape", "a random number"])
def test_a_step_that_depends_on_values_is_not_recorded(reads: str) -> None:
    loaded = tiny_model("llama")
    norm: Any = loaded.body.norm
    plain = type(norm).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if reads == "a number":
            scale = 2.0 if float(x.abs().max()) > 1e9 else 1.0
        elif reads == "a shape":
            scale = float(len((x == 0.123).nonzero()) + 1)
        else:
            scale = 1.0
            torch.rand(2)
        return plain(norm, x) * scale

    norm.forward = forward
    engine, prompts = engine_of(loaded), make_prompts(3, 9)
    found = engine.generate(prompts, LONG, n=2)
    assert tapes_of(engine).recorded == 0 and "LlamaForCausalLM cannot be recorded" in tapes_of(engine).why_not
    assert bits(found) == bits(engine_of(loaded, tapes=False).generate(prompts, LONG, n=2))


def test_gpt2_reads_its_input_ids() -> None:
    """transformers warns of padding: that reads the ids on the host."""
    engine = engine_of(tiny_model("gpt2"))
    engine.generate(make_prompts(3), LONG)
    assert tapes_of(engine).recorded == 0 and "_local_scalar_dense" in tapes_of(engine).why_not


def test_autocast_and_inference_mode_run_the_modules() -> None:
    loaded = tiny_model("llama")
    engine, prompts = engine_of(loaded), make_prompts(3, 9)
    engine.generate(prompts, LONG, n=2)
    tapes_of(engine)._tapes.clear()
    with torch.autocast("cpu"):
        engine.generate(prompts, LONG, n=2)
    with torch.inference_mode():
        engine.generate(prompts, LONG, n=2)
    assert len(tapes_of(engine)) == 0


def test_the_oldest_tapes_go_first() -> None:
    loaded = tiny_model("llama")
    engine = engine_of(loaded, max_running=64)
    for rows in range(1, MOST_TAPES + 3):
        engine.generate(make_prompts(3), LONG, n=rows)
    assert len(tapes_of(engine)) == MOST_TAPES and tapes_of(engine).recorded == MOST_TAPES + 2
    engine.release()
    assert len(tapes_of(engine)) == 0


def record(step: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Tape:
    recorder = Recorder()
    for tensor in inputs:
        recorder.number(tensor)
    with torch.no_grad(), recorder:
        out = step(*inputs)
    return Tape(recorder, inputs, out)


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "in place on what it made": lambda x: (x * 2).add_(1).mul_(3),
    "in place through a view": lambda x: _through_a_view(x),
    "in place on its input": lambda x: x.add_(1),
    "parts of a split": lambda x: torch.cat([x.split([1, 2], -1)[1], x.chunk(3, -1)[0]], -1),
    "a list of indices": lambda x: x[torch.tensor([1, 0])],
    "a result twice": lambda x: x + x.sin() * x.sin(),
    "a result nobody reads": lambda x: (x.exp(), x + 1)[1],
    "a constant": lambda x: torch.nn.functional.pad(x, (1, 1), value=float("-inf")) + torch.arange(5),
    "the input": lambda x: x,
}


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[:, 1:].mul_(5)
    made[0].zero_()
    return made


@pytest.mark.parametrize("name", STEPS)
def test_operators(name: str) -> None:
    tape = record(STEPS[name], torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert torch.equal(tape.run(x.clone()), STEPS[name](x.clone()))


def test_what_nobody_reads_is_left_out() -> None:
    recorder, x = Recorder(), torch.randn(2, 3)
    with torch.no_grad(), recorder:
        x.exp()
        out = x + 1
    tape = Tape(recorder, (x,), out)
    assert len(recorder.calls) == 2 and tape.size == 1


def test_the_reason_names_the_operator() -> None:
    with pytest.raises(NotRecordable, match="_local_scalar_dense"):
        record(lambda x: x * float(x.sum()), torch.randn(2, 3))
