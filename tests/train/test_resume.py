"""A run that is killed at a random moment and resumed is, bit for bit, the run that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rhotrain.train.checkpoint import CheckpointError, checkpoints, latest_checkpoint, load_state
from rhotrain.train.config import ConfigError
from rhotrain.train.settings import read_toml

STEPS = 40
ARGUMENTS = [
    *("--prompts-per-step", "4", "--group-size", "4", "--num-iterations", "2", "--minibatches-per-rollout", "2"),
    *("--steps", str(STEPS), "--save-every", "2", "--eval-every", "15", "--eval-size", "20", "--lr", "1e-3"),
    *("--schedule", "cosine", "--warmup-steps", "3", "--beta", "0.01", "--token-budget", "64", "--threads", "1"),
]


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "rhotrain.train.cli", "train", *ARGUMENTS, "--out", str(folder), *more]


def finish(folder: Path, *more: str) -> str:
    done = subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Everything but clocks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "step_time", "tok_per_s", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model" / "model.safetensors"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder)
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    assert metrics(folder) == metrics(whole)
    assert (folder / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    mine, theirs = weights(folder), weights(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32)) for name in mine)


def kill_after(folder: Path, steps: int, extra_seconds: float) -> None:
    """Start the run and SIGKILL it some time after `steps` steps stand in metrics.jsonl."""
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = folder / "metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and sum('"num_tokens"' in line for line in log.read_text().splitlines()) >= steps:
            break
        time.sleep(0.01)
    time.sleep(extra_seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed_is_bit_for_bit_the_whole_run(tmp_path: Path, whole: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "run"
    kill_after(folder, steps=rng.randint(2, STEPS // 2), extra_seconds=rng.random() * 0.3)
    assert checkpoints(folder), "killed before the first checkpoint; the test needs one"
    assert not (folder / "model").exists(), "the run had ended before it was killed; the test proves nothing"
    assert "resumed after step" in finish(folder, "--resume")
    assert_same(folder, whole)


def test_interrupt_ends_after_a_checkpoint_and_the_run_goes_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:2] == ["step", f"3/{STEPS}"]:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-2000:]
    assert "stopped early" in out and "--resume" in out
    assert int(latest_checkpoint(folder).name.removeprefix("step-")) < STEPS
    finish(folder, "--resume")
    assert_same(folder, whole)


def test_keep_last_and_what_the_folder_holds(whole: Path) -> None:
    assert [p.name for p in checkpoints(whole)] == [f"step-{STEPS - 2:06d}", f"step-{STEPS:06d}"]
    assert {"config.toml", "env.json", "metrics.jsonl", "rollouts.jsonl", "checkpoints", "model"} <= {
        p.name for p in whole.iterdir()
    }
    assert read_toml(whole / "config.toml")["num_iterations"] == 2
    assert json.loads((whole / "env.json").read_text())["packages"]["torch"]


def test_final_model_opens_in_transformers(whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    ids = tokenizer("12+3=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_resume_refuses_other_settings_and_empty_folders(tmp_path: Path, whole: Path) -> None:
    from rhotrain.train.run_folder import RunFolder
    from rhotrain.train.settings import build

    saved = read_toml(whole / "config.toml")
    with pytest.raises(ConfigError, match=r"resume: lr was 0.001 and is now 0.5"):
        RunFolder.find(build({**saved, "lr": 0.5, "resume": True, "out": str(whole)}))
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        RunFolder.find(build({**saved, "out": str(whole)}))
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunFolder.find(build({**saved, "resume": True, "out": str(tmp_path / "nothing")}))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        latest_checkpoint(tmp_path)


def test_another_number_of_steps_is_refused_where_the_schedule_depends_on_it(whole: Path) -> None:
    from rhotrain.train.run_folder import RunFolder
    from rhotrain.train.settings import build

    longer = {**read_toml(whole / "config.toml"), "steps": STEPS + 5, "resume": True, "out": str(whole)}
    with pytest.raises(ConfigError, match=rf"resume: steps was {STEPS} and is now {STEPS + 5}"):
        RunFolder.find(build(longer))  # the whole run has a cosine schedule


def test_two_runs_cannot_share_a_folder_and_a_dead_one_is_named(tmp_path: Path) -> None:
    from rhotrain.train.run_folder import RunFolder
    from rhotrain.train.settings import build

    config = build({"out": str(tmp_path / "run")})
    first, second = RunFolder.find(config), RunFolder.find(config)
    first.create(config)
    with pytest.raises(ConfigError, match=r"cannot be written .File exists."):
        second.create(config)
    with pytest.raises(ConfigError, match="ended before its first checkpoint, remove it, or name another folder"):
        RunFolder.find(config)


def test_a_damaged_checkpoint_names_the_one_before(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for checkpoint in checkpoints(whole):
        (tmp_path / "checkpoints" / checkpoint.name).mkdir()
        (tmp_path / "checkpoints" / checkpoint.name / "trainer.pt").write_bytes(b"not a checkpoint")
    last = latest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is damaged .*remove {last.name}, and step-{STEPS - 2:06d} is taken"):
        load_state(last)


def test_a_half_written_checkpoint_is_not_taken(tmp_path: Path, whole: Path) -> None:
    half = tmp_path / "checkpoints" / ".step-000009"
    half.mkdir(parents=True)
    (half / "trainer.pt").write_bytes(b"half")
    os.symlink(whole / "checkpoints" / f"step-{STEPS:06d}", tmp_path / "checkpoints" / f"step-{STEPS:06d}")
    assert latest_checkpoint(tmp_path).name == f"step-{STEPS:06d}"


def test_a_checkpoint_of_an_earlier_version_says_how_to_go_on(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    torch.save({"step_index": 1}, checkpoint / "trainer.pt")
    with pytest.raises(CheckpointError, match=r"has format 1, this version reads 3; .*--model .*step-000001/model"):
        load_state(checkpoint)
