"""Secrets that are recognized without a name: keys of well-known services, signed URLs, options of command lines."""

from __future__ import annotations

import re

from verl.redaction.names import is_secret_name

HIDDEN = "***"

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    + "|".join(
        [
            # models and data
            r"(?:sk|rk|pk)-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gsk_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}",
            r"xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}|tgp_v1_[\w-]{20,}|fw_[A-Za-z0-9]{20,}",
            r"lsv2_(?:pt|sk)_[\w-]{20,}|jina_[A-Za-z0-9]{20,}|tvly-[\w-]{20,}|dapi[0-9a-f]{32}|wandb_v\d_\w{20,}",
            # source code and packages
            r"gh[oprsu]_\w{20,}|github_pat_\w{20,}|gl(?:pat|dt|ft|soat|rt|cbt|ptt|imt|agent|oas)-[\w.-]{16,}",
            r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|rubygems_[0-9a-f]{40,}|dckr_(?:pat|oat)_[\w-]{20,}|AT(?:ATT|CTT)3x[\w=-]{30,}",
            # clouds
            r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|LTAI[A-Za-z0-9]{16,}",
            r"\w{3}\dQ~[\w.~-]{30,}|[A-Za-z0-9+/]{86}==|do[opr]_v1_[0-9a-f]{40,}|hv[bs]\.[\w-]{20,}|sbp_[0-9a-f]{40}",
            r"pscale_(?:tkn|pw|oauth)_[\w.-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{50,}|glsa_\w{30,}|sntry[su]_[\w=+/-]{30,}",
            # messages and payments
            r"xox[a-z]-[\w-]{10,}|xapp-[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|SK[0-9a-f]{32}|key-[0-9a-f]{32}|\d{8,10}:AA[\w-]{30,}",
            r"[MNO][\w-]{22,27}\.[\w-]{6}\.[\w-]{27,}|(?:sk|rk)_(?:live|test)_\w{16,}|whsec_[\w+/=]{16,}|shp(?:at|ss|ca|pa)_\w{20,}",
            r"xkeysib-[\w-]{30,}|lin_api_\w{20,}|ntn_\w{20,}|secret_[A-Za-z0-9]{40,}|figd_[\w-]{20,}|sq0(?:atp|csp)-[\w-]{20,}",
            r"PMAK-[\w-]{20,}|NRAK-[A-Z0-9]{20,}|eyJ[\w-]{8,1000}\.[\w-]{8,8000}\.[\w-]{8,}",
        ]
    )
    + ")"
)
_BEARER = re.compile(r"\b(?P<kind>Bearer|Basic|Token)\s+(?P<value>[\w.~+/=-]{8,})")
_COOKIE = re.compile(r"\b(?P<kind>(?:Set-)?Cookie:[ ]*)[^\s'\"][^\r\n'\"]*", re.I)
_SIGNED = re.compile(r"(?P<name>[?&;](?:[\w-]{0,40}signature|sig|sign|hmac)=)[^\s&'\"<>]+", re.I)
_HOOK = re.compile(
    r"(?P<start>https?://(?:[\w.-]+/(?:[\w.-]{1,40}/){0,6}?(?:hooks?|webhooks?|webhookb2|services|workflows|triggers)/"
    r"|api\.telegram\.org/(?:file/)?bot))(?P<rest>[^\s'\"<>?#]+)",
    re.I,
)
_OPAQUE = re.compile(r"(?=[^/]*\d)[\w:@.-]{16,}")
"""Part of a path that nobody has chosen."""

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
    text = _BEARER.sub(_mask_bearer, text)
    text = _SIGNED.sub(rf"\g<name>{HIDDEN}", text)
    text = _HOOK.sub(_mask_hook, text)
    text = _USER.sub(_mask_user, text)
    text = _LOGIN_OPTION.sub(rf"\g<start>{HIDDEN}", text)
    return _OPTION.sub(_mask_option, text)


def _mask_bearer(match: re.Match[str]) -> str:
    """Hide what is no word: "Token embeddings" stays."""
    return match[0] if match["value"].isalpha() and len(match["value"]) < 16 else f"{match['kind']} {HIDDEN}"


def _mask_hook(match: re.Match[str]) -> str:
    """Hide the path of a webhook: who knows it may post."""
    is_opaque = any(map(_OPAQUE.fullmatch, match["rest"].split("/")))
    return f"{match['start']}{HIDDEN}" if is_opaque else match[0]


def _mask_user(match: re.Match[str]) -> str:
    """Hide the password in `-u name:password`, but not the ids in `-u 1000:1000`."""
    is_id = match["user"].isdigit() and match["value"].isdigit()
    return match[0] if is_id else f"{match['start']}{HIDDEN}"


def _mask_option(match: re.Match[str]) -> str:
    """Hide the value of `--password value`."""
    value = match["value"].strip("'\"")
    if not is_secret_name(match["name"]) or _PLACEHOLDER.fullmatch(value):
        return match[0]
    return f"{match['name']}{match['is']}{match['value'].replace(value, HIDDEN)}"
