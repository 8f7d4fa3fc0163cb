"""The benchmark of decode over pages: parity sees wrong results, and figures are of the bytes that must move."""

from dataclasses import replace

import pytest
import test_paged
import torch
from kernel_report import GRAPH, OURS
from paged_cases import PAGED, Paged, paged_cases, paged_error, paged_inputs, paged_names

CPU = torch.device("cpu")
SMALL = Paged(5, 40, 4, 2, 16, skewed=True, width=3)


def test_parity_sees_a_wrong_row_and_a_wrong_length() -> None:
    inputs = paged_inputs(SMALL, torch.float32, CPU)
    out = PAGED[OURS](inputs)
    assert paged_error(inputs, out) < 2e-6 and paged_error(inputs, PAGED["gather and SDPA"](inputs)) < 2e-6
    spoilt = out.clone()
    spoilt[4, 3, 15] += 1e-3
    assert paged_error(inputs, spoilt) > 5e-4
    assert paged_error(inputs, torch.full_like(out, float("nan"))) == float("inf")
    longer = replace(inputs, lens=inputs.lens - 1)
    assert paged_error(inputs, PAGED[OURS](longer)) > 1e-3


def test_lengths_and_bytes() -> None:
    assert Paged(2, 100, 4, 2, 8).gigabytes(torch.bfloat16) == 2 * 100 * 2 * 16 * 2 / 1e9
    lengths = SMALL.lengths
    assert 2 <= int(lengths.min()) < int(lengths.max()) <= 40 and len(lengths.unique()) > 2
    inputs = paged_inputs(SMALL, torch.float32, CPU)
    assert inputs.tables.shape == (5, 9) and not inputs.tables[:, 3:].any()
    assert len(inputs.tables[:, :3].unique()) == 15


def test_a_row_has_its_share_and_a_missing_peer_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_paged, "DEVICE", CPU)
    monkeypatch.setattr(test_paged, "copy_gb_per_s", lambda device: 100.0)
    call, row = test_paged.prepare(SMALL, OURS)
    assert call is not None and row.ours and row.errors is not None and row.errors["output"] < 2e-6
    test_paged.add_figures(row, SMALL, [4.0, 1.0, 2.0])
    assert row.rate is not None and row.rate == pytest.approx(SMALL.gigabytes(torch.float32) / 2e-3)
    assert row.share == pytest.approx(row.rate / 100)
    assert row.target is None, "targets are for an H200"
    monkeypatch.setattr(test_paged, "device_name", lambda device: "NVIDIA H200")
    test_paged.add_figures(row, replace(SMALL, rows=64), [1e-9])
    assert row.target_met is True
    for name in ("flash-attn 2", OURS + GRAPH):
        call, row = test_paged.prepare(SMALL, name)
        assert call is None and row.status == "skipped" and row.reason


def test_a_wrong_result_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_paged, "DEVICE", CPU)
    monkeypatch.setitem(PAGED, OURS, lambda inputs: torch.zeros_like(inputs.q))
    call, row = test_paged.prepare(SMALL, OURS)
    assert call is None and row.status == "parity failed" and row.ms is None


def test_the_sweep_of_a_gpu() -> None:
    every = list(paged_cases(torch.device("cuda")))
    assert len(every) == len({str(case) for case in every}) == len(set(every))
    assert {1, 64, 256} <= {case.rows for case in every} and any(case.width > 1 for case in every)
    assert paged_names()[0] == OURS and OURS + GRAPH in paged_names()
