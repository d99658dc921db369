"""Real processes on two nodes that hang are named, with their stacks, whichever process waits for them."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.cluster.actors import ActorGroup, await_reply
from verl.cluster.hangs.pending_calls import CallTarget, Timeout
from verl.cluster.hangs.registry import locate_processes, register_actor, watch_for_hangs
from verl.errors import ProcessLostError

pytestmark = [pytest.mark.e2e, pytest.mark.rotating(5)]

BRIEF = Timeout(3.0, "trainer.deadlines.train")
FAIR = Timeout(8.0, "trainer.deadlines.train")


class Sleeper:
    def pid(self) -> int:
        return os.getpid()

    def hangs(self) -> None:
        time.sleep(600)

    async def waits_for(self, other: "ray.actor.ActorHandle") -> None:
        await await_reply(other.hangs.remote(), action="hang", target=CallTarget("sleeper", 1), timeout=BRIEF)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    """Two raylets on this machine; what is on one is seen from the other as if it were far away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield sorted((node["NodeID"] for node in ray.nodes()), key=ray.get_runtime_context().get_node_id().__ne__)
    ray.shutdown()
    cluster.shutdown()


def place(node: str, number: int, kind: str = "sleeper") -> "ray.actor.ActorHandle":
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(Sleeper).options(num_cpus=0, scheduling_strategy=where, max_concurrency=2).remote()
    register_actor(actor, CallTarget(kind, number))
    return actor


async def test_hanging_ranks_on_two_nodes_are_named_and_a_stopped_one_is_recognized(
    nodes: list[str], tmp_path: Path
) -> None:
    notes: list[str] = []
    with watch_for_hangs(tmp_path, notes.append, notes.append):
        actors = [place(node, rank, "rank") for rank, node in enumerate(nodes)]
        pids = ray.get([actor.pid.remote() for actor in actors])
        while len(locate_processes([CallTarget("rank", 0), CallTarget("rank", 1)])) < 2:
            await asyncio.sleep(0.05)
        group = ActorGroup("rank", actors)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(ProcessLostError) as lost:
            await group.call("hangs", timeout=FAIR)
    group.close()
    [report] = tmp_path.iterdir()
    text = report.read_text()
    assert str(report) in str(lost.value)
    assert "hangs (" in text
    assert f"rank 1 (pid {pids[1]}" in notes[-1]
    assert "is stopped" in notes[-1]
    assert "for ranks 0-1 to hangs; timeout after 8 s" in notes[0]


async def test_stalled_calls_of_workers_are_reported_by_the_controller(nodes: list[str], tmp_path: Path) -> None:
    notes: list[str] = []
    with watch_for_hangs(tmp_path, notes.append, notes.append):
        waiter, sleeper = place(nodes[0], 0), place(nodes[1], 1)
        with pytest.raises(ProcessLostError) as lost:
            await await_reply(waiter.waits_for.remote(sleeper), action="wait", target=CallTarget("sleeper", 0))
    [report] = tmp_path.iterdir()
    assert str(report) in str(lost.value)
    assert re.search(r"sleeper 0 has waited \d+ s", notes[-1])
    assert "for sleeper 1 to hang" in notes[-1]
    assert "hangs (" in report.read_text()
    await asyncio.to_thread(lambda: [ray.kill(actor) for actor in (waiter, sleeper)])


async def test_a_blocked_event_loop_is_reported_with_the_blocking_line(nodes: list[str], tmp_path: Path) -> None:
    notes: list[str] = []
    with watch_for_hangs(tmp_path, notes.append, notes.append, BRIEF):
        time.sleep(3 * BRIEF.seconds)
    assert "for controller to turn its event loop: timeout exceeded" in notes[-1]
    assert "test_a_blocked_event_loop" in next(tmp_path.iterdir()).read_text()
