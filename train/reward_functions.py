"""The built-in reward functions. Imports no torch and no numpy: they run in the reward process (`reward_worker.py`).

Every function here has the signature that user functions have:
    fn(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **fields) -> list[float | None]
with lists aligned to the completions; it declares the keywords it needs and gets only those. None means unscorable.
Attributes choose how it is called: `per_group = True` once per group, `per_completion = True` once per completion (so a
time-out or an exception costs that completion only); otherwise once with all completions of the step.
Each is also called once with empty lists at the start, so that wrong arguments are found before any model is loaded.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

Scorer = Callable[[str, Mapping[str, Any]], float]
"""A task's own scorer: (text of the completion, fields of the question) -> score, 1 is right."""

# A minus belongs to the number unless a digit, a closing bracket or a word stands right before it ("10-4" ends in 4).
# ASCII digits only: `\\d` would take other scripts' digits, which no answer is written in.
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)\]])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-"})


def find_last_number(text: str) -> Decimal | None:
    """The last number in `text`, None without one. Sign, thousands commas and decimals are read ("-1,234.50")."""
    found = _NUMBER.findall(text.translate(_MINUS_SIGNS))
    return Decimal(found[-1].replace(",", "")) if found else None


def final_text(completion: str) -> str:
    """What a completion gives as its answer: the last <answer>...</answer> if there is one, else what follows the last
    </think>, else everything; stripped.
    """
    text = completion.rpartition("</think>")[2]
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (tagged[-1] if tagged else text).strip()


def exact_match(completion: str, answer: object) -> float:
    """1 when the stripped completion is the stripped answer, else 0."""
    return float(completion.strip() == str(answer).strip())


def exact(*, completions: list[str], answer: list[Any]) -> list[float | None]:
    """1 when the stripped completion is the answer, else 0; rows without an answer are unscorable."""
    return [None if a is None else exact_match(c, a) for c, a in zip(completions, answer)]


def last_number(*, completions: list[str], answer: list[Any]) -> list[float | None]:
    """1 when the completion's last number equals the answer's last number, else 0.

    The answer may be a text that ends in its number (GSM8K's "... #### 18"). Rows whose answer has none are unscorable.
    """
    truths = [find_last_number(str(a)) for a in answer]
    return [None if t is None else float(find_last_number(c) == t) for c, t in zip(completions, truths)]


def bare_number(
    *, completions: list[str], answer: list[Any], bare: float = 1.0, found: float = 0.5
) -> list[float | None]:
    """`bare` when the completion is exactly the answer, `found` when its last number equals it, else 0.

    The nudge toward the bare number matters: with "found" alone worth as much, SmolLM2 learns to write "4 + 8 = 12" and
    stays there.
    """
    right = last_number(completions=completions, answer=answer)
    return [
        None if r is None else bare if exact_match(c, a) else found * r for c, a, r in zip(completions, answer, right)
    ]


def math(*, completions: list[str], answer: list[Any]) -> list[float | None]:
    """1 when math-verify finds the completion mathematically equal to the answer (numbers, LaTeX, sets), else 0.

    Needs `pip install 'rhotrain[tasks]'`. Rows whose answer cannot be parsed are unscorable. math-verify's own
    time-outs work by SIGALRM, which only the main thread may use, so they are off; reward_timeout bounds each
    completion instead.
    """
    import math_verify
    from math_verify import grader, parser

    # It warns once that its time-outs are off, which is what is meant here.
    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True
    scores: list[float | None] = []
    for completion, truth in zip(completions, answer):
        gold = math_verify.parse(str(truth), parsing_timeout=None) or math_verify.parse(  # pyright: ignore
            f"${truth}$",
            parsing_timeout=None,  # pyright: ignore
        )
        if truth is None or not gold:
            scores.append(None)
            continue
        given = math_verify.parse(final_text(completion), parsing_timeout=None)  # pyright: ignore
        scores.append(float(math_verify.verify(gold, given, timeout_seconds=None)))
    return scores


math.per_completion = True  # type: ignore[attr-defined]


def regex(*, completions: list[str], pattern: str, full: bool = False) -> list[float | None]:
    """1 when `pattern` is found in the completion (`full`: matches all of it), else 0. "(?s)" lets . match newlines."""
    compiled = re.compile(pattern)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(c) is not None) for c in completions]


regex.per_completion = True  # type: ignore[attr-defined]  # a pattern may backtrack for ever on one completion


def length(
    *, completion_ids: list[list[int]], min_tokens: int = 0, max_tokens: int, soft: int = 0
) -> list[float | None]:
    """1 for a completion of min_tokens..max_tokens tokens (its end token counts), else 0.

    `soft`: outside the window the score falls linearly to 0 over that many tokens, so that a gradient leads back. With
    max_tokens = L_max - L_cache and soft = L_cache: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) plus 1.
    """
    if not 0 <= min_tokens <= max_tokens:
        raise ValueError(f"length: need 0 <= min_tokens ({min_tokens}) <= max_tokens ({max_tokens})")
    if soft < 0:
        raise ValueError(f"length: soft is {soft}; need a number of tokens >= 0")
    scores: list[float | None] = []
    for ids in completion_ids:
        outside = max(min_tokens - len(ids), len(ids) - max_tokens, 0)
        scores.append(1.0 if outside == 0 else max(0.0, 1.0 - outside / max(soft, 1)))
    return scores


def repetition(*, completion_ids: list[list[int]], n: int = 3, penalty: float = -1.0) -> list[float | None]:
    """`penalty` times the share of token n-grams that occurred before; 0 for a completion without a repeated one.

    It counts ids, not words, so it works for languages without blanks. Formula: 1 - distinct / all n-grams, as in
    TRL's get_repetition_penalty_reward.
    """
    if n < 1:
        raise ValueError(f"repetition: n is {n}; need an n-gram of at least 1 token")
    scores: list[float | None] = []
    for ids in completion_ids:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        scores.append(penalty * (1.0 - len(set(grams)) / len(grams)) if grams else 0.0)
    return scores


def task_reward(scorer: Scorer) -> Callable[..., list[float | None]]:
    """The built-in `task`: the task's own scorer as a reward function."""

    def task(*, completions: list[str], **fields: list[Any]) -> list[float | None]:
        return [scorer(text, {name: fields[name][i] for name in fields}) for i, text in enumerate(completions)]

    task.per_completion = True  # type: ignore[attr-defined]
    return task


BUILT_IN: dict[str, Callable[..., list[float | None]]] = {
    "exact": exact,
    "last_number": last_number,
    "bare_number": bare_number,
    "math": math,
    "regex": regex,
    "length": length,
    "repetition": repetition,
}
"""By name; `task` is made by `task_reward`."""
