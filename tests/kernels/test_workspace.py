"""One buffer for the chunks of many calls: the same bits, allocated once, never shared by two calls at a time."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.policy_loss import PolicyInputs
from rhotrain.kernels.spec import Objective
from rhotrain.kernels.workspace import Workspace, call_buffers

V, H = 67, 12
CPU = torch.device("cpu")
GRPO = Objective(kind="grpo", kl="k3", beta=0.1, entropy_coef=0.05)
SEQUENCE = Objective(kind="grpo", ratio_level="sequence")


def call(rows: int, seed: int, objective: Objective = GRPO, **head: Any) -> list[Tensor]:
    """Loss, values and gradients of both functions, 4 rows of logits at a time."""
    g = torch.Generator().manual_seed(seed)
    dtype = torch.float64

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    hidden, weight = randn(rows, H).requires_grad_(), randn(V, H).requires_grad_()
    ids = torch.randint(0, V, (rows,), generator=g)
    inputs = PolicyInputs(
        old_logprobs=-4.0 + randn(rows),
        advantages=randn(rows),
        weights=randn(rows).abs() + 0.1,
        ref_logprobs=-4.0 + randn(rows),
        sequence_ids=torch.arange(rows) // 3 if objective.ratio_level == "sequence" else None,
    )
    scored = linear_token_logprobs(hidden, weight, ids, entropy=True, chunk=4, **head)
    loss = linear_policy_loss(hidden, weight, ids, inputs, objective, chunk=4, **head)
    assert scored.entropy is not None
    grads = torch.autograd.grad(loss.loss + scored.logprobs.sum() + scored.entropy.sum(), [hidden, weight])
    return [loss.loss.detach(), loss.logprobs, scored.logprobs.detach(), scored.entropy.detach(), *grads]


@pytest.mark.parametrize("objective", [GRPO, SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("head", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_the_bits_are_those_without_and_the_buffers_are_made_once(objective: Objective, head: dict[str, Any]) -> None:
    """Calls of 9, 4, 2, 13 and no rows: chunks of 3, 4, 2, 4 rows, whole and partial ones."""
    sizes = [9, 4, 2, 13, 0]
    expected = [call(rows, seed, objective, **head) for seed, rows in enumerate(sizes)]
    workspace = Workspace()
    with workspace.using():
        first = [call(rows, seed, objective, **head) for seed, rows in enumerate(sizes)]
        made = workspace.allocations
        again = [call(rows, seed, objective, **head) for seed, rows in enumerate(sizes)]
    assert made == (2 if head else 1) and workspace.allocations == made
    assert workspace.nbytes == made * 4 * 80 * 8  # 67 columns lie 80 apart
    for results in (first, again):
        assert all(torch.equal(a, b) for r, e in zip(results, expected) for a, b in zip(r, e))


def test_what_a_call_returns_outlives_the_buffers() -> None:
    workspace = Workspace()
    with workspace.using():
        kept = call(9, 0)
        copies = [x.clone() for x in kept]
        call(9, 1)
    held = list(workspace._buffers.values())
    assert all(x.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() for x in kept for b in held)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies))


def test_a_larger_need_replaces_the_buffer_and_release_frees_it() -> None:
    workspace = Workspace()
    with workspace.using():
        call(2, 0)
        small = workspace.nbytes
        call(3, 0)
        assert workspace.nbytes > small and workspace.allocations == 2
        call(9, 0)  # several chunks: the largest chunk at once
        assert workspace.nbytes == 4 * 80 * 8 and workspace.allocations == 3
    workspace.release()
    gc.collect()
    assert workspace.nbytes == 0
    with workspace.using():
        call(2, 0)
    assert workspace.allocations == 4


def test_without_a_workspace_nothing_is_kept() -> None:
    with call_buffers(CPU) as buffers:
        assert not buffers.shared
        first, second = (buffers.empty("logits", 8, torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_a_second_call_at_the_same_time_has_buffers_of_its_own() -> None:
    """A call inside of a call, and one in another thread that runs in a copy of this context."""
    import contextvars

    workspace, seen = Workspace(), []
    with workspace.using():
        with call_buffers(CPU) as outer:
            assert outer.shared
            with call_buffers(CPU) as inner:
                assert not inner.shared

            def other() -> None:
                with call_buffers(CPU) as buffers:
                    seen.append(buffers.shared)

            thread = threading.Thread(target=contextvars.copy_context().run, args=(other,))
            thread.start()
            thread.join()
        assert seen == [False]
        with call_buffers(CPU) as again:
            assert again.shared
    with call_buffers(CPU) as outside:
        assert not outside.shared


def test_an_error_inside_gives_the_buffers_back() -> None:
    workspace = Workspace()
    with workspace.using():
        with pytest.raises(ValueError, match="its own kept set"):
            from rhotrain.kernels.logprob import KeptSet

            kept = KeptSet.from_lists([[1, 2]])
            linear_token_logprobs(torch.randn(1, H), torch.randn(V, H), torch.tensor([5]), kept=kept)
        gc.collect()  # the traceback held the generator that holds the buffers
        with call_buffers(CPU) as buffers:
            assert buffers.shared


@pytest.mark.cuda
def test_streams_do_not_share_and_a_capture_allocates_its_own() -> None:
    workspace, device = Workspace(), torch.device("cuda")
    with workspace.using():
        with call_buffers(device) as buffers:
            first = buffers.empty("logits", 8, torch.float32, device)
        with torch.cuda.stream(torch.cuda.Stream()), call_buffers(device) as buffers:
            assert buffers.empty("logits", 8, torch.float32, device).data_ptr() != first.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), call_buffers(device) as buffers:
            assert not buffers.shared
