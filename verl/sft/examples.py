"""Examples of supervised fine-tuning: token ids, and which of them are trained.

A row is a prompt and its response, or a whole conversation. The tokens of a response follow from the chat template:
they are between the rendered conversation before it, with a generation prompt, and the rendered conversation including
it. Both must be prefixes of the whole conversation, which is checked for every response, so that the model is trained
on the tokens that it will generate, after the tokens that it will read. Where a template marks responses with
{% generation %}, the marks are used instead.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl.config.schema.sft import SftDataConfig
from verl.data.chat import drop_none, encode, read_prompt, render, truncate
from verl.data.special_tokens import get_special_text
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESPONSE_ROLE = "assistant"
"""The role whose messages are trained."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKING = threading.Lock()
"""transformers records the marks in the compiled template, which all threads share."""
_SHOWN = 24  # characters shown before and after the first difference of two texts


@dataclass(frozen=True, slots=True)
class Example:
    """T tokens; `mask[t]` is True where token t is trained."""

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    def truncate(self, limit: int, side: str) -> Example:
        """Keep at most `limit` tokens. The first one is never trained: nothing precedes it."""
        if len(self.tokens) <= limit:
            return self
        kept = truncate(list(range(len(self.tokens))), limit, side)
        return _example(self.tokens[kept], self.mask[kept])


RankBatch = list[list[Example]]
"""The micro-batches of one rank in one step."""


def list_columns(data: SftDataConfig) -> dict[str, str]:
    """Return the columns to read, by the setting that names each."""
    names = ("prompt_key", "response_key") if data.messages_key is None else ("messages_key",)
    return {name: column for name in ("tools_key", *names) if (column := getattr(data, name)) is not None}


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Converts a row of a data file to an `Example`. `stops` are the ids of the tokens that end a response."""

    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    data: SftDataConfig

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Raises `DataError` for a bad row; the caller adds its location."""
        data, kwargs = self.data, dict(self.data.apply_chat_template_kwargs)
        if data.tools_key is not None and (tools := row.get(data.tools_key)) is not None:
            kwargs["tools"] = self._tools(tools)
        if data.messages_key is not None:
            messages = read_prompt(row.get(data.messages_key), "conversation", "messages_key")
            if isinstance(messages, str):
                raise DataError(
                    "the conversation is a string; data.messages_key names a column of lists of messages. For finished "
                    "text use data.prompt_key and data.response_key"
                )
            return conversation_example(self.tokenizer, messages, kwargs, self.stops)
        prompt, response = read_prompt(row.get(data.prompt_key)), row.get(data.response_key)
        if not isinstance(response, str) or not response:
            kind = "an empty string" if response == "" else f"of type {type(response).__name__}"
            raise DataError(
                f"column '{data.response_key}': the response is {kind}; it must be text. Fix the row, or set "
                "data.response_key to another column"
            )
        if isinstance(prompt, str):
            return pair_example(self.tokenizer, prompt, response, self.stops)
        messages = [*prompt, {"role": RESPONSE_ROLE, "content": response}]
        return conversation_example(self.tokenizer, messages, kwargs, self.stops, first=len(prompt))

    def _tools(self, tools: Any) -> Any:
        try:
            return json.loads(tools) if isinstance(tools, str) else drop_none(tools)
        except ValueError as error:
            raise DataError(
                f"column '{self.data.tools_key}': is not JSON: {error}; it must be a list of tools, or JSON of one"
            ) from None


def pair_example(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, stops: Sequence[int]) -> Example:
    """Return the example of a rendered prompt and its response, which ends with an end token.

    They are tokenized separately, since the model reads one and generates the other.
    """
    prompt_ids, response_ids = encode(tokenizer, [prompt, response])
    if not response_ids or response_ids[-1] not in stops:
        response_ids = [*response_ids, _end(tokenizer)]
    return _example([*prompt_ids, *response_ids], [*[False] * len(prompt_ids), *[True] * len(response_ids)])


def find_missing_header(
    tokenizer: PreTrainedTokenizerBase, prompt: str, template_kwargs: Mapping[str, Any]
) -> str | None:
    """Return a warning for a rendered prompt that ends like a message: the generation prompt is missing."""
    asked = [{"role": "user", "content": "?"}]
    try:
        closed, opened = (render(tokenizer, asked, {**template_kwargs, "add_generation_prompt": on}) for on in (0, 1))
    except DataError:  # no template, or none for such a message
        return None
    ending, header = closed.rpartition("?")[2], opened.removeprefix(closed)
    if not ending.strip() or not header or header == opened or not prompt.endswith(ending) or prompt.endswith(header):
        return None
    return (
        f"the prompts end with {ending!r}, as the chat template ends a message, and not with {header!r}, after which "
        "the model generates its responses. Render them with apply_chat_template(..., add_generation_prompt=True), or "
        "use lists of messages"
    )


def conversation_example(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    stops: Sequence[int],
    *,
    first: int = 0,
) -> Example:
    """Return the example of a conversation in which the assistant's messages from index `first` on are trained.

    A response ends with its end token; what the template adds after that is not trained.
    """
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == RESPONSE_ROLE]
    if not turns:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise DataError(
            f"no message has the role {RESPONSE_ROLE} (only {roles}): there is nothing to train on; remove the row"
        )
    if turns[0] == 0:
        raise DataError(f"the first message has the role {RESPONSE_ROLE}; start with a system or user message")
    if not first and _marks_responses(tokenizer, template_kwargs):
        return _marked_example(tokenizer, messages, template_kwargs)

    def text(count: int, *, header: bool) -> str:
        return render(tokenizer, messages[:count], {**template_kwargs, "add_generation_prompt": header})

    whole = text(len(messages), header=False)
    befores = [text(turn, header=True) for turn in turns]
    afters = [whole if turn + 1 == len(messages) else text(turn + 1, header=False) for turn in turns]
    texts = list(dict.fromkeys([whole, *befores, *afters]))
    ids = dict(zip(texts, encode(tokenizer, texts), strict=True))
    tokens = ids[whole]
    mask = [False] * len(tokens)
    for turn, before, after in zip(turns, befores, afters, strict=True):
        start, stop = len(ids[before]), len(ids[after])
        if ids[after][:start] != ids[before]:
            raise DataError(_explain_prefix_mismatch(tokenizer, turn, before, after))
        if tokens[:stop] != ids[after]:
            raise DataError(_explain_rerendering(tokenizer, turn, after, whole))
        ends = [index for index in range(start, stop) if tokens[index] in stops]
        stop = ends[-1] + 1 if ends else stop
        mask[start:stop] = [True] * (stop - start)
    if turns[-1] + 1 == len(messages) and not ends:  # the template does not end the last response
        tokens, mask = [*tokens, _end(tokenizer)], [*mask, True]
    return _example(tokens, mask)


def _marked_example(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> Example:
    """Return the example with the responses that the template marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    special = get_special_text(tokenizer)
    tools = special.mark(template_kwargs.get("tools"))
    kwargs = {**tokenizer.special_tokens_map, **template_kwargs, "tools": tools, "add_generation_prompt": False}
    with _MARKING:
        render(tokenizer, messages, {**template_kwargs, "add_generation_prompt": False})  # raises with a better message
        rendered: Any = render_jinja_template(
            [special.mark_messages(messages)],
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **kwargs,
        )
    [text], [spans] = rendered
    ids, offsets = special.encode(text)
    mask = [any(first < stop and start < last for start, stop in spans) for first, last in offsets]
    if not any(mask[1:]):
        raise DataError(
            f"the chat template of {_name(tokenizer)} marks responses with {{% generation %}}, but none here; fix the "
            "template, or remove its marks"
        )
    return _example(ids, mask)


def _marks_responses(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> bool:
    if tokenizer.chat_template is None or not tokenizer.is_fast:  # the marks are offsets in characters
        return False
    return bool(_MARKED.search(tokenizer.get_chat_template(None, template_kwargs.get("tools"))))


def _example(tokens: npt.ArrayLike, mask: npt.ArrayLike) -> Example:
    trained = np.array(mask, np.bool_)
    trained[:1] = False
    return Example(np.array(tokens, np.int32), trained)


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {_name(tokenizer)} has no end token to end a response with; set its eos_token")
    return int(tokenizer.eos_token_id)


def _explain_prefix_mismatch(tokenizer: PreTrainedTokenizerBase, turn: int, before: str, after: str) -> str:
    before, after = map(get_special_text(tokenizer).show, (before, after))
    index = _first_difference(before, after)
    return (
        f"message {turn}: the chat template of {_name(tokenizer)} starts a response after "
        f"{_near(before, index)}, but renders this one as {_near(after, index)}, so the model would be trained on text "
        "that it never reads. Write the message as the template starts responses, or set "
        "data.apply_chat_template_kwargs (such as {enable_thinking: false})"
    )


def _explain_rerendering(tokenizer: PreTrainedTokenizerBase, turn: int, after: str, whole: str) -> str:
    after, whole = map(get_special_text(tokenizer).show, (after, whole))
    index = _first_difference(after, whole)
    return (
        f"message {turn}: the chat template of {_name(tokenizer)} renders it as {_near(after, index)} while it is the "
        f"last one, and as {_near(whole, index)} when others follow, so the conversation does not contain what the "
        "model generated. Write one row per response: the messages before it under data.prompt_key, the response under "
        "data.response_key; or use a template that marks responses with {% generation %}"
    )


def _first_difference(one: str, other: str) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _near(text: str, index: int) -> str:
    start, stop = max(0, index - _SHOWN), index + _SHOWN
    return repr("..." * (start > 0) + text[start:stop] + "..." * (stop < len(text)))


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "(unnamed)"
