"""Layer inputs and resting models on the CPU: the same bits, and only what should move moves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_model import save_tiny, tiny_model
from helpers_naive import model_pair
from helpers_train import fake_rollout, make_learner, one_thread
from torch import Tensor

from rhotrain.model import loaded as loaded_module
from rhotrain.model.adapter import LoraSpec
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadedModel, LoadError, load_model
from rhotrain.model.offload import Moved, ParkedModel, offloaded_inputs
from rhotrain.train.config import AlgoConfig, ConfigError, ModelConfig
from rhotrain.train.inner_loop import run_updates

IDS = torch.arange(5, 26)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def backward(loaded: LoadedModel) -> dict[str, Tensor]:
    loaded.model.zero_grad()
    with loaded.with_attention(PackedContext.make([9, 12], device=loaded.device)):
        positions = torch.cat([torch.arange(9), torch.arange(12)]).to(loaded.device)
        loaded.hidden(IDS.to(loaded.device), positions).square().sum().backward()
    return {n: p.grad.clone() for n, p in loaded.model.named_parameters() if p.grad is not None}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Moved]:
    """What every forward moved."""
    seen: list[Moved] = []

    def note(*args: Any) -> Any:
        context = offloaded_inputs(*args)

        class Noting:
            def __enter__(self) -> None:
                seen.append(context.__enter__())

            def __exit__(self, *error: Any) -> Any:
                return context.__exit__(*error)

        return Noting()

    monkeypatch.setattr(loaded_module, "offloaded_inputs", note)
    return seen


# ---- layer inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["weights", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "qwen3_moe"])
def test_gradients_are_the_same_bits_and_each_layer_input_moves(
    family: str, lora: LoraSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_model(family, gradient_checkpointing=True, num_hidden_layers=3, lora=lora)
    moving = tiny_model(family, gradient_checkpointing=True, num_hidden_layers=3, lora=lora)
    moving.offload_activations = True
    seen = watched(monkeypatch)
    expected, actual = backward(plain), backward(moving)
    assert expected.keys() == actual.keys() and all(torch.equal(expected[n], actual[n]) for n in expected)
    (moved,) = seen
    hidden = plain.config.hidden_size
    assert 3 <= moved.tensors <= 6, "three layers, and at most the embedding's sum and the last norm beside them"
    assert moved.nbytes == moved.tensors * len(IDS) * hidden * 4


def test_a_step_moves_and_scoring_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, naive = model_pair("llama", torch.float32, gradient_checkpointing=True)
    loaded.offload_activations = True
    rollout = fake_rollout(naive, vocab_size=loaded.vocab_size)
    algo = AlgoConfig(old_logprobs="sampler")
    learner, table = make_learner(loaded, algo, token_budget=40), rollout.table(algo, torch.float32)
    seen = watched(monkeypatch)
    learner.score(table, list(range(len(table.trajectories))))
    assert seen == []
    run_updates(learner, table, rollout.num_groups, rollout_index=0)
    assert len(seen) > 1 and all(moved.tensors >= loaded.num_layers for moved in seen)


def test_parameters_and_other_shapes_stay() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 8))
    x, other = torch.randn(4, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with offloaded_inputs(4, 8) as moved:
        loss = (x * 1.0 * weight).sum() + (other * 1.0).square().sum()
    assert moved.tensors == 1  # the product's other factor
    loss.backward()
    assert torch.equal(x.grad, weight) and torch.equal(other.grad, 2 * other)  # type: ignore[arg-type]


def test_without_checkpointing_it_is_refused(tmp_path: Any) -> None:
    folder = save_tiny(tmp_path / "m", "llama")
    with pytest.raises(LoadError, match="offload_activations moves the inputs that gradient_checkpointing keeps"):
        load_model(str(folder), offload_activations=True)
    with pytest.raises(ConfigError, match=r"^offload_activations: True"):
        ModelConfig(offload_activations=True)


@pytest.mark.cuda
def test_layer_inputs_leave_the_gpu() -> None:
    """Twelve layers: what lives between forward and backward falls by nearly all layer inputs, and bits stay."""
    options: dict[str, Any] = {"gradient_checkpointing": True, "num_hidden_layers": 12, "hidden_size": 512}
    peaks, grads = [], []
    for offload in (False, True):
        loaded = tiny_model("llama", **options)
        loaded.model.to("cuda")
        loaded.offload_activations = offload
        backward(loaded)
        ids = torch.arange(5, 70, device="cuda").repeat(128)
        positions = torch.arange(len(ids), device="cuda") % 200
        with loaded.with_attention(PackedContext.make([len(ids)], device=loaded.device)):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            hidden = loaded.hidden(ids, positions)
            peaks.append(torch.cuda.memory_allocated() - before)
            hidden.float().square().sum().backward()
        grads.append([p.grad.clone() for p in loaded.parameters() if p.grad is not None])
    assert peaks[0] - peaks[1] > 0.7 * 12 * len(ids) * 512 * 4
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# ---- a model that rests ---------------------------------------------------------------------------------------------


def test_a_parked_model_computes_the_same_when_awake() -> None:
    """From the CPU to the CPU: copies are made and dropped as they would be on a GPU."""
    plain, parked = tiny_model("llama"), tiny_model("llama")  # tied
    parked.parked = ParkedModel(parked.model, parked.device)
    homes = {n: p.data_ptr() for n, p in parked.model.named_parameters()}
    unique = {p.data_ptr(): p for p in plain.model.parameters()}
    assert parked.parked.nbytes >= sum(p.nbytes for p in unique.values())

    def logits(loaded: LoadedModel) -> Tensor:
        with torch.no_grad(), loaded.with_attention(PackedContext.make([len(IDS)])):
            return loaded.head.logits(loaded.hidden(IDS, torch.arange(len(IDS))))

    expected = logits(plain)
    with parked.awake():
        away = {n: p.data_ptr() for n, p in parked.model.named_parameters()}
        assert all(away[n] != homes[n] for n in homes)
        with parked.awake():
            assert torch.equal(logits(parked), expected)
        assert {n: p.data_ptr() for n, p in parked.model.named_parameters()} == away, "only the outermost acts"
    assert {n: p.data_ptr() for n, p in parked.model.named_parameters()} == homes
    with pytest.raises(RuntimeError, match="stop"), parked.awake():
        raise RuntimeError("stop")
    assert {n: p.data_ptr() for n, p in parked.model.named_parameters()} == homes
    with plain.awake():
        assert torch.equal(logits(plain), expected)


def test_weights_that_do_not_all_fit_leave_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at the third tensor: the token budget is lowered then, and must find the device free."""
    parked = ParkedModel(tiny_model("llama").model, torch.device("cpu"))
    homes = {n: p.data_ptr() for n, p in parked.model.named_parameters()}
    real, copies = Tensor.to, 0

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        nonlocal copies
        copies += 1
        if copies == 3:
            raise torch.OutOfMemoryError("full")
        return real(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError, match="full"), parked.awake():
        raise AssertionError("entered without all weights")
    assert copies == 3 and {n: p.data_ptr() for n, p in parked.model.named_parameters()} == homes
    with parked.awake():
        away = {n: p.data_ptr() for n, p in parked.model.named_parameters()}
        assert all(away[n] != homes[n] for n in homes)


def test_scoring_wakes_the_reference() -> None:
    loaded, naive = model_pair("llama", torch.float32)
    reference = tiny_model("llama", 1)
    rollout = fake_rollout(naive, vocab_size=loaded.vocab_size)
    algo = AlgoConfig(old_logprobs="sampler")
    learner, table = make_learner(loaded, algo, token_budget=40), rollout.table(algo, torch.float32)
    everything = list(range(len(table.trajectories)))
    expected = learner.score(table, everything, loaded=reference)
    reference.parked = ParkedModel(reference.model, reference.device)
    asleep = reference.head.weight.data_ptr()
    seen: list[int] = []
    reference.body.register_forward_pre_hook(lambda *_: seen.append(reference.head.weight.data_ptr()))
    assert torch.equal(learner.score(table, everything, loaded=reference), expected)
    assert seen and asleep not in seen and reference.head.weight.data_ptr() == asleep


@pytest.mark.cuda
def test_a_parked_model_frees_the_gpu() -> None:
    loaded = tiny_model("llama", hidden_size=512)
    loaded.model.to("cuda")
    device, before = loaded.device, torch.cuda.memory_allocated()
    loaded.parked = ParkedModel(loaded.model, device)
    torch.cuda.synchronize()
    assert before - torch.cuda.memory_allocated() > 0.9 * loaded.parked.nbytes
    assert loaded.device.type == "cpu" and loaded.head.weight.is_pinned()
    with loaded.awake():
        assert loaded.device == device
