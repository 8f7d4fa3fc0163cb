"""What a run is made of, built once and in an order that finds mistakes before anything expensive."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rhotrain.model.load import LoadedModel, load_model
from rhotrain.model.lora import lora_of
from rhotrain.model.offload import ParkedModel
from rhotrain.rollout.engine import Engine
from rhotrain.rollout.sizing import affordable_pages, page_bytes, plan_pages
from rhotrain.rollout.threads import check_threads, decode_threads
from rhotrain.train.checks import check_quantized
from rhotrain.train.config import Config, ConfigError
from rhotrain.train.data import EncodedPrompt, PromptData, PromptStream
from rhotrain.train.footprint import resolve
from rhotrain.train.inner_loop import Learner
from rhotrain.train.loss_scale import LossScale
from rhotrain.train.memory_plan import MemoryPlan, plan_of_run
from rhotrain.train.optim import Optimizer
from rhotrain.train.rewards import RewardSet, metric_config
from rhotrain.train.tasks import Task, load_task

Choices = dict[str, Any]
"""What was measured or looked up at start; checkpoints keep it, since a new choice could change the order of a sum."""


@dataclass
class Parts:
    """Everything a run works with. reference: None unless a KL is asked for. scorer: None without an evaluation. plan:
    of the memory, None where there is no need for one."""

    loaded: LoadedModel
    reference: LoadedModel | None
    engine: Engine
    learner: Learner
    stream: PromptStream
    held_out: tuple[EncodedPrompt, ...]
    rewards: RewardSet
    scorer: RewardSet | None
    choices: Choices
    plan: MemoryPlan | None
    notes: tuple[str, ...]


def build(config: Config, *, checkpoint_model: Path | None = None, choices: Choices | None = None) -> Parts:
    """The parts of a run; a resumed one takes weights from `checkpoint_model` and `choices` from the checkpoint.

    Raises ConfigError (settings), LoadError (model) and whatever the task says of its own parameters.
    """
    check_quantized(config)
    chosen: Choices = dict(choices or {"threads": config.run.threads or available_cores()})
    for name, asked in (("threads", config.run.threads), ("decode_threads", config.rollout.decode_threads)):
        try:
            check_threads(name, asked)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    torch.set_num_threads(int(chosen["threads"]))
    torch.manual_seed(config.run.seed)  # dropout's masks come from torch's generator, when a user asks for dropout
    task = load_task(config.task, config.eval.eval_size)
    rewards = RewardSet(config.reward, task, max_new_tokens=config.rollout.max_new_tokens)
    scorer = _scorer(config, task)
    loaded = _model(config, chosen, checkpoint_model)
    prompts = PromptData.encode(task.train, config.task, loaded.tokenizer)
    held_out = PromptData.encode(task.held_out, config.task, loaded.tokenizer)
    lengths = [len(p.token_ids) for p in (*prompts.prompts, *held_out.prompts)]
    _check_model(config, loaded, max(lengths))
    plan, plan_note = plan_of_run(config, loaded, max(lengths))
    learner = Learner(
        loaded=loaded,
        optimizer=Optimizer(loaded.parameters(), config.optim, LossScale.of(loaded.dtype)),
        algo=config.algo,
        optim=config.optim,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        total_updates=config.total_updates,
        seed=config.run.seed,
        strict_ratio=config.run.strict_ratio,
    )
    reference = _reference(config, loaded, learner, chosen)
    engine = _engine(config, loaded, chosen, max(lengths))
    if "token_budget" in chosen:
        learner.token_budget.tokens = int(chosen["token_budget"])
    budget_note = resolve(learner, engine, config, max(lengths))
    chosen["token_budget"] = learner.token_budget.tokens
    return Parts(
        loaded=loaded,
        reference=reference,
        engine=engine,
        learner=learner,
        stream=PromptStream(prompts.prompts, seed=config.task.task_seed),
        held_out=held_out.prompts,
        rewards=rewards,
        scorer=scorer,
        choices=chosen,
        plan=plan,
        notes=tuple(filter(None, (*loaded.notes, *task.notes, prompts.note, held_out.note, plan_note, budget_note))),
    )


def _scorer(config: Config, task: Task) -> RewardSet | None:
    """The evaluation's metric; None when nothing is evaluated. Raises ConfigError that names eval_metric."""
    if config.eval.eval_size == 0:
        return None
    try:
        return RewardSet(metric_config(config.reward, config.eval.eval_metric), task)
    except ConfigError as error:
        raise ConfigError(f"eval_metric: {str(error).removeprefix('rewards: ')}") from None


def available_cores() -> int:
    """Cores that this process may use; a container or taskset may grant fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _model(config: Config, choices: Choices, checkpoint_model: Path | None) -> LoadedModel:
    model = config.model
    loaded = load_model(
        config.model.model if checkpoint_model is None else str(checkpoint_model),
        device=choices.get("device", config.model.device),
        dtype=choices.get("dtype", config.model.dtype),
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload_activations=config.model.offload_activations,
        dropout=config.model.dropout,
        fused_layers=choices.get("fused_layers", config.model.fused_layers),
        attention=config.model.attention,
        lora=lora_of(model.lora_rank, model.lora_alpha, model.lora_targets) if checkpoint_model is None else None,
        quantize_base=model.quantize_base,
        need_chat_template=config.task.template == "chat",
    )
    choices.setdefault("fused_layers", loaded.fused_layers)
    choices.setdefault("device", str(loaded.device))
    choices.setdefault("dtype", str(loaded.dtype).removeprefix("torch."))
    return loaded


def _check_offloads(config: Config, loaded: LoadedModel) -> None:
    """What moves memory from a GPU is refused without one. Raises ConfigError."""
    if loaded.device.type != "cpu":
        return
    asked = {
        "optimizer": config.optim.optimizer if config.optim.optimizer == "adamw_offload" else None,
        "offload_activations": config.model.offload_activations or None,
        "offload_reference": config.model.offload_reference or None,
    }
    for name, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{name}: {value} does not work here; the model runs on the CPU, so there is no GPU memory to save; "
                "leave it out"
            )


def _check_model(config: Config, loaded: LoadedModel, longest_prompt: int) -> None:
    """What can only be judged with model and prompts at hand. Raises ConfigError."""
    _check_offloads(config, loaded)
    config.check_anchor(exact=loaded.full_precision)
    outside = [i for i in config.rollout.stop_token_ids if i >= loaded.vocab_size]
    if outside:
        raise ConfigError(
            f"stop_token_ids: {outside} do not work; the model's vocabulary has {loaded.vocab_size} ids, remove them"
        )
    total = longest_prompt + config.rollout.max_new_tokens
    if loaded.max_positions is not None and total > loaded.max_positions:
        raise ConfigError(
            f"max_new_tokens: {config.rollout.max_new_tokens} after a prompt of {longest_prompt} tokens makes {total} "
            f"positions, but the model has {loaded.max_positions}; lower max_new_tokens or max_prompt_tokens"
        )


def _reference(config: Config, loaded: LoadedModel, learner: Learner, choices: Choices) -> LoadedModel | None:
    if not learner.objective.uses_reference and config.algo.kl_in_reward == 0.0:
        return None
    if loaded.adapter is not None and not config.model.ref_model:
        return loaded.base()
    spec = config.model.ref_model or config.model.model
    reference = load_model(
        spec,
        device=choices["device"],
        dtype=choices["dtype"],
        fused_layers=choices["fused_layers"],
        attention=config.model.attention,
        quantize_base=config.model.quantize_base,
    )
    if reference.vocab_size != loaded.vocab_size:
        raise ConfigError(
            f"ref_model: {spec!r} has {reference.vocab_size} token ids, the model {loaded.vocab_size}; "
            "the reference must share the model's tokenizer"
        )
    reference.model.requires_grad_(False)
    if config.model.offload_reference:
        reference.parked = ParkedModel(reference.model, reference.device)
    return reference


def _engine(config: Config, loaded: LoadedModel, choices: Choices, longest_prompt: int) -> Engine:
    rollout = config.rollout
    if "num_pages" not in choices and rollout.kv_memory_gib == 0.0:
        choices["num_pages"] = _num_pages(config, loaded, longest_prompt)
    memory = int(rollout.kv_memory_gib * 2**30)
    one = plan_pages(loaded, [longest_prompt], 1, rollout.max_new_tokens, rollout.page_size)
    if memory and memory < one * page_bytes(loaded, rollout.page_size):
        need_gib = one * page_bytes(loaded, rollout.page_size) / 2**30
        raise ConfigError(
            f"kv_memory_gib: {rollout.kv_memory_gib} does not work; one prompt and its completion take {need_gib:.3g} "
            "GiB; raise it, or set it to 0 to let it be chosen"
        )
    return Engine(
        loaded,
        num_pages=choices.get("num_pages"),
        kv_memory_bytes=memory or None,
        page_size=rollout.page_size,
        max_batch_tokens=rollout.max_batch_tokens or None,
        max_running=rollout.max_running,
        cuda_graphs=rollout.cuda_graphs,
        threads=_decode_threads(config, choices),
    )


def _decode_threads(config: Config, choices: Choices) -> int:
    """Resolved once per run and kept: another number of threads rounds differently."""
    if "decode_threads" not in choices:
        asked, threads = config.rollout.decode_threads, int(choices["threads"])
        choices["decode_threads"] = decode_threads(threads) if asked < 0 else asked or threads
    return int(choices["decode_threads"])


def _num_pages(config: Config, loaded: LoadedModel, longest_prompt: int) -> int:
    """Pages with which neither a rollout nor an evaluation is preempted, within a quarter of the free memory."""
    rollout, evaluation = config.rollout, config.eval
    crowds = [
        (rollout.prompts_per_step * min(1 + config.rollouts_ahead, max(1, config.run.steps)), rollout.group_size),
        (min(evaluation.eval_size, rollout.max_running), evaluation.eval_samples),
    ]
    wanted = [
        plan_pages(loaded, [longest_prompt] * prompts, n, rollout.max_new_tokens, rollout.page_size)
        for prompts, n in crowds
        if prompts
    ]
    return affordable_pages(loaded, max(wanted), rollout.page_size)
