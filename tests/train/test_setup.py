"""What a run resolves once and keeps: threads to decode with, fused layers, and where they end up."""

import pytest
from helpers_train import one_thread

from rhotrain.model.loaded import LoadError
from rhotrain.train import setup
from rhotrain.train.config import Config, ConfigError, EvalConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig


def config(*, decode_threads: int = 0, fused_layers: str = "off", attention: str = "auto", threads: int = 1) -> Config:
    return Config(
        model=ModelConfig(fused_layers=fused_layers, attention=attention),  # type: ignore[arg-type]
        task=TaskConfig(train_size=20),
        rollout=RolloutConfig(decode_threads=decode_threads, max_new_tokens=4),
        eval=EvalConfig(eval_size=0),
        run=RunConfig(steps=1, threads=threads),
    )


@pytest.mark.parametrize(("asked", "threads", "expected"), [(0, 1, 1), (0, 2, 2), (1, 2, 1), (-1, 2, 5)])
def test_decode_threads_follow_the_settings(
    asked: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "decode_threads", lambda cores: 3 + cores)  # stands for a measurement
    with one_thread():
        parts = setup.build(config(decode_threads=asked, threads=threads))
        assert parts.engine.threads == parts.choices["decode_threads"] == expected
        resumed = setup.build(
            config(decode_threads=asked, threads=threads), choices={**parts.choices, "decode_threads": 7}
        )
        assert resumed.engine.threads == 7, "what was measured is kept"


def test_fused_layers_are_resolved_once() -> None:
    with one_thread():
        assert setup.build(config()).choices["fused_layers"] == "off"
        parts = setup.build(config(fused_layers="torch"))
        chosen = parts.choices["fused_layers"]
        assert chosen == parts.loaded.fused_layers != "torch" and "norm=torch" in chosen
        resumed = setup.build(config(fused_layers="auto"), choices=dict(parts.choices))
        assert resumed.loaded.fused_layers == chosen, "a resumed run measures nothing"
        assert any("norm" in note for note in parts.loaded.notes)


def test_an_attention_backend_that_cannot_run_is_refused() -> None:
    with one_thread(), pytest.raises((ConfigError, LoadError, ValueError), match="flash_attn"):
        setup.build(config(attention="flash_attn"))
    with one_thread():
        assert setup.build(config(attention="sdpa")).loaded.attention.backend == "sdpa"


def test_decode_threads_below_minus_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode_threads"):
        RolloutConfig(decode_threads=-2)
