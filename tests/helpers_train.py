"""An independent trainer: right-padded batches, whole logits, autograd through the papers' formulas. Slow and obvious.

The model is Hugging Face's own, with its own masks. Two forwards serve two precisions:
- float32: transformers' eager attention, untouched.
- float64: eager attention rounds its softmax to float32 and RMSNorm its input, so gradients of two equal computations
  differ by 1e-7. `naive_attention` below is eager attention without the cast, and `exact_norms` makes RMSNorm stay in
  float64 (in the project's model too: the norms are not under test). Masks still come from transformers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers_model import SHARED, tiny_hf_model, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from rhotrain.model.load import LoadedModel, adopt_model
from rhotrain.rollout.completion import Completion
from rhotrain.train.advantages import group_advantages
from rhotrain.train.batching import TokenTable, Trajectory, make_table
from rhotrain.train.config import AlgoConfig, OptimConfig
from rhotrain.train.inner_loop import Learner
from rhotrain.train.optim import Optimizer

NAIVE = "rhotrain-test-naive"
Gradients = dict[str, Tensor]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models are no faster on two threads, and many times slower where another process wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def naive_policy_term(algo: AlgoConfig, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """What the papers minimise per token (rl.md section 3 lists equation numbers)."""
    ratio = torch.exp(logprobs - old)
    if algo.objective == "grpo":
        clipped = torch.clamp(ratio, 1 - algo.clip_low, 1 + algo.clip_high)
        return -torch.min(ratio * advantages, clipped * advantages)
    if algo.objective == "cispo":
        return -torch.clamp(ratio, algo.ratio_min, algo.ratio_max).detach() * advantages * logprobs
    return -advantages * logprobs


def naive_kl(kind: str, logprobs: Tensor, ref: Tensor) -> Tensor:
    """Schulman's k2 and k3 of KL(policy || reference); k3_k2grad is k3's value with k2's gradient."""
    d = ref - logprobs
    k2, k3 = d**2 / 2, torch.exp(d) - d - 1
    return {"k2": k2, "k3": k3, "k3_k2grad": k3.detach() + k2 - k2.detach()}[kind]


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
    rollout: "FakeRollout",
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
    loss = naive_policy_term(algo, padded.logprobs, old, advantages)
    if algo.beta > 0:
        loss = loss + algo.beta * naive_kl(algo.kl, padded.logprobs, ref)
    loss = loss - algo.entropy_coef * padded.entropy
    total = naive_aggregate(algo, loss.masked_fill(~mask, 0.0), mask, max_new_tokens)
    model.zero_grad(set_to_none=True)
    total.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Naive(float(total.detach()), gradients, padded)


# ---- rollouts that no engine made -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeRollout:
    """Groups of unequal completions with everything that can go wrong in them; see `fake_rollout`."""

    rows: tuple[Row, ...]
    rewards_PG: Tensor
    temperature: float
    replay: bool

    @property
    def num_groups(self) -> int:
        return len(self.rewards_PG)

    @property
    def max_length(self) -> int:
        return max(r.length for r in self.rows)

    def table(self, algo: AlgoConfig, dtype: torch.dtype, order: Sequence[int] | None = None) -> TokenTable:
        """The project's table; `order` permutes the completions within their groups and the groups among themselves
        (the trajectories keep their numbers)."""
        groups: dict[int, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        pairs = [(rows[0].prompt, [r.completion for r in rows]) for _, rows in sorted(groups.items())]
        table = make_table(pairs, replay=self.replay, mask_truncated=algo.mask_truncated, dtype=dtype)
        if order is not None:
            table = reordered(table, order)
        by_name = {(r.group, r.member): r for r in self.rows}
        ref = [x for t in table.trajectories for x in by_name[t.group, t.member].ref_logprobs]
        if algo.beta > 0:
            table.ref_logprobs = torch.tensor(ref, dtype=torch.float64).to(dtype)
        advantages = group_advantages(self.rewards_PG, scale=algo.advantage_scale, std=algo.advantage_std)
        table.set_advantages(advantages.values_PG)
        return table


def reordered(table: TokenTable, order: Sequence[int]) -> TokenTable:
    """The same trajectories in another order."""
    trajectories: tuple[Trajectory, ...] = tuple(table.trajectories[i] for i in order)
    starts = [0]
    for t in trajectories:
        starts.append(starts[-1] + t.num_tokens)
    rows = torch.cat([torch.arange(table.starts[i], table.starts[i + 1]) for i in order])
    return replace(
        table,
        trajectories=trajectories,
        starts=tuple(starts),
        token_ids=table.token_ids[rows],
        sampling_logprobs=table.sampling_logprobs[rows],
        kept_mass=table.kept_mass[rows],
        kept=None if table.kept is None else table.kept.select(rows),
        loss_mask=table.loss_mask[rows],
        advantages=table.advantages[rows],
    )


LENGTHS = ((5, 1, 9, 3), (4, 2, 6, 7), (8, 0, 3, 1), (1, 1, 1, 1), (9, 9, 2, 4), (2, 6, 1, 5))
PROMPTS = (7, 12, 1, 3, 5, 9)
NAN = math.nan
REWARDS = (
    (1.0, 0.0, 0.5, 0.0),
    (0.3, 0.3, 0.3, 0.3),  # no variance, and 0.3 is not exact in binary
    (NAN, NAN, 1.0, 0.25),  # one unscorable, one left out (error)
    (0.0, 1.0, 1.0, 1.0),  # four completions of one token
    (NAN, NAN, 2.0, NAN),  # a lone scorable one
    (1.0, -1.0, 0.0, 3.0),  # two of them truncated
)
TRUNCATED = {(0, 2), (5, 1), (5, 3), (1, 0)}
ERRORS = {(2, 1)}


def fake_rollout(
    model: Any,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    replay: bool = False,
    spread: float = 0.25,
    token_ids: int = 70,
    vocab_size: int,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    prompts: Sequence[int] = PROMPTS,
    rewards: Sequence[Sequence[float]] = REWARDS,
    truncated: set[tuple[int, int]] = TRUNCATED,
) -> FakeRollout:
    """Random prompts and completions with the policy's own logprobs (from the naive model) shifted by
    normal(0, spread): ratios inside and outside of 0.8 .. 1.2. Reference logprobs are shifted by normal(0, 0.5).

    token_ids: ids are drawn below this. Logprobs come from `model` in its own precision.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, token_ids, (count,), generator=generator).tolist())

    rows: list[Row] = []
    for p, group in enumerate(lengths):
        prompt = draw(prompts[p])
        for g, count in enumerate(group):
            ids = draw(count)
            kept = None
            if replay:
                kept = tuple(tuple(sorted({i, *draw(1 + (k * 7) % 12)})) for k, i in enumerate(ids))
            reason: Any = "error" if count == 0 else "length" if (p, g) in truncated else "stop"
            blank = (0.0,) * count
            completion = Completion(
                token_ids=ids,
                logprobs=blank,
                kept_mass=(1.0,) * count,
                finish_reason=reason,
                policy_version=0,
                sample=p * len(group) + g,
                kept_ids=kept,
                error="test" if reason == "error" else None,
            )
            rows.append(Row(p, g, prompt, completion, blank))
    real = [r for r in rows if r.length]
    with torch.no_grad():
        padded = padded_forward(model, real, temperature=temperature, vocab_size=vocab_size, replay=replay)
    shape = padded.logprobs.shape
    shift = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
    ref_shift = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
    logprobs, mass = padded.logprobs.double(), padded.kept_mass.double()
    sampled = (logprobs - shift).clamp(max=0.0) + (mass.log() if replay else 0.0)
    reference = (logprobs + ref_shift).clamp(max=0.0)
    done = iter(range(len(real)))
    filled: list[Row] = []
    for row in rows:
        if row.length:
            b = next(done)
            completion = replace(
                row.completion,
                logprobs=tuple(sampled[b, : row.length].tolist()),
                kept_mass=tuple(mass[b, : row.length].tolist()) if replay else row.completion.kept_mass,
            )
            row = replace(row, completion=completion, ref_logprobs=tuple(reference[b, : row.length].tolist()))
        filled.append(row)
    return FakeRollout(tuple(filled), torch.tensor(rewards, dtype=torch.float64), temperature, replay)


# ---- the project's side ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorder(Optimizer):
    """An optimizer that notes the gradients of every step instead of taking it."""

    loaded: LoadedModel
    taken: list[Gradients] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.loaded.parameters(), OptimConfig())

    def step(self, lr: float) -> float:
        self.taken.append(gradients_of(self.loaded))
        self.zero_grad()
        return 0.0


def gradients_of(loaded: LoadedModel) -> Gradients:
    """Copies of the gradients by parameter name."""
    return {name: p.grad.detach().clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def make_learner(
    loaded: LoadedModel,
    algo: AlgoConfig,
    *,
    optimizer: Optimizer | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 9,
    total_updates: int = 10,
    seed: int = 0,
    **optim: Any,
) -> Learner:
    """A Learner; without `optimizer` it records gradients and leaves the weights alone."""
    config = OptimConfig(**optim)
    return Learner(
        loaded=loaded,
        optimizer=optimizer or Recorder(loaded),
        algo=algo,
        optim=config,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        total_updates=total_updates,
        seed=seed,
    )


def whole_error(actual: Gradients, expected: Gradients) -> float:
    """L2 of the difference over the L2 of what was expected, over all parameters together, in float64.

    A parameter that only one of the two has counts as zeros in the other.
    """
    difference = norm = 0.0
    for name in {*actual, *expected}:
        like = expected.get(name, actual.get(name))
        assert like is not None
        a = actual.get(name, torch.zeros_like(like)).double()
        e = expected.get(name, torch.zeros_like(like)).double()
        difference += float((a - e).square().sum())
        norm += float(e.square().sum())
    assert norm > 0, "the expected gradient is 0: the comparison proves nothing"
    return math.sqrt(difference / norm)


def tensor_errors(actual: Gradients, expected: Gradients, floor: float = 1e-6) -> float:
    """Largest over the parameters of max |difference| / max |expected|. Tensors whose largest entry is below `floor`
    times the largest of all are left out: they are sums that cancel (a key bias shifts every score of a row alike)."""
    top = max(float(e.abs().max()) for e in expected.values())
    worst = 0.0
    for name, e in expected.items():
        scale = float(e.abs().max())
        if scale > floor * top:
            worst = max(worst, float((actual[name].double() - e.double()).abs().max()) / scale)
    return worst
