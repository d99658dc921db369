"""Recognizing secrets, and removing them from text that leaves a run: errors, console output, saved settings.

Control characters, which tools and responses may contain, become visible: they would move the cursor of a terminal,
rename its window, or write what looks like another line.

A secret is recognized by its name (`api_key`, `HF_TOKEN`, `PGPASSWORD`), by its position (`https://user:SECRET@host`,
`?sig=SECRET`, `--password SECRET`), by its shape (see `shapes`), or by its value: the value of an environment
variable or setting with such a name is hidden wherever it appears, also in messages of third-party exceptions.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from verl.redaction.names import WEAK, is_secret_name
from verl.redaction.shapes import HIDDEN, hide_shapes

_MIN_LENGTH, _MAX_WORD_LENGTH = 6, 11
"""A shorter value, or one that may be a word ("disabled"), is hidden only next to its name: replacing it everywhere
would make text unreadable, and reveal it."""

_MIN_LINE_LENGTH = 16
"""A line of this length of a secret with several lines is hidden by itself, too."""

_NOT_SECRET = {"value", "...", "none", "null", "true", "false"}
"""What help texts write for a value (`key=value`), and what says that there is none."""

# A name starts at a word boundary and its rest is limited, or a long word would take quadratic time. Its value is
# matched separately: the value of a name that is not secret may contain another name (`path=https://host?token=SECRET`).
_NAME = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]*(?:auth|bearer|connection|cookie|credential|dsn|jwt|key|mnemonic|pass|pat(?![a-z])|pwd|sas"
    r"|secret|signature|token|webhook)[\w-]{0,60})(?P<is>(?:\\*['\"])?\s*(?:=(?!=)|:(?!:|//))\s*)",
    re.I,
)
_VALUE = re.compile(
    r"(?P<quote>\\*['\"])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n]))+)"
    r"|(?P<value>(?:(?:Bearer|Basic|Token|Digest|ApiKey)[ ]+)?(?:[^\s'\",;&}\])]|['\"](?=[^\s'\",;&}\])]))+)",
    re.I,
)
_LOGIN = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]+://)(?P<user>[^\s/?#@:]*)(?P<password>:[^\s/?#@]*)?@")

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # reorder a line
_PICTURES = {code: chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd" for code in _CONTROLS}

_known: set[str] = set()


def redact_settings(tree: Any, name: str = "") -> Any:
    """Return the settings with all values under secret names hidden, and other texts redacted."""
    return _map_values(tree, name, _redact_value)


def redact(text: str) -> str:
    """Return the text with its secrets hidden, and its control characters escaped."""
    for value in sorted(_known | _list_environment_secrets(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(_mask_login, text)
    text = hide_shapes(text)
    parts, position = [], 0
    for start, end in _iter_assigned(text):
        parts += [text[position:start], HIDDEN]
        position = end
    return escape_controls("".join([*parts, text[position:]]))


def escape_controls(text: str) -> str:
    r"""Return the text without colors, and with all control characters but newlines and tabs escaped.

    >>> escape_controls("\x1b[31mred\x1b[0m \x1b]0;title\x07")
    'red \\x1b]0;title\\x07'
    """
    return _COLOR.sub("", text).translate(_CONTROLS)


def show_controls(text: str) -> str:
    r"""Return text of the same length with visible control characters, other than newlines and tabs.

    >>> show_controls("\x1b[31mred")
    '␛[31mred'
    """
    return text.translate(_PICTURES)


def remember(tree: Any, name: str = "") -> None:
    """Register the secrets of these settings, to hide them in all texts of this process from now on."""
    _map_values(tree, name, _remember_value)


def remember_arguments(arguments: Iterable[str]) -> None:
    """Register the secrets of a command line: `key=value`, `--key value`."""
    arguments = list(arguments)
    remember(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        remember(value.strip("'\""), key)


def _map_values(tree: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Return the tree with each value changed, given its name. Everything below a secret name is secret."""
    if isinstance(tree, Mapping):
        return {
            key: _map_values(value, name if is_secret_name(name) else str(key), change) for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        names = [name, *(_name_next(value, name) for value in tree)]
        return [_map_values(value, each, change) for value, each in zip(tree, names, strict=False)]
    return change(tree, name)


def _redact_value(value: Any, name: str) -> Any:
    if is_secret_name(name) and _is_redactable(value):
        return HIDDEN
    return redact(value) if isinstance(value, str) else value


def _remember_value(value: Any, name: str) -> None:
    if is_secret_name(name) and _is_redactable(value):
        _known.update(_list_forms(str(value)))
    if isinstance(value, str):
        for secret in (*_iter_logins(value), *(value[start:end] for start, end in _iter_assigned(value))):
            _known.update(_list_forms(secret))


def _name_next(value: Any, name: str) -> str:
    """Return the name of the element after `value` in a list: `--password` names the next one."""
    is_flag = isinstance(value, str) and re.fullmatch(r"--?[A-Za-z][\w-]*", value) is not None
    return value if is_flag and is_secret_name(value) else name


def _is_redactable(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value not in ("", HIDDEN)


@lru_cache(1024)
def _list_forms(value: str) -> frozenset[str]:
    """Return a secret as it may appear in a text: also quoted, escaped, encoded, and line by line."""
    lines = [line.strip() for line in value.splitlines()]
    plain = {value, value.strip(), unquote(value)}
    plain |= {line for line in lines if len(line) >= _MIN_LINE_LENGTH} if len(lines) > 1 else set()
    forms = set(plain)
    for each in plain:
        forms |= {quote(each, safe=""), quote(each), quote_plus(each), html.escape(each), shlex.quote(each)}
        forms |= {escaped[1:-1] for escaped in (json.dumps(each), json.dumps(each, ensure_ascii=False), repr(each))}
        forms |= {each.replace(mark, f"\\{mark}") for mark in "'\""}
        forms.add(base64.b64encode(each.encode(errors="replace")).decode())
    return frozenset(form for form in forms if _is_distinctive(form))


def _is_distinctive(value: str) -> bool:
    return len(value) >= _MIN_LENGTH and not (value.isalpha() and len(value) <= _MAX_WORD_LENGTH)


def _list_environment_secrets() -> set[str]:
    forms: set[str] = set()
    for name, value in os.environ.items():
        for secret in [value] if is_secret_name(name) else _iter_logins(value):
            if _is_distinctive(secret):
                forms |= _list_forms(secret)
    return forms


def _iter_logins(text: str) -> Iterator[str]:
    """Yield the passwords in URLs; a user without a password is usually a token."""
    if "://" in text:
        for login in _LOGIN.finditer(text):
            yield (login["password"] or ":").removeprefix(":") or login["user"]


def _mask_login(match: re.Match[str]) -> str:
    user = match["user"] + ":" if match["password"] else ""
    return f"{match['scheme']}{user}{HIDDEN}@"


def _iter_assigned(text: str) -> Iterator[tuple[int, int]]:
    """Yield where values stand next to the name of a secret: `key=value`, `"key": "value"`."""
    position = 0
    while name := _NAME.search(text, position):
        position = name.end()
        is_sentence = name["name"].lower() in WEAK and ":" in name["is"]  # "unknown key: x"
        if is_sentence or not is_secret_name(name["name"]) or (value := _VALUE.match(text, position)) is None:
            continue
        start, end = value.span("value" if value["quote"] is None else "quoted")
        position = end
        if text[start:end].lower() not in _NOT_SECRET:
            yield start, end
