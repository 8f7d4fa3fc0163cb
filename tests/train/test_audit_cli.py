"""`rhotrain audit` as it is typed: exit codes, text and JSON, foreign logprobs, and wrong inputs."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers_train import one_thread

from rhotrain.model.load import load_model, save_model
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.probe_client import ServerCompletion
from rhotrain.train import foreign
from rhotrain.train.causes import CAUSES
from rhotrain.train.cli import main
from rhotrain.train.commands import AUDIT, TRAIN
from rhotrain.train.flags import parse

SMALL = ("--threads", "1", "--group-size", "6", "--train-size", "60", "--updates", "1")


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def audit(*argv: str) -> int:
    return main(["audit", *argv])


def found(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


# ---- our own pipeline -----------------------------------------------------------------------------------------------


def test_a_clean_pipeline_ends_with_0_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(*SMALL) == 0
    out, err = capsys.readouterr()
    assert "verdict: clean" in out and "after 1 update" in out and "audit: sampling" in err
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--dropout", "0.1"), "dropout"),
        (("--top-k", "4", "--top-p", "0.7", "--truncation", "ignore"), "truncation"),
        (("--max-staleness", "2", "--old-logprobs", "trainer"), "staleness"),
    ],
)
def test_a_cause_ends_with_1_and_is_named(
    flags: tuple[str, ...], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(*SMALL, *flags, "--json") == 1
    done = found(capsys)
    assert done["found"] == [cause] and done["exit_code"] == 1 and done["kind"] == "pipeline"
    assert [effect["name"] for effect in done["causes"]] == list(CAUSES)


def test_a_file_and_presets_are_taken_as_train_takes_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("[rollout]\ntemperature = 0.5\n[algo]\nold_logprobs = 'trainer'\n")
    assert parse(AUDIT, ["run.toml", "--lr", "1e-3"]).config() == parse(TRAIN, ["run.toml", "--lr", "1e-3"]).config()
    assert audit("run.toml", *SMALL, "--groups", "2", "--preset", "minimax-cispo", "--clip-high", "0.3", "--json") == 0
    done = found(capsys)
    assert done["sampling"] == "temperature 0.5" and done["anchor"] == "trainer" and done["groups"] == 2
    assert done["bounds"]["clip_high"] == 1.3, "the table shows GRPO's clip whatever trains"


# ---- logprobs of somebody else --------------------------------------------------------------------------------------


def sampled(temperature: float, n: int = 6) -> list[tuple[tuple[int, ...], Completion]]:
    loaded = load_model("tiny-sums", device="cpu")
    prompts = [loaded.tokenizer.encode(text, add_special_tokens=False) for text in ("12+7=", "30-4=", "8+8=", "44+5=")]
    params = SamplingParams(temperature=temperature, max_new_tokens=8)
    groups = Engine(loaded, num_pages=64).generate(prompts, params, n=n)
    return [(tuple(prompt), c) for prompt, group in zip(prompts, groups) for c in group]


def write(pairs: Sequence[tuple[tuple[int, ...], Completion]]) -> str:
    """The reports as a JSONL file with a key too many."""
    rows = [
        {"prompt_ids": prompt, "completion_ids": c.token_ids, "logprobs": c.logprobs, "engine": "any"}
        for prompt, c in pairs
    ]
    Path("reports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "reports.jsonl"


FILE = ("--threads", "1", "--temperature", "0.6")


def test_a_file_with_what_the_trainer_scores_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(*FILE, "--logprobs", write(sampled(0.6))) == 0
    text = capsys.readouterr().out
    assert "verdict: clean" in text and "reports.jsonl: 24 completions" in text


def test_a_file_of_raw_logprobs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    name = write(sampled(1.0))
    assert audit(*FILE, "--logprobs", name, "--json") == 1
    done = found(capsys)
    assert done["found"] == ["temperature"] and done["exit_code"] == 1 and done["kind"] == "foreign"
    assert done["verdict"].startswith("not clean: temperature: ")
    assert done["diagnosis"]["readings"][0]["mean"] < 1e-4
    assert audit(*FILE, "--logprobs", name) == 1
    assert "temperature" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [("--dropout", "0.1"), ("--groups", "2"), ("--updates", "0"), ("--objective", "cispo")]
)
def test_flags_of_our_own_pipeline_are_refused_for_a_file(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        audit(*FILE, *flags, "--logprobs", write(sampled(0.6, n=1)))
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert f"error: {flags[0][2:]}: " in message and "has no effect with logprobs or server" in message


def test_ids_of_another_vocabulary_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [((999, 7), c) for _, c in sampled(0.6)]
    assert audit(*FILE, "--logprobs", write(pairs), "--json") == 1
    done = found(capsys)
    assert done["found"] == ["tokenizer"] and done["budget"]["measured"] is None


def test_earlier_weights_are_recognised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logprobs of the weights in a run's step folder, audited against weights that have moved on."""
    loaded = load_model("tiny-sums", device="cpu")
    save_model(loaded, folder / "step-000001" / "model")
    for parameter in loaded.parameters():
        parameter.data.mul_(1.05)
    save_model(loaded, folder / "now")
    argv = ("--model", "now", "--task", "tiny-sums", "--threads", "1", "--temperature", "0.6", "--json")
    name = write(sampled(0.6))
    assert audit(*argv, "--logprobs", name, "--earlier", "step-000001") == 1
    done = found(capsys)
    assert done["found"] == ["stale weights"] and "step-000001" in json.dumps(done["diagnosis"]["findings"])
    assert audit(*argv, "--logprobs", name) == 1
    assert found(capsys)["found"] == ["other weights"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A server that samples with our engine at temperature 0.6 and reports logprobs `scale` times too large."""
    seen: dict[str, Any] = {"scale": 1.0}

    def probe(
        url: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any
    ) -> list[ServerCompletion]:
        seen.update(url=url, prompts=prompts, sampling=sampling, **options)
        loaded = load_model("tiny-sums", device="cpu")
        groups = Engine(loaded, num_pages=64).generate(prompts, sampling, n=options["n"])
        return [
            ServerCompletion(tuple(p), c.token_ids, tuple(seen["scale"] * x for x in c.logprobs), c.finish_reason)
            for p, group in zip(prompts, groups)
            for c in group
        ]

    monkeypatch.setattr(foreign, "probe", probe)
    return seen


def test_a_server_is_asked_for_the_tasks_prompts(server: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["RHOTRAIN_SERVER_KEY"] = "secret"
    try:
        argv = ("--groups", "3", "--group-size", "5", "--server", "http://here:1", "--server-kind", "vllm", "--json")
        assert audit(*FILE, *argv) == 0
    finally:
        del os.environ["RHOTRAIN_SERVER_KEY"]
    done = found(capsys)
    assert done["found"] == [] and done["completions"] == 15 and done["source"] == "http://here:1"
    assert len(server["prompts"]) == 3 and server["n"] == 5 and server["sampling"].temperature == 0.6
    assert server["kind"] == "vllm" and server["api_key"] == "secret"


def test_a_clean_report_of_ignored_truncation_is_told_to_be_biased(
    server: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (*FILE, "--top-k", "4", "--top-p", "0.7", "--server", "http://here:1", "--json")
    assert audit(*argv, "--truncation", "ignore") == 0
    done = found(capsys)
    assert done["ignores"] and "neither is of the distribution that was sampled" in done["verdict"]
    assert audit(*argv) == 1, "the server reports the full softmax, the trainer scores over the kept sets"
    assert found(capsys)["found"] == ["truncation"]


def test_a_server_that_reports_something_else_ends_with_1(
    server: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server["scale"] = 1.5
    assert audit(*FILE, "--server", "http://here:1") == 1
    assert "verdict: not clean" in capsys.readouterr().out


# ---- wrong inputs ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no such file": (["--logprobs", "none.jsonl"], ["logprobs", "none.jsonl"]),
    "file and server": (["--logprobs", "a", "--server", "b"], ["server", "'b'", "'a'", "one of them"]),
    "unknown kind": (["--server", "x", "--server-kind", "trt"], ["server_kind", "'trt'", "sglang or vllm"]),
    "kind without a server": (["--server-kind", "vllm"], ["server_kind", "'vllm'", "without server"]),
    "earlier without a file": (["--earlier", "x"], ["earlier", "without logprobs or server"]),
    "earlier that is not there": (["--logprobs", "r.jsonl", "--earlier", "gone"], ["gone"]),
    "resume": (["--resume", "--out", "x"], ["resume", "resumes nothing"]),
    "negative groups": (["--groups=-2"], ["groups", "-2", "at least 1"]),
    "negative updates": (["--updates=-1"], ["updates", "-1", "count >= 0"]),
    "groups of minibatches": (["--minibatches-per-rollout", "8", "--groups", "6"], ["groups", "6", "multiple of 8"]),
    "not a number": (["--groups", "few"], ["groups", "'few'", "integer"]),
    "unreachable server": (["--server", "http://127.0.0.1:9"], ["http://127.0.0.1:9"]),
    "a flag that does nothing": (["--kl-stop", "0.1"], ["kl_stop", "one update"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_end_in_one_message_and_code_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt_ids": [5], "completion_ids": [6], "logprobs": [-1.0]}
    Path("r.jsonl").write_text(json.dumps(row) + "\n")
    argv, words = WRONG[name]
    with pytest.raises(SystemExit) as stop:
        audit("--threads", "1", *argv)
    out, err = capsys.readouterr()
    message = [line for line in err.splitlines() if not line.startswith("audit: ")]
    assert stop.value.code == 2 and out == "" and len(message) == 1
    assert message[0].startswith("rhotrain audit: error: ")
    for word in words:
        assert word in message[0]
