"""float16: gradients under a loss scale against float32's, what an overflow costs, resumed runs."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers_model import tiny_model
from helpers_naive import Gradients, model_pair
from helpers_train import FakeRollout, fake_rollout, make_learner, one_thread, whole_error
from torch import Tensor, nn

from rhotrain.model.adapter import LoraSpec
from rhotrain.model.load import LoadedModel, load_model
from rhotrain.train import step as step_module
from rhotrain.train.audit import audit, narrowed
from rhotrain.train.config import AlgoConfig, ConfigError, OptimConfig
from rhotrain.train.console import step_line
from rhotrain.train.inner_loop import InnerLoop, Learner, run_updates
from rhotrain.train.loss_scale import LossScale
from rhotrain.train.optim import Optimizer, StepError
from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.setup import build as build_parts
from rhotrain.train.trainer import Clock, Trainer, train

SIGNAL = ((1.0, 0.0, 0.5, 2.0),) * 6
ULP = 2.0**-11
"""Half a step of float16, relative."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def rollout_of(loaded: LoadedModel, naive: Any) -> FakeRollout:
    return fake_rollout(naive, vocab_size=loaded.vocab_size, rewards=SIGNAL)


def learner_of(loaded: LoadedModel, scale: LossScale | None, algo: AlgoConfig, **optim: Any) -> Learner:
    """A learner that moves the weights."""
    optimizer = Optimizer(loaded.parameters(), OptimConfig(**optim), scale)
    return make_learner(loaded, algo, optimizer=optimizer, **{k: v for k, v in optim.items() if k != "optimizer"})


def update(learner: Learner, rollout: FakeRollout, amplitude: float = 1.0) -> InnerLoop:
    """The updates of a rollout whose advantages are multiplied by `amplitude`."""
    table = rollout.table(learner.algo, torch.float32)
    table.advantages *= amplitude
    return run_updates(learner, table, rollout.num_groups, rollout_index=0)


# ---- the rule -------------------------------------------------------------------------------------------------------


def test_the_scale_walks_as_torch_amp_does() -> None:
    """The same finite and infinite gradients through torch.amp.GradScaler."""
    parameter = nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([parameter], lr=0.0)
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale(growth_interval=3)
    generator = torch.Generator().manual_seed(0)
    walked = []
    for _ in range(60):
        finite = bool(torch.rand((), generator=generator) < 0.8)
        theirs.scale(torch.zeros(()))
        parameter.grad = torch.tensor([1.0 if finite else math.inf])
        theirs.step(other)
        theirs.update()
        if finite:
            ours.taken()
        else:
            ours.overflowed()
        assert ours.value == theirs.get_scale()
        walked.append(ours.value)
    assert len(set(walked)) > 4 and walked != sorted(walked)
    default = torch.amp.GradScaler("cpu").state_dict()
    assert (default["scale"], default["growth_interval"]) == (LossScale().value, LossScale().growth_interval)


def test_only_float16_has_a_scale() -> None:
    assert LossScale.of(torch.float16) == LossScale()
    assert [LossScale.of(d) for d in (torch.bfloat16, torch.float32, torch.float64)] == [None] * 3


def test_the_scale_has_a_floor_of_one_and_stays_in_the_range_of_float32() -> None:
    scale = LossScale(value=1.5)
    scale.overflowed()
    assert scale.value == 1.0 and scale.exhausted
    scale = LossScale(value=2.0**125, growth_interval=1)
    for _ in range(5):
        scale.taken()
    inverse = torch.tensor(1.0 / scale.value)
    assert torch.isfinite(torch.tensor(scale.value)) and inverse >= torch.finfo(torch.float32).tiny


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(loaded: LoadedModel, scale: LossScale | None, rollout: FakeRollout, amplitude: float) -> Gradients:
    """Of one update, as AdamW got them: its first moment after the first step is 0.1 of the gradient."""
    learner = learner_of(loaded, scale, AlgoConfig(old_logprobs="fresh"), grad_clip=0.0, token_budget=40)
    (taken,) = update(learner, rollout, amplitude).updates
    names = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    state = learner.optimizer.adamw.state
    made = {n: state[m]["exp_avg"].double() / 0.1 for n, m in zip(names, learner.optimizer.masters)}
    norm = math.sqrt(sum(float(g.square().sum()) for g in made.values()))
    assert taken["grad_norm"] == pytest.approx(norm, rel=1e-5)
    return made


def as_float32(loaded: LoadedModel, **options: Any) -> LoadedModel:
    """A float32 model of the same values."""
    wide = tiny_model("llama", **options)
    with torch.no_grad():
        for p, q in zip(wide.model.parameters(), loaded.model.parameters(), strict=True):
            p.copy_(q)
    return wide


@pytest.mark.parametrize("options", [{}, {"lora": LoraSpec(rank=2)}, {"gradient_checkpointing": True}], ids=str)
def test_gradients_keep_float16s_accuracy_where_they_would_vanish(options: dict[str, Any]) -> None:
    """Against float32 on the same weights. Advantages of 1: with and without a scale, rounding alone, most of it the
    forward's. Advantages of 1e-5: most of the gradient is lost without a scale, and nothing with one."""
    options = {"initializer_range": 0.1, **options}
    _, naive = model_pair("llama", torch.float32)
    model = tiny_model("llama", dtype=torch.float16, **options)
    rollout = rollout_of(model, naive)
    truth = gradients(as_float32(model, **options), None, rollout, 1.0)

    def error(scale: LossScale | None, amplitude: float) -> float:
        made = gradients(tiny_model("llama", dtype=torch.float16, **options), scale, rollout, amplitude)
        return whole_error({n: g / amplitude for n, g in made.items()}, truth)

    plain, scaled = error(None, 1.0), error(LossScale(1024.0), 1.0)
    lost, kept = error(None, 1e-5), error(LossScale(), 1e-5)
    print(f"relative to float32: {plain:.1e} unscaled, {scaled:.1e} scaled; of 1e-5: {lost:.1e} and {kept:.1e}")
    assert 0 < plain < 20 * ULP and 0 < scaled < 1.05 * plain
    assert kept < 1.05 * plain and lost > 0.1


def test_the_scale_reaches_the_gradient_of_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss forms its gradients in the forward pass, before the scale is known: it must not round them yet."""
    _, naive = model_pair("llama", torch.float32)
    model = tiny_model("llama", dtype=torch.float16)
    rollout = rollout_of(model, naive)
    seen: list[Tensor] = []
    loss = step_module.linear_policy_loss

    def watched(hidden_MH: Tensor, *rest: Any, **options: Any) -> Any:
        hidden_MH.register_hook(lambda g: seen.append(g.clone()))
        return loss(hidden_MH, *rest, **options)

    monkeypatch.setattr(step_module, "linear_policy_loss", watched)
    for wide, scale in ((True, None), (False, None), (False, LossScale())):
        loaded = as_float32(model) if wide else tiny_model("llama", dtype=torch.float16)
        update(learner_of(loaded, scale, AlgoConfig(old_logprobs="fresh")), rollout, 1e-7)
    truth, lost, kept = (g.double() for g in seen)
    assert seen[1].dtype == seen[2].dtype == torch.float16
    assert float((lost == 0).double().mean()) > 0.5 > 10 * float((kept == 0).double().mean())
    norm = truth.norm()
    assert float((kept / 2.0**16 - truth).norm() / norm) < 20 * ULP < float((lost - truth).norm() / norm)


Kind = Literal["adamw", "adamw_8bit", "adamw_offload"]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_offload"])
@pytest.mark.parametrize("wide", [False, True], ids=["float16", "float32 parameters"])
def test_a_scale_changes_no_bit_where_nothing_vanishes(kind: Kind, wide: bool) -> None:
    """Powers of 2 round nothing. eps is 1, without which AdamW would not see a factor that stayed in; the clip acts."""
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    ends = []
    for scale in (None, LossScale(256.0, growth_interval=2)):
        generator = torch.Generator().manual_seed(0)
        start = (torch.randn(8, 1024, generator=generator) * 0.1).half()
        parameter = nn.Parameter(start.float() if wide else start)
        optimizer = Optimizer([parameter], OptimConfig(optimizer=kind, eps=1.0, grad_clip=0.5), scale)
        norms = []
        for k in range(5):
            for _ in range(2):
                noise = torch.randn(8, 1024, generator=generator).half()
                value = 1.0 if scale is None else scale.value
                (parameter * noise.to(parameter.dtype)).float().sum().backward(torch.tensor(value))
            norms.append(optimizer.step(1e-2 * (k + 1)))
        ends.append((norms, optimizer.masters[0].detach().clone(), parameter.detach().clone()))
    (norms, master, weight), (other_norms, other_master, other_weight) = ends
    assert norms == other_norms and not torch.equal(master, start.float())
    assert torch.equal(master, other_master) and torch.equal(weight, other_weight)
    assert scale is not None and scale.value == 1024.0


# ---- overflow -------------------------------------------------------------------------------------------------------


def everything(learner: Learner) -> list[Tensor]:
    optimizer = learner.optimizer
    moments = [torch.as_tensor(v).clone() for s in optimizer.adamw.state.values() for v in s.values()]
    counted = torch.tensor([learner.updates, learner.loaded.policy_version])
    return [*(p.detach().clone() for p in (*optimizer.parameters, *optimizer.masters)), *moments, counted]


@pytest.mark.parametrize("options", [{}, {"lora": LoraSpec(rank=2)}], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_offload"])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(kind: Kind, options: dict[str, Any]) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    _, naive = model_pair("llama", torch.float32)
    loaded = tiny_model("llama", dtype=torch.float16, **options)
    rollout, scale = rollout_of(loaded, naive), LossScale(1024.0)
    learner = learner_of(loaded, scale, AlgoConfig(), lr=1e-3, optimizer=kind, token_budget=40)
    assert update(learner, rollout).updates
    before = everything(learner)
    scale.value, scale.good_steps = 2.0**60, 5
    done = update(learner, rollout)
    after = everything(learner)
    assert not done.updates and done.skipped == done.overflowed == 1
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    assert all(x.grad is None for x in (*learner.optimizer.parameters, *learner.optimizer.masters))
    assert (scale.value, scale.good_steps, scale.skipped) == (2.0**59, 0, 1)
    scale.value = 1024.0
    assert update(learner, rollout).updates and learner.updates == 2
    assert not all(map(torch.equal, before, everything(learner)))


def test_a_skipped_step_is_no_update() -> None:
    """Schedule, policy version and updates go on where they were; the scale falls until a step is taken, then grows."""
    loaded, naive = tiny_model("llama", dtype=torch.float16), model_pair("llama", torch.float32)[1]
    rollout, scale = rollout_of(loaded, naive), LossScale(2.0**30, growth_interval=4)
    algo = AlgoConfig(num_iterations=15, minibatches_per_rollout=2)
    learner = learner_of(loaded, scale, algo, lr=1e-5, schedule="linear", warmup_steps=5)
    learner.total_updates = 100
    done = update(learner, rollout)
    taken, lost = len(done.updates), done.overflowed
    assert taken + lost == 30 and lost == done.skipped == scale.skipped and 10 <= lost < 20
    assert learner.updates == loaded.policy_version == taken
    rates = [u["learning_rate"] for u in done.updates]
    assert rates[:5] == pytest.approx([1e-5 * k / 5 for k in range(1, 6)], rel=1e-12)
    assert rates[5:] == pytest.approx([1e-5 * (1 - k / 95) for k in range(taken - 5)], rel=1e-12)
    assert all(math.isfinite(u["grad_norm"]) and u["changed_share"] > 0 for u in done.updates[1:])
    grown = math.log2(scale.value) - 30 + lost
    assert grown == int(grown) and 1 <= grown <= taken / 4


# ---- errors ---------------------------------------------------------------------------------------------------------


def with_a_nan(loaded: LoadedModel) -> None:
    """Every backward pass gives one."""
    loaded.parameters()[0].register_hook(lambda g: torch.full_like(g, math.nan))


def test_what_no_scale_makes_finite_is_an_error_of_the_step() -> None:
    loaded, naive = tiny_model("llama", dtype=torch.float16), model_pair("llama", torch.float32)[1]
    rollout, scale = rollout_of(loaded, naive), LossScale(1024.0)
    learner = learner_of(loaded, scale, AlgoConfig(num_iterations=2, old_logprobs="sampler"), lr=1e-5)
    update(learner, rollout)
    with_a_nan(loaded)
    before, scale.value = everything(learner), 8.0
    assert update(learner, rollout).overflowed == 2 and scale.value == 2.0
    words = r"optimiser step 3: grad_norm: nan at a loss scale of 1; .*not taken.*lower lr.*dtype bfloat16 or float32"
    with pytest.raises(StepError, match=words):
        update(learner, rollout)
    assert all(map(torch.equal, before, everything(learner)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elsewhere_a_gradient_that_is_not_finite_is_an_error_at_once(dtype: torch.dtype) -> None:
    loaded, naive = tiny_model("llama", dtype=dtype), model_pair("llama", torch.float32)[1]
    learner = learner_of(loaded, LossScale.of(dtype), AlgoConfig())
    with_a_nan(loaded)
    with pytest.raises(StepError, match="optimiser step 1: grad_norm: nan; the step was not taken"):
        update(learner, rollout_of(loaded, naive))
    assert learner.updates == loaded.policy_version == 0


def test_a_loss_that_is_not_finite_is_an_error_at_any_scale() -> None:
    loaded, naive = tiny_model("llama", dtype=torch.float16), model_pair("llama", torch.float32)[1]
    rollout, scale = rollout_of(loaded, naive), LossScale()
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight").fill_(math.inf)
    with pytest.raises(StepError, match=r"logprobs: the trainer gives nan .*use float32 or bfloat16"):
        update(learner_of(loaded, scale, AlgoConfig()), rollout)
    assert scale == LossScale()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_refuses_what_needs_an_exact_sampler(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"old_logprobs: 'sampler' .*half-precision sampler"):
        build({"dtype": dtype, "ratio_level": "sequence", "old_logprobs": "sampler"})
    with pytest.raises(ConfigError, match=r"old_logprobs: 'fresh' .*auto chose it"):
        build({"dtype": dtype, "max_staleness": 2})
    assert build({"dtype": "float32", "max_staleness": 2}).rollouts_ahead == 2


# ---- runs -----------------------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "dtype": "float16",
    "prompts_per_step": 4,
    "group_size": 4,
    "eval_size": 0,
    "lr": 1e-3,
    "train_size": 60,
    "threads": 1,
}


def trainer_of(folder: Path, **values: Any) -> Trainer:
    return Trainer(build(merge([preset("tiny-sums").layer, SMALL, values, {"out": str(folder)}])))


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Everything but clocks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "step_time", "tok_per_s"))} for row in rows]


def state_of(trainer: Trainer) -> Any:
    return copy.deepcopy(trainer.parts.learner.optimizer.state_dict())


def same(one: Any, two: Any) -> bool:
    """Equal to the bit, through dictionaries and lists."""
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(v, two[k]) for k, v in one.items())
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def test_runs_resume_bit_for_bit_across_skipped_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LossScale, "of", staticmethod(lambda dtype: LossScale(2.0**20, growth_interval=3)))
    values = {"steps": 6, "num_iterations": 2, "save_every": 1, "schedule": "linear"}
    whole = trainer_of(tmp_path / "whole", **values)
    whole.run()
    rows, out = rows_in(tmp_path / "whole"), capsys.readouterr().out
    skipped = [row["updates_overflowed"] for row in rows]
    assert skipped[0] == 2 and rows[0]["updates_taken"] == rows[0]["policy_version"] == rows[0]["updates_total"] == 0
    assert (
        "gradient overflowed, no update" in out
        and "2 update(s) overflowed and was dropped; the loss scale is 262144 now" in out
    )
    assert rows[-1]["skipped_steps"] == sum(skipped) and rows[-1]["policy_version"] == 12 - sum(skipped) > 4
    assert rows[0]["loss_scale"] == 2.0**18 and rows[0]["skipped_steps"] == 2
    first = next(u for row in rows for u in row.get("updates", []))
    assert first["learning_rate"] == 1e-3
    for stop in (1, 2, 4):
        folder = tmp_path / str(stop)
        trainer = trainer_of(folder, **values)
        for _ in range(stop):
            trainer.step()
        trainer.save()
        trainer.folder.close()
        resumed = trainer_of(folder, **values, resume=True)
        assert resumed.parts.learner.optimizer.loss_scale == trainer.parts.learner.optimizer.loss_scale
        resumed.run()
        assert rows_in(folder) == rows
        assert same(state_of(resumed), state_of(whole))


def test_a_line_says_why_no_update_was_taken() -> None:
    clocks = dict.fromkeys(("time/rollout", "time/reward", "time/update", "step_time", "tok_per_s"), 1.0)
    counts = {"completions/mean_length": 1.0, "updates_taken": 0, "frac_reward_zero_std": 0.0, "stopped_by_kl": False}
    metrics: dict[str, Any] = {"reward": 0.5, **counts, **clocks}
    assert "gradient overflowed, no update" in step_line(1, 2, {**metrics, "updates_overflowed": 1})
    assert "no group carries signal, no update" in step_line(1, 2, {**metrics, "updates_overflowed": 0})


@pytest.mark.parametrize("values", [{}, {"lora_rank": 4, "optimizer": "adamw_8bit", "beta": 0.05}], ids=str)
def test_tiny_sums_trains_in_float16(tmp_path: Path, values: dict[str, Any]) -> None:
    """Finite, within the numerics budget, nothing skipped, and every step taken over float32 masters."""
    if "optimizer" in values:
        pytest.importorskip("bitsandbytes")
    trainer = trainer_of(tmp_path / "run", steps=3, strict_ratio=True, **values)
    metrics = [trainer.step() for _ in range(3)]
    trainer.folder.close()
    assert all(math.isfinite(m["policy_loss"]) and 0 < m["grad_norm"] < 100 for m in metrics)
    assert [m["policy_version"] for m in metrics] == [1, 2, 3] and metrics[-1]["skipped_steps"] == 0
    assert trainer.parts.loaded.dtype == torch.float16
    assert {m.dtype for m in trainer.parts.learner.optimizer.masters} == {torch.float32}


def test_a_runs_update_is_float32s_on_the_same_samples(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", steps=3)
    trainer.folder.close()
    wide = load_model("tiny-sums", device="cpu", dtype="float32")
    with torch.no_grad():
        for p, q in zip(wide.parameters(), trainer.parts.loaded.parameters(), strict=True):
            p.copy_(q)
    scored = trainer.rollout(Clock())
    norms = []
    for learner in (trainer.parts.learner, learner_of(wide, None, trainer.config.algo)):
        table, *_ = trainer.table(scored)
        learner.anchor = "fresh"
        (taken,) = run_updates(learner, table, len(scored.rollout.groups), rollout_index=0).updates
        norms.append(taken["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_an_audit_counts_the_updates_that_were_taken() -> None:
    config = narrowed(build(merge([preset("tiny-sums").layer, SMALL])), 4)
    parts = build_parts(config)
    scale = parts.learner.optimizer.loss_scale
    assert scale is not None
    scale.value = 2.0**22
    done = audit(config, parts, updates=12)
    parts.rewards.close()
    lost = scale.skipped
    assert 1 <= lost <= 10 and parts.loaded.policy_version == 12 - lost
    assert [effect.name for effect in done.movement] == ["after 1 update", f"after {12 - lost} updates"]
    assert any(note.startswith(f"{lost} update(s) overflowed in float16") for note in done.notes)


@pytest.mark.slow
def test_tiny_sums_learns_in_float16(tmp_path: Path) -> None:
    """As in float32 (test_trainer.py): the default preset, 60 steps."""
    layer = preset("tiny-sums").layer
    result = train(build(merge([layer, {"out": str(tmp_path / "run"), "dtype": "float16"}])))
    assert result.before is not None and result.after is not None
    assert result.after.mean_at_n > result.before.mean_at_n + 0.1
