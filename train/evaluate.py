"""Accuracy on held-out prompts: mean@n and pass@n, with a standard error, and a few completions to look at."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rhotrain.model.load import LoadedModel
from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train.data import EncodedPrompt
from rhotrain.train.rewards import RewardBatch, RewardSet


@dataclass(frozen=True)
class Example:
    """One completion, for people to read."""

    prompt: str
    completion: str
    score: float


@dataclass(frozen=True)
class EvalResult:
    """mean_at_n: mean score over prompts and samples. pass_at_n: share of prompts with a score of 1 among their n
    samples. standard_error: of mean_at_n, over prompts. num_prompts: prompts with at least one scorable completion."""

    mean_at_n: float
    pass_at_n: float
    standard_error: float
    num_prompts: int
    num_samples: int
    mean_length: float
    unscorable: int
    examples: tuple[Example, ...]

    def metrics(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        n = self.num_samples
        return {
            f"eval/mean@{n}": self.mean_at_n,
            f"eval/pass@{n}": self.pass_at_n,
            "eval/standard_error": self.standard_error,
            "eval/prompts": self.num_prompts,
            "eval/mean_length": self.mean_length,
            "eval/unscorable": self.unscorable,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EvalResult":
        return cls(**{**values, "examples": tuple(Example(**example) for example in values["examples"])})


def evaluate(
    loaded: LoadedModel,
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    scorer: RewardSet,
    sampling: SamplingParams,
    *,
    num_samples: int = 1,
    num_examples: int = 3,
) -> EvalResult:
    """Sample `num_samples` completions of every prompt and score them. Unscorable ones are left out and counted."""
    groups = engine.generate([p.token_ids for p in prompts], sampling, n=num_samples)
    batch = RewardBatch.make(prompts, groups, loaded.tokenizer)
    scores_PG = scorer.score(batch).total
    known = ~scores_PG.isnan()
    scored = known.any(dim=1)
    if not scored.any():
        raise ValueError("eval_metric: it scored no completion of the held-out prompts; check the function")
    per_prompt = torch.nanmean(scores_PG[scored].double(), dim=1)
    right = (torch.nan_to_num(scores_PG, nan=0.0) >= 1.0).any(dim=1)[scored]
    lengths = [len(c.token_ids) for group in groups for c in group]
    spread = float(per_prompt.std()) if len(per_prompt) > 1 else 0.0
    examples = [
        Example(prompts[p].text, batch.texts[p][0], float(scores_PG[p, 0]))
        for p in range(min(num_examples, len(prompts)))
    ]
    return EvalResult(
        mean_at_n=float(per_prompt.mean()),
        pass_at_n=float(right.double().mean()),
        standard_error=spread / math.sqrt(len(per_prompt)),
        num_prompts=int(scored.sum()),
        num_samples=num_samples,
        mean_length=sum(lengths) / max(1, len(lengths)),
        unscorable=int((~known).sum()),
        examples=tuple(examples),
    )
