"""Packed weights: the same function as the modules' own, seen by nobody outside of `using`, never stale."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers_model import FAMILIES, SHARED, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from rhotrain.model import packed as packed_module
from rhotrain.model.attention import PackedContext
from rhotrain.model.load import LoadedModel, adopt_model
from rhotrain.model.packed import PackedWeights
from rhotrain.model.probe import relative_l2

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

TOLERANCE = 3e-6
"""Relative L2; float32 paths of two layers differ by 2e-7 to 1e-6."""
SEPARATE = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
MERGED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma2"), SEPARATE),
    "qwen3_moe": SEPARATE[:1],
    "phi3": (),
    "gpt2": (),
}
"""Per layer. phi3 and gpt2 come with merged weights; qwen3_moe's experts are no linears."""
PACKED_ALONE = {"phi3": 4, "gpt2": 4, "qwen3_moe": 1}
"""Products per layer that are one module; 2 (o, down) elsewhere."""


def forward(loaded: LoadedModel, tokens: int = 13) -> Tensor:
    """Hidden states [T, H] of one sequence."""
    ids = torch.arange(5, 5 + tokens)
    with loaded.with_attention(PackedContext.make([tokens])):
        return loaded.hidden(ids, torch.arange(tokens))


def packed_forward(weights: PackedWeights, tokens: int = 13) -> Tensor:
    with torch.no_grad(), weights.using():
        return forward(weights.loaded, tokens)


def merged_names(weights: PackedWeights) -> list[tuple[str, ...]]:
    names = {id(module): name for name, module in weights.loaded.body.named_modules()}
    groups = [product.modules for product in weights._find()]
    return [tuple(names[id(module)] for module in group) for group in groups if len(group) > 1]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the packed weight of every packed product, in the order of the calls."""
    shapes: list[tuple[int, ...]] = []
    real = packed_module._linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(packed_module, "_linear", counted)
    return shapes


@contextmanager
def everything_as_before(loaded: LoadedModel) -> Iterator[None]:
    """The model has the same attributes and gives the same bits after as before."""
    with torch.no_grad():
        bits = forward(loaded)
    attributes = [set(module.__dict__) for module in loaded.model.modules()]
    yield
    assert [set(module.__dict__) for module in loaded.model.modules()] == attributes
    with torch.no_grad():
        assert torch.equal(forward(loaded), bits)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_plain(family: str, gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model(family)
    weights = PackedWeights(loaded, min_elements=1)
    assert weights.why_not is None
    with everything_as_before(loaded), torch.no_grad():
        for tokens in (13, 1):
            plain = forward(loaded, tokens)
            gemms.clear()
            assert relative_l2(packed_forward(weights, tokens), plain) < TOLERANCE
            assert len(gemms) == loaded.num_layers * (len(MERGED[family]) + PACKED_ALONE.get(family, 2))
    assert weights.packs == 1 and weights.pack_seconds > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_siblings_are_found_by_trial(family: str) -> None:
    loaded = tiny_model(family)
    calls = loaded.attention.calls
    weights = PackedWeights(loaded, min_elements=1)
    start = "layers.{}."
    wanted = [tuple(start.format(i) + n for n in group) for i in range(loaded.num_layers) for group in MERGED[family]]
    assert merged_names(weights) == wanted
    assert loaded.attention.calls == calls
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loaded.model.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bytes_are_those_of_the_weights(family: str) -> None:
    weights = PackedWeights(tiny_model(family), min_elements=1)
    assert weights.packed_bytes == 0
    weights.refresh()
    kinds = (nn.Linear, Conv1D)
    linears: list[Any] = [module for module in weights.loaded.body.modules() if isinstance(module, kinds)]
    dense = 4 * (sum(module.weight.numel() for module in linears) + weights.loaded.head.weight.numel())
    assert dense <= weights.packed_bytes < 2 * dense  # outputs are padded to blocks of up to 64
    weights.release()
    assert weights.packed_bytes == 0
    assert relative_l2(packed_forward(weights), forward(weights.loaded).detach()) < TOLERANCE
    assert weights.packs == 2


@pytest.mark.parametrize("inputs", [48, 576, 1536])
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_rounding_is_that_of_float32(inputs: int, rows: int) -> None:
    """Against float64. Measured 0.5 to 2.3 times F.linear's error: one chain of sums against MKL's blocks."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(320, inputs, generator=generator)
    bias = torch.randn(320, generator=generator)
    truth = x.double() @ weight.double().t() + bias.double()
    plain = nn.functional.linear(x, weight, bias)
    got = packed_module._linear(x, packed_module._pack(weight), bias)
    assert got.dtype == torch.float32 and got.shape == (rows, 320)
    assert relative_l2(got, truth) < 3 * relative_l2(plain, truth) < 2e-6


def test_spoilt_rows_stay_alone() -> None:
    """One sequence per row, so that attention cannot spread it."""
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    embedding: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]
    loaded.head.weight.data[6], loaded.head.weight.data[8] = float("nan"), float("inf")
    assert embedding.weight is loaded.head.weight
    ids = torch.arange(5, 10)
    with torch.no_grad(), weights.using(), loaded.with_attention(PackedContext.make([1] * 5)):
        hidden = loaded.hidden(ids, torch.zeros(5, dtype=torch.int64))
        logits = weights.head_logits(hidden)
    assert hidden.isfinite().all(-1).tolist() == [True, False, True, False, True]
    columns = [i for i in range(96) if i not in (6, 8)]
    assert logits[:, columns].isfinite().all(-1).tolist() == [True, False, True, False, True]


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"logit_scale": 0.25}),
    ("phi", {}),
    ("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "query_pre_attn_scalar": 8}),
    ("llama", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "options"), HEADS)
def test_head_logits_are_the_heads(
    family: str, options: dict[str, Any], dtype: torch.dtype, gemms: list[tuple[int, ...]]
) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 in oneDNN")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SHARED, "initializer_range": 0.5, **options})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)
    loaded = adopt_model(model.to(dtype), tiny_tokenizer(), spec=family)
    weights = PackedWeights(loaded, min_elements=1)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        got, want = weights.head_logits(hidden), loaded.head.logits(hidden)
    assert gemms == [tuple(loaded.head.weight.shape)]
    assert got.dtype == torch.float32 and torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_bodies_are_packed(gemms: list[tuple[int, ...]]) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 in oneDNN")
    loaded = tiny_model("qwen2", dtype=torch.bfloat16)
    truth = tiny_model("qwen2")
    with torch.no_grad():
        plain, true = forward(loaded), forward(truth)
        got = packed_forward(PackedWeights(loaded, min_elements=1))
    assert got.dtype == torch.bfloat16 and len(gemms) == 8
    assert relative_l2(got, true) < 1.5 * relative_l2(plain, true)


def data_edit(loaded: LoadedModel) -> None:
    loaded.body.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def bias_edit(loaded: LoadedModel) -> None:
    loaded.body.layers[0].self_attn.k_proj.bias.data.add_(1.0)


def half_edit(loaded: LoadedModel) -> None:
    weight = loaded.body.layers[0].self_attn.o_proj.weight.data
    weight[:, ::2] += 1.0


def optimiser_step(fused: bool) -> Callable[[LoadedModel], None]:
    def step(loaded: LoadedModel) -> None:
        optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-2, fused=fused)
        forward(loaded).sum().backward()
        optimizer.step()

    return step


def load_state(loaded: LoadedModel) -> None:
    loaded.model.load_state_dict({name: 2 * value for name, value in loaded.model.state_dict().items()})


def moved(loaded: LoadedModel) -> None:
    layer = loaded.body.layers[0]
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.clone()


def replaced(loaded: LoadedModel) -> None:
    layer = loaded.body.layers[0]
    layer.self_attn.v_proj.weight = nn.Parameter(-layer.self_attn.v_proj.weight.data)


def next_version(loaded: LoadedModel) -> None:
    loaded.policy_version += 1


def to_and_fro(loaded: LoadedModel) -> None:
    loaded.model.to(torch.bfloat16).to(torch.float32)


CHANGES = {
    "data": data_edit,
    "bias": bias_edit,
    "half": half_edit,
    "AdamW": optimiser_step(fused=False),
    "fused AdamW": optimiser_step(fused=True),
    "load_state_dict": load_state,
    "moved": moved,
    "replaced": replaced,
    "policy_version": next_version,
    "to": to_and_fro,
}


@pytest.mark.parametrize("change", CHANGES)
def test_refresh_sees(change: str) -> None:
    loaded = tiny_model("qwen2")
    weights = PackedWeights(loaded, min_elements=1)
    weights.refresh()
    weights.refresh()
    assert weights.packs == 1
    CHANGES[change](loaded)
    with torch.no_grad():
        plain = forward(loaded)
    assert relative_l2(packed_forward(weights), plain) < TOLERANCE
    assert weights.packs == 2
    weights.refresh()
    assert weights.packs == 2


def test_nan_weights_are_packed_once() -> None:
    """NaN differs from itself; the bits do not."""
    loaded = tiny_model("llama")
    loaded.body.layers[0].mlp.up_proj.weight.data.fill_(float("nan"))
    weights = PackedWeights(loaded, min_elements=1)
    weights.refresh()
    weights.refresh()
    assert weights.packs == 1


def test_head_follows_the_weights_without_a_refresh() -> None:
    loaded = tiny_model("qwen3")
    weights = PackedWeights(loaded, min_elements=1)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = weights.head_logits(hidden)
        loaded.head.weight.mul_(2.0)
        assert torch.equal(weights.head_logits(hidden), 2 * first)
        loaded.head.weight.data.mul_(2.0)
        loaded.policy_version += 1
        assert torch.equal(weights.head_logits(hidden), 4 * first)


def test_old_copies_are_freed_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = PackedWeights(tiny_model("llama"), min_elements=1)
    weights.refresh()
    old = [weakref.ref(product.packed) for product in weights._find()] + [weakref.ref(weights._head)]
    assert len(old) == 9 and all(copy() is not None for copy in old)
    real = packed_module._pack

    def checked(weight: Tensor) -> Tensor:
        assert all(copy() is None for copy in old)
        return real(weight)

    monkeypatch.setattr(packed_module, "_pack", checked)
    weights.loaded.policy_version += 1
    weights.refresh()
    assert weights.packs == 2


def test_an_error_while_packing_leaves_no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    real, calls = packed_module._pack, [0]

    def failing(weight: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("no memory")
        return real(weight)

    monkeypatch.setattr(packed_module, "_pack", failing)
    with everything_as_before(loaded), pytest.raises(RuntimeError, match="no memory"):
        packed_forward(weights)
    assert weights.packs == 0
    assert relative_l2(packed_forward(weights), forward(loaded).detach()) < TOLERANCE
    assert weights.packs == 1


def test_exceptions_restore() -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    with everything_as_before(loaded), pytest.raises(KeyError), torch.no_grad(), weights.using():
        assert "forward" in loaded.body.layers[0].mlp.up_proj.__dict__
        raise KeyError
    assert relative_l2(packed_forward(weights), forward(loaded).detach()) < TOLERANCE


def test_changes_inside_are_respected() -> None:
    """Another dtype falls back to the modules' own forward; a forward that somebody else set stays."""
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    mlp = loaded.body.layers[0].mlp
    with torch.no_grad(), weights.using():
        loaded.model.to(torch.float64)
        inside = forward(loaded)
        foreign = mlp.up_proj.forward = lambda x: x
        del mlp.down_proj.forward
    assert mlp.up_proj.__dict__.pop("forward") is foreign
    assert inside.dtype == torch.float64 and torch.equal(forward(loaded), inside)


def test_nesting_is_harmless_in_any_order(gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    with everything_as_before(loaded), torch.no_grad():
        plain = forward(loaded)
        with weights.using():
            with weights.using():
                inner = forward(loaded)
            assert len(gemms) == 8
            assert torch.equal(forward(loaded), inner)
            assert len(gemms) == 16
        first, second = weights.using(), weights.using()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.equal(forward(loaded), plain)
        second.__exit__(None, None, None)
        other = PackedWeights(loaded, min_elements=1)
        with weights.using(), other.using():
            assert torch.equal(forward(loaded), inner)
    assert relative_l2(packed_forward(weights), plain) < TOLERANCE


def test_autograd_is_refused_and_survives_inside() -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    with everything_as_before(loaded), pytest.raises(RuntimeError, match="autograd is on"), weights.using():
        pass
    forward(loaded).sum().backward()
    want = [parameter.grad.clone() for parameter in loaded.parameters() if parameter.grad is not None]
    loaded.model.zero_grad()
    with torch.no_grad(), weights.using(), torch.enable_grad():
        forward(loaded).sum().backward()
        hidden = torch.randn(2, 32, requires_grad=True)
        assert weights.head_logits(hidden).requires_grad
    got = [parameter.grad for parameter in loaded.parameters() if parameter.grad is not None]
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want))


def test_autocast_keeps_its_dtype() -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = forward(loaded)
        with weights.using():
            assert torch.equal(forward(loaded), plain)


def test_inference_mode_merges_nothing(gemms: list[tuple[int, ...]]) -> None:
    weights = PackedWeights(tiny_model("llama"), min_elements=1)
    with torch.inference_mode():
        plain = forward(weights.loaded)
        with weights.using():
            assert relative_l2(forward(weights.loaded), plain) < TOLERANCE
    assert len(gemms) == 4  # o and down of two layers


def test_touched_modules_are_left_alone(gemms: list[tuple[int, ...]]) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    loaded = tiny_model("llama")
    layers = loaded.body.layers
    layers[0].mlp.down_proj.__class__ = Doubled
    own = layers[0].self_attn.o_proj.forward
    layers[0].self_attn.o_proj.forward = lambda x: own(x) + 1
    weights = PackedWeights(loaded, min_elements=1)
    layers[1].mlp.down_proj.register_forward_hook(lambda module, arguments, output: output - 1)
    layers[1].self_attn.k_proj.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
    nn.utils.parametrize.register_parametrization(layers[1].self_attn.o_proj, "weight", nn.Tanh())
    with everything_as_before(loaded), torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE
    assert len(gemms) == 3  # of 8: qkv and gate_up of layer 0, gate_up of layer 1
    assert layers[0].self_attn.o_proj.forward is not own


def test_siblings_pair_only_on_the_same_tensor(gemms: list[tuple[int, ...]]) -> None:
    weights = PackedWeights(tiny_model("qwen2"), min_elements=1)
    attention = weights.loaded.body.layers[0].self_attn
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    x, other = torch.randn(2, 1, 4, 32, generator=torch.Generator().manual_seed(0))

    def plain(module: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, module.weight, module.bias)

    def same(module: nn.Linear, x: Tensor) -> bool:
        return relative_l2(module(x), plain(module, x)) < TOLERANCE

    with torch.no_grad(), weights.using():
        assert same(q, x) and same(k, x) and same(v, x) and len(gemms) == 1
        assert all(product.input is None for product in weights._find()), "an input is held until all have read it"
        assert same(k, x) and same(v, x), "parts are taken once"
        assert same(k, other) and same(v, x) and same(q, other) and same(k, x) and same(v, other)
        assert same(v, x) and same(q, x) and same(v, x) and same(q, x) and same(k, x) and same(k, x)
        assert same(q, x) and same(k, x.clone())
        assert same(q, x)
        x.mul_(-3.0)
        assert same(k, x) and same(v, x), "the tensor was edited in between"
        assert same(q, x)
        with torch.enable_grad():
            assert v(x).requires_grad, "autograd went on in between"
        assert len(gemms) == 7, "each q computes one merged product; what does not match runs plain"
        first = q(x)
        first.zero_()
        assert same(k, x), "an edit of one sibling's output reaches no other"
    kept = weakref.ref(x)
    del x, first
    assert kept() is None, "nothing is held after exit, though v did not come"


def test_layers_that_are_run_twice(gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama")
    loaded.body.layers[1] = loaded.body.layers[0]
    weights = PackedWeights(loaded, min_elements=1)
    assert len(merged_names(weights)) == 2
    with torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE
    assert len(gemms) == 8


def test_modules_that_change_company_are_not_merged() -> None:
    loaded = tiny_model("llama")
    loaded.body.layers[1].mlp.gate_proj = loaded.body.layers[0].mlp.gate_proj
    weights = PackedWeights(loaded, min_elements=1)
    assert [names[0] for names in merged_names(weights)] == [f"layers.{i}.self_attn.q_proj" for i in range(2)]
    with torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE


def test_views_that_refuse_columns_are_not_merged(gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama")
    for layer in loaded.body.layers:
        mlp = layer.mlp

        def flat(x: Tensor, mlp: Any = mlp) -> Tensor:
            gate, up = mlp.gate_proj(x).view(-1), mlp.up_proj(x).view(-1)
            return mlp.down_proj((mlp.act_fn(gate) * up).view(*x.shape[:-1], -1))

        mlp.forward = flat
    weights = PackedWeights(loaded, min_elements=1)
    assert merged_names(weights) == []
    with torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE
    assert len(gemms) == 14


def test_modules_called_by_keyword_keep_their_forward(gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama")
    mlp = loaded.body.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(input=x))
    weights = PackedWeights(loaded, min_elements=1)
    with torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE
    assert len(gemms) == 7  # qkv, o, gate alone; and layer 1's four


def test_shared_weights_are_packed_once() -> None:
    alone, shared = tiny_model("llama"), tiny_model("llama")
    for module, first in zip(shared.body.layers[1].modules(), shared.body.layers[0].modules()):
        if isinstance(module, nn.Linear):
            module.weight = first.weight
    whole, once = PackedWeights(alone, min_elements=1), PackedWeights(shared, min_elements=1)
    whole.refresh()
    head = int(torch.ops.mkldnn._nbytes(whole._head))
    with torch.no_grad():
        assert relative_l2(packed_forward(once), forward(shared)) < TOLERANCE
    assert 2 * (once.packed_bytes - head) == whole.packed_bytes - head


def test_small_products_keep_their_forward(gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=2 * 48 * 32)  # gate and up together, head 96 x 32; qkv is 64 x 32
    with torch.no_grad():
        assert relative_l2(packed_forward(weights), forward(loaded)) < TOLERANCE
        weights.head_logits(torch.zeros(1, 32))
    assert gemms == [(96, 32)] * 3


WHY_NOT: dict[str, Callable[[LoadedModel], PackedWeights]] = {
    "float64": lambda loaded: PackedWeights(loaded, min_elements=1),
    "no linear layer of the model has 262144 weights": PackedWeights,
}


@pytest.mark.parametrize("reason", WHY_NOT)
def test_why_not(reason: str, gemms: list[tuple[int, ...]]) -> None:
    loaded = tiny_model("llama", dtype=torch.float64 if reason == "float64" else torch.float32)
    weights = WHY_NOT[reason](loaded)
    assert reason in str(weights.why_not)
    hidden = torch.ones(2, 32, dtype=loaded.dtype)
    with weights.using():  # no-op, so autograd may be on
        assert torch.equal(forward(loaded), forward(loaded))
        assert torch.equal(weights.head_logits(hidden), loaded.head.logits(hidden))
    weights.refresh()
    assert (gemms, weights.packs, weights.packed_bytes) == ([], 0, 0)


def test_a_model_that_moves_to_another_dtype_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama", dtype=torch.float64)
    weights = PackedWeights(loaded, min_elements=1)
    loaded.model.to(torch.float32)
    assert weights.why_not is None
    assert relative_l2(packed_forward(weights), forward(loaded).detach()) < TOLERANCE
    assert weights.packed_bytes > 0
    loaded.model.to(torch.float64)
    weights.refresh()
    assert "float64" in str(weights.why_not) and weights.packed_bytes == 0
    loaded.model.to(torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "oneDNN" in str(weights.why_not)


def test_nothing_outlives_the_object() -> None:
    loaded = tiny_model("llama")
    weights = PackedWeights(loaded, min_elements=1)
    packed_forward(weights)
    with torch.no_grad():
        weights.head_logits(torch.zeros(1, 32))
    gone: list[Any] = [weakref.ref(weights), weakref.ref(weights._head)]
    gone += [weakref.ref(product.packed) for product in weights._find()]
    gc.collect()
    gc.disable()  # reference counts alone must do: a cycle would hold the copies until some later collection
    try:
        del weights
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()
