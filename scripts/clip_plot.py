"""Clip coming alive: several updates per rollout on the default task, the clip share and the approximate KL by update.

    python scripts/clip_plot.py --svg docs/clip.svg                 trains 9 runs into runs/clip, some minutes
    python scripts/clip_plot.py --svg docs/clip.svg --runs FOLDER   into FOLDER; finished runs are only read
    python scripts/clip_plot.py --lr 1e-4                           the numbers at another learning rate

Prints the numbers as Markdown. Only what is named in RULES differs between the runs of a seed.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhotrain.train.presets import preset
from rhotrain.train.settings import build, merge
from rhotrain.train.trainer import train

NUM_ITERATIONS = 4
SEEDS = (0, 1, 2)
RULES: dict[str, dict[str, Any]] = {
    "grpo, clip 0.8 .. 1.2": {"objective": "grpo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo, clamp 0 .. 1.2": {"objective": "cispo", "ratio_min": 0.0, "ratio_max": 1.2},
    "cispo, clamp 0 .. 5": {"objective": "cispo", "ratio_min": 0.0, "ratio_max": 5.0},
}
"""cispo has no lower bound, as in its paper: once with grpo's upper bound, once with its own default of 5, so wide that
it hardly acts. (With a lower bound of 0.8 a token that has become improbable is still pushed down at nearly full
weight: from an earlier start held-out accuracy fell from 0.66 to 0.22, 0.12 and 0.22.)"""
PANELS = (("clip_ratio/region_mean", "share of tokens where a bound acts"), ("approx_kl/k3", "KL(old, current), k3"))


@dataclass(frozen=True)
class Curve:
    """One rule. by_update: per metric and seed, the mean over steps for every update of a rollout. before, after:
    held-out accuracy per seed."""

    by_update: dict[str, list[list[float]]]
    before: list[float]
    after: list[float]

    def mean(self, name: str) -> list[float]:
        """Over seeds, one value per update."""
        return [statistics.fmean(seeds) for seeds in zip(*self.by_update[name])]

    def spread(self, name: str) -> tuple[list[float], list[float]]:
        """Lowest and highest seed, per update."""
        columns = list(zip(*self.by_update[name]))
        return [min(seeds) for seeds in columns], [max(seeds) for seeds in columns]


def rows_of(folder: Path, layer: dict[str, Any]) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, which is trained first unless it is there and finished."""
    if not (folder / "model").exists():
        own = {"num_iterations": NUM_ITERATIONS, "threads": 1, "out": str(folder)}
        train(build(merge([preset("tiny-sums").layer, layer, own])))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(runs: Path, title: str, lr: float | None) -> Curve:
    """All seeds of one rule."""
    layer = {**RULES[title], **({} if lr is None else {"lr": lr})}
    name = re.sub(r"[^a-z0-9]+", "-", title) + ("" if lr is None else f"-lr{lr:g}")
    by_update: dict[str, list[list[float]]] = {metric: [] for metric, _ in PANELS}
    before, after = [], []
    for seed in SEEDS:
        rows = rows_of(runs / f"{name}-seed{seed}", {**layer, "seed": seed})
        steps = [row["updates"] for row in rows if len(row.get("updates", ())) == NUM_ITERATIONS]
        for metric, values in by_update.items():
            values.append([statistics.fmean(s[i][metric] for s in steps) for i in range(NUM_ITERATIONS)])
        held_out = [row["eval/mean@1"] for row in rows if "eval/mean@1" in row]
        before.append(held_out[0])
        after.append(held_out[-1])
    return Curve(by_update, before, after)


def table(curves: dict[str, Curve]) -> str:
    """The numbers, as Markdown."""
    lines = [
        "| " + " | ".join(("", *(f"update {i}" for i in range(NUM_ITERATIONS)), "held out, seeds 0 to 2")) + " |",
        "|---" * (NUM_ITERATIONS + 2) + "|",
    ]
    for title, c in curves.items():
        shares = [f"{100 * x:.1f} %" if x else "0" for x in c.mean("clip_ratio/region_mean")]
        kl = [f"{x:.4f}" for x in c.mean("approx_kl/k3")]
        accuracy = f"{statistics.fmean(c.before):.2f} -> " + ", ".join(f"{x:.2f}" for x in c.after)
        lines.append(f"| {title}: share | " + " | ".join(shares) + f" | {accuracy} |")
        lines.append(f"| {title}: KL | " + " | ".join(kl) + " | |")
    return "\n".join(lines)


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Mean over steps and seeds; the band reaches from the lowest seed to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "clip"  # the same file for the same numbers
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    updates = range(NUM_ITERATIONS)
    for axes, (name, label) in zip(panels, PANELS):
        for title, c in curves.items():
            axes.plot(updates, c.mean(name), marker="o", label=title)
            axes.fill_between(updates, *c.spread(name), alpha=0.2, linewidth=0)
        axes.set(xlabel="update of a rollout", ylabel=label, xticks=list(updates))
        axes.set_ylim(bottom=0)
        if name.startswith("clip_ratio"):
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--lr", type=float, help="instead of the task's own 5e-4")
    parser.add_argument("--runs", type=Path, default=Path("runs/clip"))
    arguments = parser.parse_args()
    curves = {title: curve(arguments.runs, title, arguments.lr) for title in RULES}
    print(table(curves))
    if arguments.svg:
        plot(curves, arguments.svg)


if __name__ == "__main__":
    main()
