"""Special tokens that contents spell, such as `<|im_end|>` in a tool's result: encoded as text, never as the token.

A tokenizer parses the text of a special token wherever it appears, so contents could end their turn and forge others.
`mark` replaces one character of such text in a content by a lone surrogate before the chat template is applied. No text
that a tokenizer accepts has surrogates, and they survive what templates do to contents: trimming, splitting, JSON. In
the rendered text every special token without a surrogate is the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from verl.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROL_TOKEN = re.compile(r"<[|｜].+[|｜]>")  # DeepSeek lists <｜User｜> as an added token that is not special
_PRIVATE = 0xF0000  # first code point of the characters in respelled tokens
_SPEAKERS = ("system", "developer", "user", "assistant")


def is_marked(text: str) -> bool:
    """Return whether a rendered text has contents that spell special tokens."""
    return not text.isascii() and _SURROGATES.search(text) is not None


def remove_marks(text: str) -> str:
    """Return text without surrogates, which JSON may contain and tokenizers refuse."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def get_special_text(tokenizer: PreTrainedTokenizerBase) -> SpecialText:
    """Return the marks of a tokenizer, as it is now."""
    return _make_special_text(tokenizer, str(tokenizer.chat_template), len(tokenizer))


@lru_cache(maxsize=16)
def _make_special_text(tokenizer: PreTrainedTokenizerBase, template: str, size: int) -> SpecialText:
    return SpecialText(tokenizer)


class SpecialText:
    """Marks special tokens in contents, and encodes rendered texts with marks.

    Special are the tokens that the tokenizer lists as special, and those spelled `<|...|>`. Other added tokens, such as
    `<think>`, stay tokens where models, users and templates write them. In the results of tools, those that the chat
    template contains are text as well: `</tool_response>` would end the result.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special or _CONTROL_TOKEN.fullmatch(text)}
        special = (special | {str(token) for token in tokenizer.all_special_tokens}) - {""}
        to_id: Any = tokenizer.convert_tokens_to_ids
        self._ids: dict[int, str] = {to_id(text): text for text in special}
        template = str(tokenizer.chat_template)
        self._tokens = special | {text for text in added if text.strip() and text in template}
        self._special, self._own = (re.compile(_match_any(tokens)) for tokens in (special, self._tokens))
        firsts = sorted({token[0] for token in self._tokens})
        self._marks = {first: chr(0xD800 + index) for index, first in enumerate(firsts)}
        self._private = {first: chr(_PRIVATE + index) for index, first in enumerate(firsts)}
        self._texts = {ord(mark): first for first, mark in self._marks.items()}

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Return generated ids with special tokens encoded as the text that they spell, as `encode` reads it."""
        texts = {token: self._ids[token] for token in ids if token in self._ids}
        spelled = {token: self.encode(self.mark(text))[0] for token, text in texts.items()}
        return [each for token in ids for each in spelled.get(token, (token,))]

    def mark_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with special tokens marked in all of their fields except the roles."""
        return [
            {
                key: value
                if key == "role"
                else self.mark(
                    value,
                    is_result=message["role"] not in _SPEAKERS,
                    is_split=key == "content" and isinstance(value, (list, tuple)),
                )
                for key, value in message.items()
            }
            for message in messages
        ]

    def mark(self, value: Any, *, is_result: bool = False, is_split: bool = False) -> Any:
        """Return text, or the texts in lists and mappings, with special tokens marked.

        `is_split`: the chat template may join the texts, so the beginning of a token at the end of a text is marked.
        """
        mark = partial(self.mark, is_result=is_result, is_split=is_split)
        if isinstance(value, Mapping):
            return {mark(key): mark(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [mark(each) for each in value]
        if not isinstance(value, str):
            return value
        text, position = remove_marks(value), 0
        characters, pattern = list[str](), self._own if is_result else self._special
        while found := pattern.search(text, position):
            characters = characters or list(text)
            characters[found.start()] = self._marks[text[found.start()]]
            position = found.start() + 1  # the next token may overlap with this one
        for start in self._find_beginnings(text) if is_split else ():
            characters = characters or list(text)
            characters[start] = self._marks[text[start]]
        return "".join(characters) or text

    def _find_beginnings(self, text: str) -> list[int]:
        """Return where special tokens begin that the next text may complete, if a template trims this one or not."""
        starts = range(max(0, len(text) - 2 * max(map(len, self._tokens), default=0)), len(text))
        ends = {text, text.rstrip()}
        return [
            start
            for start in starts
            if text[start] in self._marks
            and any(end[start:] and token.startswith(end[start:]) for end in ends for token in self._tokens)
        ]

    def show(self, text: str) -> str:
        """Return a rendered text without marks, for people."""
        return text.translate(self._texts) if is_marked(text) else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a rendered text, in which only tokens without marks are special, and their offsets."""
        if not is_marked(text):
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).encodings[0]
            return encoded.ids, encoded.offsets
        for private in self._private.values():
            text = text.replace(private, "\ufffd")
        text = self._own.sub(lambda found: self._respell(found[0]), text).translate(self._texts)
        core, known = self._respelled
        encoded = core.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            is_spelled = token not in known and text[start:stop] in self._tokens  # a piece of the vocabulary is special
            parts = (text[start : start + 1], text[start + 1 : stop]) if is_spelled else ()
            ids += [piece.id for part in parts for piece in core.model.tokenize(part)] or [known.get(token, token)]
            offsets += [(start, stop)] * (len(ids) - len(offsets))
        return ids, offsets

    def _respell(self, token: str) -> str:
        return self._private[token[0]] + token[1:]

    @cached_property
    def _respelled(self) -> tuple[Tokenizer, dict[int, int]]:
        """The same tokenizer with spellings of its special tokens that no text has, and their ids there and here."""
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                f"{self._tokenizer.name_or_path or 'the tokenizer'} is written in Python, and cannot encode the text "
                "of its special tokens in a message as text; remove them from the data, or use a fast tokenizer"
            )
        core = Tokenizer(backend.model)  # shares the vocabulary, which takes seconds to copy
        core.normalizer, core.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        core.post_processor = backend.post_processor
        spellings: dict[int, str] = {}
        tokens = []
        for index, token in sorted(self._tokenizer.added_tokens_decoder.items()):
            spellings[index] = text = self._respell(str(token)) if str(token) in self._tokens else str(token)
            flags = {
                flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            tokens.append(AddedToken(text, **flags))
        core.add_tokens(tokens)
        ids_of = {token.content: new for new, token in core.get_added_tokens_decoder().items()}
        return core, {ids_of[text]: index for index, text in spellings.items()}


def _match_any(tokens: Iterable[str]) -> str:
    """Return a pattern that matches the longest of some tokens; nothing without tokens."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
