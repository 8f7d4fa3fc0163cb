"""The kernel benchmarks: parity sees wrong results, figures stand beside their limit, a run writes what it measured."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_report
import pytest
import test_kernels
import torch
from kernel_cases import OPS, Inputs, Op, Result, Shape, cases, make_inputs, parity_errors, parity_failures
from kernel_limits import describe_machine, milliseconds, peak_extra_mib
from kernel_peers import OURS, PEERS, Unavailable, implementations
from kernel_report import GRAPH, Row, compare_with_peers, default_path, has_targets, summary, table, write_json
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def tiny(op: Op, device: torch.device = CPU) -> Inputs:
    """Small, but with enough rows for the statistics of drawn tokens."""
    rows = 256 if op.kind == "sample_tokens" else 48
    return make_inputs(op, Shape(rows, 131, 24 if op.head else 0), device)


# ---- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_ours_and_eager_match_float64(op: Op) -> None:
    inputs = tiny(op)
    for name in (OURS, "eager"):
        errors = parity_errors(inputs, PEERS[name](inputs)())
        assert parity_failures(inputs, errors, ours=True) == [], name
        wanted = {"draws", "outside"} if op.kind == "sample_tokens" else {"logprobs"}
        wanted |= {"entropy"} if op.entropy else set()
        wanted |= {"grad", "grad head"} if op.backward and op.head else {"grad"} if op.backward else set()
        assert wanted | ({"loss"} if op.objective else set()) <= errors.keys()


@pytest.mark.cuda
@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_every_implementation_runs_on_a_gpu(op: Op) -> None:
    device = torch.device("cuda")
    inputs = tiny(op, device)
    for name in (OURS, "eager", "torch.compile"):
        call = PEERS[name](inputs)
        assert parity_failures(inputs, parity_errors(inputs, call()), ours=name == OURS) == [], name
        assert all(ms > 0 for ms in milliseconds(call, device, budget_s=0.01))
        peak = peak_extra_mib(call, device)
        assert peak is not None and peak > 0
        if op.kind == "sample_tokens":
            replay = PEERS[name + GRAPH](inputs)
            assert parity_failures(inputs, parity_errors(inputs, replay()), ours=name == OURS) == [], name
            assert all(ms > 0 for ms in milliseconds(replay, device, budget_s=0.01))


def scaled(grad: Tensor, index: Any) -> Tensor:
    out = grad.clone()
    out[index] *= 1.1
    return out


def with_nan(x: Tensor) -> Tensor:
    out = x.detach().clone()
    out[-1] = float("nan")
    return out


LOGITS, HEAD, SAMPLE = "policy_loss grpo fwd+bwd", "linear_policy_loss grpo fwd+bwd", "sample_tokens top-k top-p"
WRONG: list[tuple[str, str, Callable[[Inputs, Any], Result]]] = [
    ("token_logprobs fwd", "logprobs", lambda i, r: replace(r, logprobs=r.logprobs + 2e-4)),
    ("token_logprobs fwd", "logprobs", lambda i, r: replace(r, logprobs=with_nan(r.logprobs))),
    ("token_logprobs+entropy fwd", "entropy", lambda i, r: replace(r, entropy=r.entropy * 0.999)),
    ("token_logprobs fwd+bwd", "grad", lambda i, r: replace(r, grads=(scaled(r.grads[0], slice(47, 48)),))),
    (LOGITS, "grad", lambda i, r: replace(r, grads=(with_nan(r.grads[0]),))),
    (LOGITS, "loss", lambda i, r: replace(r, loss=r.loss + 1e-3)),
    (HEAD, "grad", lambda i, r: replace(r, grads=(scaled(r.grads[0], slice(0, 1)), r.grads[1]))),
    (HEAD, "grad head", lambda i, r: replace(r, grads=(r.grads[0], r.grads[1] * 1.001))),
    (HEAD, "grad head", lambda i, r: replace(r, grads=(r.grads[0], scaled(r.grads[1], i.token_ids[:1])))),
    (SAMPLE, "outside", lambda i, r: replace(r, token_ids=i.x.argmin(1))),
    (SAMPLE, "draws", lambda i, r: replace(r, token_ids=i.x.argmax(1), logprobs=None)),
    (SAMPLE, "inverse cdf", lambda i, r: replace(r, token_ids=i.x.argmax(1), logprobs=None)),
    (SAMPLE, "kept_mass", lambda i, r: replace(r, kept_mass=torch.ones_like(r.kept_mass))),
]


@pytest.mark.parametrize(("name", "what", "spoil"), WRONG)
def test_parity_sees_a_wrong_result(name: str, what: str, spoil: Callable[[Inputs, Any], Result]) -> None:
    inputs = tiny(OPS[name])
    result = PEERS[OURS](inputs)()
    failures = parity_failures(inputs, parity_errors(inputs, spoil(inputs, result)), ours=True)
    assert any(text.startswith(f"{what} off by") for text in failures), failures


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_case(monkeypatch: pytest.MonkeyPatch) -> tuple[Op, Shape]:
    """A case on a CPU, and limits that are round numbers."""
    monkeypatch.setattr(test_kernels, "DEVICE", CPU)
    monkeypatch.setattr(test_kernels, "copy_gb_per_s", lambda device: 100.0)
    monkeypatch.setattr(test_kernels, "head_gemms_ms", lambda *args: 3.0)
    return OPS["token_logprobs fwd"], Shape(48, 131)


def fails(error: Exception) -> Callable[[Inputs], Any]:
    def build(inputs: Inputs) -> Any:
        raise error

    return build


def test_a_peer_that_is_missing_or_fails_is_a_skipped_row(
    small_case: tuple[Op, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (ImportError("no module trl"), RuntimeError("grid\ny"), Unavailable("needs a GPU")):
        monkeypatch.setitem(PEERS, "trl", fails(error))
        call, row = test_kernels.prepare(*small_case, "trl")
        assert call is None and row.status == "skipped"
        assert row.reason == f"{type(error).__name__}: {' '.join(str(error).split())}"


def test_a_graph_of_ours_that_cannot_be_captured_is_a_skipped_row(
    small_case: tuple[Op, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, OURS + GRAPH, fails(Unavailable("cannot be captured: it waits")))
    call, row = test_kernels.prepare(*small_case, OURS + GRAPH)
    assert call is None and row.ours and row.graph and row.peer == "rhotrain (reference), CUDA graph"
    assert (row.status, row.reason) == ("skipped", "Unavailable: cannot be captured: it waits")
    monkeypatch.setitem(PEERS, OURS + GRAPH, fails(RuntimeError("broken kernel")))
    with pytest.raises(RuntimeError, match="broken kernel"):
        test_kernels.prepare(*small_case, OURS + GRAPH)


def test_a_failure_of_ours_is_an_error_and_a_wrong_result_has_no_figures(
    small_case: tuple[Op, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, OURS, fails(RuntimeError("broken kernel")))
    with pytest.raises(RuntimeError, match="broken kernel"):
        test_kernels.prepare(*small_case, OURS)
    monkeypatch.setitem(PEERS, OURS, lambda inputs: lambda: Result(logprobs=inputs.plain_logprobs + 1))
    call, row = test_kernels.prepare(*small_case, OURS)
    assert call is None and row.ms is None
    assert (row.status, row.reason) == ("parity failed", "logprobs off by 1 (bound 0.0001)")
    with pytest.raises(ValueError, match="only a row that passed parity has figures"):
        replace(row, ms=1.0)


def test_figures_of_logits_are_bytes_and_of_heads_flop(
    small_case: tuple[Op, Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, shape = small_case
    _, row = test_kernels.prepare(op, shape, OURS)
    test_kernels.add_figures(row, op, Shape(1000, 50000), [4.0, 2.0, 9.0])
    assert (row.ms, row.fastest_ms, row.rounds, row.limit) == (4.0, 2.0, 3, 100.0)
    assert row.rate == pytest.approx(1000 * 50000 * 4 / 4e-3 / 1e9) and row.share == pytest.approx(0.5)
    assert row.target is None, "targets are for an H200"
    monkeypatch.setattr(test_kernels, "device_name", lambda device: "NVIDIA H200")
    test_kernels.add_figures(row, OPS[LOGITS], Shape(1000, 50000), [6.0])
    assert row.share == pytest.approx(1.0) and row.target_met is True and row.reachable is None
    test_kernels.add_figures(row, OPS[HEAD], Shape(1000, 50000, 100), [4.0])
    assert row.rate == pytest.approx(6 * 1000 * 50000 * 100 / 4e-3 / 1e12) and row.share == pytest.approx(0.75)
    assert (row.target, row.target_met) == (0.85, False)
    assert row.reachable == pytest.approx(3.0 / (3.0 + 10 * 1000 * 50000 / 100e9 * 1e3))


def test_only_an_h200_has_targets() -> None:
    assert has_targets("NVIDIA H200") and has_targets("NVIDIA H200 NVL")
    assert not has_targets("NVIDIA GeForce RTX 4090") and not has_targets("AMD EPYC, 2 threads")


def rows() -> list[Row]:
    common: dict[str, Any] = {"op": "policy_loss", "shape": "4x5", "dtype": "bfloat16"}
    timed: dict[str, Any] = {**common, "status": "ok", "unit": "GB/s", "limit": 4000.0}
    return [
        Row(**timed, peer="eager", ms=8.0, rate=400.0, share=0.1),
        Row(
            **timed,
            peer="rhotrain (triton)",
            ms=1.0,
            rate=3200.0,
            share=0.8,
            target=0.85,
            target_met=False,
            reachable=0.77,
        ),
        Row(**timed, peer="trl", ms=2.0, rate=1600.0, share=0.4, peak_mib=10.0),
        Row(**common, peer="liger", status="parity failed", reason="loss off by 1"),
        Row(**timed, peer="rhotrain (triton), CUDA graph", ms=0.9, rate=3555.0, share=0.89),
        Row(**timed, peer="eager, CUDA graph", ms=3.6, rate=889.0, share=0.22),
        Row(**{**timed, "shape": "9x5"}, peer="trl", ms=0.5, rate=1.0, share=0.4),
    ]


def test_the_table_prints_the_limit_beside_each_figure() -> None:
    found = rows()
    compare_with_peers(found)
    lines = list(table(found))
    assert lines[1].split()[3:12] == ["rhotrain", "(triton)", "1.000", "3200", "GB/s", "4000", "GB/s", "80%", "-"]
    assert lines[0].split()[-3:] == ["target", "reachable", "note"]
    assert lines[1].split()[12:15] == ["85%", "MISSED", "77%"] and lines[1].endswith("2.00x as fast as trl")
    assert lines[2].endswith("4.00x as fast as eager, CUDA graph"), "a replay is compared with replays"
    liger = next(line for line in lines if "liger" in line)
    assert liger.split()[4:11] == ["-"] * 7 and liger.endswith("parity failed: loss off by 1")
    assert summary(found) == (
        "6 ok, 0 skipped, 1 parity failed; targets met: 0 of 1; faster than every peer measured: 2 of 2"
    )


def test_json_keeps_a_missed_target_and_drops_what_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernels.json"
    write_json(path, describe_machine(CPU), {"copy GB/s": 1.0}, rows())
    content = json.loads(path.read_text())
    assert content["machine"]["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert content["rows"][1]["target_met"] is False and content["rows"][1]["reachable"] == 0.77
    assert "peak_mib" not in content["rows"][1] and "reason" not in content["rows"][1]
    assert default_path("NVIDIA H200").relative_to(ROOT).as_posix() == "benchmarks/results/kernels-nvidia-h200.json"


# ---- what is run ----------------------------------------------------------------------------------------------------


def test_the_gpu_sweep_covers_the_grid_and_starts_with_what_counts() -> None:
    every = list(cases(torch.device("cuda")))
    assert len(every) == len(set(every))
    assert {(s.rows, s.vocab, s.hidden) for op, s in every if op.name == HEAD} == {
        (n, v, h) for n in (4096, 16384, 65536) for v in (49152, 128256, 151936) for h in (1024, 2048, 4096)
    }
    assert all(s.rows % s.sequence == 0 for _, s in every)
    assert {str(s) for _, s in every[:4]} == {"16384x151936"}
    assert {op.name for op, _ in every} == OPS.keys()


def test_implementations_of_every_op_exist() -> None:
    for op in OPS.values():
        names = implementations(op)
        assert names[0] == OURS and len(names) == len(set(names)) and set(names) <= PEERS.keys()
    assert set(PEERS) == {name for op in OPS.values() for name in implementations(op)}


def run_benchmarks(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process that takes itself for nobody's worker: pytest-benchmark measures nothing in one."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")} | env
    command = [sys.executable, "-m", "pytest", "benchmarks/test_kernels.py", "--benchmark-only", "-q", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would sweep the GPU's large shapes")
def test_a_run_prints_its_table_and_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run = run_benchmarks("-k", "sample_tokens-64 and (rhotrain or eager)", "--bench-json", str(path))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "kernels, beside what the machine reaches" in run.stdout and f"written to {path}" in run.stdout
    content = json.loads(path.read_text())
    graphs = {r["peer"]: r["reason"] for r in content["rows"] if r["status"] == "skipped"}
    assert graphs.keys() == {"rhotrain (reference), CUDA graph", "eager, CUDA graph"}
    assert set(graphs.values()) == {"Unavailable: CUDA graphs need a GPU"}
    timed = [r for r in content["rows"] if r["status"] == "ok"]
    assert [r["peer"] for r in timed] == ["rhotrain (reference)", "eager"]
    assert content["limits"]["read GB/s"] > 0 and ", read GB/s " in run.stdout
    mine = timed[0]
    assert mine["limit"] == content["limits"]["copy GB/s"] and mine["share"] == pytest.approx(
        mine["rate"] / mine["limit"], rel=1e-4
    )
    assert mine["rounds"] == 3 and mine["fastest_peer"] == "eager" and "target" not in mine


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_run_without_a_gpu_is_refused() -> None:
    run = run_benchmarks("--collect-only", RHOTRAIN_TEST_GPU="1")
    assert run.returncode == 4 and "torch sees no GPU here" in run.stderr


class Benchmark:
    disabled = False


def test_nothing_is_started_after_the_deadline(small_case: tuple[Op, Shape]) -> None:
    class Over:
        deadline, seconds, not_started, rows = 0.0, 1.0, 0, list[Row]()

    run = Over()
    with pytest.raises(pytest.skip.Exception, match="1 s are over"):
        test_kernels.test_kernel(*small_case, OURS, Benchmark(), run)
    assert run.rows == [] and run.not_started == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_runs_one_file_or_all_and_names_the_json() -> None:
    # A make that runs these tests would pass its flags on, and this one would then print which folder it enters.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "GNUMAKEFLAGS")}

    def commands(*args: str) -> str:
        command = ["make", "-n", "--no-print-directory", *args]
        made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        return made.stdout.replace("\\\n", "")

    assert "-m pytest benchmarks --benchmark-only" in commands("bench")
    one = commands("bench", "ARGS=benchmarks/test_kernels.py -q")
    assert "pytest benchmarks " not in one and one.rstrip().endswith("benchmarks/test_kernels.py -q")
    gpu = commands("bench-gpu")
    assert "RHOTRAIN_TEST_GPU=1" in gpu and "--bench-json auto" in gpu
    assert all(f"benchmarks/test_{name}.py" in gpu for name in ("kernels", "paged", "rollout", "step"))


def test_committed_results_are_whole() -> None:
    for path in kernel_report.RESULTS.glob("kernels-*.json"):
        content = json.loads(path.read_text())
        assert content["limits"]["copy GB/s"] > 0 and content["machine"]["device"], path.name
        for row in content["rows"]:
            Row(**row)
