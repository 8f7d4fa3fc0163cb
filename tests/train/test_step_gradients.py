"""The gradient of a whole optimiser step == a naive padded trainer's, whatever the split, the packing and the order.

`naive_step` (tests/helpers_naive.py) is written from the papers' formulas on right-padded batches with whole logits;
it shares no code with batching.py, step.py or the kernels.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_naive import Gradients, Naive, model_pair, naive_step, padded_forward
from helpers_train import (
    FakeRollout,
    Recorder,
    fake_rollout,
    gradients_of,
    make_learner,
    one_thread,
    tensor_errors,
    whole_error,
)

from rhotrain.model.load import LoadedModel, load_model
from rhotrain.train.batching import pack, token_weights
from rhotrain.train.config import AlgoConfig
from rhotrain.train.inner_loop import InnerLoop, run_updates
from rhotrain.train.step import StepError, TokenResults, run_batches, score

LONGEST = 18
"""Packed tokens of the longest trajectory of `fake_rollout`: a budget of LONGEST runs them almost one by one."""
SPLITS = ((10_000, True), (40, False), (64, True), (10_000, False), (LONGEST, True), (LONGEST, False))
"""(token_budget, share_prompts)."""
FLOAT64_LIMIT, FLOAT32_LIMIT = 1e-12, 2e-6
FLOAT32_INIT = 0.1
"""Five times transformers' default. At 0.5 the gradient is so badly conditioned that the naive float32 trainer itself
is 2e-6 to 7e-6 off the float64 truth; there its error is the bound (test_float32_is_no_worse_than_the_naive_trainer).
"""


VOCAB_SIZE = 77
"""The real vocabulary of the tiny tokenizer; the models' heads have 96 rows."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass(frozen=True)
class Case:
    family: str
    temperature: float
    replay: bool
    algo: AlgoConfig

    def __str__(self) -> str:
        a = self.algo
        terms = f"-{a.kl}" * (a.beta > 0) + "-entropy" * (a.entropy_coef > 0) + "-masked" * a.mask_truncated
        return f"{self.family}-{a.objective}-{a.aggregation}{terms}-T{self.temperature}" + "-kept" * self.replay


def case(family: str, temperature: float = 1.0, replay: bool = False, **algo: Any) -> Case:
    return Case(family, temperature, replay, AlgoConfig(**{"old_logprobs": "sampler", **algo}))


CASES = (
    case("llama", objective="grpo", clip_high=0.28),
    case("llama", 0.6, True, objective="cispo", aggregation="sequence", ratio_max=1.3, ratio_min=0.9),
    case("qwen3", 1.3, objective="reinforce", aggregation="constant", beta=0.04, kl="k2"),
    case("gemma2", 1.0, True, objective="grpo", beta=0.1, kl="k3", entropy_coef=0.01),
    case("gemma2", 0.6, objective="cispo", aggregation="constant", ratio_max=1.2),
    case("gpt2", 1.3, True, objective="grpo", aggregation="sequence", beta=0.1, kl="k3_k2grad", entropy_coef=0.01),
    case("gpt2", objective="grpo", mask_truncated=True),
    case("mistral", 0.6, objective="grpo", aggregation="sequence", mask_truncated=True, beta=0.04),
    case("qwen2", 1.3, objective="cispo", entropy_coef=0.02),
    case("phi3", objective="grpo", aggregation="constant", mask_truncated=True),
    case("phi", 0.6, True, objective="grpo"),
    case("granite", 1.3, objective="grpo", beta=0.04, kl="k3_k2grad"),
)
MOE = case("qwen3_moe", 1.3, objective="grpo", beta=0.04)


def project_step(
    loaded: LoadedModel, rollout: FakeRollout, algo: AlgoConfig, order: Any = None, **optim: Any
) -> tuple[InnerLoop, Gradients]:
    """run_updates for one update; returns what it says and the gradient that reached the optimizer."""
    recorder = Recorder(loaded)
    learner = make_learner(loaded, algo, optimizer=recorder, temperature=rollout.temperature, **optim)
    done = run_updates(learner, rollout.table(algo, loaded.dtype, order), rollout.num_groups, rollout_index=0)
    assert len(recorder.taken) == len(done.updates) == 1
    return done, recorder.taken[0]


def naive(model: Any, rollout: FakeRollout, algo: AlgoConfig, **options: Any) -> Naive:
    return naive_step(model, rollout, algo, vocab_size=VOCAB_SIZE, max_new_tokens=9, **options)


def rollout_for(case: Case, model: Any, **options: Any) -> FakeRollout:
    return fake_rollout(
        model,
        temperature=case.temperature,
        replay=case.replay,
        vocab_size=VOCAB_SIZE,
        seed=len(str(case)),
        **options,
    )


def check(case: Case, loaded: LoadedModel, rollout: FakeRollout, truth: Naive, limit: float, splits: Any) -> float:
    """Gradient and loss for every split; returns the largest error."""
    assert set(truth.gradients) == {name for name, _ in loaded.model.named_parameters()}
    worst = 0.0
    for budget, share in splits:
        done, actual = project_step(loaded, rollout, case.algo, token_budget=budget, share_prompts=share)
        where = f"{case}, {loaded.dtype}, budget {budget}, share_prompts {share}"
        error = whole_error(actual, truth.gradients)
        worst = max(worst, error)
        assert error <= limit, where
        if loaded.dtype == torch.float64:
            assert tensor_errors(actual, truth.gradients) <= 10 * limit, where
        loss = done.updates[0]["policy_loss"]
        assert loss == pytest.approx(truth.loss, rel=20 * limit, abs=20 * limit), where
    return worst


# ---- equal to the naive trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_gradient_is_the_naive_one(case: Case) -> None:
    loaded, model = model_pair(case.family, torch.float64)
    rollout = rollout_for(case, model)
    check(case, loaded, rollout, naive(model, rollout, case.algo), FLOAT64_LIMIT, SPLITS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_gradient_is_the_float64_truth(case: Case) -> None:
    _, model = model_pair(case.family, torch.float64, initializer_range=FLOAT32_INIT)
    loaded, _ = model_pair(case.family, torch.float32, initializer_range=FLOAT32_INIT)
    rollout = rollout_for(case, model)
    check(case, loaded, rollout, naive(model, rollout, case.algo), FLOAT32_LIMIT, SPLITS[1:5])


def test_float32_mixture_of_experts() -> None:
    """transformers' router takes its softmax in float32 whatever the model's type, so there is no float64 truth:
    the naive trainer runs in float32, with eager attention as it comes."""
    case = MOE
    loaded, model = model_pair(case.family, torch.float32, initializer_range=FLOAT32_INIT)
    rollout = rollout_for(case, model)
    check(case, loaded, rollout, naive(model, rollout, case.algo), FLOAT32_LIMIT, (SPLITS[0], SPLITS[1]))


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=str)
def test_float32_is_no_worse_than_the_naive_trainer(case: Case) -> None:
    """Large weights (initializer_range 0.5): the yardstick is transformers' own eager float32 path."""
    _, model = model_pair(case.family, torch.float64)
    loaded, eager = model_pair(case.family, torch.float32)
    rollout = rollout_for(case, model)
    truth = naive(model, rollout, case.algo).gradients
    yardstick = whole_error(naive(eager, rollout, case.algo).gradients, truth)
    _, actual = project_step(loaded, rollout, case.algo)
    assert whole_error(actual, truth) <= 1.5 * yardstick


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[5]], ids=str)
def test_any_order_gives_the_same_gradient(case: Case) -> None:
    """Completions of different groups interleaved, so that groups are torn apart over micro-batches."""
    loaded, model = model_pair(case.family, torch.float64)
    rollout = rollout_for(case, model)
    truth = naive(model, rollout, case.algo)
    count = len(rollout.table(case.algo, torch.float64).trajectories)
    for seed, (budget, share) in enumerate(SPLITS):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        _, actual = project_step(loaded, rollout, case.algo, order, token_budget=budget, share_prompts=share)
        assert whole_error(actual, truth.gradients) <= FLOAT64_LIMIT


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3", "mistral"])
def test_checkpointing_recomputes_and_changes_nothing(family: str) -> None:
    case = next(c for c in CASES if c.family == family)
    model = model_pair(family, torch.float64)[1]
    rollout = rollout_for(case, model)
    truth, calls = naive(model, rollout, case.algo), []
    for checkpointing in (False, True):
        loaded, _ = model_pair(family, torch.float64, gradient_checkpointing=checkpointing)
        check(case, loaded, rollout, truth, FLOAT64_LIMIT, SPLITS[1:3])
        calls.append(loaded.attention.calls)
    assert calls[0] > 0 and calls[1] == 2 * calls[0]
    assert loaded.attention.context is None  # nothing is left set


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_filter_is_dapos_filter(aggregation: Any) -> None:
    """Groups without variance leave numerator and denominator (DAPO, arXiv 2503.14476, eq. 11)."""
    loaded, model = model_pair("llama", torch.float64)
    case_ = case("llama", aggregation=aggregation, zero_variance="filter", beta=0.1, entropy_coef=0.01)
    rollout = rollout_for(case_, model)
    truth = naive(model, rollout, case_.algo)
    check(case_, loaded, rollout, truth, FLOAT64_LIMIT, (SPLITS[0], SPLITS[1]))
    kept = naive(model, rollout, replace(case_.algo, zero_variance="keep"))
    assert whole_error(kept.gradients, truth.gradients) > 1e-2  # the filter does something here


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_skipping_groups_without_variance_changes_no_gradient(family: str, aggregation: Any) -> None:
    loaded, model = model_pair(family, torch.float64)
    skip = case(family, aggregation=aggregation)
    rollout = rollout_for(skip, model)
    done, skipped = project_step(loaded, rollout, skip.algo)
    all_, kept = project_step(loaded, rollout, replace(skip.algo, zero_variance="keep"))
    assert whole_error(skipped, kept) <= FLOAT64_LIMIT
    silent = [r.length for r in rollout.rows if r.group in (1, 4)]
    assert all_.updates[0]["update_tokens"] - done.updates[0]["update_tokens"] == sum(silent) > 0


@pytest.mark.parametrize("terms", [{"beta": 0.1}, {"entropy_coef": 0.01}], ids=str)
def test_groups_without_variance_run_when_another_loss_term_wants_them(terms: dict[str, Any]) -> None:
    loaded, model = model_pair("llama", torch.float64)
    with_terms = case("llama", **terms)
    rollout = rollout_for(with_terms, model)
    done, skip = project_step(loaded, rollout, with_terms.algo)
    assert done.updates[0]["update_tokens"] == sum(r.length for r in rollout.rows)
    truth = naive(model, rollout, with_terms.algo)
    assert whole_error(skip, truth.gradients) <= FLOAT64_LIMIT


# ---- on-policy identities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", ["fresh", "sampler", "trainer"])
@pytest.mark.parametrize("replay", [False, True], ids=["full", "kept"])
def test_at_ratio_one_every_objective_is_reinforce(anchor: Any, replay: bool) -> None:
    """exp(x - sg(x)) A, sg(1) A x and A x have the same derivative."""
    loaded, model = model_pair("qwen3", torch.float64)
    on_policy = case("qwen3", 0.6, replay, old_logprobs=anchor)
    # fresh and trainer must not look at the sampler's numbers: theirs are shifted
    rollout = rollout_for(on_policy, model, spread=0.0 if anchor == "sampler" else 0.25)
    reinforce = naive(model, rollout, replace(on_policy.algo, objective="reinforce")).gradients
    for objective in ("grpo", "cispo", "reinforce"):
        algo = replace(on_policy.algo, objective=objective)
        done, actual = project_step(loaded, rollout, algo, token_budget=40)
        assert whole_error(actual, reinforce) <= FLOAT64_LIMIT
        update = done.updates[0]
        assert update["clip_ratio/region_mean"] == 0.0
        assert update["log_ratio/abs_max"] <= 1e-12
        if anchor == "fresh":
            assert update["ratio/min"] == update["ratio/max"] == 1.0  # the same bits


def test_fresh_anchors_with_a_head_bias_softcap_and_scale() -> None:
    for family in ("phi", "gemma2", "granite"):
        loaded, model = model_pair(family, torch.float64)
        fresh = case(family, 1.3, old_logprobs="fresh", beta=0.1, entropy_coef=0.01)
        rollout = rollout_for(fresh, model)
        check(fresh, loaded, rollout, naive(model, rollout, fresh.algo), FLOAT64_LIMIT, (SPLITS[1],))


# ---- scoring and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("replay", [False, True], ids=["full", "kept"])
def test_score_gives_the_naive_logprobs(temperature: float, replay: bool) -> None:
    loaded, model = model_pair("gemma2", torch.float64)
    rollout = rollout_for(case("gemma2", temperature, replay), model)
    table = rollout.table(AlgoConfig(), torch.float64)
    real = [r for r in rollout.rows if r.length]
    padded = padded_forward(model, real, temperature=temperature, vocab_size=VOCAB_SIZE, replay=replay)
    for budget, share in SPLITS[1:5:3]:
        batches = pack(table, range(len(real)), token_budget=budget, share_prompts=share)
        scored = score(loaded, table, batches, temperature=temperature)
        torch.testing.assert_close(scored, padded.logprobs.detach()[padded.mask], rtol=1e-12, atol=1e-12)
    partial = score(loaded, table, pack(table, [2, 5], token_budget=99), temperature=temperature)
    ran = torch.zeros(len(partial), dtype=torch.bool)
    ran[table.rows(2)] = ran[table.rows(5)] = True
    torch.testing.assert_close(partial[ran], scored[ran], rtol=1e-12, atol=1e-12)
    assert (partial[~ran] == 0).all()


def test_metrics_of_the_step_are_the_naive_ones() -> None:
    loaded, model = model_pair("llama", torch.float64)
    chosen = case("llama", 1.3, zero_variance="keep", beta=0.1, kl="k3")
    rollout = rollout_for(chosen, model)
    done, _ = project_step(loaded, rollout, chosen.algo)
    truth, update = naive(model, rollout, chosen.algo), done.updates[0]
    table = rollout.table(chosen.algo, torch.float64)
    logprobs = truth.padded.logprobs.detach()[truth.padded.mask]
    ratio = (logprobs - table.sampling_logprobs).exp()
    low = (table.advantages < 0) & (ratio < 0.8)
    high = (table.advantages > 0) & (ratio > 1.2)
    assert table.ref_logprobs is not None
    d = table.ref_logprobs - logprobs
    expected: dict[str, Any] = {
        "ratio/mean": ratio.mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        "log_ratio/abs_max": ratio.log().abs().max(),
        "clip_ratio/low_mean": low.double().mean(),
        "clip_ratio/high_mean": high.double().mean(),
        "clip_ratio/region_mean": (low | high).double().mean(),
        "approx_kl/k1": -ratio.log().mean(),
        "approx_kl/k3": (ratio - 1 - ratio.log()).mean(),
        "log_ratio/mean": ratio.log().mean(),
        "clip_ratio/low_negative": low[table.advantages < 0].double().mean(),
        "clip_ratio/high_positive": high[table.advantages > 0].double().mean(),
        "clip_ratio/low_positive": 0.0,
        "clip_ratio/high_negative": 0.0,
        "kl": (d.exp() - d - 1).mean(),
        "entropy": truth.padded.entropy[truth.padded.mask].mean().detach(),
        "update_tokens": len(logprobs),
    }
    assert {name: update[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-11
    )
    assert low.any() and high.any() and not (low | high).all()
    difference = (logprobs - table.sampling_logprobs).abs()
    assert done.mismatch["sampling/sampling_logp_difference/mean"] == pytest.approx(float(difference.mean()), rel=1e-11)
    p99 = np.quantile(difference.numpy(), 0.99, method="inverted_cdf")
    assert done.mismatch["sampling/sampling_logp_difference/p99"] == pytest.approx(float(p99), rel=1e-11)
    assert done.mismatch["sampling/sampling_logp_difference/max"] == pytest.approx(float(difference.max()), rel=1e-11)


def test_a_logprob_that_is_not_finite_names_its_completion() -> None:
    loaded, model = model_pair("llama", torch.float32)
    rollout = rollout_for(case("llama"), model)
    table = rollout.table(AlgoConfig(), torch.float32)
    batches = pack(table, [4, 5], token_budget=99)
    weights = token_weights(table, [4, 5], aggregation="token", max_new_tokens=9)
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight").fill_(float("nan"))
    results = TokenResults.empty(len(table.token_ids), table.dtype)
    table.old_logprobs = table.sampling_logprobs
    with pytest.raises(
        StepError, match=r"logprobs: the trainer gives nan for token 0 of sample 4 \(prompt 1, completion 0\).*lower lr"
    ):
        run_batches(loaded, table, batches, weights, AlgoConfig().spec(), results, temperature=1.0)
    with pytest.raises(StepError, match="sample 4"):
        score(loaded, table, batches, temperature=1.0)
    assert gradients_of(loaded) == {}


# ---- the real model -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_float32_gradient_is_the_naive_one() -> None:
    """Against transformers' eager attention on a copy of the weights, 2e-5 in relative L2 (issue 2)."""
    loaded = load_model("smollm2", device="cpu", dtype="float32")
    model: Any = copy.deepcopy(loaded.model)
    model.set_attn_implementation("eager")
    algo = AlgoConfig(old_logprobs="sampler", clip_high=0.28, beta=0.04, zero_variance="keep")
    rollout = fake_rollout(
        model,
        vocab_size=loaded.vocab_size,
        token_ids=20_000,
        lengths=((12, 1, 20, 7), (9, 16, 3, 24)),
        prompts=(40, 17),
        rewards=((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 0.0)),
        truncated=set(),
    )
    truth = naive_step(model, rollout, algo, vocab_size=loaded.vocab_size, max_new_tokens=24)
    del model
    for budget, share in ((10_000, True), (64, False)):
        _, actual = project_step(loaded, rollout, algo, token_budget=budget, share_prompts=share, max_new_tokens=24)
        error = whole_error(actual, truth.gradients)
        print(f"SmolLM2, budget {budget}: {error:.1e}")
        assert error <= 2e-5
