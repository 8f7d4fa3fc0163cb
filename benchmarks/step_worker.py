"""Runs whole GRPO steps with one trainer in a process of its own; prints one JSON line: seconds per step, peak memory.

    python benchmarks/step_worker.py rhotrain|trl SETTINGS_JSON

Both sides get the same model files, questions, prompts, group size, lengths, temperature, learning rate and reward,
take one update per rollout and use the same number of threads. A process each, because peak memory is per process.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rhotrain.model.sources import resolve_spec
from rhotrain.train.config import (
    AlgoConfig,
    Config,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
)

SUFFIX = "Reply with the number only."


def peak_gib() -> float:
    """Peak resident memory of this process (GPU: peak of the allocator)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def config_of(settings: dict[str, Any], folder: str) -> Config:
    """The run that both sides are compared on, in this project's words."""
    return Config(
        model=ModelConfig(model=settings["model"]),
        task=TaskConfig(
            task="chain_sum",
            task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            prompt_suffix=SUFFIX,
            train_size=200,
        ),
        reward=RewardConfig(rewards=("bare_number",)),
        rollout=RolloutConfig(
            prompts_per_step=settings["prompts"],
            group_size=settings["group"],
            max_new_tokens=settings["max_new_tokens"],
        ),
        algo=AlgoConfig(objective="grpo", zero_variance="keep"),
        optim=OptimConfig(lr=settings["lr"], token_budget=settings["token_budget"]),
        eval=EvalConfig(eval_size=0),
        run=RunConfig(steps=settings["steps"], out=folder),
    )


def run_rhotrain(settings: dict[str, Any]) -> dict[str, Any]:
    from rhotrain.train.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config_of(settings, str(Path(folder) / "run")))
        steps = [trainer.step() for _ in range(settings["steps"])]
        trainer.folder.close()
    phases = {p: statistics.median(s[f"time/{p}"] for s in steps[1:]) for p in ("rollout", "reward", "update")}
    return {
        "seconds": [s["step_time"] for s in steps],
        "phases": phases,
        "tokens": [s["completions/mean_length"] for s in steps],
    }


def run_trl(settings: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    from rhotrain.train.reward_functions import bare_number
    from rhotrain.train.tasks import load_task

    folder, _ = resolve_spec(settings["model"])
    task = load_task(config_of(settings, "unused").task, 0)
    rows = [
        {"prompt": [{"role": "user", "content": f"{q.prompt} {SUFFIX}"}], "answer": q.fields["answer"]}
        for q in task.train
    ]
    lengths: list[float] = []

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float | None]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        scores = bare_number(completions=[c[0]["content"] for c in completions], answer=answer)
        return [0.0 if s is None else s for s in scores]

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as out:
        arguments = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=settings["prompts"] * settings["group"],
            num_generations=settings["group"],
            max_completion_length=settings["max_new_tokens"],
            max_steps=settings["steps"],
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return {"seconds": times, "tokens": lengths}


def main() -> None:
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(settings["threads"])
    result = {"rhotrain": run_rhotrain, "trl": run_trl}[side](settings)
    print(json.dumps({"side": side, "peak_gib": peak_gib(), **result}))


if __name__ == "__main__":
    main()
