"""The step benchmark: its files, the least work, the proof before speed, memory by phase, its sides on a tiny model."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import step_process
import test_step
import torch
from rollout_limits import ModelShape
from rollout_report import result_path, write_json
from step_cases import CASES, TINY_CASES, Case, cases, write_model, write_prompts, write_rollout
from step_process import SideFailed, peaks, run_side
from step_report import Row, compare, gradient_error, least_flop, parity_failure, table
from step_sides import SIDES
from step_worker import Job, Record

CPU = torch.device("cpu")
CASE = TINY_CASES[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("step")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return write_model("tiny", folder, CPU)


def make_job(folder: Path, model: str, case: Case, side: str) -> Job:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts, rollout = folder / f"{case}.jsonl", folder / f"{case}.json"
    write_prompts(case, tokenizer, prompts)
    write_rollout(case, tokenizer, prompts, rollout)
    gradient = str(folder / f"{side}.pt")
    return Job(
        case, model, str(prompts), str(rollout), gradient, steps=2, updates=2, threads=1, lr=1e-3, fused_layers="torch"
    )


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_prompts_and_completions_have_the_lengths_that_were_asked_for(folder: Path, model: str) -> None:
    from transformers import AutoTokenizer

    job, tokenizer = make_job(folder, model, CASE, "lengths"), AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in Path(job.prompts).read_text().splitlines()]
    assert len(set(texts)) == len(texts) >= CASE.prompts
    assert {len(tokenizer.encode(text)) for text in texts} == {CASE.prompt_tokens}
    fixed = job.fixed()
    assert fixed["prompts"] == [tokenizer.encode(text) for text in texts[: CASE.prompts]]
    assert [[len(ids) for ids in group] for group in fixed["completions"]] == [[6] * 4] * 2
    assert torch.tensor(fixed["advantages"]).shape == (2, 4)


def test_tokens_and_pairs_are_those_of_the_packed_sequence() -> None:
    """Counted one by one for two groups of three."""
    case = Case(name="x", prompts=2, group=3, prompt_tokens=5, new_tokens=4)
    tokens = pairs = 0
    for _ in range(case.prompts):
        tokens += 5
        pairs += sum(range(1, 6))
        for _ in range(case.group):
            tokens += 3
            pairs += sum(5 + n for n in (1, 2, 3))
    assert (case.packed_tokens, case.context, case.loss_tokens) == (tokens, pairs, 24)
    shape = ModelShape(body=7, head=11, score=13, kv_bytes=0, itemsize=4)
    rollout, update = least_flop(case, shape)
    assert update == 6 * (7 * tokens + 11 * 24 + 13 * pairs)
    assert rollout == 2 * (7 * tokens + 11 * 2 * (1 + 3 * 3) + 13 * pairs)  # the prompt's head once per group
    assert least_flop(replace(case, whole=False), shape) == (0.0, update)


def test_cases_of_a_device() -> None:
    assert [c.name for c in cases("smollm2", CPU)] == ["short-prompts", "long-prompts"]
    assert {c.name for c in cases("qwen3-0.6b", torch.device("cuda"))} == {c.name for c in CASES}
    assert cases("tiny", CPU) == TINY_CASES


# ---- the proof ------------------------------------------------------------------------------------------------------


def test_a_wrong_loss_or_gradient_is_refused() -> None:
    truth = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert gradient_error(truth, truth) == 0.0
    off = gradient_error({"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}, truth)
    assert off == pytest.approx(0.1)
    assert gradient_error({"a": truth["a"]}, truth) == float("inf"), "a parameter is missing"
    assert gradient_error({"a": truth["a"], "b": torch.zeros(2)}, truth) == float("inf")
    good = Row(case="x", by="trl", loss_error=1e-6, gradient_error=1e-6)
    assert parity_failure(good, "cpu") is None
    for change, words in (
        ({"gradient_error": off}, "gradient differs .* by 0.1 of its norm"),
        ({"loss_error": 0.01}, "loss differs .* by 0.01"),
        ({"loss_error": float("nan")}, "loss differs"),
        ({"gradient_error": None}, "no parity was measured"),
    ):
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(parity_failure(replace(good, **change), "cpu"))  # type: ignore[arg-type]


def result(**changes: Any) -> dict[str, Any]:
    record = Record(
        parity={"loss": 0.25, "gradient_norm": 1.0},
        update=[1.0, 3.0, 2.0],
        steps=[4.0, 6.0, 5.0],
        phases={"rollout": [1.0, 2.0, 3.0], "update": [3.0, 4.0, 2.0]},
        peaks={"rollout": 2**30, "update": 2**31},
        tokens={"prompt": 12.0, "completion": 6.0},
        shape={"body": 7, "head": 11, "score": 13},
    )
    return {**vars(record), "others": 0.0, **changes}


class FakeRun:
    """What `report` asks a session for."""

    flop_per_s = 1e6

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def job(self, case: Case, side: str) -> Job:
        return Job(case, "", "", "", str(self.folder / f"{side}.pt"), 1, 1, 1)


def test_speed_is_reported_for_what_is_right_and_for_nothing_else(tmp_path: Path) -> None:
    for side in ("plain", "rhotrain"):
        torch.save({"w": torch.ones(4)}, tmp_path / f"{side}.pt")
    torch.save({"w": torch.tensor([1.0, 1.0, 1.0, -1.0])}, tmp_path / "trl.pt")
    results = {
        "plain": [result(steps=[40.0, 44.0], update=[8.0])],
        "trl": [result(steps=[50.0])],
        "rhotrain": [result(), result(steps=[7.0])],
    }
    run: Any = FakeRun(tmp_path)
    ours, plain, trl = test_step.report(CASE, results, {}, run)
    assert (ours.by, ours.status, plain.status, trl.status) == ("rhotrain", "ok", "ok", "skipped")
    assert "gradient differs" in trl.reason and trl.seconds == [] and trl.tok_per_s is None
    assert ours.seconds == [4.0, 6.0, 5.0, 7.0] and ours.peak_gib == 2.0 and ours.rollout_gib == 1.0
    assert plain.times_faster == pytest.approx(42.0 / 5.5) and plain.update_times_faster == pytest.approx(4.0)
    assert plain.times_faster_range == pytest.approx((40.0 / 7.0, 11.0))
    assert ours.tok_per_s == pytest.approx((2 * 12 + 2 * 4 * 6) / 5.5)
    assert ours.share == pytest.approx(sum(least_flop(CASE, ModelShape(7, 11, 13, 0, 0))) / 1e6 / 5.5)
    text = "\n".join(table([ours, plain, trl]))
    assert "7.64x (5.7-11.0)" in text and "skipped: its gradient differs" in text
    write_json(tmp_path / "out.json", {}, {}, {}, [ours, plain, trl], "step")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[0]["seconds"] == [4, 6, 5, 7] and "seconds" not in rows[2]


def test_without_the_plain_loop_nothing_is_proven(tmp_path: Path) -> None:
    run: Any = FakeRun(tmp_path)
    ours, plain = test_step.report(CASE, {"plain": [], "rhotrain": [result()]}, {"plain": "it failed"}, run)
    assert ours.status == plain.status == "skipped"
    assert ours.reason == "no parity was measured" and plain.reason == "it failed"


def test_targets_are_judged_beside_trl() -> None:
    case = replace(CASE, times_trl=4.0, memory=0.5)
    ours = Row(case="x", by="rhotrain", status="ok", seconds=[2.0], peak_gib=2.0)
    fast = Row(case="x", by="trl", status="ok", seconds=[8.0], peak_gib=4.0)
    slow = Row(case="x", by="trl", status="ok", seconds=[7.9], peak_gib=3.9)
    compare(ours, fast, case)
    compare(ours, slow, case)
    assert fast.verdict == "target 4x: met, at most 50% of its memory: met"
    assert slow.verdict == "target 4x: MISSED, at most 50% of its memory: MISSED"


def test_results_have_a_place_of_their_own() -> None:
    assert result_path("auto", "NVIDIA H200", False, "step").name == "step-nvidia-h200.json"
    assert result_path("/a/b.json", "x", True, "step") == Path("/a/b-step.json")
    assert result_path("/a/b.json", "x", False, "step") == Path("/a/b.json")


# ---- a process from outside -----------------------------------------------------------------------------------------


def test_memory_belongs_to_the_phase_it_was_seen_in() -> None:
    samples = [(0.0, 5), (1.0, 9), (2.0, 7), (3.0, 8)]
    spans = [("rollout", 0.0, 0.5), ("update", 0.9, 2.1), ("rollout", 2.4, 2.6)]
    assert peaks(samples, spans) == {"rollout": 8, "update": 9}


def test_a_side_is_watched_and_its_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys, time\n"
        "case = json.loads(sys.argv[2])['case']\n"
        "if sys.argv[1] == 'trl': sys.exit('no such peer')\n"
        "start = time.monotonic(); held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096])\n"
        "time.sleep(0.4); spans = [('update', start, time.monotonic())]; del held\n"
        "time.sleep(0.2); after = time.monotonic(); time.sleep(0.3)\n"
        "spans.append(('rollout', after, time.monotonic()))\n"
        "print(json.dumps({'spans': spans, 'peaks': {}, 'group': case['group']}))\n"
    )
    monkeypatch.setattr(step_process, "WORKER", worker)
    job = Job(CASE, "m", "p", "r", "g", 1, 1, 1)
    done = run_side("rhotrain", job)
    assert done["group"] == CASE.group and 0.0 <= done["others"] <= 1.0
    assert done["peaks"]["update"] - done["peaks"]["rollout"] > 250 << 20
    with pytest.raises(SideFailed, match="no such peer"):
        run_side("trl", job)


def test_a_job_survives_its_way_to_the_worker() -> None:
    job = Job(CASE, "m", "p", "r", "g", 1, 2, 3)
    values = asdict(job)
    values["case"].pop("on")
    again = Job.of(json.dumps(values))
    assert replace(again, case=replace(again.case, on=CASE.on)) == job


# ---- the sides ------------------------------------------------------------------------------------------------------


def run(side: str, folder: Path, model: str, case: Case = CASE) -> tuple[Record, dict[str, torch.Tensor]]:
    job, record = make_job(folder, model, case, side), Record()
    threads = torch.get_num_threads()
    try:
        SIDES[side](job, record)
    finally:
        torch.set_num_threads(threads)
    gradient: dict[str, torch.Tensor] = torch.load(job.gradient, weights_only=True)
    return record, gradient


@pytest.mark.parametrize("case", TINY_CASES, ids=str)
def test_ours_and_the_plain_loop_do_the_same(folder: Path, model: str, case: Case) -> None:
    before = time.monotonic()
    plain, truth = run("plain", folder, model, case)
    ours, gradient = run("rhotrain", folder, model, case)
    assert ours.parity["loss"] == pytest.approx(plain.parity["loss"], abs=1e-5)
    assert ours.parity["gradient_norm"] == pytest.approx(plain.parity["gradient_norm"], rel=1e-4)
    assert gradient_error(gradient, truth) < 1e-4 and sum(g.numel() for g in truth.values()) > 100
    for record in (plain, ours):
        assert len(record.update) == 2 and len(record.steps) == (2 if case.whole else 0)
        assert all(before <= start <= end for _, start, end in record.spans)
        if case.whole:
            assert record.tokens == {"completion": case.new_tokens, "prompt": case.prompt_tokens}
            assert {name: len(seconds) for name, seconds in record.phases.items()} == {"rollout": 2, "update": 2}
            for k, seconds in enumerate(record.steps):
                assert record.phases["rollout"][k] + record.phases["update"][k] <= seconds * 1.01 + 1e-3
    assert set(ours.shape) == {"body", "head", "score"}


@pytest.mark.slow
def test_trl_does_the_same(folder: Path, model: str) -> None:
    pytest.importorskip("trl")
    plain, truth = run("plain", folder, model)
    trl, gradient = run("trl", folder, model)
    assert trl.parity["loss"] == pytest.approx(plain.parity["loss"], abs=1e-5)
    assert gradient_error(gradient, truth) < 1e-4
    assert len(trl.steps) == len(trl.update) == 2
    assert trl.tokens == {"completion": CASE.new_tokens, "prompt": CASE.prompt_tokens}
    assert {name: len(seconds) for name, seconds in trl.phases.items()} == {"rollout": 2, "update": 2}
