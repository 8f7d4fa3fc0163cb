"""The command line: layers, help without torch, and wrong inputs that end in one message, exit code 2, no traceback."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rhotrain.train.checks import ACTS_WHEN, PRESET_POSITIONS, check_flags_act, check_positions, model_positions
from rhotrain.train.cli import main
from rhotrain.train.commands import COMMANDS, EVAL, SAMPLE, TRAIN
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.flags import parse
from rhotrain.train.presets import PRESETS
from rhotrain.train.settings import build, layer_of, settings, write_toml


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a few wrong files in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RHOTRAIN_CACHE", str(tmp_path / "cache"))
    Path("typo.toml").write_text("[optim]\nlrr = 1.0\n")
    Path("type.toml").write_text('[optim]\nlr = "hot"\n')
    Path("place.toml").write_text("[run]\nlr = 1.0\n")
    Path("section.toml").write_text("[optm]\nlr = 1.0\n")
    Path("broken.toml").write_text("[optim\n")
    Path("batch.toml").write_text("[rollout]\nprompts_per_step = 7\n[algo]\nminibatches_per_rollout = 2\n")
    Path("short").mkdir()
    Path("short/config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    Path("empty").mkdir()
    return tmp_path


# The wrong inputs: command line -> what the one message must say (the field, the value, the fix).
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "unknown command": (["trian"], ["trian", "did you mean `train`"]),
    "flag typo": (["train", "--grop-size", "4"], ["--grop-size", "did you mean --group-size"]),
    "flag of another command": (["eval", "--lr", "1"], ["--lr", "setting of training", "eval"]),
    "not a number": (["train", "--lr", "fast"], ["lr", "'fast'", "need a finite number"]),
    "not an integer": (["train", "--steps", "2.5"], ["steps", "2.5", "need an integer"]),
    "value missing": (["train", "--lr", "--steps", "3"], ["--lr", "too few values", "--lr FLOAT"]),
    "one of two values": (["train", "--betas", "0.9"], ["--betas", "--betas FLOAT FLOAT"]),
    "list given twice": (["train", "--rewards", "task", "--rewards", "exact"], ["--rewards", "twice", "behind one"]),
    "unknown choice": (["train", "--objective", "cipso"], ["objective", "'cipso'", "did you mean cispo"]),
    "k1 as a loss": (["train", "--kl", "k1", "--beta", "0.1"], ["kl", "'k1'", "exactly 0", "kl_in_reward"]),
    "unknown preset": (["train", "--preset", "dappo"], ["preset", "'dappo'", "did you mean `dapo`"]),
    "preset as a file": (["train", "dapo"], ["dapo", "--preset dapo"]),
    "file behind the flags": (["train", "--steps", "3", "typo.toml"], ["typo.toml", "in front of the flags"]),
    "no such file": (["train", "none.toml"], ["none.toml", "cannot be read", "No such file"]),
    "broken TOML": (["train", "broken.toml"], ["broken.toml", "not valid TOML", "line 1"]),
    "TOML key typo": (["train", "typo.toml"], ["typo.toml", "[optim] lrr", "did you mean `lr`"]),
    "TOML section typo": (["train", "section.toml"], ["section.toml", "[optm]", "did you mean `optim`"]),
    "TOML key elsewhere": (["train", "place.toml"], ["place.toml", "[run] lr", "put it under [optim]"]),
    "TOML type": (["train", "type.toml"], ["type.toml", "lr", "'hot'", "need a finite number"]),
    "batch not divisible": (["train", "batch.toml"], ["minibatches_per_rollout", "2", "divide", "7", "batch.toml"]),
    "greedy training": (["train", "--temperature", "0"], ["temperature", "0.0", "temperature > 0"]),
    "fresh with two updates": (
        ["train", "--old-logprobs", "fresh", "--num-iterations", "2"],
        ["old_logprobs", "'fresh'", "use trainer or sampler"],
    ),
    "beta without KL": (["train", "--beta", "0.1", "--kl", "none"], ["beta", "0.1", "choose k2, k3"]),
    "grpo's clip for cispo": (
        ["train", "--objective", "cispo", "--clip-high", "0.3"],
        ["clip_high", "0.3", "ratio_max"],
    ),
    "group of one": (["train", "--group-size", "1"], ["group_size", "1", "at least 2"]),
    "greedy pass@n": (["eval", "--eval-samples", "4"], ["eval_samples", "4", "eval_temperature above 0"]),
    "budget too small": (["train", "--token-budget", "20"], ["token_budget", "20", "raise token_budget"]),
    "resume without a folder": (["train", "--resume"], ["resume", "True", "name the run folder"]),
    "top-p out of range": (["sample", "--top-p", "1.5", "3+4="], ["top_p", "1.5", "0 < top_p <= 1"]),
    "no prompt": (["sample", "--temperature", "0"], ["prompts", "none given", 'rhotrain sample "3+4="']),
    "not key=value": (["train", "--task-args", "min_terms"], ["task_args", "'min_terms'", "key=value"]),
    "unknown task": (["train", "--task", "tiny-sum"], ["task", "'tiny-sum'", "did you mean 'tiny-sums'"]),
    "unknown task parameter": (
        ["train", "--task", "tiny-sums", "--task-args", "digits=3"],
        ["task_args", "'digits'", "tiny-sums takes"],
    ),
    "longer than the model": (
        ["train", "--model", "short", "--max-prompt-tokens", "40", "--max-new-tokens", "30"],
        ["max_prompt_tokens", "40", "70 tokens", "64 positions", "lower one"],
    ),
    "no such reward argument": (
        [
            "train",
            "--reward-args",
            "tusk.bare=1",
            "--model",
            "short",
            "--max-prompt-tokens",
            "9",
            "--max-new-tokens",
            "8",
        ],
        ["reward_args", "'tusk'", "did you mean 'task'"],
    ),
    "no model there": (["train", "--model", "./nowhere"], ["model", "./nowhere", "does not exist"]),
    "folder without a model": (["sample", "--model", "./empty", "3+4="], ["model", "./empty", "no config.json"]),
    "unknown device": (["train", "--device", "gpu"], ["device", "'gpu'", "auto, cpu, cuda or cuda:N"]),
}


def _one_message(text: str, parts: list[str]) -> None:
    assert "Traceback" not in text
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("rhotrain") and ": error: " in lines[0]
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gives_one_message_and_code_2(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, parts = WRONG[name]
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    _one_message(err, parts)
    left = {p.name for p in folder.iterdir()} - {"short", "empty", "cache"}
    assert all(name.endswith(".toml") for name in left), "a refused run leaves nothing behind"


def test_there_are_at_least_twenty_wrong_inputs() -> None:
    assert len(WRONG) >= 20


def _run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rhotrain.train.cli", *argv], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", ["flag typo", "TOML type", "unknown task parameter", "batch not divisible"])
def test_wrong_input_in_a_process_of_its_own(name: str, folder: Path) -> None:
    argv, parts = WRONG[name]
    done = _run(*argv, cwd=folder)
    assert done.returncode == 2 and done.stdout == ""
    _one_message(done.stderr, parts)


HELP = """
import sys
from rhotrain.train.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 0, stop.code
heavy = {"torch", "transformers", "numpy", "triton", "reasoning_gym"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=lambda a: " ".join(a))
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", HELP, *argv], capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert "usage: rhotrain" in done.stdout
    print(f"rhotrain {' '.join(argv)}: {seconds:.2f} s")
    assert seconds < 10, "far above the half second that it takes on an idle machine: something heavy is imported"


def test_train_help_shows_every_setting_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    plain = " ".join(text.replace("│", " ").split())
    for setting in settings().values():
        assert f"--{setting.name.replace('_', '-')}" in text
        assert setting.help in plain, setting.name


def test_help_shows_the_defaults_of_the_presets_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--preset", "smollm2-sums", "dapo", "--help"])
    plain = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: smollm2)" in plain and "(default: 0.28)" in plain
    assert "(default: min_terms=2 max_terms=2 min_digits=1 max_digits=2)" in plain


def _config(*argv: str) -> Config:
    return parse(TRAIN, argv).config()


def test_train_alone_is_the_preset_tiny_sums() -> None:
    assert _config() == build(PRESETS["tiny-sums"].layer)


def test_tiny_sums_lies_below_only_when_nobody_names_a_model_or_task(folder: Path) -> None:
    Path("named.toml").write_text('[task]\ntask = "chain_sum"\n')
    tiny_lr, plain_lr = PRESETS["tiny-sums"].layer["lr"], Config().optim.lr
    assert _config("--preset", "dapo").optim.lr == tiny_lr
    assert _config("--steps", "3").optim.lr == tiny_lr
    assert _config("--model", "some/model").optim.lr == plain_lr
    assert _config("--task=chain_sum").optim.lr == plain_lr
    assert _config("named.toml").optim.lr == plain_lr


def test_presets_then_files_then_flags(folder: Path) -> None:
    Path("a.toml").write_text("[optim]\nlr = 1e-3\nweight_decay = 0.1\n[algo]\nclip_high = 0.5\n")
    Path("b.toml").write_text("[optim]\nlr = 2e-3\n")
    config = _config("a.toml", "b.toml", "--preset", "smollm2-sums", "dapo", "--weight-decay", "0.2")
    assert config.model.model == "smollm2"
    assert config.algo.clip_high == 0.5 and config.algo.mask_truncated
    assert config.optim.lr == 2e-3 and config.optim.weight_decay == 0.2


def test_presets_can_be_repeated_and_written_with_equals() -> None:
    one = _config("--preset", "smollm2-sums", "dapo", "--steps", "3")
    assert _config("--preset=smollm2-sums", "--steps=3", "--preset=dapo") == one


def test_flags_of_every_kind() -> None:
    config = _config(
        *("--no-share-prompts", "--gradient-checkpointing", "--betas", "0.5", "0.75", "--lr", "-0.0"),
        *("--rewards", "exact", "length*0.5", "--stop-token-ids", "1", "2", "--stop-strings", "\n\n", "end"),
        *("--system-prompt", "two words", "--task-args", "a=1", "b.c=[1, 2]", "--group_size", "3"),
        *("--reward-args", "length.low=2", "--kl", "k2", "--model", "x"),
    )
    assert not config.optim.share_prompts and config.model.gradient_checkpointing
    assert config.optim.betas == (0.5, 0.75) and config.optim.lr == 0.0
    assert config.reward.rewards == ("exact", "length*0.5") and config.reward.reward_args == {"length": {"low": 2}}
    assert config.rollout.stop_token_ids == (1, 2) and config.rollout.stop_strings == ("\n\n", "end")
    assert config.task.system_prompt == "two words" and config.task.task_args == {"a": 1, "b": {"c": [1, 2]}}
    assert config.rollout.group_size == 3 and config.algo.kl == "k2"


def test_a_flag_adds_to_the_tables_of_a_preset() -> None:
    args = _config("--preset", "smollm2-sums", "--task-args", "max_terms=5", "min_digits=null").task.task_args
    assert args == {"min_terms": 2, "max_terms": 5, "max_digits": 2}
    assert _config("--preset", "smollm2-sums", "--task", "countdown").task.task_args == {}


def test_a_resumed_run_takes_the_settings_of_its_folder(folder: Path) -> None:
    stored = build({"steps": 17, "lr": 3e-4, "model": "m", "out": "run"})
    Path("run").mkdir()
    write_toml(stored, Path("run/config.toml"))
    again = _config("--resume", "--out", "run")
    assert again.run.resume and layer_of(again) | {"resume": False} == layer_of(stored)
    assert _config("--out", "run", "--resume", "--steps", "20").run.steps == 20
    assert _config("--out", "run").optim.lr == PRESETS["tiny-sums"].layer["lr"], "a new run does not read it"


def test_flags_that_would_do_nothing_are_refused() -> None:
    sleeping: dict[str, Any] = {
        "clip_low": build({"objective": "cispo"}),
        "clip_high": build({"objective": "reinforce"}),
        "ratio_min": build({}),
        "ratio_max": build({}),
        "kl": build({}),
        "ref_model": build({}),
        "advantage_std": build({"advantage_scale": "none"}),
        "advantage_eps": build({"advantage_scale": "none"}),
        "kl_stop": build({}),
        "lr_final": build({}),
        "truncation": build({}),
        "ratio_level": build({"objective": "reinforce"}),
        "correction_min": build({}),
        "correction_max": build({}),
        "dual_clip": build({"objective": "cispo"}),
        "sapo_tau_pos": build({}),
        "sapo_tau_neg": build({}),
        "overlong_penalty": build({}),
        "reward_aggregation": build({}),
        "lora_alpha": build({}),
        "offload_reference": build({"beta": 0.1, "lora_rank": 4}),
        "lora_targets": build({}),
    }
    acting = {
        "ratio_min": build({"objective": "cispo"}),
        "ratio_max": build({"objective": "cispo"}),
        "sapo_tau_pos": build({"objective": "sapo"}),
        "sapo_tau_neg": build({"objective": "sapo"}),
        "overlong_penalty": build({"overlong_buffer": 4}),
        "reward_aggregation": build({"rewards": ("task", "length")}),
        "lora_alpha": build({"lora_rank": 4}),
        "lora_targets": build({"lora_rank": 4}),
    }
    awake = build(
        {"beta": 0.1, "num_iterations": 2, "schedule": "linear", "top_k": 5, "correction": "sequence_mask"},
    )
    assert sleeping.keys() == ACTS_WHEN.keys()
    for name, config in sleeping.items():
        with pytest.raises(ConfigError, match=f"^{name}: "):
            check_flags_act(config, {name: 1})
        check_flags_act(acting.get(name, awake), {name: 1})
        check_flags_act(config, {})


def test_eval_and_sample_take_only_settings_that_they_use() -> None:
    for command in (EVAL, SAMPLE):
        assert set(command.fields or ()) <= settings().keys()
    assert {"lr", "group_size", "temperature", "rewards"}.isdisjoint(EVAL.fields or ())


def test_a_runs_resolved_settings_are_a_file_for_eval(folder: Path) -> None:
    write_toml(build(PRESETS["smollm2-sums"].layer), Path("config.toml"))
    layer = parse(EVAL, ["config.toml", "--model", "runs/x/model", "--eval-size", "50"]).layer
    assert (layer["model"], layer["eval_size"], layer["eval_metric"]) == ("runs/x/model", 50, "last_number")


def test_positions_of_a_folder_are_read_without_its_weights(folder: Path) -> None:
    assert model_positions("short") == 64
    check_positions("short", max_prompt_tokens=40, max_new_tokens=24)
    with pytest.raises(ConfigError, match="65 tokens, but short has 64 positions"):
        check_positions("short", max_prompt_tokens=40, max_new_tokens=25)
    Path("nested").mkdir()
    Path("nested/config.json").write_text('{"text_config": {"max_position_embeddings": 32}}')
    assert model_positions("nested") == 32
    Path("nested/config.json").write_text("{oops")
    with pytest.raises(ConfigError, match=r"model: 'nested' does not work; its config.json is not JSON"):
        model_positions("nested")
    Path("endless").mkdir()
    Path("endless/config.json").write_text("{}")
    assert model_positions("endless") is None


def test_positions_of_the_presets_are_those_of_their_models() -> None:
    from rhotrain.model import tiny

    assert PRESET_POSITIONS["tiny-sums"] == tiny.build_model(0).config.max_position_embeddings


def test_dry_run_prints_settings_that_read_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--model", "short", "--max-prompt-tokens", "16", "--max-new-tokens", "8", "--dry-run"]
    assert main(argv) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert tables["model"]["model"] == "short" and tables["rollout"]["max_new_tokens"] == 8
    assert not (folder / "runs").exists()


def test_presets_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in PRESETS)
    assert main(["presets", "minimax-cispo"]) == 0
    assert "[algo] ratio_max = 5.0  # our choice" in capsys.readouterr().out


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rhotrain ")
    assert main([]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in COMMANDS)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: object) -> int:
        raise ValueError("a bug, not a wrong input")

    entry = COMMANDS["presets"]
    monkeypatch.setitem(COMMANDS, "presets", type(entry)(entry.command, broken))
    with pytest.raises(ValueError, match="a bug"):
        main(["presets"])


def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    command = f"{sys.executable} -m rhotrain.train.cli presets dapo | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
