"""Dropout by name: where it acts, that it acts there only while asked for, and that recomputed masks are the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_model import SHARED, save_tiny, tiny_hf_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from rhotrain.kernels.paged_attention import PagedBatch
from rhotrain.model import attention
from rhotrain.model.attention import PackedContext, PagedContext
from rhotrain.model.load import LoadedModel, LoadError, adopt_model, load_model, save_model

SITES: dict[str, tuple[str, ...]] = {
    "llama": ("attention_dropout",),
    "qwen3": ("attention_dropout",),
    "gemma2": ("attention_dropout",),
    "gpt2": ("GPT2MLP.dropout", "GPT2Model.drop", "attn_dropout", "resid_dropout"),
    "phi3": ("attention_dropout", "resid_attn_dropout", "resid_mlp_dropout"),
    "opt": ("OPTAttention.dropout", "OPTDecoderLayer.dropout"),
    "persimmon": ("PersimmonDecoderLayer.dropout", "attention_dropout"),
}
"""persimmon's attention dropout lives in the configuration, opt's are attributes, gpt2's are modules."""

OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.2},
    "persimmon": {},
}

LENS = (9, 4)


def adopt(family: str, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, **options: Any) -> LoadedModel:
    """A tiny model of `family`, the same weights at every call."""
    if family not in OTHERS:
        model = tiny_hf_model(family, dtype=dtype)
    else:
        config = AutoConfig.for_model(family, **{**SHARED, "initializer_range": 0.3, **OTHERS[family]})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    return adopt_model(model, tiny_tokenizer(), spec=family, dropout=dropout, **options)


def hidden(loaded: LoadedModel) -> Tensor:
    ids = torch.randint(5, 77, (sum(LENS),), generator=torch.Generator().manual_seed(0))
    with loaded.with_attention(PackedContext.make(LENS)):
        return loaded.hidden(ids, torch.cat([torch.arange(n) for n in LENS]))


@pytest.mark.parametrize("family", SITES)
def test_sites_whatever_the_configuration_says(family: str) -> None:
    """The helpers' llama asks for 0, gpt2 for 0.1, opt for 0.1 and a layerdrop of 0.2."""
    assert adopt(family).dropout_sites == SITES[family]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_looking_for_sites_changes_nothing(family: str) -> None:
    """Asked for late, in eval mode, where no dropout would show. opt draws for its layerdrop even at 0."""
    loaded = adopt(family)
    loaded.model.eval()
    before, calls = torch.get_rng_state(), loaded.attention.calls
    assert loaded.dropout_sites == SITES[family]
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in loaded.model.modules())
    assert (loaded.attention.calls, loaded.attention.dropout) == (calls, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("family", SITES)
def test_acts_inside_and_nowhere_else(family: str) -> None:
    loaded = adopt(family, dropout=0.1)
    plain = hidden(loaded)
    with loaded.with_dropout():
        first, second = hidden(loaded), hidden(loaded)
        with loaded.with_dropout(0.0):
            assert torch.equal(hidden(loaded), plain)
        assert not torch.equal(hidden(loaded), plain)
        loaded.model.eval()
        assert torch.equal(hidden(loaded), plain)
        loaded.model.train()
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain) and not torch.equal(second, plain)
    assert torch.equal(hidden(loaded), plain)
    assert torch.equal(hidden(adopt(family)), plain)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "opt", "persimmon"])
def test_every_site_has_the_probability(family: str) -> None:
    """Seen from where it is used: the probabilities that torch's dropout and the attention function are given."""
    loaded, seen = adopt(family, dropout=0.1), []
    real: Callable[..., Tensor] = nn.functional.dropout

    def spy(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        seen.append(p if training else 0.0)
        return real(input, p, training, inplace)

    def spy_attention(*args: Any, dropout: float, **kwargs: Any) -> Tensor:
        seen.append(dropout)
        return attention_before(*args, dropout=dropout, **kwargs)

    attention_before = attention.varlen_attention
    with pytest.MonkeyPatch.context() as patch, loaded.with_dropout(0.25):
        patch.setattr(nn.functional, "dropout", spy)
        patch.setattr(attention, "varlen_attention", spy_attention)
        hidden(loaded)
        assert len(seen) >= 2 * loaded.num_layers and set(seen) == {0.25}
        seen.clear()
        with loaded.with_dropout(0.0):
            hidden(loaded)
        assert set(seen) == {0.0}


def test_layerdrop_and_router_noise_stay_off() -> None:
    loaded = adopt("opt", dropout=0.5)
    with loaded.with_dropout():
        assert loaded.model.get_submodule("model.decoder").layerdrop == 0.0
        assert loaded.config.layerdrop == 0.0
    model = tiny_hf_model("llama")
    model.config.router_jitter_noise = 0.1
    loaded = adopt_model(model, tiny_tokenizer(), dropout=0.5)
    with loaded.with_dropout():
        assert loaded.config.router_jitter_noise == 0.0


@torch.no_grad()
def test_previous_values_come_back_after_an_exception() -> None:
    loaded = adopt("gpt2", dropout=0.1)
    plain, drop = hidden(loaded), loaded.model.get_submodule("transformer.drop")
    with loaded.with_dropout():
        with pytest.raises(KeyError), loaded.with_dropout(0.4):
            assert (drop.p, loaded.attention.dropout) == (0.4, 0.4)
            raise KeyError
        assert (drop.p, loaded.attention.dropout) == (0.1, 0.1)
    assert (drop.p, loaded.attention.dropout) == (0.0, 0.0)
    assert torch.equal(hidden(loaded), plain)


def gradients(loaded: LoadedModel, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    with loaded.with_dropout(), loaded.with_attention(PackedContext.make(LENS)):
        rows = hidden(loaded)
        weights = torch.randn(rows.shape, dtype=rows.dtype, generator=torch.Generator().manual_seed(1))
        used = [p for p in loaded.parameters() if p is not loaded.head.weight or loaded.config.tie_word_embeddings]
        return list(torch.autograd.grad((rows * weights).sum(), used))


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest relative difference of a parameter's gradient."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "opt", "persimmon"])
def test_checkpointing_draws_the_same_masks_again(family: str) -> None:
    plain = gradients(adopt(family, torch.float64, dropout=0.2), 3)
    loaded = adopt(family, torch.float64, dropout=0.2, gradient_checkpointing=True)
    again = gradients(loaded, 3)
    assert distance(again, plain) < 1e-12
    assert distance(gradients(loaded, 4), plain) > 1e-3, "another seed has other masks"


def test_checkpointing_without_the_random_state_is_refused() -> None:
    """And rightly so: with that refusal out of the way, the gradient is wrong."""
    plain = gradients(adopt("llama", torch.float64, dropout=0.2), 3)
    loaded = adopt("llama", torch.float64, gradient_checkpointing=True)
    with (
        pytest.raises(LoadError, match=r"other masks than the forward; load it with dropout=0\.2"),
        loaded.with_dropout(0.2),
    ):
        pass
    loaded.dropout = 0.2
    assert distance(gradients(loaded, 3), plain) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts(checkpointing: bool) -> None:
    """Two equal completions behind one prompt: equal rows without dropout, each its own masks with it."""
    loaded = adopt("llama", torch.float64, dropout=0.2, gradient_checkpointing=checkpointing)
    prompt, tail = torch.arange(5, 11), torch.tensor([20, 21, 22])
    shared, ids = torch.arange(6), torch.cat([prompt, tail, tail])
    index = torch.cat([shared, shared, torch.arange(6, 9), shared, torch.arange(9, 12)])
    positions = torch.cat([shared, torch.arange(6, 9), torch.arange(6, 9)])
    context = PackedContext.make((6, 3, 3), (6, 9, 9), index)

    def rows() -> tuple[Tensor, Tensor]:
        with loaded.with_attention(context):
            out = loaded.hidden(ids, positions)
            grads = torch.autograd.grad(out.square().sum(), loaded.parameters())
        assert all(grad.isfinite().all() for grad in grads)
        return out[6:9].detach(), out[9:12].detach()

    first, second = rows()
    assert torch.allclose(first, second, rtol=0, atol=1e-12)
    with loaded.with_dropout():
        first, second = rows()
    # A row may keep all its weights in every head and layer, but not all three.
    assert (first - second).abs().max() > 1e-3


def test_probabilities_out_of_range_are_refused(tmp_path: Path) -> None:
    loaded = adopt("llama")
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(LoadError, match=f"dropout is {p}; need a probability: 0 <= dropout < 1"):
            load_model(str(tmp_path / "nothing here"), dropout=p)
        with pytest.raises(LoadError, match=f"dropout is {p}"):
            adopt("llama", dropout=p)
        with pytest.raises(LoadError, match=f"dropout is {p}"), loaded.with_dropout(p):
            pass


class _DeafAttention(LlamaAttention):
    """Takes no part in dropout: the attribute cannot be raised."""

    attention_dropout = property(lambda self: 0.0, lambda self, value: None)  # type: ignore[assignment]


def test_a_model_without_a_place_for_dropout_is_refused() -> None:
    model = tiny_hf_model("llama", attention_dropout=0.1)
    for module in model.modules():
        if isinstance(module, LlamaAttention):
            del module.attention_dropout
            module.__class__ = _DeafAttention
    with pytest.raises(LoadError, match=r"my model: LlamaForCausalLM has no place for dropout 0\.1"):
        adopt_model(model, tiny_tokenizer(), spec="my model", dropout=0.1)
    loaded = adopt_model(model, tiny_tokenizer(), spec="my model")
    assert loaded.dropout_sites == ()
    with loaded.with_dropout():  # 0: nothing was asked for, nothing is missing
        hidden(loaded)


def test_rollouts_never_see_dropout() -> None:
    """gpt2's residual dropout would reach the sampler without passing attention; the state knows of it."""
    loaded = adopt("gpt2", dropout=0.1)
    batch = PagedBatch.make(torch.zeros(1, 2, dtype=torch.int32), (6,), (6,), 4)
    context = PagedContext([], [], torch.arange(6), batch)
    loaded.model.eval()
    ids = torch.arange(5, 11)
    with (
        loaded.with_dropout(),
        loaded.with_attention(context),
        pytest.raises(ValueError, match=r"GPT2Attention: dropout 0\.1 in a rollout"),
    ):
        loaded.hidden(ids, torch.arange(6))


def test_note_names_sites_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = adopt("llama", dropout=0.1)
    assert loaded.notes[-1] == "dropout 0.1 in the current policy's forward only, at attention_dropout"

    def backend(*args: Any, dropout: float = 0.0, **kwargs: Any) -> str:
        return "sdpa" if dropout else "torch_varlen"

    monkeypatch.setattr(attention, "attention_backend", backend)
    assert adopt("llama", dropout=0.1).notes[-1].endswith("attention there by sdpa instead of torch_varlen")


def test_loading_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    loaded = adopt("llama", dropout=0.1)
    assert loaded.attention.calls == adopt("llama").attention.calls + 2 * loaded.num_layers, "trials are not counted"
    assert torch.equal(torch.get_rng_state(), before)


def test_saving_inside_writes_the_configuration_as_it_came(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "gpt2", "gpt2")), device="cpu", dropout=0.3)
    assert loaded.dropout == 0.3
    with loaded.with_dropout():
        save_model(loaded, tmp_path / "again")
        assert loaded.model.get_submodule("transformer.drop").p == 0.3
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["attn_pdrop"], saved["embd_pdrop"], saved["resid_pdrop"]) == (0.1, 0.1, 0.1)
    loaded = adopt("persimmon", dropout=0.3)
    with loaded.with_dropout():
        save_model(loaded, tmp_path / "persimmon")
        assert loaded.config.attention_dropout == 0.3
    assert json.loads((tmp_path / "persimmon" / "config.json").read_text())["attention_dropout"] == 0.0
    assert loaded.config.attention_dropout == 0.0
