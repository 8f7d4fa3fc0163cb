"""What records of completions tell without a model's forward pass: lengths, ids, text, values, endings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rhotrain.model.loaded import LoadedModel
from rhotrain.train.batching import POSITIVE_LIMIT
from rhotrain.train.readings import Scoring
from rhotrain.train.records import Record


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with reported logprobs. name: one of a fixed set (see diagnosis.FIXES); detail: what was
    found, with its numbers; fix: what to do."""

    name: str
    detail: str
    fix: str


def check_records(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """The findings of the records alone, each kind once with the first record that shows it."""
    for check in (_values, _lengths, _endings, _ids, _texts):
        yield from check(loaded, records, scoring)


def _values(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """Logprobs that are no logarithms of a probability."""
    named = [(i, t, x) for i, record in enumerate(records) for t, x in enumerate(record.logprobs)]
    broken = [(i, t, x) for i, t, x in named if not math.isfinite(x)]
    positive = [(i, t, x) for i, t, x in named if math.isfinite(x) and x > POSITIVE_LIMIT]
    if broken:
        i, t, x = broken[0]
        yield Finding(
            "not finite",
            f"{len(broken)} of {len(named)} logprobs are not finite, the first is {x} for token {t} of sample {i}",
            "look for weights that were updated during a forward pass, a dtype that overflows, or a value left out",
        )
    if positive:
        i, t, x = positive[0]
        yield Finding(
            "positive",
            f"{len(positive)} of {len(named)} logprobs are positive, the first is {x:.4g} for token {t} of sample {i}",
            "report log_softmax values, not logits or differences; natural logarithms of probabilities are at most 0",
        )


def _lengths(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """Ids and logprobs that do not pair up."""
    off = [(i, r, len(r.logprobs) - len(r.completion_ids)) for i, r in enumerate(records)]
    by_one = [(i, r, extra) for i, r, extra in off if abs(extra) == 1]
    by_more = [(i, r, extra) for i, r, extra in off if abs(extra) > 1]
    if by_one:
        i, r, extra = by_one[0]
        lost = "the ids" if extra > 0 else "the logprobs"
        yield Finding(
            "eos dropped",
            f"{len(by_one)} of {len(records)} completions have {'more' if extra > 0 else 'fewer'} logprobs than ids by "
            f"one (sample {i}: {len(r.logprobs)} and {len(r.completion_ids)}): the stop token is missing from {lost}",
            "keep the stop token's id and its logprob; it carries loss",
        )
    if by_more:
        i, r, _ = by_more[0]
        whole = len(r.prompt_ids) + len(r.completion_ids)
        prompts = "; they include the prompt's" if len(r.logprobs) in (whole, whole - 1) else ""
        yield Finding(
            "shifted",
            f"{len(by_more)} of {len(records)} completions have other numbers of logprobs and ids (sample {i}: "
            f"{len(r.logprobs)} and {len(r.completion_ids)}){prompts}",
            "report one logprob per completion id, and nothing for the prompt",
        )


def _endings(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """Completions that stopped, but do not end with what stops."""
    stops = {*loaded.stop_token_ids, *scoring.stop_token_ids}
    stopped = [(i, r) for i, r in enumerate(records) if r.finish_reason == "stop"]
    lost = [i for i, r in stopped if not r.completion_ids or r.completion_ids[-1] not in stops]
    lost = [i for i in lost if not _stopped_by_string(loaded, records[i], scoring)]
    if lost:
        last = records[lost[0]].completion_ids[-1:]
        yield Finding(
            "eos dropped",
            f"{len(lost)} of {len(stopped)} completions with finish_reason stop do not end with a stop id (sample "
            f"{lost[0]} ends with {last[0] if last else 'nothing'}, stop ids are {sorted(stops)}): it is missing",
            "keep the stop token's id and its logprob; name further stop_token_ids or stop_strings if there are any",
        )


def _stopped_by_string(loaded: LoadedModel, record: Record, scoring: Scoring) -> bool:
    if not scoring.stop_strings or not record.completion_ids:
        return False
    rows = _rows(loaded)
    text = loaded.tokenizer.decode([i for i in record.completion_ids if i < rows], skip_special_tokens=False)
    return any(stop in text for stop in scoring.stop_strings)


def _rows(loaded: LoadedModel) -> int:
    return int(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def _ids(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """Completion ids that the model cannot have drawn, prompt ids that it cannot read."""
    for i, record in enumerate(records):
        drawn = [x for x in record.completion_ids if not 0 <= x < loaded.vocab_size]
        read = [x for x in record.prompt_ids if not 0 <= x < _rows(loaded)]
        if drawn or read:
            yield Finding(
                "tokenizer",
                f"sample {i} has id {(drawn or read)[0]} in its {'completion' if drawn else 'prompt'}, outside of the "
                f"vocabulary of {loaded.vocab_size} ids: another tokenizer or model",
                "serve the checkpoint that is trained, with its own tokenizer, and pass token ids both ways",
            )
            return


def _texts(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> Iterator[Finding]:
    """Texts that our tokenizer does not give for the ids; most of them must differ, for servers trim and clean text."""
    with_text = [
        (i, r) for i, r in enumerate(records) if r.text is not None and all(x < _rows(loaded) for x in r.completion_ids)
    ]
    other = [(i, r) for i, r in with_text if not _same_text(loaded, r)]
    if len(other) * 2 > len(with_text):
        i, r = other[0]
        ours = loaded.tokenizer.decode(list(r.completion_ids))
        yield Finding(
            "tokenizer",
            f"{len(other)} of {len(with_text)} texts are not what these ids mean here (sample {i}: {r.text!r:.60} "
            f"there, {ours!r:.60} here): another tokenizer or model",
            "serve the checkpoint that is trained, with its own tokenizer, and pass token ids both ways",
        )


def _same_text(loaded: LoadedModel, record: Record) -> bool:
    """Apart from space at the ends, special tokens, half characters, and a stop string cut off."""
    found = _plain(record.text or "")
    for skip in (True, False):
        ours = _plain(loaded.tokenizer.decode(list(record.completion_ids), skip_special_tokens=skip))
        if ours == found or (found and ours.startswith(found)) or (not found and len(record.completion_ids) <= 1):
            return True
    return False


def _plain(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())


def usable(loaded: LoadedModel, records: Sequence[Record]) -> dict[int, Record]:
    """Sample -> record, of those that can be scored, ids and logprobs cut to pairs. A prompt's logprobs in front are
    cut off."""
    found = {}
    for sample, record in enumerate(records):
        ids, logprobs = record.completion_ids, record.logprobs
        if len(logprobs) in (len(record.prompt_ids) + len(ids), len(record.prompt_ids) + len(ids) - 1) and ids:
            logprobs = logprobs[-len(ids) :]
        count = min(len(ids), len(logprobs))
        tokens = (*record.prompt_ids, *ids)
        fits = loaded.max_positions is None or len(tokens) <= loaded.max_positions
        inside = all(0 <= x < loaded.vocab_size for x in ids) and all(0 <= x < _rows(loaded) for x in record.prompt_ids)
        if count and record.prompt_ids and fits and inside:
            kept = None if record.kept_ids is None else record.kept_ids[:count]
            found[sample] = replace(record, completion_ids=ids[:count], logprobs=logprobs[:count], kept_ids=kept)
    return found
