"""Recognizing secrets, and removing them from text that leaves a run: errors, console output, saved settings.

A secret is recognized by its name (`api_key`, `HF_TOKEN`, `password`), by its position (`https://user:SECRET@host`,
`?token=SECRET`, `Authorization: Bearer SECRET`), or by its value: the value of an environment variable or setting with
such a name is hidden wherever it appears, also in messages of third-party exceptions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"

_MIN_LENGTH, _MAX_WORD_LENGTH = 6, 11
"""A shorter value, or one that may be a word ("disabled"), is hidden only next to its name: replacing it everywhere
would make text unreadable, and reveal it."""

_WORDS = {"apikey", "auth", "authorization", "bearer", "credential", "credentials", "passphrase", "passwd", "password"}
_WORDS |= {"passwords", "pwd", "secret", "secrets"}
_ENDS = {"key", "keys", "token"}
_COLUMNS = {"prompt", "response", "curriculum", "question", "answer", "image", "images", "video", "videos", "audio"}
_COLUMNS |= {"data", "messages", "reward", "fn", "group", "sort", "source", "tools", "system", "label", "id", "uid"}
_COLUMNS |= {"index", "input", "output", "text", "target", "metadata", "difficulty", "category", "chosen", "rejected"}
_MARKS = {"pad", "eos", "bos", "unk", "stop", "end", "start", "sep", "cls", "mask", "think"}

_PLACEHOLDERS = {"value", "..."}
"""What help texts write for a value: `key=value`."""

# Both patterns start at a word boundary and limit the rest of a name, or a long word would take quadratic time.
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
    """Whether something with this name is a secret. Columns (`prompt_key`) and special tokens (`pad_token`) are not.

    >>> is_secret_name("OPENAI_API_KEY"), is_secret_name("reward_kwargs.judge-token"), is_secret_name("prompt_key")
    (True, True, False)
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = [word for word in re.split(r"[\W_]+", spaced.lower()) if word]
    if not words or words == ["pwd"] or words[-1] in ("env", "file", "path", "mode"):  # says where a secret is
        return False
    if _WORDS & set(words):
        return True
    return words[-1] in _ENDS and not (len(words) > 1 and words[-2] in _COLUMNS | _MARKS)


def redact_settings(tree: Any, name: str = "") -> Any:
    """Return the settings with all values under secret names hidden, and other texts redacted."""
    if isinstance(tree, Mapping):
        return {key: redact_settings(value, _effective_name(name, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [redact_settings(value, name) for value in tree]
    if is_secret_name(name) and _is_redactable(tree):
        return HIDDEN
    return redact(tree) if isinstance(tree, str) else tree


def redact(text: str) -> str:
    """Return the text with its secrets hidden."""
    for value in sorted(_known | set(_list_environment_secrets()), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(_mask_login, text)
    text = _BEARER.sub(rf"\g<kind> {HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    return _ASSIGNED.sub(_mask_value, text)


def remember(tree: Any, name: str = "") -> None:
    """Register the secrets of these settings, to hide them in all texts of this process from now on."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            remember(value, _effective_name(name, key))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            remember(value, name)
    elif is_secret_name(name) and _is_redactable(tree):
        _register(str(tree))
    if isinstance(tree, str):
        for login in _LOGIN.finditer(tree):
            _register((login["password"] or ":").removeprefix(":") or login["user"])
        for given in _ASSIGNED.finditer(tree):
            if is_secret_name(given["name"]):
                _register(given["quoted"] or given["value"])


def remember_arguments(arguments: Iterable[str]) -> None:
    """Register the secrets of a command line: `key=value`."""
    for argument in arguments:
        key, _, value = argument.partition("=")
        remember(value.strip("'\""), key)
        remember(argument)


def _effective_name(name: str, key: Any) -> str:
    """Return the name that decides about `key`: everything below a secret name is secret."""
    return name if is_secret_name(name) else str(key)


def _is_redactable(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool) and value not in ("", HIDDEN)


def _register(value: str) -> None:
    _known.update(form for form in {value, unquote(value), quote(value, safe="")} if _is_distinctive(form))


def _is_distinctive(value: str) -> bool:
    return len(value) >= _MIN_LENGTH and not (value.isalpha() and len(value) <= _MAX_WORD_LENGTH)


def _list_environment_secrets() -> Iterable[str]:
    return (value for name, value in os.environ.items() if is_secret_name(name) and _is_distinctive(value))


def _mask_login(match: re.Match[str]) -> str:
    user = match["user"] + ":" if match["password"] else ""  # a user without a password is usually a token
    return f"{match['scheme']}{user}{HIDDEN}@"


def _mask_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["quoted"] or match["value"]
    is_sentence = name.lower() in _ENDS and match["is"].startswith(":")  # "unknown key: x"
    if not is_secret_name(name) or is_sentence or value.lower() in _PLACEHOLDERS:
        return match[0]
    return f"{name}{match['is']}{match['quote'] or ''}{HIDDEN}"
