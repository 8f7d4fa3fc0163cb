"""What is sampled: the workloads, their prompts and lengths, the models, and the targets that stand beside the figures.

Prompts are random ids. Their lengths and the numbers of new tokens are the same in every round; the ids are new in
each, so that nobody's prefix cache knows a prompt from the round before. Speed does not depend on what is said.
"""

import copy
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rhotrain.model.load import adopt_model, load_model
from rhotrain.model.loaded import LoadedModel, quiet_transformers
from rhotrain.model.sources import resolve_spec

FIRST_ID = 5
"""Smallest id in a prompt: below are the special tokens of the models used here."""
QWEN3_600M: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RANDOM_MODELS = {"qwen3-0.6b": QWEN3_600M, "tiny": TINY}
"""Shapes that get random weights; every other name is one that `load_model` knows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One round: `group` completions of each prompt, new_tokens[p] tokens each, whatever is drawn."""

    prompts: list[list[int]]
    new_tokens: list[int]
    group: int

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group

    @property
    def output_tokens(self) -> int:
        return self.group * sum(self.new_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once."""
        return sum(map(len, self.prompts))

    @property
    def row_tokens(self) -> list[int]:
        """New tokens of every row, prompt-major."""
        return [new for new in self.new_tokens for _ in range(self.group)]

    def short(self, prompts: int, new_tokens: int, prompt_len: int | None = None) -> "Batch":
        """The first prompts, or what they begin with, and few new tokens: a warm-up."""
        new = [min(n, new_tokens) for n in self.new_tokens[:prompts]]
        return Batch([p[:prompt_len] for p in self.prompts[:prompts]], new, self.group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What is aimed at. times_generate: ours over `generate`; least: not below; share: of the roofline."""

    times_generate: float | None = None
    least: float | None = None
    tok_per_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """prompt_len, new_tokens: smallest and largest. spread: `even` steps from one end to the other, or `random`.

    on_cpu: also measured on a CPU. cpu, gpu: targets on two cores with SmolLM2, and on an H200 with the shape of
    Qwen3-0.6B.
    """

    name: str
    prompts: int
    prompt_len: tuple[int, int]
    new_tokens: tuple[int, int]
    group: int = 1
    spread: Literal["even", "random"] = "even"
    on_cpu: bool = True
    cpu: Targets = field(default_factory=Targets)
    gpu: Targets = field(default_factory=Targets)

    def __str__(self) -> str:
        return self.name

    def batch(self, round_: int, vocab_size: int) -> Batch:
        """The prompts of a round: ids from FIRST_ID up to the vocabulary's end."""
        lengths = self._lengths(self.prompt_len, seed=1)
        draw = random.Random(f"{self.name} {round_}")
        prompts = [[draw.randrange(FIRST_ID, vocab_size) for _ in range(n)] for n in lengths]
        return Batch(prompts, self._lengths(self.new_tokens, seed=2), self.group)

    def _lengths(self, bounds: tuple[int, int], seed: int) -> list[int]:
        draw, (low, high) = random.Random(seed), bounds
        if self.spread == "random":
            return [draw.randint(low, high) for _ in range(self.prompts)]
        lengths = [low + (high - low) * i // max(self.prompts - 1, 1) for i in range(self.prompts)]
        draw.shuffle(lengths)
        return lengths


SHORT, LONG = (40, 56), (512, 512)
WORKLOADS = (
    Workload(
        name="uniform-16",
        prompts=16,
        prompt_len=SHORT,
        new_tokens=(64, 64),
        cpu=Targets(times_generate=2.0, least=1.8),
    ),
    Workload(
        name="uniform-64",
        prompts=64,
        prompt_len=SHORT,
        new_tokens=(64, 64),
        cpu=Targets(times_generate=2.0, least=1.8),
    ),
    Workload(
        name="skewed-64",
        prompts=64,
        prompt_len=SHORT,
        new_tokens=(4, 128),
        cpu=Targets(times_generate=3.3, least=2.5),
    ),
    Workload(name="groups-8", prompts=4, group=8, prompt_len=LONG, new_tokens=(64, 64)),
    Workload(
        name="groups-16",
        prompts=4,
        group=16,
        prompt_len=LONG,
        new_tokens=(64, 64),
        cpu=Targets(times_generate=5.0, least=4.0),
    ),
    Workload(
        name="rollout-256",
        prompts=256,
        prompt_len=(100, 1024),
        new_tokens=(100, 1024),
        spread="random",
        on_cpu=False,
        gpu=Targets(times_generate=10.0, tok_per_s=20_000.0, share=0.5),
    ),
)


def workloads(device: torch.device) -> list[Workload]:
    """Those that are measured on this kind of device."""
    return [w for w in WORKLOADS if device.type == "cuda" or w.on_cpu]


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights twice: as transformers runs them, and with our attention.

    folder: where the servers read them; None for random weights, which `saved` writes when somebody asks.
    """

    spec: str
    hf: Any
    loaded: LoadedModel
    folder: str | None

    @contextmanager
    def saved(self) -> Iterator[str]:
        """A folder with the weights; removed afterwards where it was made for this."""
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory() as folder:
            with quiet_transformers():
                self.hf.save_pretrained(folder)
            yield folder


FUSED_LAYERS = {"cpu": "torch", "cuda": "auto"}
"""Ours runs with fused layers, as `--fused-layers` gives them to a run; on a GPU with those that measure fastest."""


def load_models(spec: str, device: torch.device) -> Models:
    """`spec` is one of RANDOM_MODELS or what `load_model` takes; bfloat16 on CUDA, float32 on a CPU."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hf: Any
    if spec in RANDOM_MODELS:
        hf = random_model(RANDOM_MODELS[spec], device, dtype)
        vocab = RANDOM_MODELS[spec]["vocab_size"]
        loaded = adopt_model(
            copy.deepcopy(hf), numbers_tokenizer(vocab), spec=f"random {spec}", fused_layers=FUSED_LAYERS[device.type]
        )
        folder = None
    else:
        folder, options = resolve_spec(spec)
        with quiet_transformers():
            hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        hf = hf.to(device)
        loaded = load_model(
            spec,
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            fused_layers=FUSED_LAYERS[device.type],
        )
    # Otherwise generate ends a row at the model's own stop ids: it fills in what a call leaves open from here.
    hf.generation_config = GenerationConfig(pad_token_id=0)
    return Models(spec, hf.eval(), loaded, folder)


def random_model(options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**options), dtype=dtype)


def numbers_tokenizer(vocab: int) -> Any:
    """Every id is a token, so that the real vocabulary is the whole head: `<7> <9>` are the ids 7 and 9."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<0>", bos_token="<1>", eos_token="<2>")
