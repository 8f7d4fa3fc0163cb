"""Fused layers: as right as the plain ones against float64, proven per module, and gone without a trace after undo."""

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers_model import FAMILIES, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from rhotrain.kernels.backend import HAS_TRITON, INTERPRETED
from rhotrain.model import fused_ops
from rhotrain.model.attention import PackedContext
from rhotrain.model.fused import FusedLayers, fuse_layers
from rhotrain.model.fused_ops import gate_op, norm_op, rotary_op, why_unavailable
from rhotrain.model.fused_timing import Timing, fastest
from rhotrain.model.load import LoadedModel, LoadError, load_model, save_model
from rhotrain.model.packed import PackedWeights
from rhotrain.model.probe import probe

LENS = (9, 5)
CPU = torch.device("cpu")

# kind -> how many modules of a two-layer model
EXPECTED = {
    **{family: {"norm": 5, "gate": 2, "rotary": 2} for family in ("llama", "qwen2", "mistral", "phi3")},
    "qwen3": {"norm": 9, "gate": 2, "rotary": 2},
    "qwen3_moe": {"norm": 9, "rotary": 2},
    "gemma2": {"norm": 9, "gate": 2, "rotary": 2},
    "gpt2": {},
}


def hidden(loaded: LoadedModel, lens: tuple[int, ...] = LENS) -> Tensor:
    """[T, H] on fixed token ids; the context is left set, for a backward pass that recomputes."""
    total = sum(lens)
    ids = torch.randint(0, loaded.vocab_size, (total,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lens])
    loaded.attention.context = PackedContext.make(lens, device=loaded.device)
    return loaded.hidden(ids.to(loaded.device), positions.to(loaded.device))


def results(loaded: LoadedModel, lens: tuple[int, ...] = LENS) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient of a fixed function of them, in float64, each flattened."""
    out = hidden(loaded, lens)
    mix = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad((out * mix).sum(), loaded.parameters(), allow_unused=True)
    flat = torch.cat([g.double().flatten() for g in grads if g is not None])
    return out.detach().double().flatten().cpu(), flat.cpu()


def count(fused: FusedLayers) -> dict[str, int]:
    kinds = [kind for _, kind, _ in fused.fused]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def check_parity(
    family: str, dtype: torch.dtype, how: str, *, seeds: int = 1, lens: tuple[int, ...] = LENS, device: str = "cpu"
) -> None:
    """Forward and gradient at most twice as far from float64 as the plain layers', over `seeds` models: after two
    layers one model says little, by chance either side is off by twice as much as the other."""
    errors = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(seeds):
        loaded, exact = tiny_model(family, seed, dtype=dtype), tiny_model(family, seed, dtype=torch.float64)
        exact.model.load_state_dict(loaded.model.state_dict())
        loaded.model.to(device)  # type: ignore[arg-type]
        truth, plain = results(exact, lens), results(loaded, lens)
        fused = fuse_layers(loaded, how)
        assert how == "auto" or count(fused) == EXPECTED[family], fused.describe()
        for side, values in enumerate((plain, results(loaded, lens))):
            errors[side] += torch.stack([(v - t).norm() / t.norm() for v, t in zip(values, truth)])
    assert bool((errors[0] > 0).all())
    assert bool((errors[1] <= 2 * errors[0]).all()), f"plain {errors[0].tolist()}, fused {errors[1].tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_layers_are_as_exact_as_plain(family: str, dtype: torch.dtype) -> None:
    check_parity(family, dtype, "torch", seeds=3)


@pytest.fixture
def liger_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Liger's kernels in the interpreter, which lacks what they take from CUDA: libdevice's functions, and a launch
    that passes a Python float as a float32."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed (pip install 'rhotrain[fused]')")
    if not (HAS_TRITON and INTERPRETED):
        pytest.skip("needs Triton's interpreter; on a GPU test_liger_on_cuda runs the kernels")
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm  # pyright: ignore
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt

    def convert(value: Any) -> Any:
        if type(value) is float:
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return original(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    yield


# qwen3 has norms over heads, gemma2 1 + weight and gelu, phi3 one matrix for gate and up. Not bfloat16: the interpreter
# truncates where a GPU rounds.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in ("llama", "qwen3", "gemma2", "phi3")), ("gemma2", torch.float16)],
    ids=str,
)
def test_liger_layers_are_as_exact_as_plain(family: str, dtype: torch.dtype, liger_interpreted: None) -> None:
    check_parity(family, dtype, "liger", seeds=2, lens=(3, 1))


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["liger", "compile", "torch", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_on_cuda(family: str, how: str) -> None:
    reason = None if how == "auto" else why_unavailable(how, torch.device("cuda"))  # type: ignore[arg-type]
    if reason:
        pytest.skip(reason)
    check_parity(family, torch.bfloat16, how, seeds=3, device="cuda")


def compiler_missing() -> str | None:
    return why_unavailable("compile", CPU)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_compiled_layers_are_as_exact_as_plain(family: str) -> None:
    if reason := compiler_missing():
        pytest.skip(reason)
    check_parity(family, torch.float32, "compile", seeds=2)


@pytest.mark.slow
def test_compiled_layers_take_any_number_of_rows() -> None:
    if reason := compiler_missing():
        pytest.skip(reason)
    from torch._dynamo.utils import counters

    loaded = tiny_model("qwen3")
    fuse_layers(loaded, "compile")
    with torch.no_grad():
        for rows in (7, 1):
            hidden(loaded, (rows,))
        before = counters["stats"]["unique_graphs"]
        assert before > 0
        for rows in (2, 3, 5, 8, 33):
            hidden(loaded, (rows,))
    assert counters["stats"]["unique_graphs"] == before


# ---- single operations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_short_norm_gradient(dtype: torch.dtype, offset: float) -> None:
    """The hand-written backward, on strided rows, a zero row and rows where eps counts, against float64 autograd."""
    g = torch.Generator().manual_seed(0)
    eps = 1e-3
    x = torch.randn(1, 6, 3, 40, generator=g).to(dtype).transpose(1, 2)[..., ::2]
    x = (x * torch.tensor([1.0, 0.03, 0.0, 1.0, 10.0, 0.1])[:, None].to(dtype)).requires_grad_()
    weight = torch.randn(20, generator=g).to(dtype).requires_grad_()
    grad = torch.randn(x.shape, generator=g).to(dtype)
    y = norm_op("torch", size=20, eps=eps, offset=offset, device=CPU)(x, weight)
    assert y.dtype == dtype
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y64 = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps) * (offset + w64)
    bound = 2 * torch.finfo(dtype).eps
    values = (y, *torch.autograd.grad(y, (x, weight), grad))
    for value, exact in zip(values, (y64, *torch.autograd.grad(y64, (x64, w64), grad.double()))):
        value, exact = value.detach(), exact.detach()
        assert float((value.double() - exact).abs().max() / exact.abs().max()) <= bound


def test_same_bits_with_and_without_autograd() -> None:
    """Rollout runs without autograd, training with it: one function, or the ratio would not be 1."""
    for family in ("llama", "gemma2", "phi3"):
        loaded = tiny_model(family)
        fuse_layers(loaded, "torch")
        with torch.no_grad():
            sampled = hidden(loaded)
        trained = hidden(loaded)
        assert trained.requires_grad and torch.equal(sampled, trained)


def test_plain_products_keep_their_bits() -> None:
    """The gated product by PyTorch is the plain one, in place where nobody can see it."""
    gate, up = torch.randn(2, 5, 64)
    kept = gate.clone()
    product = gate_op("torch", activation="silu")
    assert torch.equal(product(gate.requires_grad_(), up), F.silu(kept) * up)
    assert torch.equal(gate, kept)
    with torch.no_grad():
        assert torch.equal(product(gate, up), F.silu(kept) * up)


# ---- nothing else changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_is_bit_for_bit(family: str) -> None:
    loaded = tiny_model(family)
    before, calls, keys = hidden(loaded), loaded.attention.calls, list(loaded.model.state_dict())
    attributes = [set(vars(module)) for module in loaded.model.modules()]
    fused = fuse_layers(loaded, "torch")
    assert loaded.attention.calls == calls and list(loaded.model.state_dict()) == keys
    assert torch.equal(before, hidden(loaded)) == (family == "gpt2")
    fused.undo()
    assert torch.equal(before, hidden(loaded))
    assert [set(vars(module)) for module in loaded.model.modules()] == attributes


def test_another_model_of_the_process_is_left_alone() -> None:
    first, second = tiny_model("llama", 0), tiny_model("llama", 1)
    before = hidden(second)
    function = modeling_llama.apply_rotary_pos_emb
    forwards = [inspect.getattr_static(type(m), "forward") for m in first.model.modules()]
    fuse_layers(first, "torch")
    assert torch.equal(before, hidden(second))
    assert modeling_llama.apply_rotary_pos_emb is function
    assert [inspect.getattr_static(type(m), "forward") for m in first.model.modules()] == forwards


def test_deepcopy_is_fused_and_on_its_own() -> None:
    loaded = tiny_model("qwen3")
    fuse_layers(loaded, "torch")
    before = hidden(loaded)
    twin = copy.deepcopy(loaded)
    for module, other in zip(loaded.model.modules(), twin.model.modules()):
        assert ("forward" in vars(module)) == ("forward" in vars(other))
        assert "forward" not in vars(other) or vars(other)["forward"].__self__ is other
    assert torch.equal(before, hidden(twin))
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.mul_(0.9)
    assert torch.equal(before, hidden(loaded)) and not torch.equal(before, hidden(twin))


def test_checkpointing_recomputes_the_same() -> None:
    for family in ("llama", "gemma2"):
        plain = tiny_model(family)
        fuse_layers(plain, "torch")
        loaded = tiny_model(family, gradient_checkpointing=True)
        fuse_layers(loaded, "torch")
        probe(loaded)
        calls = loaded.attention.calls
        for value, expected in zip(results(loaded), results(plain)):
            assert torch.equal(value, expected)
        assert loaded.attention.calls == calls + 2 * loaded.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_probe_and_dropout_sites(family: str) -> None:
    sites = tiny_model(family).dropout_sites
    loaded = tiny_model(family)
    fuse_layers(loaded, "torch")
    probe(loaded)
    assert loaded.dropout_sites == sites


def test_saved_folder_is_the_plain_one(tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    before = hidden(loaded)
    fuse_layers(loaded, "torch")
    again = load_model(str(save_model(loaded, tmp_path / "m")), device="cpu", probe=False)
    assert torch.equal(before, hidden(again))


class CountPacked(TorchDispatchMode):
    """Counts packed products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "_linear_pointwise" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_with_packed_weights(family: str) -> None:
    """The projections still read the same tensor one after the other, so packing merges them as before."""
    loaded = tiny_model(family)
    before = hidden(loaded).detach()
    merged = PackedWeights(loaded, min_elements=1)
    if merged.why_not:
        pytest.skip(merged.why_not)
    with torch.no_grad(), merged.using(), CountPacked() as plain_count:
        hidden(loaded)
    fuse_layers(loaded, "torch")
    packed = PackedWeights(loaded, min_elements=1)
    with torch.no_grad(), packed.using(), CountPacked() as fused_count:
        first, second = hidden(loaded), hidden(loaded)
    assert fused_count.products == 2 * plain_count.products > 0
    assert torch.equal(first, second)
    torch.testing.assert_close(first, before, rtol=1e-4, atol=1e-4)


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_auto_and_its_spec() -> None:
    """What auto chose can be asked for by name, and is then the same function, bit for bit, without measuring."""
    loaded = tiny_model("llama")
    state = torch.get_rng_state()
    fused = fuse_layers(loaded, "auto")
    assert torch.equal(state, torch.get_rng_state())
    timed = {(timing.kind, timing.implementation) for timing in fused.timings}
    assert timed == {(kind, name) for kind in ("norm", "gate", "rotary") for name in ("plain", "torch")}
    assert all(timing.decode_us > 0 and timing.train_us > 0 for timing in fused.timings)
    assert fused.chosen == {kind: fastest(kind, fused.timings) for kind in ("norm", "gate", "rotary")}
    after = hidden(loaded)
    again = tiny_model("llama")
    same = fuse_layers(again, fused.spec)
    assert (same.chosen, same.fused, same.timings) == (fused.chosen, fused.fused, ())
    assert torch.equal(after, hidden(again))
    assert all(str(timing) in fused.describe() for timing in fused.timings)


def test_mixed_spec() -> None:
    loaded = tiny_model("llama")
    fused = fuse_layers(loaded, "norm=plain,gate=torch,rotary=torch")
    assert count(fused) == {"gate": 2, "rotary": 2} and fused.chosen["norm"] == "plain"


def test_fastest() -> None:
    plain = Timing("norm", "plain", 100.0, 100.0)
    fast, slow_training = Timing("norm", "torch", 50.0, 100.0), Timing("norm", "liger", 20.0, 150.0)
    assert fastest("norm", [plain, fast, slow_training]) == "torch"
    assert fastest("norm", [plain, slow_training]) == "plain"
    assert fastest("norm", [plain, Timing("norm", "torch", 99.0, 50.0)]) == "plain"
    assert fastest("gate", [plain, fast]) == "plain"


def test_off_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    off = fuse_layers(loaded, "off")
    assert not off.fused and off.spec == "norm=plain,gate=plain,rotary=plain"
    for wrong in ("fast", "norm=torch", "norm=torch,gate=torch,rotary=fast", ""):
        with pytest.raises(
            LoadError, match=r"fused_layers .* is unknown; need one of off, auto, liger, compile, torch"
        ):
            fuse_layers(loaded, wrong)
    monkeypatch.setattr(fused_ops, "INTERPRETED", False)
    with pytest.raises(LoadError, match=r"'liger' cannot be had: .*(CUDA|rhotrain\[fused\])"):
        fuse_layers(loaded, "liger")
    monkeypatch.setattr(fused_ops.shutil, "which", lambda _: None)
    with pytest.raises(LoadError, match=r"'compile' cannot be had: .*C\+\+ compiler"):
        fuse_layers(loaded, "compile")


def test_fusing_twice_changes_nothing() -> None:
    loaded = tiny_model("llama")
    fuse_layers(loaded, "torch")
    before = hidden(loaded)
    again = fuse_layers(loaded, "torch")
    assert not again.fused and len(again.plain) == 9
    again.undo()
    assert torch.equal(before, hidden(loaded))


def test_rotary_formula() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 5, 8, generator=g), torch.randn(1, 2, 5, 8, generator=g)
    angle = torch.rand(1, 5, 4, generator=g).repeat(1, 1, 2)
    for x, y in zip((q, k), rotary_op("torch")(q, k, angle.cos(), angle.sin())):
        turned = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1).contiguous())
        expected = torch.view_as_real(turned * torch.polar(torch.ones(1).double(), angle[..., :4].double())[:, None])
        torch.testing.assert_close(y.double(), torch.cat(expected.unbind(-1), -1), rtol=1e-5, atol=1e-6)
