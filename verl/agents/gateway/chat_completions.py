"""Reads requests in the format of OpenAI's chat completions, and writes completions, chunks and errors.

The run decides how tokens are sampled: `temperature`, `top_p`, `seed`, `logit_bias`, `response_format`, a forced
`tool_choice` and the like have no effect, since the log-probs of training would be those of another distribution.
`stop` has no effect either: engines stop at token ids only, and generated tokens are never cut.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.agents.chat_model import Reply

MODEL = "policy"  # the name of the model unless a request names another


class RequestError(Exception):
    """An error response: an HTTP status and an error code of OpenAI.

    The SDKs of OpenAI retry requests that failed with status 408, 409, 429 or 5xx, and no others.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def to_body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The parts of a request that have an effect."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    model: str = MODEL
    max_tokens: int | None = None
    parses_calls: bool = True
    is_streamed: bool = False
    includes_usage: bool = False


def read_request(body: Any) -> ChatRequest:
    """Parse the JSON body of a request, or raise `RequestError`."""
    if not isinstance(body, dict):
        raise _refuse("the body has to be a JSON object")
    if body.get("n") not in (None, 1):
        raise _refuse("n has to be 1; send as many requests as you need replies")
    if body.get("functions"):
        raise _refuse("functions are not supported; send them as tools")
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=_read_messages(body.get("messages")),
        tools=_read_tools(body.get("tools") or []),
        model=str(body.get("model") or MODEL),
        max_tokens=_read_max_tokens(body),
        parses_calls=body.get("tool_choice") != "none",
        is_streamed=bool(body.get("stream")),
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _refuse("messages has to be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refuse("each message has to be an object with a role")
        for call in message.get("tool_calls") or ():
            if not isinstance(call, dict) or not _has_name(call.get("function")):
                raise _refuse("each of tool_calls has to have a function with a name")
    return messages


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    for tool in tools if isinstance(tools, list) else [tools]:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not _has_name(tool.get("function")):
            raise _refuse('tools has to be a list of {"type": "function", "function": {"name": ...}}')
    return tools


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_max_tokens(body: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise _refuse(f"{name} has to be a whole number of at least 1")
    return value


def _refuse(message: str) -> RequestError:
    return RequestError(400, "invalid_request", message)


def write_completion(reply: Reply, model: str, name: str) -> dict[str, Any]:
    """Return a reply as a completion with a `name` of its own."""
    message = {"role": "assistant", "content": reply.message["content"], "refusal": None}
    finish_reason = reply.finish_reason
    if calls := reply.message.get("tool_calls"):
        message |= {"content": reply.message["content"] or None, "tool_calls": calls}
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    generated = len(reply.turn.completion.token_ids)
    total = len(reply.turn.get_tokens())
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {"prompt_tokens": total - generated, "completion_tokens": generated, "total_tokens": total},
    }


def write_events(completion: Mapping[str, Any], *, includes_usage: bool) -> str:
    """Return a completion as server-sent events: the whole message, its end and, on request, the usage."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(delta["tool_calls"])]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}]}
        for part, reason in ((delta, None), ({}, choice["finish_reason"]))  # in one, the SDK misses the end of a call
    ]
    if includes_usage:
        chunks.append({"choices": [], "usage": completion["usage"]})
    common = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    return "".join(f"data: {json.dumps(common | chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
