"""The page of a report: it contains what the run wrote, as data that cannot become HTML, within its size."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import BEGAN, HOSTILE, RESPONSES, Size, write_run

from verl.report.contents import Limits
from verl.report.html import build_page, write_page
from verl.tracking.run_folder import RunFolder

pytestmark = pytest.mark.unit

SIZE = Size(steps=6, groups=2, validation=3, validation_every=3)
SAMPLES = 6 * 2 * RESPONSES + 2 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project") / "run"
    assert write_run(path, SIZE, is_hostile=True) == SAMPLES
    return path


class ScriptParser(HTMLParser):
    """Collects the elements of a page, and the text of its scripts by id."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self.policy = self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self._open = (attributes.get("id") or tag) if tag in ("script", "style") else ""
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def parse(page: bytes) -> ScriptParser:
    parser = ScriptParser()
    parser.feed(page.decode())
    return parser


def unpack(page: bytes) -> dict[str, Any]:
    """Return the data of a page by name."""
    return {
        name.removeprefix("data-"): json.loads(gzip.decompress(base64.b64decode(text)))
        for name, text in parse(page).scripts.items()
        if name.startswith("data-")
    }


def build(folder: Path, **options: Any) -> bytes:
    return build_page(RunFolder(folder), BEGAN + 500, **options)


@pytest.fixture(scope="module")
def page(folder: Path) -> bytes:
    return build(folder)


def test_the_page_contains_the_run(folder: Path, page: bytes) -> None:
    data = unpack(page)
    run = data["run"]
    assert run["name"] == f"{folder.parent.name}/run"
    assert run["state"]["step"] == 6
    assert run["metrics"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert run["metrics"]["values"]["val/sums/mean@1"][:2] == [None, None]
    assert "NaN" in run["metrics"]["values"]["actor/pg_loss"]
    assert [group["title"] for group in run["groups"]][:2] == ["Reward", "Validation"]
    assert len(run["phases"]["steps"]) == 6
    assert run["phases"]["steps"]["1"][0][2] == 0
    assert ["actor_rollout_ref.rollout.n", "8", "sums.yaml"] in run["starts"][0]["settings"]
    assert len(run["samples"]["score"]) == len(data["texts-0"]["rows"]) == SAMPLES
    assert sum(len(tokens) for name, tokens in data.items() if name.startswith("tokens-")) == SAMPLES
    assert run["omissions"] == []


def test_phases_of_many_ranks_are_kept_for_the_last_step_and_every_nth(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.report.contents._MOST_PHASES", 60)
    assert sorted(unpack(build(folder))["run"]["phases"]["steps"]) == ["3", "6"]


def test_a_sample_has_its_segments_and_the_numbers_of_its_tokens(folder: Path, page: bytes) -> None:
    data = unpack(page)
    run = RunFolder(folder)
    row = run.read_samples(run.list_samples()[0]).slice(0, 1).to_pylist()[0]
    prompt, segments, facts = data["texts-0"]["rows"][0]
    assert data["texts-0"]["prompts"][prompt] == row["prompt"]
    assert "".join(segments) == row["response"]
    assert facts["truth"] == row["ground_truth"]
    assert facts["metrics"]["format"] == 1
    tokens, start = data["tokens-0"]["0"], row["mask"].index(True)
    assert "".join(tokens["pieces"]) == row["response"]
    assert sum(tokens["generated"]) == sum(row["mask"]) == data["run"]["samples"]["tokens"][0]
    gap = row["logprobs"][start] - row["rollout_logprobs"][start]
    assert tokens["gaps"][0] / 1000 == pytest.approx(gap, abs=6e-4)
    assert tokens["advantages"][0] / 1000 == pytest.approx(row["advantages"][start], abs=6e-4)
    assert data["tokens-2"][str(data["run"]["samples"]["with_tokens"]["2"][0])]["advantages"] is not None


def test_validation_has_tokens_without_numbers_of_the_trainer(page: bytes) -> None:
    data = unpack(page)
    file = data["run"]["samples"]["files"].index(["val", 3])
    tokens = next(iter(data[f"tokens-{file}"].values()))
    assert tokens["advantages"] is tokens["gaps"] is tokens["entropies"] is None
    assert tokens["rollout_logprobs"]


def test_text_of_the_run_is_not_in_the_html(page: bytes) -> None:
    assert HOSTILE.encode() not in page
    assert b"window.hacked" not in page
    parsed = parse(page)
    assert parsed.tags.count("img") == 0
    assert {name for name in parsed.scripts if not name.startswith("data-")} == {"style", "script"}
    assert all(re.fullmatch(r"[\w+/=]+", text) for name, text in parsed.scripts.items() if name.startswith("data-"))
    assert f"reward/{HOSTILE}" in unpack(page)["run"]["metrics"]["values"]


def test_the_policy_allows_the_script_and_style_of_the_page_alone(page: bytes) -> None:
    parsed = parse(page)
    policy = dict(part.strip().split(" ", 1) for part in parsed.policy.split(";"))
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(parsed.scripts[name].encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "http" not in parsed.policy


def test_the_script_never_parses_text_as_html() -> None:
    page = Path(__file__).parents[3] / "verl/report/page"
    script = "\n".join(path.read_text() for path in page.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc", script)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)


def test_limits_are_kept_and_what_is_missing_is_said(folder: Path) -> None:
    data = unpack(build(folder, limits=Limits(samples=60, characters=12_000, tokens=2_500)))
    count = len(data["run"]["samples"]["score"])
    assert 0 < count <= 60
    stored = [text for prompt, segments, _ in data["texts-0"]["rows"] for text in segments]
    assert sum(map(len, stored)) < 12_000 + 50 * len(stored)
    assert any("characters are not shown" in text for text in stored)
    chosen = data["run"]["samples"]["with_tokens"]
    for file, positions in chosen.items():
        assert data["run"]["samples"]["files"][int(file)][0] == "val" or len(positions) % RESPONSES == 0, "whole groups"
    with_tokens = sum(map(len, chosen.values()))
    first, second, third = data["run"]["omissions"]
    assert first == f"{SAMPLES - count} of {SAMPLES} recorded samples are not in this page."
    assert second.startswith(f"The texts of {count} samples are shortened")
    assert third.startswith(f"{with_tokens} of {count} samples have the numbers of their tokens")


def test_samples_are_reduced_until_the_page_is_small_enough(folder: Path, page: bytes) -> None:
    bare = len(build(folder, limits=Limits(samples=1, characters=0, tokens=0)))
    limit = bare + (len(page) - bare) // 2
    assert len(build(folder, max_bytes=limit)) <= limit


def test_a_run_without_samples_or_steps_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text('{"step": 0, "time": 1.0, "environment": {"a": {"b": NaN}}}\n')
    run = unpack(build(tmp_path))["run"]
    assert run["samples"]["score"] == run["metrics"]["steps"] == []


def test_a_damaged_sample_file_is_counted(tmp_path: Path) -> None:
    write_run(tmp_path, Size(2, 1, 1, 2), is_killed=True)
    (tmp_path / "samples" / "train_00000009.parquet").write_bytes(b"PAR1")
    assert unpack(build(tmp_path))["run"]["omissions"] == ["Sample files that could not be read: 1."]


def test_secrets_are_hidden(tmp_path: Path) -> None:
    start = {"step": 0, "time": 1.0, "command": "verl train a=https://me:hunter22@host/x"}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    warning = {"step": 1, "time": 2.0, "text": "failed: api_key=abcdef123456"}
    (tmp_path / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    text = json.dumps(unpack(build(tmp_path)))
    assert "hunter22" not in text
    assert "abcdef123456" not in text


def test_the_page_is_replaced_at_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for content in (b"first", b"second"):
        write_page(content, path)
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
