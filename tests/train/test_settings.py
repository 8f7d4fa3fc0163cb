"""The layers of settings: types, TOML, merging, and messages that name field, value and fix."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rhotrain.train.config import Config, ConfigError, OptimConfig, RewardConfig, RolloutConfig, RunConfig, TaskConfig
from rhotrain.train.settings import (
    SECTIONS,
    Source,
    build,
    check,
    from_words,
    layer_of,
    merge,
    read_toml,
    resolve,
    settings,
    to_toml,
    write_toml,
)


def _toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_field_names_are_unique_and_documented() -> None:
    names = [name for cls in SECTIONS.values() for name in cls.__dataclass_fields__]  # type: ignore[attr-defined]
    assert len(names) == len(set(names)) == len(settings())
    assert all(len(s.help) > 10 for s in settings().values())


def test_every_default_passes_its_own_check() -> None:
    for setting in settings().values():
        assert check(setting.name, setting.default) == setting.default


def _unusual() -> Config:
    return Config(
        task=TaskConfig(task="chain_sum", task_args={"min_terms": 2, "deep": {"a": [1, 2.5, "x"], "b": True}}),
        reward=RewardConfig(rewards=("bare_number", "length*0.5"), reward_args={"length": {"low": 3}}),
        rollout=RolloutConfig(stop_token_ids=(1, 2), stop_strings=("\n", 'quote " and \\'), temperature=0.7),
        optim=OptimConfig(lr=1.2345678901234567e-7, betas=(0.9, 0.95)),
        run=RunConfig(out="runs/some where", seed=2**61),
    )


@pytest.mark.parametrize("config", [Config(), _unusual()], ids=["default", "unusual"])
def test_resolved_toml_reads_back_to_the_same_configuration(config: Config, tmp_path: Path) -> None:
    write_toml(config, tmp_path / "config.toml")
    again = build(read_toml(tmp_path / "config.toml"))
    assert again == config
    assert layer_of(again) == layer_of(config)
    assert tomllib.loads(to_toml(config))["optim"]["lr"] == config.optim.lr


def test_a_number_field_takes_an_integer_but_never_a_bool_or_text() -> None:
    assert check("lr", 1) == 1.0 and isinstance(check("lr", 1), float)
    assert isinstance(check("steps", 3), int)
    for name, value in [("lr", True), ("lr", "hot"), ("steps", 3.0), ("steps", True), ("resume", 1), ("model", 3)]:
        with pytest.raises(ConfigError, match=f"^{name}: {value!r} does not work; need "):
            check(name, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"lr: .* need a finite number"):
        check("lr", value)
    with pytest.raises(ConfigError, match=r"task_args: .* finite"):
        check("task_args", {"a": [value]})


def test_lists_become_tuples_and_fixed_ones_have_their_length() -> None:
    assert check("betas", [0, 0.5]) == (0.0, 0.5)
    assert check("stop_token_ids", []) == ()
    with pytest.raises(ConfigError, match=r"betas: \[0.9\] does not work; need 2 values"):
        check("betas", [0.9])
    with pytest.raises(ConfigError, match="rewards: 'task' does not work; need a list"):
        check("rewards", "task")
    with pytest.raises(ConfigError, match="stop_token_ids: 'a' does not work; need an integer"):
        check("stop_token_ids", [1, "a"])


def test_choices_name_the_nearest_and_k1_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"objective: 'cipso'.*grpo, cispo, reinforce, sapo; did you mean cispo\?"):
        check("objective", "cipso")
    with pytest.raises(ConfigError, match=r"kl: 'k1'.*expected gradient is exactly 0.*kl_in_reward"):
        check("kl", "k1")


@pytest.mark.parametrize(
    "words, value",
    [
        (["a=1", "b=1.5", "c=true", "d=False"], {"a": 1, "b": 1.5, "c": True, "d": False}),
        (["a=text", "b=with=equals", 'c="3"'], {"a": "text", "b": "with=equals", "c": "3"}),
        (["a=[1, 2]", 'b={"c": 3}'], {"a": [1, 2], "b": {"c": 3}}),
        (["a.b.c=1", "a.b.d=2"], {"a": {"b": {"c": 1, "d": 2}}}),
        (["a="], {"a": ""}),
        ([], {}),
    ],
)
def test_key_value_words(words: list[str], value: dict) -> None:
    assert from_words("task_args", words) == value


@pytest.mark.parametrize("word", ["plain", "=3", "a..b=3", "a=[1", 'a={"b"'])
def test_bad_key_value_words(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^task_args: "):
        from_words("task_args", [word])


def test_a_key_cannot_be_value_and_table() -> None:
    with pytest.raises(ConfigError, match=r"task_args: 'a.b=2'.*'a' already has a value"):
        from_words("task_args", ["a=1", "a.b=2"])


def test_words_of_numbers_and_text() -> None:
    assert from_words("lr", ["1e-6"]) == 1e-6
    assert from_words("steps", ["1_000"]) == 1000
    assert from_words("betas", ["0.9", "1e-1"]) == (0.9, 0.1)
    assert from_words("system_prompt", ["42"]) == "42"
    assert from_words("stop_strings", ["1", "x"]) == ("1", "x")
    with pytest.raises(ConfigError, match=r"steps: 1000\.0 does not work; need an integer"):
        from_words("steps", ["1e3"])


def test_later_layers_win_and_tables_merge() -> None:
    merged = merge(
        [
            {"lr": 1.0, "task": "a", "task_args": {"x": 1, "inner": {"p": 1}}},
            {"lr": 2.0, "task_args": {"y": 2, "inner": {"q": 2}}},
            {"task_args": {"x": None}},
        ]
    )
    assert merged == {"lr": 2.0, "task": "a", "task_args": {"y": 2, "inner": {"p": 1, "q": 2}}}


def test_merging_changes_no_layer() -> None:
    below, above = {"task_args": {"inner": {"p": 1}}}, {"task_args": {"inner": {"p": 2}}}
    merged = merge([below, above])
    merged["task_args"]["inner"]["p"] = 3
    assert below == {"task_args": {"inner": {"p": 1}}} and above == {"task_args": {"inner": {"p": 2}}}


def test_parameters_go_with_their_task() -> None:
    chain = {"task": "chain_sum", "task_args": {"min_terms": 2}}
    assert merge([chain, {"task": "countdown"}]) == {"task": "countdown"}
    assert merge([chain, {"task": "countdown", "task_args": {"b": 1}}])["task_args"] == {"b": 1}
    assert merge([chain, {"task": "chain_sum", "task_args": {"b": 1}}])["task_args"] == {"min_terms": 2, "b": 1}
    assert merge([{"task_args": {"b": 1}}, {"task": "countdown"}])["task_args"] == {"b": 1}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[optim]\nlrr = 1.0", r"\[optim\] lrr: unknown key; did you mean `lr`\?"),
        ("[run]\ntemprature = 1.0", r"\[run\] temprature: unknown key; did you mean `temperature`\?"),
        ("[run]\nlr = 1.0", r"\[run\] lr: belongs to another section; put it under \[optim\]"),
        ("lr = 1.0", r"lr: stands in no section; put it under \[optim\]"),
        ("[optm]\nlr = 1.0", r"\[optm\]: unknown section; did you mean `optim`\?"),
        ('model = "smollm2"', r"model: 'smollm2' does not work; it is a section; write \[model\]"),
        ('[optim]\nlr = "hot"', r"lr: 'hot' does not work; need a finite number"),
        ("[run]\nsteps = true", "steps: True does not work; need an integer"),
        ("[task]\ntask_args = 3", "task_args: 3 does not work; need a table"),
        ("[task.task_args]\nday = 2020-01-01", "task_args: .* tables hold text"),
        ("[optim\nlr = 1", "is not valid TOML; .*line 1"),
    ],
)
def test_wrong_toml(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: " + message):
        read_toml(_toml(tmp_path, text))


def test_missing_toml_and_text_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read \(No such file"):
        read_toml(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml: is not valid TOML"):
        read_toml(tmp_path / "binary.toml")


def test_a_contradiction_tells_which_file_or_preset_set_the_value() -> None:
    file, flags = Source(layer={"lr": -1.0}, origin="run.toml"), Source(layer={"steps": 3})
    with pytest.raises(ConfigError, match=r"lr: -1.0 .*\(set by run.toml\)$"):
        resolve([file, flags])
    with pytest.raises(ConfigError, match=r"need a learning rate >= 0$"):
        resolve([file, Source(layer={"lr": -2.0})])


def test_layers_are_judged_together_not_one_by_one() -> None:
    file = Source(layer={"minibatches_per_rollout": 3}, origin="run.toml")
    with pytest.raises(ConfigError, match="minibatches_per_rollout"):
        resolve([file])
    assert resolve([file, Source(layer={"prompts_per_step": 9})]).algo.minibatches_per_rollout == 3


def test_layer_of_is_complete() -> None:
    config = replace(Config(), run=RunConfig(steps=7))
    assert build(layer_of(config)) == config
    assert layer_of(config)["steps"] == 7
