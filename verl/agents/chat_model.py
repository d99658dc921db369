"""The model as an agent sees it: messages in, a reply out. The exact tokens of every request are recorded."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agents.deterministic_batcher import Generate
from verl.agents.errors import EpisodeLimitError
from verl.agents.formats.tool_calls import InvalidCall, Parse, ParsedReply, ToolCall
from verl.agents.messages import Message, join_text, prepare_messages, read_json
from verl.agents.rendering import ChatRenderer
from verl.agents.tools.function_tools import Tool
from verl.agents.transcript import Transcript, Turn
from verl.data.lengths import count_characters, measure_size
from verl.types import Completion, SamplingParams

Schema = Mapping[str, Any]
LONG = 1 << 15  # a size that takes up to a tenth of a second to render and tokenize


class InvalidRequestError(ValueError):
    """The messages or tools of a request are invalid. Nothing was generated."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model. `message` is the turn as a message for the next request."""

    content: str
    calls: tuple[ToolCall | InvalidCall, ...]
    message: dict[str, Any]
    finish_reason: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class Branch:
    """A turn that requests may continue. Its first `prompt_tokens` tokens do not count as a response."""

    turn: Turn
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """The tokens of a request: `context` continues `parent`, or begins a branch."""

    key: str  # of the messages and schemas
    observation: int  # see `hash_observation`
    parent: Turn | None
    context: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A generated reply that is not part of the transcript yet."""

    request: Request
    schemas: Sequence[Schema]
    parses_calls: bool
    completion: Completion


class ChatModel:
    """Turns requests of one episode into turns of its transcript.

    A request whose messages continue an earlier reply continues the tokens of that reply. Any other request starts a
    branch; with `branch_per_turn` every request does. A reply is limited to the tokens that remain of the episode.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        parse: Parse | None,
        *,
        max_sequence_tokens: int = 1 << 30,
        max_turns: int | None = None,
        branch_per_turn: bool = False,
    ) -> None:
        self._generate, self._renderer, self._sampling, self._parse = generate, renderer, sampling, parse
        self._max_tokens, self._max_turns = max_sequence_tokens, max_turns
        self._branch_per_turn = branch_per_turn
        self._replies: dict[str, Branch] = {}  # key of the messages up to a reply -> the branch
        self._reply_keys: set[str] = set()  # without the messages before them
        self._requests = self._failed_requests = 0
        self._is_closed = False
        self._tokenizing = asyncio.Lock()
        self.loop = asyncio.get_running_loop()  # of the engines
        self.transcript = Transcript()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] = (),
        *,
        max_tokens: int | None = None,
    ) -> Reply:
        """Return the model's reply. `max_tokens` may shorten the reply; the run decides how tokens are sampled.

        Agents of the user call it from event loops of their own.
        """
        reply = self._chat(messages, tools, max_tokens)
        if asyncio.get_running_loop() is self.loop:
            return await reply
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reply, self.loop))

    async def _chat(self, messages: Sequence[Message], tools: Sequence[Tool | Schema], max_tokens: int | None) -> Reply:
        return self.record(await self.request(messages, tools, max_tokens=max_tokens))

    async def request(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Schema] = (),
        *,
        max_tokens: int | None = None,
        parse_calls: bool = True,
    ) -> Draft:
        """Generate a reply, which becomes part of the episode when it is recorded.

        Without `parse_calls` the prompt shows the tools, but tool calls in the reply stay text.
        """
        self._require_open()
        schemas = [each if isinstance(each, Mapping) else each.schema for each in tools]
        if schemas and parse_calls and self._parse is None:
            raise InvalidRequestError(
                "the chat template shows no known format of tool calls; set "
                "actor_rollout_ref.rollout.multi_turn.format to that of the model"
            )
        request = await self._tokenize(messages, schemas)
        known = [] if request.parent is None else request.parent.get_tokens()
        limit = self._count_remaining(len(known) + len(request.context), request.prompt_tokens)
        limit = limit if max_tokens is None else min(limit, max_tokens)
        completion = await self._complete([*known, *request.context], limit)
        return Draft(request, schemas, parse_calls, completion)

    def record(self, draft: Draft) -> Reply:
        """Make a draft the next turn of the transcript."""
        self._require_open()
        request, prompt_tokens = draft.request, draft.request.prompt_tokens
        turn = self.transcript.add(request.context, draft.completion, request.parent, prompt_tokens=prompt_tokens)
        turn.state = request.observation
        text = self._renderer.decode(turn.completion.token_ids, turn.completion.finish_reason)
        parsed = ParsedReply(text, ()) if self._parse is None else self._parse(text, draft.schemas)
        if parsed.calls and not (draft.schemas and draft.parses_calls):
            parsed = ParsedReply(text, ())
        message = write_message(text, parsed, len(self.transcript.turns))
        self._replies[_extend_key(request.key, message)] = Branch(turn, prompt_tokens)
        self._reply_keys.add(_write_key(message))
        return Reply(parsed.content, parsed.calls, message, turn.completion.finish_reason, turn)

    def close(self) -> None:
        """Refuse further requests: an agent may still run after its episode has ended."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EpisodeLimitError("the episode has ended")

    async def _tokenize(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> Request:
        """Refuse messages that are certainly too long, and tokenize long ones off the worker's event loop."""
        size = count_characters(messages) + count_characters(schemas)
        if size > self._max_tokens * self._renderer.longest_token:
            raise EpisodeLimitError(f"{size:,} characters have more than {self._max_tokens:,} tokens")
        async with self._tokenizing:  # in order: the seed of a reply follows from the number of its request
            try:
                if measure_size(messages) + measure_size(schemas) < LONG:
                    return self._continue(messages, schemas)
                return await asyncio.to_thread(self._continue, messages, schemas)
            except RecursionError:
                raise InvalidRequestError("the messages are nested too deeply") from None

    def _continue(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> Request:
        """Return the request that continues the last reply of this episode among the messages, or a new branch."""
        if not messages or messages[-1]["role"] == "assistant":
            raise InvalidRequestError("the last message must not come from the assistant")
        prepared, keys, seen = prepare_messages(messages), list_keys(messages, schemas), hash_observation(messages)
        if not self._branch_per_turn:
            for index in range(len(messages) - 1, 0, -1):
                if (branch := self._replies.get(keys[index - 1])) is not None:
                    ids = branch.turn.completion.token_ids
                    context = self._renderer.render_next(prepared[index:], ids[-1] if ids else None, schemas)
                    return Request(keys[-1], seen, branch.turn, context, branch.prompt_tokens)
        context = self._renderer.render_prompt(prepared, schemas)
        return Request(keys[-1], seen, None, context, self._count_prompt(messages, schemas, len(context)))

    def _count_prompt(self, messages: Sequence[Message], schemas: Sequence[Schema], tokens: int) -> int:
        """Return the number of prompt tokens of a new branch: the tokens before the first reply of this episode."""
        first = next((index for index, each in enumerate(messages) if _write_key(each) in self._reply_keys), 0)
        if not first:
            return tokens
        return min(tokens, len(self._renderer.render_prompt(prepare_messages(messages[:first]), schemas)))

    def _count_remaining(self, tokens: int, prompt_tokens: int) -> int:
        """Return the largest number of tokens of a reply to a request of `tokens` tokens."""
        if self._max_turns is not None and self._requests - self._failed_requests >= self._max_turns:
            raise EpisodeLimitError(f"{self._max_turns} turns of the model")
        remaining = min(self._sampling.max_tokens - (tokens - prompt_tokens), self._max_tokens - tokens)
        if remaining <= 0:
            raise EpisodeLimitError(f"all {self._sampling.max_tokens} tokens are used")
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
    """Return a reply as a message. Calls that cannot be parsed stay in the content."""
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
    """Return a key for each prefix of a conversation. Equivalent spellings of a message have equal keys."""
    keys, key = [], json.dumps(list(schemas), sort_keys=True, default=str)
    for message in messages:
        keys.append(key := _extend_key(key, message))
    return keys


def hash_observation(messages: Sequence[Message]) -> int:
    """Return a number for what the model has been told since its last reply; at first, for the prompt."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    news = messages[replies[-1] + 1 if replies else 0 :]
    return int(hashlib.sha256("\n".join(map(_write_key, news)).encode()).hexdigest()[:13], 16)


def _extend_key(key: str, message: Message) -> str:
    return hashlib.sha256(f"{key}\n{_write_key(message)}".encode()).hexdigest()


def _write_key(message: Message) -> str:
    """Return a message in canonical form: agents drop ids and outer whitespace, write arguments as text or objects, and
    None for empty content."""
    calls = [
        [each["function"]["name"], read_json(each["function"].get("arguments"))]
        for each in message.get("tool_calls") or ()
    ]
    content = join_text(message.get("content"))
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    return json.dumps({"role": message["role"], "content": content, "calls": calls}, sort_keys=True, default=str)
