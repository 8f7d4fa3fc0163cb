"""What a person sees of a run: one aligned line per step, a progress bar, warnings, the summary; and Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tqdm import tqdm

from rhotrain.train.evaluate import EvalResult
from rhotrain.train.metrics import Metrics

PATIENCE = 5
"""Steps in a row that a bad sign must last before it is told."""


@dataclass
class StopRequest:
    """Set by the first Ctrl-C (or SIGTERM): the loop ends after the step, with a checkpoint. A second stops at once."""

    asked: bool = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nfinishing this step, then writing a checkpoint; press Ctrl-C again to stop at once", file=sys.stderr)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals until the exit; outside the main thread Python cannot, and they keep their meaning."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def step_line(step: int, steps: int, m: Metrics) -> str:
    """The line of one step, aligned so that columns can be read downwards."""
    width = len(str(steps))
    parts = [
        f"step {step:>{width}}/{steps}",
        "reward   none" if m["reward"] is None else f"reward {m['reward']:6.3f}",
        f"len {m['completions/mean_length']:5.1f}",
    ]
    if m["updates_taken"]:
        parts += [f"entropy {m['entropy']:5.2f}", f"grad {m['grad_norm']:6.2f}"]
    else:
        parts.append(f"{_why_none(m)}, no update")
    parts.append(f"no signal {_percent(m['frac_reward_zero_std'])}")
    phases = ", ".join(f"{name} {m[f'time/{name}']:.1f}" for name in ("rollout", "reward", "update"))
    speed = "drawn ahead" if m["tok_per_s"] is None else f"{m['tok_per_s']:5.0f} tok/s"
    parts.append(f"{speed}  {m['step_time']:5.1f} s ({phases})")
    return "  ".join(parts)


def _why_none(m: Metrics) -> str:
    if m["stopped_by_kl"]:
        return "KL above kl_stop"
    return "gradient overflowed" if m.get("updates_overflowed") else "no group carries signal"


def ratio_line(m: Metrics) -> str:
    """The ratio of one step: what the updates did, then the sampler against the trainer before them."""
    parts = []
    if m["updates_taken"]:
        parts += [
            f"ratio {m['ratio/mean']:6.4f} [{m['ratio/min']:.3f} {m['ratio/max']:.3f}]",
            f"log {m['log_ratio/mean']:+.1e} max {m['log_ratio/abs_max']:.1e}",
            f"clip low {_percent(m['clip_ratio/low_mean'])} high {_percent(m['clip_ratio/high_mean'])}",
            f"KL k1 {m['approx_kl/k1']:+.1e} k3 {m['approx_kl/k3']:.1e}",
        ]
    if "sampling/k3" in m:
        name = "sampling/sampling_logp_difference/"
        parts += [
            f"sampler-trainer {m[name + 'mean']:.1e} p99 {m[name + 'p99']:.1e} max {m[name + 'max']:.1e} "
            f"k3 {m['sampling/k3']:.1e}",
            f"ESS {m['sampling/effective_sample_size']:.3f}",
        ]
    parts.append(f"kept {m['kept_mass']:.3f}")
    parts.append(f"stale {m['staleness/mean']:g}")
    return "  ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:5.1f} %"


@dataclass
class Console:
    """Prints to stdout; the progress bar goes to stderr and only to a terminal."""

    steps: int
    first_step: int = 0
    bar: Any = None
    streaks: dict[str, int] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """A bar over the steps with the time that is left; silent when stderr is not a terminal."""
        with tqdm(total=self.steps, initial=self.first_step, unit="step", disable=None, leave=False) as self.bar:
            yield
        self.bar = None

    def say(self, text: str) -> None:
        if self.bar is None or self.bar.disable:
            print(text, flush=True)
        else:
            self.bar.write(text, file=sys.stdout)

    def phase(self, name: str, finished: int, total: int) -> None:
        """How far the step is, at the end of the bar."""
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix_str(f"{name} {finished}/{total}", refresh=True)

    def step(self, step: int, metrics: Metrics) -> None:
        self.say(step_line(step, self.steps, metrics))
        self.say(f"  {ratio_line(metrics)}")
        if metrics["stopped_by_kl"]:
            taken, skipped = metrics["updates_taken"], metrics["updates_skipped"]
            kl = metrics["kl_at_stop"]
            self.say(f"  KL {kl:.3g} above kl_stop after {taken} update(s) of this rollout: {skipped} skipped")
        if metrics.get("updates_overflowed"):
            self.say(
                f"  float16: the gradient of {metrics['updates_overflowed']} update(s) overflowed and was dropped; the "
                f"loss scale is {metrics['loss_scale']:g} now"
            )
        if metrics["over_numerics_budget"] and "numerics" not in self.warned:
            self.warned.add("numerics")
            self.say(
                "warning: sampler and trainer differ on the same weights by more than numerics: "
                f"{'; '.join(metrics['over_numerics_budget'])}. `rhotrain audit` with the same flags finds the cause; "
                "strict_ratio stops such a run. Told once; over_numerics_budget in metrics.jsonl has every step"
            )
        for warning in self._warnings(metrics):
            self.say(f"warning: {warning}")
        if self.bar is not None:
            self.bar.update(1)

    def _warnings(self, m: Metrics) -> list[str]:
        signs = {
            f"most completions hit max_new_tokens for {PATIENCE} steps; "
            "raise max_new_tokens, or ask for shorter answers in the prompt": m["completions/clipped_ratio"] > 0.5,
            f"no group carried signal for {PATIENCE} steps: every completion of a prompt gets the same reward; "
            "raise group_size or temperature, or take easier or harder questions": m["frac_reward_zero_std"] == 1.0
            and m["frac_unscorable"] < 1.0,
            f"most completions were unscorable for {PATIENCE} steps; look at the reward function's errors "
            "and at reward_timeout": m["frac_unscorable"] - m["completions/error_ratio"] > 0.5,
            f"some completions ended in an error for {PATIENCE} steps: their logits were NaN or infinite; the weights "
            "have probably diverged, lower lr": m["completions/error_ratio"] > 0,
        }
        told = []
        for number, (text, bad) in enumerate(signs.items()):
            key = str(number)
            self.streaks[key] = self.streaks.get(key, 0) + 1 if bad else 0
            if self.streaks[key] == PATIENCE and key not in self.warned:
                self.warned.add(key)
                told.append(text)
        return told

    def evaluation(self, label: str, result: EvalResult) -> None:
        text = (
            f"{label}: accuracy {result.mean_at_n:.3f} +- {result.standard_error:.3f} on {result.num_prompts} prompts"
        )
        if result.num_samples > 1:
            text += f" (mean@{result.num_samples}), pass@{result.num_samples} {result.pass_at_n:.3f}"
        self.say(text + (f", {result.unscorable} unscorable" if result.unscorable else ""))

    def summary(self, before: EvalResult | None, after: EvalResult | None, folder: str, finished: bool) -> None:
        if before is not None and after is not None:
            for label, result in (("before", before), ("after", after)):
                self.say(f"\n{label} training:")
                for example in result.examples:
                    self.say(f"  prompt      {_one_line(example.prompt)}")
                    self.say(f"  completion  {_one_line(example.completion)}   (score {example.score:g})")
            self.say("")
            self.evaluation("held out before", before)
            self.evaluation("held out after ", after)
            self.say(f"change: {after.mean_at_n - before.mean_at_n:+.3f}")
        self.say(f"run folder: {folder}")
        if not finished:
            self.say(f"stopped early; go on with: rhotrain train {folder}/config.toml --out {folder} --resume")


def _one_line(text: str, limit: int = 160) -> str:
    shown = text.replace("\n", "\\n")
    return shown if len(shown) <= limit else "..." + shown[-limit:]
