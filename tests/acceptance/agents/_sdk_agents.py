"""The agents of show-gateway: one conversation with a tool, once against `model.chat`, and with the `openai` SDK."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, AuthenticationError

from verl.custom_functions import load_file

lookup = load_file(Path(__file__).with_name("_lookup_tool.py")).lookup  # workers import this file by its path
MAX_TURNS = 4
PATIENCE = httpx.Timeout(600)  # the SDK's own has 5 s to connect: too few where hundreds of clients share two cores
Ask = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


async def solve(ask: Ask, task: Any) -> float:
    """Ask until there is no call, answering calls of `lookup`; return whether the last reply is the secret."""
    row, messages = task.row, list(task.messages)
    for _ in range(MAX_TURNS):
        reply = await ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return float((reply.get("content") or "").strip() == row["ground_truth"])
        for call in reply["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer(call["function"], row)})
    return 0.0


def answer(function: dict[str, Any], row: dict[str, Any]) -> str:
    if function["name"] != "lookup":
        return f"Error: there is no tool '{function['name']}'; there are: lookup"
    key = json.loads(function["arguments"]).get("key")
    return row["ground_truth"] if key == row["extra_info"]["key"] else "Error: no such key"


async def direct(task: Any, model: Any) -> float:
    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return dict((await model.chat(messages, [lookup])).message)

    return await solve(ask, task)


async def plain(task: Any, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=PATIENCE) as client:
        return await solve(ask_plainly(client), task)


def ask_plainly(client: AsyncOpenAI) -> Ask:
    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        tools: Any = [lookup.schema]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0.1)  # type: ignore[arg-type]
        return reply.choices[0].message.model_dump(exclude_none=True)

    return ask


async def streamed(task: Any, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=PATIENCE) as client:

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            tools: Any = [lookup.schema]
            async with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:  # type: ignore[arg-type]
                message = (await stream.get_final_completion()).choices[0].message
            said = message.model_dump(exclude_none=True)
            for call in said.get("tool_calls") or ():
                call["function"].pop("parsed_arguments", None)
            return {key: value for key, value in said.items() if key != "parsed"}

        return await solve(ask, task)


class LosesReplies(httpx.AsyncBaseTransport):
    """Loses the reply to every second request after it has arrived, so that the SDK tries again."""

    def __init__(self) -> None:
        self._inner, self._requests = httpx.AsyncHTTPTransport(), 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._requests += 1
        response = await self._inner.handle_async_request(request)
        if self._requests % 2:
            await response.aread()
            raise httpx.ReadError("lost", request=request)
        return response


async def retried(task: Any, base_url: str, api_key: str) -> float:
    http = httpx.AsyncClient(transport=LosesReplies())
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, timeout=PATIENCE) as client:
        score = await solve(ask_plainly(client), task)
    async with AsyncOpenAI(base_url=base_url, api_key="wrong", max_retries=0, timeout=PATIENCE) as stranger:
        try:
            await stranger.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        except AuthenticationError:
            return score
    raise RuntimeError("a wrong key was accepted")
