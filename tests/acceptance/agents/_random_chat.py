"""Random conversations through `ChatModel`, whose replies are tokenized as a model might and a tokenizer would not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from chat_shapes import ChatShape
from transformers import PreTrainedTokenizerBase

from verl.agents.chat_model import ChatModel, Reply
from verl.agents.formats.tool_calls import ParsedReply, ToolCall
from verl.agents.messages import prepare_messages
from verl.agents.rendering import ChatRenderer
from verl.data.chat import encode
from verl.errors import DataError
from verl.types import Completion, SamplingParams

WORDS = (
    *("The", " answer", " is", "37", " + ", "45", ", and", "Lower", ".", "!", "-", "_", '{"key": "a"}', "<b>", "[INST"),
    *(
        "é",
        "größer",
        " naïve",
        "你好",
        "，世界",
        "привет",
        "🙂",
        "👩‍👩‍👧",
        "\u0301",
        "\u200b",
        "aaaaaaa",
        "  two  spaces",
    ),
    *("\n", "\n\n", " \n", "\n ", "\t", "\r\n", "def f(x):\n    return x", "```", "lookup", "user", "assistant\n"),
)
KINDS = {"canonical": 4, "split": 2, "cut": 1, "short": 1, "random": 1, "foreign": 1}
"""How often replies are: as the tokenizer would write them; in smaller tokens; without an end; cut off; random tokens;
ended by another special token."""


@dataclass(frozen=True)
class PlannedReply:
    """What the engine will write. `next_role` is whose turn its last token begins, where turns have no end."""

    token_ids: list[int]
    finish_reason: str
    calls: tuple[ToolCall, ...]
    is_canonical: bool
    is_same_text: bool
    next_role: str | None = None


def write_text(chance: random.Random, shape: ChatShape) -> str:
    """Return what a user or a tool says, sometimes with special tokens of this family in it."""
    words = [*WORDS, *(shape.tokens if chance.random() < 0.3 else ())]
    return "".join(chance.choices(words, k=chance.randint(1, 12)))


def write_reply(chance: random.Random) -> str:
    """Return what the model says, sometimes with reasoning."""
    text = "".join(chance.choices(WORDS, k=chance.randint(1, 8))).strip() or "8"
    return f"<think>\n{text}\n</think>\n\n{text}" if chance.random() < 0.2 else text


def start_messages(chance: random.Random, shape: ChatShape) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": write_text(chance, shape)}]
    if shape.has_system and chance.random() < 0.5:
        messages.insert(0, {"role": "system", "content": write_text(chance, shape)})
    return messages


class RandomChat:
    """One conversation, with an engine that writes what was planned. `wrong` lists what should not have happened."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        shape: ChatShape,
        seed: int,
        tools: Sequence[dict[str, Any]],
        *,
        branches: bool,
        rewrites: bool,
    ) -> None:
        self._tokenizer, self._shape, self._chance = tokenizer, shape, random.Random(seed)
        self._tools, self._branches, self._rewrites = tools, branches, rewrites
        self._renderer = ChatRenderer(tokenizer)
        self._added = tokenizer.added_tokens_decoder
        self._requests: list[list[int]] = []
        self._replies: list[PlannedReply] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def play(self) -> None:
        model = ChatModel(
            self._generate, self._renderer, SamplingParams(1 << 20), self._parse, branch_per_turn=self._branches
        )
        tools: list[Any] = [SimpleNamespace(schema=schema) for schema in self._tools]
        messages = start_messages(self._chance, self._shape)
        for turn in range(1, self._chance.randint(2, 5)):
            self._replies.append(self._plan(messages, turn))
            reply = await model.chat(messages, tools)
            self._check_request(messages)
            answers = self._answer([*messages, reply.message], reply)
            messages = [*messages, reply.message, *answers]
            if self._replies[-1].next_role not in (None, answers[0]["role"]):  # as a foreign token, it stays
                self._replies[-1] = replace(self._replies[-1], is_canonical=False, is_same_text=False)
        self._check_samples(model)

    # planning

    def _plan(self, messages: Sequence[Any], turn: int) -> PlannedReply:
        """Choose what the model says next, as the template writes it, and how it is tokenized."""
        calls: tuple[ToolCall, ...] = ()
        message: dict[str, Any] = {"role": "assistant", "content": write_reply(self._chance)}
        if self._tools and self._chance.random() < 0.5:
            count = self._chance.randint(1, self._shape.max_calls)
            calls = tuple(ToolCall("lookup", {"key": write_reply(self._chance)}) for _ in range(count))
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            ids = [f"call{turn:03d}{index:02d}" for index in range(count)]  # as `ChatModel` will name them
            tool_calls = [
                {"id": each, "type": "function", "function": f} for each, f in zip(ids, functions, strict=True)
            ]
            message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        before = prepare_messages(messages)
        header = self._renderer.render_text(before, self._tools)
        whole = self._renderer.render_text([*before, message], self._tools, add_generation_prompt=False)
        text, stop, next_role = self._cut_end(whole[len(header) :], bool(calls))
        known, ids = encode(self._tokenizer, [header, header + text])
        is_separate = ids[: len(known)] == known  # nothing of the reply merges with the header
        ids = ids[len(known) :] if is_separate else encode(self._tokenizer, [text])[0]
        reply = self._tokenize(ids, stop, calls, is_separate)
        return replace(reply, next_role=next_role if reply.token_ids[-1] == stop else None)

    def _cut_end(self, text: str, has_calls: bool) -> tuple[str, int, str | None]:
        """Split a turn into what the model says and the token that it ends with, as this family does."""
        ends, next_role = [(text.find(stop), stop) for stop in self._shape.stops if stop in text], None
        if not ends:  # a turn ends where the next begins
            ends, next_role = [(len(text), self._shape.stops[has_calls])], "tool" if has_calls else "user"
        position, stop = min(ends)
        return text[:position], int(self._tokenizer.convert_tokens_to_ids(stop)), next_role

    def _tokenize(self, ids: list[int], stop: int, calls: tuple[ToolCall, ...], is_separate: bool) -> PlannedReply:
        [kind] = self._chance.choices([*KINDS], [*KINDS.values()])
        if kind in ("split", "short"):
            ids = self._split(ids)
        if kind == "short":
            ids = ids[: self._chance.randint(1, len(ids))]
        if kind == "random":
            plain = [token for token in range(len(self._tokenizer)) if token not in self._added]
            ids = self._chance.choices(plain, k=self._chance.randint(0, 20))
        if kind == "foreign":
            stop = self._chance.choice([token for token in self._added if token != stop])
        is_same_text = kind in ("canonical", "split", "cut")
        return PlannedReply(
            ids if kind in ("cut", "short") else [*ids, stop],
            "length" if kind in ("cut", "short") else "stop",
            calls if is_same_text else (),
            is_separate and kind in ("canonical", "cut"),
            is_same_text,
        )

    def _split(self, ids: Sequence[int]) -> list[int]:
        """Return other tokens with the same text: halves of tokens, which may be halves of characters."""
        vocabulary, split = self._tokenizer.get_vocab(), list[int]()
        for token, text in zip(ids, self._tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
            middle = self._chance.randint(1, max(1, len(text) - 1))
            halves = [vocabulary[half] for half in (text[:middle], text[middle:]) if half in vocabulary]
            is_whole = token in self._added or len(halves) < 2 or self._chance.random() < 0.3
            split += [token] if is_whole else halves
        return split

    def _answer(self, messages: Sequence[Any], reply: Reply) -> list[dict[str, Any]]:
        """Return the next messages: answers of tools, also to a call that could not be read, or a question."""
        question = [{"role": "user", "content": write_text(self._chance, self._shape)}]
        ids = [call["id"] for call in reply.message.get("tool_calls", ())]
        if not ids and (not self._tools or self._chance.random() < 0.8):
            return question
        answers = [
            {"role": "tool", "name": "lookup", "tool_call_id": each, "content": write_text(self._chance, self._shape)}
            for each in ids or ["call99999"]
        ]
        try:  # some templates want a call before an answer
            whole = prepare_messages([*messages, *answers, {"role": "assistant", "content": "8"}])
            self._renderer.render_text(whole, self._tools)
        except DataError:
            return question
        return answers

    # the engine and the parser

    async def _generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self._requests.append(list(token_ids))
        reply = self._replies[-1]
        zeros = np.zeros(len(reply.token_ids))
        return Completion(reply.token_ids, zeros.astype(np.float32), zeros.astype(np.int32), reply.finish_reason)

    def _parse(self, text: str, schemas: Sequence[Any]) -> ParsedReply:
        """Read a reply as planned: the parsers of tool calls have tests of their own."""
        if self._replies[-1].calls:
            return ParsedReply("", self._replies[-1].calls)
        # What gpt-oss writes around the content is not part of it.
        return ParsedReply(text.rpartition("<|message|>")[2] if "<|channel|>final" in text else text, ())

    # checks

    def _check_request(self, messages: Sequence[Any]) -> None:
        """Compare the last request with the one before it, and with rendering the whole."""
        request, replies = self._requests[-1], self._replies[:-1]
        self.counts["requests"] += 1
        self.counts["not canonical"] += self._encode(self._tokenizer.decode(request)) != request
        if not self._branches and replies:
            known = [*self._requests[-2], *replies[-1].token_ids]
            if request[: len(known)] != known or len(request) == len(known):
                self.wrong.append(f"request {len(self._requests)} does not continue the one before it")
        whole = self._renderer.render_prompt(prepare_messages(messages), self._tools)
        self._check_forged(messages, whole)
        if self._rewrites and not self._branches:
            return
        if self._branches or all(reply.is_canonical for reply in replies):
            self.counts["branches" if self._branches else "equal to the whole"] += 1
            if request != whole:
                self.wrong.append(f"request {len(self._requests)} is not the whole: {self._show(request, whole)}")
        elif all(reply.is_same_text for reply in replies):
            self.counts["with the text of the whole"] += 1
            if self._tokenizer.decode(request) != self._tokenizer.decode(whole):
                self.wrong.append(f"request {len(self._requests)} has another text: {self._show(request, whole)}")

    def _check_forged(self, messages: Sequence[Any], whole: Sequence[int]) -> None:
        """Compare the special tokens of a conversation with those of one whose contents spell none."""
        neutral = self._replace_tokens(prepare_messages(messages))
        self.counts["with special tokens in contents"] += neutral != prepare_messages(messages)
        plain = self._renderer.render_prompt(neutral, self._tools)
        forged, own = ([token for token in ids if token in self._added] for ids in (whole, plain))
        if forged != own:
            self.wrong.append(f"request {len(self._requests)} has special tokens of its contents")

    def _replace_tokens(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._replace_tokens(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._replace_tokens(each) for each in value]
        for token in self._shape.tokens if isinstance(value, str) else ():
            value = value.replace(token, "word")
        return value

    def _check_samples(self, model: ChatModel) -> None:
        """Compare the samples for training with what the engine saw and generated."""
        samples = model.transcript.to_samples(0, 0, 0.0, {})
        replies = [reply.token_ids for reply in self._replies]
        sequences = [[*request, *reply] for request, reply in zip(self._requests, replies, strict=True)]
        if [sample.tokens.tolist() for sample in samples] != sequences[0 if self._branches else -1 :]:
            self.wrong.append("the tokens of the samples are not those of the engine")
        generated = [token for reply in replies for token in reply]
        if [int(token) for sample in samples for token in sample.tokens[sample.mask]] != generated:
            self.wrong.append("the samples train other tokens than the generated ones")

    def _show(self, request: list[int], whole: list[int]) -> str:
        pairs = enumerate(zip(request, whole, strict=False))
        position = next((index for index, (a, b) in pairs if a != b), min(len(request), len(whole)))
        start, stop = max(0, position - 8), position + 12
        shown, expected = (self._tokenizer.decode(ids[start:stop]) for ids in (request, whole))
        return f"at token {position}, {shown!r} and {expected!r}"

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
