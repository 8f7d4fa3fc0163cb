"""The gradient of a step is the policy gradient: exactly in expectation, and within 4 standard errors over samples.

`helpers_bandit` has the problem, small enough that the policy gradient is a finite sum. With a fixed baseline, no
scaling, constant aggregation and open sequence weights nothing is biased: on-policy, on stale samples, and under
truncated sampling with replay. Whatever is left out of that list has its bias in docs/biases.md, made by
scripts/measure_bias.py; its numbers are compared with samples here.

What replay estimates: pi is renormalised over the set that was kept before each token, and the sets stay as they are
while theta moves. Away from the thetas at which a set changes that is also the gradient of what the sampler earns with
its sets following theta, since they are constant nearby (`test_replay_follows_the_truncated_sampler`). At such a theta
what it earns jumps, and no gradient tells of a jump.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers_bandit import (
    LONGEST,
    TEMPERATURE,
    Bandit,
    Behaviour,
    Cut,
    ascend,
    draw,
    exact_gradient,
    expected_advantages,
    expected_gradient,
    fixed_baseline,
    make_bandit,
    sampled_gradients,
    top_k_cut,
    top_p_cut,
)
from helpers_train import one_thread
from torch import Tensor

from rhotrain.train.advantages import group_advantages
from rhotrain.train.config import AlgoConfig

ROOT = Path(__file__).resolve().parents[2]

UNBIASED = AlgoConfig(objective="grpo", old_logprobs="fresh", advantage_scale="none", aggregation="constant")
WEIGHTED = replace(UNBIASED, correction="sequence_truncate", correction_max=0.0)
STALE_STEPS = 3
"""Ascent steps between sampling and update: sequence weights up to 2.5, effective sample sizes of 0.94 and 0.88."""
CUTS: dict[str, tuple[Cut, dict[str, Any]]] = {
    "top-k": (top_k_cut(2), {"top_k": 2}),
    "top-p": (top_p_cut(0.6), {"top_p": 0.6}),
}
ROLLOUTS, GROUP = 40, 72
"""Of two groups each: 5760 completions per estimate."""


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def bandit() -> Bandit:
    return make_bandit()


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def unbiased(gradients_MD: Tensor, exact_D: Tensor, visible: float = 0.1) -> bool:
    """Whether the mean is within 4 standard errors of `exact`, along its own and 20 random directions.

    Fails when the samples are too few to see a bias of a tenth (`visible`) along the exact gradient.
    """
    random = torch.randn(20, len(exact_D), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions_KD = torch.nn.functional.normalize(torch.cat([exact_D[None], random]), dim=1)
    parts_MK = gradients_MD @ directions_KD.T
    error_K = parts_MK.std(0) / len(parts_MK) ** 0.5
    assert 4 * error_K[0] < visible * exact_D.norm(), "too few samples"
    return bool(((parts_MK.mean(0) - directions_KD @ exact_D).abs() < 4 * error_K).all())


# ---- in expectation, exactly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["grpo", "cispo", "reinforce"])
@pytest.mark.parametrize("anchor", ["fresh", "sampler", "trainer"])
def test_the_expected_gradient_on_policy(bandit: Bandit, objective: Any, anchor: Any) -> None:
    algo = replace(UNBIASED, objective=objective, old_logprobs=anchor)
    advantages_PC = fixed_baseline(bandit.rewards_PC)
    expected = expected_gradient(bandit, algo, Behaviour.of(bandit), advantages_PC)
    assert relative(expected, exact_gradient(bandit)) < 1e-12


@pytest.mark.parametrize("name", ["full", *CUTS])
def test_the_expected_gradient_of_stale_and_truncated_samples(bandit: Bandit, name: str) -> None:
    """Both at once: with replay the weights are ratios of renormalised policies over the sampler's sets."""
    behaviour = Behaviour.of(bandit, None if name == "full" else CUTS[name][0])
    ascend(bandit, STALE_STEPS)
    exact, advantages_PC = exact_gradient(bandit, behaviour.sets), fixed_baseline(bandit.rewards_PC)
    weighted = expected_gradient(bandit, WEIGHTED, behaviour, advantages_PC, replay=name != "full")
    assert relative(weighted, exact) < 1e-12
    plain = expected_gradient(bandit, UNBIASED, behaviour, advantages_PC, replay=name != "full")
    assert relative(plain, exact) > 0.1


@pytest.mark.parametrize("name", CUTS)
def test_replay_follows_the_truncated_sampler(bandit: Bandit, name: str) -> None:
    """The gradient with fixed sets == finite differences of what is earned while the sets follow the weights."""
    cut = CUTS[name][0]
    behaviour, exact, weights = Behaviour.of(bandit, cut), exact_gradient(bandit), bandit.weights
    fixed = exact_gradient(bandit, behaviour.sets)
    generator, step = torch.Generator().manual_seed(1), 1e-6
    directions = {n: torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()}
    values = []
    for sign in (1.0, -1.0):
        bandit.set_weights({n: w + sign * step * directions[n] for n, w in weights.items()})
        there = Behaviour.of(bandit, cut)
        assert there.sets == behaviour.sets  # a step so small crosses no boundary
        values.append(float((there.probabilities_PC() * bandit.rewards_PC).sum(1).mean()))
    slope = (values[0] - values[1]) / (2 * step)
    direction_D = torch.cat([directions[n].flatten() for n in sorted(directions)])
    assert slope == pytest.approx(float(fixed @ direction_D), rel=1e-6)
    assert abs(slope - float(exact @ direction_D)) > 0.05 * abs(slope)  # the full softmax's gradient is another


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_group_mean_with_the_sample_in_it_shrinks_the_gradient(bandit: Bandit, group_size: int) -> None:
    """E[gradient] = (G - 1) / G times the policy gradient: the group's mean holds 1/G of the sample's own reward."""
    behaviour = Behaviour.of(bandit)
    advantages_PC = expected_advantages(bandit, behaviour, group_size, scale="none")
    expected = expected_gradient(bandit, UNBIASED, behaviour, advantages_PC)
    assert relative(expected, (group_size - 1) / group_size * exact_gradient(bandit)) < 1e-12


# ---- over samples of the engine -------------------------------------------------------------------------------------


def test_on_policy_samples(bandit: Bandit) -> None:
    exact, samples = exact_gradient(bandit), draw(bandit, rollouts=ROLLOUTS, group_size=GROUP)
    assert unbiased(sampled_gradients(bandit, UNBIASED, samples), exact)
    tempered = sampled_gradients(bandit, UNBIASED, samples, temperature=1.0)
    assert not unbiased(tempered, exact), f"scored at T=1, sampled at T={TEMPERATURE}: nobody noticed"


def test_stale_samples(bandit: Bandit) -> None:
    samples = draw(bandit, rollouts=ROLLOUTS, group_size=GROUP)
    ascend(bandit, STALE_STEPS)
    exact = exact_gradient(bandit)
    assert unbiased(sampled_gradients(bandit, WEIGHTED, samples), exact)
    assert not unbiased(sampled_gradients(bandit, UNBIASED, samples), exact), "without the weights nobody noticed"


@pytest.mark.parametrize("name", CUTS)
def test_truncated_samples(bandit: Bandit, name: str) -> None:
    cut, settings = CUTS[name]
    samples = draw(bandit, rollouts=ROLLOUTS, group_size=GROUP // 3, keep_sets=True, **settings)
    exact = exact_gradient(bandit, Behaviour.of(bandit, cut).sets)
    assert unbiased(sampled_gradients(bandit, UNBIASED, samples, replay=True), exact)
    ignored = sampled_gradients(bandit, UNBIASED, samples, replay=False)
    assert not unbiased(ignored, exact), "scored by the full softmax, and nobody noticed"


@pytest.mark.parametrize("group_size", [2, 4])
def test_group_means_over_samples(bandit: Bandit, group_size: int) -> None:
    """Through `group_advantages`, as the trainer forms them."""
    samples = draw(bandit, rollouts=ROLLOUTS, groups=2 * GROUP // group_size, group_size=group_size)
    gradients_MD = sampled_gradients(
        bandit, UNBIASED, samples, advantage=lambda rewards: group_advantages(rewards, scale="none").values_PG
    )
    exact = exact_gradient(bandit)
    assert unbiased(gradients_MD, (group_size - 1) / group_size * exact)
    assert not unbiased(gradients_MD, exact)


# ---- the biases of docs/biases.md -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    """scripts/measure_bias.py."""
    spec = importlib.util.spec_from_file_location("measure_bias", ROOT / "scripts" / "measure_bias.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_documented_biases_are_the_measured_ones(measured: ModuleType) -> None:
    page = (ROOT / "docs" / "biases.md").read_text()
    for table in measured.tables().split("\n\n"):
        assert table in page, f"docs/biases.md differs from what scripts/measure_bias.py prints:\n{table}"


def named(biases: Iterable[Any], name: str) -> Tensor:
    """The measured expectation of one estimate."""
    (found,) = [bias.expected_D for bias in biases if bias.name == name]
    return found


@pytest.mark.slow
def test_samples_confirm_the_bias_of_std_scaling(bandit: Bandit, measured: ModuleType) -> None:
    samples = draw(bandit, rollouts=ROLLOUTS, groups=9, group_size=4)
    gradients_MD = sampled_gradients(bandit, UNBIASED, samples, advantage=lambda r: group_advantages(r).values_PG)
    assert unbiased(gradients_MD, named(measured.on_policy(bandit), "group mean and group std, G = 4"), 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_samples_confirm_the_bias_of_a_denominator(bandit: Bandit, measured: ModuleType, aggregation: Any) -> None:
    samples = draw(bandit, rollouts=160, group_size=4)
    gradients_MD = sampled_gradients(bandit, replace(UNBIASED, aggregation=aggregation), samples)
    name = "aggregation sequence" if aggregation == "sequence" else "aggregation token, 2 x 4"
    per_token = measured.mean_length(bandit, Behaviour.of(bandit)) / LONGEST
    assert unbiased(per_token * gradients_MD, named(measured.on_policy(bandit), name), 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 6])
def test_samples_confirm_the_bias_of_a_correction(bandit: Bandit, measured: ModuleType, number: int) -> None:
    name, algo = measured.CORRECTIONS[number]
    assert name in ("sequence_truncate 2", "token_mask 0.5 .. 2")
    samples = draw(bandit, rollouts=ROLLOUTS, group_size=GROUP // 2)
    ascend(bandit, 6)
    expected = named(measured.stale(6).biases, name)
    gradients_MD = sampled_gradients(bandit, algo, samples)
    assert unbiased(gradients_MD, expected, 0.25)
    assert not unbiased(gradients_MD, exact_gradient(bandit), 0.25) or number == 2  # 2: too small to be seen


@pytest.mark.slow
def test_samples_confirm_the_bias_of_ignored_truncation(bandit: Bandit, measured: ModuleType) -> None:
    samples = draw(bandit, rollouts=ROLLOUTS, group_size=GROUP // 2, keep_sets=True, top_p=0.6)
    gradients_MD = sampled_gradients(bandit, UNBIASED, samples)
    assert unbiased(gradients_MD, named(measured.truncated(bandit), "top-p 0.6, ignore"), 0.2)
