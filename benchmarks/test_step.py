"""A whole GRPO step (rollout, reward, update) beside TRL's GRPOTrainer: seconds and peak memory, in one run.

    make bench            (installs the peers first)

Both sides: SmolLM2-135M, 4 prompts x 8 completions x 32 new tokens, float32 on a CPU, one update per rollout. The first
step of each side is a warm-up and not counted. The ratio of the medians counts, not the seconds.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("step_worker.py")
SETTINGS = {
    "model": "smollm2",
    "prompts": 4,
    "group": 8,
    "max_new_tokens": 32,
    "lr": 1e-6,
    "steps": 5,
    "token_budget": 4096,
    "threads": os.cpu_count() or 1,
}


def run_side(side: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(WORKER), side, json.dumps(SETTINGS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install 'rhotrain[bench]'"
)
def test_whole_step_beside_trl(benchmark: Any) -> None:
    ours: dict[str, Any] = {}

    def measure() -> None:
        ours.update(run_side("rhotrain"))

    benchmark.pedantic(measure, rounds=1, iterations=1)
    theirs = run_side("trl")
    mine, peer = statistics.median(ours["seconds"][1:]), statistics.median(theirs["seconds"][1:])
    benchmark.extra_info.update(
        {
            "rhotrain_seconds": mine,
            "trl_seconds": peer,
            "ratio": peer / mine,
            "rhotrain_peak_gib": ours["peak_gib"],
            "trl_peak_gib": theirs["peak_gib"],
            "phases": ours["phases"],
            "mean_tokens": [statistics.fmean(ours["tokens"]), statistics.fmean(theirs["tokens"])],
        }
    )
    print(json.dumps(benchmark.extra_info, indent=2))
