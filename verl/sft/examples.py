"""Examples of supervised training: token ids, and which of them are trained.

A row is a prompt and its answer, or a whole conversation. What an answer is follows from the chat template itself: the
tokens between what the template makes of all that comes before it, with the header of an answer at the end, and what it
makes of the conversation up to and with it. That both are beginnings of the whole is checked for every answer, so the
model is trained on the tokens that it will write, after the tokens that it will read. A template that marks answers
with {% generation %} has said it already.
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

from verl.data.chat import encode, read_prompt, render, truncate, without_gaps
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Example", "ExampleReader", "conversation_example", "find_missing_header", "pair_example"]

ANSWERS = "assistant"
"""The role whose messages are trained."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKING = threading.Lock()
"""transformers notes the marks of a template in the one compiled form of it that all threads share."""
_SHOWN = 24  # characters of a place where two texts part


@dataclass(frozen=True, slots=True)
class Example:
    """T tokens; `mask[t]` is True where token t is trained.

    >>> Example(np.array([5, 6, 7, 2], np.int32), np.array([False, False, True, True]))
    """

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    def cut(self, limit: int, side: str) -> Example:
        """At most `limit` tokens. Nothing can predict the first one that is left."""
        if len(self.tokens) <= limit:
            return self
        kept = truncate(list(range(len(self.tokens))), limit, side)
        return _example(self.tokens[kept], self.mask[kept])


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """From a row of a data file to an `Example`. Columns are named as in the settings of `data`.

    `stops` are the tokens that end an answer when the model writes one.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str | None = None
    tools_key: str | None = None
    template_kwargs: Mapping[str, Any] | None = None

    @property
    def keys(self) -> dict[str, str]:
        """The columns that are read, by the setting that names each."""
        given = {"tools_key": self.tools_key, "messages_key": self.messages_key}
        if self.messages_key is None:
            given |= {"prompt_key": self.prompt_key, "response_key": self.response_key}
        return {setting: column for setting, column in given.items() if column is not None}

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """A `DataError` says what is wrong with the row; whoever knows where it stands says that."""
        kwargs = dict(self.template_kwargs or {})
        if self.tools_key is not None and (tools := row.get(self.tools_key)) is not None:
            kwargs["tools"] = self._tools(tools)
        if self.messages_key is not None:
            messages = read_prompt(row.get(self.messages_key), "conversation", "messages_key")
            if isinstance(messages, str):
                raise DataError(
                    "the conversation is a string; data.messages_key names a column of lists of messages. For finished "
                    "text use data.prompt_key and data.response_key"
                )
            return conversation_example(self.tokenizer, messages, kwargs, self.stops)
        prompt, answer = read_prompt(row.get(self.prompt_key)), row.get(self.response_key)
        if not isinstance(answer, str) or not answer:
            found = "an empty string" if answer == "" else f"of type {type(answer).__name__}"
            raise DataError(
                f"column '{self.response_key}': the answer is {found}; it must be text. Mend the row, or name another "
                "column with data.response_key"
            )
        if isinstance(prompt, str):
            return pair_example(self.tokenizer, prompt, answer, self.stops)
        messages = [*prompt, {"role": ANSWERS, "content": answer}]
        return conversation_example(self.tokenizer, messages, kwargs, self.stops, given=len(prompt))

    def _tools(self, tools: Any) -> Any:
        try:
            return json.loads(tools) if isinstance(tools, str) else without_gaps(tools)
        except ValueError as error:
            raise DataError(
                f"column '{self.tools_key}': is not JSON: {error}; it must be a list of tools, or JSON of one"
            ) from None


def pair_example(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, stops: Sequence[int]) -> Example:
    """Finished text, tokenised as it stands: no special token is added to the prompt, and the answer ends with one.

    Both are tokenised by themselves, as a model meets them that reads the one and writes the other.
    """
    given, written = encode(tokenizer, [prompt, answer])
    if not written or written[-1] not in stops:
        written = [*written, _end(tokenizer)]
    return _example([*given, *written], [*[False] * len(given), *[True] * len(written)])


def find_missing_header(
    tokenizer: PreTrainedTokenizerBase, prompt: str, template_kwargs: Mapping[str, Any]
) -> str | None:
    """What should be said of a finished prompt that ends where the template ends a message: the header is missing after
    which the model writes its answers."""
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
        "the model is asked for its answers: it would learn to answer where it never will. Write them with "
        "apply_chat_template(..., add_generation_prompt=True), or as lists of messages"
    )


def conversation_example(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    stops: Sequence[int],
    *,
    given: int = 0,
) -> Example:
    """A conversation in which the assistant's messages are trained, but for those of the first `given`.

    An answer ends with the token that ends it for the engine; what the template puts behind that is not trained.
    """
    turns = [place for place in range(given, len(messages)) if messages[place]["role"] == ANSWERS]
    if not turns:
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise DataError(
            f"no message is of role {ANSWERS} (there are {roles}): nothing is to be learned; remove the row"
        )
    if turns[0] == 0:
        raise DataError(
            f"the first message is the {ANSWERS}'s: it answers nothing; begin with a system or user message"
        )
    if not given and _marks_answers(tokenizer, template_kwargs):
        return _marked(tokenizer, messages, template_kwargs)

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
            raise DataError(_no_header(tokenizer, turn, before, after))
        if tokens[:stop] != ids[after]:
            raise DataError(_otherwise(tokenizer, turn, after, whole))
        ends = [place for place in range(start, stop) if tokens[place] in stops]
        stop = ends[-1] + 1 if ends else stop
        mask[start:stop] = [True] * (stop - start)
    if turns[-1] + 1 == len(messages) and not ends:  # the template leaves open where the last answer ends
        tokens, mask = [*tokens, _end(tokenizer)], [*mask, True]
    return _example(tokens, mask)


def _marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> Example:
    """As the template itself marks its answers."""
    kwargs = {**template_kwargs, "add_generation_prompt": False}
    with _MARKING:
        render(tokenizer, messages, kwargs)  # says what is wrong, if anything is
        found: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            **{**kwargs, "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True},
        )
    mask = [bool(marked) for marked in found["assistant_masks"]]
    if not any(mask[1:]):
        raise DataError(
            f"the chat template of {_name(tokenizer)} marks answers with {{% generation %}}, but none here; mend the "
            "template, or take the marks out of it"
        )
    return _example(found["input_ids"], mask)


def _marks_answers(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> bool:
    if tokenizer.chat_template is None or not tokenizer.is_fast:  # the marks are told in characters
        return False
    return bool(_MARKED.search(tokenizer.get_chat_template(None, template_kwargs.get("tools"))))


def _example(tokens: npt.ArrayLike, mask: npt.ArrayLike) -> Example:
    trained = np.array(mask, np.bool_)
    trained[:1] = False
    return Example(np.array(tokens, np.int32), trained)


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {_name(tokenizer)} has no end token, with which an answer would end; set its eos_token"
        )
    return int(tokenizer.eos_token_id)


def _no_header(tokenizer: PreTrainedTokenizerBase, turn: int, before: str, after: str) -> str:
    place = _parting(before, after)
    return (
        f"message {turn}: the chat template of {_name(tokenizer)} would have the model begin its answer after "
        f"{_near(before, place)}, but renders this one as {_near(after, place)}; it would be trained on what it never "
        "reads. Write the message as the template begins answers, or set data.apply_chat_template_kwargs (such as "
        "{enable_thinking: false})"
    )


def _otherwise(tokenizer: PreTrainedTokenizerBase, turn: int, after: str, whole: str) -> str:
    place = _parting(after, whole)
    return (
        f"message {turn}: the chat template of {_name(tokenizer)} renders it as {_near(after, place)} while it is the "
        f"last one, and as {_near(whole, place)} when others follow, so that the conversation does not hold what the "
        "model wrote. Write one row for each answer: the messages before it under data.prompt_key, the answer under "
        "data.response_key; or use a template that marks answers with {% generation %}"
    )


def _parting(one: str, other: str) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _near(text: str, place: int) -> str:
    start, stop = max(0, place - _SHOWN), place + _SHOWN
    return repr("..." * (start > 0) + text[start:stop] + "..." * (stop < len(text)))


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or "(unnamed)"
