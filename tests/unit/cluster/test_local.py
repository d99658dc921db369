"""The local cluster has the interface of Ray."""

import asyncio

import pytest

from verl.cluster.actors import ActorGroup, get_objects, kill_actor
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, UNLIMITED_S, CallTarget, Timeouts
from verl.cluster.local import LocalPool
from verl.cluster.object_store import get_all, put

pytestmark = pytest.mark.unit


class Worker:
    def __init__(self, start: int) -> None:
        self.total, self.has_left = start, False

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    async def wait_and_add(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)

    def fail(self) -> None:
        raise ZeroDivisionError

    def leave(self) -> None:
        self.has_left = True


async def test_methods_and_coroutines_are_called_like_remote_ones() -> None:
    actor = LocalPool().spawn(Worker, 1, device=0, share=0.5, is_async=True)
    assert await actor.add.remote(1) == 2
    assert await actor.wait_and_add.remote(2) == 4
    assert await ActorGroup("worker", [actor]).call("add", 5, timeout=DEFAULT_TIMEOUTS.train) == [9]


async def test_errors_are_raised_where_the_reference_is_awaited() -> None:
    actor = LocalPool().spawn(Worker, 1)
    reference = actor.fail.remote()
    with pytest.raises(ZeroDivisionError):
        await reference
    with pytest.raises(AttributeError, match="no_such_thing"):
        actor.no_such_thing.remote()


async def test_put_does_not_copy() -> None:
    thing = object()
    references = [put(thing), put(2)]
    assert await references[0] is thing
    assert get_all(references, timeout=1) == [thing, 2]
    assert get_objects(references, action="give", target=CallTarget("store"), timeout=DEFAULT_TIMEOUTS.train) == [
        thing,
        2,
    ]


def test_killing_an_actor_leaves_its_process_group() -> None:
    worker = Worker(1)
    kill_actor(LocalPool().spawn(lambda: worker))
    assert worker.has_left


def test_local_runs_have_no_timeouts() -> None:
    assert Timeouts.unlimited().longest_s == UNLIMITED_S


async def test_every_public_method_of_an_actor_is_remote_even_close() -> None:
    class Actor:
        def close(self) -> str:
            return "closed"

    actor = LocalPool().spawn(Actor)
    assert await actor.close.remote() == "closed"
    kill_actor(actor)
