"""Peak memory of the head's policy loss on a CPU beside the naive path; each in a process of its own, because the peak
of resident memory is per process."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("resource")

# Prints the peak of resident memory over what imports and inputs take, in MiB.
MEASURE = """
import json, os, resource, sys
import psutil
import torch
from rhotrain.kernels.linear import linear_policy_loss
from rhotrain.kernels.policy_loss import PolicyInputs
from rhotrain.kernels.spec import Objective

path, N, V, H = sys.argv[1], *map(int, sys.argv[2:])


def make(N, V, H):
    torch.manual_seed(0)
    hidden = torch.randn(N, H, requires_grad=True)
    head = (torch.randn(V, H) * 0.1).requires_grad_()
    old, weights = torch.full((N,), -10.0), torch.full((N,), 1.0 / N)
    return hidden, head, torch.randint(0, V, (N,)), old, torch.randn(N), weights


def naive(hidden, head, token_ids, old, advantages, weights):
    logprobs = torch.log_softmax(hidden @ head.t() / 0.9, -1).gather(1, token_ids[:, None]).squeeze(1)
    ratio = torch.exp(logprobs - old)
    return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()


def ours(hidden, head, token_ids, old, advantages, weights):
    inputs = PolicyInputs(old_logprobs=old, advantages=advantages, weights=weights)
    return linear_policy_loss(hidden, head, token_ids, inputs, Objective(), temperature=0.9).loss


loss_of = {"naive": naive, "ours": ours}[path]
loss_of(*make(8, 64, 16)).backward()  # the first call of a custom op imports 70 MiB of torch
tensors = make(N, V, H)
before = psutil.Process().memory_info().rss
loss = loss_of(*tensors)
loss.backward()
head = tensors[1]
if sys.platform == "linux":  # ru_maxrss there counts the process that started this one, up to its exec
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"mib": (peak - before) / 2**20, "loss": loss.item(), "norm": head.grad.norm().item()}))
"""


def measured(path: str, *shape: int) -> dict[str, float]:
    """Extra MiB, loss and the norm of the head's gradient, of `path` (naive or ours) at N, V, H."""
    command = [sys.executable, "-c", MEASURE, path, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def check_ratio(rows: int, vocab: int, hidden: int, at_most: float) -> None:
    naive, ours = measured("naive", rows, vocab, hidden), measured("ours", rows, vocab, hidden)
    assert ours["loss"] == pytest.approx(naive["loss"], rel=1e-4, abs=1e-6)
    assert ours["norm"] == pytest.approx(naive["norm"], rel=1e-4)
    full_logits = rows * vocab * 4 / 2**20
    assert naive["mib"] > 2 * full_logits, "the naive path holds full logits and their gradient: the measurement is off"
    assert ours["mib"] < at_most * naive["mib"], f"{ours['mib']:.0f} MiB beside {naive['mib']:.0f} MiB"


def test_a_small_head_needs_far_less_than_the_naive_path() -> None:
    """4096 rows of logits are 256 MiB, held once or twice by the naive path and in chunks of 64 MiB here."""
    check_ratio(rows=4096, vocab=16384, hidden=16, at_most=0.3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2s_head_needs_less_than_a_quarter_of_the_naive_path() -> None:
    """SmolLM2-135M's head at 4096 tokens: one copy of the logits is 768 MiB."""
    check_ratio(rows=4096, vocab=49152, hidden=576, at_most=0.25)
