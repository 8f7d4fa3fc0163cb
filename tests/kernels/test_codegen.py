"""The kernels compiled ahead of time for three architectures, without a GPU, and offsets beyond 2^31 elements.

What is checked, and how, is in scripts/codegen.py. It needs a process without the interpreter: one, for all tests here.
"""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from helpers_codegen import FAULTS, launch_toy

from rhotrain.kernels.backend import INTERPRETED
from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.policy_rows import PolicyCall, PolicyInputs
from rhotrain.kernels.rows import RowArguments
from rhotrain.kernels.sampling import sample_tokens
from rhotrain.kernels.spec import IGNORE_INDEX, Objective
from scripts.codegen_read import Loop

ROOT = Path(__file__).resolve().parent.parent.parent
ARCHS = {80, 90, 100}
CHECKS = ("bounds", "spills", "float64", "loads", "exponentials", "registers", "shared", "offsets", "tensor cores")


def compile_outside(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this repository in a process whose kernels can be compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-m", module, *args], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See `helpers_codegen.run`."""
    path = tmp_path_factory.mktemp("codegen") / "results.json"
    done = compile_outside("tests.helpers_codegen", str(path))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_hold(results: dict[str, Any], check: str) -> None:
    """No spills, no float64, 16-byte loads in the main loop at odd V, 64-bit offsets and so on, for the usual
    variants."""
    found = [
        f"{it['kernel']} {it['variant']} sm_{it['arch']}: {line}"
        for it in results["compiled"]
        for line in it["violations"]
        if line.startswith(check)
    ]
    assert not found, "\n".join(found)


def test_every_kernel_is_compiled_for_every_architecture(results: dict[str, Any]) -> None:
    """Nor is a kernel, or a launch configuration, left out of the cases."""
    assert results["unrecorded"] == []
    for missing in ("logprob.forward_kernel is launched by no case", "logprob.FORWARD launches nothing in any case"):
        assert f"unrecorded: {missing}" in results["all_unrecorded"]
    by_kernel: dict[str, set[int]] = {}
    for it in results["compiled"]:
        by_kernel.setdefault(it["kernel"], set()).add(it["arch"])
    assert {"forward_kernel", "backward_kernel", "policy_loss_kernel", "draw_kernel"} <= set(by_kernel)
    assert {"decode_kernel", "combine_kernel", "write_kernel"} <= set(by_kernel)
    assert all(archs == ARCHS for archs in by_kernel.values())
    assert all(line.startswith(CHECKS) for it in results["compiled"] for line in it["violations"])


def test_the_loss_sums_in_the_order_of_the_forward_pass(results: dict[str, Any]) -> None:
    """Old logprobs of the same weights then give a ratio of exactly 1, also where the gradient has another type."""
    layouts: dict[tuple[int, str], dict[str, set[str]]] = {}
    for it in results["compiled"]:
        if it["kernel"] in ("forward_kernel", "policy_loss_kernel") and it["aligned"] and "KEPT" not in it["variant"]:
            by_kernel = layouts.setdefault((it["arch"], it["variant"].split()[0]), {})
            by_kernel.setdefault(it["kernel"], set()).update(it["layouts"])
    both = {place: found for place, found in layouts.items() if len(found) == 2}
    assert {dtype for _, dtype in both} >= {"bf16", "fp32"} and {arch for arch, _ in both} == ARCHS
    for place, found in both.items():
        assert found["forward_kernel"] == found["policy_loss_kernel"] and len(found["forward_kernel"]) == 1, place


def test_one_binary_whatever_the_numbers(results: dict[str, Any]) -> None:
    """N, temperature, clip bounds and coefficients change, in place or not: what Triton compiles is the same, to the
    hash of the binary. A kernel that does specialise on its count shows that the recorder would see it.
    """
    assert results["recompiled"] == []
    assert {name: len(hashes) for name, hashes in results["binaries"].items()} == {
        "forward_kernel": 1,
        "backward_kernel": 1,
        "policy_loss_kernel": 1,
    }
    assert results["counted"] == ["counting_kernel: 3 binaries of counting_kernel; they differ in count"]


def test_one_binary_for_pieces_of_tensors(results: dict[str, Any]) -> None:
    """A micro-batch is a piece of longer tensors and may start anywhere in them."""
    assert results["pieces"] == []


def test_decode_multiplies_half_types_on_tensor_cores(results: dict[str, Any]) -> None:
    found = [it for it in results["compiled"] if it["kernel"] == "decode_kernel" and it["variant"].startswith("bf16")]
    assert {it["arch"] for it in found} == ARCHS
    assert all(it["tensor_core"] > 0 and it["dots"] == 3 and it["wide_loops"] == 1 for it in found)


def test_page_numbers_are_read_4_bytes_at_a_time_and_keys_are_not() -> None:
    assert Loop(loads=(16,) * 16 + (4,), stores=(), exponentials=0).paged
    assert Loop(loads=(16,) * 12 + (4,) * 12, stores=(), exponentials=0).paged
    for loads in ((4,) * 8, (16,) * 8 + (4,) * 32, (16,) * 8 + (2,), (16, 8, 4)):
        assert not Loop(loads=loads, stores=(), exponentials=0).paged


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(results: dict[str, Any], fault: str) -> None:
    """Kernels with one fault each fail exactly the checks that are about it."""
    assert {line.split(": ")[0] for line in results["toys"][fault]} == set(FAULTS[fault])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_holds() -> None:
    """What `make codegen` prints: every type, objective, KL, switch and alignment."""
    done = compile_outside("scripts.codegen")
    assert done.returncode == 0, done.stdout + done.stderr


# ---- offsets beyond 2^31 --------------------------------------------------------------------------------------------

STRIDE = 2**30 + 16
"""Below 2^31, so that Triton passes 32 bits, while row 2 begins beyond."""
VOCAB = 40


@pytest.fixture(scope="module")
def far_logits() -> Tensor:
    """bf16 [3, V] whose rows are STRIDE apart; where a 32-bit offset of row 2 would point there are zeros.

    16 GiB of addresses, of which only the pages that are written or read take memory.
    """
    if not INTERPRETED:
        pytest.skip(
            "memory of a CPU, where kernels run in the interpreter only; test_cuda.py has such offsets on a GPU"
        )
    no_reserve = 0x4000  # MAP_NORESERVE, which mmap names from Python 3.13 on
    size = 2 * (2**31 + 2 * STRIDE + VOCAB)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"{size} bytes of address space: {error}")
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((3, VOCAB), (STRIDE, 1), 2**31)
    logits.copy_(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)))
    return logits


def test_rows_beyond_int32(far_logits: Tensor) -> None:
    """Logprobs, policy loss with its gradient in place, and a draw equal those of a copy, bit for bit."""
    near, ids = far_logits.clone(memory_format=torch.contiguous_format), torch.tensor([3, 20, 39])
    assert far_logits.stride(0) == STRIDE and 2 * STRIDE > 2**31 > STRIDE and near.stride(0) == VOCAB
    ones, counters = torch.ones(3), torch.arange(3)

    def all_of(logits: Tensor) -> list[Tensor]:
        out = token_logprobs(logits, ids, entropy=True, backend="triton")
        drawn = sample_tokens(
            logits, top_k=5, seeds=counters, samples=counters, positions=counters, backend="triton", keep_sets=True
        )
        assert out.entropy is not None and drawn.kept is not None
        return [out.logprobs, out.entropy, out.logsumexp, drawn.token_ids, drawn.logprobs, drawn.kept.ids]

    for far, expected in zip(all_of(far_logits), all_of(near), strict=True):
        torch.testing.assert_close(far, expected, rtol=0, atol=0)

    inputs = PolicyInputs(old_logprobs=-ones, advantages=ones, weights=ones)
    rows = RowArguments(ids, None, None, None, VOCAB, IGNORE_INDEX)
    for logits in (near, far_logits):  # each becomes its own gradient
        PolicyCall(rows, inputs, Objective(entropy_coef=0.1), True).run(logits, logits)
    torch.testing.assert_close(far_logits, near, rtol=0, atol=0)
    assert bool((near != 0).all())


def test_a_32_bit_offset_reads_elsewhere(far_logits: Tensor) -> None:
    """The same place, read by a kernel with the fault and by the same kernel without it: only row 2 differs."""
    far_logits.copy_(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)))
    expected = torch.exp2(far_logits.float()).sum(1)
    right, wrong = torch.zeros(3), torch.zeros(3)
    launch_toy("none", far_logits, right)
    launch_toy("int32", far_logits, wrong)
    torch.testing.assert_close(right, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(wrong[:2], expected[:2], rtol=1e-6, atol=0)
    assert float(wrong[2]) == VOCAB  # exp2 of the zeros at the wrapped offset
