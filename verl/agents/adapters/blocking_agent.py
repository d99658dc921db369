"""Agents that are written as a plain loop, without `async`: `loop(model, tokenizer, initial_prompt, max_turns)`.

    from verl.agents.loops import format_conversation, generate_response

    def rollout_episode(model, tokenizer, initial_prompt, max_turns=10):
        conversation, rewards = [{"role": "user", "content": initial_prompt}], []
        for _ in range(max_turns):
            response = generate_response(model, tokenizer, format_conversation(conversation))
            ...
        return conversation, rewards

The loop returns the conversation and one reward for each reply of the model, and runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agents.builtin_agents import Agent, Task
from verl.agents.chat_model import ChatModel, Reply
from verl.agents.user_code import UserCode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BlockingModel:
    """The model of an episode, for code without `async`."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> Reply:
        request = self._model.chat(messages, max_tokens=max_tokens)
        return asyncio.run_coroutine_threadsafe(request, self._model.loop).result()


def format_conversation(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages themselves as the prompt, so that the next reply continues the generated tokens exactly."""
    return list(conversation)


def generate_response(
    model: BlockingModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of the model's reply."""
    return model.chat(prompt).content


def adapt_loop(agent: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, max_turns: int | None) -> Agent | None:
    """Return a loop as an agent; None if the signature does not match."""
    names = list(inspect.signature(agent).parameters)
    if names[:2] != ["model", "tokenizer"]:
        return None
    limits = {"max_turns": max_turns} if max_turns is not None and "max_turns" in names else {}

    async def play(task: Task, model: ChatModel) -> float:
        prompt = read_question(task)

        def run_loop() -> tuple[list[dict[str, Any]], list[float]]:
            conversation, rewards = agent(BlockingModel(model), tokenizer, prompt, **limits)
            return [dict(message) for message in conversation], [float(reward) for reward in rewards]

        async with UserCode(agent) as code:
            model.transcript.messages, rewards = await code.run(run_loop)
        turns = model.transcript.turns
        if len(rewards) != len(turns):
            raise ValueError(f"the loop returned {len(rewards)} rewards for {len(turns)} replies of the model")
        for turn, reward in zip(turns, rewards, strict=True):
            turn.reward += reward
        return 0.0

    play.__name__ = getattr(agent, "__name__", "loop")
    return play


def read_question(task: Task) -> str:
    """Return the text of the prompt, which must be a single message: the loop builds the conversation."""
    if len(task.messages) != 1:
        raise ValueError(f"the prompt has {len(task.messages)} messages; a loop takes one, as `initial_prompt`")
    return str(task.messages[0]["content"])
