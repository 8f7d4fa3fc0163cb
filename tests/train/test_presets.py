"""Presets: the objective they stand for, their table in the docs, and that they can be combined."""

import math
from pathlib import Path

import pytest

from rhotrain.train.config import Config, ConfigError
from rhotrain.train.presets import PRESETS, describe, objectives_table, preset, preset_source
from rhotrain.train.settings import build, check, layer_of, merge, resolve

DOCS = Path(__file__).parents[2] / "docs" / "objectives.md"
ALGORITHMS = [p.name for p in PRESETS.values() if p.kind == "algorithm"]
RUNS = [p.name for p in PRESETS.values() if p.kind == "run"]


def _config(*names: str) -> Config:
    return resolve([preset_source(name) for name in names])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_valid_settings(name: str) -> None:
    for field, value in preset(name).layer.items():
        assert check(field, value) == value
    for field, value in preset(name).layer.items():
        assert layer_of(_config(name))[field] == value


def test_algorithm_presets_set_the_same_fields_so_that_a_later_one_replaces_an_earlier_one() -> None:
    fields = {frozenset(preset(name).layer) for name in ALGORITHMS}
    assert len(fields) == 1
    for first in ALGORITHMS:
        for second in ALGORITHMS:
            assert _config(first, second) == _config(second)


def test_algorithm_presets_leave_sizes_and_rates_alone() -> None:
    for name in ALGORITHMS:
        assert all(field in layer_of(Config()) for field in preset(name).layer)
        config = _config(name)
        assert (config.optim, config.run, config.rollout, config.task) == (
            Config().optim,
            Config().run,
            Config().rollout,
            Config().task,
        )


# (objective, lowest ratio, highest ratio, kl, beta, aggregation, scale, std, zero_variance, mask_truncated,
# ratio_level, whether it samples dynamically), written down here from the papers and from train_grpo.py, not from
# presets.py.
EXPECTED = {
    "deepseek-grpo": ("grpo", 0.8, 1.2, "k3", 0.04, "sequence", "group", "sample", "skip", False, "token", False),
    "dapo": ("grpo", 0.8, 1.28, "none", 0.0, "token", "group", "sample", "filter", True, "token", True),
    "dr-grpo": ("grpo", 0.8, 1.2, "none", 0.0, "constant", "none", "sample", "skip", False, "token", False),
    "gspo": ("grpo", 1 - 3e-4, 1 + 4e-4, "none", 0.0, "sequence", "group", "sample", "skip", False, "sequence", False),
    "sapo": ("sapo", 0.0, 5.0, "none", 0.0, "sequence", "group", "sample", "skip", False, "token", False),
    "minimind-grpo": ("grpo", 0.8, 1.2, "k3", 0.1, "sequence", "group", "population", "skip", False, "token", False),
    "minimind-cispo": ("cispo", 0.0, 5.0, "k3", 0.1, "sequence", "group", "population", "skip", False, "token", False),
    "minimax-cispo": ("cispo", 0.0, 5.0, "none", 0.0, "token", "group", "sample", "filter", False, "token", True),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_presets_mean_what_their_sources_say(name: str) -> None:
    algo = _config(name).algo
    spec = algo.spec()
    kind, low, high, *rest = EXPECTED[name]
    assert spec.kind == kind
    assert math.isclose(spec.ratio_min, low) and math.isclose(spec.ratio_max, high)  # type: ignore[arg-type]
    assert rest == [
        spec.kl,
        spec.beta,
        algo.aggregation,
        algo.advantage_scale,
        algo.advantage_std,
        algo.zero_variance,
        algo.mask_truncated,
        spec.ratio_level,
        algo.dynamic_sampling > 0,
    ]


def test_every_value_of_an_algorithm_preset_has_a_source() -> None:
    for name in ALGORITHMS:
        for field, (_, source) in preset(name).values.items():
            assert len(source) > 3, (name, field)
    assert preset("minimax-cispo").values["ratio_max"][1].startswith("our choice")


def test_docs_hold_the_table_of_the_presets() -> None:
    text = DOCS.read_text()
    assert objectives_table() in text
    assert all(preset(name).left_out in text for name in ALGORITHMS)


def test_a_run_preset_and_an_algorithm_preset_combine_in_either_order() -> None:
    for run in RUNS:
        for algorithm in ALGORITHMS:
            both = _config(run, algorithm)
            assert both == _config(algorithm, run)
            assert both.algo == _config(algorithm).algo and both.rollout == _config(run).rollout


@pytest.mark.parametrize("name", RUNS)
def test_run_presets_are_small_experiments_with_enough_held_out_questions(name: str) -> None:
    config = _config(name)
    assert config.eval.eval_size >= 200
    assert config.rollout.group_size >= 2


def test_presets_share_nothing_mutable_with_configurations() -> None:
    config = build(merge([preset("smollm2-sums").layer]))
    config.task.task_args["min_terms"] = 99
    assert preset("smollm2-sums").layer["task_args"]["min_terms"] != 99


def test_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset: 'dappo' is not a preset; did you mean `dapo`\?"):
        preset("dappo")
    with pytest.raises(ConfigError, match="'zzz' is not a preset; there is: tiny-sums, smollm2-sums"):
        preset("zzz")


def test_describe_lists_all_and_shows_one_with_sources() -> None:
    assert all(name in describe() for name in PRESETS)
    assert "clip_high = 0.28  # section 4.1" in describe("dapo")
