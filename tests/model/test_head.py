"""The head as data: body + Head.logits are the model's own logits, whatever the family does to them."""

from typing import Any

import pytest
import torch
from helpers_model import SHARED, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from rhotrain.model.attention import PackedContext
from rhotrain.model.head import Head, head_of
from rhotrain.model.load import adopt_model

SCALED: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"logit_scale": 0.25}),
    ("granite", {"logits_scaling": 4.0}),
    ("hyperclovax", {"logits_scaling": 4.0}),
    ("phi", {}),
    ("gemma3_text", {"final_logit_softcapping": 3.0, "head_dim": 8, "sliding_window": 6}),
    ("llama", {"tie_word_embeddings": True}),
]


def random_model(family: str, options: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SHARED, "initializer_range": 0.5, **options})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter)
        return model


@pytest.mark.parametrize(("family", "options"), SCALED)
def test_body_and_head_are_the_logits(family: str, options: dict[str, Any]) -> None:
    model = random_model(family, options)
    ids = torch.arange(5, 15)
    with torch.no_grad():
        want = model.eval()(input_ids=ids[None], use_cache=False).logits[0]
        loaded = adopt_model(model, tiny_tokenizer(), spec=family)
        with loaded.with_attention(PackedContext.make([10])):
            got = loaded.head.logits(loaded.hidden(ids, torch.arange(10)))
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)
    bare = loaded.head.weight
    assert bare is model.get_output_embeddings().weight


def test_parts_of_the_head() -> None:
    assert head_of(random_model("cohere", {"logit_scale": 0.25})).logit_scale == 0.25
    assert head_of(random_model("granite", {"logits_scaling": 4.0})).logit_scale == 0.25
    assert head_of(random_model("hyperclovax", {"logits_scaling": 4.0})).logit_scale == 4.0
    assert head_of(random_model("phi", {})).bias is not None
    plain = tiny_model("llama").head
    assert (plain.bias, plain.softcap, plain.logit_scale) == (None, None, None)


def test_scale_comes_before_softcap() -> None:
    hidden, weight = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[3.0]], dtype=torch.float64)
    head = Head(weight, torch.tensor([1.0], dtype=torch.float64), softcap=5.0, logit_scale=0.5)
    assert head.logits(hidden).item() == pytest.approx(5.0 * torch.tanh(torch.tensor(0.7)).item())


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_logits_are_float32_or_wider(dtype: torch.dtype, out: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator).to(dtype)
    weight = torch.randn(6, 8, generator=generator).to(dtype)
    logits = Head(weight).logits(hidden)
    assert logits.dtype == out
    assert torch.allclose(logits.double(), hidden.double() @ weight.double().t(), atol=1e-5)


def test_tied_head_is_one_parameter_and_follows_the_model() -> None:
    loaded = tiny_model("llama")
    assert sum(p is loaded.head.weight for p in loaded.parameters()) == 1
    loaded.model.to(torch.bfloat16)
    assert loaded.head.weight.dtype == loaded.dtype == torch.bfloat16


def test_a_model_without_a_head_is_refused() -> None:
    body = tiny_model("llama").body
    with pytest.raises(ValueError, match="LlamaModel has no output embedding"):
        head_of(body)
