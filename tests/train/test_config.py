"""What the configuration refuses by itself, and the objective that it hands to the kernels."""

from typing import Any

import pytest

from rhotrain.kernels.spec import Objective
from rhotrain.train.config import AlgoConfig, Config, ConfigError, RolloutConfig
from rhotrain.train.settings import build, layer_of

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model: '' .*name a folder"),
    ({"device": "gpu"}, "device: 'gpu' .*auto, cpu, cuda or cuda:N"),
    ({"task": ""}, "task: ''"),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens: 0 .*at least 1"),
    ({"rewards": ()}, r"rewards: \(\) .*at least one"),
    ({"reward_timeout": 0.0}, "reward_timeout: 0.0 .*seconds > 0"),
    ({"temperature": 0.0}, "temperature: 0.0 .*temperature > 0"),
    ({"top_p": 1.5}, r"top_p: 1.5 is out of range; need 0 < top_p <= 1"),
    ({"top_k": -1}, "top_k: -1"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, r"min_new_tokens: 9 .*max_new_tokens \(8\)"),
    ({"kv_memory_gib": -1.0}, "kv_memory_gib: -1.0"),
    ({"group_size": 1}, "group_size: 1 .*at least 2"),
    ({"clip_low": 1.5}, "clip_low: 1.5 .*0 <= clip_low <= 1"),
    ({"clip_high": -0.1}, "clip_high: -0.1"),
    ({"objective": "cispo", "ratio_min": -1.0}, "ratio_min: -1.0 .*never negative"),
    ({"objective": "cispo", "ratio_min": 2.0, "ratio_max": 1.0}, r"ratio_max: 1.0 .*ratio_min \(2.0\)"),
    ({"beta": -0.1}, "beta: -0.1 is negative"),
    ({"beta": 0.1, "kl": "none"}, "beta: 0.1 has no effect with kl='none'; choose k2, k3"),
    ({"beta": float("inf")}, "beta: need a finite value, got inf"),
    ({"objective": "cispo", "ratio_min": float("inf"), "ratio_max": float("inf")}, "ratio_min, ratio_max: .*got inf"),
    ({"entropy_coef": float("nan")}, "entropy_coef: need a finite value, got nan"),
    ({"kl_in_reward": -1.0}, "kl_in_reward: -1.0"),
    ({"advantage_eps": -1.0}, "advantage_eps: -1.0"),
    ({"num_iterations": 0}, "num_iterations: 0"),
    ({"old_logprobs": "fresh", "num_iterations": 2}, "old_logprobs: 'fresh' .*one update per rollout"),
    ({"old_logprobs": "fresh", "minibatches_per_rollout": 2}, "old_logprobs: 'fresh' .*one update per rollout"),
    ({"minibatches_per_rollout": 3, "prompts_per_step": 8}, r"minibatches_per_rollout: 3 .*prompts_per_step \(8\)"),
    ({"lr": -1.0}, "lr: -1.0"),
    ({"betas": (0.9, 1.0)}, r"betas: \(0.9, 1.0\) .*0 <= beta < 1"),
    ({"lr_final": 2.0}, "lr_final: 2.0 .*between 0 and 1"),
    ({"warmup_steps": 11, "steps": 5, "num_iterations": 2}, "warmup_steps: 11 .*= 10"),
    ({"token_budget": 100, "max_prompt_tokens": 80, "max_new_tokens": 21}, "token_budget: 100 .*= 101"),
    ({"eval_samples": 4}, "eval_samples: 4 .*eval_temperature above 0"),
    ({"eval_every": 5, "eval_size": 0}, "eval_every: 5 .*nothing to evaluate"),
    ({"resume": True}, "resume: True .*name the run folder"),
    ({"keep_last": 0}, "keep_last: 0"),
    ({"seed": -1}, "seed: -1 .*0 <= seed"),
]


@pytest.mark.parametrize("layer, message", REFUSED, ids=[m.split(":")[0] + f"-{i}" for i, (_, m) in enumerate(REFUSED)])
def test_contradictions_name_field_value_and_fix(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        build(layer)


@pytest.mark.parametrize(
    "layer",
    [
        {"warmup_steps": 10, "steps": 5, "num_iterations": 2},
        {"token_budget": 101, "max_prompt_tokens": 80, "max_new_tokens": 21},
        {"minibatches_per_rollout": 4, "prompts_per_step": 8},
        {"old_logprobs": "fresh"},
        {"eval_samples": 4, "eval_temperature": 0.5},
        {"clip_low": 1.0, "clip_high": 0.0},
    ],
    ids=lambda layer: next(iter(layer)),
)
def test_the_same_settings_next_to_the_border_are_accepted(layer: dict[str, Any]) -> None:
    assert layer.items() <= layer_of(build(layer)).items()


def test_bounds_are_distances_for_grpo_and_values_for_cispo() -> None:
    assert AlgoConfig(clip_low=0.1, clip_high=0.3).spec() == Objective(kind="grpo", ratio_min=0.9, ratio_max=1.3)
    cispo = AlgoConfig(objective="cispo", clip_low=0.1, clip_high=0.3, ratio_min=0.5, ratio_max=4.0).spec()
    assert (cispo.ratio_min, cispo.ratio_max) == (0.5, 4.0)


def test_the_newer_objectives_and_estimators_reach_the_kernels() -> None:
    spec = AlgoConfig(objective="sapo", kl="k3_unbiased", beta=0.1).spec()
    assert (spec.kind, spec.kl, spec.beta, spec.sapo_tau_pos, spec.sapo_tau_neg) == (
        "sapo",
        "k3_unbiased",
        0.1,
        1.0,
        1.05,
    )
    assert AlgoConfig(objective="reinforce", kl="k3_unbiased", beta=0.1).spec().uses_ratio


def test_beta_zero_means_no_reference() -> None:
    assert not AlgoConfig(kl="k3", beta=0.0).spec().uses_reference
    assert AlgoConfig(kl="k2", beta=0.1).spec().uses_reference


def test_kept_sets_are_recorded_only_when_they_are_replayed() -> None:
    assert not RolloutConfig().sampling(seed=1).keep_sets
    assert RolloutConfig(top_k=5).sampling(seed=1).keep_sets
    assert not RolloutConfig(top_k=5, truncation="ignore").sampling(seed=1).keep_sets
    assert RolloutConfig(min_new_tokens=2).sampling(seed=3).seed == 3


def test_schedule_counts_every_update() -> None:
    config = build({"steps": 5, "num_iterations": 3, "minibatches_per_rollout": 2})
    assert config.total_updates == 30 and Config().algo.updates_per_rollout == 1
