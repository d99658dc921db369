"""`verl audit` finds every way in which the records of a run can contradict each other, and none in a good run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint.files import make_directory, write
from verl.checkpoint.manifest import CheckpointDir
from verl.commands.runs.audit import Audit, audit_run, main
from verl.errors import VerlError
from verl.tracking.sample_files import get_sample_file, write_samples

pytestmark = pytest.mark.unit


def record(step: int, trained: list[list[int]], position: int, **others: Any) -> dict[str, Any]:
    """Return the record of a step; each of the trained prompts is [position, oldest version, newest version]."""
    return {
        "step": step,
        "version": step - 1,
        "max_staleness": 2,
        "position": position,
        "trained": [[*each, 4] for each in trained],
        "rejected": [],
        "dropped": [],
        **others,
    }


GOOD = [
    record(1, [[1, 0, 0], [2, 0, 0]], 0),
    record(2, [[3, 0, 1], [4, 1, 1]], 0, rejected=[5]),
    record(3, [[0, 0, 2], [7, 1, 2]], 8, dropped=[6]),
]


def make_run(folder: Path, records: list[dict[str, Any]], states: dict[int, dict[str, Any]] | None = None) -> Path:
    (folder / "trained.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    checkpoints = CheckpointDir(folder)
    for step, state in (states or {}).items():
        directory = checkpoints.begin(step)
        make_directory(directory / "actor")
        checkpoints.commit(step, {"actor/0": write(directory / "actor" / "0", b"x")}, {"data": state})
    return folder


def test_a_good_run_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = {2: {"position": 0, "consumed": [1, 2, 3, 4, 5]}, 3: {"position": 8}}
    make_run(tmp_path, GOOD, states)
    assert audit_run(tmp_path) == Audit(
        steps=3, trained=6, rejected=1, dropped=1, staleness={0: 3, 1: 2, 2: 1}, checkpoints=2, position=8
    )
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("3 steps, 6 prompts trained on, each once\n1 rejected")
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_prompts_that_are_still_generated_are_counted(tmp_path: Path) -> None:
    result = audit_run(make_run(tmp_path, GOOD[:2], {2: {"position": 0, "consumed": [1, 2, 3, 4, 5]}}))
    assert (result.problems, result.open) == ([], 1)


def resume(step: int, position: int, consumed: list[int], time: float = 0.0) -> dict[str, Any]:
    return {"step": step, "time": time, "resumed": True, "position": position, "consumed": consumed}


def test_a_resume_continues_where_the_records_end(tmp_path: Path) -> None:
    assert audit_run(make_run(tmp_path, [*GOOD[:2], resume(2, 0, [1, 2, 3, 4, 5]), GOOD[2]])).problems == []
    [problem] = audit_run(make_run(tmp_path, [*GOOD[:2], resume(2, 0, [1, 2, 3, 5]), GOOD[2]])).problems
    assert problem == "the resume after step 2 is wrong about position 4"
    [problem, *_] = audit_run(make_run(tmp_path, [GOOD[0], resume(2, 0, [1, 2, 3, 4, 5]), GOOD[2]])).problems
    assert problem == "the run resumed after step 2, but the last record is step 1"


def test_a_run_that_was_resumed_in_another_folder_is_checked_from_there_on(tmp_path: Path) -> None:
    result = audit_run(make_run(tmp_path, [resume(2, 0, [1, 2, 3, 4, 5]), GOOD[2]], {3: {"position": 8}}))
    assert (result.problems, result.steps, result.trained) == ([], 3, 2)


def test_checkpoints_of_steps_that_a_run_went_back_behind_are_not_compared(tmp_path: Path) -> None:
    records = [GOOD[0], resume(1, 0, [1, 2], time=time.time() + 60), *GOOD[1:]]
    assert audit_run(make_run(tmp_path, records, {2: {"position": 5}})).checkpoints == 0
    records[1]["time"] = 0.0
    assert len(audit_run(make_run(tmp_path, records, {2: {"position": 5}})).problems) == 1


def write_metrics(folder: Path, **others: float) -> None:
    """Write what `GOOD` has as metrics, but for some of the last step."""
    lines = [
        {"step": 1, "data/position": 0, "weights/version": 1, "training/staleness": 0},
        {"step": 2, "data/position": 0, "weights/version": 2, "training/staleness": 1},
        {"step": 3, "data/position": 8, "weights/version": 3, "training/staleness": 2, **others},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_records_are_compared_with_the_metrics(tmp_path: Path) -> None:
    write_metrics(make_run(tmp_path, GOOD))
    assert (audit_run(tmp_path).problems, audit_run(tmp_path).metrics) == ([], 3)
    write_metrics(tmp_path, **{"training/staleness": 1.0})
    [problem] = audit_run(tmp_path).problems
    assert problem == "step 3: metrics.jsonl has training/staleness=1, but trained.jsonl means 2"
    write_metrics(tmp_path, **{"data/position": 7.0, "weights/version": 2.0})
    assert len(audit_run(tmp_path).problems) == 2


def record_samples(folder: Path, step: int, versions: dict[int, list[int]], scored: float = 1.0) -> None:
    rows = [{"group": group, "versions": [-1, *each], "scored": scored} for group, each in versions.items()]
    (folder / "samples").mkdir(exist_ok=True)
    write_samples(get_sample_file(folder, "train", step), rows)


def test_records_are_compared_with_the_versions_of_tokens(tmp_path: Path) -> None:
    write_metrics(make_run(tmp_path, GOOD))
    record_samples(tmp_path, 2, {3: [0, 0, 1], 4: [1]})
    assert (audit_run(tmp_path).problems, audit_run(tmp_path).samples) == ([], 2)
    record_samples(tmp_path, 2, {3: [1, 1], 9: [1]})
    assert audit_run(tmp_path).problems == [
        "step 2: the tokens of position 3 in samples/ are of versions 1 to 1, but trained.jsonl says 0 to 1",
        "step 2: samples/ has position 9, but trained.jsonl does not",
    ]


def test_samples_of_a_step_that_a_run_went_back_behind_are_not_compared(tmp_path: Path) -> None:
    write_metrics(make_run(tmp_path, [GOOD[0], resume(1, 0, [1, 2], time=5.0), *GOOD[1:]]))
    record_samples(tmp_path, 2, {9: [0]}, scored=4.0)
    assert (audit_run(tmp_path).problems, audit_run(tmp_path).resumes) == ([], 1)
    record_samples(tmp_path, 2, {9: [0]}, scored=6.0)
    assert len(audit_run(tmp_path).problems) == 1


def test_prompts_without_a_response_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = record(1, [[0, 0, 0]], 1) | {"trained": [[0, 0, 0, 0]]}
    assert main([str(make_run(tmp_path, [empty]))]) == 0
    assert "1 of them without a response" in capsys.readouterr().out


def test_the_last_line_may_be_incomplete_while_the_run_goes_on(tmp_path: Path) -> None:
    make_run(tmp_path, GOOD)
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write('{"step": 4, "vers')
    assert audit_run(tmp_path).steps == 3
    (tmp_path / "trained.jsonl").write_text("{\n" + json.dumps(GOOD[0]) + "\n")
    with pytest.raises(VerlError, match="line 1 is not JSON"):
        audit_run(tmp_path)


@pytest.mark.parametrize(
    ("records", "states", "problem"),
    [
        pytest.param(
            [*GOOD[:2], record(3, [[0, 0, 2], [4, 1, 2]], 6)], {}, "position 4 was used by step 2", id="twice"
        ),
        pytest.param([GOOD[0], GOOD[2]], {}, "step 3 follows step 1", id="a step is missing"),
        pytest.param([GOOD[0], *GOOD], {}, "step 1 follows step 1", id="a step is repeated"),
        pytest.param([GOOD[0], record(2, [[3, 1, 1]], 4)], {}, "step 2 skipped position 0", id="skipped"),
        pytest.param([*GOOD[:2], record(3, [[0, -1, 2]], 6)], {}, "tokens of versions -1 to 2", id="too old"),
        pytest.param([record(1, [[0, 0, 1]], 1)], {}, "tokens of versions 0 to 1", id="from the future"),
        pytest.param(
            [GOOD[0], record(2, [[0, 2, 2], [3, 2, 2]], 4, version=2)],
            {},
            "version 2 of the weights, not 1",
            id="shifted",
        ),
        pytest.param(
            GOOD, {2: {"position": 0, "consumed": [1, 2, 3]}}, "wrong about position 4; position 5", id="lost"
        ),
        pytest.param(GOOD, {3: {"position": 9}}, "the checkpoint of step 3 is wrong about position 8", id="ahead"),
    ],
)
def test_contradictions_are_found(
    tmp_path: Path, records: list[dict[str, Any]], states: dict[int, dict[str, Any]], problem: str
) -> None:
    make_run(tmp_path, records, states)
    assert any(problem in found for found in audit_run(tmp_path).problems)
    assert main([str(tmp_path)]) == 1


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"trained\.jsonl cannot be read"):
        audit_run(tmp_path)
