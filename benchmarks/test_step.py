"""Whole GRPO steps (rollout, reward, update) and the update alone, beside TRL's GRPOTrainer and a plain PyTorch loop.

    make bench ARGS="benchmarks/test_step.py"      on a CPU: SmolLM2-135M, float32; ten to twenty minutes on two cores
    make bench-gpu                                 on an NVIDIA GPU: the shape of Qwen3-0.6B, bfloat16, random weights

Every side runs in a process of its own, the sides in turn, with the same model files, prompts of the same length,
number of new tokens, temperature, learning rate, reward and threads. Ours runs fused layers, PyTorch's own on a CPU (as
the preset smollm2-sums does) and the fastest on a GPU. First each side computes loss and gradient of one
fixed rollout; a side whose loss or gradient is not the plain loop's has no figures. Then updates of that rollout are
timed, then whole steps; the first of each is a warm-up. Peaks are of the resident memory by phase, on CUDA of the
allocator.

Settings, from the environment:
    RHOTRAIN_STEP_MODEL    smollm2 (default on a CPU), qwen3-0.6b (default on a GPU), tiny, or what load_model takes
    RHOTRAIN_STEP_ROUNDS   processes of every side in every case (default 1)
    RHOTRAIN_STEP_STEPS    timed steps and updates of a process (default 3)
    RHOTRAIN_STEP_PEERS    of trl, plain, with commas (default: both; without plain nothing proves the others)
One case: -k short-prompts. Results as data: --bench-json PATH or auto.
"""

import importlib.util
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_limits import describe_machine, device_name
from rollout_cases import RANDOM_MODELS
from rollout_limits import ModelShape, measure_roofline
from rollout_report import result_path, write_json
from step_cases import Case, cases, write_model, write_prompts, write_rollout
from step_process import SideFailed, run_side
from step_report import (
    Row,
    beside_prime_rl,
    compare,
    fill,
    gradient_error,
    parity_failure,
    table,
)
from step_worker import Job

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PEERS = ("plain", "trl")
FUSED_LAYERS = "auto" if DEVICE.type == "cuda" else "torch"


def model_name() -> str:
    return os.environ.get("RHOTRAIN_STEP_MODEL") or ("qwen3-0.6b" if DEVICE.type == "cuda" else "smollm2")


class StepRun:
    """What a session measures, and its end: the table, and the file of `--bench-json`."""

    def __init__(self, others: Any, folder: Path) -> None:
        self.others, self.folder = others, folder
        self.rows: list[Row] = []
        self.rounds = int(os.environ.get("RHOTRAIN_STEP_ROUNDS") or 1)
        self.steps = int(os.environ.get("RHOTRAIN_STEP_STEPS") or 3)
        asked = os.environ.get("RHOTRAIN_STEP_PEERS")
        self.peers = PEERS if asked is None else tuple(name.strip() for name in asked.split(",") if name.strip())
        if set(self.peers) - set(PEERS) or min(self.rounds, self.steps) < 1:
            raise pytest.UsageError(
                f"RHOTRAIN_STEP_PEERS: {asked!r}, RHOTRAIN_STEP_ROUNDS: {self.rounds}, RHOTRAIN_STEP_STEPS: "
                f"{self.steps}; peers are {', '.join(PEERS)}, rounds and steps 1 or more"
            )

    @cached_property
    def model(self) -> str:
        return write_model(model_name(), self.folder, DEVICE)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    @cached_property
    def flop_per_s(self) -> float:
        return measure_roofline(DEVICE).flop_per_s

    def job(self, case: Case, side: str) -> Job:
        """The files of a case are written once."""
        prompts, rollout = self.folder / f"{case}.jsonl", self.folder / f"{case}.json"
        if not rollout.exists():
            write_prompts(case, self.tokenizer, prompts)
            write_rollout(case, self.tokenizer, prompts, rollout)
        return Job(
            case=case,
            model=self.model,
            prompts=str(prompts),
            rollout=str(rollout),
            gradient=str(self.folder / f"{case}-{side}.pt"),
            steps=self.steps,
            updates=self.steps,
            fused_layers=FUSED_LAYERS,
            threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )

    def settings(self) -> dict[str, Any]:
        name = model_name()
        return {
            "model": name,
            "weights": "random" if name in RANDOM_MODELS else "trained",
            "fused_layers": FUSED_LAYERS,
            "dtype": "bfloat16" if DEVICE.type == "cuda" else "float32",
            "rounds": self.rounds,
            "steps": self.steps,
        }

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.rows:
            return
        where, limits = device_name(DEVICE), {"gemm GFLOP/s": self.flop_per_s / 1e9}
        terminalreporter.section("steps, beside the peers and what the machine reaches")
        terminalreporter.write_line(f"{model_name()} on {where}: gemm GFLOP/s {limits['gemm GFLOP/s']:.4g}")
        for line in table(self.rows):
            terminalreporter.write_line(line)
        wanted = config.getoption("--bench-json")
        if wanted:
            path = result_path(wanted, where, bool(self.others.rows), "step")
            write_json(path, describe_machine(DEVICE), self.settings(), limits, self.rows, "step")
            terminalreporter.write_line(f"written to {path}")


@pytest.fixture(scope="session")
def step_run(pytestconfig: pytest.Config, kernel_run: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        run = StepRun(kernel_run, Path(folder))
        pytestconfig.pluginmanager.register(run)
        yield run


@pytest.mark.parametrize("case", cases(model_name(), DEVICE), ids=str)
def test_step(case: Case, benchmark: Any, step_run: StepRun) -> None:
    if benchmark.disabled:
        pytest.skip("--benchmark-disable: nothing to measure")
    trl = ["trl", *(["trl-whole"] if case.trl_whole else [])] if "trl" in step_run.peers else []
    sides = [*(["plain"] if "plain" in step_run.peers else []), *trl, "rhotrain"]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    reasons: dict[str, str] = {}
    if importlib.util.find_spec("trl") is None:
        reasons |= dict.fromkeys(trl, "TRL is not installed: pip install 'rhotrain[bench]'")

    def one_round() -> None:
        for side in sides:
            if side in reasons:
                continue
            try:
                results[side].append(run_side(side, step_run.job(case, side)))
            except SideFailed as error:
                reasons[side] = str(error)

    benchmark.pedantic(one_round, rounds=step_run.rounds, iterations=1)
    rows = report(case, results, reasons, step_run)
    step_run.rows += rows
    ours = rows[0]
    if ours.status != "ok":
        pytest.fail(f"{case}: no speed is reported: {ours.reason}", pytrace=False)


def report(case: Case, results: dict[str, list[dict[str, Any]]], reasons: dict[str, str], run: StepRun) -> list[Row]:
    """The rows of a case, ours first; parity comes before speed."""
    rows = {side: Row(case=case.name, by=side, reason=reasons.get(side, "")) for side in results}
    if results["rhotrain"]:
        shape = ModelShape(**results["rhotrain"][0]["shape"], kv_bytes=0, itemsize=0)
    truth = None if not results.get("plain") else load_gradient(run.job(case, "plain"))
    for side, row in rows.items():
        if side in reasons or not results[side]:
            continue
        if truth is not None:
            row.loss_error = max(
                abs(r["parity"]["loss"] - results["plain"][0]["parity"]["loss"]) for r in results[side]
            )
            row.gradient_error = gradient_error(load_gradient(run.job(case, side)), truth)
        row.reason = parity_failure(row, DEVICE.type) or ""
        if not row.reason and results["rhotrain"]:
            fill(row, case, results[side], shape, run.flop_per_s)
    ours = rows.pop("rhotrain")
    for peer in rows.values():
        compare(ours, peer, case)
    beside_prime_rl(ours)
    return [ours, *rows.values()]


def load_gradient(job: Job) -> dict[str, torch.Tensor]:
    sample: dict[str, torch.Tensor] = torch.load(job.gradient, weights_only=True)
    return sample
