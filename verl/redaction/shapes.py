"""Secrets that are recognized without a name: keys, random values, signed URLs, options of command lines."""

from __future__ import annotations

import re
from itertools import pairwise

from verl.redaction.names import is_secret_name

HIDDEN = "***"

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|rk|pk|nvapi|glpat|xox[a-z])-[\w-]{16,}|github_pat_\w{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|(?:hf|gsk|r8|gh[oprsu]|npm|[sr]k_(?:live|test))_[A-Za-z0-9]{16,}|AIza[\w-]{30,}"
    r"|(?:dapi|SK|key-|shpat_|do[opr]_v1_|lsv2_(?:pt|sk)_)[0-9a-f]{32}\w*"
    r"|eyJ[\w-]{8,1000}\.[\w-]{8,8000}\.[\w-]{8,})"
)
"""Keys with the prefixes of the most common services, and JSON web tokens. Other keys are recognized as `_RANDOM`."""
_RANDOM = re.compile(r"(?<![A-Za-z0-9/])(?![0-9a-f]+\b|[0-9A-F]+\b)[A-Za-z0-9]{20,}(?![A-Za-z0-9/])")
"""A candidate for a random value: long, not hexadecimal as hashes are, not part of a path."""
_MIN_CHANGES = 0.45
"""The share of neighbors in a random value that differ in kind: upper case, lower case, digit."""
_BEARER = re.compile(r"\b(?P<kind>Bearer|Basic|Token)\s+(?P<value>[\w.~+/=-]{8,})")
_COOKIE = re.compile(r"\b(?P<kind>(?:Set-)?Cookie:[ ]*)[^\s'\"][^\r\n'\"]*", re.I)
_SIGNED = re.compile(r"(?P<name>[?&;](?:[\w-]{0,40}signature|sig|sign|hmac)=)[^\s&'\"<>]+", re.I)
_HOOK = re.compile(
    r"(?P<start>https?://(?:[\w.-]+/(?:[\w.-]{1,40}/){0,6}?(?:hooks?|webhooks?|webhookb2|services|workflows|triggers)/"
    r"|api\.telegram\.org/(?:file/)?bot))(?P<rest>[^\s'\"<>?#]+)",
    re.I,
)
_OPAQUE = re.compile(r"(?=[^/]*\d)[\w:@.-]{16,}")
"""A part of a path that looks generated."""

_OPTION = re.compile(
    r"(?<![\w.-])(?P<name>--?[A-Za-z][\w-]{0,60})(?P<is>['\"]?,[ ]*|[ ]+)"
    r"(?P<value>'[^'\n]+'|\"[^\"\n]+\"|[^\s'\",-][^\s'\",]*)"
)
_USER = re.compile(
    r"(?<![\w-])(?P<start>(?:-u|-U|--user|--proxy-user)(?:['\"]?,)?[ =]*['\"]?(?P<user>[^\s:'\"/]{1,100}):)"
    r"(?P<value>[^\s'\"]+)"
)
_LOGIN_OPTION = re.compile(
    r"(?P<start>\b(?:sshpass|login)\b[^\n]{0,200}?[ ]-p[ ]*['\"]?|[ ]-pass(?:in|out)?[ ]+pass:)[^\s'\"]+"
)
_PLACEHOLDER = re.compile(
    r"<[^>]*>|\$\{?\w+\}?|\[[^\]]*\]|\.\.\.|(?:API|AUTH|KEY|TOKEN|PASSWORD|SECRET|VALUE|STR|STRING|TEXT|_)+"
)
"""What help texts write for a value, and names of variables."""


def hide_shapes(text: str) -> str:
    """Return the text without secrets that are recognized by their shape or position."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _COOKIE.sub(rf"\g<kind>{HIDDEN}", text)
    text = _KEYS.sub(HIDDEN, text)
    text = _RANDOM.sub(_mask_random, text)
    text = _BEARER.sub(_mask_bearer, text)
    text = _SIGNED.sub(rf"\g<name>{HIDDEN}", text)
    text = _HOOK.sub(_mask_hook, text)
    text = _USER.sub(_mask_user, text)
    text = _LOGIN_OPTION.sub(rf"\g<start>{HIDDEN}", text)
    return _OPTION.sub(_mask_option, text)


def _mask_random(match: re.Match[str]) -> str:
    """Mask a value whose characters alternate as in a random value."""
    kinds = [(char.isdigit(), char.isupper()) for char in match[0]]
    changes = sum(left != right for left, right in pairwise(kinds))
    return HIDDEN if changes >= _MIN_CHANGES * len(kinds) else match[0]


def _mask_bearer(match: re.Match[str]) -> str:
    """Mask everything that is not a dictionary word: "Token embeddings" stays."""
    return match[0] if match["value"].isalpha() and len(match["value"]) < 16 else f"{match['kind']} {HIDDEN}"


def _mask_hook(match: re.Match[str]) -> str:
    """Mask the path of a webhook: anyone who has the URL can post."""
    is_opaque = any(map(_OPAQUE.fullmatch, match["rest"].split("/")))
    return f"{match['start']}{HIDDEN}" if is_opaque else match[0]


def _mask_user(match: re.Match[str]) -> str:
    """Mask the password in `-u name:password`, but not the ids in `-u 1000:1000`."""
    is_id = match["user"].isdigit() and match["value"].isdigit()
    return match[0] if is_id else f"{match['start']}{HIDDEN}"


def _mask_option(match: re.Match[str]) -> str:
    """Mask the value of `--password value`."""
    value = match["value"].strip("'\"")
    if not is_secret_name(match["name"]) or _PLACEHOLDER.fullmatch(value):
        return match[0]
    return f"{match['name']}{match['is']}{match['value'].replace(value, HIDDEN)}"
