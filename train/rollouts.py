"""Rollouts: drawn by the engine, kept in order until their turn.

With max_staleness k and U updates per rollout, k // U rollouts are drawn ahead together with the one whose turn it is,
in one call of the engine: longer batches decode more tokens per second, and a group's tail overlaps with other groups.
The first of them is trained on fresh weights; the others are U, 2 U, ... updates old when their turn comes. A sample's
random numbers depend on its number alone, so drawing ahead changes the weights that draw it and nothing else. Numbers
are counted over everything that was drawn: rollout_index * P * G + p * G + g, and later with dynamic sampling.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from rhotrain.rollout.completion import Completion
from rhotrain.rollout.engine import Engine
from rhotrain.train.config import Config
from rhotrain.train.data import EncodedPrompt, PromptStream
from rhotrain.train.optim import StepError


@dataclass(frozen=True)
class Rollout:
    """The completions of P prompts, [P][G]. index: counts the rollouts of a run. place: (epoch, position) of the stream
    before its prompts were taken."""

    index: int
    place: tuple[int, int]
    prompts: list[EncodedPrompt]
    groups: list[list[Completion]]

    @property
    def policy_version(self) -> int:
        """The oldest version among its completions."""
        return min(c.policy_version for group in self.groups for c in group)

    @property
    def num_errors(self) -> int:
        """Completions that ended in an error of the engine."""
        return sum(c.finish_reason == "error" for group in self.groups for c in group)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(c.token_ids) for group in self.groups for c in group)


@dataclass
class RolloutQueue:
    """Draws rollouts and hands them out oldest first.

    drawn: rollouts drawn so far. groups: groups drawn so far, those of `more` included. dropped: rollouts that were
    older than max_staleness when their turn came. pending: drawn and not yet handed out.
    """

    config: Config
    engine: Engine
    stream: PromptStream
    drawn: int = 0
    groups: int = 0
    dropped: int = 0
    pending: deque[Rollout] = field(default_factory=deque)

    def take(
        self,
        *,
        version: int,
        remaining: int,
        on_finish: Callable[[int, int], None] | None = None,
        more_follows: bool = False,
    ) -> Rollout:
        """The next rollout. `version`: the policy version now; `remaining`: rollouts that the run still needs.

        Draws when none is left: the one whose turn it is and those ahead, no more than `remaining`. more_follows: the
        engine keeps its memory, also with release_memory, until `release`. Raises StepError when every completion of a
        rollout ended in an error.
        """
        while self.pending and version - self.pending[0].policy_version > self.config.rollout.max_staleness:
            self.pending.popleft()
            self.dropped += 1
        if not self.pending:
            self._draw(max(1, min(1 + self.config.rollouts_ahead, remaining)), on_finish)
            if not more_follows:
                self.release()
        return self.pending.popleft()

    def more(
        self, count: int, on_finish: Callable[[int, int], None] | None = None
    ) -> tuple[list[EncodedPrompt], list[list[Completion]]]:
        """`count` further prompts of the stream and their groups, by the weights as they are: for the rollout that was
        taken last (dynamic sampling). Raises StepError when every completion ended in an error."""
        prompts = self.stream.take(count)
        groups = self._generate(prompts, on_finish)
        _refuse_all_errors(groups)
        return prompts, groups

    def release(self) -> None:
        """With release_memory, free what the engine holds."""
        if self.config.rollout.release_memory:
            self.engine.release()

    def _draw(self, count: int, on_finish: Callable[[int, int], None] | None) -> None:
        settings = self.config.rollout
        width = settings.prompts_per_step
        places, prompts = [], []
        for _ in range(count):
            places.append((self.stream.epoch, self.stream.position))
            prompts += self.stream.take(width)
        groups = self._generate(prompts, on_finish)
        for k, place in enumerate(places):
            here = slice(k * width, (k + 1) * width)
            _refuse_all_errors(groups[here])
            self.pending.append(Rollout(self.drawn, place, prompts[here], groups[here]))
            self.drawn += 1

    def _generate(
        self, prompts: list[EncodedPrompt], on_finish: Callable[[int, int], None] | None
    ) -> list[list[Completion]]:
        settings = self.config.rollout
        size, finished = settings.group_size, 0

        def on_completion(prompt: int, member: int, completion: Completion) -> None:
            nonlocal finished
            finished += 1
            if on_finish is not None:
                on_finish(finished, len(prompts) * size)

        groups = self.engine.generate(
            [p.token_ids for p in prompts],
            settings.sampling(seed=self.config.run.seed),
            n=size,
            first_sample=self.groups * size,
            on_finish=on_completion,
        )
        self.groups += len(prompts)
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Plain values: counters, the stream's place before the pending rollouts, and their completions.

        Prompts are not stored: the stream gives them again.
        """
        stream = self.stream.state_dict()
        if self.pending:
            stream["epoch"], stream["position"] = self.pending[0].place
        return {
            "drawn": self.drawn,
            "groups": self.groups,
            "dropped": self.dropped,
            "stream": stream,
            "pending": [[[_values(c) for c in group] for group in rollout.groups] for rollout in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError when the prompts are others."""
        self.stream.load_state_dict(state["stream"])
        self.drawn, self.dropped = state["drawn"], state["dropped"]
        self.groups = state.get("groups", self.drawn * self.config.rollout.prompts_per_step)  # older ones counted alike
        self.pending.clear()
        for k, groups in enumerate(state["pending"]):
            index = self.drawn - len(state["pending"]) + k
            place = (self.stream.epoch, self.stream.position)
            completions = [[Completion(**values) for values in group] for group in groups]
            self.pending.append(Rollout(index, place, self.stream.take(len(groups)), completions))


def _values(completion: Completion) -> dict[str, Any]:
    """Its fields, not copied as `asdict` would: tokens may share one kept set of the size of the vocabulary."""
    return {f.name: getattr(completion, f.name) for f in fields(completion)}


def _refuse_all_errors(groups: list[list[Completion]]) -> None:
    """StepError when every completion ended in an error: the weights or the settings are beyond learning from."""
    errors = [c.error for group in groups for c in group if c.finish_reason == "error"]
    if errors and len(errors) == sum(map(len, groups)):
        raise StepError(
            f"rollout: all {len(errors)} completions ended in an error, the first: {errors[0]}. Go back to a "
            "checkpoint with a lower lr, or check temperature and dtype"
        )
