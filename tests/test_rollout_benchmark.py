"""The rollout benchmark: what is sampled, the least work, the proofs before speed, the rows, and one run of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rollout_limits
import rollout_peers
import test_rollout
import torch
from kernel_report import RESULTS
from rollout_cases import FIRST_ID, TINY, WORKLOADS, Batch, Models, Targets, load_models, workloads
from rollout_limits import DecodeClock, LeastWork, ModelShape, Roofline, median_gap_ms, watched
from rollout_peers import Run, Unavailable, open_continuous, open_generate, open_ours, open_sglang, open_vllm, pages_for
from rollout_proof import greedy_difference, logprob_error, logprob_limit
from rollout_report import Row, compare, judge, measured, result_path, table, write_json
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models("tiny", CPU)


@pytest.fixture
def uneven() -> Batch:
    """Two members each of three prompts, one of them over several pages, with lengths of their own."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(FIRST_ID, TINY["vocab_size"], (n,), generator=draw).tolist() for n in (5, 37, 16)]
    return Batch(prompts, [9, 1, 4], 2)


# ---- workloads ------------------------------------------------------------------------------------------------------


def test_rounds_have_the_same_lengths_and_other_prompts() -> None:
    for workload in WORKLOADS:
        first, again, second = (workload.batch(r, 1000) for r in (1, 1, 2))
        assert first == again and first.prompts != second.prompts
        assert list(map(len, first.prompts)) == list(map(len, second.prompts))
        assert first.new_tokens == second.new_tokens
        assert min(map(min, first.prompts)) >= FIRST_ID and max(map(max, first.prompts)) < 1000
        # No prompt begins as one of another round does, so a prefix cache has nothing to find.
        assert not {tuple(p[:16]) for p in first.prompts} & {tuple(p[:16]) for p in second.prompts}


def test_workloads_are_those_that_are_asked_for() -> None:
    batches = {w.name: w.batch(1, 1000) for w in WORKLOADS}
    assert [b.rows for b in batches.values()] == [16, 64, 64, 32, 64, 256]
    skewed = sorted(batches["skewed-64"].new_tokens)
    assert (skewed[0], skewed[-1], len(set(skewed))) == (4, 128, 64) and batches["skewed-64"].new_tokens != skewed
    assert batches["groups-16"].group == 16 and set(map(len, batches["groups-16"].prompts)) == {512}
    assert set(batches["uniform-64"].new_tokens) == {64} and batches["uniform-64"].output_tokens == 4096
    large = batches["rollout-256"]
    for lengths in (large.new_tokens, list(map(len, large.prompts))):
        assert 100 <= min(lengths) < 120 and 1000 < max(lengths) <= 1024
    assert [w.name for w in workloads(CPU)] == [w.name for w in WORKLOADS[:-1]]
    assert len(workloads(torch.device("cuda"))) == len(WORKLOADS)


# ---- the least work -------------------------------------------------------------------------------------------------


def test_the_least_work_is_every_token_once(uneven: Batch) -> None:
    shape = ModelShape(body=1000, head=300, score=7, kv_bytes=11, itemsize=4)
    prefill = decode = read = 0
    steps: set[int] = set()
    for prompt, new in zip(uneven.prompts, uneven.new_tokens):
        prefill += 2 * shape.head
        for position in range(len(prompt)):
            prefill += 2 * shape.body + 2 * shape.score * (position + 1)
        for step in range(1, new):  # the last token is never run
            steps.add(step)
            read += len(prompt) * shape.kv_bytes
            for _ in range(uneven.group):
                decode += 2 * (shape.body + shape.head) + 2 * shape.score * (len(prompt) + step)
                read += step * shape.kv_bytes
    work = LeastWork.of(shape, uneven)
    assert (work.prefill_flop, work.decode_flop) == (prefill, decode)
    assert work.decode_bytes == read + len(steps) * (shape.body + shape.head) * shape.itemsize
    assert Roofline(1e3).seconds(work) == (prefill / 1e3, decode / 1e3)
    assert Roofline(1e3, 1e2).seconds(work) == (prefill / 1e3, work.decode_bytes / 1e2)


def test_a_models_cost_is_what_pytorch_counts(models: Models) -> None:
    shape = ModelShape.of(models.loaded)
    hidden, inner, kv = TINY["hidden_size"], TINY["intermediate_size"], TINY["hidden_size"] // 2
    assert shape.body == 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    assert shape.head == TINY["vocab_size"] * hidden
    assert shape.kv_bytes == 2 * 2 * kv * 4
    tokens = 12
    plain = models.hf.config._attn_implementation
    models.hf.set_attn_implementation("eager")  # which scores every pair, where we count those behind it
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            models.hf(torch.arange(tokens)[None] + FIRST_ID, use_cache=False)
    finally:
        models.hf.set_attn_implementation(plain)
    counts = {str(op): flop for op, flop in counter.get_flop_counts()["Global"].items()}
    rotary = 2 * tokens * (hidden // TINY["num_attention_heads"] // 2)  # a product in transformers 5.17, not in 5.24
    assert counts.pop("aten.bmm") - 2 * shape.score * tokens * tokens in (0, rotary)
    assert sum(counts.values()) == 2 * tokens * (shape.body + shape.head)


def test_clocks_and_memory() -> None:
    assert median_gap_ms([[0.0, 0.001, 0.003], [5.0], []]) == pytest.approx(1.5)
    assert median_gap_ms([[1.0]]) is None
    with watched(CPU) as watch:
        held = torch.ones(2**24)  # 64 MiB, freed inside
        del held
    if Path("/proc/self/clear_refs").exists():
        assert watch.peak_mib is not None and watch.peak_mib > 50


def test_steps_that_run_prompts_are_no_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DecodeClock()
    times = iter((1.0, 5.0, 5.1, 5.2, 9.0, 9.1))
    monkeypatch.setattr(rollout_limits.time, "perf_counter", lambda: next(times))
    for prefilled in (100, 200, 200, 200, 300, 300):
        clock.tick(prefilled)
    monkeypatch.undo()
    assert clock.runs == [[], [1.0], [5.0, 5.1, 5.2], [9.0, 9.1]] and clock.median_ms() == pytest.approx(100)


def test_other_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter((100.0, 100.0 + 3e-3))
    monkeypatch.setattr(rollout_limits, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(rollout_limits.psutil, "cpu_count", lambda: 2)
    now = iter((10.0, 10.005))
    spent = iter((1.0, 1.001))
    monkeypatch.setattr(rollout_limits.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(rollout_limits.time, "process_time", lambda: next(spent))
    with watched(CPU) as watch:
        pass
    monkeypatch.undo()
    assert watch.others == pytest.approx(0.2)  # 2 of 10 ms
    assert rollout_limits.busy_seconds() > 0


# ---- sides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_side", [open_ours, open_generate, open_continuous], ids=lambda f: f.__name__)
def test_a_side_draws_what_is_asked_for_again_and_again(open_side: Any, models: Models, uneven: Batch) -> None:
    attention = models.hf.config._attn_implementation
    with open_side(models, uneven) as run:
        for batch in (uneven.short(2, 3), uneven, uneven):
            result = run(batch).check(batch)
            assert result.prefill_seconds > 0 and result.decode_seconds > 0 and result.decode_ms > 0
            assert result.prefill_seconds < result.seconds
            assert all(ids[0] != ids[1] for ids in result.token_ids if len(ids[0]) > 2)  # members differ
            if open_side is open_ours:
                assert logprob_error(models, batch, result) < logprob_limit(models)
    assert models.hf.config._attn_implementation == attention


def test_our_pool_holds_the_batch_without_preemption(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []

    class Watched(rollout_peers.Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(rollout_peers, "Engine", Watched)
    batch = WORKLOADS[4].batch(1, TINY["vocab_size"])
    with open_ours(models, batch) as run:
        version = models.loaded.policy_version
        run(batch).check(batch)
        assert models.loaded.policy_version == version + 1
    stats = engines[0].stats
    assert stats.preemptions == 0 and stats.prefill_tokens == 4 * 512
    assert stats.peak_pages <= pages_for(batch) < 2 * stats.peak_pages


def test_another_number_of_tokens_is_refused(uneven: Batch) -> None:
    ids = [[[1] * n] * 2 for n in uneven.new_tokens]
    Run(seconds=1.0, token_ids=ids).check(uneven)
    for wrong in (ids[:2], [*ids[:2], ids[2][:1]], [*ids[:2], [[1] * 4, [1] * 3]]):
        with pytest.raises(ValueError, match="28 were asked for"):
            Run(seconds=1.0, token_ids=wrong).check(uneven)


class FakeServer:
    """Both vLLM's LLM and SGLang's Engine, as far as they are used; the members of a group are different."""

    def __init__(self, **options: Any) -> None:
        self.folder = Path(options.get("model") or options["model_path"])
        assert (self.folder / "config.json").exists() and options["skip_tokenizer_init"]
        self.llm_engine = SimpleNamespace(engine_core=self)
        self.closed = False
        FakeServer.latest = self

    latest: "FakeServer"

    def generate(self, prompts: Any = None, sampling: Any = None, use_tqdm: bool = True, **by_name: Any) -> list[Any]:
        if prompts is None:  # SGLang: a flat list, the members of a group one after the other
            pairs = zip(by_name["input_ids"], by_name["sampling_params"])
            return [{"output_ids": [g] * s["max_new_tokens"]} for _, s in pairs for g in range(s["n"])]
        assert all(p.keys() == {"prompt_token_ids"} for p in prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[g] * s["max_tokens"]) for g in range(s["n"])])
            for s in sampling
        ]

    def shutdown(self) -> None:
        self.closed = True


@pytest.mark.parametrize("open_side", [open_vllm, open_sglang], ids=lambda f: f.__name__)
def test_servers_are_called_as_documented(
    open_side: Any, models: Models, uneven: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(LLM=FakeServer, Engine=FakeServer, SamplingParams=lambda **options: options)
    monkeypatch.setattr(rollout_peers, "_needs", lambda name, models: package)
    with open_side(models, uneven) as run:
        result = run(uneven).check(uneven)
        assert [[ids[0] for ids in group] for group in result.token_ids] == [[0, 1]] * 3
        assert FakeServer.latest.folder.exists() and not FakeServer.latest.closed
    assert FakeServer.latest.closed and not FakeServer.latest.folder.exists()


def test_servers_are_for_a_gpu(models: Models, uneven: Batch) -> None:
    with pytest.raises(Unavailable, match="GPU only"), open_vllm(models, uneven):
        pass


# ---- proofs ---------------------------------------------------------------------------------------------------------


def test_wrong_tokens_and_wrong_logprobs_are_seen(models: Models, uneven: Batch) -> None:
    assert greedy_difference(models) is None
    with open_ours(models, uneven) as run:
        good = run(uneven)
        assert good.logprobs is not None and logprob_error(models, uneven, good) < logprob_limit(models)
        shifted = [[list(row) for row in group] for group in good.logprobs]
        shifted[2][1][-1] += 0.01
        assert logprob_error(models, uneven, replace(good, logprobs=shifted)) > logprob_limit(models)
        shifted[2][1][-1] = float("nan")
        assert logprob_error(models, uneven, replace(good, logprobs=shifted)) == float("inf")
        weight = models.loaded.body.layers[1].self_attn.v_proj.weight
        kept = weight.detach().clone()
        try:
            with torch.no_grad():
                weight.mul_(1.05)
            assert "not generate's" in (greedy_difference(models) or "")
            assert logprob_error(models, uneven, run(uneven)) > logprob_limit(models)
        finally:
            with torch.no_grad():
                weight.copy_(kept)
    assert greedy_difference(models) is None


class Benchmark:
    """Stands in for pytest-benchmark's fixture."""

    disabled = False

    def pedantic(self, target: Any, setup: Any, rounds: int, iterations: int) -> None:
        for _ in range(rounds):
            args, kwargs = setup()
            target(*args, **kwargs)


def test_wrong_tokens_have_no_speed() -> None:
    class Wrong:
        def __init__(self) -> None:
            self.difference = "greedy tokens are not generate's"
            self.rows: list[Row] = []

    run: Any = Wrong()
    with pytest.raises(pytest.fail.Exception, match="no speed is reported"):
        test_rollout.test_rollout(WORKLOADS[0], ["generate"], Benchmark(), run)
    assert run.rows == []


def test_sides_take_turns_and_a_failing_peer_is_given_up(uneven: Batch) -> None:
    order: list[str] = []
    full = [[[1] * n] * 2 for n in uneven.new_tokens]

    def side(name: str, fails_at: int | None = None) -> Any:
        def run(batch: Batch) -> Run:
            order.append(name)
            if order.count(name) == fails_at:
                return Run(seconds=1.0, token_ids=full[:1])
            return Run(seconds=2.0, token_ids=full)

        return run

    reasons: dict[str, str] = {}
    theirs = {"a": side("a"), "b": side("b", fails_at=2)}
    mine, found = test_rollout.take_turns(side("ours"), theirs, [uneven] * 3, reasons, Benchmark())
    assert order == ["a", "b", "ours", "a", "b", "ours", "a", "ours"]
    assert len(mine) == len(found["a"]) == 3 and reasons.keys() == {"b"} and "asked for" in reasons["b"]


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows(uneven: Batch, ours: list[float], theirs: list[float]) -> tuple[Row, Row]:
    work, roofline = LeastWork(1e9, 3e9, 0.0), Roofline(1e10)

    def runs(times: list[float]) -> list[Run]:
        return [Run(seconds=s, token_ids=[], prefill_seconds=0.1, decode_seconds=s - 0.1) for s in times]

    mine = measured("w", "rhotrain", uneven, runs(ours), work, roofline, [Run(seconds=1, token_ids=[], pack_seconds=1)])
    peer = measured("w", "generate", uneven, runs(theirs), work, roofline, [])
    compare(mine, peer)
    return mine, peer


def test_figures_are_medians_and_ratios_are_those_of_neighbours(uneven: Batch) -> None:
    mine, peer = rows(uneven, [1.0, 2.0, 4.0], [3.0, 4.0, 8.0])
    assert uneven.output_tokens == 28 and mine.tok_per_s == 14.0 and peer.tok_per_s == 7.0
    assert peer.times_faster == 2.0 and mine.times_faster is None
    assert mine.floor_s == pytest.approx(0.4) and mine.share == pytest.approx(0.2)
    assert mine.decode_share == pytest.approx(0.3 / 1.9) and mine.pack_s is None


def test_targets_are_judged(uneven: Batch) -> None:
    targets = Targets(times_generate=2.0, least=1.8)
    for theirs, verdict in ((2.1, "met"), (1.9, "MISSED, but not below the least"), (1.7, "MISSED")):
        mine, peer = rows(uneven, [1.0], [theirs])
        judge(mine, [mine, peer], targets)
        assert (peer.verdict, mine.verdict) == (verdict, "")
    mine, peer = rows(uneven, [1.0], [2.0])
    for share, verdict in ((0.3, "met"), (0.5, "MISSED")):
        judge(mine, [mine, peer], Targets(tok_per_s=28.0, share=share))
        assert (mine.verdict, mine.target_share) == (verdict, share) and peer.target is None


def test_table_and_json_say_what_was_not_measured(uneven: Batch, tmp_path: Path) -> None:
    mine, peer = rows(uneven, [1.0], [1.0 / 3.0])
    judge(mine, [mine, peer], Targets(times_generate=2.0, least=1.8))
    skipped = Row(workload="w", by="vllm", reason="vllm is not installed")
    mine.others, peer.others = 0.3, 0.01
    header, *lines = table([mine, peer, skipped])
    assert lines[0].endswith("DISTURBED: other processes took 30% of the CPU")
    assert lines[1].endswith("target 2x, at least 1.8x: MISSED") and lines[2].endswith("skipped: vllm is not installed")
    end = header.index("tok/s") + len("tok/s")
    assert [line[:end].split()[-1] for line in lines] == ["28", "84", "-"]
    with pytest.raises(ValueError, match="tok_per_s"):
        Row(workload="w", by="vllm", status="ok")
    path = tmp_path / "deep" / "r.json"
    write_json(path, {"device": "d"}, {"model": "m"}, {"gemm GFLOP/s": 1.23456789}, [mine, peer, skipped])
    content = json.loads(path.read_text())
    assert content["limits"]["gemm GFLOP/s"] == 1.23457 and content["rows"][1]["times_faster"] == 0.333333
    assert content["rows"][2] == {"workload": "w", "by": "vllm", "status": "skipped", "reason": "vllm is not installed"}
    assert [Row(**row).by for row in content["rows"]] == ["rhotrain", "generate", "vllm"]


def test_results_have_a_file_of_their_own() -> None:
    assert result_path("auto", "NVIDIA H200", others_too=True) == RESULTS / "rollout-nvidia-h200.json"
    assert result_path("x/y.json", "d", others_too=False) == Path("x/y.json")
    assert result_path("x/y.json", "d", others_too=True) == Path("x/y-rollout.json")


def test_committed_results_are_whole() -> None:
    for path in RESULTS.glob("rollout-*.json"):
        content = json.loads(path.read_text())
        assert content["machine"]["device"] and content["settings"]["model"], path.name
        for row in content["rows"]:
            Row(**row)


def test_unknown_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RHOTRAIN_ROLLOUT_PEERS", "generate, vlm")
    with pytest.raises(pytest.UsageError, match=r"vlm.*peers are generate"):
        test_rollout.RolloutRun(None)
    monkeypatch.setenv("RHOTRAIN_ROLLOUT_PEERS", "vllm")
    run = test_rollout.RolloutRun(None)
    assert run.why_not("vllm", WORKLOADS[0]) is None and run.why_not("generate", WORKLOADS[0])


def test_a_run_prints_its_table_and_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # a worker measures nothing
    env |= {"RHOTRAIN_ROLLOUT_MODEL": "tiny", "RHOTRAIN_ROLLOUT_ROUNDS": "1", "RHOTRAIN_TEST_GPU": "0"}
    options = ["--benchmark-only", "--benchmark-quiet", "-q", "-k", "uniform-16", "--bench-json", str(out)]
    # hypothesis' plugin takes seconds to import
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "benchmarks/test_rollout.py", *options]
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    content = json.loads(out.read_text())
    found = {row["by"]: row for row in content["rows"]}
    assert found.keys() == {"rhotrain (reference)", "generate", "continuous batching"}
    assert all(row["status"] == "ok" and row["output_tokens"] == 1024 for row in found.values()), found
    ours = found["rhotrain (reference)"]
    assert found["generate"]["times_faster"] == pytest.approx(
        found["generate"]["seconds"][0] / ours["seconds"][0], 1e-4
    )
    assert 0 < ours["share"] < 1 and ours["logprob_error"] < 1e-3 and ours["decode_ms"] > 0
    assert "rollout, beside the peers" in done.stdout and content["settings"]["model"] == "tiny"
