"""The log-ratio as a sum of causes: every link against a formula of its own, and each cause alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_model import tiny_model
from helpers_rollout import make_prompts, model_logits
from helpers_train import make_learner, one_thread
from torch import Tensor

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.budget import Budget, Difference
from rhotrain.train.causes import (
    CAUSES,
    SEMANTIC,
    Bounds,
    Chain,
    Effect,
    dropout_table,
    eval_mode,
    found_causes,
    logprobs,
    temperature_ignored,
    trace,
    truncation_ignored,
)
from rhotrain.train.config import AlgoConfig
from rhotrain.train.inner_loop import Learner

T = 0.8


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


class Scene:
    """Sampled groups of a tiny model and the trainer that scores them; faults are planted by changing either."""

    def __init__(self, family: str = "llama", dtype: torch.dtype = torch.float32, **sampling: Any) -> None:
        self.loaded: LoadedModel = tiny_model(family, dtype=dtype)
        params = SamplingParams(temperature=T, max_new_tokens=10, seed=3, **sampling)
        self.params = replace(params, keep_sets=params.truncates)
        self.prompts = make_prompts(5, 9, 3)
        groups = Engine(self.loaded, num_pages=64, page_size=4).generate(self.prompts, self.params, n=3)
        self.pairs = [(tuple(prompt), group) for prompt, group in zip(self.prompts, groups)]
        self.acting = make_table(self.pairs, replay=params.truncates, dtype=torch.float64)
        self.learner: Learner = make_learner(self.loaded, AlgoConfig(), temperature=T, max_new_tokens=10)
        self.frozen = logprobs(self.learner, self.acting, temperature=T)

    def held(self, *, replay: bool | None = None) -> TokenTable:
        return make_table(self.pairs, replay=self.params.truncates if replay is None else replay)

    def trace(self, held: TokenTable | None = None) -> Chain:
        return trace(self.learner, self.acting, held or self.held(), self.frozen, temperature=T)

    def logits(self) -> Tensor:
        """float64 [N, vocab] by transformers alone (llama)."""
        return torch.cat([model_logits(list(p), c.token_ids, self.loaded) for p, group in self.pairs for c in group])

    def scores(self, temperature: float) -> Tensor:
        """float64 [N], log_softmax of `logits` at the sampled ids."""
        rows = torch.log_softmax(self.logits() / temperature, dim=1)
        return rows.gather(1, self.acting.token_ids[:, None]).squeeze(1)


def alone(chain: Chain, cause: str | None) -> None:
    """Only `cause` is there, and every other semantic link is exactly 0."""
    assert list(chain.links) == list(CAUSES)
    for name in SEMANTIC:
        assert chain.present(name) == (name == cause), name
        if name != cause:
            assert not chain.links[name].any(), name
    assert found_causes(chain, ()) == (() if cause is None else (cause,))


def adds_up(chain: Chain) -> None:
    links = torch.stack(list(chain.links.values()))
    torch.testing.assert_close(links.sum(0), chain.total, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 12, "top_p": 0.9}, {"min_new_tokens": 4}], ids=["full", "cut", "min"])
def test_a_clean_pipeline_has_numerics_and_nothing_else(family: str, dtype: torch.dtype, cuts: dict[str, Any]) -> None:
    scene = Scene(family, dtype, **cuts)
    chain = scene.trace()
    alone(chain, None)
    adds_up(chain)
    assert not Budget.starting(dtype).exceeded(Difference.of(chain.links["numerics"]))
    assert len(chain.total) == sum(len(c.token_ids) for _, group in scene.pairs for c in group) > 50


def test_temperature_alone() -> None:
    scene = Scene()
    scene.learner.temperature = 1.0
    chain = scene.trace()
    alone(chain, "temperature")
    adds_up(chain)
    torch.testing.assert_close(chain.links["temperature"], scene.scores(1.0) - scene.scores(T), rtol=0, atol=2e-5)
    assert float(chain.total.abs().max()) > 0.5


def test_truncation_alone_is_the_log_of_the_kept_mass() -> None:
    scene = Scene(top_k=6, top_p=0.8)
    chain = scene.trace(scene.held(replay=False))
    alone(chain, "truncation")
    adds_up(chain)
    link = chain.links["truncation"]
    assert bool((link <= 0).all()) and float(link.min()) < -0.05
    torch.testing.assert_close(link, scene.acting.kept_mass.log(), rtol=0, atol=2e-5)


def test_rounding_never_makes_a_kept_mass_above_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose full softmax comes out a little above the one over nearly all ids."""
    scene = Scene(top_k=75)
    original = Learner.score

    def score(self: Learner, table: TokenTable, *args: Any, **options: Any) -> Tensor:
        return original(self, table, *args, **options) + (2e-6 if table.kept is None else 0.0)

    monkeypatch.setattr(Learner, "score", score)
    chain = scene.trace(scene.held(replay=False))
    assert bool((chain.links["truncation"] <= 0).all())
    alone(chain, None)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_alone(family: str) -> None:
    scene = Scene(family)
    scene.loaded.dropout = 0.1
    state = torch.get_rng_state()
    chain = scene.trace()
    assert torch.equal(torch.get_rng_state(), state), "the audit drew from the global generator"
    alone(chain, "dropout")
    adds_up(chain)
    assert float(chain.links["dropout"].abs().mean()) > 0.01
    torch.rand(1)
    again = scene.trace()
    assert torch.equal(again.links["dropout"], chain.links["dropout"]), "the masks depend on the seed alone"


def test_staleness_alone() -> None:
    scene = Scene()
    before = scene.scores(T)
    with torch.no_grad():
        scene.loaded.head.weight.mul_(1.02)  # tied to the embedding, so all of the model moves
    scene.loaded.policy_version += 1
    chain = scene.trace()
    alone(chain, "staleness")
    adds_up(chain)
    now = logprobs(scene.learner, scene.acting, temperature=T)
    torch.testing.assert_close(chain.links["staleness"], now - before, rtol=0, atol=2e-5)
    assert found_causes(chain, (), staleness_counts=False) == ()


def test_tokenisation_alone() -> None:
    scene = Scene()
    held = scene.held()
    row = held.starts[4]
    held.token_ids[row] = (held.token_ids[row] + 1) % 70
    chain = scene.trace(held)
    alone(chain, "tokenisation")
    adds_up(chain)


def test_numerics_alone_is_judged_by_the_budget() -> None:
    scene = Scene()
    noise = torch.randn(len(scene.frozen), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scene.acting.sampling_logprobs += 0.01 * noise
    chain = scene.trace()
    adds_up(chain)
    assert not any(chain.present(cause) for cause in SEMANTIC)
    exceeded = Budget.starting(torch.float32).exceeded(Difference.of(chain.links["numerics"]))
    assert found_causes(chain, exceeded) == ("numerics",)


def test_all_causes_together_still_add_up_in_the_documented_order() -> None:
    scene = Scene(top_k=6)
    scene.learner.temperature, scene.loaded.dropout = 1.0, 0.1
    with torch.no_grad():
        scene.loaded.head.weight.mul_(1.02)
    scene.loaded.policy_version += 1
    held = scene.held(replay=False)
    held.token_ids[0] = (held.token_ids[0] + 1) % 70
    chain = scene.trace(held)
    adds_up(chain)
    assert found_causes(chain, ("over",)) == CAUSES
    bounds = Bounds.of(AlgoConfig())
    effects = [Effect.of(cause, chain.links[cause], scene.acting, bounds) for cause in CAUSES]
    total = Effect.of("all", chain.total, scene.acting, bounds)
    assert sum(e.mean for e in effects) == pytest.approx(total.mean, abs=1e-9)
    assert sum(e.clip for e in effects) != pytest.approx(total.clip, abs=1e-3)


def test_completions_of_other_lengths_cannot_be_compared() -> None:
    scene = Scene()
    (prompt, group), *rest = scene.pairs
    shorter = replace(
        group[0],
        token_ids=group[0].token_ids[:-1],
        logprobs=group[0].logprobs[:-1],
        kept_mass=group[0].kept_mass[:-1],
    )
    held = make_table([(prompt, [shorter, *group[1:]]), *rest])
    with pytest.raises(ValueError, match="other lengths"):
        scene.trace(held)


# ---- what the rows say ----------------------------------------------------------------------------------------------


def test_an_effect_counts_both_sides_of_the_clip_and_one_of_the_clamp() -> None:
    table = Scene().acting
    log_ratio = torch.zeros(len(table.token_ids), dtype=torch.float64)
    log_ratio[:4] = torch.tensor([0.79, 1.21, 5.5, 0.2], dtype=torch.float64).log()
    count = len(log_ratio)
    effect = Effect.of("x", log_ratio, table, Bounds(0.8, 1.2, 5.0))
    assert effect.clip == pytest.approx(4 / count) and effect.clamp == pytest.approx(1 / count)
    assert (effect.ratio_min, effect.ratio_max) == (pytest.approx(0.2), pytest.approx(5.5))
    assert effect.max_abs == pytest.approx(float(torch.tensor(5.5).log()), rel=1e-6)
    assert effect.mean == pytest.approx(float(log_ratio.sum()) / count)
    assert effect.mean_abs == pytest.approx(float(log_ratio.abs().sum()) / count)
    at_bounds = Effect.of("x", torch.full_like(log_ratio, 0.0), table, Bounds(1.0, 1.0, 1.0))
    assert at_bounds.clip == at_bounds.clamp == 0.0, "the intervals are closed"


def test_a_sequence_level_effect_is_that_of_the_means() -> None:
    table = Scene().acting
    log_ratio = torch.zeros(len(table.token_ids), dtype=torch.float64)
    log_ratio[table.rows(1)] = 0.3
    log_ratio[table.starts[2]] = 0.3
    effect = Effect.of("x", log_ratio, table, Bounds(0.9, 1.2, 5.0, "sequence"))
    assert effect.clip == pytest.approx(1 / 9), "one completion of nine; a lone token does not move a mean so far"
    assert effect.ratio_max == pytest.approx(float(torch.tensor(0.3, dtype=torch.float64).exp()))


def test_bounds_are_those_of_both_objectives() -> None:
    bounds = Bounds.of(AlgoConfig(objective="cispo", clip_low=0.1, clip_high=0.3, ratio_max=4.0))
    assert (bounds.clip_low, bounds.clip_high, bounds.clamp) == (0.9, 1.3, 4.0)


# ---- what other settings would do -----------------------------------------------------------------------------------


def test_what_if_links_are_those_of_the_faults() -> None:
    scene = Scene(top_k=6)
    temperature = temperature_ignored(scene.learner, scene.acting, scene.frozen)
    truncation = truncation_ignored(scene.learner, scene.acting, scene.frozen)
    torch.testing.assert_close(truncation, scene.acting.kept_mass.log(), rtol=0, atol=2e-5)
    scene.learner.temperature = 1.0
    torch.testing.assert_close(temperature, scene.trace().links["temperature"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_dropout_table_has_the_published_shape(family: str) -> None:
    scene = Scene(family)
    rows = dropout_table(scene.learner, scene.acting, scene.frozen, 0.1)
    assert list(rows) == ["dropout 0, train mode", "dropout 0.1, train mode", "dropout 0.1, eval mode"]
    none, train, evaluated = (Effect.of("", x, scene.acting, Bounds(0.8, 1.2, 5.0)) for x in rows.values())
    assert none.max_abs == evaluated.max_abs == 0.0 and none.clip == evaluated.clip == 0.0
    assert train.clip > 0.1 and train.max_abs > 0.2
    assert all(module.training for module in scene.loaded.model.modules())


def test_eval_mode_ends_when_something_fails_inside() -> None:
    loaded = tiny_model("llama")
    with pytest.raises(RuntimeError, match="inside"), eval_mode(loaded):
        assert not loaded.model.training
        raise RuntimeError("inside")
    assert loaded.model.training
