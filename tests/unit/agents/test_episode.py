"""Episodes end as samples whose arrays line up, each scored on its generated tokens."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl.agents.deterministic_batcher import Generate
from verl.agents.episode import EpisodeRunner
from verl.agents.transcript import Transcript
from verl.data.flat_batch import FlatBatch
from verl.errors import ConfigError
from verl.rewards.settings import OverlongPenalty
from verl.types import Completion, Failed, Prompt, SamplingParams, Scored
from verl.workers.episodes import make_handle

pytestmark = pytest.mark.unit

PROMPT = Prompt(row=0, token_ids=[1, 2], data_source="s", ground_truth="g", extra_info={"k": 1})


async def echo(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
    """Respond with the seed and the length of the request."""
    return Completion([sampling.seed or 0, len(token_ids)], [-0.5, -0.25], [3, 3], "stop")


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


async def accept(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
    assert prompt is PROMPT
    assert decode(transcript.last.completion.token_ids) == response
    return Scored(float(response.split()[0]), {"words": float(len(response.split()))})


async def test_one_sample_per_seed_with_prompt_and_response() -> None:
    samples = await EpisodeRunner(echo, accept, decode).run(PROMPT, 7, [5, 6], SamplingParams(max_tokens=4))
    assert [sample.score for sample in samples] == [5.0, 6.0]
    first = samples[0]
    assert first.group == 7
    assert first.tokens.tolist() == [1, 2, 5, 2]
    assert first.mask.tolist() == [False, False, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert first.versions.tolist() == [-1, -1, 3, 3]
    assert first.metrics == {"words": 2.0}


async def test_tokens_that_the_model_did_not_generate_are_masked_and_not_scored() -> None:
    async def with_tool(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
        transcript = Transcript()
        first = transcript.add(prompt.token_ids, await generate(prompt.token_ids, sampling))
        context = [90, 91, 92]
        transcript.add(context, await generate([*first.get_tokens(), *context], sampling), first)
        return transcript

    [sample] = await EpisodeRunner(echo, accept, decode, with_tool).run(PROMPT, 0, [5], SamplingParams(max_tokens=4))
    assert sample.tokens.tolist() == [1, 2, 5, 2, 90, 91, 92, 5, 7]
    assert sample.mask.tolist() == [False, False, True, True, False, False, False, True, True]
    assert sample.metrics == {"words": 2.0}, "the last turn is scored"
    assert np.all((sample.versions >= 0) == sample.mask)


async def test_an_episode_is_scored_while_others_still_generate() -> None:
    order: list[str] = []

    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        await asyncio.sleep(0.02 if sampling.seed == 1 else 0)
        order.append(f"generated {sampling.seed}")
        return Completion([sampling.seed or 0], [0.0], [0], "stop")

    async def score(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
        order.append(f"scored {response}")
        return Scored(0.0, {})

    await EpisodeRunner(generate, score, decode).run(PROMPT, 0, [1, 2], SamplingParams(max_tokens=1))
    assert order == ["generated 2", "scored 2", "generated 1", "scored 1"]


async def test_the_greedy_response_is_the_baseline_and_not_a_sample() -> None:
    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        greedy = sampling.temperature == 0
        assert (sampling.seed is None) == greedy
        return Completion([40 if greedy else sampling.seed or 0], [0.0], [0], "stop")

    runner = EpisodeRunner(generate, accept, decode)
    sampling = SamplingParams(max_tokens=4, temperature=0.7)
    samples = await runner.run(PROMPT, 7, [5, 6], sampling, greedy_baseline=True)
    assert [(sample.score, sample.baseline) for sample in samples] == [(5.0, 40.0), (6.0, 40.0)]
    assert [sample.baseline for sample in await runner.run(PROMPT, 7, [5], sampling)] == [None]


async def test_a_sample_depends_on_the_engine_of_its_baseline() -> None:
    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return Completion([5], [0.0], [0], "stop", engine=0 if sampling.temperature == 0 else 1)

    runner = EpisodeRunner(generate, accept, decode)
    [sample] = await runner.run(PROMPT, 7, [5], SamplingParams(max_tokens=4), greedy_baseline=True)
    assert sample.engines == {0, 1}


async def test_the_greedy_response_is_generated_concurrently() -> None:
    running = 0
    together = asyncio.Event()

    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        nonlocal running
        running += 1
        if running == 3:
            together.set()
        await asyncio.wait_for(together.wait(), 5)
        return Completion([1], [0.0], [0], "stop")

    runner = EpisodeRunner(generate, accept, decode)
    assert len(await runner.run(PROMPT, 0, [1, 2], SamplingParams(max_tokens=1), greedy_baseline=True)) == 2


async def test_the_overlong_penalty_lowers_the_scores_of_long_responses() -> None:
    runner = EpisodeRunner(echo, accept, decode)  # responses of two tokens
    shaping = OverlongPenalty(buffer=2, factor=0.5, max_length=3)
    [sample] = await runner.run(PROMPT, 0, [5], SamplingParams(max_tokens=4), greedy_baseline=True, overlong=shaping)
    assert sample.score == 4.75
    assert sample.metrics == {"words": 2.0, "raw_score": 5.0, "overlong_penalty": -0.25}
    assert sample.baseline == -0.25, "the penalty applies to the greedy response, too"


async def test_a_response_that_cannot_be_scored_has_a_failure_and_no_score() -> None:
    failure = Failed("timeout", "my_reward.py: gave no score")

    async def judge(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        return failure if response.startswith("5") else Scored(1.0)

    failed, scored = await EpisodeRunner(echo, judge, decode).run(PROMPT, 0, [5, 6], SamplingParams(max_tokens=4))
    assert failed.failure == failure
    assert math.isnan(failed.score)
    assert scored.failure is None


async def test_a_failed_baseline_fails_all_samples() -> None:
    async def judge(prompt: Prompt, transcript: Transcript, response: str) -> Scored | Failed:
        return Scored(1.0) if response.startswith("5") else Failed("died", "gone")

    runner = EpisodeRunner(echo, judge, decode)
    [sample] = await runner.run(PROMPT, 0, [5], SamplingParams(max_tokens=4), greedy_baseline=True)
    assert sample.failure == Failed("died", "gone")


def test_tokens_of_earlier_turns_keep_the_experts_that_they_were_generated_with() -> None:
    transcript = Transcript()
    first = Completion([3, 4], [0.0] * 2, [0] * 2, "stop", np.full((3, 1, 2), 5, np.uint8))
    second = Completion([6], [0.0], [0], "stop", np.full((5, 1, 2), 8, np.uint8))
    transcript.add([9], second, transcript.add([1, 2], first))
    experts = transcript.to_samples(0, 0, 0.0, {})[0].routed_experts
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [5, 5, 5, 8, 8]


def test_a_sample_has_the_engines_of_all_its_turns_and_those_whose_tokens_they_continued() -> None:
    transcript = Transcript()
    first = Completion([3], [0.0], [0], "stop", engine=1, earlier_engines=frozenset([0]))
    transcript.add([9], Completion([6], [0.0], [0], "stop", engine=2), transcript.add([1, 2], first))
    [sample] = transcript.to_samples(0, 0, 0.0, {})
    assert sample.engines == {0, 1, 2}


def test_preemptions_of_all_turns_are_added_up() -> None:
    transcript = Transcript()
    first, second = (Completion([3], [0.0], [0], "stop", preemptions=count) for count in (1, 2))
    transcript.add([9], second, transcript.add([1, 2], first))
    [sample] = transcript.to_samples(0, 0, 0.0, {})
    assert make_handle(replace(sample, versions=np.zeros(5, np.int32)), None).preemptions == sample.preemptions == 3


def test_kept_ids_of_all_turns_are_those_of_the_generated_tokens_of_each_branch() -> None:
    transcript = Transcript()
    first = Completion([3, 4], [0.0] * 2, [0] * 2, "stop", kept_ids=np.array([[3, 5], [4, 4]], np.int32))
    others = [Completion([k], [0.0], [0], "stop", kept_ids=np.array([[k, 8]], np.int32)) for k in (6, 7)]
    turn = transcript.add([1, 2], first)
    transcript.add([9], others[0], turn)
    transcript.add([9, 9], others[1], turn)
    transcript.add([1], Completion([], [], [], "stop"))
    samples = transcript.to_samples(0, 0, 0.0, {})
    assert [None if each.kept_ids is None else each.kept_ids.tolist() for each in samples] == [
        [[3, 5], [4, 4], [6, 8]],
        [[3, 5], [4, 4], [7, 8]],
        None,
    ]
    kept = FlatBatch.from_samples(samples).kept_ids
    assert kept is not None
    assert kept.dtype == torch.int32
    assert kept[:, 0].tolist() == [-1, -1, 3, 4, -1, 6, -1, -1, 3, 4, -1, -1, 7, -1]


async def test_the_greedy_baseline_asks_for_no_kept_ids() -> None:
    asked: list[bool] = []

    async def generate(token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        asked.append(sampling.keep_sampling_mask)
        return await echo(token_ids, sampling)

    sampling = SamplingParams(max_tokens=4, top_k=5, keep_sampling_mask=True)
    await EpisodeRunner(generate, accept, decode).run(PROMPT, 0, [5], sampling, greedy_baseline=True)
    assert asked == [True, False]


TAUGHT = replace(PROMPT, teacher_token_ids=[8, 9, 2])


async def score_nothing(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
    return Scored(0.0)


async def test_a_sample_carries_the_prompt_of_the_teacher() -> None:
    [sample] = await EpisodeRunner(echo, score_nothing, decode).run(TAUGHT, 0, [5], SamplingParams(max_tokens=4))
    assert sample.teacher_prompt is not None
    assert sample.teacher_prompt.tolist() == [8, 9, 2]
    [sample] = await EpisodeRunner(echo, score_nothing, decode).run(PROMPT, 0, [5], SamplingParams(max_tokens=4))
    assert sample.teacher_prompt is None


@pytest.mark.parametrize("context", [[90], []])
async def test_only_a_response_right_after_its_prompt_can_have_another_prompt(context: list[int]) -> None:
    async def episode(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
        transcript = Transcript()
        start = prompt.token_ids if context else [*prompt.token_ids, 4]
        first = transcript.add(start, await generate(start, sampling))
        if context:
            transcript.add(context, await generate([*first.get_tokens(), *context], sampling), first)
        return transcript

    with pytest.raises(ConfigError, match=r"use_own_chat_template: true supports only .*; set it to false"):
        await EpisodeRunner(echo, score_nothing, decode, episode).run(TAUGHT, 0, [5], SamplingParams(max_tokens=4))


def add_turn(transcript: Transcript, context: list[int], tokens: int, *, reward: float = 0.0, **fields: object) -> None:
    completion = Completion([5] * tokens, np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), "stop")
    turn = transcript.add(context, replace(completion, **fields), prompt_tokens=2)
    turn.reward = reward


async def test_branches_agree_in_everything_that_describes_their_episode() -> None:
    transcript = Transcript()
    add_turn(transcript, [1, 2], 3, finish_reason="length", engine=0)
    add_turn(transcript, [1, 2, 9, 9, 9], 1, engine=1)
    first, second = transcript.to_samples(4, 1, 0.5, {"turns": 2.0})
    for name in ("group", "index", "score", "metrics", "finish_reason", "engines", "branches", "episode_tokens"):
        assert getattr(first, name) == getattr(second, name), name
    assert (first.finish_reason, first.engines, first.episode_tokens) == ("length", {0, 1}, 4)


async def test_a_branch_is_credited_only_with_rewards_from_its_turn_on() -> None:
    transcript = Transcript()
    for tokens, reward in ((2, 1.0), (3, -0.5), (1, 0.25)):
        add_turn(transcript, [1, 2], tokens, reward=reward)
    samples = transcript.to_samples(0, 0, 0.75, {})
    # Position 0 is in the prompt: nothing that was generated there is credited.
    assert [sample.turn_rewards for sample in samples] == [
        ((3, 1.0 - 0.5 + 0.25),),
        ((0, 1.0), (4, -0.5 + 0.25)),
        ((0, 1.0 - 0.5), (2, 0.25)),
    ]


async def test_the_overlong_penalty_looks_at_the_longest_branch_and_counts_tokens_of_tools() -> None:
    async def two_branches(prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
        transcript = Transcript()
        add_turn(transcript, [1, 2, 9, 9, 9], 4)  # 7 tokens of the response, of which 4 are generated
        add_turn(transcript, [1, 2], 1)
        return transcript

    async def score(prompt: Prompt, transcript: Transcript, response: str) -> Scored:
        return Scored(1.0)

    runner = EpisodeRunner(echo, score, decode, two_branches)
    samples = await runner.run(PROMPT, 0, [5], SamplingParams(max_tokens=8), overlong=OverlongPenalty(4, 1.0, 8))
    assert [sample.score for sample in samples] == [0.25, 0.25]
