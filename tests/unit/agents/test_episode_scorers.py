"""A function, a model or both score an episode; if either fails, the episode has no score."""

from collections.abc import Sequence
from typing import Any

import pytest

from verl.agents.episode import refuse_to_score, score_by_function, score_by_model, weighted_sum
from verl.agents.transcript import Transcript, Turn
from verl.rewards.models.interface import ScoringFailure
from verl.rewards.models.tokenization import TurnTokens
from verl.types import Completion, Failed, Prompt, Scored

pytestmark = pytest.mark.unit

PROMPT = Prompt(0, [1, 2], "sums", "46", {"level": 3}, raw=[{"role": "user", "content": "12+34"}])
TRANSCRIPT = Transcript([Turn([1, 2], Completion([9], [0.0], [0], "stop"), prompt_tokens=2)])


async def function(source: str, answer: str, truth: Any, extra: dict[str, Any]) -> Scored | Failed:
    assert (source, truth, extra["level"]) == ("sums", "46", 3)
    return Scored(0.5, {"words": 1.0}) if answer == "46" else Failed("died", "the function's process ended")


async def model(tokens: Sequence[int]) -> float | ScoringFailure:
    return float(sum(tokens)) if tokens else ScoringFailure("timeout", "gave no score", "give it longer")


def read(prompt: Prompt, turns: Sequence[TurnTokens], answer: str) -> list[int]:
    if answer == "?":
        raise ValueError("conversation roles must alternate")
    return [] if answer == "late" else [token for turn in turns for part in turn for token in part]


async def test_a_function_gets_the_raw_prompt_if_there_is_one() -> None:
    extras: list[dict[str, Any]] = []

    async def listen(source: str, answer: str, truth: Any, extra: dict[str, Any]) -> Scored:
        extras.append(extra)
        return Scored(0.0)

    for prompt in (PROMPT, Prompt(0, [1], extra_info={"level": 3})):
        await score_by_function(listen)(prompt, TRANSCRIPT, "46")
    assert extras == [{"level": 3, "raw_prompt": PROMPT.raw}, {"level": 3}]
    assert PROMPT.extra_info == {"level": 3}, "the record itself stays as it is"


async def test_a_model_scores_the_encoded_conversation() -> None:
    assert await score_by_model(read, model)(PROMPT, TRANSCRIPT, "46") == Scored(12.0)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [("late", "timeout", ["gave no score", "give it longer"]), ("?", "error", ["roles must alternate", "template"])],
)
async def test_a_failure_of_the_model_names_the_cause_the_sample_and_the_fix(
    answer: str, kind: str, words: list[str]
) -> None:
    outcome = await score_by_model(read, model)(PROMPT, TRANSCRIPT, answer)
    assert isinstance(outcome, Failed)
    assert outcome.kind == kind
    for word in (*words, "reward.reward_model", "'sums'", repr(answer), "46"):
        assert word in outcome.message


async def test_the_weighted_sum_has_both_scores_as_metrics() -> None:
    both = weighted_sum(score_by_function(function), score_by_model(read, model), weight=0.25)
    metrics = {"words": 1.0, "function_score": 0.5, "model_score": 12.0}
    assert await both(PROMPT, TRANSCRIPT, "46") == Scored(3.5, metrics)


@pytest.mark.parametrize(("answer", "kind"), [("47", "died"), ("late", "died")])
async def test_a_failure_of_either_scorer_is_a_failure(answer: str, kind: str) -> None:
    outcome = await weighted_sum(score_by_function(function), score_by_model(read, model), weight=1.0)(
        PROMPT, TRANSCRIPT, answer
    )
    assert isinstance(outcome, Failed)
    assert outcome.kind == kind


async def test_a_failure_of_the_model_alone_is_a_failure() -> None:
    async def fine(source: str, answer: str, truth: Any, extra: dict[str, Any]) -> Scored:
        return Scored(1.0)

    outcome = await weighted_sum(score_by_function(fine), score_by_model(read, model), weight=1.0)(
        PROMPT, TRANSCRIPT, "late"
    )
    assert isinstance(outcome, Failed)
    assert outcome.kind == "timeout"


async def test_without_a_reward_only_episodes_that_a_limit_ended_may_lack_a_score() -> None:
    turns = TRANSCRIPT.turns
    assert await refuse_to_score(PROMPT, Transcript(turns, is_truncated=True), "46") == Scored(
        0.0, {"episode/ended_unscored": 1.0}
    )
    outcome = await refuse_to_score(PROMPT, Transcript(turns), "46")
    assert isinstance(outcome, Failed)
    assert "returned no score" in outcome.message
