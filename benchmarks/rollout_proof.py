"""Tokens and logprobs of ours against transformers' own, before any speed is believed.

Two ways to the same logits round differently, so the most probable token may differ where two are within rounding. Ours
must then be as probable as the most probable one up to that rounding, in the plain forward of transformers over our own
tokens. A wrong page, position or mask is off by whole units.
"""

from typing import Any

import torch
from rollout_cases import FIRST_ID, Batch, Models
from rollout_peers import Run, generate_greedy, greedy, pages_for

from rhotrain.rollout.engine import Engine

PROMPTS = (7, 40, 64, 200)
"""Lengths: within a page, over its edge, several pages."""
NEW_TOKENS = 16


def logprob_limit(models: Models) -> float:
    """Most that a logprob may differ: float32 differs by 4e-5 at SmolLM2, half precision by the rounding of logits."""
    return 1e-3 if models.loaded.dtype == torch.float32 else 0.2


def greedy_difference(models: Models) -> str | None:
    """None when our greedy tokens are generate's or tie with the best; else where they are not."""
    generator = torch.Generator().manual_seed(0)
    vocab = models.loaded.vocab_size
    prompts = [torch.randint(FIRST_ID, vocab, (n,), generator=generator).tolist() for n in PROMPTS]
    batch = Batch(prompts, [NEW_TOKENS] * len(prompts), 1)
    mine = greedy(Engine(models.loaded, num_pages=pages_for(batch)), prompts, NEW_TOKENS)
    theirs = generate_greedy(models, prompts, NEW_TOKENS)
    for index, (prompt, ids, wanted) in enumerate(zip(prompts, mine, theirs)):
        if ids == wanted:
            continue
        logprobs_NV = plain_logprobs(models, prompt, ids)
        short = logprobs_NV.amax(1) - logprobs_NV.gather(1, torch.tensor(ids, device=logprobs_NV.device)[:, None])[:, 0]
        if not float(short.max()) <= logprob_limit(models):
            place = int(short.argmax())
            return (
                f"greedy tokens of a prompt of {PROMPTS[index]} are not generate's: token {place} is "
                f"{float(short[place]):.3g} less probable (log) than the best"
            )
    return None


def logprob_error(models: Models, batch: Batch, run: Run) -> float:
    """Largest difference between the logprobs of a run and those of transformers, over the first and last row of each
    of up to three prompts."""
    assert run.logprobs is not None
    worst = 0.0
    for p in sorted({0, len(batch.prompts) // 2, len(batch.prompts) - 1}):
        for g in sorted({0, batch.group - 1}):
            ids = run.token_ids[p][g]
            logprobs_NV = plain_logprobs(models, batch.prompts[p], ids)
            wanted = logprobs_NV.gather(1, torch.tensor(ids, device=logprobs_NV.device)[:, None])[:, 0].cpu()
            error = float((wanted - torch.tensor(run.logprobs[p][g])).abs().max())
            worst = max(worst, error) if error == error else float("inf")
    return worst


@torch.no_grad()
def plain_logprobs(models: Models, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), V]: log_softmax of the logits that transformers gives for prompt + ids, in one forward."""
    hf: Any = models.hf
    tokens = torch.tensor([[*prompt, *ids]], device=hf.device)
    logits_NV = hf(tokens, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
    return torch.log_softmax(logits_NV.float(), dim=-1)
