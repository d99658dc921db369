"""`verl env`: what a bug report contains, and what it must not."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

import verl
from verl.cli import main

pytestmark = pytest.mark.unit


def test_versions_and_machine_are_printed_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "machine", "accelerators", "environment"]
    assert report["versions"]["verl"].startswith(verl.__version__)
    assert report["versions"]["python"].startswith(platform.python_version())
    assert {"torch", "ray", "transformers"} <= report["versions"].keys()
    assert report["versions"]["torch"] in text
    assert report["machine"]["system"] in text


def test_secrets_the_home_directory_and_other_variables_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "plain-old-words")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pa55word@host/")
    monkeypatch.setenv("HF_HOME", str(Path.home() / "cache"))
    monkeypatch.setenv("MY_LETTERS", "private")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "plain-old-words" not in text
    assert "pa55word" not in text
    assert "private" not in text
    assert "~/cache" in text
