"""What the report on foreign logprobs says of how much was scored, and to whom it says so."""

import json
from dataclasses import replace

import pytest
from helpers_faults import sample, tiny_sums_case
from helpers_rollout import one_thread  # noqa: F401

from rhotrain.rollout.completion import SamplingParams
from rhotrain.rollout.probe_client import ServerCompletion
from rhotrain.train import foreign, plain_reading
from rhotrain.train.audit_report import report
from rhotrain.train.config import Config
from rhotrain.train.foreign import ForeignAudit, audit_records, server_records
from rhotrain.train.records import records_of

CASE = tiny_sums_case()


def audited(scale: float = 1.0) -> ForeignAudit:
    loaded = CASE.make()
    records = records_of(sample(loaded, CASE, SamplingParams(temperature=Config().rollout.temperature)))
    records = [replace(r, logprobs=tuple(scale * x for x in r.logprobs)) for r in records]
    return audit_records(Config(), loaded, records, "here.jsonl")


@pytest.mark.parametrize("scale", [1.0, 0.5], ids=["clean", "not clean"])
def test_how_much_was_scored_is_in_verdict_text_and_json(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_reading, "LONGEST", 2)
    audit = audited(scale)
    scored = audit.diagnosis.tokens
    assert 0 < scored < audit.tokens and audit.diagnosis.clean == (scale == 1.0)
    words = f"scored {scored} of {audit.tokens} tokens, 48 of 48 completions"
    assert audit.verdict.startswith("clean: " if scale == 1.0 else "not clean: ") and f"({words})" in audit.verdict
    text = " ".join(report(audit, as_json=False).split())
    assert text.startswith(f"here.jsonl: 48 completions, {audit.tokens} tokens; {words}")
    found = json.loads(report(audit, as_json=True))
    assert (found["scored_tokens"], found["tokens"]) == (scored, audit.tokens)
    assert (found["scored_completions"], found["completions"]) == (48, 48)


def test_what_a_server_refused_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def probe(url: str, *args: object, **options: object) -> list[ServerCompletion]:
        options["tell"](f"{url}: refused sampling_seed")  # type: ignore[operator]
        return [ServerCompletion((5,), (6,), (-1.0,), "length")]

    monkeypatch.setattr(foreign, "probe", probe)
    assert len(server_records(Config(), CASE.make(), "http://here", "sglang")) == 1
    out, err = capsys.readouterr()
    assert err == "audit: http://here: refused sampling_seed\n" and out == ""
