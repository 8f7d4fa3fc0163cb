"""The audit of our own pipeline: every cause alone and named alone, clean settings, policy movement, the report."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_train import one_thread

from rhotrain.rollout.completion import Completion
from rhotrain.train.audit import Audit, audit, narrowed
from rhotrain.train.audit_report import audit_json, audit_text, report
from rhotrain.train.batching import make_table
from rhotrain.train.causes import CAUSES, FIXES, Effect, logprobs, verdict
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.presets import preset
from rhotrain.train.rollouts import RolloutQueue
from rhotrain.train.settings import build, merge
from rhotrain.train.setup import Parts
from rhotrain.train.setup import build as build_parts


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


def config(groups: int = 4, **values: Any) -> Config:
    small = {"train_size": 60, "threads": 1, "group_size": 6}
    return narrowed(build(merge([preset("tiny-sums").layer, small, values])), groups)


def run(updates: int = 0, groups: int = 4, **values: Any) -> Audit:
    settings = config(groups, **values)
    return audited(settings, build_parts(settings), updates)


def audited(settings: Config, parts: Parts, updates: int = 0) -> Audit:
    try:
        return audit(settings, parts, updates=updates)
    finally:
        parts.rewards.close()


def row(effects: tuple[Effect, ...], name: str) -> Effect:
    return next(effect for effect in effects if effect.name == name)


def links_without(done: Audit, *causes: str) -> float:
    """The largest semantic link of any cause but these."""
    return max(effect.max_abs for effect in done.causes[1:] if effect.name not in causes)


# ---- nothing, and one cause at a time -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.6}, {"top_k": 5, "top_p": 0.85}, {"ratio_level": "sequence", "old_logprobs": "trainer"}],
    ids=["plain", "T", "replay", "sequence"],
)
def test_a_clean_setting_names_no_cause(dtype: str, values: dict[str, Any]) -> None:
    done = run(dtype=dtype, **values)
    assert done.found == () and done.exit_code == 0 and done.exceeded == () and done.diagnosis is None
    assert [effect.name for effect in done.causes] == list(CAUSES)
    assert links_without(done) == 0.0 and done.causes[0].max_abs > 0
    assert done.verdict.startswith("clean: ")
    assert done.subject.tokens > 50 and done.subject.completions == 24


def test_temperature_alone() -> None:
    settings = config(temperature=0.6)
    parts = build_parts(settings)
    parts.learner.temperature = 1.0
    done = audited(settings, parts)
    assert done.found == ("temperature",) and done.exit_code == 1
    assert links_without(done, "temperature") == 0.0


def test_truncation_alone() -> None:
    done = run(top_k=4, top_p=0.7, truncation="ignore")
    assert done.found == ("truncation",) and done.exit_code == 1
    link = row(done.causes, "truncation")
    assert links_without(done, "truncation") == 0.0
    assert link.ratio_max <= 1.0 and link.mean < -1e-4 and done.subject.kept_mass < 1.0


def test_dropout_alone() -> None:
    done = run(dropout=0.1)
    assert done.found == ("dropout",) and done.exit_code == 1
    assert links_without(done, "dropout") == 0.0 and row(done.causes, "dropout").clip > 0.02


STALE: dict[str, Any] = {"max_staleness": 2, "correction_max": 2.0}


@pytest.mark.parametrize("groups", [4, 2])
def test_staleness_alone(groups: int) -> None:
    done = run(groups=groups, old_logprobs="trainer", **STALE)
    assert done.subject.staleness == 2
    assert done.found == ("staleness",) and done.exit_code == 1
    assert links_without(done, "staleness") == 0.0 and row(done.causes, "staleness").max_abs > 0.01


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"old_logprobs": "sampler"}, "sampler anchors hold it"),
        ({"old_logprobs": "trainer", "correction": "sequence_mask"}, "sequence_mask weighs it"),
        ({"old_logprobs": "fresh", "correction": "token_truncate"}, "token_truncate weighs it"),
    ],
)
def test_staleness_that_is_taken_care_of_does_not_count(values: dict[str, Any], words: str) -> None:
    done = run(**STALE, **values)
    assert done.found == () and done.exit_code == 0
    assert row(done.causes, "staleness").max_abs > 0.01 and words in done.verdict


def test_staleness_is_what_the_queue_makes_at_most() -> None:
    done = run(old_logprobs="trainer", max_staleness=5, num_iterations=2)
    assert done.subject.staleness == 4, "two rollouts ahead of two updates each"


def test_tokenisation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's table with one id changed, as an encoder of text would change it."""
    from rhotrain.train import audit as module

    held_table = module._held_table

    def encoded_again(*args: Any) -> Any:
        table = held_table(*args)
        table.token_ids[3] = (table.token_ids[3] + 1) % 10 + 3
        return table

    monkeypatch.setattr(module, "_held_table", encoded_again)
    done = run()
    assert done.found == ("tokenisation",) and links_without(done, "tokenisation") == 0.0


def _tampered(parts: Parts, change: Any) -> None:
    """Let the engine report other logprobs than it drew from."""
    generate = parts.engine.generate

    def lie(*args: Any, **options: Any) -> list[list[Completion]]:
        return [
            [replace(c, logprobs=tuple(change(x) for x in c.logprobs)) for c in group]
            for group in generate(*args, **options)
        ]

    parts.engine.generate = lie  # type: ignore[method-assign]


def test_numerics_alone_are_diagnosed() -> None:
    """An engine whose logprobs are off by a factor: no cause of the trainer's, and more than rounding."""
    settings = config()
    parts = build_parts(settings)
    _tampered(parts, lambda x: 1.3 * x)
    done = audited(settings, parts)
    assert done.found == ("numerics",) and done.exit_code == 1 and links_without(done) == 0.0
    assert done.exceeded and done.diagnosis is not None and not done.diagnosis.clean
    assert done.diagnosis.findings[0].name in done.verdict
    assert "EXCEEDED" in audit_text(done) and audit_json(done)["diagnosis"]["findings"]


def test_several_causes_are_all_named() -> None:
    done = run(top_k=4, top_p=0.7, truncation="ignore", dropout=0.1, old_logprobs="trainer", **STALE)
    assert done.found == ("staleness", "truncation", "dropout")
    assert "staleness, truncation and dropout set trainer and sampler apart" in done.verdict
    assert all(FIXES[cause] in done.verdict for cause in done.found)
    assert sum(effect.mean for effect in done.causes) == pytest.approx(done.total.mean, abs=1e-6)


# ---- what other settings would do -----------------------------------------------------------------------------------


def test_what_if_rows_have_what_this_run_has_not() -> None:
    table = ["dropout 0, train mode", "dropout 0.1, train mode", "dropout 0.1, eval mode"]
    assert [e.name for e in run().what_if] == table
    done = run(temperature=0.6, top_k=4, top_p=0.95)
    assert [e.name for e in done.what_if] == ["temperature ignored (T=1)", "truncation ignored", *table]
    assert all(row(done.what_if, name).max_abs > 1e-3 for name in ("temperature ignored (T=1)", "truncation ignored"))
    assert row(done.what_if, "dropout 0, train mode").max_abs == row(done.what_if, table[2]).max_abs == 0.0
    assert row(done.what_if, "dropout 0.1, train mode").max_abs > 0.1
    assert done.found == (), "what is not in the run is not in the verdict"
    assert run(dropout=0.3).what_if[1].name == "dropout 0.3, train mode"


def test_dropout_is_not_tried_where_layers_are_recomputed_without_it() -> None:
    done = run(gradient_checkpointing=True)
    assert done.what_if == () and any("gradient_checkpointing" in note for note in done.notes)
    assert len(run(gradient_checkpointing=True, dropout=0.1).what_if) == 3


# ---- policy movement ------------------------------------------------------------------------------------------------


def test_the_ratio_moves_with_the_updates() -> None:
    done = run(updates=3, lr=1e-4)
    assert [effect.name for effect in done.movement] == ["after 1 update", "after 3 updates"]
    first, last = done.movement
    assert 0.001 < first.mean_abs < last.mean_abs
    assert done.found == (), "what real updates do is the policy's"
    assert [effect.name for effect in run(updates=1).movement] == ["after 1 update"]
    assert run(updates=0).movement == ()


def test_movement_is_against_the_weights_before_the_first_update() -> None:
    settings = config()
    parts, fresh = build_parts(settings), build_parts(settings)
    drawn = RolloutQueue(settings, fresh.engine, fresh.stream).take(version=0, remaining=1)
    table = make_table([(p.token_ids, group) for p, group in zip(drawn.prompts, drawn.groups)])
    done = audited(settings, parts, updates=2)
    fresh.rewards.close()
    before, after = (logprobs(p.learner, table, temperature=1.0) for p in (fresh, parts))
    assert done.movement[-1].mean == pytest.approx(float((after - before).mean()), abs=1e-9)
    assert parts.loaded.policy_version == 2 and done.subject.staleness == 0


def test_without_signal_advantages_are_drawn_and_the_report_says_so() -> None:
    settings = config()
    parts = build_parts(settings)
    score = parts.rewards.score

    def flat(batch: Any) -> Any:
        rewards = score(batch)
        return replace(rewards, total=torch.zeros_like(rewards.total))

    parts.rewards.score = flat  # type: ignore[method-assign]
    done = audited(settings, parts, updates=2)
    assert len(done.movement) == 2 and done.movement[1].mean_abs > 0.01
    assert sum("drawn at random" in note for note in done.notes) == 1


def test_updates_are_those_of_the_run_and_nothing_is_drawn_anew() -> None:
    """reward_aggregation reaches the audit's updates too; dynamic sampling does not, and the report says so."""
    rewards: dict[str, Any] = {"rewards": ("task", "length*0.1"), "reward_args": {"length": {"max_tokens": 4}}}
    sums = run(updates=1, **rewards)
    each = run(updates=1, **rewards, reward_aggregation="normalize_then_sum", dynamic_sampling=2)
    assert sums.movement != each.movement
    assert [any("dynamic_sampling" in note for note in done.notes) for done in (sums, each)] == [False, True]


def test_the_audit_repeats_itself() -> None:
    settings = config(dropout=0.1)
    done = []
    for draws in (0, 5):
        parts = build_parts(settings)
        torch.rand(draws)
        done.append(audited(settings, parts, updates=2))
    assert done[0] == done[1], "everything is drawn from the run's seed"


# ---- settings and the report ----------------------------------------------------------------------------------------


def test_groups_follow_the_minibatches() -> None:
    base = build(merge([preset("tiny-sums").layer, {"minibatches_per_rollout": 8, "eval_every": 5}]))
    chosen = narrowed(base, 0)
    assert chosen.rollout.prompts_per_step == 8 and chosen.eval.eval_size == chosen.eval.eval_every == 0
    assert narrowed(build(preset("tiny-sums").layer), 0).rollout.prompts_per_step == 4
    with pytest.raises(ConfigError, match=r"groups: 4 does not work; .*multiple of 8"):
        narrowed(base, 4)
    with pytest.raises(ConfigError, match="groups: -1"):
        narrowed(base, -1)
    with pytest.raises(ConfigError, match="updates: -1"):
        run(updates=-1)


def test_the_report_says_all_of_it() -> None:
    done = run(updates=2, temperature=0.6, top_k=4, top_p=0.7)
    text = audit_text(done)
    plain = " ".join(text.split())
    for effect in (*done.causes, done.total, *done.what_if, *done.movement):
        line = next(line for line in text.splitlines() if line.startswith(effect.name + "  "))
        cells = re.split(r"\s{2,}", line)
        assert float(cells[1]) == pytest.approx(effect.mean, rel=6e-3, abs=1e-12)
        assert float(cells[3]) == pytest.approx(effect.max_abs, rel=6e-3, abs=1e-12)
        low, high = json.loads(cells[4])
        assert (low, high) == (pytest.approx(effect.ratio_min, abs=1e-6), pytest.approx(effect.ratio_max, abs=1e-6))
        if effect.clip == 0.0 or effect.clip >= 0.0005:
            assert float(cells[5].removesuffix(" %")) == pytest.approx(100 * effect.clip, abs=0.0501)
    for words in (
        "Means add up over the causes; extremes and clip shares do not",
        "either side",
        "not in the verdict",
        "kept mass",
        "ids are passed on",
        "temperature 0.6, top-k 4, top-p 0.7 (truncation replay)",
        done.budget.describe().split(":")[0],
    ):
        assert words in plain
    assert max(map(len, text.splitlines())) <= 120
    assert plain.endswith(f"verdict: {done.verdict}")


def test_json_holds_everything_and_is_json() -> None:
    done = run(updates=2, dropout=0.1)
    found = json.loads(report(done, as_json=True))
    assert found["exit_code"] == 1 and found["found"] == ["dropout"] and found["verdict"] == done.verdict
    assert [cause["name"] for cause in found["causes"]] == list(CAUSES)
    assert found["causes"][4]["clip"] == done.causes[4].clip and len(found["movement"]) == 2
    assert found["budget"]["measured"]["count"] > 0 and found["tokens"] == done.subject.tokens
    broken = replace(done, total=replace(done.total, mean=float("nan")))
    assert json.loads(report(broken, as_json=True))["total"]["mean"] is None


def test_a_sequence_level_ratio_is_reported_over_completions() -> None:
    done = run(ratio_level="sequence", old_logprobs="trainer", dropout=0.1)
    assert done.subject.unit == "completions" and "share of the completions" in audit_text(done)
    tokens = run(old_logprobs="trainer", dropout=0.1)
    assert row(done.causes, "dropout").max_abs < row(tokens.causes, "dropout").max_abs


def test_the_verdict_is_one_sentence_per_case() -> None:
    effect = Effect("all together", -0.1, 0.1, 0.5, 0.6, 1.0, 0.123, 0.0)
    assert "dropout sets trainer and sampler apart, 12.3 % by more" in verdict(("dropout",), effect)
    assert "numerics and dropout set trainer and sampler apart" in verdict(("numerics", "dropout"), effect)
    assert "(diagnosed: shifted, bos)" in verdict(("numerics",), effect, named=("shifted", "bos"))
    assert verdict((), effect, "staleness was asked for").count("asked for") == 1
