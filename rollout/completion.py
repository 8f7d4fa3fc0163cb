"""What crosses the border of the rollout engine: sampling settings in, completions out. Imports no torch."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Truncation order: temperature, top-k, top-p, min-p; the token that crosses the top-p mark is kept.

    temperature: > 0, or 0 for greedy (argmax, smallest id on ties; the logprob is then the one at temperature 1).
    top_k: keep the k most probable ids, ties resolved by smaller id; 0 keeps all.
    top_p: keep the smallest set of most probable ids with mass >= top_p; 1.0 keeps all.
    min_p: keep ids with probability >= min_p times the largest one; 0.0 keeps all.
    max_new_tokens, min_new_tokens: bounds on the completion's length; below the minimum stop ids are not drawn.
    stop_token_ids: in addition to the model's own stop ids. The stop token is kept in the completion.
    stop_strings: the completion ends with the token that completes one of them; ids are never trimmed.
    ignore_eos: the model's own stop ids do not end a completion (benchmarks).
    seed: key of the counter-based random numbers.
    keep_sets: record the kept ids of every token (needed to train on truncated sampling).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    keep_sets: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams.{field}: {getattr(self, field)!r} is out of range; need {rule}")

        for field in ("top_k", "max_new_tokens", "min_new_tokens", "seed"):
            value = getattr(self, field)
            need(isinstance(value, Integral) and not isinstance(value, bool), field, "an integer")
        for field in ("temperature", "top_p", "min_p"):
            value = getattr(self, field)
            need(isinstance(value, Real) and not isinstance(value, bool), field, "a number")
        for field, kind, word in (("stop_token_ids", Integral, "token ids"), ("stop_strings", str, "strings")):
            values = getattr(self, field)
            listed = isinstance(values, (tuple, list)) and all(isinstance(value, kind) for value in values)
            need(listed, field, f"a tuple of {word}")
        need(0.0 <= self.temperature < float("inf"), "temperature", "a finite value >= 0 (0 is greedy)")
        need(self.top_k >= 0, "top_k", "top_k >= 0 (0 keeps all)")
        need(0.0 < self.top_p <= 1.0, "top_p", "0 < top_p <= 1 (1 keeps all)")
        need(0.0 <= self.min_p <= 1.0, "min_p", "0 <= min_p <= 1 (0 keeps all)")
        need(self.max_new_tokens >= 1, "max_new_tokens", "max_new_tokens >= 1")
        need(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"0 <= min_new_tokens <= max_new_tokens ({self.max_new_tokens})",
        )
        need(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids >= 0")
        need(all(self.stop_strings), "stop_strings", "non-empty strings")
        need(-(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")

    @property
    def truncates(self) -> bool:
        """True when the sampled distribution is not the full tempered softmax."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.min_new_tokens > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion.

    token_ids: the drawn ids, the stop token included (it carries loss). Empty only with finish_reason `error`.
    logprobs: float32 values, log_softmax(logits / temperature) over the full real vocabulary, one per token.
    kept_mass: probability mass of the set the token was drawn from; 1.0 when sampling is not truncated.
    kept_ids: with `keep_sets`, the ids of that set per token (ascending); None otherwise.
    finish_reason: `stop` (a stop id or string), `length` (max_new_tokens), `error` (`error` says why).
    policy_version: version of the weights that drew it.
    sample: global sample number, the counter of its random numbers: rollout_index*P*G + p*G + g.
    stop_reason: the stop id or stop string that ended it, None for length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept_mass: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    sample: int
    stop_reason: int | str | None = None
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or len(self.kept_mass) != n:
            raise ValueError(
                f"Completion: {n} token_ids, {len(self.logprobs)} logprobs and {len(self.kept_mass)} kept_mass; "
                "they must agree"
            )
        if n == 0 and self.finish_reason != "error":
            raise ValueError(
                f"Completion: no tokens, but finish_reason is {self.finish_reason!r}; only 'error' may be empty"
            )
