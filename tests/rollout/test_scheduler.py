import random

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
        [prompt_of(4), prompt_of(40)],
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
    done = simulate([prompt_of(6), prompt_of(6), prompt_of(6)], [[20], [20], [20]], num_pages=10)
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


@pytest.mark.parametrize("seed", range(30))
def test_random_loads_end_with_the_right_tokens(seed: int) -> None:
    """Any pool that fits the longest sequence, any budget: it ends, with the same tokens and all pages back."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    prompts = [prompt_of(rng.randint(1, 30), 1000 * p) for p in range(rng.randint(1, 8))]
    lengths = [[rng.randint(1, 25) for _ in range(rng.randint(1, 6))] for _ in prompts]
    fits = max(-(-(len(p) + max(members) - 1) // size) for p, members in zip(prompts, lengths))
    done = simulate(
        prompts,
        lengths,
        num_pages=fits + rng.choice([0, 0, 1, 5, 40]),
        page_size=size,
        max_batch_tokens=rng.choice([1, 3, 8, 64]),
        max_running=rng.choice([1, 2, 5, 64]),
    )
    expect_all(done)
    assert done.prompt_tokens == sum(map(len, prompts))
