"""The book-keeping of the paged KV pool: which pages are free, how often each is held, who must copy before writing.

A page holds the K/V of `page_size` consecutive tokens, in every layer. A sequence's page table is a plain list of page
numbers: token i lies in slot `pages[i // page_size] * page_size + i % page_size`.

A group's prompt is computed once and its pages are shared by the members (vLLM's copy-on-write blocks, arXiv
2309.06180, section 4.4). Full prompt pages are never written again, so they stay shared. The partial last page is
copied when a member first writes into it; the last holder keeps the original, so a group of G costs G - 1 copies and
never more.

Prompts that begin alike (a system prompt, few-shot examples) share too: a full prompt page is known by a key of all the
tokens up to its end, and stays findable after its last holder gave it up, until its room is needed. K/V are those of
one set of weights: whoever changes the weights must `forget`.

The tensors themselves belong to `runner.py`; nothing here knows torch.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


def prefix_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """One key per full page of `tokens`: a digest of every token up to the page's end (16 bytes: a collision among
    10^12 pages has probability 10^-15)."""
    keys, digest = [], blake2b(digest_size=16)
    for stop in range(page_size, len(tokens) + 1, page_size):
        digest.update(array("q", tokens[stop - page_size : stop]).tobytes())
        keys.append(digest.digest())
    return keys


@dataclass(slots=True)
class KVPool:
    """A fixed number of pages with reference counts. Free pages are a stack: deterministic, and warm pages come first.
    Those that hold a known prefix are taken last, the one that lay unused longest before the others.

    num_pages, page_size: both >= 1. peak: the most pages held at once since `peak` was last set.
    Raises ValueError on a bad size.
    """

    num_pages: int
    page_size: int
    peak: int = 0
    _holders: list[int] = field(init=False, repr=False)
    _free: list[int] = field(init=False, repr=False)
    _key: dict[int, bytes] = field(init=False, repr=False, default_factory=dict)
    _page: dict[bytes, int] = field(init=False, repr=False, default_factory=dict)
    _resting: OrderedDict[int, None] = field(init=False, repr=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVPool.{name}: {getattr(self, name)} is too small; need at least 1")
        self._holders = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._resting)

    @property
    def used(self) -> int:
        """Pages that somebody holds; a shared page counts once."""
        return self.num_pages - self.free

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How many page tables hold this page."""
        return self._holders[page]

    def extension_cost(self, pages: list[int], start: int, stop: int) -> int:
        """Free pages that `extend` with the same arguments takes."""
        return max(0, self.pages_for(stop) - len(pages)) + self._must_copy(pages, start)

    def extend(self, pages: list[int], start: int, stop: int) -> tuple[int, int] | None:
        """Make room to write tokens start..stop-1 of the sequence whose page table is `pages`; it is changed in place.

        Appends fresh pages, and replaces the page that `start` falls into by a fresh one when others hold it too:
        then (source, target) is returned, and the runner must copy source to target before the step writes.
        Raises RuntimeError when the pool has fewer than `extension_cost` free pages; nothing is changed then.
        """
        cost = self.extension_cost(pages, start, stop)
        if cost > self.free:
            raise RuntimeError(f"KV pool: {cost} pages needed, {self.free} of {self.num_pages} are free")
        copy: tuple[int, int] | None = None
        if self._must_copy(pages, start):
            index = start // self.page_size
            copy = (pages[index], self._take())
            self._holders[copy[0]] -= 1
            pages[index] = copy[1]
        while len(pages) < self.pages_for(stop):
            pages.append(self._take())
        self.peak = max(self.peak, self.used)
        return copy

    def share(self, pages: list[int]) -> list[int]:
        """A second page table over the same pages. Pages that nobody holds are held again."""
        for page in pages:
            if self._holders[page] == 0:
                del self._resting[page]
            self._holders[page] += 1
        self.peak = max(self.peak, self.used)
        return list(pages)

    def release(self, pages: list[int], *, spoilt: bool = False) -> list[int]:
        """Give up a page table; it is emptied. Returns the pages that nobody holds any more.

        spoilt: what lies in them must not be found again.
        """
        freed = []
        for page in reversed(pages):
            self._holders[page] -= 1
            if spoilt:
                self._unname(page)
            if self._holders[page] == 0:
                freed.append(page)
                if page in self._key:
                    self._resting[page] = None
                else:
                    self._free.append(page)
        pages.clear()
        return freed

    def name(self, page: int, key: bytes) -> None:
        """Let a held page be found by its key. The first page of a key keeps it."""
        if key not in self._page:
            self._page[key], self._key[page] = page, key

    def is_named(self, page: int) -> bool:
        """True while a page can be found by its key."""
        return page in self._key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`, held or not; `share` them before anything is taken."""
        pages = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def resting(self, pages: list[int]) -> int:
        """How many of these pages nobody holds: `share` takes them out of the free ones."""
        return sum(self._holders[page] == 0 for page in pages)

    def forget(self) -> None:
        """No page can be found any more: the weights changed."""
        self._free.extend(reversed(self._resting))
        self._resting.clear()
        self._key.clear()
        self._page.clear()

    def _must_copy(self, pages: list[int], start: int) -> bool:
        """True when `start` falls into a page that is already there and that others hold too."""
        index = start // self.page_size
        return index < len(pages) and self._holders[pages[index]] > 1

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._resting.popitem(last=False)
            self._unname(page)
        self._holders[page] = 1
        return page

    def _unname(self, page: int) -> None:
        key = self._key.pop(page, None)
        if key is not None:
            del self._page[key]
