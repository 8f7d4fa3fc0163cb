"""Advantages against closed forms written with `statistics`, which computes with exact fractions."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rhotrain.train.advantages import advantages_of, combined_advantages, group_advantages
from rhotrain.train.config import AlgoConfig

NAN = math.nan
REWARDS = [[1.0, 0.0, 0.25, 0.0], [3.0, -1.0, 2.5, 7.0], [0.5, 0.0, 0.0, 0.0]]


def closed_form(rewards: list[list[float]], scale: str, population: bool, eps: float) -> list[list[float]]:
    std = statistics.pstdev if population else statistics.stdev
    everything = std([r for group in rewards for r in group if not math.isnan(r)])
    result = []
    for group in rewards:
        known = [r for r in group if not math.isnan(r)]
        mean = statistics.mean(known)
        divisor = {"none": 1.0, "group": std(known) + eps, "batch": everything + eps}[scale]
        result.append([0.0 if math.isnan(r) else (r - mean) / divisor for r in group])
    return result


@pytest.mark.parametrize("kind", ["sample", "population"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [REWARDS, [[NAN, 1.0, 0.0, 0.25], [2.0, NAN, NAN, 5.0]]], ids=["all", "some"])
def test_closed_forms(rewards: list[list[float]], scale: str, kind: str) -> None:
    result = group_advantages(torch.tensor(rewards), scale=scale, std=kind, eps=1e-4)  # type: ignore[arg-type]
    expected = torch.tensor(closed_form(rewards, scale, kind == "population", 1e-4), dtype=torch.float64)
    torch.testing.assert_close(result.values_PG, expected, rtol=1e-12, atol=1e-12)
    assert result.values_PG.dtype == torch.float64
    assert result.signal_P.all()
    assert (result.values_PG[torch.tensor(rewards).isnan()] == 0).all()


def test_deepseek_numbers_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 0.5, sample std sqrt(1/3), population std 0.5."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    sample = group_advantages(rewards, eps=0.0).values_PG[0]
    population = group_advantages(rewards, std="population", eps=0.0)
    torch.testing.assert_close(sample, torch.tensor([1.0, -1, -1, 1], dtype=torch.float64) * math.sqrt(3) / 2)
    assert population.values_PG[0].tolist() == [1.0, -1.0, -1.0, 1.0]
    assert population.group_std_P.tolist() == [0.5]


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale: str, eps: float) -> None:
    """The mean of three 0.1 is not 0.1 in binary; with eps 0 the quotient would be 0/0."""
    rewards = torch.tensor([[0.1] * 3, [0.7] * 3, [1e9] * 3], dtype=torch.float64)
    result = group_advantages(rewards, scale=scale, eps=eps)  # type: ignore[arg-type]
    assert (result.values_PG == 0).all()
    assert not result.signal_P.any()
    assert (result.group_std_P == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_lone_scorable_reward_and_no_reward_at_all_carry_no_signal(scale: str) -> None:
    rewards = torch.tensor([[NAN, 5.0, NAN], [NAN, NAN, NAN], [0.0, 1.0, NAN]])
    result = group_advantages(rewards, scale=scale)  # type: ignore[arg-type]
    assert result.signal_P.tolist() == [False, False, True]
    assert (result.values_PG[:2] == 0).all()
    assert not result.values_PG.isnan().any()


def test_batch_scaling_divides_every_group_by_the_same_number() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 10.0], [4.0, 4.0]])
    values = group_advantages(rewards, scale="batch", eps=0.0).values_PG
    std = statistics.stdev([0, 1, 0, 10, 4, 4])
    torch.testing.assert_close(values, torch.tensor([[-0.5, 0.5], [-5.0, 5.0], [0.0, 0.0]], dtype=torch.float64) / std)


def test_infinite_rewards_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt 1, completion 2.*NaN"):
        group_advantages(torch.tensor([[0.0, 1, 2], [0, 1, math.inf]]))
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(torch.tensor([[-math.inf, 0.0]]))
    with pytest.raises(ValueError, match=r"\[P, G\]"):
        group_advantages(torch.zeros(4))


def test_a_graph_in_the_rewards_is_dropped() -> None:
    rewards = torch.tensor([[0.0, 1.0]], requires_grad=True)
    assert not group_advantages(rewards).values_PG.requires_grad


reward = st.one_of(st.just(NAN), st.integers(-4, 4).map(float), st.floats(-100, 100))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(reward, min_size=4, max_size=4), min_size=1, max_size=4), st.permutations(range(4)))
def test_properties(rewards: list[list[float]], order: list[int]) -> None:
    """Advantages sum to 0 per group, follow a permutation of the group, and are never NaN."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float64)
    values = group_advantages(rewards_PG).values_PG
    assert not values.isnan().any()
    assert values.sum(1).abs().max() < 1e-6
    torch.testing.assert_close(group_advantages(rewards_PG[:, order]).values_PG, values[:, order])
    for row, group in zip(values, rewards):
        known = {r for r in group if not math.isnan(r)}
        assert bool((row != 0).any()) == (len(known) > 1)


# ---- several rewards, each normalised by itself ---------------------------------------------------------------------


def test_each_reward_is_normalised_before_the_sum() -> None:
    """By hand, population std, eps 0. Group 0: wide (0, 10) -> (-1, 1), narrow (0.1, 0) -> (1, -1) with weight 0.5:
    S = (-0.5, 0.5). Group 1: wide (3, 3) -> 0, narrow (0, 0.2) -> (-1, 1): S = (-0.5, 0.5). The std of S is 0.5."""
    parts = {
        "wide": torch.tensor([[0.0, 10.0], [3.0, 3.0]]),
        "narrow": torch.tensor([[0.1, 0.0], [0.0, 0.2]]),
        "only logged": torch.tensor([[5.0, 6.0], [math.nan, 8.0]]),
    }
    weights = {"wide": 1.0, "narrow": 0.5, "only logged": 0.0}
    found = combined_advantages(parts, weights, std="population", eps=0.0)
    assert found.values_PG.flatten().tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert found.signal_P.tolist() == [True, True]
    spread = (10 - 0.5 * 0.1) / 2
    assert found.group_std_P.tolist() == pytest.approx([spread, 0.05])


def test_an_unscorable_part_leaves_the_completion_out_of_all() -> None:
    """Without member 2 of either reward: a (0, 1), b (4, 2), sample std sqrt(1/2) and sqrt(2): S = 0 + 0 in each."""
    parts = {
        "a": torch.tensor([[0.0, 1.0, 50.0], [1.0, 1.0, 1.0]]),
        "b": torch.tensor([[4.0, 2.0, math.nan], [2.0, 2.0, 2.0]]),
    }
    opposed = combined_advantages(parts, {"a": 1.0, "b": 1.0}, eps=0.0)
    assert opposed.values_PG.abs().max() == 0.0
    found = combined_advantages(parts, {"a": 1.0, "b": 3.0}, eps=0.0)
    half = math.sqrt(0.5)  # a -> (-half, half), b -> (half, -half); S = (2 half, -2 half)
    # over the batch S has the five scorable values (2 half, -2 half, 0, 0, 0), of sample std sqrt(4 / 4) = 1
    assert found.values_PG[0].tolist() == pytest.approx([2 * half, -2 * half, 0.0])
    assert found.values_PG[1].tolist() == [0.0, 0.0, 0.0] and found.signal_P.tolist() == [True, False]


def test_some_reward_must_count() -> None:
    with pytest.raises(ValueError, match="at least one reward must count"):
        combined_advantages({"a": torch.ones(1, 2)}, {"a": 0.0})


def test_what_the_settings_ask_for() -> None:
    """The total's advantages, penalty and all, or the parts' under their weights, where the total is known."""
    parts = {"a": torch.tensor(REWARDS, dtype=torch.float64), "b": torch.tensor(REWARDS, dtype=torch.float64).flip(1)}
    weights = {"a": 1.0, "b": 0.25}
    total = parts["a"] + 0.25 * parts["b"]
    total[0, 1] = NAN
    plain = advantages_of(AlgoConfig(advantage_scale="batch", advantage_eps=0.5), total, parts, weights)
    assert torch.equal(plain.values_PG, group_advantages(total, scale="batch", eps=0.5).values_PG)
    each = advantages_of(AlgoConfig(reward_aggregation="normalize_then_sum"), total, parts, weights)
    known = {name: part.where(~total.isnan(), NAN) for name, part in parts.items()}
    assert torch.equal(each.values_PG, combined_advantages(known, weights, eps=AlgoConfig().advantage_eps).values_PG)
    assert each.values_PG[0, 1] == 0.0 and not torch.equal(each.values_PG, plain.values_PG)
