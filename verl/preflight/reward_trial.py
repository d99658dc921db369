"""Runs a reward function on responses in the processes of a run, with a time limit, and judges what it returned."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verl.config.schema import Config
from verl.preflight.finding import Finding, Severity
from verl.preflight.reward_rows import RewardRow
from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Failed, RewardResult
from verl.trainer.build.reward_settings import reward_function_settings

PLACE = "reward.custom_reward_function"
REFERENCE, EMPTY = "reference", "empty"
WORKERS = 2
_MESSAGE_LINES = 12


@dataclass(frozen=True, slots=True)
class Call:
    """One response to one row. `kind` says what the response is, such as "empty"."""

    row: RewardRow
    kind: str
    response: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the function returned for a call, once per repetition, and how long it took."""

    call: Call
    results: tuple[RewardResult, ...]
    seconds: tuple[float, ...]

    @property
    def scores(self) -> list[float]:
        return [result.score for result in self.results if not isinstance(result, Failed)]

    @property
    def failure(self) -> Failed | None:
        return next((result for result in self.results if isinstance(result, Failed)), None)


async def try_reward(
    config: Config, calls: Sequence[Call], *, timeout_s: float, repeats: int = 1, workers: int = WORKERS
) -> list[Outcome]:
    """Make all calls, each `repeats` times; raise a `RewardError` if the function cannot be loaded.

    The time of a call does not contain that of waiting for others.
    """
    settings = replace(reward_function_settings(config), workers=workers, timeout_s=timeout_s)
    slots = asyncio.Semaphore(workers)

    async def score(pool: RewardPool, call: Call) -> tuple[RewardResult, float]:
        async with slots:
            start = time.monotonic()
            row = call.row
            result = await pool.score(row.data_source, call.response, row.ground_truth, dict(row.extra_info))
            return result, time.monotonic() - start

    async def repeat(pool: RewardPool, call: Call) -> Outcome:
        done = [await score(pool, call)]
        if not isinstance(done[0][0], Failed):  # a hang takes its whole time limit each time
            done += [await score(pool, call) for _ in range(repeats - 1)]
        return Outcome(call, tuple(result for result, _ in done), tuple(seconds for _, seconds in done))

    with RewardPool(settings) as pool:
        await pool.start()
        return list(await asyncio.gather(*(repeat(pool, call) for call in calls)))


def find_failures(outcomes: Sequence[Outcome], *, timeout_is_fatal: bool = True) -> Iterator[Finding]:
    """Yield one finding per kind of failure, with its first message."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.failure is not None:
            by_kind[outcome.failure.kind].append(outcome)
    for kind, failed in by_kind.items():
        first = failed[0]
        assert first.failure is not None
        message, _, fix = first.failure.message.rpartition("\n")
        kinds = ", ".join(dict.fromkeys(outcome.call.kind for outcome in failed))
        is_fatal = kind != "timeout" or timeout_is_fatal
        yield Finding(
            Severity.ERROR if is_fatal else Severity.WARNING,
            PLACE,
            f"no score for {len(failed)} of {len(outcomes)} responses ({kinds}). The first, to "
            f"{first.call.row.location}:\n{_shorten(message)}",
            fix.strip(),
        )


def find_no_signal(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    """Yield whether the reference solutions score no higher than an empty response."""
    by_row: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        by_row[outcome.call.row.location][outcome.call.kind] += outcome.scores
    rows = {place: kinds for place, kinds in by_row.items() if kinds[REFERENCE] and kinds[EMPTY]}
    flat = {place: kinds for place, kinds in rows.items() if max(kinds[REFERENCE]) <= max(kinds[EMPTY])}
    if not flat:
        return
    place, kinds = next(iter(flat.items()))
    row = next(outcome.call.row for outcome in outcomes if outcome.call.row.location == place)
    yield Finding(
        Severity.WARNING,
        PLACE,
        f"the reference solution scores no higher than an empty response on {len(flat)} of {len(rows)} rows. "
        f"{place}: {max(kinds[REFERENCE]):g} for {_quote(row.references[0])}, {max(kinds[EMPTY]):g} for an empty one",
        "check which answer the function looks for, and the ground truth of the row; "
        "`verl reward-test` shows the scores of all responses",
    )


def find_constant(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    """Yield whether every response gets the same score, so that nothing can be learned."""
    scores = {score for outcome in outcomes for score in outcome.scores}
    if len(scores) == 1 and len({outcome.call.response for outcome in outcomes}) > 1:
        yield Finding(
            Severity.ERROR,
            PLACE,
            f"every response scores {scores.pop():g}, so that nothing can be learned",
            "check that the function reads its argument `solution_str`, and the ground truth of the rows",
        )


def find_unstable(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    """Yield whether the same call returns different scores."""
    unstable = [outcome for outcome in outcomes if len(set(outcome.scores)) > 1]
    if unstable:
        low, high = min(unstable[0].scores), max(unstable[0].scores)
        yield Finding(
            Severity.WARNING,
            PLACE,
            f"the same call returned different scores for {len(unstable)} of {len(outcomes)} responses, such as "
            f"{low:g} and {high:g} ({unstable[0].call.kind}, {unstable[0].call.row.location})",
            "remove what is random in the function, or what depends on the time or on earlier calls",
        )


def find_unearned(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    """Yield hostile responses that score as high as the reference solution, where that is higher than an empty one."""
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for outcome in outcomes:
        kinds = best[outcome.call.row.location]
        for score in outcome.scores:
            kinds[outcome.call.kind] = max(score, kinds.get(outcome.call.kind, score))
    unearned: dict[str, str] = {}
    for place, kinds in best.items():
        if kinds.get(REFERENCE, 0.0) > kinds.get(EMPTY, 0.0):
            unearned |= {
                kind: place for kind, score in kinds.items() if score >= kinds[REFERENCE] and kind != REFERENCE
            }
    if unearned:
        yield Finding(
            Severity.WARNING,
            PLACE,
            f"as high as the reference solution score: {', '.join(unearned)} ({next(iter(unearned.values()))})",
            "make the function read one final answer, such as the last one; a policy finds such responses",
        )


def find_slow(config: Config, outcomes: Sequence[Outcome], slow_s: float) -> Iterator[Finding]:
    """Yield whether scoring the responses of a step takes long."""
    times = sorted(seconds for outcome in outcomes if outcome.failure is None for seconds in outcome.seconds)
    if not times or (median := times[len(times) // 2]) < slow_s:
        return
    responses = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    yield Finding(
        Severity.WARNING,
        PLACE,
        f"a call takes {median:.1f} s (median of {len(times)}): {median * responses:,.0f} s for the {responses:,} "
        "responses of a step, one after another",
        "set reward.reward_manager.name=prime and reward.num_workers to score in several processes, or make it faster",
    )


def _shorten(message: str) -> str:
    lines = message.splitlines()
    if len(lines) <= _MESSAGE_LINES:
        return message
    return "\n".join([*lines[: _MESSAGE_LINES // 2], "  ...", *lines[-_MESSAGE_LINES // 2 :]])


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
