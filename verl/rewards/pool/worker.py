"""The process that runs a reward function: it loads it, then answers calls until it is ended.

It lives inside a keeper (`keeper.py`) and talks to the pool (`pool.py`) over one socket. Calls come in as pickles,
which the pool made; what the user's function made goes out as numbers and text in JSON: nothing of it is ever unpickled
outside this process. A plain function is called for one answer after the other, an async one for many at once, a
batched one for all answers of a message.

What the loop needs is imported by name: a function that patches modules patches its own calls and not this loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import struct
from collections.abc import Sequence
from json import dumps
from os import _exit, chdir, getcwd, getpid
from pickle import loads
from signal import alarm
from typing import Any, NoReturn

from verl.errors import RewardError
from verl.rewards.result import RewardInput, RewardResult, Scored, format_timeout, make_failure
from verl.rewards.reward_function import RewardFunction, load_reward

__all__ = ["CHANNEL_LOST", "HEADER", "Channel", "serve"]

HEADER = struct.Struct("!I")
CHANNEL_LOST = 87
"""Exit code of a worker whose function closed the socket under it."""

_UNWILLING_S = 1.0


class Channel:
    """Messages over a stream socket, each behind its length: pickles in, JSON out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> Any:
        """The next message; EOFError when the other side is gone."""
        return loads(self._exactly(HEADER.unpack(self._exactly(HEADER.size))[0]))

    def send(self, message: dict[str, Any]) -> None:
        payload = dumps(message).encode()
        self._sock.sendall(HEADER.pack(len(payload)) + payload)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def serve(sock: socket.socket) -> None:
    """Load the function that the first message describes, say that it is ready or refused, and answer calls."""
    channel = Channel(sock)
    try:
        arguments, deadline_s = channel.receive()
        try:
            reward = load_reward(**arguments)
        except RewardError as error:
            channel.send({"refused": str(error)})
            _exit(1)
        reward.note = lambda text: channel.send({"note": text})
        channel.send({"ready": {"side_by_side": reward.is_async and not reward.batched}})
        if reward.is_async and not reward.batched:
            asyncio.run(_serve_async(reward, sock, deadline_s))
        else:
            _serve_plain(reward, channel)
    except EOFError:
        _exit(0)
    except OSError:  # the socket is ours alone: only the function can have closed it
        _exit(CHANNEL_LOST)


def _serve_plain(reward: RewardFunction, channel: Channel) -> NoReturn:
    home, process = getcwd(), getpid()
    while True:
        calls: list[tuple[int, bytes]] = channel.receive()
        numbers, answers = [number for number, _ in calls], [RewardInput(*loads(pickled)) for _, pickled in calls]
        if reward.batched:
            outcomes = _score_batch(reward, answers)
        for place, number in enumerate(numbers):
            outcome = outcomes[place] if reward.batched else _score(reward, answers[place])
            if getpid() != process:  # the function forked, and this is the copy: only one of the two may answer
                _exit(0)
            channel.send(_message(number, outcome))
        alarm(0)  # one that a call forgot would go off in the next
        with contextlib.suppress(OSError):
            chdir(home)


def _score(reward: RewardFunction, answer: RewardInput) -> RewardResult:
    try:
        result = reward.call(answer)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except BaseException as error:  # noqa: BLE001 - also SystemExit: the function must not end the worker
        return reward.make_error(error, answer)
    return reward.to_result(result, answer)


def _score_batch(reward: RewardFunction, answers: Sequence[RewardInput]) -> Sequence[RewardResult]:
    try:
        result = reward.call_batch(answers)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return reward.to_results(result, answers)
    except BaseException as error:  # noqa: BLE001 - as above
        return [reward.make_error(error, answer) for answer in answers]


async def _serve_async(reward: RewardFunction, sock: socket.socket, deadline_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task[None]] = set()
    process = getpid()

    def send(message: dict[str, Any]) -> None:
        payload = dumps(message).encode()
        writer.write(HEADER.pack(len(payload)) + payload)

    async def answer_one(number: int, answer: RewardInput) -> None:
        work = asyncio.ensure_future(_call_async(reward, answer))
        await asyncio.wait({work}, timeout=deadline_s)
        if getpid() != process:
            _exit(0)
        if work.done():
            return send(_message(number, work.result()))
        frames = "".join(f"\n  File {frame.f_code.co_filename!r}, line {frame.f_lineno}" for frame in work.get_stack())
        what = f"{format_timeout(deadline_s)}; it waited at{frames}" if frames else format_timeout(deadline_s)
        send(_message(number, make_failure("timeout", reward.where, what, answer)))
        work.cancel()
        await asyncio.wait({work}, timeout=_UNWILLING_S)
        if not work.done():  # it caught its cancellation: it would pile up here
            send({"worn": "a call that was late does not let itself be cancelled"})

    reward.note = lambda text: send({"note": text})
    while True:
        size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
        for number, pickled in loads(await reader.readexactly(size)):
            task = asyncio.create_task(answer_one(number, RewardInput(*loads(pickled))))
            running.add(task)
            task.add_done_callback(running.discard)


async def _call_async(reward: RewardFunction, answer: RewardInput) -> RewardResult:
    try:
        result = await reward.call(answer)
    except BaseException as error:  # noqa: BLE001 - as above
        return reward.make_error(error, answer)
    return reward.to_result(result, answer)


async def _awaited(result: Any) -> Any:
    return await result


def _message(number: int, outcome: RewardResult) -> dict[str, Any]:
    if isinstance(outcome, Scored):
        return {"number": number, "score": outcome.score, "metrics": outcome.metrics}
    return {"number": number, "failed": outcome.kind, "message": outcome.message}
