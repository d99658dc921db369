"""What a secret is, and text without it: for what leaves a run, as errors, lines on the screen, settings that are kept.

A secret is known by its name (`api_key`, `HF_TOKEN`, `password`), by its place (`https://user:HERE@host`,
`?token=HERE`, `Authorization: Bearer HERE`), or by its value: what an environment variable or a setting of such a name
holds is a secret wherever it turns up, in the message of somebody else's exception too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

__all__ = ["HIDDEN", "is_secret_name", "redact", "redacted", "remember", "remember_arguments"]

HIDDEN = "***"

_SHORTEST, _LONGEST_WORD = 6, 11
"""A shorter value, or one that may be a word ("disabled"), is hidden under its name only: replaced wherever it stands,
it would make text unreadable, and say itself."""

_WORDS = {"apikey", "auth", "authorization", "bearer", "credential", "credentials", "passphrase", "passwd", "password"}
_WORDS |= {"passwords", "pwd", "secret", "secrets"}
_ENDS = {"key", "keys", "token"}
_COLUMNS = {"prompt", "response", "curriculum", "question", "answer", "image", "images", "video", "videos", "audio"}
_COLUMNS |= {"data", "messages", "reward", "fn", "group", "sort", "source", "tools", "system", "label"}
_MARKS = {"pad", "eos", "bos", "unk", "stop", "end", "start", "sep", "cls", "mask", "think"}

# Both begin where a word does, and a name ends soon after what tells it: else a long word costs its length squared.
_NAME = r"(?<![\w.-])[\w.-]*(?:auth|bearer|credential|key|pass|pwd|secret|token)[\w-]{0,200}"
_ASSIGNED = re.compile(
    rf"(?P<name>{_NAME})(?P<is>['\"]?\s*[=:]\s*)"
    r"(?:(?P<quote>['\"])(?P<quoted>(?:(?!(?P=quote)).)+)|(?P<value>[^\s'\",;&}\])]+))",
    re.I,
)
_LOGIN = re.compile(r"(?<![\w+.-])(?P<scheme>[\w+.-]+://)(?P<user>[^\s/?#@:]*)(?P<password>:[^\s/?#@]*)?@")
_BEARER = re.compile(r"\b(?P<kind>Bearer|Basic|Token)\s+(?P<value>[\w.~+/=-]{8,})")
_SHAPES = re.compile(
    r"\b(?:(?:sk|rk|pk)-[\w-]{16,}|hf_\w{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)

_known: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether what bears this name is a secret. Columns (`prompt_key`) and special tokens (`pad_token`) are none.

    >>> is_secret_name("OPENAI_API_KEY"), is_secret_name("reward_kwargs.judge-token"), is_secret_name("prompt_key")
    (True, True, False)
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = [word for word in re.split(r"[\W_]+", spaced.lower()) if word]
    if not words or words == ["pwd"] or words[-1] in ("env", "file", "path", "mode"):  # where it is, not what it is
        return False
    if _WORDS & set(words):
        return True
    return words[-1] in _ENDS and not (len(words) > 1 and words[-2] in _COLUMNS | _MARKS)


def redacted(tree: Any, name: str = "") -> Any:
    """The same settings without secrets: under a name that says so nothing is left, and texts are redacted."""
    if isinstance(tree, Mapping):
        return {key: redacted(value, _below(name, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redacted(value, name) for value in tree]
    if is_secret_name(name) and _tells(tree):
        return HIDDEN
    return redact(tree) if isinstance(tree, str) else tree


def redact(text: str) -> str:
    """The text without the secrets in it."""
    for value in sorted(_known | set(_of_environment()), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(_without_login, text)
    text = _BEARER.sub(rf"\g<kind> {HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    return _ASSIGNED.sub(_without_value, text)


def remember(tree: Any, name: str = "") -> None:
    """Know the secrets of these settings from now on, in whatever text they turn up in this process."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            remember(value, _below(name, key))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            remember(value, name)
    elif is_secret_name(name) and _tells(tree):
        _know(str(tree))
    if isinstance(tree, str):
        for login in _LOGIN.finditer(tree):
            _know((login["password"] or ":").removeprefix(":") or login["user"])
        for given in _ASSIGNED.finditer(tree):
            if is_secret_name(given["name"]):
                _know(given["quoted"] or given["value"])


def remember_arguments(arguments: Iterable[str]) -> None:
    """Know the secrets of a command line: `key=value`."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        remember(value.strip("'\""), key)
        remember(argument)


def _below(name: str, key: Any) -> str:
    """What is below a secret name is secret, whatever its own is."""
    return name if is_secret_name(name) else str(key)


def _tells(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value not in ("", HIDDEN)


def _know(value: str) -> None:
    _known.update(form for form in {value, unquote(value), quote(value, safe="")} if _is_telling(form))


def _is_telling(value: str) -> bool:
    return len(value) >= _SHORTEST and not (value.isalpha() and len(value) <= _LONGEST_WORD)


def _of_environment() -> Iterable[str]:
    return (value for name, value in os.environ.items() if is_secret_name(name) and _is_telling(value))


def _without_login(found: re.Match[str]) -> str:
    kept = found["user"] + ":" if found["password"] else ""  # a user without a password is mostly a token
    return f"{found['scheme']}{kept}{HIDDEN}@"


def _without_value(found: re.Match[str]) -> str:
    if not is_secret_name(found["name"]) or (found["name"].lower() in _ENDS and found["is"].startswith(":")):
        return found[0]  # "unknown key: x" is a sentence
    return f"{found['name']}{found['is']}{found['quote'] or ''}{HIDDEN}"
