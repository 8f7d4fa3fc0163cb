"""A burst on the host's side: which rows still run, what they drew, who ended and why.

The work of a step does not grow with the rows in Python: drawn values arrive as arrays, ends are found by array
operations, and only a row that ended is looked at by itself. With `ahead` 1 (CUDA) a step is launched before the
results of the one before it are read, so the device never waits for the host; a row whose stop id is seen one step late
has then run one step more, into a page of its own, and that result is dropped.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from rhotrain.rollout.runner import Runner
from rhotrain.rollout.sampler import Draw, HostDraw, Ids, SamplingPlan
from rhotrain.rollout.scheduler import Burst, Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a sequence drew in a burst: lists of one length; kept_ids None when they are not recorded."""

    token_ids: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    kept_ids: list[Ids] | None


@dataclass(frozen=True, slots=True)
class Step:
    """Results of one step.

    drawn: how many tokens were drawn. ended: the sequences that drew a stop id, ran into an error or used up their
    tokens. errors: those of `ended` whose logits were NaN or infinite; they drew nothing.
    columns, ids: int64, who ran and what they drew, for `BurstRun.tokens`.
    """

    drawn: int
    ended: list[Sequence]
    errors: set[Sequence]
    columns: np.ndarray
    ids: np.ndarray


class BurstRun:
    """Runs `burst` step by step: `launch` while `can_launch`, `collect` while `pending`."""

    def __init__(self, runner: Runner, burst: Burst, plan: SamplingPlan) -> None:
        self.sequences = burst.sequences
        self.runner, self.plan = runner, plan
        self.steps = burst.steps
        self.rows = runner.begin(burst)
        count = len(burst.sequences)
        self._column = {id(s): column for column, s in enumerate(burst.sequences)}
        self._running = np.arange(count)
        """Columns of the rows on the device, in their order."""
        self._alive = np.ones(count, dtype=bool)
        self._left = np.array([s.left for s in burst.sequences])
        self._drawn = np.array([s.drawn for s in burst.sequences])
        self._count = np.zeros(count, dtype=np.int64)
        self._ids = np.zeros((self.steps, count), dtype=np.int64)
        self._values = np.zeros((2, self.steps, count))
        self._kept: list[dict[int, Ids]] = []
        self._launched = 0
        self._collected = 0
        self._pending: deque[tuple[np.ndarray, Draw]] = deque()

    @property
    def pending(self) -> int:
        """Steps whose results were not read yet."""
        return len(self._pending)

    @property
    def can_launch(self) -> bool:
        """True while steps and rows are left."""
        return self._launched < self.steps and bool(self._wanted().any())

    def launch(self) -> None:
        """Run one step of the rows that are not known to have ended."""
        wanted = self._wanted()
        if not wanted.all():
            self.rows = self.runner.keep(self.rows, np.flatnonzero(wanted).tolist())
            self._running = self._running[wanted]
        columns = self._running
        short = self._drawn[columns] < self.plan.minimum
        self._pending.append((columns, self.runner.decode(self.rows, self.plan, short)))
        self._drawn[columns] += 1
        self._left[columns] -= 1
        self._launched += 1

    def collect(self) -> Step:
        """Read the oldest results."""
        columns, draw = self._pending.popleft()
        host = draw.host()
        valid = self._alive[columns]
        columns, ids, error = columns[valid], host.token_ids[valid], host.error[valid]
        step = self._collected
        self._ids[step, columns] = ids
        self._values[0, step, columns] = host.logprobs[valid]
        self._values[1, step, columns] = host.kept_mass[valid]
        self._keep_sets(host, columns, valid)
        self._count[columns] += ~error
        self._collected += 1
        ended = error | np.isin(ids, self.plan.stop_array) | (self._used_up(columns))
        self._alive[columns[ended]] = False
        return Step(
            int((~error).sum()),
            [self.sequences[c] for c in columns[ended].tolist()],
            {self.sequences[c] for c in columns[error].tolist()},
            columns[~error],
            ids[~error],
        )

    def tokens(self, step: Step) -> list[tuple[Sequence, int]]:
        """The sequences that drew a token in a step, and the token. For stop strings: this does grow with the rows."""
        return [(self.sequences[c], token) for c, token in zip(step.columns.tolist(), step.ids.tolist())]

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended for a reason of its own (a stop string)."""
        self._alive[self._column[id(sequence)]] = False

    def survivors(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [s for s, alive in zip(self.sequences, self._alive.tolist()) if alive]

    def drawn_count(self, sequence: Sequence) -> int:
        """How many tokens a sequence drew, those before the burst included."""
        return sequence.drawn + int(self._count[self._column[id(sequence)]])

    def drawn(self, sequence: Sequence) -> Drawn:
        """What a sequence drew so far."""
        column = self._column[id(sequence)]
        count = int(self._count[column])
        return Drawn(
            self._ids[:count, column].tolist(),
            self._values[0, :count, column].tolist(),
            self._values[1, :count, column].tolist(),
            [kept[column] for kept in self._kept[:count]] if self.plan.records_sets else None,
        )

    def _wanted(self) -> np.ndarray:
        """Which of the rows on the device run in the next step."""
        return self._alive[self._running] & (self._left[self._running] > 0)

    def _used_up(self, columns: np.ndarray) -> np.ndarray:
        """Which of these have no token left after the step that is being read."""
        return self._left[columns] + self._pending_of(columns) == 0

    def _pending_of(self, columns: np.ndarray) -> np.ndarray:
        """How many results of each column are still to be read."""
        return sum((np.isin(columns, later) for later, _ in self._pending), np.zeros(len(columns), dtype=np.int64))

    def _keep_sets(self, host: HostDraw, columns: np.ndarray, valid: np.ndarray) -> None:
        if host.kept_ids is not None:
            places = np.flatnonzero(valid).tolist()
            self._kept.append({c: host.kept_ids[place] for c, place in zip(columns.tolist(), places)})
