"""The client of an engine in another Python environment, itself a `RolloutEngine`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from verl.config.interpreters import find_interpreter_problem
from verl.config.rollout_engines import RolloutEngineSpec
from verl.errors import EngineError, ProcessLostError, VerlError
from verl.process_output import tail_stderr
from verl.rollout.isolated.messages import decode, encode, read, write
from verl.rollout.settings import RolloutEngineSettings
from verl.weights.bucket import SharedBucket, WeightBucket, share

CLOSE_TIMEOUT_S = 30.0  # for the engine to end its own processes


class IsolatedEngine:
    """A rollout engine in a process of another interpreter. One event loop owns it.

    Methods that are not defined here are called in the process, which writes to the stderr of this one. If the process
    ends, calls fail with `ProcessLostError`.
    """

    def __init__(
        self, spec: RolloutEngineSpec, settings: RolloutEngineSettings, python: str, modules: Sequence[str] = ()
    ) -> None:
        self._spec, self._settings, self._python, self._modules = spec, settings, python, list(modules)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loss: ProcessLostError | None = ProcessLostError("the process of the engine has not started")

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException as error:
            await self.close()  # nobody else ends the process of an engine that has not started
            if isinstance(error, ProcessLostError):  # not a loss, after which the run would start again
                raise EngineError(f"{self._spec.title} cannot start: {error}") from error
            raise

    async def _start(self) -> None:
        if problem := await asyncio.to_thread(find_interpreter_problem, self._python, self._spec):
            raise EngineError(f"actor_rollout_ref.rollout.python: {problem}")
        here, there = socket.socketpair()
        with there:
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                *("-P", "-m", "verl.rollout.isolated.server", str(there.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else asyncio.subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
            )
        reader, self._writer = await asyncio.open_connection(sock=here)
        self._loss = None
        self._reading = asyncio.create_task(self._read_replies(self._process, reader))
        await self._call("import_modules", self._modules)
        await self._call("create", self._spec.engine, self._settings)
        await self._call("start")

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Load a bucket. Only the path of a file in memory is sent."""
        with share(bucket) as shared:
            await self._call("load_bucket", shared)

    async def close(self) -> None:
        if self._process is None:
            return
        with suppress(VerlError, TimeoutError):
            await asyncio.wait_for(self._call("close"), CLOSE_TIMEOUT_S)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reading is not None:
            await self._reading
            self._writer.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._loss is not None:
            raise self._loss
        id = next(self._ids)
        self._waiting[id] = reply = asyncio.get_running_loop().create_future()
        try:
            write(self._writer, (id, method, encode(arguments)))
            return await reply
        except asyncio.CancelledError:
            if self._loss is None:
                write(self._writer, (id, None, b""))
            raise
        finally:
            del self._waiting[id]

    async def _read_replies(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        """Pass replies to the pending calls until the process ends."""
        while (message := await read(reader)) is not None:
            id, has_succeeded, value = message
            if (waiting := self._waiting.get(id)) is None or waiting.done():
                continue
            try:
                result = decode(value)
            except Exception as error:  # noqa: BLE001 - whatever a type of the other environment raises here
                waiting.set_exception(EngineError(f"{self._python} has sent what cannot be read here: {error!r}"))
                continue
            waiting.set_result(result) if has_succeeded else waiting.set_exception(result)
        code = await process.wait()
        self._loss = ProcessLostError(
            f"the process of the engine, started by {self._python}, has ended with code {code}. {tail_stderr()}"
        )
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._loss)
