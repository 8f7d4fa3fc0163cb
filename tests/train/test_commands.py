"""The commands that load a model: eval, sample, doctor, and train's way into the trainer."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers_model import save_tiny

from rhotrain.train.cli import main
from rhotrain.train.config import Config
from rhotrain.train.doctor import OPS, as_text, hf_kernels, report
from rhotrain.train.settings import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten questions, and a reward that is right for the first of every two completions it sees."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("score.py").write_text(
        "def every_other(completions):\n    return [float(i % 2 == 0) for i in range(len(completions))]\n"
    )
    return tmp_path / "q.jsonl"


def _json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_eval_prints_mean_and_pass_with_standard_errors(
    model: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "--model", str(model), "--task", "q.jsonl", "--template", "raw", "--max-prompt-tokens", "20"]
    argv += ["--max-new-tokens", "5", "--eval-size", "4", "--eval-metric", "score.py:every_other", "--device", "cpu"]
    assert main([*argv, "--json"]) == 0
    one = _json(capsys)
    # scores 1 0 1 0: mean 1/2, standard error sqrt(1/3) / sqrt(4); pass@1 is the same
    assert one["num_prompts"] == 4 and one["num_samples"] == 1
    assert one["mean_at_n"] == one["pass_at_n"] == 0.5
    assert one["standard_error"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert one["pass_standard_error"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert main([*argv, "--eval-samples", "2", "--eval-temperature", "1", "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert "mean@2 0.5000 +- 0.0000" in text and "pass@2 1.0000 +- 0.0000" in text
    assert text.count("->") == 1


def test_sample_follows_seed_and_temperature(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sample", "--model", str(model), "--template", "raw", "--max-new-tokens", "6", "--device", "cpu", "--json"]

    def draw(*flags: str) -> list[tuple[int, ...]]:
        assert main([*argv, *flags, "1+1=", "2+2="]) == 0
        records = json.loads(capsys.readouterr().out)
        for record in records:
            assert len(record["logprobs"]) == len(record["token_ids"]) <= 6
            assert all(value <= 0 for value in record["logprobs"])
            assert record["finish_reason"] in ("stop", "length")
        return [tuple(record["token_ids"]) for record in records]

    first = draw("-n", "4")
    assert len(first) == 8 and len(set(first)) > 4
    assert draw("--num-samples", "4", "--seed", "1") != first
    greedy = draw("-n", "2", "--temperature", "0")
    assert greedy[0] == greedy[1] and greedy[2] == greedy[3]


def test_sample_shows_prompts_and_completions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sample", "--model", str(model), "--template", "raw", "--max-new-tokens", "3", "--device", "cpu"]
    assert main([*argv, "-n", "2", "1+1=", "2+2="]) == 0
    text = capsys.readouterr().out
    assert text.count("prompt: ") == 2 and text.count("[1] ") == 2 and text.count("[2] ") == 2


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_what_the_engine_refuses_is_a_wrong_input(
    command: str, model: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--model", str(model), "--template", "raw", "--max-prompt-tokens", "20", "--device", "cpu"]
    argv += ["--max-new-tokens", "3", "--stop-token-ids", "99999"]
    argv += ["1+1="] if command == "sample" else ["--task", "q.jsonl", "--eval-size", "2", "--eval-metric", "exact"]
    if command == "sample":
        argv.remove("1+1=")
        argv.insert(1, "1+1=")
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert f"rhotrain {command}: error: stop_token_ids: [99999] are outside the vocabulary" in err


@pytest.mark.parametrize("stopped, code", [(False, 0), (True, 130)])
def test_train_hands_the_resolved_configuration_to_the_trainer(
    stopped: bool, code: int, model: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Config] = []

    def fake(config: Config) -> SimpleNamespace:
        got.append(config)
        return SimpleNamespace(stopped=stopped)

    monkeypatch.setattr(importlib.import_module("rhotrain.train.trainer"), "train", fake)
    argv = ["train", "--model", str(model), "--task", "q.jsonl", "--max-prompt-tokens", "20", "--max-new-tokens", "5"]
    assert main([*argv, "--preset", "minimax-cispo"]) == code
    layer = {"model": str(model), "task": "q.jsonl", "max_prompt_tokens": 20, "max_new_tokens": 5}
    assert got[0].algo.objective == "cispo" and got[0].algo.zero_variance == "filter"
    assert got[0].rollout == build(layer).rollout and got[0].model == build(layer).model


def test_doctor_reports_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    found = report()
    assert found["packages"]["torch"] and found["packages"]["rhotrain"]
    assert found["devices"]["cpu"]["cores"] >= 1 and found["devices"]["cpu"]["memory_gib"] > 0.5
    for ops in found["backends"].values():
        assert set(OPS) < ops.keys() and "attention" in ops
    assert "cpu" in found["backends"] and "sdpa" in found["backends"]["cpu"]["attention"].lower()
    assert main(["doctor", "--json"]) == (1 if found["problems"] else 0)
    assert json.loads(capsys.readouterr().out).keys() == found.keys()
    text = as_text(found)
    assert f"torch          {found['packages']['torch']}" in text and found["cache"]["folder"] in text


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requires = ["torch>=999", "no-such-package>=1", "absent>=1; extra == 'dev'", "tyro>=0.1"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem: torch " in text and "is too old; pip install 'torch>=999'" in text
    assert "problem: no-such-package is not installed" in text
    assert "absent" not in text and "problem: tyro" not in text


def test_doctor_sees_a_kernels_folder_that_shadows_hugging_faces(tmp_path: Path) -> None:
    ours = tmp_path / "kernels"
    ours.mkdir()
    for name in ("spec.py", "objective.py"):
        (ours / name).write_text("")
    _, broken = hf_kernels([str(tmp_path)])
    assert not broken, "a folder without __init__.py gives way"
    (ours / "__init__.py").write_text("")
    said, broken = hf_kernels([str(tmp_path)])
    assert broken and "SHADOWED" in said and str(ours) in said
