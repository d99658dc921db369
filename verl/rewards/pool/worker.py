"""The process that runs a reward function: it loads the function, then serves calls until it is killed.

It is a child of a supervisor (`supervisor.py`) and talks to the pool over one socket. Calls arrive as pickles made by
the pool; results leave as JSON, so that nothing made by the user's function is ever unpickled outside this process. A
sync function gets one response at a time, an async one many concurrently, a batched one all responses of a message.

The names that the loop uses are imported directly: a function that patches modules does not patch this loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from inspect import isawaitable
from json import dumps
from os import _exit, chdir, getcwd, getpid
from pickle import loads
from signal import alarm
from typing import Any, BinaryIO, NoReturn

from verl.errors import RewardError
from verl.rewards.result import RewardInput, RewardResult, Scored, format_timeout, make_failure
from verl.rewards.reward_function import RewardFunction

HEADER = struct.Struct("!I")
SOCKET_CLOSED = 87
"""Exit code of a worker whose function closed its socket."""

_CANCEL_S = 1.0


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON behind its length."""
    payload = dumps(message).encode()
    return HEADER.pack(len(payload)) + payload


def serve(sock: socket.socket) -> None:
    """Load the function that the first message describes, report the outcome, and serve calls."""
    stream = sock.makefile("rb")
    try:
        settings, deadline_s = _receive(stream)
        try:
            reward = RewardFunction.load(settings)
        except RewardError as error:
            sock.sendall(encode({"refused": str(error)}))
            _exit(1)
        is_concurrent = reward.is_async and not reward.is_batched
        sock.sendall(encode({"ready": {"is_concurrent": is_concurrent}}))
        if is_concurrent:
            asyncio.run(_serve_async(reward, sock, deadline_s))
        else:
            _serve_sync(reward, sock, stream)
    except EOFError:
        _exit(0)
    except OSError:  # only the function can have closed the socket
        _exit(SOCKET_CLOSED)


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return loads(stream.read(HEADER.unpack(header)[0]))


def _serve_sync(reward: RewardFunction, sock: socket.socket, stream: BinaryIO) -> NoReturn:
    reward.warn = lambda text: sock.sendall(encode({"warning": text}))
    home, process = getcwd(), getpid()
    while True:
        calls: list[tuple[int, bytes]] = _receive(stream)
        requests = [RewardInput(*loads(pickled)) for _, pickled in calls]
        results: list[RewardResult]
        try:
            returned = reward.call(requests)
            returned = asyncio.run(_wait_for(returned)) if isawaitable(returned) else returned
            results = reward.to_results(returned, requests)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the function must not end the worker
            results = [*reward.to_failures(error, requests)]
        if getpid() != process:  # the function forked, and this is the copy: only the original may reply
            _exit(0)
        for (call_id, _), result in zip(calls, results, strict=True):
            sock.sendall(encode(_to_message(call_id, result)))
        alarm(0)  # one that the function left would go off in the next call
        with contextlib.suppress(OSError):
            chdir(home)


async def _wait_for(returned: Any) -> Any:
    return await returned


async def _serve_async(reward: RewardFunction, sock: socket.socket, deadline_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task[None]] = set()
    process = getpid()

    def send(message: dict[str, Any]) -> None:
        writer.write(encode(message))

    async def serve_one(call_id: int, request: RewardInput) -> None:
        work = asyncio.ensure_future(_score_async(reward, request))
        await asyncio.wait({work}, timeout=deadline_s)
        if getpid() != process:
            _exit(0)
        if work.done():
            return send(_to_message(call_id, work.result()))
        frames = "".join(f"\n  File {frame.f_code.co_filename!r}, line {frame.f_lineno}" for frame in work.get_stack())
        cause = format_timeout(deadline_s) + (f"; it waited at{frames}" if frames else "")
        send(_to_message(call_id, make_failure("timeout", reward.label, cause, request)))
        work.cancel()
        await asyncio.wait({work}, timeout=_CANCEL_S)
        if not work.done():  # such calls would pile up in this process
            send({"retire": "a call that exceeded its deadline does not react to its cancellation"})

    reward.warn = lambda text: send({"warning": text})
    while True:
        size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
        for call_id, pickled in loads(await reader.readexactly(size)):
            task = asyncio.create_task(serve_one(call_id, RewardInput(*loads(pickled))))
            running.add(task)
            task.add_done_callback(running.discard)


async def _score_async(reward: RewardFunction, request: RewardInput) -> RewardResult:
    try:
        return reward.to_results(await reward.call([request]), [request])[0]
    except BaseException as error:  # noqa: BLE001 - as in `_serve_sync`
        return reward.to_failures(error, [request])[0]


def _to_message(call_id: int, result: RewardResult) -> dict[str, Any]:
    if isinstance(result, Scored):
        return {"call": call_id, "score": result.score, "metrics": result.metrics}
    return {"call": call_id, "failed": result.kind, "message": result.message}
