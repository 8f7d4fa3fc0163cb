"""Other contexts and other weights to score completions with: what an engine may have had in place of the trainer's.

A padding token that is attended, a BOS that a server adds, weights rounded to bfloat16, weights of an earlier step.
Each costs one packed forward, the trainer's own (train/step.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhotrain.model.loaded import LoadedModel
from rhotrain.rollout.completion import Completion
from rhotrain.train.batching import make_table, pack
from rhotrain.train.config import ConfigError
from rhotrain.train.readings import Deviation
from rhotrain.train.step import packed_hidden

PACKED_TOKENS = 4096
"""Most tokens of one packed forward."""

Weights = Mapping[str, Tensor]
"""Parameters by name, as in `model.state_dict()`."""


@contextmanager
def using_weights(loaded: LoadedModel, weights: Weights, *, keep_dtype: bool = False) -> Iterator[None]:
    """`weights` in place of the model's own parameters inside; names that the model lacks are ignored, parameters that
    are not named stay. The tensors are exchanged, not copied, so that the own ones come back bit by bit.
    keep_dtype: compute in the dtype of `weights`; otherwise they are converted to the parameters'.

    Raises ConfigError when no name fits, or a shape does not.
    """
    own: dict[str, Tensor] = {}
    parameters = dict(loaded.model.named_parameters())
    found = {name: value for name, value in weights.items() if name in parameters}
    if not found:
        raise ConfigError(f"weights: no name fits {loaded.architecture}; give them as its state_dict() has them")
    for name, value in found.items():
        if value.shape != parameters[name].shape:
            raise ConfigError(
                f"weights: {name} is {list(value.shape)}, the model has {list(parameters[name].shape)}; "
                "they are of another model"
            )
    try:
        for name, value in found.items():
            own[name] = parameters[name].data
            dtype = value.dtype if keep_dtype else own[name].dtype
            parameters[name].data = value.detach().to(own[name].device, dtype)
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value


def rounded_weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """The model's parameters as bfloat16; those in 4 bits are left out."""
    return {name: p.detach().bfloat16() for name, p in loaded.model.named_parameters() if p.is_floating_point()}


@torch.no_grad()
def completion_logits(loaded: LoadedModel, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Tensor:
    """Logits [N, head rows] on the CPU that predict the completions' tokens, by the trainer's packed forward.

    pairs: (prompt ids, completion ids), none empty. float32 or float64.
    """
    groups = [(prompt, [_blank(ids, index)]) for index, (prompt, ids) in enumerate(pairs)]
    table = make_table(groups)
    longest = max(len(prompt) + len(ids) for prompt, ids in pairs)
    logits = None
    for batch in pack(table, range(len(pairs)), token_budget=max(PACKED_TOKENS, longest), share_prompts=False):
        with packed_hidden(loaded, batch) as hidden_MH:
            part = loaded.head.logits(hidden_MH).cpu()
        if logits is None:
            logits = part.new_empty(len(table.token_ids), part.shape[1])
        logits[batch.table_rows] = part
    assert logits is not None
    return logits


def _blank(ids: tuple[int, ...], sample: int) -> Completion:
    zeros, ones = (0.0,) * len(ids), (1.0,) * len(ids)
    return Completion(
        token_ids=ids, logprobs=zeros, kept_mass=ones, finish_reason="length", policy_version=0, sample=sample
    )


@dataclass(frozen=True)
class Context:
    """How a prompt is changed before the completion is scored."""

    deviation: Deviation | None
    change: Callable[[tuple[int, ...]], tuple[int, ...]]


def contexts(tokenizer: Any, longest: int) -> tuple[Context, ...]:
    """Every context, the unchanged one first. longest: tokens of the longest prompt of all."""
    found = [Context(None, lambda prompt: prompt)]
    bos = tokenizer.bos_token_id
    if bos is not None:
        found += [
            Context(
                Deviation("bos", f"taken with BOS (id {bos}) in front of the prompt"),
                lambda prompt: prompt if prompt[0] == bos else (bos, *prompt),
            ),
            Context(
                Deviation("bos", f"taken without the prompt's BOS (id {bos})"),
                lambda prompt: prompt[1:] if prompt[0] == bos and len(prompt) > 1 else prompt,
            ),
        ]
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    if pad is not None:
        name = f"taken with the padding token (id {pad}) attended: "
        found += [
            Context(Deviation("padding", f"{name}one in front"), lambda prompt: (pad, *prompt)),
            Context(
                Deviation("padding", f"{name}prompts left-padded to {longest}"),
                lambda prompt: (pad,) * (longest - len(prompt)) + prompt,
            ),
            Context(
                Deviation("padding", f"{name}prompts right-padded to {longest}"),
                lambda prompt: prompt + (pad,) * (longest - len(prompt)),
            ),
        ]
    return tuple(found)
