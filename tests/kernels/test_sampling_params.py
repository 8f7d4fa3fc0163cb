"""What `sample_tokens` refuses, by name, and that it takes every kind of number that means the same."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from rhotrain.kernels.backend import INTERPRETED
from rhotrain.kernels.rows import KeptSet
from rhotrain.kernels.sampling import sample_tokens

REALS, INTEGERS = ("temperature", "top_p", "min_p"), ("top_k", "seeds", "positions", "samples")
ROWS = torch.arange(2)
SETS = KeptSet.from_lists([[1, 2], [3]])
Wrong = tuple[str, Any, str]
"""A field of `sample_tokens`, what it gets for two rows of ten ids, and what the message says beside the name."""

WRONG_LOGITS: list[Wrong] = [
    ("logits", [[0.0] * 10] * 2, "bf16, fp16, fp32 or fp64 of shape [B, V], got list [["),
    ("logits", None, "got NoneType None"),
    ("logits", torch.zeros(2, 0), "V >= 1, got torch.float32 [2, 0]"),
    ("logits", torch.zeros(0, 0), "V >= 1"),
    *(("logits", torch.zeros(shape), f"got torch.float32 {list(shape)}") for shape in ((), (10,), (2, 1, 10))),
    *(
        ("logits", torch.zeros(2, 10, dtype=dtype), f"got {dtype} [2, 10]")
        for dtype in (torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float8_e5m2)
    ),
]
WRONG_TYPES: list[Wrong] = [
    *((name, value, "need an int or an integer tensor [2], got float") for name in INTEGERS for value in (0.5, 1.0)),
    *(
        (name, torch.ones(2, dtype=dtype), f"need an int or an integer tensor [2], got {dtype} [2]")
        for name in INTEGERS
        for dtype in (torch.float32, torch.float64, torch.bool, torch.complex64)
    ),
    *(
        (name, torch.ones(2, dtype=dtype), f"need a number or a real tensor [2], got {dtype} [2]")
        for name in REALS
        for dtype in (torch.bool, torch.complex64)
    ),
    *(
        (name, value, f"got {type(value).__name__} {value!r}")
        for name in (*REALS, *INTEGERS)
        for value in (None, True, False, [1, 1], "1", 1j)
    ),
    *((name, torch.ones(2, requires_grad=True), f"pass {name}.detach()") for name in REALS),
    *(
        (name, torch.ones(shape, dtype=torch.int64), f"shape {list(shape)} does not fit 2 rows")
        for name in (*REALS, *INTEGERS)
        for shape in ((3,), (1,), (0,), (2, 1))
    ),
]
WRONG_NUMBERS: list[Wrong] = [
    *(("temperature", value, "need 0 (greedy) or") for value in (-1.0, -1e-40, 1e-40, 1e-320, 1e39, 10**400)),
    *(("temperature", value, "need 0 (greedy) or") for value in (math.nan, math.inf, -math.inf)),
    *(("top_k", value, "need 0 <= top_k") for value in (-1, 2**63)),
    *(("top_p", value, "need 0 < top_p <= 1") for value in (0, 0.0, -0.5, 1e-50, 1.5, 2, math.nan, math.inf)),
    *(("min_p", value, "need 0 <= min_p <= 1") for value in (-0.1, 1.1, 2, math.nan)),
    *((name, value, "-2**63 to 2**63 - 1") for name in INTEGERS[1:] for value in (2**63, -(2**63) - 1)),
    *(("vocab_size", value, f"{value} is not in [1, 10]") for value in (0, -1, 11)),
    *(("vocab_size", value, "need an int or None") for value in (True, 5.0, "5", torch.tensor(5))),
]
WRONG_SETS: list[Wrong] = [
    (name, value, message)
    for name in ("allowed", "banned")
    for value, message in (
        ([[1], [2]], "need a KeptSet (KeptSet.from_lists"),
        ((SETS.offsets, SETS.ids), "need a KeptSet"),
        (KeptSet([0, 1, 2], SETS.ids), "need tensors, got list"),  # type: ignore[arg-type]
        (KeptSet(SETS.offsets.int(), SETS.ids), "need 1-D int64 offsets and int32 ids, got torch.int32 [3]"),
        (KeptSet(SETS.offsets, SETS.ids.long()), "need 1-D int64 offsets and int32 ids"),
        (KeptSet(SETS.offsets, SETS.ids[None]), "got torch.int64 [3] and torch.int32 [1, 3]"),
        (KeptSet(SETS.offsets[:, None], SETS.ids), "got torch.int64 [3, 1]"),
        (KeptSet.from_lists([[1]]), "1 sets for 2 rows"),
        (KeptSet.from_lists([[1]] * 3), "3 sets for 2 rows"),
    )
]
WRONG_VALUES: list[Wrong] = [
    *(("temperature", torch.tensor([1.0, bad]), f"{bad} is out") for bad in (-1.0, math.nan, math.inf)),
    ("temperature", torch.tensor([1.0, 1e-40]), "finite in float32"),
    ("temperature", torch.tensor(-1), "-1.0 is out of range"),
    ("top_k", torch.tensor([5, -2]), "-2 is out of range"),
    *(("top_p", torch.tensor([0.5, bad]), f"{bad} is out of range") for bad in (0.0, 1.5, math.nan)),
    *(("min_p", torch.tensor([0.5, bad]), f"{bad} is out of range") for bad in (-0.5, 1.5, math.nan)),
    *((name, KeptSet.from_lists([[1], [10]]), "10 is not in [0, 10)") for name in ("allowed", "banned")),
    *((name, KeptSet(SETS.offsets, SETS.ids.flip(0)), "must ascend") for name in ("allowed", "banned")),
    *((name, KeptSet(SETS.offsets + 1, SETS.ids), "must rise from 0") for name in ("allowed", "banned")),
]
"""What only a look at a tensor shows, so only for tensors on a CPU."""

WRONG_ANYWHERE = [*WRONG_LOGITS, *WRONG_TYPES, *WRONG_NUMBERS, *WRONG_SETS]
ON_A_CPU = ["reference", pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter"))]


def moved(value: Any, device: str) -> Any:
    if isinstance(value, KeptSet) and isinstance(value.offsets, Tensor):
        return KeptSet(value.offsets.to(device), value.ids.to(device))
    return value.to(device) if isinstance(value, Tensor) else value


def refuse(wrong: Wrong, device: str, backend: Any = "auto", *, move: bool = True) -> None:
    field, value, message = wrong
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 10), "seeds": ROWS, "positions": ROWS}
    arguments = {name: moved(argument, device) for name, argument in arguments.items()}
    arguments[field] = moved(value, device) if move else value
    with pytest.raises(ValueError, match=f"^{field}: .*{re.escape(message)}"):
        sample_tokens(arguments.pop("logits"), **arguments, backend=backend)


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("wrong", [*WRONG_ANYWHERE, *WRONG_VALUES], ids=lambda wrong: f"{wrong[0]}-{wrong[2]:.30}")
def test_wrong_arguments_are_named(wrong: Wrong, backend: Any) -> None:
    refuse(wrong, "cpu", backend)


def test_types_shapes_and_numbers_are_refused_on_every_device() -> None:
    """Tensors without data: a check that looked at a value would raise something else."""
    for wrong in WRONG_ANYWHERE:
        refuse(wrong, "meta")


@pytest.mark.parametrize("field", [*REALS, *INTEGERS, "allowed", "banned"])
def test_tensors_on_another_device_are_refused(field: str) -> None:
    values: list[Any] = [torch.tensor(1), torch.ones(2, dtype=torch.int64)]
    if field in ("allowed", "banned"):
        values = [SETS, KeptSet(SETS.offsets.to("meta"), SETS.ids), KeptSet(SETS.offsets, SETS.ids.to("meta"))]
    for value in values:
        refuse((field, value, "but logits are on meta; move"), "meta", move=False)


@pytest.mark.parametrize("backend", ["cuda", None, ["triton"]])
def test_an_unknown_backend_is_named(backend: Any) -> None:
    with pytest.raises(ValueError, match="backend"):
        sample_tokens(torch.zeros(2, 10), seeds=ROWS, positions=ROWS, backend=backend)


def test_every_kind_of_number_gives_the_same_row() -> None:
    """Numbers, 0-dim tensors and tensors of any real or integer type mean the same."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    base: dict[str, Any] = {
        "temperature": 2,
        "top_k": 7,
        "top_p": 1,
        "min_p": 0,
        "seeds": 3,
        "samples": 1,
        "positions": 5,
    }
    expected = sample_tokens(logits, **base)
    reals = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    integers = (torch.int8, torch.int16, torch.int32, torch.int64)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for field, number in base.items():
        types = (*integers, *unsigned, *(reals if field in REALS else ()))
        values = [torch.full(shape, number, dtype=dtype) for dtype in types for shape in ((), (2,))]
        for value in [*values, *([float(number)] if field in REALS else [])]:
            ours = sample_tokens(logits, **{**base, field: value})
            assert torch.equal(ours.token_ids, expected.token_ids), (field, value)
            assert torch.equal(ours.logprobs, expected.logprobs), (field, value)


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_numbers_at_the_ends_of_their_ranges(backend: Any) -> None:
    logits = torch.linspace(-1.0, 1.0, 40).expand(2, 40)  # no larger: 1e38 times 6 would overflow
    cases: tuple[dict[str, Any], ...] = (
        *({"temperature": value} for value in (0, -0.0, 1.2e-38, 3.4e38)),
        *({"top_k": value} for value in (0, 1, 2**63 - 1)),
        *({"top_p": value} for value in (1.2e-38, 1)),
        *({"min_p": value} for value in (0, 1)),
        *({name: value} for name in INTEGERS[1:] for value in (2**63 - 1, -(2**63))),
        *({"vocab_size": value} for value in (1, 40, None)),
    )
    at: dict[str, Any] = {"seeds": ROWS, "positions": ROWS}
    for options in cases:
        sample = sample_tokens(logits, **{**at, **options}, backend=backend)
        assert not bool(sample.error.any()), options
        assert bool(sample.logprobs.isfinite().all()), options
    high = torch.tensor(2**64 - 1, dtype=torch.uint64)  # the bits of -1
    ours, same = (sample_tokens(logits, **{**at, "seeds": seed}, backend=backend) for seed in (high, -1))
    assert torch.equal(ours.token_ids, same.token_ids)
