"""The Triton kernels of token_logprobs: in the interpreter, and on CUDA where there is a GPU. Truth is float64."""

import math
from typing import Any

import pytest
import torch
from helpers_kernels import LOGIT_CASES, VOCABS, make_logits, run_plain, run_token_logprobs, ulp, upstream_for
from torch import Tensor

from rhotrain.kernels.logprob import BACKWARD, KeptSet, token_logprobs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("logprob", "entropy", "logsumexp", "gradient")


def run(
    device: str, logits: Tensor, ids: Tensor, upstream: tuple[Tensor, ...], **kw: Any
) -> tuple[list[Tensor], Tensor]:
    """As `run_token_logprobs`, by the kernels; results on the CPU."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kw.items()}
    if "kept" in kw:
        moved["kept"] = KeptSet(kw["kept"].offsets.to(device), kw["kept"].ids.to(device))
    values, grad = run_token_logprobs(logits.to(device), ids.to(device), upstream, backend="triton", **moved)
    return [v.cpu() for v in values], grad.cpu()


def assert_within_eager(
    ours: tuple[list[Tensor], Tensor],
    eager: tuple[list[Tensor], Tensor],
    truth: tuple[list[Tensor], Tensor],
    allowance: float,
    what: object,
) -> None:
    """The error against float64 is at most eager's in the same dtype plus the allowance; nothing is NaN."""
    for name, a, e, t in zip(NAMES, [*ours[0], ours[1]], [*eager[0], eager[1]], [*truth[0], truth[1]]):
        bound = float((e.double() - t).abs().max()) + allowance if t.numel() else 0.0
        error = float((a.double() - t).abs().max()) if t.numel() else 0.0
        assert error <= bound, (name, what, error, bound)  # a NaN fails too


@pytest.mark.parametrize("case", LOGIT_CASES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_error_is_no_larger_than_eager(device: str, vocab: int, case: str) -> None:
    for rows in (0, 1, 3):
        exact, ids = make_logits(case, max(rows, 1), vocab)
        exact, ids = exact[:rows], ids[:rows]
        upstream = upstream_for(rows)
        truth = run_plain(exact, ids, upstream, 0.7)
        largest = float(exact[torch.isfinite(exact)].abs().max()) / 0.7 if rows else 1.0
        for dtype in DTYPES:
            logits = exact.to(dtype)
            ours = run(device, logits, ids, upstream, temperature=0.7)
            assert all(v.dtype == torch.float32 for v in ours[0]) and ours[1].dtype == dtype
            assert_within_eager(ours, run_plain(logits, ids, upstream, 0.7), truth, 4 * ulp(largest), (dtype, rows))


@pytest.mark.parametrize("vocab", [17, 1000])
def test_many_rows(device: str, vocab: int) -> None:
    exact, ids = make_logits("blocks", 129, vocab)
    temperature = torch.linspace(0.3, 3.0, 129)
    upstream = upstream_for(129)
    truth = run_plain(exact, ids, upstream, temperature.double())
    eager = run_plain(exact.float(), ids, upstream, temperature)
    ours = run(device, exact.float(), ids, upstream, temperature=temperature)
    assert_within_eager(ours, eager, truth, 4 * ulp(float((exact / temperature[:, None]).abs().max())), vocab)


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_real_vocabularies(device: str, vocab: int) -> None:
    exact, ids = make_logits("blocks", 2, vocab)
    upstream = upstream_for(2)
    truth, truth_grad = run_plain(exact, ids, upstream, 1.3)
    ours, grad = run(device, exact.float(), ids, upstream, temperature=1.3)
    for a, t in zip(ours, truth):
        assert float((a.double() - t).abs().max()) <= 1e-5
    assert float((grad.double() - truth_grad).abs().max()) <= 1e-6


def test_each_output_alone_has_its_gradient(device: str) -> None:
    """Outputs that are not used contribute nothing, and the entropy is not formed unless asked for."""
    exact, ids = make_logits("randn", 4, 5000)
    logits, moved = exact.float().to(device), ids.to(device)
    for k in range(3):
        upstream = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
        upstream[k] = upstream_for(4)[k]
        leaf = logits.clone().requires_grad_()
        out = token_logprobs(leaf, moved, entropy=k == 1, backend="triton")
        value = (out.logprobs, out.entropy, out.logsumexp)[k]
        assert value is not None and (out.entropy is None) == (k != 1)
        (grad,) = torch.autograd.grad(value, leaf, upstream[k].to(value))
        _, expected = run_plain(exact, ids, tuple(upstream), 1.0)
        torch.testing.assert_close(grad.cpu().double(), expected, rtol=1e-4, atol=2e-7)


def test_gradient_near_certainty_survives_bf16(device: str) -> None:
    """p = 0.999: p - 1 formed in bf16 would be wrong by 100 % (Liger #1329)."""
    logits = torch.zeros(1, 2, dtype=torch.float64)
    logits[0, 0] = 7.0
    leaf = logits.bfloat16().to(device).requires_grad_()
    token_logprobs(leaf, torch.tensor([0], device=device), backend="triton").logprobs.sum().backward()
    assert leaf.grad is not None
    expected = 1.0 - torch.softmax(logits, -1)[0, 0]
    torch.testing.assert_close(leaf.grad[0, 0].cpu().double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("padding", [3, 5000])
def test_padded_vocabulary_does_not_exist(device: str, padding: int) -> None:
    """Padding may be huge or NaN, and longer than a block: same bits as without it, gradient exactly 0."""
    exact, ids = make_logits("randn", 3, 4100)
    padded = torch.cat([exact.float(), torch.full((3, padding), math.nan)], 1)
    padded[:, 4100] = 1e30
    upstream = upstream_for(3)
    ours, grad = run(device, padded, ids, upstream, vocab_size=4100)
    cut, cut_grad = run(device, exact.float(), ids, upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours, cut))
    assert torch.equal(grad[:, :4100], cut_grad) and bool((grad[:, 4100:] == 0).all())


@pytest.mark.parametrize("layout", ["row_stride", "column_stride", "transposed", "expanded"])
def test_any_stride(device: str, layout: str) -> None:
    big = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(4, device=device)
    leaf = big.clone().requires_grad_()
    view = {
        "row_stride": leaf[::2, :40],
        "column_stride": leaf[:4, ::2],
        "transposed": leaf[:, :4].t(),
        "expanded": leaf[:1].expand(4, 64),
    }[layout]
    dense = token_logprobs(view.detach().contiguous(), ids, entropy=True, backend="triton")
    out = token_logprobs(view, ids, entropy=True, backend="triton")
    assert torch.equal(out.logprobs, dense.logprobs) and torch.equal(out.logsumexp, dense.logsumexp)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), leaf)
    (expected,) = torch.autograd.grad(torch.log_softmax(view, -1)[torch.arange(4), ids].sum(), leaf)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_ignored_rows_are_never_read(device: str) -> None:
    exact, ids = make_logits("randn", 6, 4500)
    logits = exact.float()
    logits[1], logits[4] = math.nan, math.inf
    ids[1], ids[4] = -100, -100
    upstream = upstream_for(6)
    ours, grad = run(device, logits, ids, upstream)
    for value in ours:
        assert bool((value[[1, 4]] == 0).all()) and bool(value.isfinite().all())
    assert bool((grad[[1, 4]] == 0).all()) and bool(grad.isfinite().all())
    other, _ = run(device, logits, torch.where(ids == -100, 7 - 4507, ids), upstream, ignore_index=-4500)
    assert all(torch.equal(a, b) for a, b in zip(ours, other))


def test_minus_inf_target_and_rows_without_a_finite_logit(device: str) -> None:
    """-inf and NaN as in torch.log_softmax, and neighbours untouched."""
    logits = torch.randn(4, 4099, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1], logits[2, 4098] = -math.inf, -math.inf, math.nan
    ids = torch.tensor([3, 0, 1, 2])
    ours, _ = run(device, logits, ids, upstream_for(4))
    logp = torch.log_softmax(logits.double(), -1)[torch.arange(4), ids]
    torch.testing.assert_close(ours[0].double(), logp, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert ours[0][0] == -math.inf and bool(ours[0][1:3].isnan().all()) and bool(ours[2][1:3].isnan().all())


# ---- kept sets ------------------------------------------------------------------------------------------------------


def kept_problem() -> tuple[Tensor, Tensor, list[list[int]]]:
    """Sets of one id, of a few, of more than a block, and of the whole vocabulary; an ignored row."""
    g = torch.Generator().manual_seed(5)
    exact, ids = make_logits("blocks", 6, 2500)
    sizes = (1, 50, 1500, 2500, 1024, 30)
    lists = [sorted({int(i), *torch.randperm(2500, generator=g)[:n].tolist()}) for i, n in zip(ids, sizes)]
    lists[0] = [int(ids[0])]
    ids[5] = -100
    return exact, ids, lists


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_sets(device: str, dtype: torch.dtype) -> None:
    """A softmax over the listed columns, value and gradient; outside the set the gradient is exactly 0."""
    exact, ids, lists = kept_problem()
    upstream = upstream_for(6)
    kw = {"temperature": 1.7, "vocab_size": 2500, "kept": KeptSet.from_lists(lists)}
    padded = torch.cat([exact, torch.full((6, 7), math.nan)], 1).to(dtype)
    ours, grad = run(device, padded, ids, upstream, **kw)
    for i, columns in enumerate(lists[:5]):
        rows = [exact[i : i + 1, columns], torch.tensor([columns.index(int(ids[i]))])]
        mine = tuple(u[i : i + 1] for u in upstream)
        truth = run_plain(rows[0], rows[1], mine, 1.7)
        eager = run_plain(rows[0].to(dtype), rows[1], mine, 1.7)
        picked = ([v[i : i + 1] for v in ours], grad[i : i + 1, columns])
        assert_within_eager(picked, eager, truth, 4 * ulp(30.0), i)
        rest = torch.ones(2507, dtype=torch.bool)
        rest[columns] = False
        assert bool((grad[i, rest] == 0).all())
    assert bool((grad[5] == 0).all()) and all(float(v[5]) == 0.0 for v in ours)


def test_kept_set_refusals(device: str) -> None:
    """On a CPU errors that name row and id; on CUDA an asynchronous assert, which ends the process: not tried here."""
    if device == "cuda":
        pytest.skip("a device-side assert would poison this process")
    logits, ids = torch.zeros(2, 5), torch.tensor([1, 2])
    cases = [
        (KeptSet.from_lists([[1, 3], [0, 1]]), "row 1 has token 2, which is not in its own kept set"),
        (KeptSet.from_lists([[1, 3], [2, 4]]), r"KeptSet.ids: 4 is not in \[0, 4\)"),
        (KeptSet(torch.tensor([0, 1, 3]), torch.tensor([1, 2, 1], dtype=torch.int32)), "ids must ascend"),
    ]
    for kept, message in cases:
        with pytest.raises(ValueError, match=message):
            token_logprobs(logits, ids, vocab_size=4, kept=kept, backend="triton")
    with pytest.raises(ValueError, match=r"row 1 has id 5, outside \[0, 5\)"):
        token_logprobs(logits, torch.tensor([1, 5]), backend="triton")


# ---- the same bits in any batch -------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_their_batch(device: str) -> None:
    """Bit for bit: alone, among others, in another order, beside rows that hold NaN or inf, ignored or not."""
    exact, ids = make_logits("blocks", 9, BACKWARD.block + 13)
    temperature = torch.linspace(0.5, 2.0, 9)
    upstream = upstream_for(9)

    def bits(index: Tensor, logits: Tensor) -> list[Tensor]:
        mine = tuple(u[index] for u in upstream)
        values, grad = run(device, logits[index], ids[index], mine, temperature=temperature[index])
        return [v.view(torch.int32) for v in (*values, grad)]

    logits = exact.float()
    whole = bits(torch.arange(9), logits)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(a[order], b) for a, b in zip(whole, bits(order, logits)))
    for row in (0, 5):
        assert all(torch.equal(a[[row]], b) for a, b in zip(whole, bits(torch.tensor([row]), logits)))
    spoilt = logits.clone()
    spoilt[2], spoilt[6] = math.nan, math.inf
    others = [i for i in range(9) if i not in (2, 6)]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(whole, bits(torch.arange(9), spoilt)))


@pytest.mark.cuda
def test_rows_do_not_depend_on_their_batch_on_a_gpu() -> None:
    """Real sizes: one row, a few, and thousands, in bf16 and float32."""
    g = torch.Generator(device="cuda").manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        logits = (4 * torch.randn(4097, 49152, generator=g, device="cuda")).to(dtype)
        ids = torch.randint(0, 49152, (4097,), generator=g, device="cuda")
        whole = token_logprobs(logits, ids, entropy=True, temperature=0.7)
        for count in (1, 2, 7, 128, 4097):
            part = token_logprobs(logits[:count], ids[:count], entropy=True, temperature=0.7)
            assert torch.equal(part.logprobs, whole.logprobs[:count])
            assert part.entropy is not None and whole.entropy is not None
            assert torch.equal(part.entropy, whole.entropy[:count])


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_second_backward_and_input_unchanged(device: str) -> None:
    exact, ids = make_logits("randn", 3, 50)
    leaf = exact.float().to(device).requires_grad_()
    before = leaf.detach().clone()
    out = token_logprobs(leaf, ids.to(device), backend="triton")
    out.logprobs.sum().backward(retain_graph=True)
    assert leaf.grad is not None
    first = leaf.grad.clone()
    out.logprobs.mul_(1.0).sum().backward()  # the caller may change the logprobs in place
    torch.testing.assert_close(leaf.grad, 2 * first)
    assert torch.equal(leaf.detach(), before)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        again = token_logprobs(leaf, ids.to(device), backend="triton").logprobs.sum()
        torch.autograd.grad(again, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        out.logprobs.sum().backward()
