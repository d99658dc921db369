"""Findings: split from messages, sorted, and printed within the width of a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from verl.commands.doctor import describe_report, print_report
from verl.preflight.finding import Finding, Report, Severity

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("message", "place", "problem", "fix"),
    [
        ("trainer.nnodes: 0 must be at least 1; set trainer.nnodes=1", "trainer.nnodes", "0 must be at least 1", "set"),
        ("trainer.sed: is not a setting; did you mean trainer.seed?", "trainer.sed", "is not a setting", "did you"),
        ("--lr: is not an option; set optim.lr=1e-6", "--lr", "is not an option", "set optim.lr=1e-6"),
        (
            "model.path=a/b: there is no such directory; . contains: c; set model.path=c",
            "model.path=a/b",
            "there",
            "set",
        ),
        (
            "trainer.foo: is not a setting; settings of trainer: nnodes, seed",
            "trainer.foo",
            "is not",
            "settings of trainer: nnodes",
        ),
        (
            "x.csv ends in '.csv'; data files are .parquet: convert it",
            "",
            "x.csv ends in '.csv'; data files",
            "convert it",
        ),
        ("nothing to split", "", "nothing to split", ""),
        (
            "data.train_files: no tran.parquet; . contains: run.yaml, train.parquet; did you mean train.parquet?",
            "data.train_files",
            "no tran.parquet; . contains: run.yaml, train.parquet",
            "did you mean train.parquet?",
        ),
    ],
)
def test_a_message_is_split_into_place_problem_and_fix(message: str, place: str, problem: str, fix: str) -> None:
    finding = Finding.from_message(message)
    assert finding.place == place
    assert finding.problem.startswith(problem)
    assert finding.fix.startswith(fix)
    assert bool(finding.fix) == bool(fix)


def test_the_most_serious_findings_come_first_and_each_once() -> None:
    note, warning, error = (Finding(severity, severity.name, "p") for severity in reversed(Severity))
    report = Report()
    report.add("a", [note, warning, note])
    assert not report.failed
    report.add("b", [error, error])
    assert report.sorted_findings == [error, warning, note]
    assert report.failed == {"b"}


@pytest.mark.parametrize("width", [40, 80, 160])
def test_findings_fit_the_width_and_lose_no_word(width: int) -> None:
    report = Report(checked={"settings": "4 given " * 20}, skipped={"memory": "no GPU"})
    report.add("x", [Finding(Severity.ERROR, "data.train_files", "many words " * 30, "use fewer " * 20)])
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, highlight=False, markup=False, emoji=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert " ".join(out.getvalue().split()).count("many words") == 30
    assert "not checked" in lines
    assert lines[-1] == "1 error: a run would not start"


def test_control_characters_and_secrets_of_files_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    report = Report()
    text = "\x1b[31mred 0123456789abcdef0123456789abcdef01234567"
    report.add("x", [Finding(Severity.ERROR, "data", text, text)])
    out = io.StringIO()
    print_report(report, Console(file=out, width=200, highlight=False, markup=False, emoji=False))
    for said in (out.getvalue(), str(describe_report(report))):
        assert "0123456789abcdef0123456789abcdef01234567" not in said
    assert "\x1b" not in out.getvalue()
