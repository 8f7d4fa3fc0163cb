"""Each planted fault is caught by a guard or named by the diagnosis, alone; clean settings name nothing."""

import pytest
import torch
from helpers_faults import FAULTS, fault_table, guard, names_in, plant, random_setting, tiny_llama_case, tiny_sums_case
from helpers_rollout import one_thread  # noqa: F401

DIAGONAL = {**{fault: (fault,) for fault in FAULTS}, "none": ()}


def test_planted_against_named_in_a_random_llama() -> None:
    assert fault_table(tiny_llama_case()) == DIAGONAL


def test_planted_against_named_in_tiny_sums() -> None:
    assert fault_table(tiny_sums_case()) == DIAGONAL


@pytest.mark.slow
@pytest.mark.parametrize("initializer_range", [0.15, 0.2, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_planted_against_named_in_other_llamas(seed: int, initializer_range: float) -> None:
    assert fault_table(tiny_llama_case(seed, initializer_range)) == DIAGONAL


def test_the_guard_says_what_an_attached_old_logprob_does() -> None:
    message = guard(plant(tiny_llama_case(), "undetached"))
    assert message is not None
    assert "old_logprobs" in message and "grad" in message


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_clean_settings_name_nothing(number: int, dtype: torch.dtype) -> None:
    assert names_in(random_setting(number), dtype) == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fifty_clean_settings_name_nothing(dtype: torch.dtype) -> None:
    alarms = {n: names for n in range(50) if (names := names_in(random_setting(n), dtype))}
    assert alarms == {}
