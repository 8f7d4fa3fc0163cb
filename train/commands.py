"""What each command takes and does. Heavy imports stand inside the functions, so that `--help` needs none of them."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rhotrain.rollout.completion import SamplingParams
from rhotrain.train.config import Config, ConfigError, EvalConfig, ModelConfig, RewardConfig, TaskConfig
from rhotrain.train.flags import Command, Extra, Parsed, parse
from rhotrain.train.presets import describe
from rhotrain.train.settings import Layer, Source, resolve, settings, to_toml

if TYPE_CHECKING:
    from rhotrain.model.loaded import LoadedModel
    from rhotrain.rollout.engine import Engine
    from rhotrain.train.audit import Audit
    from rhotrain.train.foreign import ForeignAudit

JSON = Extra(name="json", kind=bool, default=False, help="Print one JSON object instead of text.")
MODEL_FIELDS = ("model", "dtype", "device", "fused_layers", "attention", "quantize_base")
PROMPT_FIELDS = (
    "system_prompt",
    "prompt_suffix",
    "assistant_prefill",
    "template",
    "template_args",
    "max_prompt_tokens",
)
ENGINE_FIELDS = ("kv_memory_gib", "page_size", "max_batch_tokens", "max_running", "cuda_graphs")
SAMPLING_FIELDS = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p")
STOP_FIELDS = ("stop_token_ids", "stop_strings")

TRAIN = Command(
    name="train",
    summary="Train a model with GRPO or CISPO; without any flag, the preset tiny-sums.",
    extras=(Extra(name="dry_run", kind=bool, default=False, help="Check everything, print the settings, and stop."),),
)
EVAL = Command(
    name="eval",
    summary="Accuracy on held-out prompts: mean@n and pass@n. A run's config.toml may be given as the file.",
    fields=(
        *MODEL_FIELDS,
        *("task", "task_args", *PROMPT_FIELDS, "long_prompts", "train_size", "task_seed"),
        *("reward_args", "reward_timeout", "max_new_tokens", *STOP_FIELDS, *ENGINE_FIELDS),
        *("eval_size", "eval_samples", "eval_temperature", "eval_metric", "seed", "threads"),
    ),
    extras=(Extra(name="show", kind=int, default=3, help="Completions to print."), JSON),
)
SAMPLE = Command(
    name="sample",
    summary="Print completions of prompts. Temperature 0 is greedy.",
    fields=(*MODEL_FIELDS, *PROMPT_FIELDS, *SAMPLING_FIELDS, *STOP_FIELDS, *ENGINE_FIELDS, "seed", "threads"),
    extras=(
        Extra(
            name="prompts",
            kind=tuple[str, ...],
            default=(),
            help="Texts to complete, each as one user message where the model has a chat template.",
            metavar="PROMPT ...",
            positional=True,
        ),
        Extra(name="num_samples", kind=int, default=1, help="Completions per prompt.", aliases=("-n",)),
        JSON,
    ),
    files=False,
)
AUDIT = Command(
    name="audit",
    summary="Find out whether the ratio moves for another reason than the policy. Trains nothing, writes nothing.",
    extras=(
        Extra(name="groups", kind=int, default=0, help="Prompts to sample; 0 takes 4, or what minibatches need."),
        Extra(name="updates", kind=int, default=4, help="Real updates for the rows of policy movement; 0 takes none."),
        JSON,
        Extra(name="logprobs", kind=str, default="", metavar="FILE", help="Audit any engine's: a JSONL file instead."),
        Extra(name="server", kind=str, default="", metavar="URL", help="Audit what a running server reports instead."),
        Extra(name="server_kind", kind=str, default="auto", help="auto, sglang (/generate), vllm (/v1/completions)."),
        Extra(
            name="earlier",
            kind=tuple[str, ...],
            default=(),
            help="Model or step folders that a file's or a server's logprobs may stem from.",
            metavar="[FOLDER ...]",
        ),
    ),
)
PLAN = Extra(
    name="plan",
    kind=bool,
    default=False,
    help="Print the memory plan of a run instead: `rhotrain doctor --plan` takes the flags of train.",
)
DOCTOR = Command(
    name="doctor",
    summary="Show versions, devices, and which backends will be used and why; with --plan, what a run's memory holds.",
    fields=(),
    extras=(PLAN, JSON),
    files=False,
)
DOCTOR_PLAN = Command(
    name="doctor",
    summary="Print what a run will hold in memory, without loading or starting anything; exit code 2 if it cannot fit.",
    extras=(
        PLAN,
        Extra(name="gpu_gib", kind=int, default=0, help="GiB of a GPU that is not here; 0 takes what is here."),
        JSON,
    ),
)
PRESETS = Command(
    name="presets",
    summary="List the presets, or show one with the source of every value: rhotrain presets NAME.",
    fields=(),
    extras=(
        Extra(name="names", kind=tuple[str, ...], default=(), help="Presets.", metavar="[NAME ...]", positional=True),
    ),
    files=False,
)


# --------------------------------------------------------------------------------------------- train, doctor, presets


def train(argv: Sequence[str]) -> int:
    """`rhotrain train`: 0 when the run came to its end, 130 when Ctrl-C stopped it (after its checkpoint)."""
    from rhotrain.train.checks import check_before_loading, check_flags_act

    parsed = parse(TRAIN, argv)
    config = parsed.config()
    check_flags_act(config, parsed.given)
    check_before_loading(config, parsed.layer)
    if parsed.extras["dry_run"]:
        print(to_toml(config), end="")
        return 0
    from rhotrain.train import trainer

    return 130 if trainer.train(config).stopped else 0


def doctor(argv: Sequence[str]) -> int:
    """`rhotrain doctor`: 0, or 1 when something will not work."""
    if "--plan" in argv:
        return _doctor_plan(argv)
    parsed = parse(DOCTOR, argv)
    from rhotrain.train.doctor import as_text, report

    found = report()
    print(json.dumps(found) if parsed.extras["json"] else as_text(found))
    return 1 if found["problems"] else 0


def _doctor_plan(argv: Sequence[str]) -> int:
    parsed = parse(DOCTOR_PLAN, argv)
    config, gpu_gib = parsed.config(), parsed.extras["gpu_gib"]
    if gpu_gib < 0:
        raise ConfigError(f"gpu_gib: {gpu_gib} does not work; need GiB >= 1, or 0 for this machine")
    from rhotrain.train.memory_plan import plan_for

    plan = plan_for(config, gpu_gib=gpu_gib)
    print(json.dumps(plan.as_dict()) if parsed.extras["json"] else plan.table())
    return 0


def presets(argv: Sequence[str]) -> int:
    """`rhotrain presets`."""
    names = parse(PRESETS, argv).extras["names"]
    print("\n\n".join(describe(name) for name in names) if names else describe())
    return 0


# -------------------------------------------------------------------------------------------------------------- audit


def audit(argv: Sequence[str]) -> int:
    """`rhotrain audit`: 0 when a ratio other than 1 is the policy's doing, 1 when another cause was found."""
    from rhotrain.train.checks import check_before_loading, check_flags_act

    parsed = parse(AUDIT, argv)
    config = parsed.config()
    foreign = _check_audit(config, parsed.extras)
    if foreign:
        _check_foreign(parsed)
    bounds = ("clip_low", "clip_high", "ratio_min", "ratio_max")  # the table shows both objectives'
    check_flags_act(config, {name: value for name, value in parsed.given.items() if name not in bounds})
    if not parsed.extras["logprobs"]:  # a file needs neither task nor lengths
        check_before_loading(config, parsed.layer)
    done = _audit_foreign(config, parsed) if foreign else _audit_ours(config, parsed)
    from rhotrain.train.audit_report import report

    print(report(done, as_json=parsed.extras["json"]))
    return done.exit_code


def _check_audit(config: Config, extras: dict[str, Any]) -> bool:
    """Refuse flags of the audit that contradict each other; True for an audit of foreign logprobs."""
    file, url, kind = extras["logprobs"], extras["server"], extras["server_kind"]
    if config.run.resume:
        raise ConfigError("resume: an audit resumes nothing; name the weights with model, for example a step's folder")
    if file and url:
        raise ConfigError(f"server: {url!r} does not go with logprobs {file!r}; audit one of them at a time")
    if kind not in ("auto", "sglang", "vllm"):
        raise ConfigError(f"server_kind: {kind!r} does not work; need auto, sglang or vllm")
    if kind != "auto" and not url:
        raise ConfigError(f"server_kind: {kind!r} has no effect without server; name its address")
    if extras["earlier"] and not (file or url):
        raise ConfigError(
            "earlier: has no effect without logprobs or server; our own engine samples with these weights"
        )
    return bool(file or url)


OWN_AUDIT_FLAGS = ("groups", "updates")
OWN_AUDIT_SETTINGS = (
    *("dropout", "max_staleness", "num_iterations", "minibatches_per_rollout", "old_logprobs", "correction"),
    *("objective", "ratio_level", "kl_stop", "strict_ratio"),
)


def _check_foreign(parsed: Parsed) -> None:
    """Refuse flags of our own pipeline in an audit of somebody else's logprobs: they would change nothing."""
    defaults = {extra.name: extra.default for extra in AUDIT.extras}
    unused = OWN_AUDIT_FLAGS if parsed.extras["logprobs"] else ("updates",)  # a server is asked for `groups` prompts
    named = [name for name in unused if parsed.extras[name] != defaults[name]]
    named += [name for name in OWN_AUDIT_SETTINGS if name in parsed.given]
    if named:
        value = parsed.extras.get(named[0], parsed.given.get(named[0]))
        raise ConfigError(
            f"{named[0]}: {value!r} has no effect with logprobs or server, which judge reported numbers alone; leave "
            "it out, or audit our own pipeline without them"
        )


def _audit_ours(config: Config, parsed: Parsed) -> "Audit":
    from rhotrain.train.audit import audit as run_audit
    from rhotrain.train.audit import narrowed
    from rhotrain.train.setup import build

    narrow = narrowed(config, parsed.extras["groups"])
    parts = build(narrow)
    try:
        return run_audit(narrow, parts, updates=parsed.extras["updates"], say=_progress)
    finally:
        parts.rewards.close()


def _progress(text: str) -> None:
    print(f"audit: {text}", file=sys.stderr, flush=True)


def _audit_foreign(config: Config, parsed: Parsed) -> "ForeignAudit":
    from rhotrain.train.audit import narrowed
    from rhotrain.train.foreign import audit_records, earlier_weights, server_records
    from rhotrain.train.records import read_records

    extras, narrow = parsed.extras, narrowed(config, parsed.extras["groups"])
    file, url = extras["logprobs"], extras["server"]
    records = read_records(file) if file else []
    loaded = _load(parsed.layer, config.task)
    if url:
        records = server_records(narrow, loaded, url, extras["server_kind"])
    return audit_records(narrow, loaded, records, file or url, earlier_weights(extras["earlier"], loaded))


# ------------------------------------------------------------------------------------------------------ eval, sample


def _part(layer: Layer, section: str, **changes: Any) -> dict[str, Any]:
    """The values of one section, for its dataclass."""
    return {k: v for k, v in layer.items() if settings()[k].section == section} | changes


def _value(layer: Layer, name: str) -> Any:
    return layer.get(name, settings()[name].default)


@contextmanager
def _refusals() -> Iterator[None]:
    """A ValueError of the sampling settings or of the engine at submit is a wrong input; its message is clear."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        message = str(error)
        for prefix in ("SamplingParams.", "Engine."):
            message = message.removeprefix(prefix)
        raise ConfigError(message) from error


def _load(layer: Layer, task: TaskConfig) -> "LoadedModel":
    import torch

    from rhotrain.model.load import load_model

    if _value(layer, "threads"):
        torch.set_num_threads(_value(layer, "threads"))
    model = ModelConfig(**_part(layer, "model"))
    return load_model(
        model.model,
        device=model.device,
        dtype=model.dtype,
        fused_layers=model.fused_layers,
        attention=model.attention,
        quantize_base=model.quantize_base,
        need_chat_template=task.template == "chat",
    )


def _engine(loaded: "LoadedModel", layer: Layer, lengths: Sequence[int], n: int, max_new_tokens: int) -> "Engine":
    """An engine whose pool holds what runs together, within kv_memory_gib or a quarter of the free memory."""
    from rhotrain.rollout.engine import Engine
    from rhotrain.rollout.sizing import affordable_pages, plan_pages

    page_size, running = _value(layer, "page_size"), _value(layer, "max_running")
    together = min(len(lengths), -(-running // n) + 1)
    wanted = plan_pages(loaded, [max(lengths)] * together, n, max_new_tokens, page_size)
    return Engine(
        loaded,
        num_pages=affordable_pages(loaded, wanted, page_size, int(_value(layer, "kv_memory_gib") * 2**30)),
        page_size=page_size,
        max_batch_tokens=_value(layer, "max_batch_tokens") or None,
        max_running=running,
        cuda_graphs=_value(layer, "cuda_graphs"),
    )


def _check_engine(layer: Layer) -> None:
    """The engine's sizes, before a model is loaded; RolloutConfig judges them."""
    resolve([Source(layer={name: layer[name] for name in ENGINE_FIELDS if name in layer})])


def evaluate(argv: Sequence[str]) -> int:
    """`rhotrain eval`."""
    from rhotrain.train.checks import check_positions, given_prompt_tokens
    from rhotrain.train.tasks import check_task

    parsed = parse(EVAL, argv)
    layer = parsed.layer
    task, model = TaskConfig(**_part(layer, "task")), ModelConfig(**_part(layer, "model"))
    settings_ = EvalConfig(**_part(layer, "eval", eval_every=0))
    if settings_.eval_size == 0:
        raise ConfigError("eval_size: 0 does not work; an evaluation needs at least 1 prompt")
    _check_engine(layer)
    with _refusals():
        sampling = SamplingParams(
            temperature=settings_.eval_temperature,
            **{name: _value(layer, name) for name in ("max_new_tokens", *STOP_FIELDS)},
        )
    check_task(task)
    check_positions(model.model, max_prompt_tokens=given_prompt_tokens(layer), max_new_tokens=sampling.max_new_tokens)
    return _run_evaluation(parsed, task, settings_, sampling)


def _run_evaluation(parsed: Parsed, task_config: TaskConfig, settings_: EvalConfig, sampling: SamplingParams) -> int:
    from dataclasses import asdict, replace

    from rhotrain.train.data import PromptData
    from rhotrain.train.evaluate import evaluate as measure
    from rhotrain.train.rewards import RewardSet, metric_config
    from rhotrain.train.tasks import load_task
    from rhotrain.train.trainer import EVAL_SEED_OFFSET

    layer, show = parsed.layer, parsed.extras["show"]
    task = load_task(task_config, settings_.eval_size)
    scorer = RewardSet(metric_config(RewardConfig(**_part(layer, "reward")), settings_.eval_metric), task)
    loaded = _load(layer, task_config)
    prompts = PromptData.encode(task.held_out, task_config, loaded.tokenizer).prompts
    sampling = replace(sampling, seed=_value(layer, "seed") + EVAL_SEED_OFFSET)
    n = settings_.eval_samples
    with _refusals():
        engine = _engine(loaded, layer, [len(p.token_ids) for p in prompts], n, sampling.max_new_tokens)
        result = measure(loaded, engine, prompts, scorer, sampling, num_samples=n, num_examples=show)
    pass_error = math.sqrt(result.pass_at_n * (1 - result.pass_at_n) / max(1, result.num_prompts - 1))
    if parsed.extras["json"]:
        print(json.dumps(asdict(result) | {"pass_standard_error": pass_error, "metric": settings_.eval_metric}))
        return 0
    model = _value(layer, "model")
    print(f"{model} on {task_config.task}: {result.num_prompts} held-out prompts, {n} completion(s) each, ", end="")
    print(f"temperature {settings_.eval_temperature:g}, scored by {settings_.eval_metric}")
    print(f"mean@{n} {result.mean_at_n:.4f} +- {result.standard_error:.4f}")
    print(f"pass@{n} {result.pass_at_n:.4f} +- {pass_error:.4f}")
    print(f"mean length {result.mean_length:.1f} tokens, {result.unscorable} unscorable")
    for example in result.examples:
        print(f"\n{example.prompt}\n-> {example.completion!r} (score {example.score:g})")
    return 0


def sample(argv: Sequence[str]) -> int:
    """`rhotrain sample`."""
    from rhotrain.train.checks import check_positions

    parsed = parse(SAMPLE, argv)
    layer, n = parsed.layer, parsed.extras["num_samples"]
    if not parsed.extras["prompts"]:
        raise ConfigError('prompts: none given; write for example: rhotrain sample "3+4="')
    if n < 1:
        raise ConfigError(f"num_samples: {n} does not work; need at least 1")
    task, model = TaskConfig(**_part(layer, "task")), ModelConfig(**_part(layer, "model"))
    _check_engine(layer)
    with _refusals():
        names = (*SAMPLING_FIELDS, *STOP_FIELDS)
        sampling = SamplingParams(seed=_value(layer, "seed"), **{name: _value(layer, name) for name in names})
    check_positions(model.model, max_prompt_tokens=1, max_new_tokens=sampling.max_new_tokens)
    return _run_sampling(parsed, task, sampling, n)


def _run_sampling(parsed: Parsed, task: TaskConfig, sampling: SamplingParams, n: int) -> int:
    from rhotrain.train.data import PromptData
    from rhotrain.train.questions import Question
    from rhotrain.train.rewards import RewardBatch

    loaded = _load(parsed.layer, task)
    questions = [Question(prompt=text, fields={}) for text in parsed.extras["prompts"]]
    prompts = PromptData.encode(questions, task, loaded.tokenizer).prompts
    with _refusals():
        engine = _engine(loaded, parsed.layer, [len(p.token_ids) for p in prompts], n, sampling.max_new_tokens)
        groups = engine.generate([p.token_ids for p in prompts], sampling, n=n)
    texts = RewardBatch.make(prompts, groups, loaded.tokenizer).texts
    records = [
        {
            "prompt": prompt.text,
            "completion": text,
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
        }
        for prompt, group, group_texts in zip(prompts, groups, texts)
        for completion, text in zip(group, group_texts)
    ]
    if parsed.extras["json"]:
        print(json.dumps(records))
        return 0
    for index, record in enumerate(records):
        if index % n == 0:
            print(("\n" if index else "") + f"prompt: {record['prompt']}")
        print(
            f"[{index % n + 1}] {record['completion']}  ({record['finish_reason']}, {len(record['token_ids'])} tokens)"
        )
    return 0


@dataclass(frozen=True)
class Entry:
    """A command and the function that runs it on the words behind its name; returns the exit code."""

    command: Command
    run: Callable[[Sequence[str]], int]


COMMANDS: dict[str, Entry] = {
    "train": Entry(TRAIN, train),
    "eval": Entry(EVAL, evaluate),
    "sample": Entry(SAMPLE, sample),
    "audit": Entry(AUDIT, audit),
    "doctor": Entry(DOCTOR, doctor),
    "presets": Entry(PRESETS, presets),
}
