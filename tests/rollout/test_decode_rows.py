"""Page tables of a decode step, and which of its rows read the same pages."""

import random

import numpy as np
import pytest
import torch

from rhotrain.kernels.paged_plan import SharedPages
from rhotrain.rollout.decode import DecodeRows, padded_tables, shared_pages
from rhotrain.rollout.scheduler import Group, Sequence


def shared(tables: list[list[int]], full: list[int], groups: list[int]) -> list[tuple[int, int, int]]:
    width = max(map(len, tables))
    padded = np.array([[*t, *[t[0]] * (width - len(t))] for t in tables], dtype=np.int32)
    return [(s.start, s.stop, s.pages) for s in shared_pages(padded, np.array(full), np.array(groups))]


def test_single_rows_and_strangers_share_nothing() -> None:
    assert shared_pages(np.zeros((0, 3), dtype=np.int32), np.zeros(0), np.zeros(0)) == ()
    assert shared([[4, 5]], [1], [0]) == []
    assert shared([[4, 5], [6, 7], [8]], [1, 1, 0], [0, 1, 2]) == []


def test_a_group_shares_its_prompt() -> None:
    assert shared([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [2, 2, 2], [7, 7, 7]) == [(0, 3, 2)]
    two = [[1, 2, 3], [1, 2, 4], [8, 9], [8, 10], [8, 11]]
    assert shared(two, [2, 2, 1, 1, 1], [0, 0, 1, 1, 1]) == [(0, 2, 2), (2, 5, 1)]


def test_pages_that_are_not_full_are_not_shared() -> None:
    # Before its first copy a member still names the partial page of the others.
    assert shared([[1, 2], [1, 2]], [1, 1], [0, 0]) == [(0, 2, 1)]
    assert shared([[1], [1]], [0, 0], [0, 0]) == []
    assert shared([[1, 2, 3], [1, 2, 3]], [2, 1], [0, 0]) == [(0, 2, 1)]


def test_padding_columns_are_no_pages() -> None:
    """Padding repeats the first page, so that two short rows look alike to the end of the table."""
    tables = [[1, 2], [1, 3], [1, 4, 5, 6]]
    assert shared(tables, [1, 1, 3], [0, 0, 0]) == [(0, 3, 1)]
    assert shared([[1], [1], [1, 2, 3]], [1, 1, 2], [0, 0, 0]) == [(0, 3, 1)]


def test_what_saves_more_is_taken() -> None:
    """A system prompt of one page across three groups, or the groups' own pages: reads that are saved decide."""
    few = [[1, 20, 30], [1, 20, 31], [1, 21, 32], [1, 21, 33]]
    # Across: (4 - 1) x 1 = 3 reads saved. By group: 2 x (2 - 1) x 2 = 4.
    assert shared(few, [2] * 4, [0, 0, 1, 1]) == [(0, 2, 2), (2, 4, 2)]
    # Across: 5 x 3 = 15. By group: 3 x 1 x 4 = 12.
    many = [[1, 2, 3, 10 + p, 50 + row] for row, p in enumerate((0, 0, 1, 1, 2, 2))]
    assert shared(many, [4] * 6, [0, 0, 1, 1, 2, 2]) == [(0, 6, 3)]
    # A tie: either is right, but it must be one of them.
    tie = shared([[1, 2, 30], [1, 2, 31], [1, 3, 32], [1, 3, 33], [1, 4, 34]], [2] * 5, [0, 0, 1, 1, 2])
    assert tie in ([(0, 5, 1)], [(0, 2, 2), (2, 4, 2)])


def test_each_common_start_is_decided_by_itself() -> None:
    tables = [[1, 20], [1, 21], [1, 22], [5, 6, 30], [5, 6, 31], [9, 40]]
    assert shared(tables, [1, 1, 1, 2, 2, 1], [0, 1, 2, 3, 3, 4]) == [(0, 3, 1), (3, 5, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_shared_pages_of_random_tables_are_right(seed: int) -> None:
    """The rows of a run do begin with the same full pages, runs do not overlap, nothing is left that saves more."""
    rng = random.Random(seed)
    tables, full, groups, page = [], [], [], 100
    for group in range(rng.randint(1, 6)):
        head = [1, 2, 3][: rng.randint(0, 3)]
        own = list(range(page, page + rng.randint(0, 3)))
        page += 3
        for _ in range(rng.randint(1, 5)):
            tail = [page, page + 1][: rng.randint(1, 2)]
            page += 2
            tables.append([*head, *own, *tail])
            full.append(len(head) + len(own))
            groups.append(group)
    runs = shared(tables, full, groups)
    ends = [0]
    for start, stop, pages in runs:
        assert stop - start >= 2 and pages >= 1 and start >= ends[-1]
        ends.append(stop)
        assert len({tuple(t[:pages]) for t in tables[start:stop]}) == 1 and min(full[start:stop]) >= pages
    saved = sum((stop - start - 1) * pages for start, stop, pages in runs)
    by_group = 0
    for group in set(groups):
        rows = [row for row, g in enumerate(groups) if g == group]
        by_group += (len(rows) - 1) * full[rows[0]]
    assert saved >= by_group


def rows_of(*lengths: int) -> tuple[list[Sequence], DecodeRows]:
    sequences: list[Sequence] = []
    for index, length in enumerate(lengths):
        sequence = Group.make(index, list(range(10, 11 + length)), [50 + index], 9).members[0]
        sequence.cached, sequence.pages = length, [10 * index + p for p in range(length // 4 + 1)]
        sequences.append(sequence)
    return sequences, DecodeRows.of(sequences, 4, torch.device("cpu"), share=True)


def test_rows_hold_what_the_step_needs() -> None:
    sequences, rows = rows_of(3, 9, 4)
    assert len(rows) == 3 and rows.shared == ()
    assert rows.inputs.ids.tolist() == [13, 19, 14] and rows.inputs.cached.tolist() == [3, 9, 4]
    assert rows.inputs.live.tolist() == [1, 1, 1] and rows.inputs.tables.dtype == torch.int32
    assert rows.inputs.tables.tolist() == [[0, 0, 0], [10, 11, 12], [20, 21, 20]] == padded_tables(sequences).tolist()
    assert rows.samples.tolist() == [50, 51, 52] and rows.drawn.tolist() == [0, 0, 0]
    rows.advance(torch.tensor([1, 2, 3]))
    assert rows.inputs.ids.tolist() == [1, 2, 3] and rows.inputs.cached.tolist() == [4, 10, 5]
    assert rows.drawn.tolist() == [1, 1, 1]


def test_the_rows_that_stay_keep_their_values() -> None:
    _, rows = rows_of(3, 9, 4, 8)
    rows.advance(torch.tensor([1, 2, 3, 4]))
    kept = rows.keep([1, 3], share=True)
    assert kept.inputs.ids.tolist() == [2, 4] and kept.inputs.cached.tolist() == [10, 9]
    assert kept.inputs.tables.tolist() == [[10, 11, 12], [30, 31, 32]] and kept.samples.tolist() == [51, 53]
    assert (kept.groups.tolist(), kept.full.tolist()) == ([1, 3], [2, 2])
    kept.advance(torch.tensor([5, 6]))
    assert rows.inputs.ids.tolist() == [1, 2, 3, 4], "rows that left do not move"


def test_rows_that_become_neighbours_share() -> None:
    group = Group.make(0, list(range(9)), [0, 1, 2], 5)
    stranger = Group.make(1, list(range(50, 59)), [3], 5).members[0]
    for member, last in zip((*group.members, stranger), (2, 3, 4, 7)):
        member.cached, member.pages = 8, [0, 1, last]
    stranger.pages = [5, 6, 7]
    order = [group.members[0], stranger, *group.members[1:]]
    rows = DecodeRows.of(order, 4, torch.device("cpu"), share=True)
    assert rows.shared == (SharedPages(2, 4, 2),)
    assert rows.keep([0, 2, 3], share=True).shared == (SharedPages(0, 3, 2),)
    assert rows.keep([0, 2, 3], share=False).shared == ()
