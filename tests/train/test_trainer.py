"""The whole loop on the tiny model: every objective preset, KL forms, truncated sampling, dtypes, files, the ratio."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_train import one_thread

from rhotrain.train.config import Config, ConfigError
from rhotrain.train.optim import StepError
from rhotrain.train.presets import PRESETS, preset
from rhotrain.train.settings import build, merge
from rhotrain.train.trainer import Clock, RunResult, Trainer, train

SMALL: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "steps": 2,
    "eval_size": 0,
    "lr": 1e-3,
    "train_size": 60,
    "threads": 1,
}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Any:
    with one_thread():
        yield


def config(folder: Path, *layers: dict[str, Any], **values: Any) -> Config:
    return build(merge([preset("tiny-sums").layer, *layers, SMALL, values, {"out": str(folder / "run")}]))


def run(folder: Path, *layers: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    result = train(config(folder, *layers, **values))
    return rows(result)


def rows(result: RunResult) -> list[dict[str, Any]]:
    return rows_in(result.folder)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name, p in PRESETS.items() if p.kind == "algorithm"])
def test_every_algorithm_preset_trains(tmp_path: Path, name: str) -> None:
    layer = {k: v for k, v in preset(name).layer.items() if k not in SMALL}
    steps = run(tmp_path, layer, minibatches_per_rollout=2)
    assert [s["step"] for s in steps] == [1, 2]
    taken = [u for s in steps for u in s.get("updates", [])]
    assert taken, "no update was taken, the test shows nothing"
    assert all(torch.isfinite(torch.tensor([u["grad_norm"], u["policy_loss"]])).all() for u in taken)
    assert sum(u["grad_norm"] for u in taken) > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.3},
        {"top_k": 4},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.1},
        {"min_new_tokens": 2},
    ],
    ids=str,
)
def test_the_ratio_is_one_at_the_first_update(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """The sampler's own numbers are the denominator, so anything but 1 would be a different distribution."""
    steps = run(tmp_path, **sampling, max_new_tokens=6)
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 2e-5
        assert abs(step["ratio/min"] - 1) < 2e-5 and abs(step["ratio/max"] - 1) < 2e-5
        assert step["clip_ratio/region_mean"] == 0
        truncated = set(sampling) - {"temperature"}
        assert (step["kept_mass"] < 1) if truncated else (step["kept_mass"] == 1)


def test_bounds_that_leave_out_one_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run(tmp_path, objective="cispo", ratio_max=0.2, steps=1)[0]
    out = capsys.readouterr().out
    assert "warning: the bounds [0, 0.2] leave out a ratio of 1" in out and "clip cannot act" not in out
    assert step["clip_ratio/region_mean"] == 1.0


def test_ignored_truncation_is_off_by_the_kept_mass_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With truncation=ignore the trainer scores the full softmax: the sampler's number is the same full one."""
    steps = run(tmp_path, top_k=2, truncation="ignore")
    assert "truncation=ignore" in capsys.readouterr().out
    assert steps[0]["kept_mass"] < 1 and abs(steps[0]["ratio/mean"] - 1) < 2e-5


def test_clip_comes_alive_after_the_first_update(tmp_path: Path) -> None:
    steps = run(tmp_path, num_iterations=4, lr=5e-3, steps=1)
    shares = [u["clip_ratio/region_mean"] for u in steps[0]["updates"]]
    spread = [u["ratio/max"] - u["ratio/min"] for u in steps[0]["updates"]]
    assert len(shares) == 4 and shares[0] == 0 and shares[-1] > 0
    assert spread[0] < 1e-4 < spread[1]
    assert steps[0]["policy_version"] == 4


def test_runs_resume_bit_for_bit_with_rollouts_ahead(tmp_path: Path) -> None:
    """The checkpoint holds what was drawn ahead; between two draws the weights have moved on."""
    values = {"steps": 7, "max_staleness": 4, "num_iterations": 2, "correction": "token_truncate", "save_every": 1}
    whole = run(tmp_path / "whole", **values)
    for stop in (1, 2, 5):
        trainer = Trainer(config(tmp_path / str(stop), **values))
        for _ in range(stop):
            trainer.step()
        assert len(trainer.queue.pending) == (3 - stop) % 3
        trainer.save()
        trainer.folder.close()
        resumed = run(tmp_path / str(stop), **values, resume=True)
        clocks = ("time/", "step_time", "tok_per_s")
        assert [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in resumed] == [
            {k: v for k, v in row.items() if not k.startswith(clocks)} for row in whole
        ]
    assert [row["staleness/max"] for row in whole] == [0, 2, 4, 0, 2, 4, 0]
    assert [row["tok_per_s"] is None for row in whole] == [False, True, True, False, True, True, False]
    fresh, stale = whole[0], whole[2]
    assert fresh["sampling/sampling_logp_difference/max"] < 2e-5 < stale["sampling/sampling_logp_difference/mean"]
    assert fresh["sampling/effective_sample_size"] > 0.9999 > stale["sampling/effective_sample_size"]
    assert fresh["correction/share_cut"] == 0 and not any(row["over_numerics_budget"] for row in whole)
    with pytest.raises(ConfigError, match="resume: steps was 7 and is now 9"):
        Trainer(config(tmp_path / "whole", **{**values, "steps": 9}, resume=True))


def test_a_sampler_with_other_weights_is_told_once_or_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine samples with weights that nobody has synchronised; the version says that all is well."""
    from rhotrain.model.load import load_model
    from rhotrain.rollout.engine import Engine

    for strict in (False, True):
        trainer = Trainer(config(tmp_path / str(strict), steps=3, strict_ratio=strict))
        forgotten = load_model("tiny-sums", device="cpu")
        with torch.no_grad():
            for parameter in forgotten.parameters():
                parameter.mul_(1.001)
        trainer.queue.engine = Engine(forgotten, num_pages=64)
        if strict:
            with pytest.raises(StepError, match=r"strict_ratio: .*rhotrain audit"):
                trainer.run()
            assert trainer.parts.loaded.policy_version == 0
        else:
            trainer.run()
            out = capsys.readouterr().out
            assert out.count("warning: sampler and trainer differ on the same weights") == 1
            assert all(row["over_numerics_budget"] for row in rows_in(trainer.folder.path)[:1])
        trainer.folder.close()


def test_clean_runs_stay_within_the_numerics_budget(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        steps = run(tmp_path / dtype, dtype=dtype, strict_ratio=True, steps=4, temperature=0.7)
        assert [step["over_numerics_budget"] for step in steps] == [[]] * 4
        assert steps[0]["sampling/sampling_logp_difference/max"] > 0


def test_dropout_by_name_spreads_the_ratio_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = run(tmp_path / "dropout", dropout=0.1, strict_ratio=True)
    out = capsys.readouterr().out
    assert "warning: dropout 0.1 alone, with no update of the policy, moves the log-ratio by" in out
    # sampler and frozen trainer see no dropout: the numerics budget holds, and the ratio is off by itself
    assert steps[0]["sampling/sampling_logp_difference/max"] < 2e-5
    assert steps[0]["log_ratio/abs_max"] > 1e-3
    clean = run(tmp_path / "clean")
    assert clean[0]["log_ratio/abs_max"] < 2e-5


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "note: one update per rollout: the ratio is 1 up to numerics and clip cannot act"),
        ({"old_logprobs": "fresh"}, "note: one update per rollout: the ratio is 1 by construction"),
        ({"top_k": 3, "num_iterations": 2}, "the ratio is conditional on the recorded sets"),
        ({"top_k": 3, "truncation": "ignore"}, "warning: truncation=ignore scores the full softmax"),
        (
            {"max_staleness": 1},
            "note: rollouts are up to 1 optimiser steps old at their first update; the ratio contains",
        ),
        ({"max_staleness": 1, "old_logprobs": "trainer"}, "nothing corrects for it: biased; set a correction"),
        ({"max_staleness": 1, "correction": "sequence_mask"}, "correction sequence_mask weighs it"),
        ({"max_staleness": 2, "num_iterations": 2, "kl_stop": 0.1}, "and kl_stop counts it"),
        ({"dropout": 0.1}, "note: dropout 0.1 in the current policy's forward only"),
        ({"dropout": 0.1, "old_logprobs": "fresh"}, "the ratio is 1 by construction"),
        ({"dtype": "bfloat16", "old_logprobs": "sampler"}, "warning: old_logprobs=sampler in bfloat16: the rounding"),
        ({"dtype": "bfloat16"}, "the ratio is 1 by construction"),
        ({"objective": "reinforce", "num_iterations": 2}, "warning: reinforce has no ratio"),
    ],
    ids=str,
)
def test_what_a_run_says_of_its_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], line: str
) -> None:
    train(config(tmp_path, values, steps=0))
    out = capsys.readouterr().out
    assert line in out
    moves = (
        "num_iterations" in values
        or values in ({"max_staleness": 1}, {"dropout": 0.1})
        or values == {"dtype": "bfloat16", "old_logprobs": "sampler"}
    )
    assert out.count("clip cannot act") == (0 if moves else 1)


def test_kl_in_reward_is_k1_of_each_completion_and_changes_the_advantages(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, kl_in_reward=0.5, steps=3, lr=5e-3))
    assert trainer.parts.reference is not None
    trainer.step()  # so that policy and reference differ
    table, _, penalty_PG = trainer.table(trainer.rollout(Clock()))
    assert table.ref_logprobs is not None and (penalty_PG != 0).all()
    for t in table.trajectories:
        ids = torch.tensor([t.prompt_ids + t.completion.token_ids])
        model = trainer.parts.reference
        from rhotrain.model.attention import PackedContext

        with torch.no_grad(), model.with_attention(PackedContext.make([ids.numel()])):
            hidden_TH = model.hidden(ids[0], torch.arange(ids.numel()))
            logits_TV = model.head.logits(hidden_TH)[:, : model.vocab_size].double()
        reference = torch.log_softmax(logits_TV, -1)[len(t.prompt_ids) - 1 : -1]
        reference_N = reference.gather(1, torch.tensor(t.completion.token_ids)[:, None])[:, 0]
        k1 = (torch.tensor(t.completion.logprobs, dtype=torch.float64) - reference_N).sum()
        assert float(penalty_PG[t.group, t.member]) == pytest.approx(0.5 * float(k1), abs=1e-4)
    trainer.folder.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kl_in_reward_is_exactly_zero_before_the_policy_moves(tmp_path: Path, dtype: str) -> None:
    """The sampler's noise must not become a reward: a group's std would scale it up to advantages of size 1."""
    rewards = tmp_path / "same.py"
    rewards.write_text("def same(completions, **fields):\n    return [0.0] * len(completions)\n")
    layer = {"rewards": (f"{rewards}:same",), "kl_in_reward": 0.1, "dtype": dtype, "steps": 1, "advantage_eps": 0.0}
    step = run(tmp_path, layer)[0]
    assert step["kl_penalty/mean"] == 0.0 and step["frac_reward_zero_std"] == 1.0 and step["updates_taken"] == 0


def test_a_policy_that_diverged_stops_the_run(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    with torch.no_grad():
        trainer.parts.loaded.parameters()[0].fill_(float("nan"))
    with pytest.raises(StepError, match=r"all 16 completions ended in an error.*NaN or infinite.*lower lr"):
        trainer.step()
    trainer.folder.close()


def test_no_reference_is_loaded_without_a_kl(tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path))
    assert trainer.parts.reference is None


@pytest.mark.parametrize(
    "values",
    [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float64"}, {"gradient_checkpointing": True}],
    ids=str,
)
def test_other_dtypes_and_checkpointing(tmp_path: Path, values: dict[str, Any]) -> None:
    trainer = Trainer(config(tmp_path, **values))
    masters = trainer.parts.learner.optimizer.masters
    before = [p.detach().clone() for p in masters]
    metrics = trainer.step()
    half = values.get("dtype") in ("bfloat16", "float16")
    # The masters: a bf16 norm weight of 1 does not see a step of 1e-3, its float32 master does.
    assert metrics["updates_taken"] == 1 and all(not torch.equal(a, b) for a, b in zip(before, masters))
    assert trainer.parts.learner.anchor == ("fresh" if half else "sampler")
    assert ("loss_scale" in metrics) == (values.get("dtype") == "float16")
    if half:
        assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
        assert {m.dtype for m in masters} == {torch.float32}
    trainer.folder.close()


def test_jsonl_task_with_a_reward_file_and_unscorable_completions(tmp_path: Path) -> None:
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(9)))
    rewards = tmp_path / "mine.py"
    rewards.write_text(
        "def digits(completions, answer, **fields):\n"
        "    return [None if len(c) > 1 else float(c == a) for c, a in zip(completions, answer)]\n"
    )
    steps = run(tmp_path, task=str(questions), rewards=(f"{rewards}:digits",), task_args={})
    assert all(f"rewards/digits/{kind}" in steps[0] for kind in ("mean", "std"))
    logged = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(logged) == 2 * 16
    for row in logged:
        assert (row["reward"] is None) == (len(row["completion"]) > 1)
        assert row["reward"] is not None or row["advantage"] == 0.0
    assert any(row["reward"] is None for row in logged) == (
        steps[0]["frac_unscorable"] + steps[1]["frac_unscorable"] > 0
    )


def test_a_failing_reward_function_is_counted_and_nothing_is_learned(tmp_path: Path) -> None:
    rewards = tmp_path / "broken.py"
    rewards.write_text("def broken(completions, **fields):\n    raise RuntimeError('out of tea')\n")
    trainer = Trainer(config(tmp_path, rewards=(f"{rewards}:broken",), eval_metric="task"))
    before = [p.detach().clone() for p in trainer.parts.loaded.parameters()]
    metrics = trainer.step()
    assert metrics["reward"] is None and metrics["rewards/broken/mean"] is None
    assert metrics["reward_failures"] == 16 and metrics["frac_unscorable"] == 1.0 and metrics["updates_taken"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parts.loaded.parameters()))
    assert trainer.parts.loaded.policy_version == 0 and trainer.parts.learner.updates == 0
    trainer.folder.close()


def test_trl_metric_names_are_there(tmp_path: Path) -> None:
    step = run(tmp_path, objective="cispo")[0]
    names = {
        *("reward", "reward_std", "frac_reward_zero_std", "num_tokens", "step_time", "entropy", "kl", "policy_loss"),
        *("rewards/task/mean", "rewards/task/std", "completions/mean_length", "completions/min_length"),
        *("completions/max_length", "completions/clipped_ratio", "completions/mean_terminated_length"),
        *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio", "grad_norm"),
        *("sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/max", "learning_rate"),
        *("time/rollout", "time/reward", "time/update", "tok_per_s", "ratio/mean", "log_ratio/abs_max"),
        *("log_ratio/mean", "clip_ratio/low_positive", "clip_ratio/low_negative", "clip_ratio/high_positive"),
        *("clip_ratio/high_negative", "approx_kl/k1", "approx_kl/k3", "sampling/k1", "sampling/k3", "kept_mass"),
        *("sampling/effective_sample_size", "staleness/mean", "staleness/max", "staleness/dropped"),
    }
    assert names <= step.keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": (99999,)}, r"stop_token_ids: \[99999\] do not work; the model's vocabulary has 16 ids"),
        ({"kv_memory_gib": 1e-8}, r"kv_memory_gib: 1e-08 does not work; one prompt and its completion take .* GiB"),
        ({"eval_size": 10, "eval_metric": "nope"}, r"eval_metric: .*nope"),
        (
            {"max_prompt_tokens": 4, "long_prompts": "tail", "max_new_tokens": 64},
            r"max_new_tokens: 64 after a prompt of",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_settings_that_do_not_fit_the_model_are_refused_and_leave_no_folder(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(config(tmp_path, **values))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_sums_learns(tmp_path: Path, seed: int) -> None:
    """The default preset: held-out accuracy must rise by more than five standard errors of its own measurement."""
    layer = preset("tiny-sums").layer
    result = train(build(merge([layer, {"out": str(tmp_path / "run"), "seed": seed}])))
    assert result.before is not None and result.after is not None
    assert result.after.mean_at_n > result.before.mean_at_n + 0.1
