"""Names of secrets: environment variables, settings, headers, parameters of URLs and command-line options."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise


def _read_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANYWHERE = _read_words(
    "auth authorization bearer cookie cookies credential credentials dsn jwt mnemonic passphrase passwd password "
    "passwords pwd secret secrets webhook webhooks"
)
"""A name that contains one of these words is the name of a secret."""

_LAST = {"key", "keys", "token", "pass", "pat", "sas"}
"""A name that ends with one of these words, before any `_QUALIFIERS`, is the name of a secret, too."""

WEAK = {"key", "keys", "token"}
"""Names that sentences use before a colon: "unknown key: x"."""

_JOINED = re.compile(
    r"\w*(?:passwords?|passwd|passphrase|secret)|(?!old)\w+pwd"
    r"|\w*(?:access|account|api|auth|client|deploy|encryption|license|master|private|secret|service|session|shared|signing"
    r"|ssh|storage)keys?"
    r"|\w*(?:access|api|app|auth|bearer|bot|csrf|deploy|github|gitlab|hf|jwt|npm|personal|refresh|secret|session|user"
    r"|xsrf)tokens?"
    r"|(?:admin|db|ftp|http|key|ldap|login|mail|my|mysql|pg|proxy|redis|root|smtp|ssh|store|sudo|user|vnc|wifi)pass"
)
"""Words that are written as one: `PGPASSWORD`, `SSHPASS`, `apikey`."""

_PAIRS = {("connection", "string"), ("access", "signature"), ("amz", "signature"), ("goog", "signature")}
_PAIRS |= {(kind, "tokens") for kind in ("access", "api", "auth", "bot", "github", "hf", "refresh", "session")}

_QUALIFIERS = _read_words(
    "prod production dev development staging stage stg test testing qa live sandbox local read write readonly "
    "readwrite ro rw admin user default primary secondary backup old new main master root current previous next eu "
    "us a b c string base hex json raw plain pem der pkcs rsa"
)
"""Words after the kind of a secret: `API_KEY_PROD`, `HF_TOKEN_READ`, `OPENAI_KEY_1`."""

_ORDINARY = _read_words(
    # columns
    "prompt response curriculum question answer image images video videos audio data messages reward fn group sort "
    "source tools system label id uid index input output text target metadata difficulty category chosen rejected "
    "cache column dict foreign join lookup partition primary public row state "
    # special tokens
    "pad eos bos unk stop end start sep cls mask think special next per "
    # passes
    "forward backward first second third last single one two each multi max num val train test eval full"
)
"""Before the last word: `prompt_key` names a column, `pad_token` a special token, `forward_pass` part of a step."""

_LOCATIONS = {"env", "file", "path", "mode", "dir", "name", "type"}
"""A name that ends with one of these words says where a secret is, or what kind of secret."""


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Whether something with this name is a secret. Columns (`prompt_key`) and special tokens (`pad_token`) are not.

    >>> is_secret_name("OPENAI_API_KEY"), is_secret_name("reward_kwargs.judge-token"), is_secret_name("prompt_key")
    (True, True, False)
    """
    words = _split(name)
    if not words or name in ("PWD", "pwd") or words[-1] in _LOCATIONS:
        return False
    if _ANYWHERE & set(words) or any(map(_JOINED.fullmatch, words)) or _PAIRS & set(pairwise(words)):
        return True
    while len(words) > 1 and words[-1] in _QUALIFIERS:
        words.pop()
    if words[-1] not in _LAST or words in (["pass"], ["pat"], ["sas"]):
        return False
    return len(words) == 1 or words[-2] not in _ORDINARY


def _split(name: str) -> list[str]:
    """Return the words of a name in lower case, without digits at their ends."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word for part in re.split(r"[\W_]+", spaced.lower()) if (word := part.rstrip("0123456789"))]
