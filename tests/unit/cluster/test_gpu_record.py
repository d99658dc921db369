"""What `verl gpu-check` records on a machine, which holds only as long as GPUs, driver and versions are the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import ray

from verl.cluster import gpu_record, nodes
from verl.cluster.gpu_record import GpuRecord, read_record, record_stage
from verl.gpu_check.runner import remember
from verl.gpu_check.stage import Context, Result, State

pytestmark = pytest.mark.unit

SETUP = {"GPU": "NVIDIA H100", "driver": "580.1", "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What the machine has, to be changed."""
    found = dict(SETUP)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu_record, "describe_setup", lambda: dict(found))
    return found


def test_a_machine_without_a_record_says_so() -> None:
    assert read_record() == GpuRecord(problem="`verl gpu-check` has not run")


def test_stages_that_pass_are_added_and_one_that_fails_later_is_removed() -> None:
    record_stage("train-ipc", has_passed=True)
    record_stage("sharing", has_passed=True)
    assert read_record() == GpuRecord(frozenset({"train-ipc", "sharing"}))
    record_stage("train-ipc", has_passed=False)
    assert read_record().passed == {"sharing"}


def test_nothing_holds_for_another_driver_and_the_old_result_does_not_come_back(setup: dict[str, str]) -> None:
    record_stage("sharing", has_passed=True)
    setup["driver"] = "590.0"
    assert read_record() == GpuRecord(problem="`verl gpu-check` ran with driver 580.1 (now 590.0)")
    record_stage("versions", has_passed=True)
    assert read_record().passed == {"versions"}


@pytest.mark.parametrize("damaged", ["", "[]", '{"setup": 1, "passed": []}', '{"passed": ["train-ipc"]}', '{"setup"'])
def test_a_damaged_record_is_none(damaged: str, tmp_path: Path) -> None:
    record_stage("sharing", has_passed=True)
    [file] = tmp_path.glob("*/*")
    file.write_text(damaged)
    assert read_record().problem == "`verl gpu-check` has not run"
    record_stage("train-ipc", has_passed=True)
    assert read_record().passed == {"train-ipc"}


def test_only_stages_that_ran_on_gpus_with_the_default_engine_are_recorded(tmp_path: Path) -> None:
    gpu, cpu = Context("cuda", 1, tmp_path), Context("cpu", 0, tmp_path)
    remember(cpu, Result("sharing", State.OK, ""))
    remember(Context("cuda", 1, tmp_path, engine="hf"), Result("sharing", State.OK, ""))
    remember(gpu, Result("sharing", State.SKIPPED, ""))
    assert read_record().problem
    remember(gpu, Result("sharing", State.OK, ""))
    assert read_record().passed == {"sharing"}
    remember(gpu, Result("sharing", State.FAILED, ""))
    assert not read_record().passed


def test_the_setup_names_what_results_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(gpu_record, "query_gpus", lambda field: [f"{field} 2", f"{field} 1", f"{field} 2"])
    found = gpu_record.describe_setup()
    assert list(found) == ["GPU", "driver", "verl", "torch", "vllm"]
    assert found["GPU"] == "name 1 and name 2"


def test_a_node_that_does_not_reply_has_nothing_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    record_stage("sharing", has_passed=True)
    listed = [{"NodeID": key, "NodeManagerHostname": "gpu", "NodeManagerAddress": key * 3} for key in "abc"]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(nodes, "run_on_node", lambda node, function: (node, function))
    monkeypatch.setattr(ray, "wait", lambda tasks, num_returns, timeout: (tasks[:1], tasks[1:]))
    monkeypatch.setattr(ray, "get", lambda task: task[1]())
    assert nodes.read_gpu_records(["a", "c"]) == {
        "gpu (aaa)": GpuRecord(frozenset({"sharing"})),
        "gpu (ccc)": GpuRecord(problem="no reply within 30 s"),
    }
