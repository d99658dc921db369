"""The model as an agent sees it: messages in, a reply out. Behind it, the exact tokens are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agents.deterministic_batcher import Generate
from verl.agents.errors import EpisodeLimitError
from verl.agents.rendering import ChatRenderer
from verl.agents.tool_calls import InvalidCall, ParsedReply, ToolCall
from verl.agents.tools import Tool
from verl.agents.transcript import Transcript, Turn
from verl.types import Completion, SamplingParams

Message = Mapping[str, Any]
Parse = Callable[[str, Sequence[Mapping[str, Any]]], ParsedReply]
"""(text of a reply, schemas of the tools) -> what it says and which tools it calls."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model. `message` is what the next request has in its place."""

    content: str
    calls: tuple[ToolCall | InvalidCall, ...]
    message: dict[str, Any]
    finish_reason: str
    turn: Turn


class ChatModel:
    """Turns requests of one episode into turns of its transcript.

    A request whose messages continue an earlier reply continues its tokens. Any other request starts a branch, as every
    request does with `branch_per_turn`. The tokens that remain of the episode are the limit of each reply.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        parse: Parse,
        *,
        tools: Sequence[Tool] = (),
        max_sequence_tokens: int = 1 << 30,
        max_turns: int | None = None,
        branch_per_turn: bool = False,
    ) -> None:
        self._generate, self._renderer, self._sampling, self._parse = generate, renderer, sampling, parse
        self._tools, self._branch_per_turn = tools, branch_per_turn
        self._max_tokens, self._max_turns = max_sequence_tokens, max_turns
        self._replies: dict[str, Turn] = {}  # by the messages up to each
        self._requests = 0
        self._is_closed = False
        self.transcript = Transcript()

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, max_tokens: int | None = None
    ) -> Reply:
        """Return the model's reply. `max_tokens` may shorten it; how tokens are sampled is up to the run."""
        if self._is_closed:
            raise EpisodeLimitError("the episode has ended")
        schemas = [tool.schema for tool in (self._tools if tools is None else tools)]
        parent, context = self._continue(messages, schemas)
        known = [] if parent is None else parent.get_tokens()
        limit = self._count_remaining(len(known) + len(context), context)
        turn = await self._request(known, context, parent, limit if max_tokens is None else min(limit, max_tokens))
        return self._read(turn, messages, schemas)

    def close(self) -> None:
        """Take no further request, also of an agent that does not know that its episode has ended."""
        self._is_closed = True

    def _continue(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[Turn | None, list[int]]:
        """Return the reply that the messages continue, if any, and the tokens that are new."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("the last message has to be for the model, not by it")
        if not self._branch_per_turn:
            keys = list_keys(messages, schemas)
            for index in range(len(messages) - 1, 0, -1):
                if (turn := self._replies.get(keys[index - 1])) is not None:
                    last = turn.completion.token_ids[-1] if turn.completion.token_ids else None
                    return turn, self._renderer.render_next(messages[index:], last)
        return None, self._renderer.render_prompt(messages, schemas)

    def _count_remaining(self, tokens: int, context: Sequence[int]) -> int:
        """Return how many tokens a reply to a request of `tokens` may have."""
        turns = self.transcript.turns
        if self._max_turns is not None and self._requests >= self._max_turns:
            raise EpisodeLimitError(f"{self._max_turns} turns of the model")
        prompt = len(turns[0].context) if turns else len(context)
        remaining = min(self._sampling.max_tokens - (tokens - prompt), self._max_tokens - tokens)
        if remaining <= 0:
            raise EpisodeLimitError(f"no token of {self._sampling.max_tokens} is left for a reply")
        return remaining

    async def _request(self, known: list[int], context: list[int], parent: Turn | None, limit: int) -> Turn:
        sampling = replace(self._sampling, max_tokens=limit)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + self._requests) % 2**32)
        self._requests += 1
        completion: Completion = await self._generate([*known, *context], sampling)
        if self._is_closed:
            raise EpisodeLimitError("the episode has ended")
        return self.transcript.add(context, completion, parent)

    def _read(self, turn: Turn, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> Reply:
        parsed = self._parse(self._renderer.decode(turn.completion.token_ids), schemas)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        valid = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if valid:
            number = len(self.transcript.turns)
            message["tool_calls"] = [
                {
                    "id": f"call{number:03d}{index:02d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for index, call in enumerate(valid)
            ]
        self._replies[list_keys([*messages, message], schemas)[-1]] = turn
        return Reply(parsed.content, parsed.calls, message, turn.completion.finish_reason, turn)


def list_keys(messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a key for each prefix of a conversation, equal for what an agent may write differently."""
    keys, key = [], json.dumps(list(schemas), sort_keys=True, default=str)
    for message in messages:
        said = json.dumps(_normalize(message), sort_keys=True, default=str)
        key = hashlib.sha256(f"{key}\n{said}".encode()).hexdigest()
        keys.append(key)
    return keys


def _normalize(message: Message) -> dict[str, Any]:
    """Return what a message says: agents drop ids, write arguments as text or objects, and None for no content."""
    calls = [
        [each["function"]["name"], _read_json(each["function"].get("arguments"))]
        for each in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": _join_text(message.get("content")), "calls": calls}


def _join_text(content: Any) -> Any:
    """Return content as text; OpenAI's SDKs also send lists of parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content or ""


def _read_json(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
