"""The gradient of an optimiser step over the product of what may change its computation but not its result.

Families x objectives x splits x gradient checkpointing, against `naive_step` (helpers_naive.py); attention libraries
and the interpreted kernels beside it. The default tests cover every value of every axis, and every split with
checkpointing on and off; the whole product is `slow`. `step_errors` takes any LoadedModel, so one with an adapter too.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, get_args

import pytest
import torch
from helpers_flash import KINDS, flash_stand_in
from helpers_naive import Gradients, Naive, model_pair, naive_step
from helpers_train import FakeRollout, Recorder, fake_rollout, make_learner, one_thread, tensor_errors, whole_error

from rhotrain.kernels.spec import CELLS, KLKind
from rhotrain.model.load import LoadedModel
from rhotrain.train import step
from rhotrain.train.config import AlgoConfig
from rhotrain.train.inner_loop import run_updates

FAMILIES = ("llama", "qwen3", "gemma2")
"""Tied embeddings; norms of queries and keys; softcaps, sliding windows and a scaled embedding."""
SPLITS = ((10_000, True), (10_000, False), (64, True), (64, False), (40, True), (40, False), (15, True), (15, False))
"""(token_budget, share_prompts): from one micro-batch to almost one per trajectory; 15 tokens are the longest one."""
OBJECTIVES: Mapping[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.28, "beta": 0.04, "kl": "k3"},
    "grpo-dual-clip": {"dual_clip": 1.25, "aggregation": "sequence", "entropy_coef": 0.01},
    "gspo": {"ratio_level": "sequence", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "sequence"},
    "gspo-dual-clip": {"ratio_level": "sequence", "clip_high": 0.05, "dual_clip": 1.06, "mask_truncated": True},
    "cispo": {"objective": "cispo", "ratio_min": 0.9, "ratio_max": 1.1, "beta": 0.1, "kl": "k2"},
    "cispo-sequence": {"objective": "cispo", "ratio_level": "sequence", "ratio_max": 1.05, "aggregation": "constant"},
    "reinforce": {"objective": "reinforce", "aggregation": "constant", "beta": 0.1, "kl": "k3_k2grad"},
    "sapo": {"objective": "sapo", "beta": 0.1, "kl": "k3_unbiased", "entropy_coef": 0.01},
}
LENGTHS = ((5, 1, 9, 3), (0, 0, 0, 0), (4, 0, 6, 7), (1, 1, 1, 1), (2, 8, 1, 0), (0, 0, 5, 0))
"""Unequal groups; a group of empty completions, one of one-token completions, a lone completion."""
NAN = float("nan")
REWARDS = (
    (1.0, 0.0, 0.5, 0.0),
    (NAN, NAN, NAN, NAN),
    (0.3, NAN, 1.0, 0.25),
    (0.0, 1.0, 1.0, 1.0),
    (1.0, -1.0, 0.0, NAN),
    (NAN, NAN, 2.0, NAN),
)
FLOAT64_LIMIT = 1e-12
"""Relative, of the whole gradient and of every tensor. The measured errors stay below 1e-13."""
VOCAB_SIZE = 77


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def algo_of(objective: str) -> AlgoConfig:
    return AlgoConfig(**{"old_logprobs": "sampler", **OBJECTIVES[objective]})


def rollout_of(model: Any, objective: str) -> FakeRollout:
    return fake_rollout(
        model,
        seed=len(objective),
        temperature=0.8,
        vocab_size=VOCAB_SIZE,
        lengths=LENGTHS,
        rewards=REWARDS,
        truncated={(0, 2), (2, 3), (4, 1)},
    )


def naive(model: Any, rollout: FakeRollout, objective: str) -> Naive:
    return naive_step(model, rollout, algo_of(objective), vocab_size=VOCAB_SIZE, max_new_tokens=9)


def one_step(loaded: LoadedModel, rollout: FakeRollout, objective: str, split: tuple[int, bool]) -> Gradients:
    """The gradients that the step brings to the optimizer."""
    algo, (budget, share) = algo_of(objective), split
    recorder = Recorder(loaded)
    options: dict[str, Any] = {"token_budget": budget, "share_prompts": share, "temperature": rollout.temperature}
    learner = make_learner(loaded, algo, optimizer=recorder, **options)
    run_updates(learner, rollout.table(algo, loaded.dtype), rollout.num_groups, rollout_index=0)
    return recorder.taken[0]


def step_errors(
    loaded: LoadedModel, rollout: FakeRollout, objective: str, split: tuple[int, bool], truth: Gradients
) -> tuple[float, float]:
    """(relative L2 of the whole gradient, worst relative error of a tensor)."""
    actual = one_step(loaded, rollout, objective, split)
    return whole_error(actual, truth), tensor_errors(actual, truth)


def check_float64(family: str, objective: str, splits: Any, checkpointing: bool, backend: Any = "auto") -> None:
    loaded, model = model_pair(family, torch.float64, gradient_checkpointing=checkpointing)
    loaded.attention.backend = backend
    rollout = rollout_of(model, objective)
    truth = naive(model, rollout, objective).gradients
    for split in splits:
        whole, tensor = step_errors(loaded, rollout, objective, split, truth)
        where = f"{family}, {objective}, {split}, checkpointing {checkpointing}, {backend}"
        assert whole <= FLOAT64_LIMIT and tensor <= FLOAT64_LIMIT, where


def check_float32(family: str, objective: str, splits: Any, checkpointing: bool) -> None:
    """The error against the float64 truth is at most twice that of transformers' own float32 path."""
    _, model = model_pair(family, torch.float64)
    loaded, eager = model_pair(family, torch.float32, gradient_checkpointing=checkpointing)
    rollout = rollout_of(model, objective)
    truth = naive(model, rollout, objective).gradients
    yardstick = whole_error(naive(eager, rollout, objective).gradients, truth)
    assert yardstick > 0
    for split in splits:
        error = whole_error(one_step(loaded, rollout, objective, split), truth)
        assert error <= 2 * yardstick, f"{family}, {objective}, {split}: {error:.1e}, naive {yardstick:.1e}"


def test_the_axes_hold_every_objective_and_kl() -> None:
    """A policy term or a KL estimator that is added must enter the matrix."""
    specs = [algo_of(name).spec() for name in OBJECTIVES]
    assert {(s.kind, s.ratio_level, s.dual_clip is not None) for s in specs} == set(CELLS)
    assert {s.kl for s in specs} == set(get_args(KLKind))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_every_split(family: str, checkpointing: bool) -> None:
    objective = {"llama": "grpo", "qwen3": "gspo", "gemma2": "sapo"}[family]
    check_float64(family, objective, SPLITS, checkpointing)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_every_objective(family: str, objective: str) -> None:
    check_float64(family, objective, SPLITS[4:5], checkpointing=True)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_every_split(family: str, checkpointing: bool) -> None:
    check_float32(family, "grpo", SPLITS, checkpointing)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_every_attention_library(family: str, kind: str) -> None:
    """The libraries' own calls, answered by stand-ins that check the real signatures and compute on the CPU."""
    with flash_stand_in(kind) as library:
        check_float64(family, "grpo", SPLITS[4:6], checkpointing=True)
    takes_softcap = not kind.startswith("torch_varlen")
    assert bool(library.calls) == (family != "gemma2" or takes_softcap)


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_by_reference_attention(family: str) -> None:
    check_float64(family, "grpo", SPLITS[4:5], checkpointing=False, backend="reference")


@pytest.mark.parametrize("objective", ["gspo-dual-clip", "sapo"])
def test_float32_with_the_interpreted_kernels(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss by its Triton kernels in the interpreter; everything else as above."""
    pytest.importorskip("triton")
    triton = partial(step.linear_policy_loss, backend="triton")
    monkeypatch.setattr(step, "linear_policy_loss", triton)
    check_float32("llama", objective, SPLITS[4:5], checkpointing=False)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_product(family: str, objective: str, checkpointing: bool) -> None:
    check_float64(family, objective, SPLITS, checkpointing)
    check_float32(family, objective, SPLITS, checkpointing)
