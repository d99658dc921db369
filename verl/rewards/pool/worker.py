"""The process that runs user code: it loads the code, then serves calls until it is killed.

The process is a child of a supervisor (`supervisor.py`) and talks to the pool over one socket. Calls arrive as pickles
made by the pool; results leave as JSON. A sync function gets one call at a time, an async one many concurrently, a
batched one all calls of a message.

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
from verl.rewards.pool.job import Job, Service
from verl.rewards.result import format_timeout

HEADER = struct.Struct("!I")
SOCKET_CLOSED = 87
"""Exit code of a worker whose function closed its socket."""

_CANCEL_S = 1.0


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as JSON behind its length."""
    payload = dumps(message).encode()
    return HEADER.pack(len(payload)) + payload


def serve(sock: socket.socket) -> None:
    """Load the job of the first message, report the outcome, and serve calls."""
    stream = sock.makefile("rb")
    try:
        job, timeout_s = _receive(stream)
        try:
            service = job.load()
        except RewardError as error:
            sock.sendall(encode({"refused": str(error)}))
            _exit(1)
        is_concurrent = service.is_async and not service.is_batched
        sock.sendall(encode({"ready": {"is_concurrent": is_concurrent}}))
        if is_concurrent:
            asyncio.run(_serve_async(job, service, sock, timeout_s))
        else:
            _serve_sync(job, service, sock, stream)
    except EOFError:
        _exit(0)
    except OSError:  # only the function can have closed the socket
        _exit(SOCKET_CLOSED)


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return loads(stream.read(HEADER.unpack(header)[0]))


def _serve_sync(job: Job[Any, Any], service: Service[Any, Any], sock: socket.socket, stream: BinaryIO) -> NoReturn:
    service.warn = lambda text: sock.sendall(encode({"warning": text}))
    home, process = getcwd(), getpid()
    while True:
        calls: list[tuple[int, bytes]] = _receive(stream)
        requests = [loads(pickled) for _, pickled in calls]
        try:
            returned = service.call(requests)
            returned = asyncio.run(_wait_for(returned)) if isawaitable(returned) else returned
            results = service.to_results(returned, requests)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the function must not end the worker
            results = [*service.to_failures(error, requests)]
        if getpid() != process:  # the function forked, and this is the copy: only the original may reply
            _exit(0)
        for (call_id, _), result in zip(calls, results, strict=True):
            sock.sendall(encode({"call": call_id, **job.encode(result)}))
        alarm(0)  # one that the function left would go off in the next call
        with contextlib.suppress(OSError):
            chdir(home)


async def _wait_for(returned: Any) -> Any:
    return await returned


async def _serve_async(job: Job[Any, Any], service: Service[Any, Any], sock: socket.socket, timeout_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task[None]] = set()
    process = getpid()

    def send(message: dict[str, Any]) -> None:
        writer.write(encode(message))

    async def serve_one(call_id: int, request: Any) -> None:
        work = asyncio.ensure_future(_call_async(service, request))
        await asyncio.wait({work}, timeout=timeout_s)
        if getpid() != process:
            _exit(0)
        if work.done():
            return send({"call": call_id, **job.encode(work.result())})
        frames = "".join(f"\n  File {frame.f_code.co_filename!r}, line {frame.f_lineno}" for frame in work.get_stack())
        cause = format_timeout(timeout_s) + (f"; it waited at{frames}" if frames else "")
        send({"call": call_id, **job.encode(job.fail("timeout", cause, request))})
        work.cancel()
        await asyncio.wait({work}, timeout=_CANCEL_S)
        if not work.done():  # such calls would pile up in this process
            send({"retire": "a call that exceeded its timeout does not react to its cancellation"})

    service.warn = lambda text: send({"warning": text})
    while True:
        size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
        for call_id, pickled in loads(await reader.readexactly(size)):
            task = asyncio.create_task(serve_one(call_id, loads(pickled)))
            running.add(task)
            task.add_done_callback(running.discard)


async def _call_async(service: Service[Any, Any], request: Any) -> Any:
    try:
        return service.to_results(await service.call([request]), [request])[0]
    except BaseException as error:  # noqa: BLE001 - as in `_serve_sync`
        return service.to_failures(error, [request])[0]
