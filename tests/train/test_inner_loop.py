"""The updates of one rollout: which groups, which anchors, which steps are taken and which are not."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_naive import model_pair, naive_step, padded_forward
from helpers_train import (
    LENGTHS,
    NAN,
    REWARDS,
    FakeRollout,
    Recorder,
    fake_rollout,
    make_learner,
    one_thread,
    whole_error,
)

from rhotrain.model.load import LoadedModel
from rhotrain.train.budget import Budget
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.inner_loop import InnerLoop, Learner, minibatch_plan, run_updates
from rhotrain.train.optim import Optimizer, StepError

VOCAB_SIZE = 77
SIGNAL = ((1.0, 0.0, 0.5, 2.0),) * 6
SILENT = ((1.0, 1.0, 1.0, 1.0),) * 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def real_learner(loaded: LoadedModel, algo: AlgoConfig, **options: Any) -> Learner:
    """A learner that moves the weights."""
    config = {k: options[k] for k in ("lr", "schedule", "weight_decay") if k in options}
    optimizer = Optimizer(loaded.parameters(), OptimConfig(**config))
    return make_learner(loaded, algo, optimizer=optimizer, **options)


def run(learner: Learner, rollout: FakeRollout, rollout_index: int = 0, **options: Any) -> InnerLoop:
    table = rollout.table(learner.algo, learner.loaded.dtype)
    return run_updates(learner, table, rollout.num_groups, rollout_index=rollout_index, **options)


def rollout_of(model: Any, rewards: Any = REWARDS, **options: Any) -> FakeRollout:
    return fake_rollout(model, rewards=rewards, vocab_size=VOCAB_SIZE, **options)


def snapshot(learner: Learner) -> list[Any]:
    """Everything that an update changes."""
    state = learner.optimizer.adamw.state_dict()
    moments = [v.clone() for entry in state["state"].values() for v in entry.values()]
    weights = [p.detach().clone() for p in learner.optimizer.parameters]
    return [*weights, *moments, torch.tensor([learner.updates, learner.loaded.policy_version])]


def unchanged(learner: Learner, before: list[Any]) -> bool:
    after = snapshot(learner)
    no_gradient = all(p.grad is None for p in learner.optimizer.parameters)
    return no_gradient and len(after) == len(before) and all(torch.equal(a, b) for a, b in zip(after, before))


# ---- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_pass_is_a_partition_of_whole_groups(iterations: int, parts: int) -> None:
    algo = AlgoConfig(num_iterations=iterations, minibatches_per_rollout=parts)
    plan = minibatch_plan(8, algo, seed=3, rollout_index=5)
    assert len(plan) == iterations * parts == algo.updates_per_rollout
    assert all(len(groups) == 8 // parts for groups in plan)
    for k in range(iterations):
        one_pass = [p for groups in plan[k * parts : (k + 1) * parts] for p in groups]
        assert sorted(one_pass) == list(range(8))
        assert (one_pass == list(range(8))) == (k == 0)  # later passes are shuffled


def test_the_plan_depends_on_seed_rollout_and_pass_alone() -> None:
    algo = AlgoConfig(num_iterations=3, minibatches_per_rollout=4)

    def plan(seed: int, rollout_index: int) -> list[list[int]]:
        torch.rand(3)  # the global generator must not matter
        return minibatch_plan(64, algo, seed=seed, rollout_index=rollout_index)

    assert plan(1, 2) == plan(1, 2)
    assert plan(1, 2)[4:8] != plan(1, 2)[8:]
    assert plan(1, 2)[4:] != plan(1, 3)[4:] != plan(2, 2)[4:]
    assert plan(1, 2)[:4] == plan(7, 9)[:4]


def test_the_largest_seed_and_a_late_rollout_are_fine() -> None:
    """seed * 1e9 does not fit into the generator's 64 bits."""
    algo = AlgoConfig(num_iterations=2)
    plans = [minibatch_plan(64, algo, seed=s, rollout_index=10**6) for s in (2**62 - 1, 2**62 - 2)]
    assert plans[0] != plans[1]


# ---- gradients of several updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_variance", ["skip", "filter"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_minibatch_has_the_gradient_of_its_own_groups(aggregation: Any, zero_variance: Any) -> None:
    """The denominator is that of the optimiser step, not of the rollout."""
    loaded, model = model_pair("llama", torch.float64)
    rollout = rollout_of(model)
    algo = AlgoConfig(
        old_logprobs="sampler",
        aggregation=aggregation,
        zero_variance=zero_variance,
        num_iterations=2,
        minibatches_per_rollout=3,
    )
    recorder = Recorder(loaded)
    learner = make_learner(loaded, algo, optimizer=recorder, token_budget=64)
    run(learner, rollout)
    plan = minibatch_plan(6, algo, seed=0, rollout_index=0)
    loud = [groups for groups in plan if not set(groups) <= {1, 4}]
    assert len(recorder.taken) == len(loud) >= 5
    for groups, actual in zip(loud, recorder.taken):
        truth = naive_step(model, rollout, algo, groups=groups, vocab_size=VOCAB_SIZE, max_new_tokens=9)
        assert whole_error(actual, truth.gradients) <= 1e-12


def test_several_updates_walk_away_from_the_old_policy() -> None:
    """Ratio 1 and no clipping at update 0; then ratios spread and clip shares grow."""
    loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
    rollout = rollout_of(model, SIGNAL, spread=0.0)
    algo = AlgoConfig(old_logprobs="sampler", num_iterations=6, clip_low=0.1, clip_high=0.1)
    done = run(real_learner(loaded, algo, lr=2e-3), rollout)
    shares = [u["clip_ratio/region_mean"] for u in done.updates]
    spreads = [u["log_ratio/abs_max"] for u in done.updates]
    kls = [u["approx_kl/k3"] for u in done.updates]
    assert len(done.updates) == 6 and done.skipped == 0 and not done.stopped_by_kl
    assert shares[0] == 0.0 and spreads[0] < 1e-4 and kls[0] < 1e-8
    assert all(s > 0 for s in shares[1:]) and shares[-1] > shares[1]
    assert spreads[1] > 0.01 and spreads[-1] > spreads[1]
    assert kls[-1] > kls[1] > 1e-5
    assert loaded.policy_version == 6


def test_cispo_clamp_shares_start_at_zero_and_grow() -> None:
    loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
    rollout = rollout_of(model, SIGNAL, spread=0.0)
    algo = AlgoConfig(objective="cispo", ratio_min=0.9, ratio_max=1.1, old_logprobs="sampler", num_iterations=5)
    shares = [u["clip_ratio/region_mean"] for u in run(real_learner(loaded, algo, lr=2e-3), rollout).updates]
    assert shares[0] == 0.0 and all(s > 0 for s in shares[1:]) and shares[-1] > shares[1]


def test_the_callback_counts_updates_of_the_plan() -> None:
    loaded, model = model_pair("llama", torch.float32)
    rewards = (*SIGNAL[:2], *SILENT[:2], *SIGNAL[:2])
    learner = make_learner(loaded, AlgoConfig(minibatches_per_rollout=3))
    seen: list[tuple[int, int]] = []
    done = run(learner, rollout_of(model, rewards), on_update=lambda k, n: seen.append((k, n)))
    assert seen == [(1, 3), (3, 3)]
    assert done.skipped == 1 and len(done.updates) == 2 and learner.updates == 2


# ---- no signal ------------------------------------------------------------------------------------------------------


def moved_learner(loaded: LoadedModel, model: Any, algo: AlgoConfig) -> Learner:
    """A learner whose Adam has momentum: a step with a gradient of 0 would move its weights."""
    learner = real_learner(loaded, algo, lr=1e-2, weight_decay=0.1, schedule="linear")
    run(learner, rollout_of(model, SIGNAL))
    assert learner.updates == algo.updates_per_rollout
    return learner


@pytest.mark.parametrize("zero_variance", ["skip", "filter", "keep"])
@pytest.mark.parametrize(
    "rewards",
    [SILENT, ((NAN, NAN, NAN, 1.0),) * 6, ((NAN,) * 4,) * 6],
    ids=["equal", "lone", "unscorable"],
)
def test_a_rollout_without_signal_changes_nothing(rewards: Any, zero_variance: Any) -> None:
    loaded, model = model_pair("llama", torch.float32)
    learner = moved_learner(loaded, model, AlgoConfig(zero_variance=zero_variance, minibatches_per_rollout=2))
    before = snapshot(learner)
    done = run(learner, rollout_of(model, rewards), rollout_index=1)
    assert unchanged(learner, before)
    assert done.updates == [] and done.skipped == 2 and not done.stopped_by_kl


def test_a_minibatch_whose_advantages_are_all_masked_changes_nothing() -> None:
    """Rewards differ, but every completion with an advantage was truncated: the gradient would be exactly 0."""
    loaded, model = model_pair("llama", torch.float32)
    learner = moved_learner(loaded, model, AlgoConfig(mask_truncated=True))
    before = snapshot(learner)
    rewards = ((1.0, 3.0, 2.0, 2.0),) * 6  # advantages -, +, 0, 0
    truncated = {(p, g) for p in range(6) for g in (0, 1)}
    rollout = rollout_of(model, rewards, truncated=truncated, lengths=((3, 4, 5, 2),) * 6)
    assert run(learner, rollout, rollout_index=1).skipped == 1
    assert unchanged(learner, before)
    everything = rollout_of(model, SIGNAL, truncated={(p, g) for p in range(6) for g in range(4)})
    assert run(learner, everything, rollout_index=2).skipped == 1
    assert unchanged(learner, before)


def test_without_signal_a_kl_term_still_takes_the_step() -> None:
    loaded, model = model_pair("llama", torch.float32)
    learner = real_learner(loaded, AlgoConfig(beta=0.1), lr=1e-3)
    assert len(run(learner, rollout_of(model, SILENT)).updates) == 1
    assert learner.updates == 1
    filtered = real_learner(loaded, AlgoConfig(beta=0.1, zero_variance="filter"), lr=1e-3)
    assert run(filtered, rollout_of(model, SILENT)).skipped == 1  # the filter takes the groups out altogether


def test_a_rollout_of_errors_only_is_skipped() -> None:
    loaded, model = model_pair("llama", torch.float32)
    rollout = rollout_of(model, SIGNAL)
    failed = tuple(
        replace(
            r,
            completion=replace(r.completion, token_ids=(), logprobs=(), kept_mass=(), finish_reason="error", error="x"),
        )
        for r in rollout.rows
    )
    learner = make_learner(loaded, AlgoConfig())
    assert run(learner, replace(rollout, rows=failed)).skipped == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_minibatch_that_the_correction_cut_whole_takes_no_step(level: str) -> None:
    """Every weight is 0: a step with a gradient of 0 would still move the weights by Adam's momentum."""
    loaded, model = model_pair("llama", torch.float32)
    algo = AlgoConfig(old_logprobs="trainer", correction=f"{level}_mask", correction_min=1.0, correction_max=1.0 + 1e-6)  # type: ignore[arg-type]
    learner = moved_learner(loaded, model, AlgoConfig(old_logprobs="trainer"))
    learner.algo = algo
    before = snapshot(learner)
    done = run(learner, rollout_of(model, SIGNAL, spread=0.5))
    assert done.mismatch["correction/share_cut"] == 1.0
    assert done.skipped == 1 and not done.updates
    assert unchanged(learner, before)


def test_the_frozen_scores_are_compared_although_every_minibatch_is_skipped() -> None:
    loaded, model = model_pair("llama", torch.float32)
    learner = make_learner(loaded, AlgoConfig(old_logprobs="trainer", zero_variance="keep"))
    done = run(learner, rollout_of(model, SILENT, spread=0.0))
    assert done.skipped == 1 and done.mismatch["sampling/k3"] < 1e-8


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights() -> None:
    """A finite loss and an infinite gradient: float32 overflows in the backward pass."""
    loaded, model = model_pair("llama", torch.float32)
    learner = moved_learner(loaded, model, AlgoConfig())
    before = snapshot(learner)
    table = rollout_of(model, SIGNAL).table(learner.algo, torch.float32)
    table.advantages *= 1e38
    with pytest.raises(FloatingPointError, match="grad_norm"):
        run_updates(learner, table, 6, rollout_index=1)
    learner.optimizer.zero_grad()
    assert unchanged(learner, before)


# ---- early stop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_before", [1, 2, 3])
def test_early_stop_leaves_everything_and_skips_the_rest(stop_before: int) -> None:
    """kl_stop set between the KL that update `stop_before` sees and all before it."""
    options: dict[str, Any] = {"old_logprobs": "sampler", "num_iterations": 5}

    def start() -> tuple[LoadedModel, FakeRollout]:
        loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
        return loaded, rollout_of(model, SIGNAL, spread=0.0)

    loaded, rollout = start()
    free = real_learner(loaded, AlgoConfig(**options), lr=2e-3)
    states: list[list[Any]] = []
    kls = [u["approx_kl/k3"] for u in run(free, rollout, on_update=lambda k, n: states.append(snapshot(free))).updates]
    assert kls == sorted(kls) and kls[0] < 1e-8
    limit = (kls[stop_before - 1] + kls[stop_before]) / 2
    loaded, rollout = start()
    learner = real_learner(loaded, AlgoConfig(kl_stop=limit, **options), lr=2e-3)
    done = run(learner, rollout)
    assert done.stopped_by_kl
    assert len(done.updates) == learner.updates == loaded.policy_version == stop_before
    assert done.skipped == 5 - stop_before
    assert unchanged(learner, states[stop_before - 1])


def test_no_early_stop_at_zero_or_below_the_limit() -> None:
    for limit in (0.0, 1e6):
        loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
        rollout = rollout_of(model, SIGNAL, spread=0.0)
        learner = real_learner(loaded, AlgoConfig(old_logprobs="sampler", num_iterations=3, kl_stop=limit), lr=1e-2)
        done = run(learner, rollout)
        assert not done.stopped_by_kl and done.skipped == 0 and len(done.updates) == 3


# ---- anchors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True], ids=["full", "kept"])
def test_anchors_are_what_they_say(replay: bool) -> None:
    loaded, model = model_pair("qwen3", torch.float64)
    rollout = rollout_of(model, temperature=1.3, replay=replay)
    real = [r for r in rollout.rows if r.length]
    padded = padded_forward(model, real, temperature=1.3, vocab_size=VOCAB_SIZE, replay=replay)
    current = padded.logprobs.detach()[padded.mask]
    tables = {}
    for anchor in ("sampler", "trainer", "fresh"):
        algo = AlgoConfig(old_logprobs=anchor, zero_variance="keep")  # type: ignore[arg-type]
        learner = make_learner(loaded, algo, temperature=1.3)
        tables[anchor] = rollout.table(algo, torch.float64)
        learner.prepare(tables[anchor])
    assert tables["fresh"].old_logprobs is None
    sampler, trainer = tables["sampler"].old_logprobs, tables["trainer"].old_logprobs
    assert sampler is not None and trainer is not None
    assert torch.equal(sampler, tables["sampler"].sampling_logprobs)
    torch.testing.assert_close(trainer, current, rtol=1e-12, atol=1e-12)
    assert (sampler - current).abs().max() > 0.1  # the two are told apart


def test_the_trainer_anchor_is_taken_before_the_first_update_and_stays() -> None:
    loaded, model = model_pair("llama", torch.float64, initializer_range=0.1)
    rollout = rollout_of(model, SIGNAL)
    learner = real_learner(loaded, AlgoConfig(old_logprobs="trainer", num_iterations=2), lr=1e-3)
    table = rollout.table(learner.algo, torch.float64)
    real = [r for r in rollout.rows if r.length]
    padded = padded_forward(model, real, temperature=1.0, vocab_size=VOCAB_SIZE, replay=False)
    done = run_updates(learner, table, 6, rollout_index=0)
    assert table.old_logprobs is not None
    torch.testing.assert_close(table.old_logprobs, padded.logprobs.detach()[padded.mask], rtol=1e-12, atol=1e-12)
    assert done.updates[0]["log_ratio/abs_max"] < 1e-12 < done.updates[1]["log_ratio/abs_max"]


@pytest.mark.parametrize(
    ("dtype", "updates", "expected"),
    [
        (torch.float32, 1, "sampler"),
        (torch.float32, 2, "sampler"),
        (torch.float64, 1, "sampler"),
        (torch.bfloat16, 1, "fresh"),
        (torch.bfloat16, 2, "trainer"),
    ],
)
def test_auto_anchor(dtype: torch.dtype, updates: int, expected: str) -> None:
    learner = make_learner(tiny_model("llama", dtype=dtype), AlgoConfig(num_iterations=updates))
    assert learner.anchor == expected


@pytest.mark.parametrize("objective", ["grpo", "cispo"])
def test_fresh_anchors_give_the_bits_of_reinforce(objective: Any) -> None:
    """exp(x - sg(x)) A, sg(1) A x and A x: the same derivative, here without any rounding between them."""
    gradients = []
    for kind in ("reinforce", objective):
        loaded, model = model_pair("llama", torch.float32)
        rollout = rollout_of(model, SIGNAL)
        recorder = Recorder(loaded)
        algo = AlgoConfig(old_logprobs="fresh", objective=kind)
        run(make_learner(loaded, algo, optimizer=recorder), rollout)
        gradients.append(recorder.taken[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- the ratio of a sequence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10_000, 40], ids=["one batch", "many"])
def test_a_sequence_ratio_is_one_number_per_completion(budget: int) -> None:
    """GSPO: exp(mean log-ratio), whatever the micro-batches; its gradient against autograd on the formula."""
    loaded, model = model_pair("llama", torch.float64)
    rollout = rollout_of(model, SIGNAL)
    algo = AlgoConfig(
        old_logprobs="sampler", ratio_level="sequence", aggregation="sequence", clip_low=0.05, clip_high=0.1
    )
    recorder = Recorder(loaded)
    done = run(make_learner(loaded, algo, optimizer=recorder, token_budget=budget), rollout)
    real = [r for r in rollout.rows if r.length]
    padded = padded_forward(model, real, temperature=1.0, vocab_size=VOCAB_SIZE, replay=False)
    table = rollout.table(algo, torch.float64)
    loss, ratios = torch.zeros((), dtype=torch.float64), []
    for b, trajectory in enumerate(table.trajectories):
        rows = table.rows(b)
        log_ratio = (padded.logprobs[b, : trajectory.num_tokens] - table.sampling_logprobs[rows]).mean()
        ratio, advantage = log_ratio.exp(), table.advantages[rows][0]
        ratios.append(ratio.item())
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage) / len(real)
    model.zero_grad()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert whole_error(recorder.taken[0], expected) <= 1e-12
    assert done.updates[0]["ratio/max"] == pytest.approx(max(ratios)) and max(ratios) > 1.1
    assert done.updates[0]["ratio/min"] == pytest.approx(min(ratios)) and min(ratios) < 0.95


# ---- sampler against trainer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_difference_over_the_budget_is_told_or_stops_the_step(strict: bool) -> None:
    """What the sampler reports is shifted; the policy has not moved."""

    def start(spread: float) -> tuple[Learner, FakeRollout]:
        loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
        learner = real_learner(loaded, AlgoConfig(old_logprobs="sampler"), lr=1e-2, weight_decay=0.1)
        learner.budget, learner.strict_ratio = Budget.starting(torch.float32), strict
        return learner, rollout_of(model, SIGNAL, spread=spread)

    learner, clean = start(spread=0.0)
    done = run(learner, clean)
    assert done.over_budget == () and len(done.updates) == 1
    learner, shifted = start(spread=0.01)
    before = snapshot(learner)
    if strict:
        with pytest.raises(StepError, match=r"strict_ratio: .*mean \|d\| .* exceeds 1\S*e-05.*rhotrain audit"):
            run(learner, shifted)
        learner.optimizer.zero_grad()
        assert unchanged(learner, before)
    else:
        done = run(learner, shifted)
        assert len(done.over_budget) == 3 and len(done.updates) == 1


def test_stale_rollouts_are_not_judged_by_the_numerics_budget() -> None:
    loaded, model = model_pair("llama", torch.float32, initializer_range=0.1)
    rollout = rollout_of(model, SIGNAL, spread=0.01)
    learner = make_learner(loaded, AlgoConfig(old_logprobs="sampler"))
    learner.budget, learner.strict_ratio = Budget.starting(torch.float32), True
    loaded.policy_version = 3
    done = run(learner, rollout)
    assert done.over_budget == () and done.mismatch["sampling/k3"] > 1e-8


def test_lengths_of_the_fake_rollout_cover_what_the_tests_claim() -> None:
    """One-token completions, an error, unscorable rewards: if someone tidies them up, the tests above say less."""
    flat = [n for group in LENGTHS for n in group]
    assert flat.count(1) >= 5 and flat.count(0) == 1 and len({sum(g) for g in LENGTHS}) > 3
    assert sum(r != r for group in REWARDS for r in group) == 5
