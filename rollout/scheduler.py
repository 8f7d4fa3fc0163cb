"""Who runs in the next step: continuous batching of groups over a fixed pool of pages.

Every sequence is a list of tokens (prompt + drawn) of which the first `cached` have their K/V in the pool. A step runs
some of the rest; when it reaches the last one, its logits are sampled. So there is one rule for a prompt in chunks
(`cached` starts at 0), a decode step (one token is left), and the recomputation after a preemption (several are left).

    waiting --admit--> running --last token run--> draw --> finish
       ^                  |
       +---- preempt -----+      pages are freed; tokens, logprobs and what was kept stay

Order is age: (rank of the group, member). The oldest runs first and the youngest is preempted, so the oldest always
moves and every call ends. What can never fit alone is refused by the engine at submit, so the only running sequence is
never preempted. (vLLM's recompute preemption; its deadlocks are vllm-project/vllm issues 39734 and 546.)

A group enters as its first member. Its prompt is run once, the other members are forked from it and the first tokens of
all of them are drawn from that one row of logits. (nano-vllm issues 208 and 219: equal prompts that arrive together are
computed G times there.) Full pages of a prompt that another prompt begins with are shared as well, in the very step
that computes them too: a layer writes the K/V of all tokens of a step before any of them attends.

When nothing is to be decided for a while, that is when every running sequence decodes and nobody can be admitted, the
pages of the next steps are reserved at once and the steps run as a burst, without a look at the sequences in between.
"""

from bisect import insort
from dataclasses import dataclass, field

from rhotrain.rollout.kv_pool import KVPool, prefix_keys

WORTH_FILLING = 1 / 16
"""Share of the places and of the pages that must be free before a burst ends for those that wait. With 256 places and
1024 completions of about 70 tokens this makes 39-48 eager steps of about 430; one for each that ends would be 210."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion that is being drawn.

    tokens: prompt and drawn ids. cached: how many of them have K/V in `pages`. seen: the most that ever had.
    logprobs, kept_mass, kept_ids: one entry per drawn token.
    """

    group: "Group"
    member: int
    sample: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    seen: int = 0
    logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    kept_ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        """How many tokens were drawn."""
        return len(self.tokens) - self.group.prompt_len

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.group.rank, self.member)

    @property
    def left(self) -> int:
        """How many tokens may still be drawn."""
        return self.group.limit + 1 - len(self.tokens)

    @property
    def width(self) -> int:
        """How many sequences this becomes when its last token is run: all members of a group that is not forked yet."""
        return 1 if self.group.forked else len(self.group.members)


@dataclass(eq=False, slots=True)
class Group:
    """The completions of one prompt.

    index: its place among the prompts. rank: its turn; smaller goes first.
    limit: most tokens that a member ever has in the pool: prompt + max_new_tokens - 1, for the last token is never run.
    keys: of the prompt's full pages, see `prefix_keys`; set when the group is queued.
    forked: the prompt was run, and the members have their own page tables.
    """

    index: int
    rank: int
    prompt_len: int
    limit: int
    keys: list[bytes] = field(default_factory=list)
    members: list[Sequence] = field(default_factory=list)
    forked: bool = False

    @classmethod
    def make(
        cls,
        index: int,
        prompt: list[int],
        samples: list[int],
        max_new_tokens: int,
        *,
        rank: int | None = None,
    ) -> "Group":
        """A group with one member per sample number. rank: `index` unless given."""
        limit = len(prompt) + max_new_tokens - 1
        group = cls(index, index if rank is None else rank, len(prompt), limit)
        group.members = [Sequence(group, member, s, list(prompt)) for member, s in enumerate(samples)]
        return group


@dataclass(slots=True)
class Batch:
    """One step: `rows` are (sequence, how many of its next tokens run); `copies` are page copies to make before."""

    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0

    def add(self, sequence: Sequence, count: int, copy: tuple[int, int] | None) -> None:
        """Append a row."""
        self.rows.append((sequence, count))
        self.tokens += count
        if copy is not None:
            self.copies.append(copy)

    def draws(self) -> list[tuple[int, Sequence]]:
        """(row, sequence) of every token to draw: one per row that ends, all members for a prompt that ends."""
        found: list[tuple[int, Sequence]] = []
        for row, (sequence, count) in enumerate(self.rows):
            if sequence.cached + count == len(sequence.tokens):
                members = [sequence] if sequence.group.forked else sequence.group.members
                found.extend((row, member) for member in members)
        return found


@dataclass(slots=True)
class Counts:
    """Tokens that a step ran: of prompts for the first time, and again after a preemption."""

    prompt: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class Burst:
    """`steps` decode steps of all `sequences`, whose pages are reserved; `copies` are to be made before the first."""

    sequences: list[Sequence]
    steps: int
    copies: list[tuple[int, int]]


@dataclass(slots=True)
class Scheduler:
    """pool: the pages. max_batch_tokens: most tokens of one step. max_running: most sequences that hold pages.

    A group that is larger than max_running runs alone: its prompt is run once, then the members take turns.
    found: prompt tokens that were not run, for their pages were there. left_behind: pages that were given up unread, in
    a preemption or at an early end; NaN may lie in them, so whoever owns the tensors cleans them.
    """

    pool: KVPool
    max_batch_tokens: int
    max_running: int
    preemptions: int = 0
    found: int = 0
    left_behind: list[int] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, group: Group) -> None:
        """Queue a group. Groups must come in order of their rank."""
        group.keys = prefix_keys(group.members[0].tokens, self.pool.page_size)
        self.waiting.append(group.members[0])

    def schedule(self) -> Batch:
        """The next step: running sequences by age, then, when nothing had to be preempted, waiting ones."""
        while len(self.running) > self.max_running:
            self._park(self.running[-1])
        batch = Batch()
        before = self.preemptions
        self._continue_running(batch)
        if self.preemptions == before:
            self._admit_waiting(batch)
        # Decode rows first: the attention kernels take them as one contiguous batch.
        batch.rows.sort(key=lambda row: row[1] > 1)
        return batch

    def advance(self, batch: Batch) -> Counts:
        """Note that the step was run: its tokens are cached, and groups whose prompt ended are forked."""
        counts = Counts()
        for sequence, count in batch.rows:
            start, stop = sequence.cached, sequence.cached + count
            new = max(0, stop - max(start, sequence.seen))
            counts.again += count - new
            counts.prompt += new if sequence.drawn == 0 else 0
            sequence.cached, sequence.seen = stop, max(sequence.seen, stop)
            if stop == len(sequence.tokens) and not sequence.group.forked:
                self._fork(sequence)
        return counts

    def burst(self, most: int) -> Burst | None:
        """Up to `most` decode steps that need no decision, with their pages reserved; None when one is needed now."""
        rows = self.running
        if not rows or len(rows) > min(self.max_batch_tokens, self.max_running) or self.can_admit():
            return None
        if any(not s.group.forked or len(s.tokens) - s.cached != 1 for s in rows):
            return None
        steps = min(most, max(s.left for s in rows))
        while steps and sum(self._burst_cost(s, steps) for s in rows) > self.pool.free:
            steps //= 2
        if not steps:
            return None
        copies = [self.pool.extend(s.pages, s.cached, min(s.cached + steps, s.group.limit)) for s in rows]
        return Burst(list(rows), steps, [copy for copy in copies if copy is not None])

    def can_admit(self) -> bool:
        """True when the oldest that waits could enter now."""
        return bool(self.waiting) and self._prefix_of(self.waiting[0], self._places(), self._reserve()) is not None

    def interrupts(self) -> bool:
        """True when a burst should end, so that those that wait can enter: enough is free for several, or all enter.

        A step that admits runs eagerly and reads its results at once, so places are filled in batches.
        """
        if not self.waiting:
            return False
        places = self.max_running - self._places()
        free = min(places / self.max_running, self.pool.free / self.pool.num_pages)
        return (free >= WORTH_FILLING or places >= sum(s.width for s in self.waiting)) and self.can_admit()

    def settle(self, sequence: Sequence, tokens: list[int]) -> None:
        """Note what a running sequence drew in a burst: all of it is cached but the last token."""
        sequence.tokens += tokens
        sequence.cached += len(tokens)
        sequence.seen = max(sequence.seen, sequence.cached)

    def finish(self, sequence: Sequence, *, spoilt: bool = False) -> list[int]:
        """Take a finished sequence out. Returns the pages that became free. spoilt: nobody may find them again."""
        self.running.remove(sequence)
        return self.pool.release(sequence.pages, spoilt=spoilt)

    def clear(self) -> None:
        """Drop everything that waits or runs and free its pages."""
        for sequence in self.running:
            self.left_behind += self.pool.release(sequence.pages, spoilt=True)
        self.running.clear()
        self.waiting.clear()

    def _continue_running(self, batch: Batch) -> None:
        index = 0
        while index < len(self.running) and batch.tokens < self.max_batch_tokens:
            sequence = self.running[index]
            total = len(sequence.tokens)
            if not self._make_room(sequence, total):
                return
            copy = self.pool.extend(sequence.pages, sequence.cached, total)
            self._add(batch, sequence, copy)
            index += 1

    def _add(self, batch: Batch, sequence: Sequence, copy: tuple[int, int] | None) -> None:
        """Append a row, and let the prompt pages that it completes be found, by later rows of this very batch too."""
        count = min(len(sequence.tokens) - sequence.cached, self.max_batch_tokens - batch.tokens)
        batch.add(sequence, count, copy)
        size, keys = self.pool.page_size, sequence.group.keys
        for index in range(sequence.cached // size, min((sequence.cached + count) // size, len(keys))):
            self.pool.name(sequence.pages[index], keys[index])

    def _burst_cost(self, sequence: Sequence, steps: int) -> int:
        """Free pages that `steps` more tokens of a sequence take."""
        stop = min(sequence.cached + steps, sequence.group.limit)
        return self.pool.extension_cost(sequence.pages, sequence.cached, stop)

    def _make_room(self, sequence: Sequence, total: int) -> bool:
        """Preempt the youngest until `sequence` can be extended; False when it was itself the youngest.

        Victims are younger than `sequence`, so none of them is in the batch already. A victim that shared the last page
        lowers the cost, so it is computed anew.
        """
        while self.pool.extension_cost(sequence.pages, sequence.cached, total) > self.pool.free:
            victim = self.running[-1]
            self._park(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _park(self, sequence: Sequence) -> None:
        """Back to waiting: pages are given up, everything drawn is kept."""
        self.running.remove(sequence)
        self.left_behind += [page for page in self.pool.release(sequence.pages) if not self.pool.is_named(page)]
        sequence.cached = 0
        insort(self.waiting, sequence, key=lambda s: s.age)

    def _admit_waiting(self, batch: Batch) -> None:
        """Admit the oldest while tokens, sequences and pages last.

        Beside what a sequence needs now, the next page of every sequence stays free, else the newcomer would be
        preempted as soon as the others grow. With nothing running that reserve is waived, so a lone sequence always
        enters.
        """
        if not self.waiting:
            return
        rows, reserve = self._places(), self._reserve()
        while self.waiting and batch.tokens < self.max_batch_tokens:
            sequence = self.waiting[0]
            prefix = self._prefix_of(sequence, rows, reserve)
            if prefix is None:
                return
            total, width = len(sequence.tokens), sequence.width
            ahead = self._next_pages(sequence, self.pool.pages_for(total))
            self.waiting.pop(0)
            sequence.pages = self.pool.share(prefix)
            sequence.cached = len(prefix) * self.pool.page_size
            self.found += max(0, sequence.cached - sequence.seen)
            sequence.seen = max(sequence.seen, sequence.cached)
            copy = self.pool.extend(sequence.pages, sequence.cached, total)
            insort(self.running, sequence, key=lambda s: s.age)
            self._add(batch, sequence, copy)
            rows, reserve = rows + width, reserve + ahead

    def _places(self) -> int:
        """Places of max_running that are taken, or will be when the running prompts fork."""
        return sum(sequence.width for sequence in self.running)

    def _reserve(self) -> int:
        """Pages that the running sequences will take next."""
        return sum(self._next_pages(sequence, len(sequence.pages)) for sequence in self.running)

    def _prefix_of(self, sequence: Sequence, rows: int, reserve: int) -> list[int] | None:
        """The pages that a waiting sequence finds when it enters now; None when it cannot, for places or pages."""
        total = len(sequence.tokens)
        # At least one token is run, so that there are logits to draw from.
        prefix = self.pool.find(sequence.group.keys[: (total - 1) // self.pool.page_size])
        pages = self.pool.pages_for(total)
        if rows and rows + sequence.width > self.max_running:
            return None
        taken = pages - len(prefix) + self.pool.resting(prefix)
        ahead = reserve + self._next_pages(sequence, pages) if rows else 0
        return None if taken + ahead > self.pool.free else prefix

    def _next_pages(self, sequence: Sequence, held: int) -> int:
        """Pages that a sequence holding `held` takes when it next grows, at most one for each member of its group."""
        group = sequence.group
        if group.forked:
            return int(held < self.pool.pages_for(group.limit))
        if group.limit == group.prompt_len:
            return 0
        # The last holder of a partial prompt page keeps it.
        return sequence.width - (group.prompt_len % self.pool.page_size > 0)

    def _fork(self, leader: Sequence) -> None:
        """Give the other members of the leader's group its pages; they stand beside it in `running`."""
        others = leader.group.members[1:]
        for member in others:
            member.pages = self.pool.share(leader.pages)
            member.cached = member.seen = leader.cached
        after = self.running.index(leader) + 1
        self.running[after:after] = others
        leader.group.forked = True
