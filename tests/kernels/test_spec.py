"""What an Objective refuses, and what it says about itself."""

import math
from itertools import product
from typing import Any, cast

import pytest

from rhotrain.kernels.spec import CELLS, OBJECTIVE_KINDS, RATIO_LEVELS, Cell, Objective, ObjectiveKind

KINDS = cast(tuple[ObjectiveKind, ...], OBJECTIVE_KINDS)


def test_exactly_the_cells_of_the_table_exist() -> None:
    for kind, level, cap in product(KINDS, RATIO_LEVELS, (None, 3.0)):
        cell = Cell(kind, level, cap is not None)
        make = {"kind": kind, "ratio_level": level, "dual_clip": cap}
        if cell in CELLS:
            assert Objective(**make).kind == kind  # type: ignore[arg-type]
            continue
        with pytest.raises(ValueError, match=rf"kind='{kind}': .*\. What exists: grpo/token, grpo/token/dual_clip, "):
            Objective(**make)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"kind": "ppo"}, "kind: 'ppo' is not one of grpo, cispo, reinforce, sapo"),
        ({"ratio_level": "batch"}, "ratio_level: 'batch' is not one of token, sequence"),
        ({"kind": "sapo", "ratio_level": "sequence"}, "ratio_level: 'sequence' .*: its gate is per token"),
        ({"kind": "reinforce", "ratio_level": "sequence"}, "ratio_level: 'sequence' .*: it has no ratio"),
        ({"kind": "reinforce", "dual_clip": 3.0}, "dual_clip: 3.0 .*: it has no ratio to cap"),
        ({"kind": "cispo", "dual_clip": 3.0}, "dual_clip: 3.0 .*: ratio_max already caps"),
        ({"kl": "k1"}, "kl: 'k1' is refused as a loss: its expected gradient is exactly 0"),
        ({"kl": "k4"}, "kl: 'k4' is not one of none, k2, k3, k3_k2grad, k3_unbiased"),
        ({"ratio_min": math.nan}, "ratio_min, ratio_max: .*got nan and 1.2"),
        ({"ratio_max": math.nan}, "ratio_min, ratio_max: .*got 0.8 and nan"),
        ({"ratio_min": math.inf, "ratio_max": math.inf}, "ratio_min, ratio_max: .*finite ratio_min"),
        ({"ratio_min": -math.inf}, "ratio_min, ratio_max"),
        ({"ratio_min": 1.3}, "ratio_min, ratio_max: need 0 <= ratio_min <= ratio_max"),
        (
            {"ratio_min": 0.2, "ratio_max": 0.2},
            "ratio_min, ratio_max: 0.2 and 0.2 leave out 1: .*A > 0 .*not distances",
        ),
        ({"ratio_min": 1.1}, "ratio_min, ratio_max: 1.1 and 1.2 leave out 1: .*A < 0 .*values of the ratio"),
        ({"ratio_max": 0.9, "ratio_level": "sequence"}, "ratio_min, ratio_max: 0.8 and 0.9 leave out 1"),
        ({"dual_clip": 1.0, "ratio_max": 1.0}, "dual_clip: need a finite value > 1"),
        ({"dual_clip": 1.1}, r"dual_clip: .*>= ratio_max \(1.2\), got 1.1"),
        ({"dual_clip": math.inf}, "dual_clip: .*got inf; None does not cap"),
        ({"dual_clip": math.nan}, "dual_clip: .*got nan"),
        ({"dual_clip": 3.0, "ratio_max": math.inf}, r"dual_clip: .*ratio_max \(inf\)"),
        ({"sapo_tau_pos": 0.0}, "sapo_tau_pos: need a finite value > 0, got 0.0"),
        ({"sapo_tau_neg": math.inf}, "sapo_tau_neg: .*got inf"),
        ({"beta": math.nan, "kl": "k3"}, "beta: need a finite value, got nan"),
        ({"beta": math.inf, "kl": "k3"}, "beta: need a finite value, got inf"),
        ({"beta": -0.1, "kl": "k3"}, "beta: -0.1 is negative"),
        ({"beta": 0.1}, "beta: 0.1 has no effect with kl='none'; choose k2, k3, k3_k2grad or k3_unbiased"),
        ({"entropy_coef": -math.inf}, "entropy_coef: need a finite value, got -inf"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_refusals_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^Objective." + message):
        Objective(**values)


def test_only_grpo_must_hold_1_between_its_bounds() -> None:
    """At a bound of exactly 1 the gradient passes; cispo clamps weights, and the others read no bounds."""
    for low, high in ((1.0, 1.2), (0.8, 1.0), (1.0, 1.0)):
        objective = Objective(ratio_min=low, ratio_max=high)
        assert (objective.ratio_min, objective.ratio_max) == (low, high)
    for kind in KINDS[1:]:
        assert Objective(kind=kind, ratio_min=0.2, ratio_max=0.2).ratio_max == 0.2
        assert Objective(kind=kind, ratio_min=1.1, ratio_max=1.2).ratio_min == 1.1


def test_what_the_gradient_depends_on() -> None:
    assert [Objective(kind=kind).uses_ratio for kind in KINDS] == [True, True, False, True]
    assert [Objective(kind=kind).uses_bounds for kind in KINDS] == [True, True, False, False]
    assert Objective(kind="reinforce", kl="k3_unbiased", beta=0.1).uses_ratio
    assert not Objective(kind="reinforce", kl="k3_unbiased").uses_ratio
    assert not Objective(kind="reinforce", kl="k3", beta=0.1).uses_ratio
    assert Objective(kl="k3_unbiased", beta=0.1).uses_reference and not Objective(kl="k3_unbiased").uses_reference
    assert Objective(ratio_min=0.0, ratio_max=math.inf).ratio_max == math.inf
