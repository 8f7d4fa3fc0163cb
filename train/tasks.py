"""Questions: the built-in `tiny-sums`, every reasoning-gym dataset by name, JSONL files and Hugging Face datasets.

`check_task` finds wrong names, parameters and paths without generating anything; `load_task` makes the two question
sets. They are disjoint by the question's text and free of duplicates. Which questions are held out: those of task_args
`eval_file` or `eval_split` where given (their texts are taken out of training), for tiny-sums those that its warm start
has not seen, else a seeded choice of `eval_size`
distinct texts. Where there are too few distinct questions for train_size + eval_size, training gets what is left and
goes over it again and again; but the held-out set may then take at most half of them, else it is an error that says how
many there are.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rhotrain.train.config import ConfigError, TaskConfig
from rhotrain.train.questions import (
    Pool,
    Question,
    check_args,
    hf_check,
    hf_pool,
    jsonl_check,
    jsonl_pool,
)
from rhotrain.train.reward_functions import Scorer, exact_match, final_text

TINY = "tiny-sums"


@dataclass(frozen=True)
class Task:
    """The questions of a run. `score(completion, fields)` is the task's own scorer; notes are for the log."""

    name: str
    train: list[Question]
    held_out: list[Question]
    config: TaskConfig
    score: Scorer
    notes: tuple[str, ...] = ()

    @property
    def field_names(self) -> tuple[str, ...]:
        """Fields that at least one question has, sorted."""
        return tuple(sorted({name for q in (*self.train, *self.held_out) for name in q.fields}))


@dataclass(frozen=True)
class _Source:
    """One kind of task: check(config) is cheap, pool(config, wanted) makes questions, scorer(config) judges answers
    (None: exact match with the field `answer`)."""

    check: Callable[[TaskConfig], None]
    pool: Callable[[TaskConfig, int], Pool]
    scorer: Callable[[TaskConfig], Scorer] | None = None


def check_task(config: TaskConfig) -> None:
    """Raise ConfigError if the task, its parameters or its files cannot work. Generates and reads no questions."""
    _source(config).check(config)


def load_task(config: TaskConfig, eval_size: int) -> Task:
    """Both question sets of a task, the same for the same configuration.

    eval_size: held-out questions; 0 holds out none. Raises ConfigError as `check_task` does, for broken rows (with file
    and line), and when there are too few distinct questions.
    """
    source = _source(config)
    source.check(config)
    pool = source.pool(config, config.train_size + eval_size)
    train, held_out = _split(config, pool, eval_size)
    notes = list(pool.notes)
    if pool.generated and pool.held_out is None and len(train) < config.train_size:
        notes.append(
            f"{config.task} has {len(train) + len(held_out)} distinct questions: {len(held_out)} held out, "
            f"{len(train)} for training instead of train_size={config.train_size}, used again in every epoch"
        )
    return Task(config.task, train, held_out, config, task_scorer(config) or _exact_score, tuple(notes))


def task_scorer(config: TaskConfig) -> Scorer | None:
    """The task's own scorer alone, without its questions: reasoning-gym's for its tasks, else None for exact match."""
    scorer = _source(config).scorer
    return None if scorer is None else scorer(config)


def _exact_score(completion: str, fields: Mapping[str, Any]) -> float:
    """Exact match with the field `answer`; NaN without one."""
    answer = fields.get("answer")
    return float("nan") if answer is None else exact_match(completion, answer)


def _limit(config: TaskConfig, pool: Pool) -> int | None:
    """train_size bounds generated questions; a file is taken whole."""
    return config.train_size if pool.generated else None


def _split(config: TaskConfig, pool: Pool, eval_size: int) -> tuple[list[Question], list[Question]]:
    """Train and held-out questions, disjoint by key."""
    rng = random.Random(f"{config.task_seed}/held-out")
    if pool.held_out is not None:
        chosen = sorted(rng.sample(range(len(pool.held_out)), min(eval_size, len(pool.held_out))))
        taken = {q.key for q in pool.held_out}
        train = [q for q in pool.questions if q.key not in taken]
        if not train:
            raise ConfigError(f"task: {config.task!r} does not work; every training question is also a held-out one")
        return train[: _limit(config, pool)], [pool.held_out[i] for i in chosen]
    total = len(pool.questions)
    enough = pool.generated and total >= config.train_size + eval_size
    if not enough and eval_size > total // 2:
        raise ConfigError(
            f"eval_size: {eval_size} does not work; {config.task!r} has only {total} distinct questions with these "
            f"settings and at least half of them must stay for training; set eval_size to {total // 2} or less, "
            f"or {pool.more}"
        )
    chosen_set = set(rng.sample(range(total), eval_size))
    train = [q for i, q in enumerate(pool.questions) if i not in chosen_set]
    if not train:
        raise ConfigError(f"task: {config.task!r} does not work; it has no questions")
    return train[: _limit(config, pool)], [pool.questions[i] for i in sorted(chosen_set)]


# tiny-sums


def _tiny_pool(config: TaskConfig, wanted: int) -> Pool:
    from rhotrain.model.tiny import split_questions

    train, held_out = ([Question(prompt=p, fields={"answer": a}) for p, a in part] for part in split_questions())
    return Pool(train, held_out, generated=True)


# reasoning-gym


def _gym_datasets(name: str) -> dict[str, tuple[type, type]]:
    """reasoning-gym's registry: name -> (dataset class, config class). Raises ConfigError where it is missing, with the
    `name` that was asked for."""
    try:
        import reasoning_gym  # noqa: F401  (fills the registry)
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task: {name!r} is not built in, and reasoning-gym cannot be imported ({error}); "
            "pip install 'rhotrain[tasks]'"
        ) from None
    return DATASETS


def _gym_config(config: TaskConfig, size: int) -> Any:
    """The dataset's own configuration, checked by its own rules. Raises ConfigError."""
    from dataclasses import fields as dataclass_fields

    config_class = _gym_datasets(config.task)[config.task][1]
    valid = [f.name for f in dataclass_fields(config_class) if f.name not in ("seed", "size")]
    args = dict(config.task_args)
    for name, knob in (("seed", "task_seed"), ("size", "train_size and eval_size")):
        if name in args:
            raise ConfigError(f"task_args: {name!r} does not work; the run sets it, use {knob}")
    check_args(config, valid, config.task)
    try:
        if config.task == "composite" and isinstance(args.get("datasets"), list | tuple):
            from reasoning_gym.composite import DatasetSpec

            args["datasets"] = [
                DatasetSpec(**({"weight": 1.0, "config": {}} | spec)) if isinstance(spec, dict) else spec
                for spec in args["datasets"]
            ]
        made = config_class(seed=config.task_seed, size=size, **args)
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task_args: {config.task_args!r} does not work; {config.task} refuses it: {error or type(error).__name__}"
        ) from None
    return made


def _gym_check(config: TaskConfig) -> None:
    _gym_config(config, size=max(1, config.train_size))


def _gym_dataset(config: TaskConfig, size: int) -> Any:
    return _gym_datasets(config.task)[config.task][0](config=_gym_config(config, size))


def _gym_pool(config: TaskConfig, wanted: int) -> Pool:
    """`wanted` distinct questions, or as many as turn up before a long run of duplicates.

    Items are drawn by index; with d distinct ones known, 10 d + 500 duplicates in a row mean that hardly any is left
    (the last of n questions takes n draws on average).
    """
    found: dict[str, Question] = {}
    index = duplicates = 0
    size = wanted
    while len(found) < wanted and duplicates < 10 * len(found) + 500:
        try:
            dataset = _gym_dataset(config, size)
        except ValueError as error:  # word_ladder refuses sizes that it cannot fill
            if not found:
                raise ConfigError(f"train_size: {config.train_size} does not work; {config.task}: {error}") from None
            break
        while index < size and len(found) < wanted and duplicates < 10 * len(found) + 500:
            entry = dataset[index]
            question = Question(prompt=entry["question"], fields=dict(entry))
            duplicates = duplicates + 1 if question.key in found else 0
            found.setdefault(question.key, question)
            index += 1
        size *= 2
    return Pool(list(found.values()), generated=True, more="widen its range with task_args")


def _gym_scorer(config: TaskConfig) -> Scorer:
    """reasoning-gym's `score_answer`. Some of its scorers raise ValueError on a text that they cannot read
    (int("zzz")); its convention for such an answer is 0, so that is what it scores."""
    dataset = _gym_dataset(config, size=1)

    def score(completion: str, fields: Mapping[str, Any]) -> float:
        try:
            return float(dataset.score_answer(final_text(completion), dict(fields)))
        except (ValueError, SyntaxError):
            return 0.0

    return score


_SOURCES = {
    "tiny": _Source(lambda config: check_args(config, (), TINY), _tiny_pool),
    "gym": _Source(_gym_check, _gym_pool, _gym_scorer),
    "jsonl": _Source(jsonl_check, jsonl_pool),
    "hf": _Source(hf_check, hf_pool),
}


def _source(config: TaskConfig) -> _Source:
    """Which kind of task the name means. Raises ConfigError with the nearest names."""
    name = config.task
    if name == TINY:
        return _SOURCES["tiny"]
    if name.startswith("hf:"):
        return _SOURCES["hf"]
    if name.endswith((".jsonl", ".json")) or "/" in name:
        return _SOURCES["jsonl"]
    near_tiny = get_close_matches(name, [TINY], cutoff=0.75)
    if near_tiny:
        raise ConfigError(f"task: {name!r} does not work; did you mean {TINY!r}?")
    known = _gym_datasets(name)
    if name in known:
        return _SOURCES["gym"]
    near = get_close_matches(name, list(known), n=3)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"reasoning-gym has {len(known)} datasets, for example chain_sum"
    )
    raise ConfigError(f"task: {name!r} does not work; {hint} (or {TINY}, a .jsonl file, hf:PATH)")
