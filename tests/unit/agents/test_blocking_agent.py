"""A plain loop over turns, with a reward for each, an end test and the next message of the user, is an episode."""

from dataclasses import replace
from typing import Any

import pytest
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.agent_episode import AgentEpisode
from verl.agents.loops import format_conversation, generate_response
from verl.agents.transcript import Transcript
from verl.types import Prompt, SamplingParams

pytestmark = pytest.mark.unit

TOKENIZER = bpe_tokenizer()
PROMPT = Prompt(0, [1], "s", "7", {}, raw=[{"role": "user", "content": "Count to three."}])


def compute_turn_reward(conversation: list[dict[str, Any]]) -> float:
    return float(conversation[-1]["content"])


def should_end_episode(response: str) -> bool:
    return response == "3"


def get_next_user_message(conversation: list[dict[str, Any]]) -> str:
    return f"After {conversation[-1]['content']}?"


def rollout_episode(model, tokenizer, initial_prompt, max_turns=10):
    """Multi-turn episode rollout"""
    conversation = [{"role": "user", "content": initial_prompt}]
    rewards = []

    for _turn in range(max_turns):
        # Generate response
        prompt = format_conversation(conversation)
        response = generate_response(model, tokenizer, prompt)
        conversation.append({"role": "assistant", "content": response})

        # Compute reward for this turn
        reward = compute_turn_reward(conversation)
        rewards.append(reward)

        # Check if episode should end
        if should_end_episode(response):
            break

        # Generate next user message (environment step)
        next_user_msg = get_next_user_message(conversation)
        conversation.append({"role": "user", "content": next_user_msg})

    return conversation, rewards


def forgetful(model, tokenizer, initial_prompt):
    generate_response(model, tokenizer, [{"role": "user", "content": initial_prompt}])
    return [], []


async def play(name: str, *replies: str, prompt: Prompt = PROMPT, **settings: Any) -> Transcript:
    episode = AgentEpisode(agent_config(agent=f"{__file__}:{name}", **settings), TOKENIZER)
    return await episode(prompt, ListedReplies(TOKENIZER, *replies).generate, SamplingParams(max_tokens=500))


async def test_a_loop_is_an_episode_with_a_reward_for_each_turn() -> None:
    transcript = await play("rollout_episode", "1", "2", "3", "4")
    assert [turn.reward for turn in transcript.turns] == [1.0, 2.0, 3.0]
    assert transcript.messages is not None
    assert [message["content"] for message in transcript.messages][-2:] == ["After 2?", "3"]
    assert len(transcript.get_leaves()) == 1  # the model continued its own tokens
    assert (transcript.score, transcript.failure) == (0.0, None)


async def test_the_limit_of_turns_is_that_of_the_settings() -> None:
    assert len((await play("rollout_episode", "1", "2", "3", max_turns=2)).turns) == 2


async def test_rewards_must_belong_to_replies_and_the_prompt_must_be_one_message() -> None:
    transcript = await play("forgetful", "1", "1")
    assert transcript.failure is not None
    assert "0 rewards for 1 replies" in transcript.failure.message
    system = replace(PROMPT, raw=[{"role": "system", "content": "Count."}, *PROMPT.raw])
    refused = await play("rollout_episode", prompt=system)
    assert refused.failure is not None
    assert "the prompt has 2 messages" in refused.failure.message
