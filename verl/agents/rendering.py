"""Chat messages as token ids that continue exactly what the model has generated.

Tokenizing a whole conversation again gives other ids than the model saw wherever it generated a text in an unusual way.
So a conversation is rendered once, and from then on only what is new: the difference that the new messages make to a
synthetic conversation with the same chat template. `find_drift` compares this with rendering the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.chat import encode, encode_prompts, render
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_QUESTION = {"role": "user", "content": "question"}
_REPLY = "reply"  # what the synthetic assistant says: templates strip spaces, and quote nothing in it
_SETTING = "actor_rollout_ref.rollout.multi_turn"


class ChatRenderer:
    """Renders the first prompt of a conversation, and then what follows each reply of the model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})
        whole = self._render([_QUESTION, {"role": "assistant", "content": _REPLY}], add_generation_prompt=False)
        self._tail = whole[whole.rindex(_REPLY) + len(_REPLY) :]  # ends a turn of the model
        self._tail_ids = self._encode(self._tail)

    def render_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return a whole conversation, ending with the header of the model's reply."""
        return encode_prompts(self._tokenizer, [list(messages)], self._with_tools(tools))[0]

    def render_next(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Return what follows a reply that ended with `last_id`: the end of its turn, new messages, the next header.

        What the model has already written of the end of its turn is not repeated.
        """
        ids = self._encode(self._tail + self._extend(messages))
        if last_id in self._tail_ids:
            return ids[ids.index(last_id) + 1 :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a reply with the special tokens in it, but not the one that ends the turn."""
        ids = list(token_ids)
        if (ids and ids[-1] in self._tail_ids) or ids[-1:] == [self._tokenizer.eos_token_id]:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _extend(self, messages: Sequence[Message]) -> str:
        """Return what new messages add to the synthetic conversation, with the header of the next reply."""
        reply: dict[str, Any] = {"role": "assistant", "content": _REPLY}
        if answered := [message for message in messages if message.get("role") == "tool"]:
            reply["tool_calls"] = [_name_call(message, index) for index, message in enumerate(answered)]
        before = self._render([_QUESTION, reply], add_generation_prompt=False)
        after = self._render([_QUESTION, reply, *messages], add_generation_prompt=True)
        if after.startswith(before):
            return after[len(before) :]
        if not answered:  # a template may end the last turn differently from others
            start = after.find(_REPLY + self._tail)
            if start >= 0:
                return after[start + len(_REPLY + self._tail) :]
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(
            f"the chat template of {self._tokenizer.name_or_path or 'the tokenizer'} changes a reply when messages "
            f"follow it (roles: {roles}), so that they cannot be appended to what the model has generated"
        )

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        kwargs = {**self._kwargs, "add_generation_prompt": add_generation_prompt}
        return render(self._tokenizer, [dict(message) for message in messages], kwargs)

    def _with_tools(self, tools: Tools) -> dict[str, Any]:
        return {**self._kwargs, "tools": [dict(tool) for tool in tools]} if tools else self._kwargs

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, [text])[0] if text else []


def _name_call(answer: Message, index: int) -> dict[str, Any]:
    """Return the call that a tool message answers; some templates refuse one without."""
    function = {"name": str(answer.get("name") or "tool"), "arguments": {}}
    return {"type": "function", "id": str(answer.get("tool_call_id") or f"call{index:05d}"), "function": function}


@dataclass(frozen=True, slots=True)
class Drift:
    """The first token at which appending to a conversation differs from rendering it as a whole."""

    turn: int
    position: int
    appended: str
    rendered: str

    def __str__(self) -> str:
        return (
            f"at token {self.position}, after {self.turn} {'reply' if self.turn == 1 else 'replies'}: {self.appended} "
            f"where the whole conversation has {self.rendered}"
        )


def find_drift(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Message],
    tools: Tools = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Drift | None:
    """Return where the requests of a conversation would differ from rendering them whole, None if nowhere.

    Replies of the model are taken as their canonical tokenization. The conversation ends with messages for the model.
    """
    renderer = ChatRenderer(tokenizer, template_kwargs)
    kwargs = renderer._with_tools(tools)
    starts = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    ids = renderer.render_prompt(conversation[: starts[0]], tools)
    for turn, start in enumerate(starts, 1):
        end = starts[turn] if turn < len(starts) else len(conversation)
        reply = _find_reply(tokenizer, conversation[: start + 1], kwargs, renderer._tail)
        ids += encode(tokenizer, [reply + renderer._tail])[0] if reply is not None else []
        last = next((each for each in renderer._tail_ids if each in tokenizer.all_special_ids), None)
        if last is not None:
            ids = ids[: len(ids) - ids[::-1].index(last)]
        ids += renderer.render_next(conversation[start + 1 : end], last if last is not None else None)
        whole = renderer.render_prompt(conversation[:end], tools)
        if ids != whole:
            position = next((k for k, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
            return Drift(turn, position, _show(tokenizer, ids, position), _show(tokenizer, whole, position))
    return None


def _find_reply(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message], kwargs: Mapping[str, Any], tail: str
) -> str | None:
    """Return what the model would have to write to reply as the last message; None if it cannot."""
    before = render(tokenizer, list(conversation[:-1]), kwargs)
    whole = render(tokenizer, list(conversation), {**kwargs, "add_generation_prompt": False})
    if not whole.startswith(before) or not whole.endswith(tail):
        return None
    return whole[len(before) : len(whole) - len(tail)]


def _show(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], position: int) -> str:
    if position >= len(ids):
        return "nothing"
    return f"{tokenizer.decode([ids[position]])!r} ({ids[position]})"


_CALL = {"type": "function", "id": "call00000", "function": {"name": "lookup", "arguments": {"key": "a"}}}
_OTHER_CALL = {**_CALL, "id": "call00001"}
_ANSWER = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "7"}
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
}
"""Conversations with which a chat template is checked at the start of a run."""


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = (),
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    branches: bool = False,
) -> None:
    """Raise a `ConfigError` if a conversation with this chat template cannot be continued exactly.

    With `branches` every turn starts from the whole conversation, so that a template may rewrite it.
    """
    if branches:
        return
    for name, script in SCRIPTS.items():
        if "tool" in name and not tools:
            continue
        try:
            drift = find_drift(tokenizer, script, tools, template_kwargs)
        except DataError as error:
            raise ConfigError([f"{_SETTING}.enable: {error}"]) from error
        if drift is not None:
            raise ConfigError(
                [
                    f"{_SETTING}.enable: the chat template of {tokenizer.name_or_path or 'the tokenizer'} rewrites "
                    f"earlier turns ({name}: {drift}), so that the model would be trained on other tokens than it saw. "
                    f"Set {_SETTING}.use_inference_chat_template=true to train each turn as a branch of its own, or "
                    f"{_SETTING}.tokenization_sanity_check_mode=disable to append new messages to what it saw"
                ]
            )
