"""token_logprobs and KeptSet against float64 truth."""

import math
from typing import Any

import pytest
import torch
from helpers_kernels import LOGIT_CASES, VOCABS, make_logits, run_plain, run_token_logprobs, ulp, upstream_for
from torch import Tensor

from rhotrain.kernels.backend import inverse_temperature, resolve_backend
from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.rows import row_blocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", LOGIT_CASES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_error_is_no_larger_than_eager(vocab: int, case: str) -> None:
    """Against float64: at most the same-dtype eager error plus 4 ulp of the largest |x / T|, values and gradients."""
    temperature = 0.7
    for rows in (1, 3):
        exact, ids = make_logits(case, rows, vocab)
        upstream = upstream_for(rows)
        truth, truth_grad = run_plain(exact, ids, upstream, temperature)
        largest = float(exact[torch.isfinite(exact)].abs().max()) / temperature
        for dtype in DTYPES:
            logits = exact.to(dtype)
            ours, grad = run_token_logprobs(logits, ids, upstream, temperature=temperature)
            eager, eager_grad = run_plain(logits, ids, upstream, temperature)
            for name, a, e, t in zip(("logprob", "entropy", "logsumexp"), ours, eager, truth):
                assert a.dtype == torch.float32
                bound = float((e.double() - t).abs().max()) + 4 * ulp(largest)
                assert float((a.double() - t).abs().max()) <= bound, (name, dtype, rows)
            assert grad.dtype == dtype and bool(grad.isfinite().all())
            bound = float((eager_grad.double() - truth_grad).abs().max()) + 4 * ulp(largest)
            assert float((grad.double() - truth_grad).abs().max()) <= bound, ("gradient", dtype, rows)


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_real_vocabularies(vocab: int) -> None:
    exact, ids = make_logits("blocks", 2, vocab)
    upstream = upstream_for(2)
    truth, truth_grad = run_plain(exact, ids, upstream, 1.3)
    ours, grad = run_token_logprobs(exact.float(), ids, upstream, temperature=1.3)
    for a, t in zip(ours, truth):
        assert float((a.double() - t).abs().max()) <= 1e-5
    assert float((grad.double() - truth_grad).abs().max()) <= 1e-6


def test_gradient_near_certainty_survives_bf16() -> None:
    """p = 0.999: p - 1 formed in bf16 would be wrong by 100 % (Liger #1329)."""
    logits = torch.zeros(1, 2, dtype=torch.float64)
    logits[0, 0] = 7.0
    leaf = logits.bfloat16().requires_grad_()
    token_logprobs(leaf, torch.tensor([0])).logprobs.sum().backward()
    assert leaf.grad is not None
    expected = 1.0 - torch.softmax(logits, -1)[0, 0]
    torch.testing.assert_close(leaf.grad[0, 0].double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("what", ["logprobs", "entropy", "logsumexp"])
def test_gradcheck(what: str, restricted: bool) -> None:
    exact, ids = make_logits("randn", 5, 13)
    ids.clamp_(max=10)
    kept = KeptSet.from_lists([sorted({int(i), 1, 4, 9}) for i in ids]) if restricted else None
    ids[2] = -100
    temperature = torch.tensor([0.5, 1.0, 1.0, 2.0, 1.3], dtype=torch.float64)

    def values(x: Tensor) -> Tensor:
        out = token_logprobs(x, ids, temperature=temperature, vocab_size=11, entropy=True, kept=kept)
        result: Tensor = getattr(out, what)
        return result

    assert torch.autograd.gradcheck(values, (exact.requires_grad_(),))


def test_each_output_alone_has_its_gradient() -> None:
    """An output that is not used contributes nothing, and upstream gradients differ per row."""
    exact, ids = make_logits("randn", 4, 37)
    for k in range(3):
        upstream = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
        upstream[k] = upstream_for(4)[k]
        leaf = exact.clone().requires_grad_()
        out = token_logprobs(leaf, ids, entropy=True)
        value = (out.logprobs, out.entropy, out.logsumexp)[k]
        assert value is not None
        (grad,) = torch.autograd.grad(value, leaf, upstream[k])
        _, expected = run_plain(exact, ids, tuple(upstream), 1.0)
        torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-13)


def test_per_row_temperature() -> None:
    exact, ids = make_logits("blocks", 6, 501)
    temperature = torch.tensor([0.1, 0.6, 1.0, 1.3, 2.0, 10.0])
    upstream = upstream_for(6)
    truth, truth_grad = run_plain(exact, ids, upstream, temperature.double())
    ours, grad = run_token_logprobs(exact, ids, upstream, temperature=temperature.double())
    for a, t in zip(ours, truth):
        torch.testing.assert_close(a, t, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, truth_grad, rtol=1e-10, atol=1e-13)
    for i in range(6):
        one = token_logprobs(exact[i : i + 1].float(), ids[i : i + 1], temperature=float(temperature[i]))
        many = token_logprobs(exact.float(), ids, temperature=temperature)
        torch.testing.assert_close(one.logprobs[0], many.logprobs[i], rtol=0, atol=4 * ulp(200))


def test_number_and_tensor_temperature_are_the_same_operation() -> None:
    for t in (0.1, 0.3, 0.6, 0.7, 1.3, 1.7, 3.0):
        number = inverse_temperature(t, torch.float32, torch.device("cpu"))
        tensor = inverse_temperature(torch.full((33,), t), torch.float32, torch.device("cpu"))
        assert bool((tensor == number).all())


def test_padded_vocabulary_does_not_exist() -> None:
    """A padding logit may be huge or NaN: same results as without it, and gradient exactly 0."""
    exact, ids = make_logits("randn", 3, 1000)
    ids.clamp_(max=899)
    padded = exact.float().clone()
    padded[:, 900:950] = 1e30
    padded[:, 950:] = math.nan
    upstream = upstream_for(3)
    ours, grad = run_token_logprobs(padded, ids, upstream, vocab_size=900)
    cut, cut_grad = run_token_logprobs(exact.float()[:, :900].contiguous(), ids, upstream)
    for a, b in zip(ours, cut):
        assert torch.equal(a, b)
    assert torch.equal(grad[:, :900], cut_grad) and bool((grad[:, 900:] == 0).all())


@pytest.mark.parametrize("layout", ["row_stride", "column_stride", "transposed", "expanded"])
def test_any_stride(layout: str) -> None:
    big = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    logits = {
        "row_stride": big[::2, :40],
        "column_stride": big[:4, ::2],
        "transposed": big[:, :4].t(),
        "expanded": big[:1].expand(4, 64),
    }[layout]
    ids = torch.arange(4)
    upstream = upstream_for(4)
    ours, _ = run_token_logprobs(logits.contiguous(), ids, upstream)
    leaf = big.clone().requires_grad_()
    view = {
        "row_stride": leaf[::2, :40],
        "column_stride": leaf[:4, ::2],
        "transposed": leaf[:, :4].t(),
        "expanded": leaf[:1].expand(4, 64),
    }[layout]
    out = token_logprobs(view, ids, entropy=True)
    assert torch.equal(out.logprobs, ours[0]) and torch.equal(out.logsumexp, ours[2])
    (grad,) = torch.autograd.grad(out.logprobs.sum(), leaf)
    (expected,) = torch.autograd.grad(torch.log_softmax(view, -1)[torch.arange(4), ids].sum(), leaf)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_ignored_rows_are_never_read() -> None:
    exact, ids = make_logits("randn", 6, 129)
    logits = exact.float()
    logits[1] = math.nan
    logits[4] = math.inf
    ids[1], ids[4] = -100, -100
    ours, grad = run_token_logprobs(logits, ids, upstream_for(6))
    for value in ours:
        assert bool((value[[1, 4]] == 0).all()) and bool(value.isfinite().all())
    assert bool((grad[[1, 4]] == 0).all()) and bool(grad.isfinite().all())
    keep = [0, 2, 3, 5]
    alone, alone_grad = run_token_logprobs(logits[keep], ids[keep], tuple(u[keep] for u in upstream_for(6)))  # type: ignore[arg-type]
    for value, other in zip(ours, alone):
        assert torch.equal(value[keep], other)
    assert torch.equal(grad[keep], alone_grad)


def test_no_rows_and_no_active_rows() -> None:
    out = token_logprobs(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), entropy=True)
    assert out.logprobs.shape == (0,) and out.entropy is not None and out.entropy.shape == (0,)
    leaf = torch.full((3, 7), math.nan, requires_grad=True)
    out = token_logprobs(leaf, torch.full((3,), -100), entropy=True)
    (out.logprobs.sum() + out.logsumexp.sum()).backward()
    assert leaf.grad is not None and bool((leaf.grad == 0).all()) and bool((out.logprobs == 0).all())


def test_row_blocks_cover_every_row_once() -> None:
    """More rows than one block: the same as one row at a time."""
    vocab = 2**18
    assert len(list(row_blocks(50, vocab, torch.device("cpu")))) > 1
    seen = [i for start, stop in row_blocks(50, vocab, torch.device("cpu")) for i in range(start, stop)]
    assert seen == list(range(50))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(19, vocab, generator=g)
    ids = torch.randint(0, vocab, (19,), generator=g)
    ids[3] = -100
    truth = torch.log_softmax(logits.double(), -1)[torch.arange(19), ids.clamp(min=0)]
    truth[3] = 0
    assert float((token_logprobs(logits, ids).logprobs - truth).abs().max()) < 5e-6


def test_minus_inf_target_and_row_without_finite_logit() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3], requires_grad=True)
    out = token_logprobs(logits, torch.tensor([1, 0]))
    assert out.logprobs[0].item() == -math.inf and math.isnan(out.logprobs[1].item())


def test_second_backward_and_input_unchanged() -> None:
    exact, ids = make_logits("randn", 3, 50)
    leaf = exact.float().requires_grad_()
    before = leaf.detach().clone()
    out = token_logprobs(leaf, ids)
    out.logprobs.sum().backward(retain_graph=True)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    out.logprobs.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * first)
    assert torch.equal(leaf.detach(), before)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(token_logprobs(leaf, ids).logprobs.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        out.logprobs.sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    exact, ids = make_logits("randn", 3, 50)
    leaf = exact.requires_grad_()
    out = token_logprobs(leaf, ids)
    (expected,) = torch.autograd.grad(2 * out.logprobs.sum(), leaf, retain_graph=True)
    (grad,) = torch.autograd.grad(out.logprobs.mul_(2.0).sum(), leaf)
    torch.testing.assert_close(grad, expected)


# ---- kept sets ------------------------------------------------------------------------------------------------------


def test_kept_set_against_brute_force() -> None:
    """Normalising over the set == a dense softmax over the listed columns, row by row, value and gradient."""
    g = torch.Generator().manual_seed(5)
    exact, ids = make_logits("blocks", 7, 301)
    lists = []
    for i in range(7):
        size = int(torch.randint(1, 60, (1,), generator=g))
        lists.append(sorted({int(ids[i]), *torch.randint(0, 301, (size,), generator=g).tolist()}))
    lists[3] = [int(ids[3])]
    lists[5] = list(range(301))
    kept = KeptSet.from_lists(lists)
    upstream = upstream_for(7)
    ours, grad = run_token_logprobs(exact, ids, upstream, kept=kept, temperature=1.7)
    for i, columns in enumerate(lists):
        row = exact[i : i + 1, columns]
        at = torch.tensor([columns.index(int(ids[i]))])
        truth, truth_grad = run_plain(row, at, tuple(u[i : i + 1] for u in upstream), 1.7)
        for a, t in zip(ours, truth):
            torch.testing.assert_close(a[i], t[0], rtol=1e-12, atol=1e-12)
        dense = torch.zeros(301, dtype=torch.float64)
        dense[columns] = truth_grad[0]
        torch.testing.assert_close(grad[i], dense, rtol=1e-10, atol=1e-13)


def test_kept_set_slices() -> None:
    lists = [[3, 1], [], [0, 4, 2], [5]]
    assert KeptSet.from_lists([torch.tensor([3, 3, 1])]).ids.tolist() == [1, 3]  # type: ignore[list-item]
    kept = KeptSet.from_lists(lists)
    assert len(kept) == 4 and kept.offsets.dtype == torch.int64 and kept.ids.dtype == torch.int32

    def as_lists(k: KeptSet) -> list[list[int]]:
        return [sorted(row.nonzero().squeeze(1).tolist()) for row in k.mask(6)]

    assert as_lists(kept) == [sorted(x) for x in lists]
    assert as_lists(kept.rows(1, 3)) == [[], [0, 2, 4]]
    assert as_lists(kept.rows(2, 2)) == []
    assert as_lists(kept.select(torch.tensor([3, 0, 0, 1]))) == [[5], [1, 3], [1, 3], []]
    assert as_lists(kept.select(torch.tensor([], dtype=torch.int64))) == []
    assert kept.select(torch.tensor([2])).ids.tolist() == [0, 2, 4]


def test_kept_set_refusals() -> None:
    logits, ids = torch.zeros(2, 5), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"row 1 has token 2, which is not in its own kept set"):
        token_logprobs(logits, ids, kept=KeptSet.from_lists([[1, 3], [0, 1]]))
    with pytest.raises(ValueError, match=r"KeptSet.ids: 4 is not in \[0, 4\)"):
        token_logprobs(logits, ids, vocab_size=4, kept=KeptSet.from_lists([[1, 3], [2, 4]]))
    with pytest.raises(ValueError, match="3 rows for 2 token ids"):
        token_logprobs(logits, ids, kept=KeptSet.from_lists([[1], [2], [3]]))
    offsets = torch.tensor([0, 2, 5])
    for wrong in ([0, 1, 1, 2, 2], [0, 1, 3, 2, 4]):  # an id twice, and one out of order
        with pytest.raises(ValueError, match=r"KeptSet.ids: row 1 has 2 after [23]; ids must ascend"):
            token_logprobs(logits, ids, kept=KeptSet(offsets, torch.tensor(wrong, dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"KeptSet.offsets: must rise from 0 to the number of ids \(4\), got 0 .. 5"):
        token_logprobs(logits, ids, kept=KeptSet(offsets, torch.tensor([0, 1, 2, 3], dtype=torch.int32)))
    with pytest.raises(ValueError, match="kept: need int64 offsets and int32 ids"):
        token_logprobs(logits, ids, kept=KeptSet(offsets, torch.tensor([0, 1, 2, 3, 4])))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([0, 5])}, r"row 1 has id 5, outside \[0, 5\)"),
        ({"ids": torch.tensor([-1, 0])}, r"row 0 has id -1, outside"),
        ({"ids": torch.tensor([0, 4]), "vocab_size": 4}, r"row 1 has id 4, outside \[0, 4\)"),
        ({"vocab_size": 6}, r"vocab_size: 6 is not in \[1, 5\]"),
        ({"vocab_size": 0}, r"vocab_size: 0 is not in"),
        ({"temperature": 0.0}, "temperature: 0.0 must be finite and > 0"),
        ({"temperature": math.inf}, "temperature: inf must be"),
        ({"temperature": torch.tensor([1.0, 0.0])}, "temperature: every value"),
        ({"temperature": torch.ones(3)}, r"temperature: need a number or shape \[2\]"),
        ({"temperature": torch.ones(2, requires_grad=True)}, "temperature: requires grad"),
        ({"ids": torch.tensor([0, 1, 2])}, "token_ids: shape"),
        ({"ids": torch.tensor([[0], [1]])}, "token_ids: need int64"),
        ({"ids": torch.tensor([0.0, 1.0])}, "token_ids: need int64"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "logits: need floating point"),
        ({"logits": torch.zeros(2, 1, 5)}, "logits: need floating point"),
        ({"ids": torch.zeros(2, dtype=torch.int64, device="meta")}, "token_ids: on meta, but logits are on cpu"),
        ({"logits": torch.zeros(2, 5, dtype=torch.float64), "backend": "triton"}, "backend: 'triton' cannot run here"),
        ({"backend": "cuda"}, "backend: 'cuda' is not one of"),
        ({"logits": [[0.0]]}, "logits: need a tensor, got list"),
        ({"ids": None}, "token_ids: need a tensor, got NoneType"),
        ({"kept": [[1], [2]]}, "kept: need a KeptSet, got list"),
        (
            {"kept": KeptSet(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))},
            "kept: need offsets",
        ),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 5), "ids": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(arguments.pop("logits"), arguments.pop("ids"), **arguments)


def test_backend_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto on a CPU is the reference, also where the interpreter could run; asking for Triton says why it cannot."""
    x = torch.zeros(1)
    assert resolve_backend("auto", x) == resolve_backend("reference", x) == "reference"
    assert resolve_backend("auto", x.double()) == "reference"
    for name, value, why in (
        ("INTERPRETED", False, "the tensor is on cpu, and kernels run on CUDA"),
        ("HAS_TRITON", False, "triton is not installed"),
    ):
        monkeypatch.setattr(f"rhotrain.kernels.backend.{name}", value)
        with pytest.raises(ValueError, match=f"backend: 'triton' cannot run here: {why}"):
            resolve_backend("triton", x)
