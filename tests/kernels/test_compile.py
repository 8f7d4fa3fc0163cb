"""The ops inside other people's programs: torch.compile without a graph break, opcheck, and imported alone."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels import linear as linear_module
from rhotrain.kernels import logprob as logprob_module
from rhotrain.kernels import policy_loss as policy_module
from rhotrain.kernels.backend import INTERPRETED
from rhotrain.kernels.linear import linear_policy_loss, linear_token_logprobs
from rhotrain.kernels.logprob import KeptSet, token_logprobs
from rhotrain.kernels.objective_triton import pack_objective
from rhotrain.kernels.policy_loss import PolicyInputs, policy_loss
from rhotrain.kernels.rows import check_rows
from rhotrain.kernels.spec import Objective

N, V, H = 5, 33, 8
IDS = torch.tensor([3, -100, 32, 0, 7])
BACKENDS = ("reference", "triton")


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    names = ("old", "advantages", "ref", "importance")
    rows = {name: torch.randn(N, generator=g) for name in names}
    return {
        "x": torch.randn(N, H, generator=g),
        "w": torch.randn(V, H, generator=g),
        "temperature": torch.linspace(0.5, 2.0, N),
        "weights": torch.rand(N, generator=g),
        "sequence_ids": torch.tensor([4, 4, 1, 1, 1]),
        **rows,
    }


def ids_for(t: dict[str, Tensor]) -> Tensor:
    return IDS.to(t["x"].device)


def inputs_of(t: dict[str, Tensor]) -> PolicyInputs:
    return PolicyInputs(
        old_logprobs=t["old"],
        advantages=t["advantages"],
        weights=t["weights"],
        ref_logprobs=t["ref"],
        importance=t["importance"],
        sequence_ids=t["sequence_ids"],
    )


def token(t: dict[str, Tensor], backend: Any) -> Tensor:
    out = token_logprobs(t["x"] @ t["w"].t(), ids_for(t), temperature=t["temperature"], entropy=True, backend=backend)
    assert out.entropy is not None
    return (out.logprobs * t["old"] + 0.3 * out.entropy - out.logsumexp).sum()


def loss(t: dict[str, Tensor], backend: Any, **kw: Any) -> Tensor:
    objective = Objective(kl="k3", beta=0.1, entropy_coef=0.01, **kw.pop("objective", {}))
    return policy_loss(
        t["x"] @ t["w"].t(), ids_for(t), inputs_of(t), objective, temperature=0.7, backend=backend, **kw
    ).loss


def linear_token(t: dict[str, Tensor], backend: Any) -> Tensor:
    out = linear_token_logprobs(t["x"], t["w"], ids_for(t), temperature=0.7, entropy=True, softcap=3.0, backend=backend)
    assert out.entropy is not None
    return (out.logprobs * t["old"] + out.entropy).sum()


def linear_loss(t: dict[str, Tensor], backend: Any) -> Tensor:
    return linear_policy_loss(t["x"], t["w"], ids_for(t), inputs_of(t), Objective(), chunk=2, backend=backend).loss


CALLERS: dict[str, Callable[..., Tensor]] = {
    "token_logprobs": token,
    "policy_loss": loss,
    "policy_loss in place": lambda t, backend: loss(t, backend, inplace=True),
    "policy_loss by sequence": lambda t, backend: loss(t, backend, objective={"ratio_level": "sequence"}),
    "linear_token_logprobs": linear_token,
    "linear_policy_loss": linear_loss,
}


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "compiler"),
    [*((name, "aot_eager") for name in CALLERS), ("policy_loss in place", "inductor"), ("token_logprobs", "inductor")],
)
def test_a_caller_compiles_without_a_graph_break(device: str, name: str, compiler: str, backend: str) -> None:
    """Values and gradients as without; Inductor meets the plain operator and the one that overwrites."""
    if compiler == "inductor" and device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("Inductor needs a C++ compiler for CPU code")

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        t = {name: x.to(device) for name, x in tensors().items()}
        leaves = [t["x"].requires_grad_(), t["w"].requires_grad_()]
        value = function(t, backend)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    expected = run(CALLERS[name])
    ours = run(torch.compile(CALLERS[name], fullgraph=True, backend=compiler))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("dynamo")
def test_in_place_is_ignored_inside_a_compiled_caller() -> None:
    """A compiler could not refuse a leaf or logits that were overwritten; so nothing is overwritten there."""
    t = tensors()
    leaf = (t["x"] @ t["w"].t()).requires_grad_()
    before = leaf.detach().clone()

    def twice(logits: Tensor) -> Tensor:
        inputs = PolicyInputs(
            old_logprobs=t["old"], advantages=t["advantages"], weights=t["weights"], ref_logprobs=t["old"]
        )
        first = policy_loss(logits, IDS, inputs, Objective(), inplace=True)
        return first.loss + policy_loss(logits, IDS, inputs, Objective(), inplace=True).loss

    value = torch.compile(twice, fullgraph=True, backend="aot_eager")(leaf)
    assert torch.equal(leaf.detach(), before)
    once = policy_loss(
        leaf, IDS, PolicyInputs(old_logprobs=t["old"], advantages=t["advantages"], weights=t["weights"]), Objective()
    )
    torch.testing.assert_close(value, 2 * once.loss)


@pytest.mark.usefixtures("dynamo")
def test_other_bounds_and_temperatures_compile_anew_and_correctly() -> None:
    """A compiled caller is not stuck with the numbers that it was traced with."""
    t = tensors()
    inputs = inputs_of(t)

    def caller(logits: Tensor, ratio_max: float, temperature: float) -> Tensor:
        objective = Objective(kind="cispo", ratio_min=0.0, ratio_max=ratio_max)
        return policy_loss(logits, IDS, inputs, objective, temperature=temperature).loss

    compiled = torch.compile(caller, fullgraph=True, backend="aot_eager")
    logits = t["x"] @ t["w"].t()
    values = []
    for ratio_max, temperature in ((1.2, 1.0), (1.2, 0.5), (9.0, 0.5)):
        value = compiled(logits, ratio_max, temperature)
        assert torch.equal(value, caller(logits, ratio_max, temperature))
        values.append(float(value))
    assert len(set(values)) == 3


@pytest.mark.parametrize("triton", [False, True])
def test_opcheck(triton: bool) -> None:
    """PyTorch's own tests of an operator: schema, fake implementation, autograd registration, dynamic shapes."""
    if triton and not INTERPRETED:
        pytest.skip("its tensors are on the CPU, where kernels run in the interpreter only")
    t = tensors()
    kept = KeptSet.from_lists([[3, 5], [], [32, 1], [0], [7, 8, 9]])
    rows = check_rows(
        IDS,
        columns=V,
        dtype=torch.float32,
        temperature=t["temperature"],
        vocab_size=None,
        ignore_index=-100,
        kept=kept,
    )
    inputs = tuple(inputs_of(t).named().values())
    objective = pack_objective(Objective(kl="k3", beta=0.1))
    logits = (t["x"] @ t["w"].t()).detach()
    leaf, x, w = (v.clone().requires_grad_() for v in (logits, t["x"], t["w"]))
    for entropy in (False, True):
        torch.library.opcheck(logprob_module._op, (leaf, *rows.flat, entropy, triton))
        torch.library.opcheck(linear_module._token_op, (x, w, None, *rows.flat, None, 2.0, 2, triton, entropy))
    torch.library.opcheck(policy_module._op, (leaf, *rows.flat, *inputs, *objective, triton, True))
    torch.library.opcheck(policy_module._op_, (logits.clone(), *rows.flat, *inputs, *objective, triton))
    for needs in ([True, True, False], [False, True, False]):
        arguments = (x, w, None, *rows.flat, *inputs, *objective, triton, None, None, 2, needs)
        torch.library.opcheck(linear_module._policy_op, arguments)


ALONE = """
import sys
from rhotrain.kernels.logprob import token_logprobs
from rhotrain.kernels.policy_loss import policy_loss
from rhotrain.kernels.linear import linear_policy_loss
from rhotrain.kernels.sampling import sample_tokens
rooms = sorted(name for name in sys.modules if name.startswith("rhotrain.") and name.split(".")[1] != "kernels")
print(rooms, "transformers" in sys.modules, "tyro" in sys.modules)
"""


def test_kernels_are_usable_alone() -> None:
    """Someone else's trainer takes one function: no other folder and no other library comes along."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False False"
