import random
from typing import Any

import pytest
from helpers_rollout import Simulator, simulate, token_of

from rhotrain.rollout.scheduler import Batch


def prompt_of(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def expect_all(simulator: Simulator) -> None:
    """Every sample ended with exactly its own tokens and gave its pages back."""
    assert simulator.completions == {
        sample: [token_of(sample, i) for i in range(length)] for sample, length in simulator.lengths.items()
    }
    assert simulator.pool.free == simulator.pool.num_pages


def test_a_prompt_is_run_once_per_group_and_its_pages_are_shared() -> None:
    done = simulate([prompt_of(18)], [[9] * 8], num_pages=100)
    expect_all(done)
    assert done.prompt_tokens == 18 and done.again_tokens == 0
    assert done.copies == 7
    # 4 full prompt pages shared; each member holds tokens 16..25 of its own: 3 pages.
    assert done.pool.peak == 4 + 8 * 3
    # One step for the prompt, which draws 8 first tokens, then 8 decode steps.
    assert done.steps == 9


def test_finished_rows_leave_and_waiting_ones_enter() -> None:
    seen: list[set[int]] = []
    lengths = [[2], [12], [3], [4]]
    done = simulate(
        [prompt_of(5)] * 4,
        lengths,
        num_pages=100,
        max_running=2,
        watch=lambda batch: seen.append({s.sample for s, _ in batch.rows}),
    )
    expect_all(done)
    assert done.most_running == 2
    assert {0, 1} in seen and {1, 2} in seen and {1, 3} in seen
    assert done.steps == 12, "the longest sequence alone decides how long it takes"


def test_prompts_run_in_chunks_mixed_with_decode_rows() -> None:
    rows: list[list[tuple[int, int]]] = []
    done = simulate(
        [prompt_of(4, 100), prompt_of(40)],
        [[30], [3]],
        num_pages=100,
        max_batch_tokens=8,
        watch=lambda batch: rows.append([(s.sample, count) for s, count in batch.rows]),
    )
    expect_all(done)
    assert done.largest_batch <= 8 and done.mixed_steps >= 5
    assert [(0, 1), (1, 7)] in rows, "one decode row, the rest of the budget for the prompt"
    assert done.prompt_tokens == 44


def test_the_youngest_is_preempted_and_keeps_what_it_drew() -> None:
    done = simulate([prompt_of(6, start) for start in (0, 10, 20)], [[20], [20], [20]], num_pages=10)
    expect_all(done)
    assert done.scheduler.preemptions > 0 and done.again_tokens > 0
    assert done.prompt_tokens == 18, "tokens that run again are not counted as prompt tokens"
    assert done.pool.peak <= 10


def test_a_newcomer_waits_when_the_next_page_of_a_running_one_is_the_last() -> None:
    # The first holds 2 of 3 pages and takes the third in its next step; the second would be let in only to be put back.
    done = simulate([prompt_of(8), prompt_of(3)], [[4], [2]], num_pages=3)
    expect_all(done)
    assert done.scheduler.preemptions == 0 and done.again_tokens == 0


def test_the_oldest_is_never_preempted() -> None:
    cached: list[int] = []

    def watch(batch: Batch) -> None:
        cached.extend(s.cached for s, _ in batch.rows if s.sample == 0)

    done = simulate([prompt_of(6)] * 4, [[25]] * 4, num_pages=8, watch=watch)
    expect_all(done)
    assert done.scheduler.preemptions > 0
    assert cached == sorted(cached) and len(cached) == 25


def test_a_pool_for_exactly_one_sequence_serves_a_group() -> None:
    # 10 + 15 - 1 tokens take 6 pages of 4: the members take turns.
    done = simulate([prompt_of(10), prompt_of(10)], [[15] * 4, [15] * 4], num_pages=6)
    expect_all(done)
    assert done.scheduler.preemptions > 0


def test_a_recomputed_member_shares_the_prompt_of_a_running_one() -> None:
    # 40 prompt tokens = 10 pages, 11 for what four members draw. The first member runs longest: somebody to share with.
    done = simulate([prompt_of(40)], [[30, 16, 16, 16]], num_pages=10 + 11)
    expect_all(done)
    assert done.scheduler.preemptions > 0
    assert done.again_tokens < 40, "the prompt itself was never run again"


def test_a_group_larger_than_max_running_takes_turns() -> None:
    done = simulate([prompt_of(9), prompt_of(3)], [[7] * 10, [2]], num_pages=200, max_running=4)
    expect_all(done)
    assert done.most_running == 4 and done.prompt_tokens == 12
    assert done.scheduler.preemptions == 0, "waiting for a free place is not a preemption"


def test_one_token_completions_never_hold_pages_after_the_prompt() -> None:
    done = simulate([prompt_of(8), prompt_of(7)], [[1] * 5, [1] * 3], num_pages=4, page_size=4)
    expect_all(done)
    assert done.copies == 0 and done.pool.peak <= 4


def test_more_decode_rows_than_the_token_budget() -> None:
    done = simulate([prompt_of(3)] * 3, [[5, 6, 7]] * 3, num_pages=100, max_batch_tokens=2)
    expect_all(done)
    assert done.largest_batch == 2


def test_decode_rows_come_first_in_a_batch() -> None:
    def watch(batch: Batch) -> None:
        counts = [count > 1 for _, count in batch.rows]
        assert counts == sorted(counts)

    done = simulate([prompt_of(9)] * 6, [[8]] * 6, num_pages=20, max_batch_tokens=12, watch=watch)
    expect_all(done)
    assert done.mixed_steps > 0


BURSTS = [(0, False), (1, False), (1, True), (7, True), (32, False), (32, True)]
"""Most steps of a burst, and whether its ends are seen one step late."""


@pytest.mark.parametrize("seed", range(30))
def test_random_loads_end_with_the_right_tokens(seed: int) -> None:
    """Any pool that fits the longest sequence, any budget, any bursts: it ends, same tokens, all pages back."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    heads = [prompt_of(rng.randint(0, 20), 5000 * h) for h in range(2)]
    prompts = [[*rng.choice(heads), *prompt_of(rng.randint(1, 20), 100 * p)] for p in range(rng.randint(1, 8))]
    lengths = [[rng.randint(1, 25) for _ in range(rng.randint(1, 6))] for _ in prompts]
    spare = rng.choice([0, 3, 40])
    fits = max(-(-(len(p) + max(members) + spare - 1) // size) for p, members in zip(prompts, lengths))
    limits: dict[str, Any] = {
        "num_pages": fits + rng.choice([0, 0, 1, 5, 40]),
        "page_size": size,
        "max_batch_tokens": rng.choice([1, 3, 8, 64]),
        "max_running": rng.choice([1, 2, 5, 64]),
        "spare": spare,
    }
    for burst, late in BURSTS[:1] + rng.sample(BURSTS[1:], 2):
        done = simulate(prompts, lengths, burst=burst, late=late, **limits)
        expect_all(done)
        assert done.prompt_tokens + done.scheduler.found == sum(map(len, prompts))
        assert done.steps < 20 * sum(map(sum, lengths)) + 10 * sum(map(len, prompts))


@pytest.mark.parametrize(("burst", "late"), BURSTS)
def test_the_same_load_takes_the_same_course(burst: int, late: bool) -> None:
    """Rows, their order and their pages, step by step; preemption, sharing and forks among them."""
    prompts = [[*prompt_of(9), *prompt_of(p, 100 * p)] for p in range(1, 7)]
    lengths = [[5 + p, 14, 9 - p] for p in range(6)]
    options: dict[str, Any] = {"num_pages": 12, "max_batch_tokens": 16, "burst": burst, "late": late}
    first, second = (simulate(prompts, lengths, **options) for _ in range(2))
    assert first.scheduler.preemptions > 0 and first.scheduler.found > 0
    assert first.trace == second.trace


# ---- bursts ---------------------------------------------------------------------------------------------------------


def test_rows_that_only_decode_run_as_one_burst() -> None:
    done = simulate([prompt_of(18)], [[9] * 8], num_pages=100, burst=32)
    expect_all(done)
    assert (done.steps, done.burst_steps, len(done.trace)) == (9, 8, 2), "the prompt, then one burst to the end"
    assert done.copies == 7 and done.pool.peak == 4 + 8 * 3


@pytest.mark.parametrize("late", [False, True])
def test_who_waits_enters_when_a_row_of_a_burst_ends(late: bool) -> None:
    lengths = [[2], [12], [3], [4]]
    prompts = [prompt_of(5, 100 * p) for p in range(4)]
    done = simulate(prompts, lengths, num_pages=100, max_running=2, burst=32, late=late, spare=20)
    expect_all(done)
    assert done.most_running == 2
    assert done.steps <= 12 + late, "the longest sequence alone decides how long it takes"
    assert done.burst_steps > 0


def test_the_pages_of_a_burst_are_reserved_when_it_begins() -> None:
    # 6 prompt tokens in 2 pages of 4; 10 new tokens need 6 + 10 - 1 in 4 pages, 32 steps or not.
    done = simulate([prompt_of(6), prompt_of(6, 50)], [[3], [10]], num_pages=8, burst=32)
    expect_all(done)
    assert [[len(pages) for _, _, pages in step] for step in done.trace] == [[2, 2], [2, 4]]
    assert done.pool.peak == 6 and done.scheduler.preemptions == 0


def test_a_burst_is_shortened_to_the_pages_that_are_left() -> None:
    # Two of 4 + 12 - 1 tokens: 4 pages each, but there are only 5.
    done = simulate([prompt_of(4), prompt_of(4, 50)], [[12], [12]], num_pages=5, burst=32)
    expect_all(done)
    assert done.scheduler.preemptions == 1, "as many as without bursts"
    assert any(1 < count < 32 and len(step) == 2 for step in done.trace for _, count, _ in step)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bursts_need_no_more_pages_than_planned(seed: int, late: bool) -> None:
    """A pool for all of them to their limits: nobody is preempted, whatever a burst has reserved."""
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    prompts = [prompt_of(rng.randint(1, 40), 100 * p) for p in range(4)]
    lengths = [[rng.randint(1, 30) for _ in range(rng.randint(1, 6))] for _ in prompts]
    pages = 0
    for prompt, members in zip(prompts, lengths):
        shared = len(prompt) // size
        pages += shared + len(members) * (-(-(len(prompt) + max(members) - 1) // size) - shared)
    done = simulate(prompts, lengths, num_pages=pages, page_size=size, max_batch_tokens=rng.choice([20, 500]), burst=32)
    expect_all(done)
    assert done.scheduler.preemptions == 0 and done.again_tokens == 0


def test_a_prompt_that_fills_the_budget_does_not_keep_others_waiting() -> None:
    """The first prompt takes the whole budget of its last step. That is over then: the second one enters in
    the next step, not when the first one has ended."""
    for burst in (0, 32):
        done = simulate(
            [prompt_of(16), prompt_of(5, 100)], [[30], [30]], num_pages=100, max_batch_tokens=8, burst=burst
        )
        expect_all(done)
        assert done.steps == 2 + 30, f"burst {burst}: two steps for the first prompt, then both decode"


# ---- prompts that begin alike ---------------------------------------------------------------------------------------

HEAD = prompt_of(22, 700)


def alike(*tails: int) -> list[list[int]]:
    """Prompts of 22 common tokens (5 full pages of 4) and tails of these lengths."""
    return [[*HEAD, *prompt_of(length, 1000 * (p + 1))] for p, length in enumerate(tails)]


@pytest.mark.parametrize("budget", [8, 24, 500], ids="budget {}".format)
@pytest.mark.parametrize("most", [1, 2, 64], ids="{} running".format)
@pytest.mark.parametrize("burst", [0, 32], ids="burst {}".format)
def test_a_common_head_is_run_once(burst: int, most: int, budget: int) -> None:
    """In the same step (500), in chunks (8, 24), and when the next comes after the last has gone (1 running)."""
    prompts = alike(3, 9, 1, 6)
    done = simulate(
        prompts, [[6]] * 4, num_pages=60, max_running=most, max_batch_tokens=budget, burst=burst, late=budget == 24
    )
    expect_all(done)
    assert done.scheduler.found == 3 * 20, "five pages, for all but the first"
    assert done.prompt_tokens == sum(map(len, prompts)) - 3 * 20
    if most == 64 and budget == 500:
        assert done.steps == 6, "all of them in the step that runs the head"


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ((16, 16), 12),  # the last page is run again: there must be a token to draw from
        ((17, 17), 16),
        ((19, 19, 19), 32),
        ((8, 20), 8),  # one is the beginning of the other
        ((20, 8), 4),
        ((20, 9), 8),
        ((3, 3), 0),
        ((4, 4), 0),
        ((1, 1), 0),
    ],
)
def test_prompts_that_are_equal_or_begin_each_other(lengths: tuple[int, ...], found: int) -> None:
    for most in (1, 64):
        done = simulate([prompt_of(n) for n in lengths], [[7, 3]] * len(lengths), num_pages=60, max_running=2 * most)
        expect_all(done)
        assert done.scheduler.found == found and done.prompt_tokens == sum(lengths) - found


def test_a_preempted_sequence_finds_its_own_prompt_again() -> None:
    """Its pages rest until somebody needs the room: running again begins behind them."""
    done = simulate([prompt_of(4), prompt_of(16, 100)], [[21], [9]], num_pages=8)
    expect_all(done)
    assert done.scheduler.preemptions > 0
    assert done.prompt_tokens == 20 and done.scheduler.found == 0, "what was run before is no find"
    assert 0 < done.again_tokens < 16, "less than its prompt was run again"


def test_a_head_whose_room_was_needed_is_run_again() -> None:
    """One after the other in a pool for the longest alone: the second evicts what the first left to the third."""
    first, third = alike(2, 3)
    done = simulate([first, prompt_of(40), third], [[3]] * 3, num_pages=11, max_running=1)
    expect_all(done)
    assert done.scheduler.found == 0
    roomy = simulate([first, prompt_of(40), third], [[3]] * 3, num_pages=30, max_running=1)
    expect_all(roomy)
    assert roomy.scheduler.found == 20


def test_resting_pages_count_as_free_but_not_twice() -> None:
    """The second shares five resting pages. Were they counted as free beside being used, it would enter too early."""
    prompts = [*alike(2, 30), prompt_of(9)]
    for pages in range(16, 24):
        done = simulate(prompts, [[5], [5], [5]], num_pages=pages, max_running=2)
        expect_all(done)
        assert done.pool.peak <= pages
