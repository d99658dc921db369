"""What the watchdog makes of states and stacks: it names who is missing, frozen or gone, and writes it all down."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from verl.cluster.hangs.detector import ProcessLocation, Reporter, StalledCall, Watchdog, diagnose
from verl.cluster.hangs.pending_calls import CallTarget, Deadline, PendingCalls
from verl.cluster.hangs.process_info import ProcessInfo

pytestmark = pytest.mark.unit

DEADLINE = Deadline(20.0, "trainer.deadlines.train")
RANKS = tuple(CallTarget("train worker", rank) for rank in range(4))
PLACES = {target: ProcessLocation(100 + rank, "node", "10.0.0.1") for rank, target in enumerate(RANKS)}
IN_A_COLLECTIVE = (
    "all_reduce (/site/torch/distributed/distributed_c10d.py:99)",
    "update (/x/verl/training/policy.py:9)",
)
IN_A_HOOK = ("sleeps (/home/me/hook.py:3)", "update (/x/verl/training/policy.py:7)")
IDLE = ("wait (/lib/threading.py:327)", "_run (/x/verl/cluster/hangs/detector.py:9)")


def late(*targets: CallTarget, peers: int = 4, evidence: str = "") -> StalledCall:
    return StalledCall("controller", "update", targets, 20.0, 0.0, DEADLINE, True, peers, ("the table",), evidence)


def process(target: CallTarget, *frames: str, state: str = "sleeping") -> list[ProcessInfo]:
    return [ProcessInfo(PLACES[target].pid, "ray::TrainWorker", state, (IDLE, frames) if frames else ())]


def test_the_rank_that_misses_a_collective_is_named_with_where_it_stands() -> None:
    seen = {target: process(target, *IN_A_COLLECTIVE) for target in RANKS} | {RANKS[2]: process(RANKS[2], *IN_A_HOOK)}
    first, second = diagnose(late(*RANKS), PLACES, seen)
    assert first.startswith(
        "train worker 2 (pid 102 on 10.0.0.1) misses the collective in which train workers 0-1, 3 wait"
    )
    assert "stands in sleeps (/home/me/hook.py:3)" in first
    assert second.startswith("train workers 0-1, 3 wait in all_reduce")


def test_a_rank_that_has_answered_without_the_collective_is_named() -> None:
    lines = diagnose(late(RANKS[0], peers=2), PLACES, {RANKS[0]: process(RANKS[0], *IN_A_COLLECTIVE)})
    assert lines[0] == "train worker 1 misses the collective in which train worker 0 waits: it has answered already"


def test_a_frozen_rank_is_named_first_wherever_it_was_frozen() -> None:
    seen = {target: process(target, *IN_A_COLLECTIVE) for target in RANKS}
    seen[RANKS[3]] = process(RANKS[3], *IN_A_COLLECTIVE, state="stopped")
    lines = diagnose(late(*RANKS), PLACES, seen)
    assert lines[0].startswith("train worker 3 (pid 103 on 10.0.0.1) is frozen")
    assert "kill -CONT 103" in lines[0]
    assert lines[1].startswith("train workers 0-2 wait in all_reduce")
    assert not any("misses" in line for line in lines)


def test_a_frozen_child_is_named_with_its_parent() -> None:
    seen = {RANKS[0]: [*process(RANKS[0], *IDLE), ProcessInfo(777, "VLLM::EngineCore", "stopped")]}
    [line] = diagnose(late(RANKS[0], peers=0), PLACES, seen)
    assert line.startswith("train worker 0 (pid 100 on 10.0.0.1): its child process 777 (VLLM::EngineCore) is frozen")


def test_a_child_that_has_ended_is_no_trouble_of_its_own_and_an_owner_that_has_is() -> None:
    seen = {RANKS[0]: [*process(RANKS[0], *IN_A_HOOK), ProcessInfo(777, "a helper", "zombie")]}
    assert "stands in sleeps" in diagnose(late(RANKS[0], peers=0), PLACES, seen)[0]
    seen = {RANKS[0]: process(RANKS[0], state="dead")}
    assert diagnose(late(RANKS[0], peers=0), PLACES, seen)[0] == "train worker 0 (pid 100 on 10.0.0.1) has ended"


def test_a_process_that_was_never_there_and_a_node_that_does_not_answer_are_said() -> None:
    assert diagnose(late(RANKS[0]), {}, {}) == ["train worker 0: its process has not come up"]
    assert diagnose(late(CallTarget("file system")), {}, {}) == ["file system: it does not answer"]
    assert diagnose(late(RANKS[0]), PLACES, {}) == ["train worker 0 (pid 100 on 10.0.0.1): its node does not answer"]


class Witness:
    """Rank 1 sleeps in a hook."""

    def places(self, targets: Sequence[CallTarget]) -> dict[CallTarget, ProcessLocation]:
        return {target: PLACES[target] for target in targets if target in PLACES}

    def look(self, places: Mapping[CallTarget, ProcessLocation]) -> dict[CallTarget, list[ProcessInfo]]:
        return {target: process(target, *(IN_A_HOOK if target == RANKS[1] else IN_A_COLLECTIVE)) for target in places}


def reporter(folder: Path, lines: list[str]) -> Reporter:
    return Reporter(
        folder, lambda text: lines.append(f"note {text}"), lambda text: lines.append(f"! {text}"), Witness()
    )


def test_the_report_holds_the_table_and_all_stacks_and_the_console_names_it(tmp_path: Path) -> None:
    lines: list[str] = []
    path = reporter(tmp_path / "stalls", lines).report(late(*RANKS[:2], peers=2))
    text = Path(path).read_text()
    assert Path(path).parent == tmp_path / "stalls"
    for part in ("the table", "train worker 1: pid 101 on 10.0.0.1", *IN_A_HOOK, *IN_A_COLLECTIVE, "test_detector.py"):
        assert part in text
    [line] = lines
    assert line.startswith("! controller has waited 20 s")
    assert "(trainer.deadlines.train=20). train worker 1 (pid 101 on 10.0.0.1) misses the collective" in line
    assert line.endswith(f"The whole report: {path}")


def test_evidence_that_comes_along_is_taken_as_it_is(tmp_path: Path) -> None:
    lines: list[str] = []
    hint = late(CallTarget("reward function"), peers=0, evidence="my_reward.py: gave no score\nIt was here: f")
    text = Path(reporter(tmp_path, lines).report(hint)).read_text()
    assert "It was here: f" in text
    assert "my_reward.py: gave no score. The whole report" in lines[0]


def test_at_half_of_the_deadline_there_is_a_line_and_no_report(tmp_path: Path) -> None:
    lines: list[str] = []
    half = StalledCall("controller", "update", RANKS[:1], 10.0, 0.0, DEADLINE, over=False)
    assert reporter(tmp_path, lines).report(half) == ""
    assert lines[0].endswith("it gives up after 20 s (trainer.deadlines.train=20)")
    assert list(tmp_path.iterdir()) == []


def test_whoever_waits_learns_where_the_report_is_also_one_that_is_late_a_little_later() -> None:
    now = [0.0]
    waits = PendingCalls(lambda: now[0])
    watchdog = Watchdog(waits, "controller", lambda late: "report.txt" if late.over else "")
    with waits.track_call("update", target=RANKS[0], deadline=DEADLINE) as first:
        now[0] = 10.0
        with waits.track_call("update", target=RANKS[0], deadline=DEADLINE) as second:
            watchdog.look()
            assert (first.report, second.report) == ("", "")
            now[0] = 20.0
            watchdog.look()
            assert (first.report, second.report) == ("report.txt", "")
            now[0] = 30.0
            watchdog.look()
            assert second.report == "report.txt"
