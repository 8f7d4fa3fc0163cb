"""An independent trainer: right-padded batches, whole logits, autograd through the papers' formulas. Slow and obvious.

The model is Hugging Face's own, with its own masks. Two forwards serve two precisions:
- float32: transformers' eager attention, untouched.
- float64: eager attention rounds its softmax to float32 and RMSNorm its input, so gradients of two equal computations
  differ by 1e-7. `naive_attention` below is eager attention without the cast, and `exact_norms` makes RMSNorm stay in
  float64 (in the project's model too: the norms are not under test). Masks still come from transformers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers_model import SHARED, tiny_hf_model, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from rhotrain.model.load import LoadedModel, adopt_model
from rhotrain.rollout.completion import Completion
from rhotrain.train.config import AlgoConfig

NAIVE = "rhotrain-test-naive"
Gradients = dict[str, Tensor]


# ---- the naive model ------------------------------------------------------------------------------------------------


def naive_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Eager attention [B, H, L, D] with an additive mask [B, 1, L, L], everything in the dtype of the query."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + attention_mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAIVE, naive_attention)
AttentionMaskInterface.register(NAIVE, eager_mask)


def exact_norms(model: nn.Module) -> None:
    """Replace the forward of every RMSNorm by one that stays in the input's dtype."""

    def stay(norm: Any, gemma: bool) -> Callable[[Tensor], Tensor]:
        eps = norm.eps if gemma else norm.variance_epsilon

        def forward(x: Tensor) -> Tensor:
            scale = 1.0 + norm.weight if gemma else norm.weight
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale

        return forward

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = stay(module, name.startswith("Gemma"))  # type: ignore[method-assign]


OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "phi": {"partial_rotary_factor": 0.5},  # its head has a bias
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},  # its head is scaled
}


def other_hf_model(family: str, seed: int, dtype: torch.dtype, **changes: Any) -> Any:
    """A tiny random model of one of OTHER_FAMILIES."""
    options = {**SHARED, "initializer_range": 0.5, **OTHER_FAMILIES[family], **changes}
    config = AutoConfig.for_model(family, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def model_pair(
    family: str, dtype: torch.dtype, *, gradient_checkpointing: bool = False, seed: int = 0, **changes: Any
) -> tuple[LoadedModel, Any]:
    """(the project's model, Hugging Face's own with the same weights and its own attention)."""
    if family in OTHER_FAMILIES:
        ours, naive = (other_hf_model(family, seed, dtype, **changes) for _ in range(2))
        loaded = adopt_model(ours, tiny_tokenizer(), gradient_checkpointing=gradient_checkpointing, probe=False)
    else:
        loaded = tiny_model(family, seed, dtype, gradient_checkpointing=gradient_checkpointing, **changes)
        naive = tiny_hf_model(family, seed, dtype, **changes)
    naive.eval()  # gpt2 asks for dropout: eval turns it off
    if dtype == torch.float64:
        naive.set_attn_implementation(NAIVE)
        exact_norms(naive)
        exact_norms(loaded.model)
    else:
        naive.set_attn_implementation("eager")
    return loaded, naive


@dataclass(frozen=True)
class Row:
    """One completion as the naive trainer sees it; everything per token is a list."""

    group: int
    member: int
    prompt: tuple[int, ...]
    completion: Completion
    ref_logprobs: tuple[float, ...]

    @property
    def length(self) -> int:
        return len(self.completion.token_ids)


@dataclass(frozen=True)
class NaiveRollout:
    """The rows of P groups and their rewards [P, G] (NaN is unscorable); replay: over the recorded kept sets."""

    rows: tuple[Row, ...]
    rewards_PG: Tensor
    temperature: float
    replay: bool

    @property
    def num_groups(self) -> int:
        return len(self.rewards_PG)


@dataclass(frozen=True)
class Padded:
    """[B, R] results of a padded forward: logprobs and entropies under the (kept) tempered distribution, and the mask
    of real tokens."""

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    kept_mass: Tensor


def padded_forward(model: Any, rows: Sequence[Row], *, temperature: float, vocab_size: int, replay: bool) -> Padded:
    """log_softmax(logits / T) at the completions' tokens, from one right-padded batch."""
    longest = max(len(r.prompt) + r.length for r in rows)
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention_BL = torch.zeros_like(ids_BL)
    for b, row in enumerate(rows):
        sequence = row.prompt + row.completion.token_ids
        ids_BL[b, : len(sequence)] = torch.tensor(sequence)
        attention_BL[b, : len(sequence)] = 1
    logits_BLV = model(input_ids=ids_BL, attention_mask=attention_BL, use_cache=False).logits
    most = max(r.length for r in rows)
    mask = torch.zeros(len(rows), most, dtype=torch.bool)
    picked, targets = [], torch.zeros(len(rows), most, dtype=torch.int64)
    allowed = torch.zeros(len(rows), most, logits_BLV.shape[-1], dtype=torch.bool)
    allowed[..., :vocab_size] = True
    for b, row in enumerate(rows):
        first = len(row.prompt) - 1
        picked.append(nn.functional.pad(logits_BLV[b, first : first + row.length], (0, 0, 0, most - row.length)))
        mask[b, : row.length] = True
        targets[b, : row.length] = torch.tensor(row.completion.token_ids)
        if replay:
            assert row.completion.kept_ids is not None
            for t, kept in enumerate(row.completion.kept_ids):
                allowed[b, t] = False
                allowed[b, t, list(kept)] = True
    x = torch.stack(picked) / temperature
    full = torch.log_softmax(x[..., :vocab_size], dim=-1)
    kept_mass = (full.exp() * allowed[..., :vocab_size]).sum(-1)
    log_p = torch.log_softmax(x.masked_fill(~allowed, -math.inf), dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~allowed, 0.0)).sum(-1)
    return Padded(log_p.gather(2, targets[..., None]).squeeze(2), entropy, mask, kept_mass.detach())


# ---- the naive loss -------------------------------------------------------------------------------------------------


def naive_advantages(rewards_PG: Tensor, eps: float = 1e-4) -> Tensor:
    """(R - mean) / (std + eps) over the scorable completions of each group; 0 for the rest."""
    out = torch.zeros_like(rewards_PG)
    for p, group in enumerate(rewards_PG.tolist()):
        known = [r for r in group if not math.isnan(r)]
        if len(set(known)) < 2:
            continue
        mean = sum(known) / len(known)
        std = math.sqrt(sum((r - mean) ** 2 for r in known) / (len(known) - 1))
        for g, r in enumerate(group):
            out[p, g] = 0.0 if math.isnan(r) else (r - mean) / (std + eps)
    return out


def naive_policy_term(algo: AlgoConfig, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """What the papers minimise per token (rl.md section 3 lists equation numbers); GSPO's ratio is one per row."""
    log_ratio = logprobs - old
    if algo.ratio_level == "sequence":  # arXiv 2507.18071 eq. 7: the mean over the tokens that carry loss
        mean = log_ratio.masked_fill(~mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    ratio = torch.exp(log_ratio)
    if algo.objective == "grpo":
        clipped = torch.clamp(ratio, 1 - algo.clip_low, 1 + algo.clip_high)
        surrogate = torch.min(ratio * advantages, clipped * advantages)
        if algo.dual_clip:  # arXiv 1912.09729 eq. 5
            surrogate = torch.where(advantages < 0, torch.max(surrogate, algo.dual_clip * advantages), surrogate)
        return -surrogate
    if algo.objective == "cispo":
        return -torch.clamp(ratio, algo.ratio_min, algo.ratio_max).detach() * advantages * logprobs
    if algo.objective == "sapo":  # arXiv 2511.20347 eq. 5 and 6
        tau = torch.full_like(advantages, algo.sapo_tau_neg).masked_fill(advantages > 0, algo.sapo_tau_pos)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    assert algo.objective == "reinforce"
    return -advantages * logprobs


def naive_kl(kind: str, logprobs: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Schulman's k2 and k3 of KL(policy || reference); k3_k2grad is k3's value with k2's gradient; k3_unbiased is k3
    times the token's ratio (arXiv 2512.02556)."""
    d = ref - logprobs
    k2, k3 = d**2 / 2, torch.exp(d) - d - 1
    by_kind = {"k2": k2, "k3": k3, "k3_k2grad": k3.detach() + k2 - k2.detach()}
    return torch.exp(logprobs - old) * k3 if kind == "k3_unbiased" else by_kind[kind]


def naive_aggregate(algo: AlgoConfig, loss: Tensor, mask: Tensor, max_new_tokens: int) -> Tensor:
    """[B, R] -> scalar: DAPO's token mean, GRPO's mean of means, Dr. GRPO's constant."""
    per_row, lengths = (loss * mask).sum(1), mask.sum(1)
    carrying = int((lengths > 0).sum())
    if algo.aggregation == "token":
        return per_row.sum() / lengths.sum()
    if algo.aggregation == "sequence":
        return (per_row / lengths.clamp(min=1)).sum() / carrying
    return per_row.sum() / (carrying * max_new_tokens)


@dataclass(frozen=True)
class Naive:
    """Loss, gradient by parameter name, and [B, R] logprobs of one optimiser step."""

    loss: float
    gradients: Gradients
    padded: Padded


def naive_step(
    model: Any,
    rollout: NaiveRollout,
    algo: AlgoConfig,
    *,
    groups: Iterable[int] | None = None,
    vocab_size: int,
    max_new_tokens: int,
) -> Naive:
    """One optimiser step over the groups, everything in one padded batch; nothing is skipped, only DAPO filters."""
    chosen = range(rollout.num_groups) if groups is None else list(groups)
    advantages_PG = naive_advantages(rollout.rewards_PG)
    if algo.zero_variance == "filter":
        chosen = [p for p in chosen if bool((advantages_PG[p] != 0).any())]
    rows = [r for r in rollout.rows if r.group in set(chosen) and r.completion.finish_reason != "error"]
    padded = padded_forward(model, rows, temperature=rollout.temperature, vocab_size=vocab_size, replay=rollout.replay)
    dtype, mask = padded.logprobs.dtype, padded.mask.clone()
    advantages = torch.tensor([float(advantages_PG[r.group, r.member]) for r in rows], dtype=dtype)[:, None]
    old, ref = torch.zeros_like(padded.logprobs), torch.zeros_like(padded.logprobs)
    for b, row in enumerate(rows):
        mass = [math.log(m) if rollout.replay else 0.0 for m in row.completion.kept_mass]
        sampled = [min(0.0, lp - m) for lp, m in zip(row.completion.logprobs, mass)]
        old[b, : row.length] = torch.tensor(sampled, dtype=torch.float64).to(dtype)
        ref[b, : row.length] = torch.tensor(row.ref_logprobs, dtype=torch.float64).to(dtype)
        if algo.mask_truncated and row.completion.finish_reason == "length":
            mask[b] = False
    if algo.old_logprobs in ("fresh", "trainer"):
        old = padded.logprobs.detach()
    loss = naive_policy_term(algo, padded.logprobs, old, advantages, mask)
    if algo.beta > 0:
        loss = loss + algo.beta * naive_kl(algo.kl, padded.logprobs, ref, old)
    loss = loss - algo.entropy_coef * padded.entropy
    total = naive_aggregate(algo, loss.masked_fill(~mask, 0.0), mask, max_new_tokens)
    model.zero_grad(set_to_none=True)
    total.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Naive(float(total.detach()), gradients, padded)
