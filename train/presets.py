"""Named settings. Algorithm presets set the objective as their source does; run presets set a whole small experiment.

Every value of an algorithm preset carries its source: an equation or section of the paper, a line of the code, or
`our choice` where the source publishes nothing. docs/objectives.md prints the same table (`objectives_table`).
Algorithm presets set the same fields, so that a later one replaces an earlier one completely; they leave sizes,
learning rate and length alone. Imports no torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from rhotrain.train.config import ConfigError
from rhotrain.train.settings import Layer, Source, nearest, settings


@dataclass(frozen=True, kw_only=True)
class Preset:
    """values: field -> (value, source). left_out: what the source has and these values do not say."""

    name: str
    kind: Literal["algorithm", "run"]
    summary: str
    values: dict[str, tuple[Any, str]]
    left_out: str = ""

    @property
    def layer(self) -> Layer:
        """The values alone."""
        return {name: value for name, (value, _) in self.values.items()}


OURS = "our choice"
EPS_OURS = f"{OURS}: the source names none; TRL's value"
CLIP_UNUSED = "not used by cispo"
BOUNDS_UNUSED = "not used by grpo"


def _algorithm(name: str, summary: str, left_out: str, **values: tuple[Any, str]) -> Preset:
    common: dict[str, tuple[Any, str]] = {
        "ratio_level": ("token", "one ratio per token"),
        "dynamic_sampling": (0, "no such sampling in the source"),
    }
    return Preset(name=name, kind="algorithm", summary=summary, values=common | values, left_out=left_out)


DEEPSEEK_GRPO = _algorithm(
    "deepseek-grpo",
    "GRPO as DeepSeekMath introduced it (arXiv 2402.03300)",
    "G = 64, lr 1e-6, completions up to 1024 tokens, batches of 1024, one update per rollout (section 4.2). "
    "DeepSeek-R1 (arXiv 2501.12948) uses the same objective with another clip and a smaller KL coefficient.",
    objective=("grpo", "eq. 3: min(r A, clip(r) A)"),
    clip_low=(0.2, f"{OURS}: eq. 3 has one epsilon and the paper gives no value; PPO's (arXiv 1707.06347)"),
    clip_high=(0.2, f"{OURS}: as clip_low"),
    ratio_min=(0.0, BOUNDS_UNUSED),
    ratio_max=(5.0, BOUNDS_UNUSED),
    kl=("k3", "eq. 4"),
    beta=(0.04, "section 4.2"),
    aggregation=("sequence", "eq. 3: 1/G sum_i 1/|o_i| sum_t"),
    advantage_scale=("group", "section 4.1.2: (r - mean) / std"),
    advantage_std=("sample", f"{OURS}: the paper does not say which std; TRL's and verl's"),
    advantage_eps=(1e-4, EPS_OURS),
    zero_variance=("skip", "no filter in the paper; skip keeps the gradient (with beta > 0 such groups do run)"),
    mask_truncated=(False, "no such mask in the paper"),
)

DAPO = _algorithm(
    "dapo",
    "Decoupled clip, token-level loss, no KL (arXiv 2503.14476)",
    "Soft overlong punishment (eq. 13) depends on the length: overlong_buffer = max_new_tokens / 5 (section 4.1: "
    "4096 of 20480), with mask_truncated off. G = 16, 512 prompts, 16 updates per rollout, lr 1e-6 (section 4.1).",
    objective=("grpo", "eq. 8"),
    clip_low=(0.2, "section 4.1"),
    clip_high=(0.28, "section 4.1 (clip-higher, section 3.1)"),
    ratio_min=(0.0, BOUNDS_UNUSED),
    ratio_max=(5.0, BOUNDS_UNUSED),
    kl=("k3", "not used: beta is 0"),
    beta=(0.0, "section 2.3: the KL term is left out"),
    aggregation=("token", "eq. 8: 1 / sum_i |o_i| (section 3.3)"),
    advantage_scale=("group", "eq. 9"),
    advantage_std=("sample", f"{OURS}: the paper does not say which std; verl's, on which it is built"),
    advantage_eps=(1e-4, EPS_OURS),
    zero_variance=("filter", "eq. 8: 0 < number of right answers < G (section 3.2)"),
    dynamic_sampling=(4, f"section 3.2: draws until the batch is full; {OURS}: at most 4 times"),
    mask_truncated=(True, "section 3.4: overlong filtering"),
)

DR_GRPO = _algorithm(
    "dr-grpo",
    "GRPO without length and std normalisation (arXiv 2503.20783)",
    "The code sets the reward of truncated completions to 0 (train_zero_math.py): give such a reward yourself.",
    objective=("grpo", "section 3.2"),
    clip_low=(0.2, f"{OURS}: the paper gives no value; PPO's (arXiv 1707.06347)"),
    clip_high=(0.2, f"{OURS}: as clip_low"),
    ratio_min=(0.0, BOUNDS_UNUSED),
    ratio_max=(5.0, BOUNDS_UNUSED),
    kl=("k3", "not used: beta is 0"),
    beta=(0.0, "section 3: beta = 0, since rewards are verified by rules"),
    aggregation=("constant", "train_zero_math.py: masked_sum with generate_max_length as its divisor"),
    advantage_scale=("none", "section 3.2: r - mean"),
    advantage_std=("sample", "not used: no scaling"),
    advantage_eps=(1e-4, "not used: no scaling"),
    zero_variance=("skip", "no filter in the paper; skip keeps the gradient"),
    mask_truncated=(False, "train_zero_math.py: ignore_no_eos is an option, off unless asked for"),
)

GSPO = _algorithm(
    "gspo",
    "One ratio per completion, clipped in a narrow band (arXiv 2507.18071)",
    "Four minibatches per rollout (section 5.1): with one update the clip has nothing to act on. The KL term is left "
    "out of the paper's formulas for brevity.",
    objective=("grpo", "eq. 5: min(s A, clip(s) A)"),
    ratio_level=("sequence", "eq. 7: s = exp of the mean log-ratio"),
    clip_low=(3e-4, "section 5.1"),
    clip_high=(4e-4, "section 5.1"),
    ratio_min=(0.0, BOUNDS_UNUSED),
    ratio_max=(5.0, BOUNDS_UNUSED),
    kl=("k3", "not used: beta is 0"),
    beta=(0.0, f"{OURS}: the paper leaves the KL term out of its formulas"),
    aggregation=("sequence", "eq. 5: 1/G sum_i, one term per completion"),
    advantage_scale=("group", "eq. 6: (r - mean) / std"),
    advantage_std=("sample", f"{OURS}: the paper does not say which std; TRL's and verl's"),
    advantage_eps=(1e-4, EPS_OURS),
    zero_variance=("skip", "no filter in the paper; skip keeps the gradient"),
    mask_truncated=(False, "no such mask in the paper"),
)

SAPO = _algorithm(
    "sapo",
    "A smooth gate in place of the clip (arXiv 2511.20347)",
    "Its temperatures are the defaults of sapo_tau_pos and sapo_tau_neg, 1 and 1.05, as the paper has them.",
    objective=("sapo", "the paper's gate: sigmoid(tau (r - 1)) 4 / tau"),
    clip_low=(0.2, "not used by sapo"),
    clip_high=(0.2, "not used by sapo"),
    ratio_min=(0.0, "not used by sapo"),
    ratio_max=(5.0, "not used by sapo"),
    kl=("k3", "not used: beta is 0"),
    beta=(0.0, f"{OURS}: the paper's objective has no KL term"),
    aggregation=("sequence", "the paper's objective: 1/G sum_i 1/|y_i| sum_t"),
    advantage_scale=("group", "as GRPO: (r - mean) / std"),
    advantage_std=("sample", f"{OURS}: the paper does not say which std; TRL's and verl's"),
    advantage_eps=(1e-4, EPS_OURS),
    zero_variance=("skip", "no filter in the paper; skip keeps the gradient"),
    mask_truncated=(False, "no such mask in the paper"),
)

_MINIMIND: dict[str, tuple[Any, str]] = {
    "kl": ("k3", "train_grpo.py: exp(d) - d - 1, added to the loss"),
    "beta": (0.1, "train_grpo.py: --beta"),
    "aggregation": ("sequence", "train_grpo.py: mean over completions of per-completion means"),
    "advantage_scale": ("group", "train_grpo.py: (r - mean) / (std + 1e-4)"),
    "advantage_std": ("population", "train_grpo.py: std(unbiased=False)"),
    "advantage_eps": (1e-4, "train_grpo.py"),
    "zero_variance": ("skip", "no filter in train_grpo.py; skip keeps the gradient (with beta > 0 such groups do run)"),
    "mask_truncated": (False, "train_grpo.py trains truncated completions whole"),
}
_MINIMIND_LEFT_OUT = (
    "MiniMind samples at temperature 0.8, top-k 50, top-p 0.85 and scores the full softmax at temperature 1; here "
    "trainer and sampler always share temperature and kept set. G = 6, 2 prompts per step, lr 3e-7 with a cosine to a "
    "tenth, weight decay 0.01. Its one update per rollout leaves the clip without effect."
)

MINIMIND_GRPO = _algorithm(
    "minimind-grpo",
    "MiniMind's train_grpo.py with --loss_type grpo (github.com/jingyaogong/minimind, August 2026)",
    _MINIMIND_LEFT_OUT,
    objective=("grpo", "train_grpo.py: --loss_type grpo"),
    clip_low=(0.2, "train_grpo.py: --epsilon"),
    clip_high=(0.2, "train_grpo.py: --epsilon"),
    ratio_min=(0.0, BOUNDS_UNUSED),
    ratio_max=(5.0, BOUNDS_UNUSED),
    **_MINIMIND,
)

MINIMIND_CISPO = _algorithm(
    "minimind-cispo",
    "MiniMind's train_grpo.py with its default --loss_type cispo",
    _MINIMIND_LEFT_OUT,
    objective=("cispo", "train_grpo.py: --loss_type cispo, the default"),
    clip_low=(0.2, CLIP_UNUSED),
    clip_high=(0.2, CLIP_UNUSED),
    ratio_min=(0.0, "train_grpo.py: clamp(max=...) has no lower bound"),
    ratio_max=(5.0, "train_grpo.py: --epsilon_high, absolute, not 1 + epsilon"),
    **_MINIMIND,
)

MINIMAX_CISPO = _algorithm(
    "minimax-cispo",
    "CISPO as MiniMax-M1 introduced it (arXiv 2506.13585)",
    "The length penalty is a reward. AdamW with betas 0.9 and 0.95 and eps 1e-15, a "
    "float32 head (here the logits are always float32), early stop of repetitive completions.",
    objective=("cispo", "eq. 4"),
    clip_low=(0.2, CLIP_UNUSED),
    clip_high=(0.2, CLIP_UNUSED),
    ratio_min=(0.0, "section 3.1: no lower bound (eps_low is set to a large value)"),
    ratio_max=(
        5.0,
        f"{OURS}: eq. 5 has 1 + eps_high, the paper gives no value; ScaleRL (arXiv 2510.13786) finds 4, 5, 8 alike",
    ),
    kl=("k3", "not used: beta is 0"),
    beta=(0.0, "section 3.1: no KL term"),
    aggregation=("token", "eq. 4: 1 / sum_i |o_i|"),
    advantage_scale=("group", "eq. 2: (r - mean) / std"),
    advantage_std=("sample", f"{OURS}: the paper does not say which std; TRL's and verl's"),
    advantage_eps=(1e-4, EPS_OURS),
    zero_variance=("filter", "section 3.1: DAPO's dynamic sampling is kept"),
    dynamic_sampling=(4, f"section 3.1: as DAPO; {OURS}: at most 4 times"),
    mask_truncated=(False, "no such mask in the paper"),
)


def _run(name: str, summary: str, **values: Any) -> Preset:
    return Preset(name=name, kind="run", summary=summary, values={key: (value, OURS) for key, value in values.items()})


TINY_SUMS = _run(
    "tiny-sums",
    "a character model of 0.2M parameters learns small sums: half a minute on one core",
    model="tiny-sums",
    task="tiny-sums",
    max_prompt_tokens=16,
    train_size=750,
    rewards=("task",),
    prompts_per_step=32,
    group_size=8,
    max_new_tokens=6,
    lr=5e-4,
    steps=60,
    eval_size=250,
    eval_metric="task",
)

# chain_sum with two terms of one digit has 200 distinct questions, too few to hold out 200; with two digits SmolLM2 has
# almost none right, so there is little to reinforce. The mix has both. At temperature 1 most samples of the 135M model
# run on to max_new_tokens.
SMOLLM2_SUMS = _run(
    "smollm2-sums",
    "SmolLM2-135M-Instruct learns reasoning-gym's chain_sum: two terms of one or two digits",
    model="smollm2",
    fused_layers="torch",
    task="chain_sum",
    task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    prompt_suffix="Reply with the number only.",
    max_prompt_tokens=128,
    train_size=250,
    rewards=("bare_number",),
    prompts_per_step=8,
    group_size=8,
    max_new_tokens=32,
    temperature=0.85,
    lr=3e-5,
    steps=30,
    eval_size=200,
    eval_metric="last_number",
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        TINY_SUMS,
        SMOLLM2_SUMS,
        DEEPSEEK_GRPO,
        DAPO,
        DR_GRPO,
        GSPO,
        SAPO,
        MINIMIND_GRPO,
        MINIMIND_CISPO,
        MINIMAX_CISPO,
    )
}


def preset(name: str) -> Preset:
    """The preset of that name. Raises ConfigError with the nearest one."""
    if name not in PRESETS:
        raise ConfigError(f"preset: {name!r} is not a preset; {nearest(name, PRESETS)}")
    return PRESETS[name]


def preset_source(name: str) -> Source:
    """A preset as a layer of settings."""
    return Source(layer=preset(name).layer, origin=f"preset {name}")


def objectives_table() -> str:
    """The algorithm presets as a Markdown table, one line per value, as docs/objectives.md holds it."""
    lines = ["| preset | field | value | source |", "|---|---|---|---|"]
    for item in PRESETS.values():
        if item.kind == "algorithm":
            for name, (value, source) in item.values.items():
                escaped = source.replace("|", "\\|")
                lines.append(f"| {item.name} | {name} | {value} | {escaped} |")
    return "\n".join(lines)


def describe(name: str = "") -> str:
    """What `rhotrain presets [NAME]` prints."""
    if not name:
        width = max(map(len, PRESETS))
        lines = [f"{item.name:{width}}  {item.kind:9}  {item.summary}" for item in PRESETS.values()]
        return "\n".join([*lines, "", "`rhotrain presets NAME` shows a preset's values and their sources."])
    item = preset(name)
    lines = [f"{item.name}: {item.summary}"]
    for field, (value, source) in item.values.items():
        lines.append(f"  [{settings()[field].section}] {field} = {value!r}  # {source}")
    return "\n".join([*lines, f"Left out: {item.left_out}"] if item.left_out else lines)
