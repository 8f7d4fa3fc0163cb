"""The trainer's own reading of reported logprobs, over a whole file: which records, how far, and how many at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rhotrain.model.loaded import LoadedModel
from rhotrain.train.readings import Reading, Scoring, View
from rhotrain.train.records import Record
from rhotrain.train.variants import completion_logits

LONGEST = 96
"""Tokens of one completion that are scored, its first: what follows cannot change them."""
PLAIN_TOKENS = 16384
"""Tokens that are scored as the trainer does, spread over all records."""
LOGIT_BYTES = 64 << 20
"""Most bytes of logits held at a time in that pass."""


def spread(records: Mapping[int, Record], tokens: int) -> tuple[list[int], list[Record]]:
    """(samples, their records cut to LONGEST tokens), in an order of which every beginning is spread over the whole
    file, as many as have about `tokens`."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    order = sorted(records, key=lambda i: (i * golden) % 1.0)
    cut = [
        replace(
            records[i],
            completion_ids=records[i].completion_ids[:LONGEST],
            logprobs=records[i].logprobs[:LONGEST],
            kept_ids=None if records[i].kept_ids is None else records[i].kept_ids[:LONGEST],  # type: ignore[index]
        )
        for i in order
    ]
    chosen = first(cut, tokens)
    return order[: len(chosen)], chosen


def places(samples: Sequence[int], records: Sequence[Record]) -> list[tuple[int, int]]:
    """(sample, token) of every row."""
    return [(i, t) for i, record in zip(samples, records) for t in range(len(record.completion_ids))]


def score_plainly(loaded: LoadedModel, records: Sequence[Record], scoring: Scoring) -> list[Reading]:
    """The trainer's own reading of every record by itself."""
    columns = loaded.head.weight.shape[0]
    room = max(1, LOGIT_BYTES // (4 * columns))
    found: list[Reading] = []
    start = 0
    while start < len(records):
        chunk = first(records[start:], room)
        start += len(chunk)
        logits = completion_logits(loaded, [(r.prompt_ids, r.completion_ids) for r in chunk])
        both = View(loaded, chunk, logits, scoring).readings((), plain=True)[0]
        lens = [len(r.completion_ids) for r in chunk]
        for ours, theirs in zip(both.scored.split(lens), both.reported.split(lens)):
            found.append(Reading.of((), ours, theirs, trim=False))
    return found


def first(records: Sequence[Record], tokens: int) -> list[Record]:
    """The longest start of at most `tokens` completion tokens; at least one record."""
    chosen: list[Record] = []
    for record in records:
        tokens -= len(record.completion_ids)
        if chosen and tokens < 0:
            break
        chosen.append(record)
    return chosen
