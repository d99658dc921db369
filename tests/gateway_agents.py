"""Episodes of agents that ask the gateway, and the parts that their tests share."""

from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from scripted_model import ScriptedModel, play_episode

from verl.agents.builtin_agents import Task
from verl.agents.transcript import Transcript
from verl.types import Prompt, SamplingParams

SAMPLING = SamplingParams(max_tokens=400, temperature=0.7, top_p=0.9, seed=5)
QUESTION = {"role": "user", "content": "What is the answer of a?"}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Return a value.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def count_turns(prompt: str) -> str:
    return f"the answer {prompt.count('<|im_start|>assistant')}"


async def play(
    agent: Callable[..., Any], model: ScriptedModel, sampling: SamplingParams = SAMPLING, **settings: Any
) -> Transcript:
    prompt = Prompt(row=0, token_ids=[1], raw=[QUESTION], ground_truth="2", extra_info={"a": "7"})
    return await play_episode(agent, model, sampling, prompt, **settings)


def open_client(base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


async def ask_once(task: Task, base_url: str, api_key: str) -> float:
    async with open_client(base_url, api_key) as client:
        await client.chat.completions.create(model="any", messages=task.messages)
    return 1.0
