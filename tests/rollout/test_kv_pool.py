import random

import pytest

from rhotrain.rollout.kv_pool import KVPool


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
    for step in range(3000):
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
