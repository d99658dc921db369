"""Secrets are hidden wherever they appear; other text stays."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shlex
from urllib.parse import quote

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st
from secret_samples import (
    ORDINARY_NAMES,
    ORDINARY_TEXTS,
    POSITION_SECRET,
    SECRET_KEYS,
    SECRET_NAMES,
    SECRET_POSITIONS,
)

import verl.redaction.text as redaction
from verl.config.schema import Config, SftConfig, collect_settings
from verl.redaction import HIDDEN, is_secret_name, redact, redact_settings, remember, remember_arguments
from verl.tracking.console import Console

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret_is_recognized(name: str) -> None:
    assert is_secret_name(name)
    assert redact(f"{name}=pl4in-words and {{'{name}': 'pl4in-words'}}").count("pl4in") == 0
    assert redact_settings({name: "x"}) == {name: HIDDEN}


@pytest.mark.parametrize("name", [*ORDINARY_NAMES, ""])
def test_other_names_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)
    assert redact(f"{name}=abcdef12 and '{name}': 'abcdef12'").count("abcdef12") == 2


@pytest.mark.parametrize("service", SECRET_KEYS)
def test_a_key_of_a_service_is_hidden_without_a_name(service: str) -> None:
    key = SECRET_KEYS[service]
    for text in (f"it said {key} here", f"({key})", f"'{key}'", f"a={key};", repr([key])):
        shown = redact(text)
        assert key not in shown
        assert not any(line in shown for line in key.splitlines() if len(line) > 12), shown


@pytest.mark.parametrize("position", SECRET_POSITIONS)
def test_a_secret_is_hidden_by_its_position(position: str) -> None:
    shown = redact(SECRET_POSITIONS[position])
    assert POSITION_SECRET not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize("text", ORDINARY_TEXTS)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_no_declared_setting_is_taken_for_a_secret() -> None:
    settings = [*collect_settings(Config).values(), *collect_settings(SftConfig).values()]
    assert [setting.key for setting in settings if is_secret_name(setting.key)] == []


def test_settings_are_shown_without_secrets() -> None:
    shown = redact_settings(
        {"url": "http://ann:pa55word@host/v1?api_key=abc123&n=1", "args": {"token": "t", "n": 3, "key": ""}}
    )
    assert redact_settings({"password": 12345678, "credentials": {"value": "a", "on": True}}) == {
        "password": HIDDEN,
        "credentials": {"value": HIDDEN, "on": True},
    }
    assert shown == {"url": "http://ann:***@host/v1?api_key=***&n=1", "args": {"token": HIDDEN, "n": 3, "key": ""}}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://ann:pa55word@host/x", "https://ann:***@host/x"),
        ("https://onlyatoken@host/x", "https://***@host/x"),
        ("GET /x?page=2&access_token=abc", "GET /x?page=2&access_token=***"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: ***"),
        ("{'api_key': 'abc', 'n': 2}", "{'api_key': '***', 'n': 2}"),
        ("password: 'two words' and more", "password: '***' and more"),
        ("it said sk-abcdefghijklmnop1234", "it said ***"),
        ("data.prompt_key=question", "data.prompt_key=question"),
        ("data.id_key=uid", "data.id_key=uid"),
        ("write settings as key=value", "write settings as key=value"),
        ("set section.key=...", "set section.key=..."),
        ("set api_key=values", "set api_key=***"),
        ("unknown key: colour; ?key=abcdef", "unknown key: colour; ?key=***"),
        ("step 3: reward 0.5 at http://host:80/x", "step 3: reward 0.5 at http://host:80/x"),
    ],
)
def test_text_is_shown_without_secrets(text: str, kept: str) -> None:
    assert kept in redact(text)
    assert "pa55word" not in redact(text)


def test_the_value_of_a_secret_variable_is_hidden_wherever_it_turns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "plain-old-words")
    assert redact("KeyError: plain-old-words, and more") == "KeyError: ***, and more"


def test_a_secret_of_the_command_line_is_hidden_wherever_it_turns_up() -> None:
    remember_arguments(["+reward.kwargs.api_key=correct-horse", "a.url=http://u:battery%20staple@h/"])
    assert redact("correct-horse, battery%20staple, battery staple") == "***, ***, ***"


def test_a_secret_of_an_option_is_hidden_wherever_it_turns_up() -> None:
    remember_arguments(["--password", "correct-horse", "--n", "3"])
    assert redact("correct-horse") == HIDDEN
    assert redact_settings(["--password", "staple", "--n", "3"]) == ["--password", HIDDEN, "--n", "3"]


def test_the_password_of_a_url_in_the_environment_is_hidden_wherever_it_turns_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://ann:correct-horse@host/db")
    assert redact("login of ann with correct-horse failed") == "login of ann with *** failed"


@pytest.mark.parametrize(
    "secret", ["ab\"cd'ef-12", "first-line-of-a-key-1\nsecond-line-of-a-key-2\n", "a b&c<d>-12", "ü-ber-12"]
)
def test_a_known_secret_is_hidden_however_it_is_written(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", secret)
    written = [
        secret,
        repr(secret),
        json.dumps(secret),
        shlex.quote(secret),
        quote(secret, safe=""),
        html.escape(secret),
    ]
    written += [base64.b64encode(secret.encode()).decode(), *secret.splitlines(), "\n  ".join(secret.splitlines())]
    for text in written:
        shown = redact(f"before {text} after").removeprefix("before ").removesuffix(" after")
        assert set(shown) <= set("*'\"\n "), shown


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=redaction._MIN_LENGTH))
def test_a_secret_that_is_remembered_is_in_no_redacted_text(secret: str) -> None:
    redaction._known.clear()
    remember({"nested": [{"password": secret}]})
    shown = redact(f"before {secret} after")
    assert not redaction._is_distinctive(secret) or secret == HIDDEN * (len(secret) // 3) or secret not in shown


def test_a_word_is_hidden_under_its_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "disabled")
    assert redact("validation is disabled; SOME_API_KEY=disabled") == "validation is disabled; SOME_API_KEY=***"


@pytest.mark.parametrize(
    "part", ["a", "a.b-c_", "key", "1a_", "a+b", "key=", "-u=", "eyJ-", "https://a/hook/", "pass:", "--a-key "]
)
@pytest.mark.timeout(60)  # minutes, if it grew with the square of the length
def test_a_long_word_is_redacted_in_linear_time(part: str) -> None:
    word = part * (100_000 // len(part))
    assert "hunter2hunter2" not in redact(f"{word} api_key=hunter2hunter2")


@pytest.mark.parametrize("before", ["1", "_", "é", ".", "-"])
def test_a_login_is_hidden_after_any_character(before: str) -> None:
    assert redact(f"{before}https://user:hunter2hunter2@host") == f"{before}https://user:{HIDDEN}@host"


HOSTILE = {
    "title": "\x1b]0;pwned\x07",
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "overwrite": "score 0\rscore 1",
    "backspace": "no\x08\x08yes",
    "8-bit": "\x9b2J",
    "bidi": "\u202etxet",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_control_characters_of_tools_do_not_reach_the_terminal(text: str) -> None:
    out = io.StringIO()
    console = Console(out=rich.console.Console(file=out, force_terminal=True, width=200))
    for write in (console.note, console.advice, console.banner):
        write(f"the tool replied {text}")
    shown = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), 127, *range(128, 160), 0x202E)}


def test_colors_are_removed_and_lines_and_tabs_are_kept() -> None:
    assert redact("\x1b[36mray::f\x1b[0m\n\tdone é 漢") == "ray::f\n\tdone é 漢"
