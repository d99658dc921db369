"""The functions that a user brings to a run: rewards, an estimator, a tool, an environment and an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

import verl
from verl.agents.builtin_agents import Step


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    digits = score_digits(data_source, solution_str, ground_truth)
    return {"score": digits, "digits": digits, "short": float(len(solution_str) < 8)}


def score_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def score_length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return len(solution_str) / 100


def own_estimator(inputs: Any) -> Any:
    """Return advantages over the values of the critic, if there is one, and targets for it."""
    returns = inputs.per_token(inputs.scores)
    values = 0.0 if inputs.values is None else inputs.values
    return (returns - values) * inputs.mask, returns


@verl.tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Echo:
    """Answers twice, with a reward for digits in each turn."""

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self.left = 2
        return list(row["prompt"])

    async def step(self, reply: Any) -> Step:
        self.left -= 1
        reward = sum(character.isdigit() for character in reply.content) / 10
        return Step([{"role": "user", "content": "More."}], reward=reward, done=self.left < 0)


async def ask_twice_by_http(task: Any, base_url: str, api_key: str) -> None:
    """Ask twice without an SDK, and leave the score to the reward of the run."""
    await score_by_http(task, base_url, api_key)


async def score_by_http(task: Any, base_url: str, api_key: str) -> float:
    """Ask twice without an SDK; the digits of both replies are the score."""
    messages, digits = list(task.messages), 0
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=600) as client:
        for _ in range(2):
            reply = await client.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": messages})
            if reply.status_code == 400:  # the budget of the episode is used up
                break
            message = reply.raise_for_status().json()["choices"][0]["message"]
            digits += sum(character.isdigit() for character in message.get("content") or "")
            messages += [message, {"role": "user", "content": "More."}]
    return digits / 10
