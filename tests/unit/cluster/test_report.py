"""Reports name the process that is missing, stopped or gone, with its stack."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from verl.cluster.hangs.detector import StalledCall, Watchdog
from verl.cluster.hangs.pending_calls import CallTarget, PendingCalls, Timeout
from verl.cluster.hangs.process_info import ProcessInfo
from verl.cluster.hangs.report import ProcessLocation, Reporter, diagnose

pytestmark = pytest.mark.unit

TIMEOUT = Timeout(20.0, "trainer.deadlines.train")
RANKS = tuple(CallTarget("train worker", rank) for rank in range(4))
LOCATIONS = {target: ProcessLocation(100 + rank, "node", "10.0.0.1") for rank, target in enumerate(RANKS)}
IN_A_COLLECTIVE = (
    "all_reduce (/site/torch/distributed/distributed_c10d.py:99)",
    "update (/x/verl/training/policy/trainer.py:9)",
)
IN_A_HOOK = ("sleeps (/home/me/hook.py:3)", "update (/x/verl/training/policy/trainer.py:7)")
IDLE = ("wait (/lib/threading.py:327)", "_run (/x/verl/cluster/hangs/detector.py:9)")


def stall(*targets: CallTarget, peers: int = 4, cause: str = "") -> StalledCall:
    return StalledCall("controller", "update", targets, 20.0, 0.0, TIMEOUT, True, peers, ("the table",), cause)


def process(target: CallTarget, *frames: str, state: str = "sleeping") -> list[ProcessInfo]:
    return [ProcessInfo(LOCATIONS[target].pid, "ray::TrainWorker", state, (IDLE, frames) if frames else ())]


def test_the_rank_that_is_missing_from_a_collective_is_named_with_its_frame() -> None:
    seen = {target: process(target, *IN_A_COLLECTIVE) for target in RANKS} | {RANKS[2]: process(RANKS[2], *IN_A_HOOK)}
    first, second = diagnose(stall(*RANKS), LOCATIONS, seen)
    assert first.startswith(
        "train worker 2 (pid 102 on 10.0.0.1) did not join the collective in which train workers 0-1, 3 wait"
    )
    assert "is alive (sleeping) in sleeps (/home/me/hook.py:3)" in first
    assert second.startswith("train workers 0-1, 3 wait in all_reduce")


def test_a_rank_that_has_returned_without_the_collective_is_named() -> None:
    lines = diagnose(stall(RANKS[0], peers=2), LOCATIONS, {RANKS[0]: process(RANKS[0], *IN_A_COLLECTIVE)})
    assert (
        lines[0]
        == "train worker 1 did not join the collective in which train worker 0 waits: the call has returned already"
    )


def test_a_stopped_rank_is_named_first_wherever_it_was_stopped() -> None:
    seen = {target: process(target, *IN_A_COLLECTIVE) for target in RANKS}
    seen[RANKS[3]] = process(RANKS[3], *IN_A_COLLECTIVE, state="stopped")
    lines = diagnose(stall(*RANKS), LOCATIONS, seen)
    assert lines[0].startswith("train worker 3 (pid 103 on 10.0.0.1) is stopped")
    assert "kill -CONT 103" in lines[0]
    assert lines[1].startswith("train workers 0-2 wait in all_reduce")
    assert not any("did not join" in line for line in lines)


def test_a_stopped_child_is_named_with_its_parent() -> None:
    seen = {RANKS[0]: [*process(RANKS[0], *IDLE), ProcessInfo(777, "VLLM::EngineCore", "stopped")]}
    [line] = diagnose(stall(RANKS[0], peers=0), LOCATIONS, seen)
    assert line.startswith("train worker 0 (pid 100 on 10.0.0.1): its child process 777 (VLLM::EngineCore) is stopped")


def test_only_the_exit_of_the_target_itself_is_reported_not_that_of_a_child() -> None:
    seen = {RANKS[0]: [*process(RANKS[0], *IN_A_HOOK), ProcessInfo(777, "a helper", "zombie")]}
    assert "in sleeps" in diagnose(stall(RANKS[0], peers=0), LOCATIONS, seen)[0]
    seen = {RANKS[0]: process(RANKS[0], state="dead")}
    assert diagnose(stall(RANKS[0], peers=0), LOCATIONS, seen)[0] == "train worker 0 (pid 100 on 10.0.0.1) has exited"


def test_processes_that_never_started_and_nodes_that_do_not_respond_are_named() -> None:
    assert diagnose(stall(RANKS[0]), {}, {}) == ["train worker 0: its process has not started"]
    assert diagnose(stall(CallTarget("file system")), {}, {}) == ["file system: does not respond"]
    assert diagnose(stall(RANKS[0]), LOCATIONS, {}) == [
        "train worker 0 (pid 100 on 10.0.0.1): its node does not respond"
    ]


def locate(targets: Sequence[CallTarget]) -> dict[CallTarget, ProcessLocation]:
    return {target: LOCATIONS[target] for target in targets if target in LOCATIONS}


def inspect(locations: Mapping[CallTarget, ProcessLocation]) -> dict[CallTarget, list[ProcessInfo]]:
    """Rank 1 sleeps in a hook."""
    return {target: process(target, *(IN_A_HOOK if target == RANKS[1] else IN_A_COLLECTIVE)) for target in locations}


def reporter(folder: Path, lines: list[str]) -> Reporter:
    return Reporter(
        folder, lambda text: lines.append(f"note {text}"), lambda text: lines.append(f"! {text}"), locate, inspect
    )


def test_the_report_has_the_pending_calls_and_all_stacks_and_the_console_names_it(tmp_path: Path) -> None:
    lines: list[str] = []
    path = reporter(tmp_path / "hangs", lines).report(stall(*RANKS[:2], peers=2))
    text = Path(path).read_text()
    assert Path(path).parent == tmp_path / "hangs"
    for part in ("the table", "train worker 1: pid 101 on 10.0.0.1", *IN_A_HOOK, *IN_A_COLLECTIVE, "test_report.py"):
        assert part in text
    [line] = lines
    assert line.startswith("! controller has waited 20 s")
    assert "(trainer.deadlines.train=20). train worker 1 (pid 101 on 10.0.0.1) did not join the collective" in line
    assert line.endswith(f"Full report: {path}")


def test_a_known_cause_is_reported_unchanged(tmp_path: Path) -> None:
    lines: list[str] = []
    stalled = stall(CallTarget("reward function"), peers=0, cause="my_reward.py: gave no score\nIt was here: f")
    text = Path(reporter(tmp_path, lines).report(stalled)).read_text()
    assert "It was here: f" in text
    assert "my_reward.py: gave no score. Full report" in lines[0]


def test_at_half_of_the_timeout_there_is_a_line_and_no_report(tmp_path: Path) -> None:
    lines: list[str] = []
    half = StalledCall("controller", "update", RANKS[:1], 10.0, 0.0, TIMEOUT, is_overdue=False)
    assert reporter(tmp_path, lines).report(half) == ""
    assert lines[0].endswith("timeout after 20 s (trainer.deadlines.train=20)")
    assert list(tmp_path.iterdir()) == []


def test_all_calls_that_a_report_covers_get_its_path_also_later_ones() -> None:
    now = [0.0]
    calls = PendingCalls(lambda: now[0])
    watchdog = Watchdog(calls, "controller", lambda stall: "report.txt" if stall.is_overdue else "")
    with calls.track_call("update", target=RANKS[0], timeout=TIMEOUT) as first:
        now[0] = 10.0
        with calls.track_call("update", target=RANKS[0], timeout=TIMEOUT) as second:
            watchdog.tick()
            assert (first.report, second.report) == ("", "")
            now[0] = 20.0
            watchdog.tick()
            assert (first.report, second.report) == ("report.txt", "")
            now[0] = 30.0
            watchdog.tick()
            assert second.report == "report.txt"
