"""Logprobs that somebody else reports, from a file or a server: are they what the trainer would score?

`rhotrain audit --logprobs FILE` and `--server URL`. Which reading of them fits is found out in diagnosis.py.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rhotrain.model.load import LoadedModel, LoadError, load_model
from rhotrain.model.lora import is_adapter_folder
from rhotrain.model.quantized import QuantizeBase, is_quantized
from rhotrain.rollout.probe_client import ServerKind, probe
from rhotrain.train.audit import describe_sampling, scoring_of, some
from rhotrain.train.budget import Budget, calibrate
from rhotrain.train.checkpoint import MODEL_FOLDER
from rhotrain.train.config import Config
from rhotrain.train.data import PromptData, PromptStream
from rhotrain.train.diagnosis import Diagnosis, diagnose
from rhotrain.train.record_checks import usable
from rhotrain.train.records import Record
from rhotrain.train.tasks import load_task

SERVER_SECONDS = 600.0
"""Time that a server may take for all completions."""


@dataclass(frozen=True)
class ForeignAudit:
    """Logprobs that somebody else reports. source: the file or the URL. scored: the trainer's side, in words.
    ignores: it scores the full softmax although sampling is truncated, so even a clean report means a biased gradient.
    """

    source: str
    model: str
    dtype: str
    scored: str
    ignores: bool
    completions: int
    tokens: int
    budget: Budget
    diagnosis: Diagnosis

    @property
    def verdict(self) -> str:
        if self.diagnosis.clean:
            biased = (
                "; with truncation = ignore neither is of the distribution that was sampled" if self.ignores else ""
            )
            return f"clean: these are the logprobs that the trainer scores, up to numerics ({self.seen}){biased}"
        fixes = "; ".join(f"{finding.name}: {finding.fix}" for finding in self.diagnosis.findings)
        return f"not clean: {fixes} ({self.seen})"

    @property
    def seen(self) -> str:
        """How much of the report was scored, in words."""
        diagnosis = self.diagnosis
        of = f"{diagnosis.tokens} of {self.tokens} tokens, {diagnosis.records} of {self.completions}"
        return f"scored {of} completions"

    @property
    def exit_code(self) -> int:
        """1 unless the logprobs are what the trainer scores."""
        return int(not self.diagnosis.clean)


def audit_records(
    config: Config,
    loaded: LoadedModel,
    records: Sequence[Record],
    source: str,
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> ForeignAudit:
    """Which reading of reported logprobs is what the trainer scores. weights: earlier sets to compare with, by name."""
    scored = [(r.prompt_ids, r.completion_ids) for r in usable(loaded, records).values()]
    scoring, budget = scoring_of(config), Budget.starting(loaded.dtype)
    if scored:
        temperature, tokens = config.rollout.temperature, config.optim.token_budget
        budget = calibrate(loaded, some(scored), temperature=temperature, token_budget=tokens)
    return ForeignAudit(
        source=source,
        model=config.model.model,
        dtype=str(loaded.dtype).removeprefix("torch."),
        scored=describe_sampling(config),
        ignores=scoring.truncates and not scoring.replay,
        completions=len(records),
        tokens=sum(len(r.completion_ids) for r in records),
        budget=budget,
        diagnosis=diagnose(loaded, records, scoring, budget, weights=weights),
    )


def server_records(config: Config, loaded: LoadedModel, url: str, kind: ServerKind) -> list[Record]:
    """Completions of the task's first prompts, as a server samples and reports them. Raises ServerError."""
    task, rollout = load_task(config.task, 0), config.rollout
    prompts = PromptData.encode(task.train, config.task, loaded.tokenizer).prompts
    chosen = PromptStream(prompts, seed=config.task.task_seed).take(rollout.prompts_per_step)
    completions = probe(
        url,
        [prompt.token_ids for prompt in chosen],
        rollout.sampling(seed=config.run.seed),
        n=rollout.group_size,
        timeout=SERVER_SECONDS,
        api_key=os.environ.get("RHOTRAIN_SERVER_KEY"),
        kind=kind,
        tell=lambda text: print(f"audit: {text}", file=sys.stderr, flush=True),
    )
    return [Record(c.prompt_ids, c.completion_ids, c.logprobs, c.finish_reason, c.text) for c in completions]


def earlier_weights(paths: Sequence[str], loaded: LoadedModel) -> dict[str, dict[str, Tensor]]:
    """Name -> weights of earlier checkpoints: model folders, or checkpoint folders of a run. Raises LoadError."""
    found = {}
    quantize: QuantizeBase = "nf4" if is_quantized(loaded.model) else "none"
    kind = str(loaded.dtype).removeprefix("torch.")
    for path in paths:
        inner = Path(path) / MODEL_FOLDER
        folder = str(inner) if (inner / "config.json").is_file() or is_adapter_folder(inner) else path
        try:
            earlier = load_model(folder, device=str(loaded.device), dtype=kind, quantize_base=quantize)
        except LoadError as error:
            raise LoadError(f"earlier: {error}") from None
        found[path] = dict(earlier.model.state_dict())
    return found
