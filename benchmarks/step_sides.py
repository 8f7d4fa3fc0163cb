"""The three trainers that are compared: ours, TRL's GRPOTrainer, and a plain PyTorch loop.

All take one update per rollout with AdamW at a constant rate, gradients clipped to norm 1, no KL, the loss averaged
over the tokens of the rollout, and sample at temperature 1 with the same number of new tokens in every row.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step_reward import even
from step_worker import Job, Record, save_gradient
from torch import Tensor

CLIP = 0.2


def padded(job: Job, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """(prompt ids [R, T], completion ids [R, N], advantages [R]) of the fixed rollout; every row is of full length."""
    fixed = job.fixed()
    prompts = [ids for ids in fixed["prompts"] for _ in range(job.case.group)]
    completions = [ids for group in fixed["completions"] for ids in group]
    advantages = [a for group in fixed["advantages"] for a in group]
    return (
        torch.tensor(prompts[rows], device=job.device),
        torch.tensor(completions[rows], device=job.device),
        torch.tensor(advantages[rows], device=job.device),
    )


def slices(job: Job) -> list[slice]:
    """Rows of the peers' micro-batches."""
    return [slice(k, k + job.case.peer_rows) for k in range(0, job.case.rows, job.case.peer_rows)]


def time_updates(job: Job, record: Record, update: Callable[[], None]) -> None:
    """One that is not timed, then `job.updates`."""
    update()
    for _ in range(job.updates):
        with record.phase("update alone"):
            update()
    record.update = record.phases.pop("update alone", [])


# ---- ours -----------------------------------------------------------------------------------------------------------


def run_rhotrain(job: Job, record: Record) -> None:
    from rollout_limits import ModelShape

    from rhotrain.model.load import load_model
    from rhotrain.rollout.completion import Completion
    from rhotrain.train.batching import make_table
    from rhotrain.train.inner_loop import Learner, run_updates
    from rhotrain.train.optim import Optimizer

    case = job.case
    with tempfile.TemporaryDirectory() as folder:
        config = our_config(job, folder)
        if case.whole:
            from rhotrain.train.trainer import Trainer

            trainer = Trainer(config)
            loaded, learner = trainer.parts.loaded, trainer.parts.learner
            loaded.stop_token_ids = ()
        else:
            loaded = load_model(job.model, gradient_checkpointing=case.checkpointing, fused_layers=job.fused_layers)
            learner = Learner(
                loaded=loaded,
                optimizer=Optimizer(loaded.parameters(), config.optim),
                algo=config.algo,
                optim=config.optim,
                temperature=1.0,
                max_new_tokens=case.new_tokens,
                total_updates=1,
                seed=0,
            )
        record.shape = {name: getattr(ModelShape.of(loaded), name) for name in ("body", "head", "score")}
        fixed = job.fixed()
        groups = [
            (
                tuple(prompt),
                [
                    Completion(
                        token_ids=tuple(ids),
                        logprobs=(-1.0,) * len(ids),
                        kept_mass=(1.0,) * len(ids),
                        finish_reason="length",
                        policy_version=0,
                        sample=p * case.group + g,
                    )
                    for g, ids in enumerate(group)
                ],
            )
            for p, (prompt, group) in enumerate(zip(fixed["prompts"], fixed["completions"]))
        ]

        def update() -> None:
            table = make_table(groups, dtype=torch.promote_types(loaded.dtype, torch.float32))
            table.set_advantages(torch.tensor(fixed["advantages"], dtype=torch.float64))
            run_updates(learner, table, case.prompts, rollout_index=0)

        take = learner.optimizer.step

        def note(lr: float) -> float:
            record.parity["gradient_norm"] = save_gradient(gradients_in(learner), job.gradient)
            learner.optimizer.zero_grad()
            return 0.0

        backward = learner.backward

        def keep_loss(*args: Any) -> Any:
            results = backward(*args)
            record.parity["loss"] = results.loss
            return results

        learner.optimizer.step, learner.backward = note, keep_loss  # type: ignore[method-assign, assignment]
        update()
        learner.optimizer.step, learner.backward = take, backward  # type: ignore[method-assign]
        learner.updates = 0
        time_updates(job, record, update)
        if case.whole:
            our_steps(job, record, trainer)
            trainer.folder.close()


def gradients_in(learner: Any) -> torch.nn.Module:
    """The model with the optimiser's accumulated gradients (of the float32 masters, where there are some) in place."""
    for parameter, master in zip(learner.optimizer.parameters, learner.optimizer.masters):
        if parameter is not master and master.grad is not None:
            parameter.grad = master.grad.to(parameter.dtype)
    model: torch.nn.Module = learner.loaded.model
    return model


def our_config(job: Job, folder: str) -> Any:
    from rhotrain.train import config as c

    case = job.case
    return c.Config(
        model=c.ModelConfig(model=job.model, gradient_checkpointing=case.checkpointing, fused_layers=job.fused_layers),
        task=c.TaskConfig(task=job.prompts, template="raw", max_prompt_tokens=case.prompt_tokens),
        reward=c.RewardConfig(rewards=(f"{Path(__file__).with_name('step_reward.py')}:even",)),
        rollout=c.RolloutConfig(
            prompts_per_step=case.prompts, group_size=max(2, case.group), max_new_tokens=case.new_tokens
        ),
        algo=c.AlgoConfig(objective="grpo", zero_variance="keep", aggregation="token", old_logprobs="fresh"),
        optim=c.OptimConfig(lr=job.lr, token_budget=case.budget),
        eval=c.EvalConfig(eval_size=0),
        run=c.RunConfig(steps=1 + job.steps, out=str(Path(folder) / "run"), threads=job.threads),
    )


def our_steps(job: Job, record: Record, trainer: Any) -> None:
    from rhotrain.train import trainer as module

    class Clock(module.Clock):
        """Tells the record too."""

        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            with record.phase("update" if name == "update" else "rollout"), super().phase(name):
                yield

    plain, module.Clock = module.Clock, Clock  # type: ignore[misc]
    try:
        for k in range(1 + job.steps):
            start = time.perf_counter()
            metrics = trainer.step()
            seconds = time.perf_counter() - start
            if k == 0:
                record.phases.clear()
                continue
            record.steps.append(seconds)
            record.tokens["completion"] = metrics["completions/mean_length"]
    finally:
        module.Clock = plain  # type: ignore[misc]
    # Two spans, rollout and reward, make one phase of a step.
    rollouts = record.phases["rollout"]
    per_step = len(rollouts) // job.steps
    record.phases["rollout"] = [sum(rollouts[k : k + per_step]) for k in range(0, len(rollouts), per_step)]
    record.tokens["prompt"] = statistics.fmean(len(p.token_ids) for p in trainer.parts.stream.prompts)


# ---- a plain loop ---------------------------------------------------------------------------------------------------


def run_plain(job: Job, record: Record) -> None:
    """transformers' generate, full logits over a padded batch, autograd, AdamW: what a careful user writes by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case = job.case
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype).to(job.device).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.0)

    def backward(prompts: Tensor, completions: Tensor, advantages: Tensor, total: int) -> float:
        ids = torch.cat([prompts, completions], 1)
        logits = model(input_ids=ids, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        weighted = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
        loss = -weighted.sum() / total
        loss.backward()
        return float(loss.detach())

    def gradients(batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
        return sum(backward(*batch, case.loss_tokens) for batch in batches)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    fixed = [padded(job, rows) for rows in slices(job)]
    record.parity["loss"] = gradients(fixed)
    record.parity["gradient_norm"] = save_gradient(model, job.gradient)
    optimizer.zero_grad()

    def update() -> None:
        gradients(fixed)
        step()

    time_updates(job, record, update)
    if not case.whole:
        return
    import json

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    texts = [json.loads(line)["prompt"] for line in Path(job.prompts).read_text().splitlines()]
    record.tokens["prompt"] = statistics.fmean(len(tokenizer.encode(text)) for text in texts)
    for k in range(1 + job.steps):
        start = time.perf_counter()
        with record.phase("rollout"):
            first = k * case.prompts
            chosen = [texts[(first + p) % len(texts)] for p in range(case.prompts) for _ in range(case.group)]
            prompts = torch.tensor([tokenizer.encode(text) for text in chosen], device=job.device)
            model.eval()
            with torch.no_grad():
                output = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    min_new_tokens=case.new_tokens,
                    max_new_tokens=case.new_tokens,
                    pad_token_id=0,
                )
            model.train()
            completions = output[:, prompts.shape[1] :]
            rewards = torch.tensor(even(completions.tolist()), device=job.device).view(case.prompts, case.group)
            centred = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        with record.phase("update"):
            advantages = centred.flatten()
            gradients([(prompts[r], completions[r], advantages[r]) for r in slices(job)])
            step()
        record.tokens["completion"] = float(completions.shape[1])
        if k == 0:
            record.phases.clear()
        else:
            record.steps.append(time.perf_counter() - start)


# ---- TRL ------------------------------------------------------------------------------------------------------------


def run_trl(job: Job, record: Record) -> None:
    """GRPOTrainer with its default size of micro-batches. Parity and the update alone go through `_compute_loss`."""
    import json

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    case = job.case
    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    lengths: list[float] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        return even(completion_ids)

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.monotonic()
            self.rollout_before = sum(record.phases.get("rollout", []))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            end = time.monotonic()
            times.append(end - self.start)
            rollout = sum(record.phases.get("rollout", [])) - self.rollout_before
            record.phases.setdefault("update", []).append(end - self.start - rollout)
            record.spans.append(("update", self.start + rollout, end))
            if torch.cuda.is_available():
                record.peaks["update"] = max(record.peaks.get("update", 0), torch.cuda.max_memory_allocated())

    accumulation = max(1, case.rows // case.peer_rows)
    with tempfile.TemporaryDirectory() as out:
        arguments = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=max(2, case.peer_rows),
            gradient_accumulation_steps=accumulation,
            num_generations=max(2, case.group),
            max_completion_length=case.new_tokens,
            generation_kwargs={"min_new_tokens": case.new_tokens},
            max_steps=1 + job.steps,
            learning_rate=job.lr,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=case.checkpointing,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer: Any = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
            callbacks=[Clock()],
        )
        trl_updates(job, record, trainer, accumulation)
        if not case.whole:
            return
        generate = trainer._generate_and_score_completions

        def timed(*args: Any, **options: Any) -> Any:
            with record.phase("rollout"):
                return generate(*args, **options)

        trainer._generate_and_score_completions = timed
        trainer.train()
        record.steps = times[1:]
        record.phases = {name: seconds[1:] for name, seconds in record.phases.items()}
        tokenizer = trainer.processing_class
        record.tokens = {
            "completion": lengths[-1],
            "prompt": statistics.fmean(len(tokenizer.encode(row["prompt"])) for row in rows),
        }


def trl_updates(job: Job, record: Record, trainer: Any, accumulation: int) -> None:
    """Parity and the update alone, on the fixed rollout."""
    model = trainer.model.to(job.device).train()
    trainer.current_gradient_accumulation_steps = accumulation
    fixed = [padded(job, r) for r in slices(job)]

    def gradients() -> float:
        total = 0.0
        for prompts, completions, advantages in fixed:
            inputs = {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completions,
                "completion_mask": torch.ones_like(completions),
                "advantages": advantages,
                "num_items_in_batch": torch.tensor(job.case.loss_tokens, device=job.device),
            }
            loss = trainer._compute_loss(model, inputs)
            loss.backward()
            total += float(loss.detach())
        return total

    record.parity["loss"] = gradients()
    record.parity["gradient_norm"] = save_gradient(model, job.gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.0)
    optimizer.zero_grad()

    def update() -> None:
        gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    time_updates(job, record, update)


def run_trl_whole(job: Job, record: Record) -> None:
    """With the whole rollout as one micro-batch."""
    run_trl(replace(job, case=replace(job.case, peer_rows=job.case.rows)), record)


SIDES: dict[str, Callable[[Job, Record], None]] = {
    "rhotrain": run_rhotrain,
    "plain": run_plain,
    "trl": run_trl,
    "trl-whole": run_trl_whole,
}
