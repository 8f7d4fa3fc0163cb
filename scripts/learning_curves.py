"""Collect finished runs into one JSON file and one picture: reward per step, held-out accuracy before and after.

python scripts/learning_curves.py RUN_FOLDER ... --json FILE --svg FILE
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

PHASES = ("rollout", "reward", "update")


def collect(folder: Path) -> dict[str, Any]:
    """What a reader wants of one run; phases are medians over its steps."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    accuracy = [{"step": r["step"], "accuracy": r["eval/mean@1"]} for r in rows if "eval/mean@1" in r]
    environment = json.loads((folder / "env.json").read_text())
    return {
        "reward": [row["reward"] for row in steps],
        "mean_length": [row["completions/mean_length"] for row in steps],
        "held_out": accuracy,
        "held_out_prompts": next(r["eval/prompts"] for r in rows if "eval/prompts" in r),
        "logp_difference_mean": max(r.get("sampling/sampling_logp_difference/mean", 0.0) for r in steps),
        "median_seconds": {
            "step": statistics.median(row["step_time"] for row in steps),
            **{phase: statistics.median(row[f"time/{phase}"] for row in steps) for phase in PHASES},
        },
        "packages": environment["packages"],
        "cpu_cores": environment["cpu_cores"],
        "gpus": environment["gpus"],
    }


def moving_mean(values: list[float], width: int = 5) -> list[float]:
    """Mean of each value and the up to width - 1 before it."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Left: reward, moving mean over 5 steps. Right: held-out accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    for name, run in runs.items():
        left.plot(range(1, len(run["reward"]) + 1), moving_mean(run["reward"]), label=name)
        right.plot(
            [e["step"] for e in run["held_out"]], [e["accuracy"] for e in run["held_out"]], marker="o", label=name
        )
    left.set(xlabel="step", ylabel="reward (mean of 5 steps)")
    right.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    runs = {f"seed {i}": collect(folder) for i, folder in enumerate(arguments.folders)}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(runs, indent=1) + "\n")
    if arguments.svg:
        draw(runs, arguments.svg)


if __name__ == "__main__":
    main()
