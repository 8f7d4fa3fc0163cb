"""A loaded model: the Hugging Face modules, their tokenizer, and what training and rollout need to know
about them."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rhotrain.model.adapter import Adapter
from rhotrain.model.attention import AttentionState, LayerCall, PackedContext, PagedContext
from rhotrain.model.dropout import TRIAL, ConfigDropout, DropoutSite, find_sites, probabilities
from rhotrain.model.head import Head, head_of
from rhotrain.model.offload import ParkedModel, offloaded_inputs


class LoadError(ValueError):
    """A model that cannot be used. The message names the model, the value and the reason or the fix."""


TRIAL_TOKENS = 8
"""Length of the sequence on which dropout sites are tried."""


def check_dropout(spec: str, p: float) -> None:
    """LoadError unless `p` is a probability of dropping below 1 (at 1 nothing would be left)."""
    if not 0.0 <= p < 1.0:
        raise LoadError(f"{spec}: dropout is {p}; need a probability: 0 <= dropout < 1")


@dataclass(eq=False, kw_only=True)
class LoadedModel:
    """Mutable on purpose: the optimiser changes the weights in place, and `policy_version` rises with each
    of its steps.

    model: the PreTrainedModel, in train mode, every dropout probability 0 outside of `with_dropout`, attention
    by `rhotrain.model.attention`. tokenizer: its tokenizer. spec: what `load_model` was asked for.
    attention: the state that all modules share; `with_attention` sets its context.
    vocab_size: real vocabulary, max(len(tokenizer), largest special id + 1), at most the head's rows. Rows
        from there on are padding, masked to -inf in sampler and trainer alike.
    stop_token_ids: ids that end a completion: generation_config, configuration, tokenizer and chat template
    together. max_positions: longest sequence the positions allow, None without a limit.
    generation_config: as it came. Only its stop ids are used; it is written back by `save_model`.
    config_dropout: the dropout that the configuration asked for, written back by `save_model`.
    dropout: the probability that `with_dropout` puts in; 0 unless a user asked for dropout by name.
    notes: what was changed or not applied, for the log.
    fused_layers: how RMSNorm, gated MLP and rotary run, as `load_model` takes it; `auto` is resolved here.
    adapter: the LoRA adapter that is trained instead of the weights. adapter_off: this view computes as the base does.
    offload_activations: layer inputs of differentiable forwards wait for their backward pass on the CPU (offload.py).
    parked: the model rests on the CPU outside of `awake`.
    """

    model: nn.Module
    tokenizer: Any
    spec: str
    attention: AttentionState
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    max_positions: int | None
    generation_config: Any = None
    config_dropout: ConfigDropout = field(default_factory=ConfigDropout)
    dropout: float = 0.0
    notes: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    policy_version: int = 0
    fused_layers: str = "off"
    adapter: Adapter | None = None
    adapter_off: bool = False
    offload_activations: bool = False
    parked: ParkedModel | None = None

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()  # type: ignore[union-attr, operator]

    @property
    def architecture(self) -> str:
        """Name of the model's class, for messages."""
        return type(self.model).__name__

    @property
    def head(self) -> Head:
        """The head's tensors; read anew each time, so that moving the model cannot leave stale ones
        behind."""
        return head_of(self.model)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def full_precision(self) -> bool:
        """True when it computes in float32 or wider: sampler and trainer then agree to about 1e-5."""
        return self.dtype in (torch.float32, torch.float64)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def body(self) -> Any:
        """The decoder without its head."""
        model: Any = self.model
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        body = model.base_model if decoder is None else decoder
        if body is model:
            raise LoadError(f"{self.architecture}: has no body apart from its head (get_decoder, base_model)")
        return body

    @cached_property
    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(Hk, D, E) per layer: heads and sizes of the keys and values that the attention function gets."""
        with torch.no_grad():
            calls = self.layer_calls(torch.zeros(1, dtype=torch.int64, device=self.device))
        by_layer = {call.layer: (call.kv_heads, call.key_dim, call.value_dim) for call in calls}
        return tuple(by_layer[layer] for layer in range(self.num_layers))

    def layer_calls(self, input_ids_T: Tensor) -> list[LayerCall]:
        """Run the body on one sequence and return what each layer asked of the attention function."""
        positions_T = torch.arange(input_ids_T.numel(), device=input_ids_T.device)
        record: list[LayerCall] = []
        self.attention.record = record
        try:
            with self.with_attention(PackedContext.make([input_ids_T.numel()], device=input_ids_T.device)):
                self.hidden(input_ids_T, positions_T)
        finally:
            self.attention.record = None
        return record

    def hidden(self, input_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """Packed ids and positions int64 [T] -> hidden [T, H]. An attention context must be set.

        No cache object and no mask: K/V live in the context, and transformers' Cache API differs between
        5.17 and 5.24.
        """
        moving: AbstractContextManager[object] = nullcontext()
        if self.offload_activations and torch.is_grad_enabled():
            moving = offloaded_inputs(input_ids_T.numel(), self.config.hidden_size)
        with moving:
            output = self.body(input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False)
        return output.last_hidden_state[0]

    def awake(self) -> AbstractContextManager[None]:
        """Context manager with the weights on the device they compute on; only a parked model is ever elsewhere."""
        return nullcontext() if self.parked is None else self.parked.awake()

    def with_attention(self, context: PackedContext | PagedContext) -> AbstractContextManager[None]:
        """Context manager that sets the attention context. Keep it open until backward has ended:
        checkpointing runs the layers again, and they must see the same context."""
        return self._without_adapter(context) if self.adapter_off else self.attention.using(context)

    @contextmanager
    def _without_adapter(self, context: PackedContext | PagedContext) -> Iterator[None]:
        assert self.adapter is not None
        with self.adapter.off(), self.attention.using(context):
            yield

    def base(self) -> "LoadedModel":
        """The same modules with the adapter off whenever this view computes: the reference of a LoRA run, at no further
        memory. Raises LoadError without an adapter."""
        if self.adapter is None:
            raise LoadError(f"{self.spec}: has no adapter, so there is no base apart from it")
        return replace(self, adapter_off=True)

    @cached_property
    def _sites(self) -> tuple[DropoutSite, ...]:
        """Found by trial on first use: one small forward per attribute that may be a dropout probability."""
        positions_T = torch.arange(min(TRIAL_TOKENS, self.vocab_size), device=self.device)

        def forward() -> Tensor:
            with self.with_attention(PackedContext.make([positions_T.numel()], device=self.device)):
                return self.hidden(positions_T, positions_T)

        calls, training = self.attention.calls, self.model.training
        self.model.train()
        self.attention.dropout = TRIAL
        try:
            return find_sites(self.model, forward)
        finally:
            self.attention.dropout, self.attention.calls = 0.0, calls
            self.model.train(training)

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        """Names of the places where dropout acts on the hidden states, whatever the configuration's values are:
        llama has `attention_dropout`, gpt2 attention, residual and embedding dropout. Empty where there is none."""
        return tuple(site.name for site in self._sites)

    @contextmanager
    def with_dropout(self, p: float | None = None) -> Iterator[None]:
        """Every dropout site has probability `p` inside (None: `self.dropout`), and what it had before after.

        Keep it open until backward has ended: checkpointing runs the layers again. Masks come from torch's global
        generator. A rollout inside is refused by the attention function; in eval mode nothing is dropped.
        Raises LoadError for a `p` outside of [0, 1), and, for a `p` above 0, when the model has no dropout site, or
        recomputes layers without keeping the random state (gradient_checkpointing with `self.dropout` 0).
        """
        p = self.dropout if p is None else p
        check_dropout(self.spec, p)
        if p and not self.dropout_sites:
            raise LoadError(f"{self.spec}: {self.architecture} has no place for dropout {p}; leave it at 0")
        if p and self.gradient_checkpointing and not self.dropout:
            raise LoadError(
                f"{self.spec}: was loaded with gradient_checkpointing and dropout 0, so recomputed layers would draw "
                f"other masks than the forward; load it with dropout={p}"
            )
        previous = self.attention.dropout
        places = [place for site in self._sites for place in site.places] if p or previous else []
        with probabilities(places, p):
            self.attention.dropout = p
            try:
                yield
            finally:
                self.attention.dropout = previous

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once (a tied head is one parameter)."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings of transformers inside; the previous settings come back."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """For the first import of bitsandbytes, which PEFT imports where it is there: it warns of an optional CPU kernel of
    another package, which nothing here calls."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
