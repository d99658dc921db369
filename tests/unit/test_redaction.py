"""What is a secret is hidden wherever it turns up, and what is none stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verl.redaction as redaction
from verl.config.schema import Config, SftConfig, collect_settings
from verl.redaction import (
    HIDDEN,
    _is_distinctive,
    is_secret_name,
    redact,
    redact_settings,
    remember,
    remember_arguments,
)

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    "name",
    ["api_key", "OPENAI_API_KEY", "HF_TOKEN", "password", "AWS_SECRET_ACCESS_KEY", "apiKey", "db.passwd", "x-auth"],
)
def test_a_name_that_says_secret_is_one(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["prompt_key", "data.id_key", "max_tokens", "PWD", "key_env", "pad_token", "tokenizer_path", "monkey", ""],
)
def test_other_names_are_none(name: str) -> None:
    assert not is_secret_name(name)


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
        ("Authorization: Bearer abcdefgh12345678", "Authorization: *** ***"),
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


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=redaction._MIN_LENGTH))
def test_a_secret_that_is_remembered_is_in_no_redacted_text(secret: str) -> None:
    redaction._known.clear()
    remember({"nested": [{"password": secret}]})
    shown = redact(f"before {secret} after")
    assert not _is_distinctive(secret) or secret == HIDDEN * (len(secret) // 3) or secret not in shown


def test_a_word_is_hidden_under_its_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "disabled")
    assert redact("validation is disabled; SOME_API_KEY=disabled") == "validation is disabled; SOME_API_KEY=***"


@pytest.mark.parametrize("part", ["a", "a.b-c_", "key", "1a_", "a+b"])
@pytest.mark.timeout(60)  # minutes, if it grew with the square of the length
def test_a_long_word_takes_no_long_time(part: str) -> None:
    word = part * (100_000 // len(part))
    assert redact(f"{word} api_key=hunter2hunter2") == f"{word} api_key={HIDDEN}"


@pytest.mark.parametrize("before", ["1", "_", "é", ".", "-"])
def test_what_stands_right_before_a_login_does_not_save_it(before: str) -> None:
    assert redact(f"{before}https://user:hunter2hunter2@host") == f"{before}https://user:{HIDDEN}@host"
