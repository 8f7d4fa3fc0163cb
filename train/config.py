"""The configuration of a run: frozen dataclasses, checked when they are made. Imports no torch, so `--help` is fast.

Every field is a command-line flag (`lr` is `--lr`) and a TOML key under its section (`[optim]` `lr = 1e-6`).
What needs the model or the task to be judged (prompt + completion against the model's positions, task parameters)
is checked in `checks.py` and `setup.py`, before anything expensive starts.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rhotrain.rollout.completion import SamplingParams
from rhotrain.train.update_config import (
    AdvantageScale,
    Aggregation,
    AlgoConfig,
    Anchor,
    ConfigError,
    Correction,
    OptimConfig,
    need,
    wrong,
)

__all__ = [
    "AdvantageScale",
    "Aggregation",
    "AlgoConfig",
    "Anchor",
    "Config",
    "ConfigError",
    "Correction",
    "EvalConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "need",
    "wrong",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and how it is held."""

    model: str = "tiny-sums"
    """A Hugging Face folder or hub id, a PEFT adapter's folder, a .gguf file, or a preset: `tiny-sums`, `smollm2`."""
    ref_model: str = ""
    """Reference model of the KL term; empty takes the starting weights. Loaded only when a KL is asked for."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute dtype; auto is bfloat16 on CUDA and float32 on a CPU. float16 trains under a dynamic loss scale."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more compute."""
    offload_activations: bool = False
    """With gradient_checkpointing: keep each layer's input on the CPU until its backward pass (GPU only)."""
    offload_reference: bool = False
    """Keep the reference model on the CPU while it is not asked (GPU only)."""
    fused_layers: Literal["off", "auto", "liger", "compile", "torch"] = "off"
    """RMSNorm, gated MLP and rotary in one operation each, in training and rollout alike: Liger's kernels,
    torch.compile, or PyTorch's own operators; auto measures which is fastest here. Only what is proven equal is
    replaced."""
    attention: Literal["auto", "flash_attn", "flash_attn3", "flash_attn4", "torch_varlen", "triton", "sdpa"] = "auto"
    """Attention backend; auto takes the best one for each use (`rhotrain doctor` names them)."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank (PEFT) instead of the weights; 0 trains all weights. The reference of a KL is
    then the model without the adapter. A model that is an adapter's folder is trained on as it is."""
    lora_alpha: float = 0.0
    """The adapter's scale is lora_alpha / lora_rank; 0 takes twice lora_rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Linear layers that get an adapter: names as PEFT takes them (q_proj, v_proj), or `all-linear`."""
    quantize_base: Literal["none", "nf4"] = "none"
    """Hold the linear layers under a LoRA adapter in 4 bits (QLoRA; bitsandbytes' NF4, double quantisation), for models
    that do not fit in bfloat16. The reference is then the quantized model. A ref_model is quantized too."""
    dropout: float = 0.0
    """Dropout probability of the current policy's forward pass, at every place where the model has one. It spreads the
    ratio although no policy moved; `rhotrain audit --dropout P` shows by how much. Whatever the model's configuration
    asks for, 0 is the default."""

    def __post_init__(self) -> None:
        need(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "need a probability: 0 <= dropout < 1")
        need(bool(self.model), "model", self.model, "name a folder, a hub id, a .gguf file or a preset")
        need(
            self.gradient_checkpointing or not self.offload_activations,
            "offload_activations",
            self.offload_activations,
            "it moves the layer inputs that gradient_checkpointing keeps; set that too",
        )
        need(self.lora_rank >= 0, "lora_rank", self.lora_rank, "need a rank >= 1, or 0 to train all weights")
        need(self.lora_alpha >= 0, "lora_alpha", self.lora_alpha, "need a value > 0, or 0 for twice lora_rank")
        need(len(self.lora_targets) > 0, "lora_targets", self.lora_targets, "name modules, or all-linear")
        need(
            self.lora_targets == ("all-linear",) or "all-linear" not in self.lora_targets,
            "lora_targets",
            self.lora_targets,
            "all-linear stands alone; name modules, or all-linear",
        )
        need(
            self.quantize_base == "none" or self.dtype != "float64",
            "quantize_base",
            self.quantize_base,
            "it computes in float32 or bfloat16; change dtype, or leave it at none",
        )
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        need(known, "device", self.device, "need auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and how they become token ids."""

    task: str = "tiny-sums"
    """`tiny-sums`, a reasoning-gym dataset by name, a .jsonl file, or `hf:PATH` for a Hugging Face dataset."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task: those of the reasoning-gym dataset; for a .jsonl file eval_file; for `hf:` name, split,
    eval_split, revision; for both prompt_column, messages_column, answer_column."""
    system_prompt: str = ""
    """Put before every prompt as the system message."""
    prompt_suffix: str = ""
    """Appended to the text of every prompt's last user message, for example `Reply with the number only.`"""
    assistant_prefill: str = ""
    """Text that the assistant's turn starts with; part of the prompt, carries no loss."""
    template: Literal["auto", "chat", "raw"] = "auto"
    """`chat` renders the tokenizer's chat template, `raw` takes the text as it is, auto: chat if there is one."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, for example enable_thinking=false."""
    max_prompt_tokens: int = 1024
    """Longest prompt in tokens."""
    long_prompts: Literal["error", "drop", "tail"] = "error"
    """What happens to longer ones: stop, leave out, or keep the last max_prompt_tokens tokens. Counted."""
    train_size: int = 2000
    """How many questions are generated for training (generated tasks only)."""
    task_seed: int = 0
    """Seed of generated tasks and of the order of the prompts."""

    def __post_init__(self) -> None:
        need(bool(self.task), "task", self.task, "name a task, a .jsonl file or hf:PATH")
        need(self.max_prompt_tokens >= 1, "max_prompt_tokens", self.max_prompt_tokens, "need at least 1")
        need(self.train_size >= 1, "train_size", self.train_size, "need at least 1")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How completions are scored. The reward is the weighted sum of the functions."""

    rewards: tuple[str, ...] = ("task",)
    """`NAME` or `NAME*WEIGHT`: built in (`task`, `exact`, `last_number`, `bare_number`, `math`, `regex`, `length`,
    `repetition`), `package.module:function`, or `path/to/file.py:function`."""
    reward_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments by function name; as a flag: --reward-args regex.pattern=... length.max_tokens=20."""
    overlong_buffer: int = 0
    """Completions longer than max_new_tokens - overlong_buffer lose up to overlong_penalty, in proportion (DAPO's soft
    overlong punishment); 0 punishes nothing."""
    overlong_penalty: float = 1.0
    """What a completion of max_new_tokens loses."""
    reward_timeout: float = 30.0
    """Seconds that one call may take; a call that takes longer makes its completions unscorable."""

    def __post_init__(self) -> None:
        need(len(self.rewards) > 0, "rewards", self.rewards, "name at least one reward function")
        need(
            self.overlong_buffer >= 0, "overlong_buffer", self.overlong_buffer, "need tokens >= 0 (0 punishes nothing)"
        )
        need(self.overlong_penalty >= 0, "overlong_penalty", self.overlong_penalty, "need a value >= 0")
        need(self.reward_timeout > 0, "reward_timeout", self.reward_timeout, "need seconds > 0")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 8
    """Prompts per rollout (P)."""
    group_size: int = 8
    """Completions per prompt (G)."""
    max_new_tokens: int = 128
    """Longest completion in tokens."""
    min_new_tokens: int = 0
    """Shortest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature, > 0; the trainer scores at the same one."""
    top_k: int = 0
    """Keep the k most probable ids; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set with this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep ids at least this likely relative to the best one; 0 keeps all."""
    truncation: Literal["replay", "ignore"] = "replay"
    """With top-k, top-p, min-p or min_new_tokens: `replay` scores over the recorded kept set, the distribution that was
    sampled; `ignore` scores the full softmax, which is biased."""
    max_staleness: int = 0
    """Draw rollouts ahead, up to so many optimiser steps' worth, in one call of the engine. A rollout's staleness is
    the policy version at its first update minus the one that sampled it; 0 draws each with the newest weights."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids in addition to the model's own."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion."""
    kv_memory_gib: float = 0.0
    """Size of the KV pool in GiB; 0 takes what one rollout needs, at most a quarter of the free memory."""
    page_size: int = 16
    """Tokens per KV page."""
    max_batch_tokens: int = 0
    """Most tokens that one engine step runs (chunked prefill); 0 takes 4096 on a GPU and 1536 on a CPU."""
    max_running: int = 256
    """Most sequences that decode together."""
    cuda_graphs: bool = True
    """Capture the decode step in CUDA graphs (GPU only)."""
    release_memory: bool = False
    """Free the KV pool, captured graphs and packed weights between rollouts, and allocate them again."""
    decode_threads: int = 0
    """CPU threads of the rollout; 0 takes those of `threads`, -1 measures at start whether fewer are faster (two runs
    may then differ in rounding; a resumed run keeps what was measured)."""

    def __post_init__(self) -> None:
        need(self.decode_threads >= -1, "decode_threads", self.decode_threads, "need a count >= 1, 0 or -1 (measure)")
        for name in ("prompts_per_step", "page_size", "max_running"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "need at least 1")
        need(self.group_size >= 1, "group_size", self.group_size, "need at least 1")
        need(self.max_batch_tokens >= 0, "max_batch_tokens", self.max_batch_tokens, "need tokens >= 1, or 0 to choose")
        need(self.max_staleness >= 0, "max_staleness", self.max_staleness, "need a count of optimiser steps >= 0")
        need(
            self.temperature > 0.0,
            "temperature",
            self.temperature,
            "training samples at a temperature > 0 (at 0 the group has no variance and the ratio no meaning)",
        )
        need(self.kv_memory_gib >= 0.0, "kv_memory_gib", self.kv_memory_gib, "need GiB >= 0 (0 chooses)")
        try:
            self.sampling(seed=0)
        except ValueError as error:
            raise ConfigError(str(error).replace("SamplingParams.", "")) from None

    def sampling(self, *, seed: int) -> SamplingParams:
        """The engine's settings for a training rollout."""
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop_token_ids=self.stop_token_ids,
            stop_strings=self.stop_strings,
            seed=seed,
        )
        return replace(params, keep_sets=params.truncates and self.truncation == "replay")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    eval_every: int = 0
    """Evaluate every so many steps; 0 only at the start and the end."""
    eval_size: int = 200
    """Held-out prompts; 0 does not evaluate. No held-out question occurs in training."""
    eval_samples: int = 1
    """Completions per held-out prompt: mean@n and pass@n."""
    eval_temperature: float = 0.0
    """0 is greedy."""
    eval_metric: str = "task"
    """The reward function (RewardConfig.rewards' syntax) whose mean is the accuracy; a value of 1 counts as right."""

    def __post_init__(self) -> None:
        for name in ("eval_every", "eval_size"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "need a count >= 0")
        need(
            not (self.eval_every > 0 and self.eval_size == 0),
            "eval_every",
            self.eval_every,
            "there is nothing to evaluate with eval_size 0; set eval_size, or eval_every to 0",
        )
        need(self.eval_samples >= 1, "eval_samples", self.eval_samples, "need at least 1")
        need(self.eval_temperature >= 0, "eval_temperature", self.eval_temperature, "need a value >= 0")
        need(
            not (self.eval_samples > 1 and self.eval_temperature == 0),
            "eval_samples",
            self.eval_samples,
            "greedy samples are all the same; set eval_temperature above 0 for several samples",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run itself: length, seed, folder, checkpoints."""

    steps: int = 100
    """Rollouts (training steps) to run."""
    seed: int = 0
    """Seed of sampling, of the order of prompts and of everything else."""
    out: str = ""
    """Run folder; empty makes runs/NAME-DATE."""
    save_every: int = 0
    """Checkpoint every so many steps; 0 only at the end and at Ctrl-C."""
    keep_last: int = 2
    """Checkpoints kept."""
    resume: bool = False
    """Go on from the last checkpoint in `out`, bit for bit."""
    threads: int = 0
    """CPU threads; 0 takes all cores."""
    log_completions: int = 0
    """Sampled completions printed with every step."""
    strict_ratio: bool = False
    """Stop, instead of warning once, when sampler and trainer differ by more than the numerics budget at a rollout's
    first update."""

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "threads", "log_completions"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "need a count >= 0")
        need(0 <= self.seed < 2**62, "seed", self.seed, "need 0 <= seed < 2**62")
        need(self.keep_last >= 1, "keep_last", self.keep_last, "need at least 1")
        need(
            not (self.resume and not self.out),
            "resume",
            self.resume,
            "name the run folder to resume with out",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        prompts, parts = self.rollout.prompts_per_step, self.algo.minibatches_per_rollout
        need(
            prompts % parts == 0,
            "minibatches_per_rollout",
            parts,
            f"minibatches hold whole groups, so it must divide prompts_per_step ({prompts})",
        )
        need(
            self.rollout.group_size >= 2,
            "group_size",
            self.rollout.group_size,
            "a group of one has no baseline and its advantage is 0; use at least 2",
        )
        need(
            self.optim.warmup_steps <= max(1, self.total_updates),
            "warmup_steps",
            self.optim.warmup_steps,
            f"longer than the run: steps x num_iterations x minibatches_per_rollout = {self.total_updates}",
        )
        self._check_staleness()
        need(
            not (self.algo.kl_stop > 0 and self.model.dropout > 0),
            "kl_stop",
            self.algo.kl_stop,
            "dropout alone moves the KL between old and current policy, and would stop every rollout; "
            "set dropout or kl_stop to 0",
        )
        # With dtype auto the device settles the precision, and `check_anchor` is asked again then.
        self.check_anchor(exact=self.model.dtype not in ("bfloat16", "float16"))
        longest = self.task.max_prompt_tokens + self.rollout.max_new_tokens
        need(
            self.reward.overlong_buffer <= self.rollout.max_new_tokens,
            "overlong_buffer",
            self.reward.overlong_buffer,
            f"the punished stretch ends at max_new_tokens ({self.rollout.max_new_tokens}); need at most that",
        )
        need(
            self.optim.token_budget == 0 or self.optim.token_budget >= longest,
            "token_budget",
            self.optim.token_budget,
            f"one prompt and its completion may take max_prompt_tokens + max_new_tokens = {longest} tokens; "
            "raise token_budget or lower those",
        )

    def _check_staleness(self) -> None:
        allowed, updates = self.rollout.max_staleness, self.algo.updates_per_rollout
        need(
            not (self.algo.dynamic_sampling and self.rollouts_ahead),
            "dynamic_sampling",
            self.algo.dynamic_sampling,
            "with max_staleness a rollout is scored long after it was drawn, and newer weights than those of its other "
            "groups would draw what replaces some; set max_staleness or dynamic_sampling to 0",
        )
        need(
            allowed == 0 or allowed >= updates,
            "max_staleness",
            allowed,
            f"one rollout ahead is {updates} optimiser steps (num_iterations x minibatches_per_rollout) old when its "
            f"turn comes; need 0 or at least {updates}",
        )

    def check_anchor(self, *, exact: bool) -> None:
        """Refuse anchors that cannot be trusted; exact: the compute dtype is float32 or wider. Raises ConfigError."""
        anchor = self.algo.anchor(exact=exact)
        chosen = "" if anchor == self.algo.old_logprobs else "auto chose it; "
        need(
            not (self.rollouts_ahead and anchor == "fresh" and self.algo.correction == "none"),
            "old_logprobs",
            anchor,
            f"{chosen}with max_staleness the samples are of an older policy, and a ratio of 1 hides that; set a "
            "correction, for example sequence_mask, or use old_logprobs sampler, whose ratio contains it",
        )
        need(
            not (self.rollouts_ahead and self.algo.objective == "reinforce" and self.algo.correction == "none"),
            "correction",
            self.algo.correction,
            "reinforce has no ratio, so with max_staleness nothing accounts for the older policy of the samples; set a "
            "correction, for example sequence_truncate, or max_staleness 0",
        )

    @property
    def rollouts_ahead(self) -> int:
        """Rollouts that are drawn before their turn, together with the one whose turn it is."""
        return self.rollout.max_staleness // self.algo.updates_per_rollout

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the whole run when none is skipped; the schedule's length."""
        return self.run.steps * self.algo.updates_per_rollout
