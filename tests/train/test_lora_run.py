"""Settings of LoRA."""

from typing import Any

import pytest

from rhotrain.train.config import ConfigError, ModelConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lora_rank": 8}, "lora_rank: 8"),
        ({"adapter": "folder"}, "adapter: 'folder'"),
        ({"lora_alpha": 4.0}, "lora_alpha: 4.0"),
        ({"lora_targets": ("q_proj",)}, "lora_targets: "),
        ({"lora_rank": 8, "quantize_base": "nf4"}, "lora_rank: 8"),
    ],
)
def test_an_adapter_is_refused_instead_of_training_all_weights(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="LoRA is not available yet") as caught:
        ModelConfig(**settings)
    assert str(caught.value).startswith(named)


def test_the_defaults_are_accepted() -> None:
    assert not ModelConfig().lora
