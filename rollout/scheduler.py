"""Who runs in the next step: continuous batching of groups over a fixed pool of pages.

Every sequence is a list of tokens (prompt + drawn) of which the first `cached` have their K/V in the pool. A step runs
some of the rest; when it reaches the last one, its logits are sampled. So there is one rule for a prompt in chunks
(`cached` starts at 0), a decode step (one token is left), and the recomputation after a preemption (several are left).

    waiting --admit--> running --last token run--> draw --> finish
       ^                  |
       +---- preempt -----+      pages are freed; tokens, logprobs and what was kept stay

Order is age: (group, member). The oldest runs first and the youngest is preempted, so the oldest always moves and every
call ends. What can never fit alone is refused by the engine at submit, so the only running sequence is never preempted.
(vLLM's recompute preemption; its deadlocks are vllm-project/vllm issues 39734 and 546.)

A group enters as its first member. Its prompt is run once, the other members are forked from it and the first tokens of
all of them are drawn from that one row of logits. (nano-vllm issues 208 and 219: equal prompts that arrive together are
computed G times there.)
"""

from bisect import insort
from dataclasses import dataclass, field

from rhotrain.rollout.kv_pool import KVPool


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
        return (self.group.index, self.member)

    @property
    def width(self) -> int:
        """How many sequences this becomes when its last token is run: all members of a group that is not forked yet."""
        return 1 if self.group.forked else len(self.group.members)


@dataclass(eq=False, slots=True)
class Group:
    """The completions of one prompt.

    limit: most tokens that a member ever has in the pool: prompt + max_new_tokens - 1, for the last token is never run.
    forked: the prompt was run, and the members have their own page tables.
    """

    index: int
    prompt_len: int
    limit: int
    members: list[Sequence] = field(default_factory=list)
    forked: bool = False

    @classmethod
    def make(cls, index: int, prompt: list[int], samples: list[int], max_new_tokens: int) -> "Group":
        """A group with one member per sample number."""
        group = cls(index, len(prompt), len(prompt) + max_new_tokens - 1)
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


@dataclass(slots=True)
class Scheduler:
    """pool: the pages. max_batch_tokens: most tokens of one step. max_running: most sequences that hold pages.

    A group that is larger than max_running runs alone: its prompt is run once, then the members take turns.
    """

    pool: KVPool
    max_batch_tokens: int
    max_running: int
    preemptions: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, group: Group) -> None:
        """Queue a group. Groups must come in order of their index."""
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

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a finished sequence out. Returns the pages that became free."""
        self.running.remove(sequence)
        return self.pool.release(sequence.pages)

    def clear(self) -> None:
        """Drop everything that waits or runs and free its pages."""
        for sequence in self.running:
            self.pool.release(sequence.pages)
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
            batch.add(sequence, min(total - sequence.cached, self.max_batch_tokens - batch.tokens), copy)
            index += 1

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
        self.pool.release(sequence.pages)
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
        rows = sum(sequence.width for sequence in self.running)
        reserve = sum(self._next_pages(sequence, len(sequence.pages)) for sequence in self.running)
        while self.waiting and batch.tokens < self.max_batch_tokens:
            sequence = self.waiting[0]
            total, width = len(sequence.tokens), sequence.width
            prefix = self._shared_prefix(sequence)
            pages = self.pool.pages_for(total)
            ahead = self._next_pages(sequence, pages)
            if rows and rows + width > self.max_running:
                return
            if pages - len(prefix) + (reserve + ahead if rows else 0) > self.pool.free:
                return
            self.waiting.pop(0)
            sequence.pages = self.pool.share(prefix)
            sequence.cached = len(prefix) * self.pool.page_size
            copy = self.pool.extend(sequence.pages, sequence.cached, total)
            insort(self.running, sequence, key=lambda s: s.age)
            batch.add(sequence, min(total - sequence.cached, self.max_batch_tokens - batch.tokens), copy)
            rows, reserve = rows + width, reserve + ahead

    def _next_pages(self, sequence: Sequence, held: int) -> int:
        """Pages that a sequence holding `held` takes when it next grows, at most one for each member of its group."""
        group = sequence.group
        if group.forked:
            return int(held < self.pool.pages_for(group.limit))
        if group.limit == group.prompt_len:
            return 0
        # The last holder of a partial prompt page keeps it.
        return sequence.width - (group.prompt_len % self.pool.page_size > 0)

    def _shared_prefix(self, sequence: Sequence) -> list[int]:
        """Full prompt pages of a running member of the same group, so that a recomputed one shares them again.

        A group that was never forked has no other member; a forked one has drawn tokens, so at least one token is run.
        """
        group = sequence.group
        if not group.forked:
            return []
        full = group.prompt_len // self.pool.page_size
        for member in group.members:
            if member.cached >= full * self.pool.page_size and member.pages:
                return member.pages[:full]
        return []

    def _fork(self, leader: Sequence) -> None:
        """Give the other members of the leader's group its pages; they stand beside it in `running`."""
        others = leader.group.members[1:]
        for member in others:
            member.pages = self.pool.share(leader.pages)
            member.cached = member.seen = leader.cached
        after = self.running.index(leader) + 1
        self.running[after:after] = others
        leader.group.forked = True
