"""What each common choice does to the expected gradient, exactly: the tables of docs/biases.md.

    PYTHONPATH=tests python -m scripts.measure_bias

The problem is that of tests/helpers_bandit.py: every completion can be written down, so an expectation is a sum, and no
number here has a sampling error. Deterministic: the same digits on every machine, up to rounding in float64.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from helpers_bandit import (
    LONGEST,
    PROMPTS,
    REWARD_VALUES,
    Bandit,
    Behaviour,
    ascend,
    exact_gradient,
    expected_advantages,
    expected_gradient,
    fixed_baseline,
    make_bandit,
    top_k_cut,
    top_p_cut,
)
from torch import Tensor

from rhotrain.train.advantages import group_advantages
from rhotrain.train.config import AlgoConfig

UNBIASED = AlgoConfig(objective="grpo", old_logprobs="fresh", advantage_scale="none", aggregation="constant")


@dataclass(frozen=True, eq=False)
class Bias:
    """An estimate's expectation beside the exact policy gradient, both [D]. cut: share of the tokens that a bound acts
    on, None where there is no bound."""

    name: str
    expected_D: Tensor
    exact_D: Tensor
    cut: float | None = None

    @property
    def scale(self) -> float:
        """The factor by which the exact gradient fits the expectation best: a learning rate in disguise."""
        return float(self.expected_D @ self.exact_D / self.exact_D.square().sum())

    @property
    def bias(self) -> float:
        """L2 of expectation - exact over the L2 of the exact gradient."""
        return float((self.expected_D - self.exact_D).norm() / self.exact_D.norm())

    @property
    def cosine(self) -> float:
        """Between expectation and exact gradient."""
        return float(torch.nn.functional.cosine_similarity(self.expected_D, self.exact_D, dim=0))

    def line(self) -> str:
        """A row of the table. Adding 0 turns a rounded -0.000 into 0.000."""
        numbers = [f"{round(x, 3) + 0.0:.3f}" for x in (self.scale, self.bias, self.cosine)]
        cut = [] if self.cut is None else [f"{100 * self.cut:.1f} %"]
        return "| " + " | ".join([self.name, *numbers, *cut]) + " |"


def as_table(biases: Sequence[Bias]) -> str:
    """Markdown."""
    names = ["estimate", "scale", "bias", "cosine", *([] if biases[0].cut is None else ["tokens cut"])]
    return "\n".join(["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *(b.line() for b in biases)])


# ---- on-policy ------------------------------------------------------------------------------------------------------


def mean_length(bandit: Bandit, behaviour: Behaviour) -> float:
    """Tokens per completion, over prompts and completions."""
    return float((behaviour.probabilities_PC() * bandit.lengths_C()).sum(1).mean())


def _shares(values_C: Tensor, probabilities_C: Tensor, at: tuple[float, ...]) -> Tensor:
    """[K]: the probability of each value in `at`."""
    return torch.stack([probabilities_C[values_C == value].sum() for value in at])


def token_factors(bandit: Bandit, behaviour: Behaviour, group_size: int) -> Tensor:
    """[P, C]: E[1 / tokens of the step | completion], times what would make it 1 if all steps had the mean number.

    The step holds one group per prompt; the lengths of the other completions are convolved.
    """
    lengths = tuple(float(n) for n in range(1, LONGEST + 1))
    shares_PK = torch.stack([_shares(bandit.lengths_C(), q, lengths) for q in behaviour.probabilities_PC()])
    mean = mean_length(bandit, behaviour) * group_size * len(PROMPTS)
    rows = []
    for p in range(len(PROMPTS)):
        others = [q for q in range(len(PROMPTS)) for _ in range(group_size - (q == p))]
        total = torch.ones(1, dtype=torch.float64)  # distribution of the others' tokens, from len(others) on
        for q in others:
            total = torch.stack([total[i] * shares_PK[q] for i in range(len(total))]).flip(1)
            total = torch.stack([total.diagonal(k).sum() for k in range(total.shape[1] - 1, -len(total), -1)])
        tokens = torch.arange(len(total), dtype=torch.float64) + len(others)
        inverse = {n: float((total / (tokens + n)).sum()) for n in lengths}
        rows.append([mean * inverse[float(n)] for n in bandit.lengths_C()])
    return torch.tensor(rows, dtype=torch.float64)


def _with_counts(size: int, share_K: Tensor) -> list[tuple[tuple[int, ...], float]]:
    """Every multiset of `size` reward numbers, and its probability."""
    found = []
    for pick in itertools.combinations_with_replacement(range(len(share_K)), size):
        counts = [pick.count(k) for k in range(len(share_K))]
        orders = math.factorial(size) / math.prod(math.factorial(n) for n in counts)
        found.append((pick, orders * math.prod(float(share_K[k]) ** n for k, n in enumerate(counts))))
    return found


def batch_advantages(bandit: Bandit, behaviour: Behaviour, group_size: int) -> Tensor:
    """[P, C]: E[advantage | completion] with the std of all rewards of a step, two groups of G, as scale."""
    values = torch.tensor(REWARD_VALUES, dtype=torch.float64)
    shares = [_shares(r, q, REWARD_VALUES) for r, q in zip(bandit.rewards_PC, behaviour.probabilities_PC())]
    rows = []
    for own, other in ((0, 1), (1, 0)):
        known = [0.0] * len(values)
        mates, others = _with_counts(group_size - 1, shares[own]), _with_counts(group_size, shares[other])
        for first, (mate, chance), (rest, other_chance) in itertools.product(range(len(values)), mates, others):
            index_PG = torch.tensor([[first, *mate], rest])
            advantages_PG = group_advantages(values[index_PG], scale="batch").values_PG
            known[first] += float(advantages_PG[0, 0]) * chance * other_chance
        rows.append([known[REWARD_VALUES.index(float(r))] for r in bandit.rewards_PC[own]])
    return torch.tensor(rows, dtype=torch.float64)


def on_policy(bandit: Bandit) -> Iterator[Bias]:
    """Fresh samples, nothing truncated: baselines, scales, denominators."""
    behaviour, exact_D = Behaviour.of(bandit), exact_gradient(bandit)
    fixed_PC, per_token = fixed_baseline(bandit.rewards_PC), mean_length(bandit, behaviour) / LONGEST

    def bias(name: str, advantages_PC: Tensor, unit: float = 1.0, algo: AlgoConfig = UNBIASED) -> Bias:
        return Bias(name, unit * expected_gradient(bandit, algo, behaviour, advantages_PC), exact_D)

    yield bias("fixed baseline, no scaling, constant", fixed_PC)
    for size in (2, 4, 8):
        yield bias(f"group mean, G = {size}", expected_advantages(bandit, behaviour, size, scale="none"))
    for size in (2, 4, 8):
        scaled_PC = expected_advantages(bandit, behaviour, size, scale="group")
        yield bias(f"group mean and group std, G = {size}", scaled_PC)
    yield bias("group means and batch std, 2 x 4", batch_advantages(bandit, behaviour, 4))
    sequence = replace(UNBIASED, aggregation="sequence")
    yield bias("aggregation sequence", fixed_PC, per_token, sequence)
    for size in (4, 32):
        factors_PC = token_factors(bandit, behaviour, size)
        yield bias(f"aggregation token, 2 x {size}", fixed_PC * factors_PC)


def hard_prompt(bandit: Bandit) -> Bandit:
    """The same policy, but the second prompt pays for few completions: a tenth by probability earn 1, the others 0."""
    chances_C = Behaviour.of(bandit).probabilities_PC()[1]
    rewards_PC, paid = bandit.rewards_PC.clone(), 0.0
    rewards_PC[1] = 0.0
    for c in torch.randperm(len(chances_C), generator=torch.Generator().manual_seed(1)).tolist():
        if paid + float(chances_C[c]) < 0.1:
            paid += float(chances_C[c])
            rewards_PC[1, c] = 1.0
    return Bandit(bandit.loaded, bandit.naive, rewards_PC)


def unequal_prompts(bandit: Bandit) -> Iterator[Bias]:
    """What a std does to each of two prompts, one of which is hard: `bandit` is what `hard_prompt` returns."""
    behaviour = Behaviour.of(bandit)
    estimates = (
        ("no scaling, G = 8", expected_advantages(bandit, behaviour, 8, scale="none")),
        *((f"group std, G = {size}", expected_advantages(bandit, behaviour, size, scale="group")) for size in (8, 64)),
        ("batch std, 2 x 4", batch_advantages(bandit, behaviour, 4)),
    )
    parts = (("both", (1.0, 1.0)), ("the first alone", (1.0, 0.0)), ("the hard one alone", (0.0, 1.0)))
    for name, advantages_PC in estimates:
        for which, on in parts:
            on_P1 = torch.tensor(on, dtype=torch.float64)[:, None]
            only = Bandit(bandit.loaded, bandit.naive, bandit.rewards_PC * on_P1)
            expected_D = expected_gradient(bandit, UNBIASED, behaviour, advantages_PC * on_P1)
            yield Bias(f"{name}: {which}", expected_D, exact_gradient(only))


# ---- stale and truncated --------------------------------------------------------------------------------------------

CORRECTIONS: tuple[tuple[str, AlgoConfig], ...] = (
    ("no correction", UNBIASED),
    ("sequence weights, open", replace(UNBIASED, correction="sequence_truncate", correction_max=0.0)),
    ("sequence_truncate 2", replace(UNBIASED, correction="sequence_truncate", correction_max=2.0)),
    ("sequence_mask 0.5 .. 2", replace(UNBIASED, correction="sequence_mask", correction_min=0.5, correction_max=2.0)),
    ("token weights, open", replace(UNBIASED, correction="token_truncate", correction_max=0.0)),
    ("token_truncate 2", replace(UNBIASED, correction="token_truncate", correction_max=2.0)),
    ("token_mask 0.5 .. 2", replace(UNBIASED, correction="token_mask", correction_min=0.5, correction_max=2.0)),
    (
        "geometric_mask 0.8 .. 1.25",
        replace(UNBIASED, correction="geometric_mask", correction_min=0.8, correction_max=1.25),
    ),
    ("grpo's clip 0.8 .. 1.2, sampler anchors", replace(UNBIASED, old_logprobs="sampler")),
    ("cispo's clamp 0 .. 5, sampler anchors", replace(UNBIASED, objective="cispo", old_logprobs="sampler")),
)


@dataclass(frozen=True, eq=False)
class Stale:
    """What separates the sampler from the trainer. kl: KL(sampler || trainer) per completion, mean over prompts; sample
    size: the effective one of open sequence weights, as a share, of the worse prompt; largest: the largest weight."""

    steps: int
    kl: float
    sample_size: float
    largest: float
    biases: tuple[Bias, ...]


def share_cut(bandit: Bandit, algo: AlgoConfig, behaviour: Behaviour, advantages_PC: Tensor) -> float:
    """Share of the sampled tokens that a bound of `algo` acts on, at the current weights."""
    lengths_C = bandit.lengths_C()
    real_CL = torch.arange(LONGEST) < lengths_C[:, None]
    tokens_PCL = behaviour.probabilities_PC()[..., None] * real_CL
    log_w_PCL = Behaviour.of(bandit).logprobs_PCL - behaviour.logprobs_PCL
    w_PCL, positive = log_w_PCL.exp(), advantages_PC[..., None] > 0
    low, high = algo.correction_bounds
    if algo.correction == "none":
        spec = algo.spec()
        above, below = w_PCL > spec.ratio_max, w_PCL < spec.ratio_min
        acts = (above & positive) | (below & ~positive) if algo.objective == "grpo" else above | below
        acts &= torch.tensor(algo.old_logprobs == "sampler")  # with `fresh` anchors the ratio is 1
    else:
        level = algo.correction.split("_")[0]
        if level != "token":
            log_PC = log_w_PCL.sum(2) / (lengths_C if level == "geometric" else 1.0)
            w_PCL = log_PC.exp()[..., None].expand_as(w_PCL)
        acts = (w_PCL < low) | (w_PCL > high)
    return float((tokens_PCL * acts).sum() / tokens_PCL.sum())


def stale(steps: int) -> Stale:
    """Samples of the weights before `steps` ascent steps."""
    bandit = make_bandit()
    behaviour = Behaviour.of(bandit)
    ascend(bandit, steps)
    exact_D, advantages_PC = exact_gradient(bandit), fixed_baseline(bandit.rewards_PC)
    log_w_PC = Behaviour.of(bandit).logprobs_PCL.sum(2) - behaviour.logprobs_PCL.sum(2)
    old_PC = behaviour.probabilities_PC()
    return Stale(
        steps=steps,
        kl=float(-(old_PC * log_w_PC).sum(1).mean()),
        sample_size=float(1 / (old_PC * log_w_PC.exp().square()).sum(1).max()),
        largest=float(log_w_PC.exp().max()),
        biases=tuple(
            Bias(
                name,
                expected_gradient(bandit, algo, behaviour, advantages_PC),
                exact_D,
                share_cut(bandit, algo, behaviour, advantages_PC),
            )
            for name, algo in CORRECTIONS
        ),
    )


def truncated(bandit: Bandit) -> Iterator[Bias]:
    """Against the gradient of the renormalised policy, the sets as they were sampled."""
    advantages_PC = fixed_baseline(bandit.rewards_PC)
    for name, cut in (("top-k 2", top_k_cut(2)), ("top-p 0.6", top_p_cut(0.6)), ("top-p 0.9", top_p_cut(0.9))):
        behaviour = Behaviour.of(bandit, cut)
        exact_D = exact_gradient(bandit, behaviour.sets)
        for how in ("replay", "ignore"):
            expected_D = expected_gradient(bandit, UNBIASED, behaviour, advantages_PC, replay=how == "replay")
            yield Bias(f"{name}, {how}", expected_D, exact_D)


def tables() -> str:
    """All of them, as Markdown."""
    torch.set_num_threads(1)
    bandit, parts = make_bandit(), []
    parts.append(("On-policy, everything kept.", tuple(on_policy(bandit))))
    hard = hard_prompt(bandit)
    earned = (Behaviour.of(bandit).probabilities_PC() * hard.rewards_PC).sum(1).tolist()
    title = f"On-policy, one of the two prompts is hard (mean rewards {earned[0]:.2f} and {earned[1]:.2f})."
    parts.append((title, tuple(unequal_prompts(hard))))
    for steps in (2, 6):
        found = stale(steps)
        title = (
            f"Stale by {steps} steps: KL {found.kl:.3f} per completion, effective sample size {found.sample_size:.2f}, "
            f"largest sequence weight {found.largest:.2f}."
        )
        parts.append((title, found.biases))
    parts.append(("Truncated sampling, on-policy.", tuple(truncated(bandit))))
    return "\n\n".join(f"{title}\n\n{as_table(biases)}" for title, biases in parts)


if __name__ == "__main__":
    print(tables())
