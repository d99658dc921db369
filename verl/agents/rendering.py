"""Chat messages as token ids that continue exactly what the model has generated.

Tokenizing a whole conversation again gives different ids wherever the model used a non-canonical tokenization. So only
the first prompt is rendered as a whole. After each reply, only the new messages are rendered: as the text that follows
the reply in a synthetic conversation. `find_drift` compares the result with rendering the whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from verl.agents.messages import Message
from verl.data.chat import encode, render
from verl.data.lengths import get_longest_token
from verl.data.special_tokens import get_special_text
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]

_QUESTION = "question"
_REPLY = "SyntheticReply"  # appears nowhere else before the reply; letters do not merge with what follows them
_SETTING = "actor_rollout_ref.rollout.multi_turn"


class ChatRenderer:
    """Renders the first prompt of a conversation, and then the messages that follow each reply of the model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._added |= zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._marks: dict[str, int | None] = {}
        whole = self.render_text([_ask(), {"role": "assistant", "content": _REPLY}], add_generation_prompt=False)
        self._end = whole.partition(_REPLY)[2]  # end of the last turn; templates may end other turns differently

    @property
    def longest_token(self) -> int:
        """The number of characters of the tokenizer's longest token."""
        return get_longest_token(self._tokenizer)

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return a whole conversation, ending with the header of the model's reply."""
        return encode(self._tokenizer, [self.render_text(messages, tools)])[0]

    def render_next(self, messages: Sequence[Message], last_id: int | None, tools: Tools = ()) -> list[int]:
        """Return what follows a reply that ended with `last_id`: the end of its turn, new messages, the next header.

        If `last_id` is the token with which the template ends the turn, or starts the next where turns have no end, it
        is not repeated. After any other, which a limit of tokens or another stop token left there, the end is complete.
        """
        ids = self._encode_after(_REPLY, self._extend(messages, tools))
        if last_id is None or last_id != self._find_mark(messages[0]):
            return ids
        return ids[ids.index(last_id) + 1 :]

    def render_reply(self, conversation: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the last message as the model would generate it, up to the token that ends its turn."""
        header = self.render_text(conversation[:-1], tools)
        whole = self.render_text(conversation, tools, add_generation_prompt=False)
        if whole.startswith(header):
            text, end = self._split_end(whole[len(header) :])
        else:
            content = str(conversation[-1].get("content") or "")
            text, end = get_special_text(self._tokenizer).mark(content), self._end
        ids = self._encode_after(_REPLY, end)
        count = next((index + 1 for index, token in enumerate(ids) if token in self._added), 0)
        return self._encode_after(header, text) + ids[:count]

    def decode(self, token_ids: Sequence[int], finish_reason: str = "stop") -> str:
        """Return the text of a reply with its special tokens, except for the token that ended the reply."""
        ids = list(token_ids)
        if finish_reason == "stop" and ids and ids[-1] in self._added:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_text(self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, in which special tokens that contents spell are marked.

        Most templates expect arguments of calls as objects, a few as text.
        """
        kwargs = {**self._kwargs, "add_generation_prompt": add_generation_prompt}
        if tools:
            kwargs["tools"] = [dict(tool) for tool in tools]
        try:
            return render(self._tokenizer, messages, kwargs)
        except DataError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return render(self._tokenizer, [_write_arguments(each) for each in messages], kwargs)

    def _extend(self, messages: Sequence[Message], tools: Tools) -> str:
        """Return what follows a reply in the synthetic conversation.

        Tool messages answer a reply with calls. Templates may accept at most one call, or ignore calls.
        """
        answers = list(takewhile(lambda message: message.get("role") == "tool", messages))
        calls = [_make_call(answer, index) for index, answer in enumerate(answers)]
        if calls:
            calls[-1]["function"]["arguments"] = {"key": _REPLY}
        problem: DataError | None = None
        for attempt in (calls, calls[-1:], []) if len(calls) > 1 else (calls, []) if calls else ([],):
            try:
                if (text := self._follow(attempt, messages, tools)) is not None:
                    return text
            except DataError as error:
                problem = problem or error
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise problem or DataError(
            f"the chat template of {self._tokenizer.name_or_path or 'the tokenizer'} does not show a reply when "
            f"messages follow it (roles: {roles}), so that they cannot be appended to what the model has generated"
        )

    def _follow(self, calls: Sequence[Mapping[str, Any]], messages: Sequence[Message], tools: Tools) -> str | None:
        """Return the text after a reply with these calls; None if the template does not show where the reply ends."""
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        if calls:
            reply |= {"content": "", "tool_calls": calls}
        _, shown, after = self.render_text([_ask(), reply, *messages], tools).partition(_REPLY)
        if not calls:
            return after if shown else None
        alone = self.render_text([_ask(), reply], tools, add_generation_prompt=False).partition(_REPLY)[2]
        rest, _ = self._split_end(alone)  # the text that closes the last call
        return after[len(rest) :] if shown and after.startswith(rest) else None

    def _split_end(self, text: str) -> tuple[str, str]:
        """Split the text of a conversation's last turn into its content and its end."""
        if text.endswith(self._end):
            start = len(text) - len(self._end)
        else:  # a turn with calls may end with a token of its own
            start = max((text.rfind(token) for token in self._added.values()), default=-1)
        return (text[:start], text[start:]) if start >= 0 else (text, "")

    def _find_mark(self, message: Message) -> int | None:
        """Return the first special token between a reply and the content of such a message; None without one."""
        role = str(message.get("role"))
        if role not in self._marks:
            before = self._extend([{**message, "content": _QUESTION}], ()).partition(_QUESTION)[0]
            ids = self._encode_after(_REPLY, before)
            self._marks[role] = next((token for token in ids if token in self._added), None)
        return self._marks[role]

    def _encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` where it follows `before`: some tokenizers put a space before a first word."""
        known, ids = encode(self._tokenizer, [before, before + text])
        if ids[: len(known)] == known:
            return ids[len(known) :]
        return encode(self._tokenizer, [text])[0]


def _ask() -> dict[str, Any]:
    return {"role": "user", "content": _QUESTION}


def _make_call(answer: Message, index: int) -> dict[str, Any]:
    """Return the call that a tool message answers; some templates refuse a tool message without a call."""
    function = {"name": str(answer.get("name") or "tool"), "arguments": {}}
    return {"type": "function", "id": str(answer.get("tool_call_id") or f"call{index:05d}"), "function": function}


def _write_arguments(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
    for call in calls:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else dict(message)


def find_drift(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Message],
    tools: Tools = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """Return where appending to a conversation first differs from rendering the whole of it; None without a difference.

    Replies of the model are taken as their canonical tokenization. The conversation ends with messages for the model.
    """
    renderer = ChatRenderer(tokenizer, template_kwargs)
    starts = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    ids = renderer.render_prompt(conversation[: starts[0]], tools)
    for turn, (start, end) in enumerate(pairwise([*starts, len(conversation)]), 1):
        reply = renderer.render_reply(conversation[: start + 1], tools)
        new = renderer.render_next(conversation[start + 1 : end], reply[-1] if reply else None, tools)
        ids = [*ids, *reply, *new]
        whole = renderer.render_prompt(conversation[:end], tools)
        if ids != whole:
            pairs = enumerate(zip(ids, whole, strict=False))
            position = next((index for index, (a, b) in pairs if a != b), min(len(ids), len(whole)))
            appended, rendered = (_show(tokenizer, each, position) for each in (ids, whole))
            replies = "1 reply" if turn == 1 else f"{turn} replies"
            return f"at token {position}, after {replies}: {appended} where the whole conversation has {rendered}"
    return None


def _show(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], position: int) -> str:
    if position >= len(ids):
        return "nothing"
    return f"{tokenizer.decode([ids[position]])!r} ({ids[position]})"


_CALL = {"type": "function", "id": "call00000", "function": {"name": "lookup", "arguments": {"key": "a"}}}
_OTHER_CALL = {**_CALL, "id": "call00001"}
_ANSWER = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "Seven."}
_OTHER_ANSWER = {**_ANSWER, "tool_call_id": "call00001"}
SCRIPTS: dict[str, list[Message]] = {
    "a second question": [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "Lower."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Higher."},
    ],
    "reasoning": [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "<think>\nHalf of it.\n</think>\n\n8"},
        {"role": "user", "content": "Lower."},
    ],
}
"""Conversations with which a chat template is checked at the start of a run."""

TOOL_SCRIPTS: dict[str, list[Message]] = {
    "a tool call": [
        {"role": "user", "content": "What is a?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        _ANSWER,
    ],
    "two tool calls": [
        {"role": "user", "content": "What are a and a?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL, _OTHER_CALL]},
        _ANSWER,
        _OTHER_ANSWER,
    ],
    "two turns of tool calls": [
        {"role": "user", "content": "What is the value of a?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        _ANSWER,
        {"role": "assistant", "content": "", "tool_calls": [_OTHER_CALL]},
        _OTHER_ANSWER,
    ],
}
"""The same for runs with tools. Templates need not accept two calls in one turn."""


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = (),
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    branches: bool = False,
    only_tools: bool = False,
) -> None:
    """Raise a `ConfigError` if a conversation with this chat template cannot be continued exactly.

    With `branches` every turn starts from the whole conversation, so a template may rewrite earlier turns. With
    `only_tools` a reply is followed by results of tools and by no message of a user, at which some templates drop
    earlier reasoning.
    """
    model = tokenizer.name_or_path or "the tokenizer"
    scripts = (TOOL_SCRIPTS if tools else {}) | ({} if only_tools else SCRIPTS)
    for name, script in scripts.items():
        try:
            text = ChatRenderer(tokenizer, template_kwargs).render_text(script, tools)
        except DataError as error:
            if name == "two tool calls":
                continue
            raise ConfigError([f"{_SETTING}.enable: {error}"]) from error
        if script[-1]["content"] not in text:
            role = script[-1]["role"]
            raise ConfigError([f"{_SETTING}.enable: the chat template of {model} drops messages of role {role}"])
        drift = None if branches else find_drift(tokenizer, script, tools, template_kwargs)
        if drift is not None:
            raise ConfigError(
                [
                    f"{_SETTING}.enable: the chat template of {model} rewrites earlier turns ({name}: {drift}), so "
                    f"that the model would be trained on other tokens than it saw. "
                    f"Set {_SETTING}.use_inference_chat_template=true to train each turn as a branch of its own, or "
                    f"{_SETTING}.tokenization_sanity_check_mode=disable to append new messages to what it saw"
                ]
            )
