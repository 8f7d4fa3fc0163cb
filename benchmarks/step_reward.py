"""The reward of every side in the step benchmark. It imports nothing: ours runs rewards in a process of their own."""


def even(completion_ids: list[list[int]]) -> list[float]:
    """1 where the sum of a completion's ids is even, else 0: nearly every group carries signal."""
    return [float(sum(int(i) for i in ids) % 2 == 0) for ids in completion_ids]
