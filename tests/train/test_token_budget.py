"""The token budget: measured at start, and lowered without losing anything when memory runs out."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_naive import model_pair
from helpers_train import Recorder, fake_rollout, make_learner, one_thread, whole_error
from torch import Tensor

from rhotrain.train import footprint as footprint_module
from rhotrain.train import step as step_module
from rhotrain.train.checkpoint import latest_checkpoint, load_state
from rhotrain.train.config import AlgoConfig, Config, ConfigError, OptimConfig
from rhotrain.train.footprint import (
    CPU_TOKENS,
    Footprint,
    PeakMemory,
    Room,
    Shape,
    measure_footprint,
    moment_bytes,
)
from rhotrain.train.inner_loop import InnerLoop, Learner, run_updates
from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.token_budget import TokenBudget, out_of_memory
from rhotrain.train.trainer import Trainer

VOCAB_SIZE = 77
LONGEST = 18
"""Packed tokens of the longest trajectory of `fake_rollout`."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# ---- planted shortage of memory -------------------------------------------------------------------------------------


@contextmanager
def memory_for(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, int], bool], where: str, loaded: Any
) -> Iterator[list[int]]:
    """Passes for which fails(number of the pass, its tokens) run out of memory. where: `forward`, or in `backward` when
    nearly every gradient has been added already. Yields the tokens of every pass."""
    passes: list[int] = []
    real = step_module.packed_hidden

    @contextmanager
    def packed_hidden(model: Any, batch: Any) -> Iterator[Tensor]:
        passes.append(batch.num_tokens)
        failing = fails(len(passes), batch.num_tokens)

        def refuse(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

        def watch(module: Any, arguments: Any, output: Tensor) -> None:
            if failing and where == "backward" and output.requires_grad:
                output.register_hook(refuse)

        if failing and where == "forward":
            refuse()
        hook = loaded.body.get_input_embeddings().register_forward_hook(watch)
        try:
            with real(model, batch) as hidden:
                yield hidden
        finally:
            hook.remove()

    monkeypatch.setattr(step_module, "packed_hidden", packed_hidden)
    yield passes
    monkeypatch.undo()


def updated(loaded: Any, rollout: Any, algo: AlgoConfig, **optim: Any) -> tuple[Learner, InnerLoop]:
    learner = make_learner(loaded, algo, optimizer=Recorder(loaded), **optim)
    done = run_updates(learner, rollout.table(algo, loaded.dtype), rollout.num_groups, rollout_index=0)
    return learner, done


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_the_step_that_does_not(
    monkeypatch: pytest.MonkeyPatch, where: str, checkpointing: bool
) -> None:
    """Passes of more than 20 tokens fail: 105 tokens at once, then up to 52, then up to 26."""
    loaded, model = model_pair("llama", torch.float64, gradient_checkpointing=checkpointing)
    rollout = fake_rollout(model, vocab_size=VOCAB_SIZE)
    algo = AlgoConfig(old_logprobs="sampler", num_iterations=2, entropy_coef=0.01)
    whole, expected = updated(loaded, rollout, algo)
    with memory_for(monkeypatch, lambda _, tokens: tokens > 20, where, loaded) as passes:
        learner, done = updated(loaded, rollout, algo)
    assert whole.token_budget.retries == 0 and max(passes) > 100
    assert LONGEST <= learner.token_budget.tokens <= 26
    assert (
        learner.token_budget.retries == sum(tokens > 20 for tokens in passes) == len(learner.token_budget.notices) > 1
    )
    assert len(learner.optimizer.taken) == 2  # type: ignore[attr-defined]
    for actual, truth in zip(learner.optimizer.taken, whole.optimizer.taken):  # type: ignore[attr-defined]
        assert whole_error(actual, truth) <= 1e-10
    for mine, theirs in zip(done.updates, expected.updates):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12) for name in mine)
    assert "token_budget is" in learner.token_budget.notices[0] and "9 GiB" in learner.token_budget.notices[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_ran_before_the_shortage_is_dropped(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The third micro-batch of the step fails: the gradients of the two before it must not count twice."""
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=VOCAB_SIZE)
    algo = AlgoConfig(old_logprobs="sampler", zero_variance="keep")
    whole, _ = updated(loaded, rollout, algo, token_budget=40)
    with memory_for(monkeypatch, lambda number, _: number == 3, where, loaded) as passes:
        learner, _ = updated(loaded, rollout, algo, token_budget=40)
    assert learner.token_budget.retries == 1 and len(passes) > 6
    (actual,), (truth,) = learner.optimizer.taken, whole.optimizer.taken  # type: ignore[attr-defined]
    assert whole_error(actual, truth) <= 1e-10


def test_scoring_runs_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer anchors are scored before the first update; nothing but the split changes."""
    loaded, model = model_pair("gemma2", torch.float64)
    rollout = fake_rollout(model, vocab_size=VOCAB_SIZE)
    algo = AlgoConfig(old_logprobs="trainer", num_iterations=2)
    whole, expected = updated(loaded, rollout, algo)
    with memory_for(monkeypatch, lambda number, _: number == 1, "forward", loaded) as passes:
        learner, done = updated(loaded, rollout, algo)
    assert learner.token_budget.retries == 1 and len(passes) > 3
    assert whole_error(learner.optimizer.taken[0], whole.optimizer.taken[0]) <= 1e-10  # type: ignore[attr-defined]
    name = "sampling/sampling_logp_difference/mean"
    assert done.mismatch[name] == pytest.approx(expected.mismatch[name], rel=1e-9)


def test_under_the_longest_trajectory_the_knobs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=VOCAB_SIZE)
    algo = AlgoConfig(old_logprobs="sampler", zero_variance="keep")
    with (
        memory_for(monkeypatch, lambda *_: True, "forward", loaded) as passes,
        pytest.raises(ConfigError, match=r"token_budget: memory ran out .* of 18 tokens.*gradient_checkpointing"),
    ):
        updated(loaded, rollout, algo)
    assert max(passes) > 2 * LONGEST >= 2 * min(passes)
    assert loaded.policy_version == 0 and all(p.grad is None for p in loaded.parameters())


def test_other_errors_are_not_taken_for_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = TokenBudget(100)

    def work(_: Any) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        budget.attempt(list, work, longest=1)
    assert budget == TokenBudget(100)


def test_the_activations_are_free_before_the_next_try() -> None:
    """The error's traceback holds the frames, and these the tensors that filled the memory."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Batch:
        num_tokens = 8

    def pack() -> Any:
        alive.extend(ref() is not None for ref in held)
        return [Batch()]

    def work(_: Any) -> str:
        if held:
            return "done"
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no memory")

    gc.disable()
    try:
        assert TokenBudget(8).attempt(pack, work, longest=2) == "done"
    finally:
        gc.enable()
    assert alive == [False]


@pytest.mark.parametrize(
    ("budget", "largest", "longest", "after"),
    [(100, 90, 10, 45), (100, 100, 10, 50), (100, 100, 60, 60), (10_000, 61, 60, 60), (40, 39, 10, 19)],
)
def test_half_of_what_ran_and_never_under_the_longest(budget: int, largest: int, longest: int, after: int) -> None:
    """A budget far above the largest micro-batch would be halved in vain."""
    made = TokenBudget(budget)
    made.lower(largest, longest, "why")
    assert (made.tokens, made.retries) == (after, 1)
    assert len(made.take_notices()) == 1 and made.take_notices() == []


def test_what_says_that_memory_ran_out() -> None:
    assert out_of_memory(torch.OutOfMemoryError("x"))
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert out_of_memory(refused.value)
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not out_of_memory(RuntimeError("x")) and not out_of_memory(MemoryError())


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_peak_memory_follows_storages() -> None:
    """Outer tensors and views are free of charge; what has ended is given back."""
    given = torch.ones(1000)
    with PeakMemory() as memory:
        a = given * 2
        b = a.view(10, 100)[3:]
        assert (memory.live, memory.peak) == (4000, 4000)
        c = a + 1
        assert memory.live == 8000
        del a, c
        assert memory.live == 4000  # the view holds it
        del b
        assert (memory.live, memory.peak) == (0, 8000)
        given.mul_(2)
        assert memory.peak == 8000
        memory.restart()
        assert memory.peak == 0


def test_peak_memory_sees_what_backward_needs() -> None:
    """exp keeps its result, 4000 bytes each: three of them live until backward, which adds gradients."""
    x = torch.zeros(1000, requires_grad=True)
    with PeakMemory() as memory:
        y = x.exp().exp().exp().sum()
        assert memory.live == 3 * 4000 + 4
        y.backward()
        assert memory.peak >= 4 * 4000 + 4
        del y
        assert memory.live <= 4000 + 8  # the gradient


def test_footprint_is_the_line_through_two_points() -> None:
    footprint = Footprint.through((10, 1300), (20, 1600), least=2000)
    assert footprint == Footprint(1000.0, 30.0, 2000)
    assert footprint.tokens_in(1999) == 0 and footprint.tokens_in(2000) == 33 and footprint.tokens_in(4000) == 100
    assert footprint.bytes_of(100) == 4000 and footprint.bytes_of(1) == 2000
    assert Footprint.through((10, 100), (20, 300)).fixed == 0.0
    assert Footprint.through((10, 100), (20, 100)) == Footprint(90.0, 1.0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_line_foretells_a_longer_pass(family: str) -> None:
    """Measured on one and two groups, against the peak of forty of them."""
    learner = make_learner(tiny_model(family), AlgoConfig(beta=0.1))
    shape = Shape(4, 8, 4)
    footprint = measure_footprint(learner, shape)
    with PeakMemory() as memory:
        footprint_module._pass(learner, footprint_module.synthetic_table(learner, Shape(1, 2, 1), 1))
        memory.restart()
        table = footprint_module.synthetic_table(learner, shape, 40)
        footprint_module._pass(learner, table)
    assert memory.peak == pytest.approx(footprint.bytes_of(40 * shape.tokens), rel=0.1)
    learner.optimizer.zero_grad()


def test_checkpointing_lowers_the_slope() -> None:
    slopes = []
    for checkpointing in (False, True):
        loaded = tiny_model("llama", gradient_checkpointing=checkpointing, num_hidden_layers=6)
        slopes.append(measure_footprint(make_learner(loaded, AlgoConfig()), Shape(8, 16, 4)).per_token)
    assert slopes[1] < 0.5 * slopes[0]


def test_measuring_leaves_no_trace() -> None:
    loaded = tiny_model("gpt2")
    learner = make_learner(loaded, AlgoConfig())
    weights, state = [p.detach().clone() for p in loaded.parameters()], torch.get_rng_state()
    measure_footprint(learner, Shape(4, 8, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, w) for p, w in zip(loaded.parameters(), weights))
    assert (loaded.policy_version, learner.updates) == (0, 0)
    assert not loaded.body.get_input_embeddings()._forward_hooks


ROOM = Room(free=10_000, later=1_000, longest=50, group=300, rollout=5_000, cpu=False)


def test_the_room_holds_a_margin_and_what_comes_later() -> None:
    footprint = Footprint(2_000.0, 10.0)
    assert ROOM.budget(footprint) == (9_000 - 1_000 - 2_000) // 10
    assert replace(ROOM, rollout=400).budget(footprint) == 400  # a rollout has no more
    roomy = replace(ROOM, free=10**9)
    assert roomy.budget(footprint) == 5_000
    assert replace(roomy, cpu=True).budget(footprint) == CPU_TOKENS
    assert replace(roomy, cpu=True, group=2_000).budget(footprint) == 2_000
    assert replace(roomy, cpu=True, rollout=600).budget(footprint) == 600


def test_a_room_that_is_too_small_names_the_knobs() -> None:
    with pytest.raises(ConfigError, match=r"token_budget: 0 does not work; .*gradient_checkpointing.*set token_budget"):
        replace(ROOM, longest=700).budget(Footprint(2_000.0, 10.0))


def test_moments_take_eight_bytes_a_weight_and_two_in_eight_bits() -> None:
    weights = [torch.nn.Parameter(torch.empty(64, 100)), torch.nn.Parameter(torch.empty(28, dtype=torch.bfloat16))]
    assert moment_bytes(weights, OptimConfig()) == 8 * 6428
    assert moment_bytes(weights, OptimConfig(optimizer="adamw_8bit")) == 2 * 6400 + 25 * 8 + 8 * 28
    assert moment_bytes(weights, OptimConfig(optimizer="adamw_offload")) == 0
    assert moment_bytes([torch.nn.Parameter(torch.empty(3, dtype=torch.float64))], OptimConfig()) == 48


# ---- a run ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "eval_size": 0,
    "lr": 1e-3,
    "train_size": 60,
    "threads": 1,
}


def settings(folder: Path, **values: Any) -> Config:
    return build(merge([preset("tiny-sums").layer, SMALL, values, {"out": str(folder / "run")}]))


def test_a_measured_budget_is_kept_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(settings(tmp_path, steps=2, token_budget=0))
    trainer._announce()
    found = trainer.parts.learner.token_budget.tokens
    assert f"note: token_budget: {found} (a pass takes" in capsys.readouterr().out
    assert trainer.step()["token_budget"] == found == trainer.parts.choices["token_budget"] > 40
    trainer.save()
    trainer.folder.close()
    monkeypatch.setattr(footprint_module, "free_memory", lambda _: 1)  # there is none any more, and nobody looks
    again = Trainer(settings(tmp_path, steps=2, token_budget=0, resume=True))
    assert again.parts.learner.token_budget.tokens == found
    again.folder.close()
    with pytest.raises(ConfigError, match="token_budget: 0 does not work"):
        Trainer(settings(tmp_path / "other", steps=2, token_budget=0))


def test_a_run_goes_on_with_half_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rollout in hand is used, the notice is told, and a resumed run keeps the lower budget."""
    plain = Trainer(settings(tmp_path / "plain", steps=1, zero_variance="keep"))
    whole = plain.step()
    plain.folder.close()
    trainer = Trainer(settings(tmp_path, steps=2, zero_variance="keep"))
    with memory_for(monkeypatch, lambda _, tokens: tokens > 30, "backward", trainer.parts.loaded):
        trainer.know_numerics = lambda table: None  # type: ignore[method-assign]
        metrics = trainer.step()
    lowered = trainer.parts.learner.token_budget.tokens
    assert metrics["token_budget"] == lowered <= 30 and metrics["memory/retries"] >= 1
    assert "warning: memory ran out" in capsys.readouterr().out
    assert metrics["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert (metrics["updates_taken"], metrics["reward"]) == (1, whole["reward"])
    trainer.save()
    trainer.folder.close()
    assert load_state(latest_checkpoint(trainer.folder.path))["choices"]["token_budget"] == lowered
    again = Trainer(settings(tmp_path, steps=2, zero_variance="keep", resume=True))
    assert again.parts.learner.token_budget.tokens == lowered
    again.folder.close()
