"""A model without memory: the real modules on PyTorch's meta device, and what their passes would take.

Nothing is estimated by hand: forward and backward of the model's own code run on tensors without data, and every
storage they make is followed from its making to its end (`PeakMemory`). Attention stands for a flash kernel: it keeps
q, k, v, its output and one float32 per query and head; with shared prompts the keys and values are gathered first.
So a plan for a GPU that is not there takes seconds, for any size of model. Where only plain attention runs (softcap or
sinks without flash-attn) its scores come on top and are not counted. Layers are sketched unfused: `fused_layers` keep
less than that.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rhotrain.model import sources
from rhotrain.model.adapter import LoraSpec
from rhotrain.model.attention import PackedContext, attach_state
from rhotrain.model.dropout import zero_dropout
from rhotrain.model.head import head_of
from rhotrain.model.load import enable_checkpointing, use_our_attention
from rhotrain.model.loaded import LoadedModel, LoadError, quiet_transformers
from rhotrain.model.lora import add_adapter
from rhotrain.model.quantized import QuantizeBase, check_quantize, quantize_linears
from rhotrain.train.footprint import Footprint, PeakMemory, Shape

META = torch.device("meta")
SKETCH_TOKENS = 1024
"""Size of the smaller of the two sketched micro-batches, at most."""


def sketch_model(
    spec: str,
    dtype: torch.dtype,
    *,
    hf_config: Any = None,
    gradient_checkpointing: bool = False,
    lora: LoraSpec | None = None,
    quantize_base: QuantizeBase = "none",
) -> LoadedModel:
    """The model that `spec` names, on the meta device: its configuration is read (unless given), its weights are not,
    and no tokenizer is needed. Raises LoadError for a model that cannot be used."""
    check_quantize(spec, quantize_base, dtype)
    with quiet_transformers():
        if hf_config is None:
            source, options = sources.resolve_spec(spec)
            hf_config = sources.read_config(spec, source, options)
        hf_config = copy.deepcopy(hf_config)
        hf_config.get_text_config().pad_token_id = None  # gpt2 looks for it among the ids, and there are none
        with META:
            model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        model.tie_weights()
        if quantize_base != "none":
            quantize_linears(model, META, spec=spec)
        with META:
            adapter = None if lora is None else add_adapter(model, lora, spec=spec, base=spec)
        zero_dropout(model)
        use_our_attention(model)
        model.train()
        if gradient_checkpointing:
            enable_checkpointing(model)
    loaded = LoadedModel(
        model=model,
        tokenizer=None,
        spec=spec,
        attention=attach_state(model),
        vocab_size=head_of(model).weight.shape[0],
        stop_token_ids=(),
        max_positions=None,
        gradient_checkpointing=gradient_checkpointing,
        adapter=adapter,
    )
    loaded.attention.packed = flash_like
    try:
        _ = loaded.kv_shapes
    except (NotImplementedError, RuntimeError) as error:  # a module that looks at values has none to look at
        raise LoadError(f"{spec}: no memory plan can be made, {_gist(error)}") from error
    return loaded


class _FlashLike(torch.autograd.Function):
    """What a flash kernel allocates and keeps: q [T, H, D], k [S, Hk, D], v [S, Hk, E], out [T, H, E], lse [T, H]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Gathered(torch.autograd.Function):
    """Rows of keys or values in the order of the segments' keys, [S, Hk, D] of [T, Hk, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_empty(ctx.shape), None


def flash_like(context: PackedContext, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Takes the place of packed attention on the meta device."""
    if context.kv_index is not None:
        rows = sum(context.lens_k)
        k, v = _Gathered.apply(k, rows), _Gathered.apply(v, rows)  # type: ignore[no-untyped-call]
    out: Tensor = _FlashLike.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


def context_of(shape: Shape, groups: int, share_prompts: bool) -> PackedContext:
    """Packed groups: with shared prompts one segment per prompt and one per completion, whose keys are both."""
    prompt, own, members = shape.prompt_tokens, shape.new_tokens - 1, shape.members
    if not share_prompts:
        return PackedContext.make([prompt + own] * (groups * members))
    lens_q: list[int] = []
    lens_k: list[int] = []
    index: list[int] = []
    for g in range(groups):
        start = g * (prompt + members * own)
        lens_q += [prompt, *[own] * members]
        lens_k += [prompt, *[prompt + own] * members]
        index += range(start, start + prompt)
        for m in range(members):
            first = start + prompt + m * own
            index += [*range(start, start + prompt), *range(first, first + own)]
    return PackedContext.make(lens_q, lens_k, torch.tensor(index))


@dataclass(frozen=True)
class Sketch:
    """footprint: bytes of a pass's activations by packed tokens, gradients of the weights left out but for the one that
    is being made. why_not: why there is none."""

    footprint: Footprint | None
    why_not: str = ""


def sketch_activations(
    loaded: LoadedModel, *, prompt_tokens: int, max_new_tokens: int, members: int, share_prompts: bool
) -> Sketch:
    """The line through the peaks of one group and of two, of a `sketch_model`."""
    shape = Shape.scaled(prompt_tokens, max_new_tokens, members, SKETCH_TOKENS)
    hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in loaded.parameters()]
    points = []
    try:
        for groups in (1, 2):
            context = context_of(shape, groups, share_prompts)
            points.append((sum(context.lens_q), _peak(loaded, context)))
    except (NotImplementedError, RuntimeError) as error:
        return Sketch(None, _gist(error))
    finally:
        for hook in hooks:
            hook.remove()
    table: Tensor = loaded.body.get_input_embeddings().weight
    return Sketch(Footprint.through(points[0], points[1], table.nbytes if table.requires_grad else 0))


def _gist(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _peak(loaded: LoadedModel, context: PackedContext) -> int:
    """Before the embedding's backward pass: its gradient has the vocabulary's size, and would hide a short pass."""
    ids = torch.zeros(sum(context.lens_q), dtype=torch.int64, device=META)
    memory, in_layers = PeakMemory(), []

    def watch(module: Any, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: in_layers.append(memory.peak))

    hook = loaded.body.get_input_embeddings().register_forward_hook(watch)
    try:
        with torch.enable_grad(), memory, loaded.with_attention(context):
            hidden_TH = loaded.hidden(ids, ids)
            hidden_TH.backward(torch.empty_like(hidden_TH))
    finally:
        hook.remove()
    return in_layers[0] if in_layers else memory.peak
