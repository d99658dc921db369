"""Every acceptance script has a short form, and CI runs each at least once in three commits."""

from __future__ import annotations

import runpy
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "acceptance"
RUNNER = runpy.run_path(str(FOLDER / "_short.py"))


def test_every_script_runs_within_three_commits() -> None:
    names = RUNNER["scripts"]()
    runs = [RUNNER["choose"](names, commits) for commits in range(len(RUNNER["ROTATION"]))]
    assert set().union(*runs) == set(names)
    assert all(len(run) == len(set(run)) for run in runs)


def test_all_means_every_script() -> None:
    names = RUNNER["scripts"]()
    assert sorted(RUNNER["choose"](names, len(RUNNER["ROTATION"]))) == names


def test_every_script_has_a_short_form() -> None:
    assert [name for name in RUNNER["scripts"]() if '"--short"' not in (FOLDER / f"{name}.py").read_text()] == []


def test_a_script_that_ends_well_without_its_verdict_has_failed() -> None:
    result, is_a_pass = RUNNER["Result"], RUNNER["is_a_pass"]
    verdict = '{"name": "torn", "pass": true}'
    assert is_a_pass(result("torn", 1.0, True, f"...\n{verdict}\n"))
    assert not is_a_pass(result("torn", 1.0, False, verdict))
    assert not is_a_pass(result("torn", 1.0, True, ""))
    assert not is_a_pass(result("torn", 1.0, True, verdict.replace("true", "false")))
    assert not is_a_pass(result("merge", 1.0, True, verdict))
