"""What only a GPU can show about the kernels: no waiting, one binary, large offsets, asserts, memory."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.backend import resolve_backend
from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import forward_kernel, token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.policy_rows import policy_loss_kernel
from rhotrain.kernels.sampling import sample_tokens
from rhotrain.kernels.spec import Objective

pytestmark = pytest.mark.cuda


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, anything that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, PolicyInputs]:
    g = torch.Generator(device="cuda").manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=g, device="cuda")).to(dtype)
    ids = torch.randint(0, vocab, (rows,), generator=g, device="cuda")
    values = torch.randn(3, rows, generator=g, device="cuda")
    inputs = PolicyInputs(old_logprobs=values[0] - 12, advantages=values[1], weights=values[2].abs())
    return logits, ids, inputs


def test_auto_is_triton() -> None:
    x = torch.zeros(1, device="cuda")
    assert resolve_backend("auto", x) == "triton" and resolve_backend("auto", x.bfloat16()) == "triton"
    assert resolve_backend("auto", x.double()) == "reference"


def test_nothing_waits_for_the_device() -> None:
    logits, ids, inputs = problem(64, 1000)
    temperature = torch.full((64,), 0.7, device="cuda")
    leaf = logits.requires_grad_()
    upstream = torch.ones(64, device="cuda")
    seeds = torch.arange(64, device="cuda")
    results: list[Tensor] = []
    with no_waiting():
        for t in (0.7, temperature):
            out = token_logprobs(leaf, ids, temperature=t, entropy=True)
            results += torch.autograd.grad(out.logprobs, leaf, upstream)
            loss = policy_loss(leaf, ids, inputs, Objective(kl="none"), temperature=t).loss
            results += torch.autograd.grad(loss, leaf)
            cut: dict[str, Any] = {"temperature": t, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
            counters: dict[str, Any] = {"seeds": seeds, "samples": seeds, "positions": seeds}
            results.append(sample_tokens(logits.detach(), **cut, **counters).logprobs)
        with pytest.raises(RuntimeError, match="synchroniz"):  # the mode does see a wait
            upstream.sum().item()
    assert all(bool(x.isfinite().all()) for x in results)


def test_one_binary_for_every_batch_temperature_and_bound() -> None:
    """No compilation after the first call: not for another N, for vectors that start anywhere, or for other numbers."""

    def compiled() -> int:
        caches = (kernel.device_caches for kernel in (forward_kernel, policy_loss_kernel))
        return sum(len(cache[0]) for by_device in caches for cache in by_device.values())

    logits, ids, inputs = problem(129, 1000)

    def call(rows: int, temperature: float, ratio_max: float) -> None:
        first = (129 - rows) // 2
        token_logprobs(logits[:rows], ids[first : first + rows], temperature=temperature)
        policy_loss(
            logits[:rows].clone().requires_grad_(),
            ids[first : first + rows],
            inputs.rows(first, first + rows),
            Objective(ratio_max=ratio_max),
            temperature=temperature,
        )

    call(129, 0.7, 1.2)
    before = compiled()
    for rows, temperature, ratio_max in ((1, 1.0, 1.2), (16, 0.5, 2.0), (128, 1.0, 5.0), (7, 2.0, 1.0)):
        call(rows, temperature, ratio_max)
    assert compiled() == before


def test_offsets_beyond_two_to_the_31() -> None:
    """14 200 rows of 151 936 in bf16: the last rows lie beyond 2^31 elements. Same content, same bits as the first."""
    rows, vocab = 14200, 151936
    if torch.cuda.mem_get_info()[0] < 3 * rows * vocab * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    head, ids, inputs = problem(3, vocab)
    logits[:3], logits[-3:] = head, head
    index = torch.tensor([0, 1, 2, rows - 3, rows - 2, rows - 1], device="cuda")
    all_ids = torch.full((rows,), -100, device="cuda")
    all_ids[index] = ids.repeat(2)
    leaf = logits.requires_grad_()
    out = token_logprobs(leaf, all_ids, entropy=True)
    (grad,) = torch.autograd.grad(out.logprobs.sum(), leaf)
    assert torch.equal(out.logprobs[:3], out.logprobs[-3:]) and torch.equal(grad[:3], grad[-3:])
    assert float(grad[-3:].float().abs().max()) > 0.1
    del grad
    named = {n: None if x is None else torch.zeros(rows, device="cuda") for n, x in inputs.named().items()}
    for name, value in inputs.named().items():
        mine = named[name]
        if value is not None and mine is not None:
            mine[index] = value.repeat(2)
    loss = policy_loss(leaf, all_ids, PolicyInputs(**named), Objective())  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(loss.loss, leaf)
    assert torch.equal(loss.ratio[:3], loss.ratio[-3:]) and torch.equal(grad[:3], grad[-3:])


def test_old_logprobs_of_the_same_weights_give_a_ratio_of_exactly_one() -> None:
    """Through a bf16 head too, where the loss reads float32 logits and writes a bf16 gradient: the same sums."""
    g = torch.Generator(device="cuda").manual_seed(0)
    h = torch.randn(300, 256, generator=g, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(49152, 256, generator=g, device="cuda").bfloat16().requires_grad_()
    _, ids, inputs = problem(300, 49152)
    for objective in (Objective(), Objective(entropy_coef=0.1)):
        old = linear_token_logprobs(h.detach(), w.detach(), ids, temperature=0.7).logprobs
        mine = PolicyInputs(old_logprobs=old, advantages=inputs.advantages, weights=inputs.weights)
        out = linear_policy_loss(h, w, ids, mine, objective, temperature=0.7)
        assert bool((out.ratio[inputs.weights != 0] == 1.0).all())


BAD_ROW = """
import torch
from rhotrain.kernels.logprob import KeptSet, token_logprobs
logits, ids = torch.zeros(2, 5, device="cuda"), torch.tensor([0, {token}], device="cuda")
kept = {kept}
token_logprobs(logits, ids, kept=kept)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("token", "kept"), [(5, "None"), (-1, "None"), (2, "KeptSet.from_lists([[0], [1, 3]], 'cuda')")]
)
def test_a_bad_row_is_an_asynchronous_assert(token: int, kept: str) -> None:
    """In a process of its own: a device-side assert ends all further use of the GPU."""
    code = BAD_ROW.format(token=token, kept=kept)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "assert" in done.stderr.lower()


def test_memory_of_the_linear_loss() -> None:
    """Peak beyond inputs and results: one chunk (6 bytes an element) and little else, far below one [N, V]."""
    rows, vocab, hidden, chunk = 8192, 49152, 512, 1024
    h = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    _, ids, inputs = problem(rows, vocab=64)
    linear_policy_loss(h[:64], w, ids[:64], inputs.rows(0, 64), Objective(), chunk=chunk)  # cuBLAS's workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = linear_policy_loss(h, w, ids, inputs, Objective(), chunk=chunk)
    peak = torch.cuda.max_memory_allocated() - before
    results = 4 * vocab * hidden + 2 * rows * hidden
    assert bool(out.loss.isfinite())
    assert peak < results + 6.5 * chunk * vocab + 2**26 < rows * vocab * 2


def test_a_tensor_on_the_second_gpu() -> None:
    """Kernels run where their tensors are, whichever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits, ids, _ = problem(4, 1000)
    here = token_logprobs(logits, ids)
    with torch.cuda.device(0):
        there = token_logprobs(logits.to("cuda:1"), ids.to("cuda:1"))
    assert there.logprobs.device.index == 1 and torch.equal(there.logprobs.cpu(), here.logprobs.cpu())
