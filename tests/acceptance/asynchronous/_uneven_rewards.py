"""A reward that takes long for one prompt in four, whose groups are then in flight over several steps."""

import asyncio

LONG_S = 4.0


def is_long(ground_truth: str) -> bool:
    return sum(map(int, ground_truth)) % 4 == 0


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    await asyncio.sleep(LONG_S if is_long(ground_truth) else 0.05)
    return sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)
