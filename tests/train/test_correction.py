"""Off-policy weights against sums written out by hand, and the gradient that they multiply."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_naive import model_pair
from helpers_train import Recorder, fake_rollout, make_learner, one_thread, whole_error

from rhotrain.rollout.completion import Completion
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.config import AlgoConfig, Config, ConfigError, RolloutConfig
from rhotrain.train.correction import effective_sample_size, importance_weights, sequence_log_weights
from rhotrain.train.inner_loop import InnerLoop, Prepared, run_updates

LOG_WEIGHTS = ((0.2, -0.1, 1.5), (-0.4,), (0.0, 0.0), (3.0, -2.5, 0.3, 0.1))
"""logprob - sampling_logprob of four completions; the sampler gives every token -4."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def completion(count: int, sample: int, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "token_ids": (7,) * count,
        "logprobs": (-4.0,) * count,
        "kept_mass": (1.0,) * count,
        "finish_reason": "stop",
        "policy_version": 0,
        "sample": sample,
    }
    return Completion(**{**values, **changes})


def table() -> TokenTable:
    return make_table([((1, 2), [completion(len(row), i) for i, row in enumerate(LOG_WEIGHTS)])], dtype=torch.float64)


def frozen() -> torch.Tensor:
    return torch.tensor([x - 4.0 for row in LOG_WEIGHTS for x in row], dtype=torch.float64)


def weights(correction: str, low: float = 0.0, high: float = 2.0, only: tuple[int, ...] = (0, 1, 2, 3)) -> list[float]:
    algo = AlgoConfig(old_logprobs="trainer", correction=correction, correction_min=low, correction_max=high)  # type: ignore[arg-type]
    importance = importance_weights(table(), frozen(), only, algo)
    assert importance is not None
    return importance.weights.tolist()


def by_completion(values: list[float]) -> list[float]:
    return [v for row, v in zip(LOG_WEIGHTS, values) for _ in row]


W = [[math.exp(x) for x in row] for row in LOG_WEIGHTS]
PRODUCT = [math.prod(row) for row in W]
ROOT = [math.prod(row) ** (1 / len(row)) for row in W]


def test_every_rule_and_level() -> None:
    flat = [w for row in W for w in row]
    expected = {
        ("token_truncate", 0.5, 2.0): [min(max(w, 0.5), 2.0) for w in flat],
        ("token_truncate", 0.0, 0.0): flat,  # 0 leaves the upper side open
        ("token_mask", 0.5, 5.0): [w if 0.5 <= w <= 5.0 else 0.0 for w in flat],
        ("sequence_truncate", 0.0, 2.0): by_completion([min(p, 2.0) for p in PRODUCT]),
        ("sequence_truncate", 0.0, 0.0): by_completion(PRODUCT),
        ("sequence_mask", 0.7, 2.0): by_completion([p if 0.7 <= p <= 2.0 else 0.0 for p in PRODUCT]),
        ("geometric_mask", 0.9, 1.5): by_completion([1.0 if 0.9 <= r <= 1.5 else 0.0 for r in ROOT]),
    }
    for (rule, low, high), values in expected.items():
        assert weights(rule, low, high) == pytest.approx(values, rel=1e-12), (rule, low, high)
        if (low, high) != (0.0, 0.0):
            assert values != by_completion([1.0] * 4), "the bounds must act for this to show anything"


def test_the_raw_weights_are_the_untruncated_ones_and_the_cut_is_counted() -> None:
    algo = AlgoConfig(old_logprobs="trainer", correction="sequence_truncate", correction_max=2.0)
    importance = importance_weights(table(), frozen(), (0, 1, 2, 3), algo)
    assert importance is not None
    assert importance.raw.tolist() == pytest.approx(PRODUCT, rel=1e-12)
    assert importance.cut.tolist() == [p > 2.0 for p in PRODUCT] and any(importance.cut.tolist())


def test_completions_that_were_not_scored_keep_weight_one() -> None:
    values = weights("sequence_truncate", 0.0, 0.0, only=(1, 3))
    assert values == pytest.approx(by_completion([1.0, PRODUCT[1], 1.0, PRODUCT[3]]), rel=1e-12)


def test_the_weights_carry_no_graph_and_do_not_overflow() -> None:
    algo = AlgoConfig(old_logprobs="trainer", correction="sequence_truncate", correction_max=0.0)
    far = torch.full_like(frozen(), 900.0)
    importance = importance_weights(table(), far, (0, 1, 2, 3), algo)
    assert importance is not None and not importance.weights.requires_grad
    assert importance.weights.tolist() == pytest.approx([math.exp(20.0)] * 10)


def test_effective_sample_size_by_hand() -> None:
    logs = sequence_log_weights(frozen() + 4.0, table(), (0, 1, 2, 3))
    assert logs.tolist() == pytest.approx([sum(row) for row in LOG_WEIGHTS])
    expected = sum(PRODUCT) ** 2 / (4 * sum(p * p for p in PRODUCT))
    assert effective_sample_size(logs) == pytest.approx(expected, rel=1e-12)
    assert effective_sample_size(logs + 1000.0) == pytest.approx(expected, rel=1e-9)
    assert effective_sample_size(torch.zeros(5)) == 1.0
    one_holds_all = torch.tensor([0.0, -500.0, -500.0, -500.0])
    assert effective_sample_size(one_holds_all) == pytest.approx(0.25)


# ---- in the step ----------------------------------------------------------------------------------------------------


def step(algo: AlgoConfig, scale: list[float] | None = None) -> tuple[Any, InnerLoop]:
    """Gradients of one update on foreign samples; `scale` multiplies the advantages by hand, per completion."""
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=77, rewards=((1.0, 0.0, 0.5, 2.0),) * 6)
    recorder = Recorder(loaded)
    learner = make_learner(loaded, algo, optimizer=recorder, token_budget=64)
    made = rollout.table(algo, torch.float64)
    if scale is not None:
        for i, factor in enumerate(scale):
            made.advantages[made.rows(i)] *= factor
    done = run_updates(learner, made, rollout.num_groups, rollout_index=0)
    return recorder.taken[0], done


@pytest.mark.parametrize("anchor", ["fresh", "trainer"])
def test_the_policy_term_is_multiplied_and_nothing_else(anchor: Any) -> None:
    """Equal to scaling each completion's advantage by hand; the KL term is the same in both."""
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=77, rewards=((1.0, 0.0, 0.5, 2.0),) * 6)
    plain = AlgoConfig(old_logprobs=anchor, beta=0.1, entropy_coef=0.01, aggregation="constant")
    learner = make_learner(loaded, plain)
    made = rollout.table(plain, torch.float64)
    from rhotrain.train.step import score

    running = list(range(len(made.trajectories)))
    scored = score(loaded, made, learner.pack(made, running), temperature=1.0)
    logs = sequence_log_weights(scored - made.sampling_logprobs, made, running)
    by_hand = [min(math.exp(x), 1.5) for x in logs.tolist()]
    assert any(w == 1.5 for w in by_hand) and any(w < 1.5 for w in by_hand)
    expected, _ = step(plain, scale=by_hand)
    actual, done = step(replace(plain, correction="sequence_truncate", correction_max=1.5))
    assert whole_error(actual, expected) <= 1e-12
    assert whole_error(actual, step(plain)[0]) > 1e-2  # the weights do something here
    raw = logs.exp()
    assert done.mismatch["correction/weight_mean"] == pytest.approx(float(raw.mean()), rel=1e-9)
    assert done.mismatch["correction/weight_max"] == pytest.approx(float(raw.max()), rel=1e-9)
    assert done.mismatch["correction/share_cut"] == pytest.approx(float((raw > 1.5).double().mean()))
    assert done.mismatch["sampling/effective_sample_size"] == pytest.approx(effective_sample_size(logs), rel=1e-9)


def test_an_undetached_weight_is_refused() -> None:
    loaded, model = model_pair("llama", torch.float64)
    rollout = fake_rollout(model, vocab_size=77)
    algo = AlgoConfig(old_logprobs="fresh")
    made = rollout.table(algo, torch.float64)
    made.importance = torch.ones_like(made.advantages).requires_grad_()
    learner = make_learner(loaded, algo)
    learner.prepare = lambda table: Prepared(None, [0], {}, made.importance)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"importance: requires grad.*importance\.detach\(\)"):
        run_updates(learner, made, rollout.num_groups, rollout_index=0)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_double_counting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"correction: 'token_mask' .* would count twice"):
        AlgoConfig(old_logprobs="sampler", correction="token_mask")


def test_reinforce_has_no_ratio_that_could_hold_the_age_of_its_samples() -> None:
    """Sampler anchors change nothing for it: stale samples need a correction, which counts once."""
    stale = RolloutConfig(max_staleness=2)
    with pytest.raises(ConfigError, match=r"correction: 'none' .* reinforce has no ratio"):
        Config(algo=AlgoConfig(objective="reinforce"), rollout=stale)
    for anchor in ("sampler", "trainer", "auto"):
        algo = AlgoConfig(objective="reinforce", correction="sequence_truncate", old_logprobs=anchor)
        Config(algo=algo, rollout=stale)
    loaded, _ = model_pair("llama", torch.float32)
    assert make_learner(loaded, AlgoConfig(old_logprobs="sampler")).ratio_holds_movement
    assert not make_learner(loaded, AlgoConfig(old_logprobs="trainer")).ratio_holds_movement
    assert not make_learner(loaded, AlgoConfig(objective="reinforce", old_logprobs="sampler")).ratio_holds_movement


def test_kl_stop_and_dropout_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"kl_stop: 0.02 .* dropout alone moves the KL"):
        Config(algo=AlgoConfig(kl_stop=0.02, num_iterations=2), model=replace(Config().model, dropout=0.1))


def test_auto_anchors_make_room_for_a_correction() -> None:
    assert AlgoConfig(correction="token_mask").anchor(exact=True) == "fresh"
    assert AlgoConfig(correction="token_mask", num_iterations=2).anchor(exact=True) == "trainer"
    assert AlgoConfig().anchor(exact=True) == "sampler"
    assert AlgoConfig().anchor(exact=False) == "fresh"
    assert AlgoConfig(num_iterations=2).anchor(exact=False) == "trainer"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"correction_min": -0.1}, "correction_min: -0.1"),
        ({"correction_max": -1.0}, "correction_max: -1.0"),
        ({"correction_min": 3.0, "correction_max": 2.0}, r"correction_max: 2.0 .* more than correction_min \(3\)"),
        ({"correction_min": 1.2, "correction_max": 2.0}, "correction_min: 1.2 .* leave out w = 1"),
        ({"correction_max": 0.5}, "correction_max: 0.5 .* leave out w = 1"),
    ],
)
def test_bounds_that_cannot_work_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgoConfig(old_logprobs="trainer", correction="sequence_mask", **values)  # type: ignore[arg-type]


def test_a_sequence_ratio_over_a_half_precision_sampler_is_refused() -> None:
    algo = AlgoConfig(ratio_level="sequence", old_logprobs="sampler")
    assert algo.anchor(exact=True) == "sampler"
    with pytest.raises(ConfigError, match=r"old_logprobs: 'sampler' .* half-precision sampler"):
        algo.anchor(exact=False)
    with pytest.raises(ConfigError, match="half-precision sampler"):
        Config(algo=algo, model=replace(Config().model, dtype="bfloat16"))
    loaded, _ = model_pair("llama", torch.float32)
    make_learner(loaded, algo)
    loaded.model.bfloat16()
    with pytest.raises(ConfigError, match="half-precision sampler"):
        make_learner(loaded, algo)
    assert make_learner(loaded, replace(algo, old_logprobs="auto")).anchor == "fresh"


def test_fresh_anchors_on_stale_samples_need_a_correction() -> None:
    stale = RolloutConfig(max_staleness=2)
    with pytest.raises(ConfigError, match=r"old_logprobs: 'fresh' .* set a correction"):
        Config(algo=AlgoConfig(old_logprobs="fresh"), rollout=stale)
    Config(algo=AlgoConfig(old_logprobs="fresh", correction="sequence_mask"), rollout=stale)
    Config(algo=AlgoConfig(old_logprobs="sampler"), rollout=stale)
    # `auto` is fresh in half precision with one update per rollout
    auto = Config(rollout=stale)
    auto.check_anchor(exact=True)
    for refused in (
        lambda: auto.check_anchor(exact=False),
        lambda: replace(auto, model=replace(auto.model, dtype="bfloat16")),
    ):
        with pytest.raises(ConfigError, match=r"old_logprobs: 'fresh' .* set a correction"):
            refused()


def test_staleness_that_holds_no_rollout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_staleness: 3 .* 4 optimiser steps"):
        Config(algo=AlgoConfig(num_iterations=4), rollout=RolloutConfig(max_staleness=3))
    assert Config(algo=AlgoConfig(num_iterations=4), rollout=RolloutConfig(max_staleness=9)).rollouts_ahead == 2
