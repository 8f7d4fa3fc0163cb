"""The rollout engine beside transformers' generate and continuous batching, and on a GPU vLLM and SGLang: output tok/s.

    make bench ARGS="benchmarks/test_rollout.py"      on a CPU: SmolLM2-135M, float32, 5 to 6 minutes on two cores
    make bench-gpu                                    on an NVIDIA GPU: the shape of Qwen3-0.6B, bfloat16, random

Every side samples the same prompts at temperature 1, the same number of new tokens per row, stop ids ignored. In each
round all sides run one after the other in this process (peers, then ours, on the same prompts; servers have their own
process): speed drifts, and figures of different minutes are not comparable. On a GPU each peer has rounds of its own
with ours, so that memory is shared by two. A ratio is the median of the rounds' ratios. A row says when other
processes took CPU time meanwhile: such figures say little.

Before anything is timed, our greedy tokens must be generate's, or tie with them within rounding, and in every workload
the logprobs of drawn tokens must be those of transformers' own forward; a side that draws another number of tokens than
asked for has no figures. Our policy_version rises before each round, as after an optimiser step: what the engine
derives from the weights counts in its time.

Settings, from the environment:
    RHOTRAIN_ROLLOUT_MODEL    smollm2 (default on a CPU), qwen3-0.6b (default on a GPU), tiny, or what load_model takes
    RHOTRAIN_ROLLOUT_ROUNDS   rounds of every side in every workload (default: 3; on a CPU 1)
    RHOTRAIN_ROLLOUT_PEERS    of generate, continuous batching, vllm, sglang, with commas (default: all; on a CPU
                              continuous batching in uniform-16 only, as it takes minutes in the others)
One workload: -k uniform-16. Results as data: --bench-json PATH or auto.

Shares of the roofline: rollout_limits.py. Workloads and targets: rollout_cases.py. Every side: rollout_peers.py.
"""

import os
from contextlib import ExitStack
from functools import cached_property
from importlib import metadata
from typing import Any

import pytest
import torch
from kernel_limits import describe_machine, device_name
from kernel_report import has_targets
from rollout_cases import RANDOM_MODELS, Batch, Models, Workload, load_models, workloads
from rollout_limits import LeastWork, ModelShape, Roofline, measure_roofline
from rollout_peers import PEERS, Run, RunBatch, Unavailable, free_memory, open_ours, our_name
from rollout_proof import greedy_difference, logprob_error, logprob_limit
from rollout_report import Row, compare, judge, measured, result_path, table, write_json

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW_ON_A_CPU = "continuous batching"
SLOW_EXCEPT = "uniform-16"


class RolloutRun:
    """What a session measures, and its end: the table, and the file of `--bench-json`."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.rows: list[Row] = []
        self.spec = os.environ.get("RHOTRAIN_ROLLOUT_MODEL") or ("qwen3-0.6b" if DEVICE.type == "cuda" else "smollm2")
        self.rounds = int(os.environ.get("RHOTRAIN_ROLLOUT_ROUNDS") or 0)
        asked = os.environ.get("RHOTRAIN_ROLLOUT_PEERS")
        self.asked = None if asked is None else [name.strip() for name in asked.split(",") if name.strip()]
        unknown = set(self.asked or ()) - set(PEERS)
        if unknown or self.rounds < 0:
            raise pytest.UsageError(
                f"RHOTRAIN_ROLLOUT_PEERS: {sorted(unknown)} is unknown, RHOTRAIN_ROLLOUT_ROUNDS: {self.rounds}; "
                f"peers are {', '.join(PEERS)}, rounds 1 or more"
            )

    @cached_property
    def models(self) -> Models:
        return load_models(self.spec, DEVICE)

    @cached_property
    def roofline(self) -> Roofline:
        return measure_roofline(DEVICE)

    @cached_property
    def difference(self) -> str | None:
        """What is wrong with our greedy tokens, None if nothing is."""
        return greedy_difference(self.models)

    @property
    def rounds_asked(self) -> int:
        return self.rounds or (1 if DEVICE.type == "cpu" else 3)

    def why_not(self, peer: str, workload: Workload) -> str | None:
        """Why a peer is not even tried."""
        if self.asked is not None:
            return None if peer in self.asked else "not among RHOTRAIN_ROLLOUT_PEERS"
        if DEVICE.type == "cpu" and peer == SLOW_ON_A_CPU and workload.name != SLOW_EXCEPT:
            return f"takes minutes a round on a CPU; RHOTRAIN_ROLLOUT_PEERS='{peer}' runs it"
        return None

    def settings(self) -> dict[str, Any]:
        weights = "random" if self.spec in RANDOM_MODELS else "trained"
        dtype = str(self.models.loaded.dtype).removeprefix("torch.")
        return {
            "model": self.spec,
            "weights": weights,
            "dtype": dtype,
            "attention": self.models.hf.config._attn_implementation,
        }

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.rows:
            return
        limits, where = self.roofline.limits(), device_name(DEVICE)
        terminalreporter.section("rollout, beside the peers and what the machine reaches")
        reached = ", ".join(f"{name} {value:.4g}" for name, value in limits.items())
        terminalreporter.write_line(f"{self.spec} on {where}: {reached}")
        for line in table(self.rows):
            terminalreporter.write_line(line)
        wanted = config.getoption("--bench-json")
        if wanted:
            path = result_path(wanted, where, others_too=bool(self.kernels.rows))
            machine = describe_machine(DEVICE)
            installed = {d.name: d.version for d in metadata.distributions()}
            machine["versions"] |= {name: installed.get(name) for name in ("flash-attn", "vllm", "sglang")}
            write_json(path, machine, self.settings(), limits, self.rows)
            terminalreporter.write_line(f"written to {path}")


@pytest.fixture(scope="session")
def rollout_run(pytestconfig: pytest.Config, kernel_run: Any) -> RolloutRun:
    run = RolloutRun(kernel_run)
    pytestconfig.pluginmanager.register(run)
    return run


def sides_together() -> list[list[str]]:
    """Peers that share rounds. On a CPU all that run there, as time is scarce; on a GPU one, as memory is."""
    return [[name] for name in PEERS] if DEVICE.type == "cuda" else [["generate", "continuous batching"]]


@pytest.mark.parametrize("peers", sides_together(), ids="+".join)
@pytest.mark.parametrize("workload", workloads(DEVICE), ids=str)
def test_rollout(workload: Workload, peers: list[str], benchmark: Any, rollout_run: RolloutRun) -> None:
    if benchmark.disabled:
        pytest.skip("--benchmark-disable: nothing to measure")
    if rollout_run.difference is not None:
        pytest.fail(f"{rollout_run.difference}: no speed is reported for wrong tokens", pytrace=False)
    models = rollout_run.models
    rounds = [workload.batch(r, models.loaded.vocab_size) for r in range(1, rollout_run.rounds_asked + 1)]
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        theirs: dict[str, RunBatch] = {}
        for peer in peers:
            reason = rollout_run.why_not(peer, workload) or open_peer(stack, peer, models, workload, theirs)
            if reason:
                reasons[peer] = reason
        ours = stack.enter_context(open_ours(models, rounds[0]))
        first, error = warm_up(ours, workload, models)
        if error > logprob_limit(models):
            pytest.fail(f"{workload}: logprobs are off by {error:.3g}: no speed is reported", pytrace=False)
        mine, found = take_turns(ours, theirs, rounds, reasons, benchmark)
    free_memory(DEVICE)
    report(rollout_run, workload, rounds[0], mine, found, reasons, first, error)


def open_peer(
    stack: ExitStack, peer: str, models: Models, workload: Workload, theirs: dict[str, RunBatch]
) -> str | None:
    """Open and warm up a peer; returns why it cannot be measured."""
    batch = workload.batch(0, models.loaded.vocab_size)
    try:
        run = stack.enter_context(PEERS[peer](models, batch))
        run(batch.short(batch.rows, 8) if DEVICE.type == "cuda" else batch.short(2, 3, prompt_len=64))
    except Exception as error:  # a peer that fails is a row with its reason
        return one_line(error)
    theirs[peer] = run
    return None


def warm_up(ours: RunBatch, workload: Workload, models: Models) -> tuple[Run, float]:
    """A run that is not timed (on CUDA a whole one, which captures the graphs), and the error of its logprobs."""
    batch = workload.batch(0, models.loaded.vocab_size)
    if DEVICE.type == "cpu":
        batch = batch.short(2, 20)
    first = ours(batch).check(batch)
    return first, logprob_error(models, batch, first)


def take_turns(
    ours: RunBatch, theirs: dict[str, RunBatch], rounds: list[Batch], reasons: dict[str, str], benchmark: Any
) -> tuple[list[Run], dict[str, list[Run]]]:
    """Every round: all peers, then ours, which is what pytest-benchmark shows. A peer that fails is given up."""
    mine: list[Run] = []
    found: dict[str, list[Run]] = {peer: [] for peer in theirs}

    def peers_first() -> tuple[tuple[Batch], dict[str, Any]]:
        batch = rounds[len(mine)]
        for peer, run in theirs.items():
            if peer in reasons:
                continue
            try:
                found[peer].append(run(batch).check(batch))
            except Exception as error:
                reasons[peer] = one_line(error)
        return (batch,), {}

    def our_turn(batch: Batch) -> None:
        mine.append(ours(batch).check(batch))

    benchmark.pedantic(our_turn, setup=peers_first, rounds=len(rounds), iterations=1)
    return mine, found


def report(
    run: RolloutRun,
    workload: Workload,
    batch: Batch,
    mine: list[Run],
    found: dict[str, list[Run]],
    reasons: dict[str, str],
    first: Run,
    error: float,
) -> None:
    """The rows of one test."""
    work = LeastWork.of(ModelShape.of(run.models.loaded), batch)
    ours = measured(workload.name, our_name(run.models), batch, mine, work, run.roofline, [first])
    ours.logprob_error = error
    rows = [ours]
    for peer in dict.fromkeys((*found, *reasons)):
        if peer in reasons:
            rows.append(Row(workload=workload.name, by=peer, reason=reasons[peer]))
            continue
        rows.append(measured(workload.name, peer, batch, found[peer], work, run.roofline, []))
        compare(ours, rows[-1])
    if DEVICE.type == "cpu" and run.spec == "smollm2":
        judge(ours, rows, workload.cpu)
    elif run.spec == "qwen3-0.6b" and has_targets(device_name(DEVICE)):
        judge(ours, rows, workload.gpu)
    run.rows += rows


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}")[:160]
