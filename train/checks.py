"""Contradictions that are found before a model is loaded.

The configuration finds its own when it is made (config.py); here stand those that need the flags, the task or the
model's config.json. Imports no torch for local folders.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rhotrain.train.config import Config, wrong
from rhotrain.train.settings import Layer
from rhotrain.train.tasks import check_task

PRESET_POSITIONS = {"smollm2": 8192, "tiny-sums": 64}
"""Positions of the model presets, whose configuration is only there once they have been fetched or made."""

# Flags that act in some configurations only: field -> (when it acts, what to do).
ACTS_WHEN: dict[str, tuple[Callable[[Config], bool], str]] = {
    "clip_low": (
        lambda c: c.algo.objective == "grpo",
        "it acts with objective grpo only; cispo is bounded by ratio_min and ratio_max, the ratio's own values",
    ),
    "clip_high": (
        lambda c: c.algo.objective == "grpo",
        "it acts with objective grpo only; cispo is bounded by ratio_min and ratio_max, the ratio's own values",
    ),
    "ratio_min": (lambda c: c.algo.objective == "cispo", "it acts with objective cispo only; grpo takes clip_low"),
    "ratio_max": (lambda c: c.algo.objective == "cispo", "it acts with objective cispo only; grpo takes clip_high"),
    "dual_clip": (lambda c: c.algo.objective == "grpo", "it acts with objective grpo only"),
    "sapo_tau_pos": (lambda c: c.algo.objective == "sapo", "it acts with objective sapo only"),
    "sapo_tau_neg": (lambda c: c.algo.objective == "sapo", "it acts with objective sapo only"),
    "overlong_penalty": (
        lambda c: c.reward.overlong_buffer > 0,
        "overlong_buffer is 0, so no completion is overlong; set it",
    ),
    "reward_aggregation": (
        lambda c: len(c.reward.rewards) + (c.reward.overlong_buffer > 0) > 1,
        "there is one reward, which is normalised either way; name a second one in rewards",
    ),
    "kl": (lambda c: c.algo.beta > 0, "without beta there is no KL in the loss; set beta above 0"),
    "lora_alpha": (lambda c: c.model.lora_rank > 0, "no new adapter is made; set lora_rank above 0"),
    "lora_targets": (lambda c: c.model.lora_rank > 0, "no new adapter is made; set lora_rank above 0"),
    "offload_reference": (
        lambda c: (c.algo.beta > 0 or c.algo.kl_in_reward > 0) and (c.model.lora_rank == 0 or bool(c.model.ref_model)),
        "there is no reference model apart from the policy: no KL is asked for, or it is the base under an adapter",
    ),
    "ref_model": (
        lambda c: c.algo.beta > 0 or c.algo.kl_in_reward > 0,
        "no KL is asked for, so no reference is loaded; set beta or kl_in_reward above 0",
    ),
    "advantage_std": (lambda c: c.algo.advantage_scale != "none", "advantage_scale is none, so no std is taken"),
    "advantage_eps": (lambda c: c.algo.advantage_scale != "none", "advantage_scale is none, so no std is taken"),
    "ratio_level": (
        lambda c: c.algo.objective in ("grpo", "cispo"),
        "it acts with objectives grpo and cispo only",
    ),
    "correction_min": (lambda c: c.algo.correction != "none", "correction is none; set it, for example sequence_mask"),
    "correction_max": (lambda c: c.algo.correction != "none", "correction is none; set it, for example sequence_mask"),
    "kl_stop": (
        lambda c: c.algo.updates_per_rollout > 1,
        "a rollout has one update, so none is left to skip; raise num_iterations or minibatches_per_rollout",
    ),
    "lr_final": (lambda c: c.optim.schedule != "constant", "the schedule is constant; choose linear or cosine"),
    "truncation": (
        lambda c: c.rollout.sampling(seed=0).truncates,
        "nothing is truncated; set top_k, top_p, min_p or min_new_tokens",
    ),
}


def check_flags_act(config: Config, given: Layer) -> None:
    """Refuse a typed flag that would change nothing: whoever types it expects it to."""
    for name, value in given.items():
        if name in ACTS_WHEN and not ACTS_WHEN[name][0](config):
            raise wrong(name, value, ACTS_WHEN[name][1])


def _positions_in(config: dict[str, Any]) -> int | None:
    text = config.get("text_config") or config
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((int(text[name]) for name in names if isinstance(text.get(name), int)), None)


def model_positions(spec: str) -> int | None:
    """Longest sequence that the model's configuration allows; None without a limit or where it is not known yet.

    A folder's config.json is read; of a .gguf file or a hub id, transformers reads the configuration alone.
    Raises LoadError for a model that does not exist.
    """
    if spec in PRESET_POSITIONS:
        return PRESET_POSITIONS[spec]
    stored = Path(spec) / "config.json"
    if stored.is_file():
        try:
            return _positions_in(json.loads(stored.read_text(encoding="utf-8")))
        except ValueError as error:
            raise wrong("model", spec, f"its config.json is not JSON ({error}); take a whole model folder") from None
    from rhotrain.model.loaded import quiet_transformers
    from rhotrain.model.sources import read_config, resolve_spec

    with quiet_transformers():
        source, options = resolve_spec(spec)
        return _positions_in(read_config(spec, source, options).get_text_config().to_dict())


def check_positions(spec: str, *, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ConfigError when a prompt of that length and its completion outgrow the model's positions."""
    limit = model_positions(spec)
    total = max_prompt_tokens + max_new_tokens
    if limit is not None and total > limit:
        raise wrong(
            "max_new_tokens",
            max_new_tokens,
            f"after a prompt of {max_prompt_tokens} tokens (max_prompt_tokens) a sequence takes {total} tokens, but "
            f"{spec} has {limit} positions; lower one of the two",
        )


def given_prompt_tokens(given: Layer) -> int:
    """The prompt length that positions are checked with before the prompts are there: max_prompt_tokens where somebody
    set it, else the shortest prompt; its default says nothing of this task. `setup.py` checks the real lengths."""
    return int(given.get("max_prompt_tokens", 1))


def check_quantized(config: Config) -> None:
    """ConfigError for 4-bit weights that nothing is trained over: they have no gradient."""
    model = config.model
    if model.quantize_base == "none" or model.lora_rank > 0:
        return
    from rhotrain.model.lora import is_adapter_folder

    if not is_adapter_folder(Path(model.model).expanduser()):
        fix = "4-bit weights are not trained; set lora_rank, name an adapter's folder as model, or leave it at none"
        raise wrong("quantize_base", model.quantize_base, fix)


def check_before_loading(config: Config, given: Layer) -> None:
    """Everything about a training run that can be judged without the model's weights. Raises ConfigError, LoadError.

    given: the settings that presets, files and flags set.
    Whether reward functions exist is found when RewardSet is made, before the model too.
    """
    check_task(config.task)
    check_quantized(config)
    check_positions(
        config.model.model,
        max_prompt_tokens=given_prompt_tokens(given),
        max_new_tokens=config.rollout.max_new_tokens,
    )
    from rhotrain.train.rewards import metric_config, parse_rewards

    parse_rewards(config.reward)
    parse_rewards(metric_config(config.reward, config.eval.eval_metric))
