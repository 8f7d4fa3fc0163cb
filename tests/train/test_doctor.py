"""What `rhotrain doctor` says about attention: the backend of each use, and why a preferred one does not run."""

import json

import pytest
from helpers_flash import flash_stand_in

from rhotrain.train.commands import doctor
from rhotrain.train.doctor import as_text, report

USES = {
    "attention",
    "attention with softcap",
    "attention with sinks",
    "prompts, pages of 16",
    "prompts, pages of 256",
    "decode, pages of 16",
    "decode, pages of 256",
}


def test_on_a_cpu() -> None:
    found = report()
    uses = found["attention"]["cpu"]
    assert uses.keys() == USES
    assert {uses[name]["backend"] for name in USES} == {"sdpa", "gather"}
    assert uses["attention"]["passed_over"]["flash_attn"] == "it needs CUDA, and the tensors are on cpu"
    assert found["backends"]["cpu"]["attention"] == "sdpa (the others need CUDA)"
    assert found["backends"]["cpu"]["decode, pages of 16"] == "sdpa (the others need CUDA)"


def test_names_the_backend_of_each_use_and_why_not_another(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine with flash-attn 2 whose GPU is like an A100."""
    with flash_stand_in("flash_attn", capability=(8, 0)):
        doctor(["--json"])
        found = json.loads(capsys.readouterr().out)
        text = as_text(found)
    uses = found["attention"]["cpu"]
    assert [uses[name]["backend"] for name in ("attention", "attention with softcap", "attention with sinks")] == [
        "flash_attn",
        "flash_attn",
        "sdpa",
    ]
    assert uses["attention with sinks"]["passed_over"]["flash_attn"] == "flash-attn 2 has no sinks"
    assert uses["prompts, pages of 256"]["backend"] == uses["decode, pages of 256"]["backend"] == "flash_attn"
    assert uses["prompts, pages of 16"]["backend"] == "gather" and uses["decode, pages of 16"]["backend"] == "sdpa"
    line = next(line for line in text.splitlines() if "decode, pages of 16" in line)
    assert "not flash_attn: pages of 16 tokens; it reads multiples of 256" in line
    assert "not flash_attn3: compute capability 8.0; flash-attn 3 runs on 9.x" in line
    assert "torch_varlen" not in uses["attention"]["passed_over"], "only what is preferred is explained"


def test_says_that_a_library_waits() -> None:
    with flash_stand_in("flash_attn", waits=True):
        uses = report()["attention"]["cpu"]
    assert uses["decode, pages of 256"]["passed_over"]["flash_attn"].startswith("it waits for the device")
    assert uses["prompts, pages of 256"]["backend"] == "flash_attn"
