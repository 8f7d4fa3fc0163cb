"""The Triton device function against float64, row by row of one launch; an Objective as plain arguments."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rhotrain.kernels.backend import HAS_TRITON, Launch, jit, tl
from rhotrain.kernels.objective import PolicyTerms, policy_terms
from rhotrain.kernels.objective_triton import (
    objective_arguments,
    pack_objective,
    policy_terms_kernel,
    unpack_objective,
)
from rhotrain.kernels.spec import CELLS, KL_KINDS, Cell, KLKind, Objective, ObjectiveKind

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TOKEN_CELLS = [cell for cell in CELLS if cell.ratio_level == "token"]
LOG_RATIOS = (-50.0, -20.0, -3.0, -0.5, -1e-3, 0.0, 1e-5, 0.1, 0.4, 1.0, 1.3, 3.0, 20.0, 50.0)
REF_DIFFERENCES = (-50.0, -20.0, -2.0, -0.7, -1e-3, 0.0, 3e-6, 0.01, 0.9, 1.5, 20.0, 50.0)
ADVANTAGES = (-1.7, -0.3, 0.0, 0.4, 2.1)
INPUTS = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "weights", "importance", "entropy")
ULPS = {"cpu": 4, "cuda": 8}
"""Error beyond the reference's. exp2 is numpy's in the interpreter; a GPU's, and its division, are good to 2 ulp."""
EXP_ERROR = {"cpu": 3e-7, "cuda": 4e-7}
OUTPUTS = ("loss", "dlogprob", "dentropy", "ratio", "kl", "clipped_low", "clipped_high")


@jit(do_not_specialize=["count"])
def _terms_kernel(  # type: ignore[no-untyped-def]
    inputs, outputs, ratio_min, ratio_max, dual_clip, tau_pos, tau_neg, beta, entropy_coef, count, KIND: tl.constexpr,
    KL: tl.constexpr, ABSENT: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row per lane, or per program (SCALAR); inputs [7, count] as INPUTS, outputs [7, count] as OUTPUTS.

    ABSENT leaves out what may be left out.
    """
    if SCALAR:
        at = tl.program_id(0)
    else:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    lp = tl.load(inputs + at, mask=here, other=0.0)
    advantage = tl.load(inputs + 3 * count + at, mask=here, other=0.0)
    weight = tl.load(inputs + 4 * count + at, mask=here, other=0.0)
    if ABSENT:
        loss, dlogprob, dentropy, ratio, kl, low, high = policy_terms_kernel(
            lp, lp, lp, advantage, weight, 1.0, 0.0,
            ratio_min, ratio_max, dual_clip, tau_pos, tau_neg, beta, entropy_coef, KIND, KL,
        )  # fmt: skip
    else:
        old = tl.load(inputs + count + at, mask=here, other=0.0)
        ref = tl.load(inputs + 2 * count + at, mask=here, other=0.0)
        importance = tl.load(inputs + 5 * count + at, mask=here, other=0.0)
        entropy = tl.load(inputs + 6 * count + at, mask=here, other=0.0)
        loss, dlogprob, dentropy, ratio, kl, low, high = policy_terms_kernel(
            lp, old, ref, advantage, weight, importance, entropy,
            ratio_min, ratio_max, dual_clip, tau_pos, tau_neg, beta, entropy_coef, KIND, KL,
        )  # fmt: skip
    tl.store(outputs + at, loss, mask=here)
    tl.store(outputs + count + at, dlogprob, mask=here)
    tl.store(outputs + 2 * count + at, dentropy, mask=here)
    tl.store(outputs + 3 * count + at, ratio, mask=here)
    tl.store(outputs + 4 * count + at, kl, mask=here)
    tl.store(outputs + 5 * count + at, low.to(tl.float32), mask=here)
    tl.store(outputs + 6 * count + at, high.to(tl.float32), mask=here)


TERMS = Launch(block=1024, num_warps=8)


def launch(
    device: str, data: dict[str, Tensor], objective: Objective, *, absent: bool = False, scalar: bool = False
) -> dict[str, Tensor]:
    inputs = torch.stack([data[name] for name in INPUTS]).to(device)
    outputs = torch.full_like(inputs, math.nan)
    count = inputs.shape[1]
    numbers, constexprs = objective_arguments(objective)
    grid = (count if scalar else -(-count // TERMS.block),)
    place = torch.device(device)
    TERMS(_terms_kernel, grid, place, inputs, outputs, *numbers, count, ABSENT=absent, SCALAR=scalar, **constexprs)
    return dict(zip(OUTPUTS, outputs.cpu()))


def rows() -> dict[str, Tensor]:
    """float32. Every log-ratio x advantage x weight, then every difference to the reference, at three log-ratios."""
    cases = [(d, a, w, 0.3) for d, a, w in product(LOG_RATIOS, ADVANTAGES, (0.0, 0.25, 1.0))]
    cases += [(d, a, 0.5, k) for d, a, k in product((-0.2, 0.05, 50.0), (0.0, 1.3), REF_DIFFERENCES)]
    difference, advantages, weights, reference = torch.tensor(cases).unbind(1)
    g = torch.Generator().manual_seed(0)
    logprobs = torch.where(torch.rand(len(cases), generator=g) < 0.5, -2.0, -0.25)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - difference,
        "ref_logprobs": logprobs + reference,
        "advantages": advantages,
        "weights": weights,
        "importance": torch.rand(len(cases), generator=g) * 3,
        "entropy": torch.rand(len(cases), generator=g),
    }


def objective_of(cell: Cell, kl: str, **changes: Any) -> Objective:
    """Bounds that no ratio of `rows` is within rounding of."""
    base = Objective(
        kind=cast(ObjectiveKind, cell.kind),
        ratio_min=0.8,
        ratio_max=1.28,
        dual_clip=3.5 if cell.dual_clip else None,
        sapo_tau_pos=0.9,
        kl=cast(KLKind, kl),
        beta=0.0 if kl == "none" else 0.3,
        entropy_coef=0.07,
    )
    return replace(base, **changes)


def reference(data: dict[str, Tensor], objective: Objective, dtype: torch.dtype = torch.float64) -> PolicyTerms:
    return policy_terms(objective=objective, **{name: values.to(dtype) for name, values in data.items()})


def scales(data: dict[str, Tensor], objective: Objective) -> dict[str, Tensor]:
    """The size of what is added up to each output, float64: a sum is good to the ulp of its terms, not of itself.

    sapo's slope is a gate times -r A, and the gate's own error is of the size of r: its scale is that of r A.
    """
    policy = reference(data, replace(objective, kl="none", beta=0.0, entropy_coef=0.0))
    kl = reference({**data, "advantages": 0 * data["advantages"]}, replace(objective, entropy_coef=0.0))
    whole = reference(data, objective)
    slope = policy.dlogprob.abs()
    if objective.kind == "sapo":
        slope = (data["weights"] * data["importance"] * data["advantages"]).double().abs() * policy.ratio
    entropy = (whole.dentropy * data["entropy"]).abs()
    return {
        "loss": policy.loss.abs() + kl.loss.abs() + entropy,
        "dlogprob": slope + kl.dlogprob.abs(),
        "dentropy": whole.dentropy.abs(),
        "ratio": whole.ratio,
        "kl": whole.kl.abs(),
    }


@pytest.mark.parametrize("kl", KL_KINDS)
@pytest.mark.parametrize("cell", TOKEN_CELLS, ids=str)
def test_every_cell_against_float64(device: str, cell: Cell, kl: str) -> None:
    """Error at most that of the float32 reference plus a few ulp; the flags are the same."""
    data, objective = rows(), objective_of(cell, kl)
    truth, plain, ours = (
        reference(data, objective),
        reference(data, objective, torch.float32),
        launch(device, data, objective),
    )
    for name, scale in scales(data, objective).items():
        expected = getattr(truth, name)
        allowed = (getattr(plain, name).double() - expected).abs() + ULPS[device] * 2.0**-23 * scale
        error = (ours[name].double() - expected).abs()
        worst = int((error - allowed).argmax())
        assert bool((error <= allowed).all()), (name, worst, float(error[worst]), float(allowed[worst]))
    for name in ("clipped_low", "clipped_high"):
        assert torch.equal(ours[name], getattr(truth, name).float()), name
    if cell.kind in ("grpo", "cispo"):
        assert bool(truth.clipped_low.any()) and bool(truth.clipped_high.any())
    if cell.dual_clip:
        assert bool((truth.clipped_high & (data["advantages"] < 0)).any())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_of_weight_zero_are_zero_whatever_they_hold(device: str, bad: float) -> None:
    for cell, kl in zip(TOKEN_CELLS, KL_KINDS, strict=True):
        data, objective = rows(), objective_of(cell, kl)
        clean = launch(device, data, objective)
        dead = data["weights"] == 0
        for name in data:
            if name != "weights":
                data[name][dead] = bad
        ours = launch(device, data, objective)
        for name in OUTPUTS:
            assert bool((ours[name][dead] == 0).all()), name
            assert torch.equal(ours[name][~dead], clean[name][~dead]), name
    for low, high in ((0.0, 0.5), (1.5, 2.0)):  # bounds that the 1 in such a row would break
        ours = launch(device, data, Objective(kind="cispo", ratio_min=low, ratio_max=high))
        assert not ours["clipped_low"][dead].any() and not ours["clipped_high"][dead].any()


def test_scalars_and_blocks_give_the_same_bits(device: str) -> None:
    data = {name: values[::13] for name, values in rows().items()}
    for cell, kl in zip(TOKEN_CELLS, KL_KINDS, strict=True):
        objective = objective_of(cell, kl)
        block, scalar = launch(device, data, objective), launch(device, data, objective, scalar=True)
        for name in OUTPUTS:
            assert torch.equal(block[name], scalar[name]), (cell, name)


@pytest.mark.parametrize("cell", TOKEN_CELLS, ids=str)
def test_absent_inputs(device: str, cell: Cell) -> None:
    """The logprob itself as old and ref, importance 1: ratio exactly 1, KL exactly 0, the on-policy gradient."""
    data, objective = rows(), objective_of(cell, "k3_unbiased", entropy_coef=0.0)
    ours = launch(device, data, objective, absent=True)
    alive = data["weights"] != 0
    assert torch.equal(ours["ratio"], alive.float())
    assert torch.equal(ours["dlogprob"], -data["advantages"] * data["weights"])
    for name in ("kl", "dentropy", "clipped_low", "clipped_high"):
        assert bool((ours[name] == 0).all()), name


def simple_rows(log_ratios: list[float], advantages: list[float]) -> dict[str, Tensor]:
    """logprob = log-ratio, old 0, weight and importance 1."""
    logprobs = torch.tensor(log_ratios)
    data = dict.fromkeys(INPUTS, torch.zeros_like(logprobs))
    ones = dict.fromkeys(("weights", "importance"), torch.ones_like(logprobs))
    return data | ones | {"logprobs": logprobs, "advantages": torch.tensor(advantages)}


@pytest.mark.parametrize("cell", TOKEN_CELLS, ids=str)
def test_intervals_are_closed(device: str, cell: Cell) -> None:
    """With the kernel's own ratios as bounds the gradient passes; one step further in it is clipped."""
    data = simple_rows([0.25, -0.25, 1.0], [1.0, -1.0, -1.0])
    up, down, cap = launch(device, data, Objective())["ratio"].tolist()
    at = Objective(kind=cast(ObjectiveKind, cell.kind), ratio_min=down, ratio_max=up)
    at = replace(at, dual_clip=cap if cell.dual_clip else None)
    if cell.kind == "cispo":
        at = replace(at, ratio_max=cap)
    ours = launch(device, data, at)
    assert not ours["clipped_low"].any() and not ours["clipped_high"].any()
    if cell.kind in ("grpo", "cispo"):
        assert ours["dlogprob"].tolist() == [-up, down, cap]
    less = 1 - 2.0**-20
    inside = replace(at, ratio_min=down / less, ratio_max=at.ratio_max * less)
    ours = launch(device, data, replace(inside, dual_clip=cap * less if cell.dual_clip else None))
    low, high = {"grpo": ([0, 1, 0], [1, 0, int(cell.dual_clip)]), "cispo": ([0, 1, 0], [0, 0, 1])}.get(
        cell.kind, ([0] * 3, [0] * 3)
    )
    assert ours["clipped_low"].tolist() == low and ours["clipped_high"].tolist() == high


def test_limit_of_the_log_ratio_is_closed(device: str) -> None:
    """At exactly +-20 the derivative passes, beyond it is 0 and the ratio stays where it was."""
    data = simple_rows([20.0, 20.25, -20.25, -20.0], [-1.0, -1.0, -1.0, 1.0])
    ours = launch(device, data, Objective(ratio_min=0.0, ratio_max=math.inf))
    up, down = math.exp(20.0), math.exp(-20.0)
    torch.testing.assert_close(ours["dlogprob"], torch.tensor([up, 0.0, 0.0, -down]), rtol=EXP_ERROR[device], atol=0)
    torch.testing.assert_close(ours["ratio"], torch.tensor([up, up, down, down]), rtol=EXP_ERROR[device], atol=0)


def test_the_ratio_is_good_to_a_few_ulp(device: str) -> None:
    """Everywhere: exp2 of the one product x log2(e) would be off by 6e-7 near the limit. At 0 it is exactly 1."""
    data = simple_rows([0.0, *torch.linspace(-20, 20, 999).tolist()], [1.0] * 1000)
    ratio = launch(device, data, Objective())["ratio"]
    torch.testing.assert_close(ratio.double(), data["logprobs"].double().exp(), rtol=EXP_ERROR[device], atol=0)
    assert float(ratio[0]) == 1.0


def test_a_steep_gate_stays_finite(device: str) -> None:
    """sapo with a tau that makes tau (r - 1) astronomic: an open or a shut gate with gradient 0; at r = 1 still -A."""
    data = simple_rows([20.0, 0.0, -20.0], [1.0, 1.0, 1.0])
    ours = launch(device, data, Objective(kind="sapo", sapo_tau_pos=1e29))
    assert ours["dlogprob"].tolist() == [0.0, -1.0, 0.0] and bool(ours["loss"].isfinite().all())


def test_k3_does_not_cancel(device: str) -> None:
    """Value and slope are good to 1e-6 of themselves (on a GPU 2e-6) from |k| = 1e-6 to the limit.

    expm1(k) - k in float32 is not.
    """
    k = torch.logspace(-6, math.log10(19.9), 400)
    k = torch.cat([k, -k])
    ones = torch.ones_like(k)
    data = {**dict.fromkeys(INPUTS, 0 * k), "weights": ones, "ref_logprobs": k}
    ours = launch(device, data, Objective(kind="reinforce", kl="k3", beta=1.0))
    exact = k.double()
    series = sum((exact**n * (1.0 / math.factorial(n)) for n in range(2, 22)), torch.zeros_like(exact))
    value = torch.where(exact.abs() < 1.5, series, torch.exp(exact) - 1 - exact)
    tolerance = {"cpu": 1e-6, "cuda": 2e-6}[device]
    torch.testing.assert_close(ours["kl"].double(), value, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours["dlogprob"].double(), -torch.expm1(exact), rtol=tolerance, atol=0)
    naive = (torch.expm1(k) - k).double()
    assert float(((naive - value) / value).abs().max()) > 1e-3


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.path.insert(0, sys.argv[1])
from test_objective_triton import _terms_kernel as kernel
constexpr = ("KIND", "KL", "ABSENT", "SCALAR", "BLOCK", "STAGES")
signature = {name: "fp32" for name in kernel.arg_names}
signature |= {"inputs": "*fp32", "outputs": "*fp32", "count": "i32"} | dict.fromkeys(constexpr, "constexpr")
at = {name: (kernel.arg_names.index(name),) for name in constexpr}
found = {}
for kind, kl, arch, scalar in json.loads(sys.argv[2]):
    values = {"KIND": kind, "KL": kl, "ABSENT": False, "SCALAR": scalar, "BLOCK": 128, "STAGES": 3}
    source = ASTSource(kernel, signature=signature, constexprs={at[name]: values[name] for name in constexpr})
    options = dict(num_warps=4, enable_fp_fusion=False)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    found[f"{kind} {kl} {arch}"] = [".f64" in ptx, "fma.rn" in ptx, "ex2.approx" in ptx]
print(json.dumps(found))
"""


@needs_triton
def test_every_branch_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Ahead of time, without a GPU, each kind and KL once: no float64, no fused multiply-add (as interpreted)."""
    kinds = sorted({cell.kind for cell in TOKEN_CELLS})
    variants = [(kinds[i % len(kinds)], kl, 90, i % 2 == 0) for i, kl in enumerate(KL_KINDS)]
    variants.append(("grpo", "k3_unbiased", 80, True))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent), json.dumps(variants)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(variants) and all(flags == [False, False, True] for flags in found.values()), found


# ---- an Objective as plain values -----------------------------------------------------------------------------------


def every_objective() -> Iterator[Objective]:
    for cell, kl in product(CELLS, KL_KINDS):
        yield objective_of(cell, kl, ratio_level=cell.ratio_level)
    yield Objective(ratio_min=0.0, ratio_max=math.inf)


def test_pack_objective_is_lossless() -> None:
    for objective in every_objective():
        kind, ratio_level, kl, numbers = pack_objective(objective)
        assert all(type(text) is str for text in (kind, ratio_level, kl))
        assert all(type(number) is float for number in numbers)
        assert unpack_objective(kind, ratio_level, kl, numbers) == objective


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.floats(1, 1e9), st.floats(0, 1e9), st.floats(1e-9, 1e9), st.floats(0, 10), st.floats(-1, 1))
def test_pack_objective_keeps_every_bit(
    low: float, high: float, above: float, tau: float, beta: float, entropy_coef: float
) -> None:
    cap = max(high + above, math.nextafter(1.0, 2.0))
    objective = Objective(
        ratio_min=low,
        ratio_max=high,
        dual_clip=cap,
        sapo_tau_pos=tau,
        sapo_tau_neg=2 * tau,
        kl="k2",
        beta=beta,
        entropy_coef=entropy_coef,
    )
    assert unpack_objective(*pack_objective(objective)) == objective
    assert objective_arguments(objective)[0] == (low, high, cap, tau, 2 * tau, beta, entropy_coef)


def test_an_objective_passes_through_torch_compile() -> None:
    """Traced whole, for objectives that differ in a word, a number or both."""

    def step(x: Tensor, objective: Objective) -> tuple[Tensor, str]:
        numbers, constexprs = objective_arguments(objective)
        again = unpack_objective(*pack_objective(objective))
        capped = x if again.dual_clip is None else x.clamp(max=again.dual_clip)
        return capped * numbers[0] + again.beta, constexprs["KIND"] + again.ratio_level

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    x = torch.tensor([0.5, 9.0])
    objectives = [Objective(), Objective(ratio_min=0.7), Objective(ratio_min=0.6), Objective(dual_clip=4.0)]
    objectives += [Objective(kind="sapo", kl="k3_unbiased", beta=0.1), Objective(ratio_level="sequence")]
    for objective in objectives:
        (ours, words), (expected, same) = compiled(x, objective), step(x, objective)
        assert torch.equal(ours, expected) and words == same
