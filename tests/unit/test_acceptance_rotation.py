"""Which tests CI runs at a commit: rotating ones at one commit in six, all others at every commit."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import rotation
from rotation import GROUPS, describe, record_left, rotate_rest

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[1] / "acceptance"
RUNNER = runpy.run_path(str(FOLDER / "_short.py"))


def test_every_short_form_runs_at_one_of_six_commits_or_at_all() -> None:
    names = list(RUNNER["scripts"]())
    assert len(RUNNER["ROTATION"]) == GROUPS
    runs = [RUNNER["choose"](names, group) for group in range(GROUPS)]
    assert set().union(*runs) == set(names)
    for name in names:
        assert sum(run.count(name) for run in runs) in (1, GROUPS), name


def test_all_means_every_script() -> None:
    names = list(RUNNER["scripts"]())
    assert sorted(RUNNER["choose"](names, None)) == names


def test_every_script_has_a_short_form() -> None:
    assert [name for name, path in RUNNER["scripts"]().items() if '"--short"' not in path.read_text()] == []


def test_every_script_is_in_a_group_of_at_most_sixteen_modules() -> None:
    assert [path.name for path in FOLDER.glob("[a-z]*.py")] == [], "move it to the folder of its group"
    assert [folder.name for folder in FOLDER.iterdir() if len(list(folder.glob("*.py"))) > 16] == []
    names = [path.stem for path in FOLDER.glob("*/[a-z]*.py")]
    assert len(names) == len(set(names)), "`make show-NAME` needs one script of a name"


def test_the_group_is_the_number_of_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rotation.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 0, "stdout": "20"})
    )
    assert rotation.current_group() == 2


class Item:
    """A collected test, with the group of its mark."""

    def __init__(self, name: str, group: int | None) -> None:
        self.nodeid, self._group = f"tests/{name}", group

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return None if self._group is None else pytest.Mark(name, (self._group,), {}, _ispytest=True)


class Config:
    def __init__(self, selection: str) -> None:
        self._selection, self.deselected, self.hook = selection, [], self

    def getoption(self, name: str) -> str:
        return self._selection

    def pytest_deselected(self, items: list[Item]) -> None:
        self.deselected += items


def select(monkeypatch: pytest.MonkeyPatch, groups: dict[str, int | None], selection: str = "due") -> list[str]:
    conftest = runpy.run_path(str(FOLDER.parent / "conftest.py"))
    monkeypatch.setitem(conftest["pytest_collection_modifyitems"].__globals__, "current_group", lambda: 2)
    items = [Item(name, group) for name, group in groups.items()]
    conftest["pytest_collection_modifyitems"](Config(selection), items)
    return [item.nodeid.removeprefix("tests/") for item in items]


def test_tests_of_other_groups_are_deselected_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_ROTATED_FILE", str(tmp_path / "left.txt"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    groups = {"always": None, "due": 2, "first": 0, "second[1]": 3, "second[2]": 3}
    assert select(monkeypatch, groups, "all") == list(groups)
    assert select(monkeypatch, groups) == ["always", "due"]
    record_left(["show-torn"])
    line = describe((tmp_path / "left.txt").read_text().splitlines())
    assert line.endswith("ran): first, second (2 cases), show-torn")


def test_a_group_that_never_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.UsageError, match=r"groups of the rotation are 0 to 5: tests/never \(6\)"):
        select(monkeypatch, {"never": GROUPS}, "all")


def test_the_first_cases_of_a_test_run_at_every_commit() -> None:
    first, second, third = rotate_rest(4, ["a", "b", ("c", 1)], keep=1)
    assert first == "a"
    assert (second.values, third.values) == (("b",), ("c", 1))
    assert [mark.args for mark in (*second.marks, *third.marks)] == [(4,), (4,)]


def test_a_script_that_ends_well_without_its_verdict_has_failed() -> None:
    result, is_a_pass = RUNNER["Result"], RUNNER["is_a_pass"]
    verdict = '{"name": "torn", "pass": true}'
    assert is_a_pass(result("torn", 1.0, True, f"...\n{verdict}\n"))
    assert not is_a_pass(result("torn", 1.0, False, verdict))
    assert not is_a_pass(result("torn", 1.0, True, ""))
    assert not is_a_pass(result("torn", 1.0, True, verdict.replace("true", "false")))
    assert not is_a_pass(result("merge", 1.0, True, verdict))


def test_a_script_that_cannot_run_here_has_neither_passed_nor_failed() -> None:
    result = RUNNER["Result"]
    verdict = '{"name": "slurm", "skipped": "no Slurm", "pass": false}'
    assert result("slurm", 1.0, False, verdict).is_skipped
    assert not RUNNER["is_a_pass"](result("slurm", 1.0, True, verdict))
    assert not result("slurm", 1.0, False, "Traceback").is_skipped
    assert not result("drift", 1.0, False, '{"name": "drift", "skipped": ["one case"], "pass": false}').is_skipped
