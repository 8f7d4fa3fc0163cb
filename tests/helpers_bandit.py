"""A problem so small that every completion can be written down, so that expectations are sums and not samples.

Five ids, of which id 0 ends a completion, at most three tokens: 85 completions per prompt, each with a fixed reward.
The exact policy gradient is autograd over that enumeration, through Hugging Face's own model in float64. What is
compared with it goes through the project's table, weights, packing and kernels: sampled by the engine
(`sampled_gradients`), or with every completion once, its advantage times its probability (`expected_gradient`): the
expectation itself, for every estimate that is a sum over completions.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from helpers_model import tiny_hf_model
from helpers_naive import NAIVE, exact_norms
from helpers_train import Recorder, make_learner
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rhotrain.model.load import LoadedModel, adopt_model
from rhotrain.rollout.completion import Completion, SamplingParams
from rhotrain.rollout.engine import Engine
from rhotrain.train.advantages import group_advantages
from rhotrain.train.batching import TokenTable, make_table
from rhotrain.train.config import AlgoConfig
from rhotrain.train.inner_loop import run_updates

END, NUM_IDS, LONGEST = 0, 5, 3
TEMPERATURE = 0.8
PROMPTS = ((1,), (3, 2, 4))
"""Of unequal lengths, so that a shifted position would show."""
REWARD_VALUES = (0.0, 0.25, 1.0)
"""Few values: the advantages of all groups of G can be listed by their rewards."""
BASELINE = 0.5
"""The fixed baseline: near the mean rewards (0.51 and 0.49), which keeps the variance of an estimate low."""
ROWS = 8
"""Rows of the head; those from NUM_IDS on are padding."""

Leaf = tuple[int, ...]
Sets = dict[tuple[int, Leaf], tuple[int, ...]]
"""(prompt number, ids drawn so far) -> the ids that the next token was drawn from."""


def all_leaves(num_ids: int = NUM_IDS, longest: int = LONGEST) -> tuple[Leaf, ...]:
    """Every completion: it ends with its first END or is `longest` tokens long."""
    words = range(1, num_ids)
    ended = [(*body, END) for n in range(longest) for body in itertools.product(words, repeat=n)]
    return tuple(ended) + tuple(itertools.product(words, repeat=longest))


def bandit_tokenizer(num_ids: int = NUM_IDS) -> PreTrainedTokenizerFast:
    """`num_ids` tokens; END is the end and the pad token."""
    names = ["<end>", *(f"w{i}" for i in range(1, num_ids))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


SHAPE: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}


def bandit_models(seed: int, *, num_ids: int = NUM_IDS, rows: int = ROWS, **changes: Any) -> tuple[LoadedModel, Any]:
    """(the project's model, Hugging Face's own with the same weights), float64."""
    ours, naive = (
        tiny_hf_model("llama", seed, torch.float64, vocab_size=rows, **{**SHAPE, **changes}) for _ in range(2)
    )
    loaded = adopt_model(ours, bandit_tokenizer(num_ids), probe=False)
    naive.eval()
    naive.set_attn_implementation(NAIVE)
    exact_norms(naive)
    exact_norms(loaded.model)
    assert loaded.vocab_size == num_ids and set(loaded.stop_token_ids) == {END}
    return loaded, naive


def fixed_rewards(seed: int, num_leaves: int) -> Tensor:
    """float64 [P, C], each entry one of REWARD_VALUES."""
    picks = torch.randint(len(REWARD_VALUES), (len(PROMPTS), num_leaves), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(REWARD_VALUES, dtype=torch.float64)[picks]


def flat(named: dict[str, Tensor] | Any) -> Tensor:
    """float64 [D]: a model's gradients (0 where there is none) or a dictionary's tensors, by name."""
    if not isinstance(named, dict):
        named = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.named_parameters()}
    return torch.cat([named[name].double().flatten() for name in sorted(named)])


# ---- the exact side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Policy:
    """What one set of weights does to every completion.

    logprobs_PCL: log_softmax over the real vocabulary at TEMPERATURE of each token, 0 behind a completion's end; it
    carries the graph. full_PCLV: the same for every id.
    """

    logprobs_PCL: Tensor
    full_PCLV: Tensor

    def totals_PC(self) -> Tensor:
        """Log-probability of each completion."""
        return self.logprobs_PCL.sum(2)


@dataclass(eq=False)
class Bandit:
    """The project's model, Hugging Face's with the same weights, and the rewards [P, C] of all completions."""

    loaded: LoadedModel
    naive: Any
    rewards_PC: Tensor

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return all_leaves()

    @property
    def weights(self) -> dict[str, Tensor]:
        """Copies of the current weights."""
        return {name: p.detach().clone() for name, p in self.naive.named_parameters()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Into both models; a new policy_version."""
        with torch.no_grad():
            for model in (self.loaded.model, self.naive):
                for name, p in model.named_parameters():
                    p.copy_(weights[name])
        self.loaded.policy_version += 1

    def policy(self) -> Policy:
        """By the naive model: one right-padded batch of all completions per prompt."""
        full = []
        for prompt in PROMPTS:
            ids = torch.tensor([[*prompt, *leaf, *[END] * (LONGEST - len(leaf))] for leaf in self.leaves])
            mask = torch.ones_like(ids)
            for c, leaf in enumerate(self.leaves):
                mask[c, len(prompt) + len(leaf) :] = 0
            logits = self.naive(ids, attention_mask=mask, use_cache=False).logits
            logits = logits[:, len(prompt) - 1 : -1, :NUM_IDS] / TEMPERATURE
            full.append(logits.log_softmax(-1))
        full_PCLV = torch.stack(full)
        padded = torch.tensor([[*leaf, *[END] * (LONGEST - len(leaf))] for leaf in self.leaves])
        real = torch.tensor([[t < len(leaf) for t in range(LONGEST)] for leaf in self.leaves])
        index = padded[None, :, :, None].expand(len(PROMPTS), -1, -1, 1)
        return Policy(full_PCLV.gather(3, index)[..., 0] * real, full_PCLV)

    def lengths_C(self) -> Tensor:
        """float64 [C]: tokens of each completion."""
        return torch.tensor([float(len(leaf)) for leaf in self.leaves], dtype=torch.float64)


def make_bandit() -> Bandit:
    """Always the same. Its policy is neither near uniform nor near greedy; see BASELINE for the rewards."""
    loaded, naive = bandit_models(2, initializer_range=0.45)
    return Bandit(loaded, naive, fixed_rewards(3, len(all_leaves())))


Cut = Callable[[Tensor], tuple[int, ...]]
"""Probabilities [V] -> the ids that are kept."""


def top_k_cut(k: int) -> Cut:
    """The k most probable ids."""
    return lambda probabilities: tuple(sorted(probabilities.argsort(descending=True)[:k].tolist()))


def top_p_cut(mark: float) -> Cut:
    """The smallest set of most probable ids with mass >= mark."""

    def cut(probabilities: Tensor) -> tuple[int, ...]:
        order = probabilities.argsort(descending=True)
        count = int((probabilities[order].cumsum(0) < mark).sum()) + 1
        return tuple(sorted(order[:count].tolist()))

    return cut


def kept_sets(bandit: Bandit, policy: Policy, cut: Cut) -> Sets:
    """The kept set before every token of every completion, from the naive model's probabilities."""
    sets: Sets = {}
    for p in range(len(PROMPTS)):
        for c, leaf in enumerate(bandit.leaves):
            for t in range(len(leaf)):
                if (p, leaf[:t]) not in sets:
                    sets[p, leaf[:t]] = cut(policy.full_PCLV[p, c, t].detach().exp())
    return sets


def renormalised(bandit: Bandit, policy: Policy, sets: Sets) -> Tensor:
    """[P, C, L] token logprobs over the given sets, with the graph; -inf for a token outside of its set."""
    rows = []
    for p in range(len(PROMPTS)):
        for c, leaf in enumerate(bandit.leaves):
            row = []
            for t in range(LONGEST):
                if t >= len(leaf):
                    row.append(policy.logprobs_PCL.new_zeros(()))
                    continue
                ids = sets[p, leaf[:t]]
                inside = policy.full_PCLV[p, c, t, list(ids)].logsumexp(0)
                full = policy.logprobs_PCL[p, c, t]
                row.append(full - inside if leaf[t] in ids else full.new_full((), -torch.inf))
            rows.append(torch.stack(row))
    return torch.stack(rows).view(len(PROMPTS), len(bandit.leaves), LONGEST)


def exact_gradient(bandit: Bandit, sets: Sets | None = None) -> Tensor:
    """[D], d/dtheta of the mean over prompts of sum_c pi(c) reward(c), at the current weights.

    With `sets`, pi is renormalised over them at every token, and they stay what they are while theta moves.
    """
    bandit.naive.zero_grad(set_to_none=True)
    policy = bandit.policy()
    tokens = policy.logprobs_PCL if sets is None else renormalised(bandit, policy, sets)
    value = (tokens.sum(2).exp() * bandit.rewards_PC).sum(1).mean()
    value.backward()
    gradient = flat(bandit.naive)
    bandit.naive.zero_grad(set_to_none=True)
    return gradient


def ascend(bandit: Bandit, steps: int, rate: float = 0.02) -> None:
    """Steps of plain ascent along the exact gradient: the weights of a trainer that has run ahead of its samples."""
    for _ in range(steps):
        gradient, at, weights = exact_gradient(bandit), 0, bandit.weights
        for name in sorted(weights):
            size = weights[name].numel()
            weights[name] += rate * gradient[at : at + size].view_as(weights[name])
            at += size
        bandit.set_weights(weights)


# ---- the project's side ---------------------------------------------------------------------------------------------


def step_gradient(bandit: Bandit, table: TokenTable, algo: AlgoConfig, *, temperature: float = TEMPERATURE) -> Tensor:
    """[D]: the gradient of one optimiser step as an ascent direction, that is minus what reaches the optimizer.

    Times max_new_tokens, which `constant` aggregation divides by.
    """
    recorder = Recorder(bandit.loaded)
    learner = make_learner(
        bandit.loaded,
        algo,
        optimizer=recorder,
        temperature=temperature,
        max_new_tokens=LONGEST,
        token_budget=100_000,
    )
    num_groups = 1 + max(t.group for t in table.trajectories)
    version = bandit.loaded.policy_version
    run_updates(learner, table, num_groups, rollout_index=0)
    bandit.loaded.policy_version = version  # the recorder takes no step
    assert len(recorder.taken) == 1
    return -LONGEST * flat(recorder.taken[0])


@dataclass(frozen=True, eq=False)
class Behaviour:
    """Who draws the samples. logprobs_PCL: of the distribution that is sampled (renormalised, if it is cut).
    full_PCL: over the whole vocabulary. sets: what is kept, None for everything."""

    logprobs_PCL: Tensor
    full_PCL: Tensor
    sets: Sets | None = None

    @staticmethod
    def of(bandit: Bandit, cut: Cut | None = None) -> "Behaviour":
        """The current weights."""
        with torch.no_grad():
            policy = bandit.policy()
            if cut is None:
                return Behaviour(policy.logprobs_PCL, policy.logprobs_PCL)
            sets = kept_sets(bandit, policy, cut)
            return Behaviour(renormalised(bandit, policy, sets), policy.logprobs_PCL, sets)

    def probabilities_PC(self) -> Tensor:
        """Of each completion; each row adds up to 1."""
        return self.logprobs_PCL.sum(2).exp()


def expected_gradient(
    bandit: Bandit, algo: AlgoConfig, behaviour: Behaviour, advantages_PC: Tensor, *, replay: bool = False
) -> Tensor:
    """[D]: the expectation of `step_gradient` over the rollouts of `behaviour`, at the current weights.

    One step over the table of all completions, each advantage times the completion's probability.
    advantages_PC: the expected advantage of a completion, given that it was drawn.
    """
    probabilities_PC = behaviour.probabilities_PC()
    groups, columns = [], []
    for p, prompt in enumerate(PROMPTS):
        alive = [c for c in range(len(bandit.leaves)) if probabilities_PC[p, c] > 0]
        groups.append((prompt, [_completion(bandit, behaviour, p, c) for c in alive]))
        columns.append((probabilities_PC * advantages_PC)[p, alive])
    table = make_table(groups, replay=replay, dtype=torch.float64)
    table.set_advantages(torch.nn.utils.rnn.pad_sequence(columns, batch_first=True))
    return step_gradient(bandit, table, algo) * len(table.trajectories) / len(PROMPTS)


def _completion(bandit: Bandit, behaviour: Behaviour, p: int, c: int) -> Completion:
    leaf = bandit.leaves[c]
    n = len(leaf)
    mass = (behaviour.full_PCL - behaviour.logprobs_PCL)[p, c, :n].exp()
    kept = None if behaviour.sets is None else tuple(behaviour.sets[p, leaf[:t]] for t in range(n))
    return Completion(
        token_ids=leaf,
        logprobs=tuple(behaviour.full_PCL[p, c, :n].tolist()),
        kept_mass=tuple(mass.tolist()),
        finish_reason="stop" if leaf[-1] == END else "length",
        policy_version=bandit.loaded.policy_version,
        sample=p * len(bandit.leaves) + c,
        kept_ids=kept,
    )


@dataclass(frozen=True, eq=False)
class Samples:
    """What the engine drew for M rollouts: `groups` groups of G per prompt and rollout."""

    rollouts: tuple[tuple[tuple[Leaf, list[Completion]], ...], ...]


def draw(bandit: Bandit, *, rollouts: int, groups: int = 1, group_size: int, seed: int = 0, **sampling: Any) -> Samples:
    """Sample with the current weights, through the engine."""
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=LONGEST, seed=seed, **sampling)
    engine = Engine(bandit.loaded, num_pages=8192, page_size=4, max_running=2048)
    prompts = PROMPTS * groups
    drawn = engine.generate(prompts * rollouts, params, n=group_size)
    pairs = list(zip(prompts * rollouts, drawn))
    return Samples(tuple(tuple(pairs[m : m + len(prompts)]) for m in range(0, len(pairs), len(prompts))))


Advantage = Callable[[Tensor], Tensor]
"""Rewards [P, G] -> advantages [P, G]."""


def fixed_baseline(rewards: Tensor) -> Tensor:
    return rewards - BASELINE


def sampled_gradients(
    bandit: Bandit,
    algo: AlgoConfig,
    samples: Samples,
    *,
    advantage: Advantage = fixed_baseline,
    replay: bool = False,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """[M, D]: `step_gradient` of every rollout, at the current weights."""
    number = {leaf: c for c, leaf in enumerate(bandit.leaves)}
    gradients = []
    for groups in samples.rollouts:
        table = make_table(groups, replay=replay, dtype=torch.float64)
        rewards = [
            [float(bandit.rewards_PC[PROMPTS.index(prompt), number[c.token_ids]]) for c in group]
            for prompt, group in groups
        ]
        table.set_advantages(advantage(torch.tensor(rewards, dtype=torch.float64)))
        gradients.append(step_gradient(bandit, table, algo, temperature=temperature))
    return torch.stack(gradients)


def expected_advantages(bandit: Bandit, behaviour: Behaviour, group_size: int, **options: Any) -> Tensor:
    """[P, C]: E[advantage | completion], over the G - 1 others of its group. Every group of rewards there is goes
    through `group_advantages(**options)`, which must not look across groups or at the order of the others."""
    values = torch.tensor(REWARD_VALUES, dtype=torch.float64)
    others = list(itertools.combinations_with_replacement(range(len(values)), group_size - 1))
    counts_RK = torch.tensor([[row.count(k) for k in range(len(values))] for row in others], dtype=torch.float64)
    orders_R = torch.lgamma(torch.tensor(float(group_size), dtype=torch.float64)) - torch.lgamma(counts_RK + 1).sum(1)
    known_KR = torch.stack(
        [
            group_advantages(values[torch.tensor([[k, *row] for row in others])], **options).values_PG[:, 0]
            for k in range(len(values))
        ]
    )
    columns = []
    for probabilities_C, rewards_C in zip(behaviour.probabilities_PC(), bandit.rewards_PC):
        share_K = torch.stack([probabilities_C[rewards_C == value].sum() for value in values])
        chance_R = orders_R.exp() * share_K.pow(counts_RK).prod(1)
        columns.append((known_KR @ chance_R)[(rewards_C[:, None] == values).long().argmax(1)])
    return torch.stack(columns)
