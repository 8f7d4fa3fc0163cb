"""Tiny random models of eight families, and a tokenizer, both made in memory in well under a second."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rhotrain.model.adapter import LoraSpec
from rhotrain.model.load import LoadedModel, adopt_model, save_model
from rhotrain.model.lora import add_adapter
from rhotrain.model.quantized import quantize_linears

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "phi3", "gpt2")

VOCAB = 96
"""Head rows; the tokenizer has fewer tokens, so that there are padding rows."""

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n+-*/=?.,:;!()<>|_ABCDEFGHIJKLMNOPQ"

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "gemma2": {
        "tie_word_embeddings": False,
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "phi3": {"original_max_position_embeddings": 256},
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
}


SEEDS = {
    "llama": (1, 2, 4),
    "qwen2": (1, 2, 3),
    "qwen3": (0, 3, 5),
    "qwen3_moe": (0, 2, 6),
    "mistral": (0, 1, 2),
    "gemma2": (2, 4, 5),
    "phi3": (2, 3, 4),
    "gpt2": (0, 5, 12),
}
"""Seeds whose models, initialised with std 0.5, emit at least 6 distinct tokens in each of 24 greedy rows of 16 tokens.
Most others fall into a loop of one or two tokens, and an equality of greedy tokens would prove little."""


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Character-level, specials 0-4, no BOS added by itself, with a ChatML template. Shared: do not change it."""
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=TEMPLATE,
    )


def tiny_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model of one of FAMILIES; `changes` override it."""
    options = {**SHARED, **FAMILY[family], **changes}
    if family == "gpt2":
        options["n_inner"] = options.pop("intermediate_size")
        options.pop("num_key_value_heads")
    return AutoConfig.for_model(family, **options)


class _KeepFloat64(TorchFunctionMode):
    """Inside, a float64 tensor that is asked for float32 stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def keep_float64(model: torch.nn.Module) -> None:
    """Make float64 real: transformers rounds norms, routers and its eager softmax to float32 in any model, so that
    equal computations in another order differ by 1e-7, in gradients too. By class, so that deepcopy stays right."""
    for module in model.modules():
        cls = type(module)
        if re.search(r"RMSNorm|Router|Attention", cls.__name__):

            def forward(self: Any, *args: Any, _original: Any = cls.forward, **kwargs: Any) -> Any:
                with _KeepFloat64():
                    return _original(self, *args, **kwargs)

            module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def tiny_hf_model(
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.5,
    **changes: Any,
) -> Any:
    """A random Hugging Face model, untouched by rhotrain; seeds 0, 1, 2 emit many distinct tokens (SEEDS)."""
    seed = SEEDS[family][seed] if 0 <= seed < 3 else seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, initializer_range=initializer_range, **changes), dtype=torch.float32
        )
        with torch.no_grad():  # zero biases and unit norms would hide mistakes in them
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    if dtype == torch.float64:
        keep_float64(model)
        if family == "qwen3_moe":
            model.set_experts_implementation("eager")  # grouped_mm refuses float64
    return model.to(dtype)


def tiny_model(
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.5,
    *,
    gradient_checkpointing: bool = False,
    probe: bool = False,
    lora: LoraSpec | None = None,
    quantized: bool = False,
    **changes: Any,
) -> LoadedModel:
    """A random tiny model of one of FAMILIES as a LoadedModel; the same arguments give the same weights. lora: with an
    adapter whose B is not 0. quantized: its linear layers in 4 bits."""
    model = tiny_hf_model(family, seed, dtype, initializer_range, **changes)
    if quantized:
        quantize_linears(model, torch.device("cpu"), spec=f"tiny {family}")
    adapter = None
    if lora is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapter = add_adapter(model, lora, spec=f"tiny {family}", base=f"tiny-{family}")
            with torch.no_grad():
                for layer in adapter.layers:
                    layer.lora_B["default"].weight.normal_(std=0.2)
    return adopt_model(
        model,
        tiny_tokenizer(),
        spec=f"tiny {family}",
        gradient_checkpointing=gradient_checkpointing,
        adapter=adapter,
        probe=probe,
    )


def save_tiny(folder: Path | str, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model with its tokenizer as a Hugging Face folder."""
    return save_model(tiny_model(family, seed, **changes), folder)
