"""Is a ratio other than 1 the policy's doing? Finds out without training: `rhotrain audit`.

Samples a few groups as a run would, scores them as it would, takes the log-ratio apart (causes.py), asks what other
settings would do, then takes real updates and looks again. The weights are thrown away with the parts. Logprobs of
somebody else are audited in foreign.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.rollout.replay import Pair
from rhotrain.train.advantages import advantages_of
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.budget import Budget, Difference, calibrate, excerpt
from rhotrain.train.causes import (
    CAUSES,
    Bounds,
    Chain,
    Effect,
    dropout_table,
    found_causes,
    logprobs,
    scored_view,
    temperature_ignored,
    trace,
    truncation_ignored,
    verdict,
)
from rhotrain.train.config import Config, need
from rhotrain.train.diagnosis import Diagnosis, Scoring, diagnose
from rhotrain.train.inner_loop import InnerLoop, Learner, run_updates
from rhotrain.train.records import records_of
from rhotrain.train.rewards import RewardBatch
from rhotrain.train.rollouts import Rollout, RolloutQueue
from rhotrain.train.setup import Parts

CALIBRATION_TOKENS = 512
"""Tokens that the numerics budget is measured on."""
TRIED_DROPOUT = 0.1
"""What the what-if rows try where the configuration asks for none: the usual probability."""


@dataclass(frozen=True)
class Subject:
    """What was audited. staleness: of the audited rollout, in optimiser steps. recoded: share of completions whose
    decoded text encodes to other ids. kept_mass: mean. anchor: denominator of the run's ratio. unit: what shares count.
    """

    model: str
    task: str
    dtype: str
    device: str
    sampling: str
    anchor: str
    unit: str
    groups: int
    completions: int
    tokens: int
    staleness: int
    kept_mass: float
    recoded: float


@dataclass(frozen=True)
class Audit:
    """causes, in the order of CAUSES, and their total: with no update. what_if: settings that this run does not have.
    movement: after real updates. numerics: the first link, judged by `budget`; exceeded: the limits that it is above,
    and then there is a diagnosis of the engine's numbers. found: the causes that count.
    """

    subject: Subject
    bounds: Bounds
    causes: tuple[Effect, ...]
    total: Effect
    what_if: tuple[Effect, ...]
    movement: tuple[Effect, ...]
    numerics: Difference
    budget: Budget
    exceeded: tuple[str, ...]
    diagnosis: Diagnosis | None
    found: tuple[str, ...]
    verdict: str
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 when a cause that counts was found."""
        return int(bool(self.found))


# ---- our own pipeline -----------------------------------------------------------------------------------------------


def narrowed(config: Config, groups: int) -> Config:
    """`config` for an audit of `groups` groups: nothing is evaluated. 0 takes 4, or as many as minibatches need.

    Raises ConfigError.
    """
    parts = config.algo.minibatches_per_rollout
    need(groups >= 0, "groups", groups, "need at least 1 (0 chooses)")
    need(groups % parts == 0, "groups", groups, f"minibatches hold whole groups: need a multiple of {parts}")
    count = groups or -(-4 // parts) * parts
    return replace(
        config,
        rollout=replace(config.rollout, prompts_per_step=count),
        eval=replace(config.eval, eval_size=0, eval_every=0),
    )


def audit(config: Config, parts: Parts, *, updates: int = 4, say: Callable[[str], None] = lambda text: None) -> Audit:
    """Audit the pipeline `parts`, made by `build(config)` with a `narrowed` config. Changes the weights of `parts`.

    updates: real updates for the rows of policy movement, 0 for none. say: gets one line per phase.
    Raises StepError for numbers that cannot be logprobs, ConfigError for `updates` below 0.
    """
    need(updates >= 0, "updates", updates, "need a count >= 0")
    device = parts.loaded.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.run.seed)  # the dropout of real updates
        return _audit(config, parts, updates, say)


def _audit(config: Config, parts: Parts, updates: int, say: Callable[[str], None]) -> Audit:
    learner, rollout, seed = parts.learner, config.rollout, config.run.seed
    notes: list[str] = list(parts.notes)
    if config.algo.dynamic_sampling:
        notes.append("dynamic_sampling replaces no group here: the audited rollout is the first draw")
    say("sampling")
    others, audited = _draw(config, parts)
    acting = _acting_table(config, audited)
    say("scoring under the weights that sampled")
    frozen = logprobs(learner, acting, temperature=rollout.temperature)
    numerics = Difference.of(frozen - acting.sampling_logprobs.double())
    budget, exceeded, diagnosis = _judge_numerics(config, parts, acting, numerics)
    for other in others:
        say("an update on another rollout, so that the audited one is stale")
        _learn(config, learner, parts, other, notes)
    say("taking the log-ratio apart")
    held = _held_table(config, parts, audited)
    chain = trace(learner, acting, held, frozen, temperature=rollout.temperature, seed=seed)
    bounds = Bounds.of(config.algo)
    causes = tuple(Effect.of(cause, chain.links[cause], acting, bounds) for cause in CAUSES)
    total = Effect.of("all together", chain.total, acting, bounds)
    say("what other settings would do")
    what_if = _what_if(config, learner, acting, held, bounds, notes)
    subject = _subject(config, parts, acting)
    say("policy movement")
    movement = _movement(config, parts, audited, acting, held, updates, bounds, notes)
    found = found_causes(chain, exceeded, staleness_counts=_staleness_counts(config, learner))
    return Audit(
        subject=subject,
        bounds=bounds,
        causes=causes,
        total=total,
        what_if=what_if,
        movement=movement,
        numerics=numerics,
        budget=budget,
        exceeded=exceeded,
        diagnosis=diagnosis,
        found=found,
        verdict=verdict(found, total, _contained(config, learner, chain), diagnosis.names if diagnosis else ()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _draw(config: Config, parts: Parts) -> tuple[list[Rollout], Rollout]:
    """(rollouts to be trained on before, the audited one), drawn in one call as the queue of a run does it.

    Kept sets are recorded even where the trainer ignores them: without them there is nothing to compare with.
    """
    sets = replace(config, rollout=replace(config.rollout, truncation="replay"))
    queue, count = RolloutQueue(sets, parts.engine, parts.stream), 1 + config.rollouts_ahead
    drawn = [queue.take(version=parts.loaded.policy_version, remaining=count - k) for k in range(count)]
    return drawn[:-1], drawn[-1]


def _pairs(rollout: Rollout) -> list[tuple[tuple[int, ...], list[Completion]]]:
    return [(prompt.token_ids, group) for prompt, group in zip(rollout.prompts, rollout.groups)]


def _acting_table(config: Config, rollout: Rollout) -> TokenTable:
    """What the sampler did: over the sets that it drew from, in float64, so that no difference is rounded."""
    return make_table(_pairs(rollout), replay=config.rollout.sampling(seed=0).truncates, dtype=torch.float64)


def _held_table(config: Config, parts: Parts, rollout: Rollout) -> TokenTable:
    """The rollout as the trainer holds it, with its rewards' advantages (without a KL penalty in the reward)."""
    algo, learner = config.algo, parts.learner
    table = make_table(
        _pairs(rollout),
        replay=config.rollout.sampling(seed=0).keep_sets,
        mask_truncated=algo.mask_truncated,
        dtype=torch.promote_types(parts.loaded.dtype, torch.float32),
    )
    if parts.reference is not None:
        everything = list(range(len(table.trajectories)))
        table.ref_logprobs = learner.score(table, everything, loaded=parts.reference, who="the reference")
    rewards = parts.rewards.score(RewardBatch.make(rollout.prompts, rollout.groups, parts.loaded.tokenizer))
    table.set_advantages(advantages_of(algo, rewards.total, rewards.parts, rewards.weights).values_PG)
    return table


def _with_signal(table: TokenTable, seed: int, notes: list[str]) -> TokenTable:
    """`table`; where no group carries signal, with advantages of +-1 drawn from `seed`, which `notes` tells."""
    if not table.signal_groups:
        notes.append("no group of an updated rollout carried signal: its advantages are +-1, drawn at random")
        shape = (
            1 + max((t.group for t in table.trajectories), default=0),
            1 + max((t.member for t in table.trajectories), default=0),
        )
        generator = torch.Generator().manual_seed(seed)
        table.set_advantages(torch.randint(0, 2, shape, generator=generator).double() * 2 - 1)
    return table


def _learn(config: Config, learner: Learner, parts: Parts, rollout: Rollout, notes: list[str]) -> None:
    """The updates of one rollout, as a run takes them."""
    table = _with_signal(_held_table(config, parts, rollout), config.run.seed, notes)
    _tell_overflow(run_updates(learner, table, len(rollout.groups), rollout_index=rollout.index), notes)


def _tell_overflow(done: InnerLoop, notes: list[str]) -> None:
    if done.overflowed:
        notes.append(
            f"{done.overflowed} update(s) overflowed in float16 and were not taken; the loss scale was lowered"
        )


def _judge_numerics(
    config: Config, parts: Parts, acting: TokenTable, numerics: Difference
) -> tuple[Budget, tuple[str, ...], Diagnosis | None]:
    """The budget of this machine, what of `numerics` exceeds it, and then the diagnosis; with the sampling weights."""
    pairs = [(t.prompt_ids, t.completion) for t in acting.trajectories]
    sequences = some([(prompt, completion.token_ids) for prompt, completion in pairs])
    temperature, budget_tokens = config.rollout.temperature, parts.learner.token_budget.tokens
    budget = calibrate(parts.loaded, sequences, temperature=temperature, token_budget=budget_tokens)
    exceeded = budget.exceeded(numerics)
    scoring = replace(scoring_of(config), replay=True)  # the engine's numbers are made over the kept sets
    diagnosis = diagnose(parts.loaded, records_of(pairs), scoring, budget) if exceeded else None
    return budget, exceeded, diagnosis


def some(
    sequences: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[Pair]:
    """What the numerics budget is measured on."""
    return excerpt(sequences, tokens=CALIBRATION_TOKENS)


def scoring_of(config: Config) -> Scoring:
    """How the trainer scores."""
    return Scoring.of(config.rollout.sampling(seed=0), replay=config.rollout.truncation == "replay")


def _what_if(
    config: Config, learner: Learner, acting: TokenTable, held: TokenTable, bounds: Bounds, notes: list[str]
) -> tuple[Effect, ...]:
    """The links that other settings would have, each alone."""
    view, loaded = scored_view(acting, held), learner.loaded
    plain = logprobs(learner, view, temperature=learner.temperature)
    rows: dict[str, Tensor] = {}
    if learner.temperature != 1.0:
        rows["temperature ignored (T=1)"] = temperature_ignored(learner, view, plain)
    if view.kept is not None:
        rows["truncation ignored"] = truncation_ignored(learner, view, plain)
    if not loaded.dropout_sites:
        notes.append("the model has no place for dropout")
    elif loaded.gradient_checkpointing and not loaded.dropout:
        notes.append("dropout was not tried: gradient_checkpointing recomputes layers without it")
    else:
        rows |= dropout_table(learner, view, plain, loaded.dropout or TRIED_DROPOUT, seed=config.run.seed)
    return tuple(Effect.of(name, log_ratio, acting, bounds) for name, log_ratio in rows.items())


def _movement(
    config: Config,
    parts: Parts,
    rollout: Rollout,
    acting: TokenTable,
    held: TokenTable,
    updates: int,
    bounds: Bounds,
    notes: list[str],
) -> tuple[Effect, ...]:
    """The ratio after 1 and after `updates` updates on the audited rollout, against the weights before the first.

    Every update takes all groups; a KL stop is left out, since it would end what is to be seen.
    """
    if not updates:
        return ()
    algo = replace(config.algo, num_iterations=updates, minibatches_per_rollout=1, old_logprobs="trainer", kl_stop=0.0)
    learner, view = replace(parts.learner, algo=algo), scored_view(acting, held)
    before = logprobs(learner, view, temperature=learner.temperature)
    rows: list[Effect] = []
    start = learner.updates

    def look(update: int, total: int) -> None:
        taken = learner.updates - start  # fewer than `update` where one overflowed
        if taken == 1 or update == total:
            moved = logprobs(learner, view, temperature=learner.temperature) - before
            rows.append(Effect.of(f"after {taken} update{'s' if taken > 1 else ''}", moved, acting, bounds))

    _with_signal(held, config.run.seed, notes)
    done = run_updates(learner, held, len(rollout.groups), rollout_index=rollout.index, on_update=look)
    _tell_overflow(done, notes)
    if not rows and not done.overflowed:
        notes.append("no update could be taken: every completion that carries signal is masked")
    return tuple(rows)


# ---- what counts, and what was audited ------------------------------------------------------------------------------


def _staleness_counts(config: Config, learner: Learner) -> bool:
    """Whether staleness biases: not when sampler anchors hold it in the ratio, nor when a correction weighs it."""
    return config.algo.correction == "none" and not learner.ratio_holds_movement


def _contained(config: Config, learner: Learner, chain: Chain) -> str:
    """What to say of staleness that was asked for and is taken care of; empty without any."""
    if not chain.present("staleness") or _staleness_counts(config, learner):
        return ""
    how = (
        "sampler anchors hold it in the ratio"
        if learner.ratio_holds_movement
        else f"{config.algo.correction} weighs it"
    )
    return f"staleness was asked for, and {how}"


def _subject(config: Config, parts: Parts, acting: TokenTable) -> Subject:
    ids = [list(t.completion.token_ids) for t in acting.trajectories]
    return Subject(
        model=config.model.model,
        task=config.task.task,
        dtype=str(parts.loaded.dtype).removeprefix("torch."),
        device=str(parts.loaded.device),
        sampling=describe_sampling(config),
        anchor=parts.learner.anchor,
        unit="completions" if config.algo.ratio_level == "sequence" else "tokens",
        groups=len({t.group for t in acting.trajectories}),
        completions=len(ids),
        tokens=len(acting.token_ids),
        staleness=max(acting.staleness(parts.loaded.policy_version)),
        kept_mass=float(acting.kept_mass.mean()),
        recoded=sum(_recoded(parts.loaded, line) for line in ids) / len(ids),
    )


def _recoded(loaded: LoadedModel, ids: list[int]) -> bool:
    """Whether the text of `ids`, special tokens included, encodes to other ids."""
    text = loaded.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return bool(loaded.tokenizer.encode(text, add_special_tokens=False) != ids)


def describe_sampling(config: Config) -> str:
    """`temperature 0.6, top-k 50 (truncation replay)`."""
    rollout = config.rollout
    cuts = {"top-k": (rollout.top_k, 0), "top-p": (rollout.top_p, 1.0), "min-p": (rollout.min_p, 0.0)}
    cuts["min-new-tokens"] = (rollout.min_new_tokens, 0)
    named = [f"{name} {value:g}" for name, (value, off) in cuts.items() if value != off]
    return ", ".join([f"temperature {rollout.temperature:g}", *named]) + (
        f" (truncation {rollout.truncation})" if named else ""
    )
