"""The half of the configuration that says how a rollout becomes updates: the objective and the optimiser.

Part of config.py, which says how its fields are used. Imports no torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from rhotrain.kernels.spec import KLKind, Objective, ObjectiveKind, RatioLevel

Aggregation = Literal["token", "sequence", "constant"]
AdvantageScale = Literal["group", "batch", "none"]
Anchor = Literal["auto", "sampler", "trainer", "fresh"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]


class ConfigError(ValueError):
    """A setting that cannot work. The message names the field, the value and the fix; the exit code is 2."""


def wrong(name: str, value: object, rule: str) -> ConfigError:
    """The error for field `name` with `value`; `rule` says what would be right."""
    return ConfigError(f"{name}: {value!r} does not work; {rule}")


def need(ok: bool, name: str, value: object, rule: str) -> None:
    """Raise `wrong` unless `ok`."""
    if not ok:
        raise wrong(name, value, rule)


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The objective, the advantages and the inner loop. Presets set these as their papers do (docs/objectives.md)."""

    objective: ObjectiveKind = "grpo"
    """`grpo` (PPO clip), `cispo` (clamped, detached weight), `reinforce`, `sapo` (a gate in place of a clip)."""
    clip_low: float = 0.2
    """grpo: the ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """grpo: the ratio is clipped above 1 + clip_high."""
    ratio_min: float = 0.0
    """cispo: absolute lower bound of the ratio."""
    ratio_max: float = 5.0
    """cispo: absolute upper bound of the ratio."""
    dual_clip: float = 0.0
    """grpo: where A < 0 the ratio counts as at most this (dual clip; TRL's delta); 0 does not cap."""
    sapo_tau_pos: float = 1.0
    """sapo: temperature of the gate where A > 0."""
    sapo_tau_neg: float = 1.05
    """sapo: temperature of the gate where A < 0."""
    ratio_level: RatioLevel = "token"
    """`token`, or `sequence` (GSPO): one ratio per completion, exp of the mean log-ratio over its tokens."""
    kl: KLKind = "k3"
    """KL estimator in the loss when beta > 0: k2, k3, k3_k2grad (k3's value with k2's gradient), or k3_unbiased (k3
    times the ratio)."""
    beta: float = 0.0
    """Coefficient of the KL to the reference in the loss; 0 loads no reference."""
    kl_in_reward: float = 0.0
    """Coefficient of k1 (logprob - ref_logprob summed over the completion, detached) subtracted from the reward."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    top_entropy: float = 1.0
    """Share of an optimiser step's tokens, those of highest entropy, that carry the policy term; 1 takes all."""
    aggregation: Aggregation = "token"
    """Denominator: `token` all loss tokens of the optimiser step, `sequence` the mean over completions of means per
    completion, `constant` completions x max_new_tokens."""
    advantage_scale: AdvantageScale = "group"
    """Divide (reward - group mean) by the group's std, the batch's std, or nothing."""
    advantage_std: Literal["sample", "population"] = "sample"
    """Std with G - 1 (TRL, verl) or G (MiniMind) in its denominator."""
    advantage_eps: float = 1e-4
    """Added to the std."""
    zero_variance: Literal["skip", "keep", "filter"] = "skip"
    """Groups whose advantages are all 0: `skip` leaves them out of the forward pass when every loss term is 0 for them,
    with the same gradient; `keep` runs them; `filter` also takes them out of the denominator (DAPO)."""
    dynamic_sampling: int = 0
    """Draw new groups in place of those whose rewards are all equal (before kl_in_reward), up to so many times per
    rollout (DAPO); 0 keeps what was drawn."""
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """With several rewards: normalise their weighted sum in the group, or each of them and sum then (GDPO)."""
    mask_truncated: bool = False
    """Completions that hit max_new_tokens carry no loss and leave numerator and denominator together (DAPO)."""
    old_logprobs: Anchor = "auto"
    """Denominator of the ratio: `sampler` the engine's own numbers, `trainer` recomputed before the first update,
    `fresh` the current forward detached (one update per rollout only). auto: sampler in float32 without a correction;
    otherwise fresh for one update, trainer for several."""
    correction: Correction = "none"
    """Off-policy correction of the policy term by w = exp(frozen trainer logprob - sampling logprob), a constant: per
    token or multiplied over the completion, `truncate` (TIS) or `mask` (zero outside the bounds: MIS, IcePop);
    `geometric_mask` drops completions whose geometric-mean w lies outside. With fresh or trainer anchors only."""
    correction_min: float = 0.0
    """Lower bound of w."""
    correction_max: float = 2.0
    """Upper bound of w; 0 leaves that side open."""
    off_policy_mask: float = 0.0
    """Completions with negative advantage leave the policy term when the mean over their tokens of sampling logprob -
    logprob exceeds this (DeepSeek-V3.2); 0 keeps all."""
    num_iterations: int = 1
    """Passes over each rollout."""
    minibatches_per_rollout: int = 1
    """Optimiser steps per pass; each takes whole groups."""
    kl_stop: float = 0.0
    """Skip the remaining updates of a rollout once the mean k3 between old and current policy exceeds this; 0 never."""

    def __post_init__(self) -> None:
        need(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "need 0 <= clip_low <= 1")
        need(self.clip_high >= 0, "clip_high", self.clip_high, "need clip_high >= 0")
        need(self.ratio_min >= 0, "ratio_min", self.ratio_min, "a ratio is never negative; need ratio_min >= 0")
        need(
            self.ratio_max >= self.ratio_min,
            "ratio_max",
            self.ratio_max,
            f"need at least ratio_min ({self.ratio_min}); both are values of the ratio itself, not distances from 1",
        )
        self._check_family()
        try:
            self.spec()
        except ValueError as error:
            raise ConfigError(str(error).replace("Objective.", "")) from None
        need(self.kl_in_reward >= 0, "kl_in_reward", self.kl_in_reward, "need a coefficient >= 0")
        need(self.advantage_eps >= 0, "advantage_eps", self.advantage_eps, "need a value >= 0")
        for name in ("num_iterations", "minibatches_per_rollout"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "need at least 1")
        need(0 < self.top_entropy <= 1, "top_entropy", self.top_entropy, "need a share: 0 < top_entropy <= 1")
        need(self.dynamic_sampling >= 0, "dynamic_sampling", self.dynamic_sampling, "need a count >= 0")
        need(self.off_policy_mask >= 0, "off_policy_mask", self.off_policy_mask, "need a value >= 0 (0 keeps all)")
        need(self.kl_stop >= 0, "kl_stop", self.kl_stop, "need a value >= 0 (0 never stops)")
        need(
            not (self.old_logprobs == "fresh" and self.updates_per_rollout > 1),
            "old_logprobs",
            self.old_logprobs,
            "`fresh` is the current policy itself, so it fits one update per rollout only; "
            "use trainer or sampler with num_iterations or minibatches_per_rollout above 1",
        )
        self._check_correction()

    def _check_family(self) -> None:
        """Settings of the objective family that contradict each other."""
        need(
            self.dual_clip == 0.0 or self.dual_clip > 1.0,
            "dual_clip",
            self.dual_clip,
            "it caps the ratio where A < 0; need a value > 1, or 0 for none",
        )
        if self.reward_aggregation == "normalize_then_sum":
            need(
                self.kl_in_reward == 0.0,
                "kl_in_reward",
                self.kl_in_reward,
                "with reward_aggregation normalize_then_sum every part is divided by its own spread, and the "
                "coefficient would have no effect; use beta for a KL in the loss",
            )
            need(
                self.advantage_scale == "group",
                "advantage_scale",
                self.advantage_scale,
                "reward_aggregation normalize_then_sum divides by the group's std; need group",
            )

    def _check_correction(self) -> None:
        need(
            not (self.correction != "none" and self.old_logprobs == "sampler" and self.objective != "reinforce"),
            "correction",
            self.correction,
            "with old_logprobs = sampler the ratio contains w already, and it would count twice; "
            "use old_logprobs fresh (one update per rollout) or trainer, or correction none",
        )
        need(self.correction_min >= 0, "correction_min", self.correction_min, "w is never negative; need a value >= 0")
        need(self.correction_max >= 0, "correction_max", self.correction_max, "need a value >= 0 (0 leaves it open)")
        low, high = self.correction_bounds
        need(low < high, "correction_max", self.correction_max, f"need more than correction_min ({low:g})")
        need(
            low <= 1.0 <= high,
            "correction_min" if low > 1.0 else "correction_max",
            low if low > 1.0 else self.correction_max,
            "the bounds leave out w = 1, so every on-policy token would be cut; they are values of w itself",
        )

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds of w; the upper one may be inf."""
        return self.correction_min, self.correction_max or math.inf

    def anchor(self, *, exact: bool) -> Anchor:
        """What `auto` stands for. exact: the compute dtype is float32 or wider; sampler noise in bf16 trips the clip.

        Raises ConfigError for a sequence-level ratio over sampler anchors in half precision.
        """
        anchor: Anchor = self.old_logprobs
        if anchor == "auto":
            one: Anchor = "fresh" if self.updates_per_rollout == 1 else "trainer"
            anchor = "sampler" if exact and self.correction == "none" else one
        need(
            not (anchor == "sampler" and self.ratio_level == "sequence" and not exact),
            "old_logprobs",
            anchor,
            "the noise of a half-precision sampler exceeds the narrow bounds of a sequence-level ratio on nearly every "
            "completion before the policy has moved; use trainer, or fresh with one update per rollout",
        )
        return anchor

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser steps per rollout when nothing is skipped."""
        return self.num_iterations * self.minibatches_per_rollout

    def spec(self) -> Objective:
        """The kernels' objective."""
        low, high = (1.0 - self.clip_low, 1.0 + self.clip_high)
        if self.objective != "grpo":
            low, high = self.ratio_min, self.ratio_max
        return Objective(
            kind=self.objective,
            ratio_level=self.ratio_level,
            ratio_min=low,
            ratio_max=high,
            dual_clip=self.dual_clip or None,
            sapo_tau_pos=self.sapo_tau_pos,
            sapo_tau_neg=self.sapo_tau_neg,
            kl=self.kl if self.beta > 0 else "none",
            beta=self.beta,
            entropy_coef=self.entropy_coef,
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the learning-rate schedule, which counts optimiser steps."""

    optimizer: Literal["adamw", "adamw_8bit", "adamw_offload"] = "adamw"
    """`adamw` is PyTorch's; `adamw_8bit` (bitsandbytes) keeps the moments in a quarter of the memory; `adamw_offload`
    keeps moments and float32 masters on the CPU and takes the step there."""
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    lr_final: float = 0.0
    """The learning rate at the end, as a fraction of lr (linear, cosine)."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    token_budget: int = 4096
    """Most packed tokens of one micro-batch (forward + backward); 0 measures at start what the memory holds. When
    memory runs out it is halved, and the optimiser step starts anew."""
    share_prompts: bool = True
    """Run a group's prompt once per micro-batch and let its completions attend to it."""

    def __post_init__(self) -> None:
        need(self.lr >= 0, "lr", self.lr, "need a learning rate >= 0")
        need(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "need 0 <= beta < 1")
        need(self.eps > 0, "eps", self.eps, "need a value > 0")
        need(self.weight_decay >= 0, "weight_decay", self.weight_decay, "need a value >= 0")
        need(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "need a count >= 0")
        need(0 <= self.lr_final <= 1, "lr_final", self.lr_final, "need a fraction between 0 and 1")
        need(self.grad_clip >= 0, "grad_clip", self.grad_clip, "need a norm >= 0 (0 does not clip)")
        need(self.token_budget >= 0, "token_budget", self.token_budget, "need tokens >= 1, or 0 to measure")
