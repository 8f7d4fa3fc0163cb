import random
from dataclasses import dataclass, field

import pytest

from rhotrain.rollout.kv_pool import KVPool, prefix_keys


def test_pages_are_taken_and_given_back() -> None:
    pool = KVPool(num_pages=8, page_size=4)
    pages: list[int] = []
    assert pool.extend(pages, 0, 9) is None
    assert len(pages) == 3 and len(set(pages)) == 3 and pool.used == 3 and pool.free == 5
    assert pool.extension_cost(pages, 9, 12) == 0
    assert pool.extension_cost(pages, 12, 13) == 1
    pool.extend(pages, 9, 13)
    assert len(pages) == 4 and pool.peak == 4
    assert sorted(pool.release(pages)) == [0, 1, 2, 3]
    assert pages == [] and pool.free == 8 and pool.peak == 4


@pytest.mark.parametrize(("prompt", "copies"), [(16, 0), (17, 4), (19, 4), (3, 4)])
def test_a_fork_copies_only_the_partial_page_and_the_last_holder_keeps_it(prompt: int, copies: int) -> None:
    pool = KVPool(num_pages=64, page_size=4)
    leader: list[int] = []
    pool.extend(leader, 0, prompt)
    original = list(leader)
    members = [leader, *(pool.share(leader) for _ in range(4))]
    assert pool.used == len(original)
    made = [pool.extend(pages, prompt, prompt + 1) for pages in members]
    assert sum(copy is not None for copy in made) == copies
    full = prompt // 4
    assert all(pages[:full] == original[:full] for pages in members)
    assert len({pages[full] for pages in members}) == 5
    if copies:
        assert made[-1] is None and members[-1] == original
        assert all(copy is not None and copy[0] == original[-1] for copy in made[:-1])
    assert pool.used == full + 5
    for pages in members:
        pool.release(pages)
    assert pool.free == 64


def test_shared_pages_are_free_only_when_the_last_holder_leaves() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    first: list[int] = []
    pool.extend(first, 0, 4)
    second = pool.share(first)
    assert pool.release(first) == [] and pool.free == 2
    assert sorted(pool.release(second)) == [0, 1] and pool.free == 4


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool = KVPool(num_pages=3, page_size=2)
    first: list[int] = []
    pool.extend(first, 0, 3)
    second = pool.share(first)
    third: list[int] = []
    pool.extend(third, 0, 1)
    before = list(second)
    with pytest.raises(RuntimeError, match="1 pages needed, 0 of 3 are free"):
        pool.extend(second, 3, 4)
    assert second == before and pool.holders(second[-1]) == 2 and pool.free == 0


@pytest.mark.parametrize(("field", "kwargs"), [("num_pages", (0, 4)), ("page_size", (4, 0))])
def test_bad_sizes_are_refused(field: str, kwargs: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"KVPool.{field}: 0"):
        KVPool(*kwargs)


@pytest.mark.parametrize("seed", range(5))
def test_random_forks_never_mix_contents(seed: int) -> None:
    """Random extends, forks and releases; a model of the contents must always read back what each owner wrote."""
    rng = random.Random(seed)
    pool = KVPool(num_pages=40, page_size=rng.choice([1, 3, 4, 16]))
    size = pool.page_size
    content: dict[int, int] = {}
    owners: list[tuple[list[int], list[int]]] = []
    for step in range(700):
        action = rng.random()
        if action < 0.15 or not owners:
            owners.append(([], []))
        elif action < 0.3:
            pages, tokens = rng.choice(owners)
            owners.append((pool.share(pages), list(tokens)))
        elif action < 0.45:
            pages, _ = owners.pop(rng.randrange(len(owners)))
            pool.release(pages)
        else:
            pages, tokens = rng.choice(owners)
            start, stop = len(tokens), len(tokens) + rng.randint(1, 5)
            if pool.extension_cost(pages, start, stop) > pool.free:
                continue
            copy = pool.extend(pages, start, stop)
            if copy is not None:
                content.update({copy[1] * size + i: content.get(copy[0] * size + i, -1) for i in range(size)})
            for i in range(start, stop):
                tokens.append(step * 10 + i - start)
                content[pages[i // size] * size + i % size] = tokens[-1]
        held = {page for pages, _ in owners for page in pages}
        assert pool.used == len(held)
        assert all(pool.holders(page) == sum(page in pages for pages, _ in owners) for page in held)
        for pages, tokens in owners:
            assert [content[pages[i // size] * size + i % size] for i in range(len(tokens))] == tokens
    for pages, _ in owners:
        pool.release(pages)
    assert pool.free == pool.num_pages


# ---- pages that are known by what they hold -------------------------------------------------------------------------


def named(pool: KVPool, *keys: bytes) -> list[int]:
    """A page table whose pages have these names."""
    pages: list[int] = []
    pool.extend(pages, 0, len(keys) * pool.page_size)
    for page, key in zip(pages, keys):
        pool.name(page, key)
    return pages


def test_a_key_stands_for_every_token_up_to_the_end_of_its_page() -> None:
    tokens = list(range(20))
    keys = prefix_keys(tokens, 4)
    assert len(keys) == len(set(keys)) == 5 and prefix_keys(tokens[:19], 4) == keys[:4]
    assert prefix_keys(tokens, 4) == keys and prefix_keys([*tokens[:8], 99, *tokens[9:]], 4)[:2] == keys[:2]
    for index in range(20):
        changed = prefix_keys([*tokens[:index], 99, *tokens[index + 1 :]], 4)
        assert [a == b for a, b in zip(keys, changed)] == [page < index // 4 for page in range(5)]
    # Equal pages at another place, and ids that only differ in how they are cut, are different prefixes.
    assert len(set(prefix_keys([7] * 20, 4))) == 5
    assert prefix_keys([1, 256], 1) != prefix_keys([1, 1], 1) != prefix_keys([257, 0], 1)
    assert prefix_keys([2**40, 3], 2) != prefix_keys([2**40 + 2**33, 3], 2)


def test_named_pages_are_found_while_held_and_while_they_rest() -> None:
    pool = KVPool(num_pages=6, page_size=2)
    pages = named(pool, b"a", b"b", b"c")
    original = list(pages)
    assert pool.find([b"a", b"b", b"c", b"d"]) == original and pool.find([b"a", b"x", b"c"]) == original[:1]
    assert pool.find([b"b"]) == original[1:2] and pool.find([b"x", b"a"]) == [] and pool.find([]) == []
    assert pool.resting(original) == 0
    assert sorted(pool.release(pages)) == sorted(original)
    assert pool.free == 6 and pool.resting(original) == 3 and pool.find([b"a", b"b", b"c"]) == original
    again = pool.share(pool.find([b"a", b"b"]))
    assert again == original[:2] and pool.used == 2 and pool.holders(original[0]) == 1
    assert pool.resting(original) == 1


def test_the_first_page_of_a_key_keeps_it() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    first, second = named(pool, b"a"), named(pool, b"a")
    page = first[0]
    assert pool.find([b"a"]) == [page] != second
    pool.release(second)
    assert pool.find([b"a"]) == [page], "the other one's end is not the end of the name"
    pool.release(first)
    assert pool.find([b"a"]) == [page]


def test_the_page_that_rested_longest_is_taken_first_and_only_when_no_other_is_free() -> None:
    pool = KVPool(num_pages=5, page_size=2)
    one, two = named(pool, b"a", b"b"), named(pool, b"c")
    pool.release(one)
    pool.release(two)
    # Of one table the end goes before the beginning, without which it is of no use.
    for expected in (*[[b"a", b"b", b"c"]] * 3, [b"a", b"c"], [b"c"], []):
        assert [key for key in (b"a", b"b", b"c") if pool.find([key])] == expected
        if expected:
            pool.extend([], 0, 2)
    assert pool.free == 0


def test_a_page_that_was_used_again_counts_as_young() -> None:
    pool = KVPool(num_pages=2, page_size=2)
    tables = [named(pool, b"a"), named(pool, b"b")]
    for table in tables:
        pool.release(table)
    pool.release(pool.share(pool.find([b"a"])))
    pool.extend([], 0, 1)
    assert pool.find([b"a"]) and not pool.find([b"b"])


def test_spoilt_pages_are_never_found_again() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    pages = named(pool, b"a", b"b")
    other = pool.share(pages[:1])
    assert len(pool.release(pages, spoilt=True)) == 1, "one is still held"
    assert not pool.find([b"a"]) and not pool.find([b"b"])
    pool.release(other)
    assert not pool.find([b"a"]) and pool.free == 4
    fresh = named(pool, b"a")
    assert pool.find([b"a"]) == fresh, "the name is free for a page that is right"


def test_forgetting_loses_every_name_and_no_page() -> None:
    pool = KVPool(num_pages=4, page_size=2)
    held, resting = named(pool, b"a"), named(pool, b"b", b"c")
    pool.release(resting)
    pool.forget()
    assert [pool.find([key]) for key in (b"a", b"b", b"c")] == [[], [], []]
    assert pool.free == 3 and pool.used == 1
    pool.release(held)
    pages: list[int] = []
    pool.extend(pages, 0, 8)
    assert sorted(pages) == [0, 1, 2, 3]


@dataclass
class Naive:
    """What the pool promises, by looking through everything. rested: unheld pages with a name, oldest first."""

    num_pages: int
    tables: list[list[int]] = field(default_factory=list)
    name_of: dict[int, bytes] = field(default_factory=dict)
    rested: list[int] = field(default_factory=list)
    peak: int = 0

    def held(self) -> set[int]:
        return {page for table in self.tables for page in table}

    def find(self, keys: list[bytes]) -> list[int]:
        found = []
        for key in keys:
            pages = [page for page, name in self.name_of.items() if name == key]
            if not pages:
                break
            found += pages
        return found

    def took(self, page: int) -> None:
        """A page that the pool chose must be one that nobody holds; one with a name only if all others are held."""
        assert page not in self.held()
        if page in self.name_of:
            assert self.num_pages - len(self.held()) == len(self.rested), "an unnamed page was free"
            assert page == self.rested.pop(0), "not the one that rested longest"
            del self.name_of[page]

    def gave_up(self, table: list[int], spoilt: bool) -> None:
        """A table that is no longer in `tables`."""
        for page in reversed(table):
            if spoilt:
                self.name_of.pop(page, None)
            if page not in self.held() and page in self.name_of:
                self.rested.append(page)


@pytest.mark.parametrize("seed", range(8))
def test_random_use_agrees_with_a_naive_pool(seed: int) -> None:
    rng = random.Random(seed)
    pool = KVPool(rng.randint(3, 12), 1)
    naive = Naive(pool.num_pages)
    keys = [bytes([k]) for k in range(8)]
    for _ in range(800):
        action = rng.choice(["extend", "extend", "find", "find", "fork", "name", "release", "release", "forget"])
        if action == "extend":
            table = rng.choice([*naive.tables, []])
            count = rng.randint(1, 3)
            start = len(table)
            if pool.extension_cost(table, start, start + count) > pool.free:
                continue
            if start == 0:
                naive.tables.append(table)
            pool.extend(table, start, start + count)
            new = table[start:]
            del table[start:]
            for page in new:
                naive.took(page)
                table.append(page)
        elif action == "find":
            found = pool.find(rng.sample(keys, rng.randint(1, 3)))
            if found:
                assert pool.resting(found) == len([page for page in found if page in naive.rested])
                naive.tables.append(pool.share(found))
                naive.rested = [page for page in naive.rested if page not in found]
        elif action == "forget" and rng.random() < 0.1:
            pool.forget()
            naive.name_of.clear()
            naive.rested.clear()
        elif naive.tables:
            place = rng.randrange(len(naive.tables))
            table = naive.tables[place]
            if action == "fork":
                naive.tables.append(pool.share(table))
            elif action == "name":
                page, key = rng.choice(table), rng.choice(keys)
                if page not in naive.name_of:
                    pool.name(page, key)
                    if key not in naive.name_of.values():
                        naive.name_of[page] = key
            elif action == "release":
                del naive.tables[place]
                spoilt = rng.random() < 0.2
                before = list(table)
                freed = pool.release(table, spoilt=spoilt)
                assert sorted(freed) == sorted(set(before) - naive.held()) and table == []
                naive.gave_up(before, spoilt)
        naive.peak = max(naive.peak, len(naive.held()))
        assert (pool.used, pool.free) == (len(naive.held()), pool.num_pages - len(naive.held()))
        assert all(pool.holders(p) == sum(p in t for t in naive.tables) for p in range(pool.num_pages))
        assert all(pool.find([key]) == naive.find([key]) for key in keys)
        assert pool.peak == naive.peak
