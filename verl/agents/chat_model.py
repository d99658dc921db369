"""The model as an agent sees it: messages in, a reply out. Behind it, the exact tokens are recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agents.deterministic_batcher import Generate
from verl.agents.errors import EpisodeLimitError
from verl.agents.formats.tool_calls import InvalidCall, ParsedReply, ToolCall
from verl.agents.messages import Message, join_text, prepare_messages, read_json
from verl.agents.rendering import ChatRenderer
from verl.agents.tools.function_tools import Tool
from verl.agents.transcript import Transcript, Turn
from verl.types import Completion, SamplingParams

Schema = Mapping[str, Any]
Parse = Callable[[str, Sequence[Schema]], ParsedReply]
"""(text of a reply, schemas of the tools) -> what it says and which tools it calls."""


class InvalidRequestError(ValueError):
    """The model cannot be asked with these messages or tools. Nothing was generated."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model. `message` is what the next request has in its place."""

    content: str
    calls: tuple[ToolCall | InvalidCall, ...]
    message: dict[str, Any]
    finish_reason: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class Branch:
    """A turn that requests may continue. The first `prompt_tokens` of it do not count as a response."""

    turn: Turn
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """What the model has generated for a request, before it is part of the transcript."""

    messages: Sequence[Message]
    schemas: Sequence[Schema]
    parses_calls: bool
    parent: Turn | None
    context: list[int]
    prompt_tokens: int
    completion: Completion


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
        parse: Parse | None,
        *,
        tools: Sequence[Tool] = (),
        max_sequence_tokens: int = 1 << 30,
        max_turns: int | None = None,
        branch_per_turn: bool = False,
    ) -> None:
        self._generate, self._renderer, self._sampling, self._parse = generate, renderer, sampling, parse
        self._tools, self._branch_per_turn = tools, branch_per_turn
        self._max_tokens, self._max_turns = max_sequence_tokens, max_turns
        self._replies: dict[str, Branch] = {}  # by the messages up to each
        self._said: set[str] = set()  # the replies alone
        self._requests = self._failed_requests = 0
        self._is_closed = False
        self.transcript = Transcript()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Reply:
        """Return the model's reply. `max_tokens` may shorten it; how tokens are sampled is up to the run."""
        return self.record(await self.request(messages, tools, max_tokens=max_tokens))

    async def request(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] | None = None,
        *,
        max_tokens: int | None = None,
        parse_calls: bool = True,
    ) -> Draft:
        """Generate a reply that is not part of the episode until it is recorded.

        Without `parse_calls` the model knows the tools, but its reply is text.
        """
        self._require_open()
        schemas = [
            each if isinstance(each, Mapping) else each.schema for each in (self._tools if tools is None else tools)
        ]
        if schemas and parse_calls and self._parse is None:
            raise InvalidRequestError(
                "the chat template shows no known format of tool calls; set "
                "actor_rollout_ref.rollout.multi_turn.format to that of the model"
            )
        parent, context, prompt_tokens = self._continue(messages, schemas)
        known = [] if parent is None else parent.get_tokens()
        limit = self._count_remaining(len(known) + len(context), prompt_tokens)
        limit = limit if max_tokens is None else min(limit, max_tokens)
        completion = await self._complete([*known, *context], limit)
        return Draft(list(messages), schemas, parse_calls, parent, context, prompt_tokens, completion)

    def record(self, draft: Draft) -> Reply:
        """Make a draft the next turn of the transcript."""
        self._require_open()
        turn = self.transcript.add(draft.context, draft.completion, draft.parent)
        text = self._renderer.decode(turn.completion.token_ids, turn.completion.finish_reason)
        parsed = ParsedReply(text, ()) if self._parse is None else self._parse(text, draft.schemas)
        if parsed.calls and not (draft.schemas and draft.parses_calls):
            parsed = ParsedReply(text, ())
        message = write_message(text, parsed, len(self.transcript.turns))
        self._replies[list_keys([*draft.messages, message], draft.schemas)[-1]] = Branch(turn, draft.prompt_tokens)
        self._said.add(_write_key(message))
        return Reply(parsed.content, parsed.calls, message, turn.completion.finish_reason, turn)

    def close(self) -> None:
        """Take no further request, also of an agent that does not know that its episode has ended."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EpisodeLimitError("the episode has ended")

    def _continue(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> tuple[Turn | None, list[int], int]:
        """Return the reply that the messages continue, if any, the tokens that are new, and those of the prompt."""
        if not messages or messages[-1]["role"] == "assistant":
            raise InvalidRequestError("the last message has to be for the model, not by it")
        prepared = prepare_messages(messages)
        if not self._branch_per_turn:
            keys = list_keys(messages, schemas)
            for index in range(len(messages) - 1, 0, -1):
                if (branch := self._replies.get(keys[index - 1])) is not None:
                    ids = branch.turn.completion.token_ids
                    context = self._renderer.render_next(prepared[index:], ids[-1] if ids else None, schemas)
                    return branch.turn, context, branch.prompt_tokens
        context = self._renderer.render_prompt(prepared, schemas)
        return None, context, self._count_prompt(messages, schemas, len(context))

    def _count_prompt(self, messages: Sequence[Message], schemas: Sequence[Schema], tokens: int) -> int:
        """Return how many tokens of a new branch are its prompt: those before the first reply of this episode in it."""
        first = next((index for index, each in enumerate(messages) if _write_key(each) in self._said), 0)
        if not first:
            return tokens
        return min(tokens, len(self._renderer.render_prompt(prepare_messages(messages[:first]), schemas)))

    def _count_remaining(self, tokens: int, prompt_tokens: int) -> int:
        """Return how many tokens a reply to a request of `tokens` may have."""
        if self._max_turns is not None and self._requests - self._failed_requests >= self._max_turns:
            raise EpisodeLimitError(f"{self._max_turns} turns of the model")
        remaining = min(self._sampling.max_tokens - (tokens - prompt_tokens), self._max_tokens - tokens)
        if remaining <= 0:
            raise EpisodeLimitError(f"no token of {self._sampling.max_tokens} is left for a reply")
        return remaining

    async def _complete(self, token_ids: list[int], limit: int) -> Completion:
        sampling = replace(self._sampling, max_tokens=limit)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + self._requests) % 2**32)
        self._requests += 1
        try:
            return await self._generate(token_ids, sampling)
        except BaseException:
            self._failed_requests += 1  # not a turn of the model
            raise


def write_message(text: str, parsed: ParsedReply, turn: int) -> dict[str, Any]:
    """Return a reply as a message. Calls that cannot be read stay in its content."""
    valid = [call for call in parsed.calls if isinstance(call, ToolCall)]
    unreadable = [call.text for call in parsed.calls if isinstance(call, InvalidCall)]
    if not valid:
        return {"role": "assistant", "content": text if unreadable else parsed.content}
    calls = [
        {
            "id": f"call{turn:03d}{index:02d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(valid)
    ]
    return {"role": "assistant", "content": "\n".join([parsed.content, *unreadable]).strip(), "tool_calls": calls}


def list_keys(messages: Sequence[Message], schemas: Sequence[Schema]) -> list[str]:
    """Return a key for each prefix of a conversation, equal for what an agent may write differently."""
    keys, key = [], json.dumps(list(schemas), sort_keys=True, default=str)
    for message in messages:
        key = hashlib.sha256(f"{key}\n{_write_key(message)}".encode()).hexdigest()
        keys.append(key)
    return keys


def _write_key(message: Message) -> str:
    """Return what a message says: agents drop ids and outer spaces, write arguments as text or objects, and None for no
    content."""
    calls = [
        [each["function"]["name"], read_json(each["function"].get("arguments"))]
        for each in message.get("tool_calls") or ()
    ]
    content = join_text(message.get("content"))
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    said = {"role": message["role"], "content": content, "calls": calls}
    return json.dumps(said, sort_keys=True, default=str)
