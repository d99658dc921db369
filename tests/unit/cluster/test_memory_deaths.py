"""What Ray reports about processes that it ended for lack of memory is said in one line."""

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError

from verl.cluster import memory_deaths
from verl.cluster.actors import await_reply
from verl.cluster.hangs.pending_calls import CallTarget
from verl.errors import ProcessLostError

pytestmark = pytest.mark.unit

REPORT = """2 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 10.0.0.7, ID: 12df) was 22.36GB used / 23.54GB limit (0.949913)
OOM kill reason: Memory usage 24013529088B exceeded threshold of 24012687360B (95.0% of 25276514304B limit)
Eviction Stats:
(global lru) used: 0%
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
30489\t4.14\tray::TrainWorker.update
5249\t2.78\tVLLM::EngineCore
30723\t0.44\tray::EpisodeWorker
30210\t0.44\t/usr/bin/python3 /usr/bin/verl train --config-path examples/reasoning_gym --...
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/"""
LINE = (
    "Ray ended it because the memory of node 10.0.0.7 was full (22.36 of 23.54 GiB); the largest processes: "
    "ray::TrainWorker.update (4.14 GiB, pid 30489), VLLM::EngineCore (2.78 GiB, pid 5249), "
    "ray::EpisodeWorker (0.44 GiB, pid 30723)"
)


async def await_failed(error: Exception) -> None:
    async def reply() -> None:
        raise error

    await await_reply(reply(), action="start", target=CallTarget("episode worker", 0))


async def test_a_call_whose_process_was_ended_for_memory_is_a_lost_process_with_the_largest_ones() -> None:
    with pytest.raises(ProcessLostError) as raised:
        await await_failed(OutOfMemoryError(REPORT))
    assert str(raised.value) == f"episode worker 0: start: its process has died: {LINE}"


@pytest.mark.parametrize("report", [REPORT, None])
async def test_an_actor_that_is_started_again_is_looked_up(report: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory_deaths, "find_memory_death", lambda actor: asked.append(actor) or report)
    with pytest.raises(ProcessLostError) as raised:
        await await_failed(ActorUnavailableError("IOError: The actor was restarted.", b"\x07" * 16))
    assert set(asked) == {"07" * 16}
    assert (LINE in str(raised.value)) == (report is not None)


def test_a_report_in_other_words_still_names_the_memory() -> None:
    assert memory_deaths.summarize("memory is low") == "Ray ended it because the memory was full"
