"""Requests are batched in the order of the slots, whatever the timing."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agents.deterministic_batcher import DeterministicBatcher
from verl.types import Completion, SamplingParams

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(max_tokens=1)


def play(turns: Sequence[int], pauses: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return the batches of episodes with these numbers of turns, which pause before each turn."""
    rounds: list[list[tuple[int, ...]]] = []

    async def generate_all(requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        rounds.append([tuple(tokens) for tokens, _ in requests])
        await asyncio.sleep(0)
        return [Completion([tokens[0]], [0.0], [0], "stop") for tokens, _ in requests]

    async def main() -> None:
        batcher = DeterministicBatcher(generate_all, len(turns))
        remaining = iter(pauses)

        async def episode(number: int) -> None:
            with batcher.slot() as generate:
                for turn in range(turns[number]):
                    for _ in range(next(remaining, 0)):
                        await asyncio.sleep(0)
                    completion = await generate([number, turn], SAMPLING)
                    assert completion.token_ids == [number]

        await asyncio.gather(*map(episode, range(len(turns))))

    asyncio.run(main())
    return rounds


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=18))
def test_batches_depend_on_slots_and_turns_only(turns: list[int], pauses: list[int]) -> None:
    expected = [
        [(number, turn) for number, length in enumerate(turns) if turn < length]
        for turn in range(max(turns, default=0))
    ]
    assert play(turns, pauses) == expected


async def test_a_failed_episode_frees_its_slot() -> None:
    async def generate_all(requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        return [Completion([7], [0.0], [0], "stop") for _ in requests]

    batcher = DeterministicBatcher(generate_all, 2)

    async def fails() -> None:
        with batcher.slot():
            await asyncio.sleep(0)
            raise ValueError("no tool of that name")

    async def asks() -> Completion:
        with batcher.slot() as generate:
            return await generate([1], SAMPLING)

    failed, answered = await asyncio.gather(fails(), asks(), return_exceptions=True)
    assert isinstance(failed, ValueError)
    assert isinstance(answered, Completion)


async def test_an_engine_failure_fails_all_requests_of_the_batch() -> None:
    async def generate_all(requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        raise ValueError("no engine left")

    batcher = DeterministicBatcher(generate_all, 2)

    async def asks() -> Completion:
        with batcher.slot() as generate:
            return await generate([1], SAMPLING)

    assert [str(error) for error in await asyncio.gather(asks(), asks(), return_exceptions=True)] == [
        "no engine left"
    ] * 2


async def test_requests_of_one_episode_at_once_take_its_slot_one_after_another() -> None:
    rounds: list[list[int]] = []

    async def generate_all(requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        rounds.append([tokens[0] for tokens, _ in requests])
        return [Completion([tokens[0]], [0.0], [0], "stop") for tokens, _ in requests]

    batcher = DeterministicBatcher(generate_all, 2)

    async def ask(tokens: Sequence[int]) -> list[list[int]]:
        with batcher.slot() as generate:
            completions = await asyncio.gather(*(generate([token], SAMPLING) for token in tokens))
            return [completion.token_ids for completion in completions]

    async with asyncio.timeout(30):
        assert await asyncio.gather(ask([1, 2, 3]), ask([4, 5])) == [[[1], [2], [3]], [[4], [5]]]
    assert rounds == [[1, 4], [2, 5], [3]]
