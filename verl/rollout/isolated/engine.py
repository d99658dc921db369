"""The client of an engine in another Python environment, itself a `RolloutEngine`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from verl.config.interpreters import find_interpreter_problem
from verl.config.rollout_engines import RolloutEngineSpec
from verl.errors import EngineError, ProcessLostError, VerlError
from verl.rollout.isolated.messages import Call, Reply, Setup, decode, encode, read, to_completion, write
from verl.rollout.process_output import tail_stderr
from verl.rollout.settings import RolloutEngineSettings
from verl.types import Completion, SamplingParams
from verl.weights.bucket import SharedBucket, WeightBucket, share

CLOSE_TIMEOUT_S = 30.0  # for the engine to end its own processes


class IsolatedEngine:
    """A rollout engine in a process of another interpreter. One event loop owns it.

    The process writes to the stderr of this one. If it ends, calls fail with `ProcessLostError`.
    """

    def __init__(
        self, spec: RolloutEngineSpec, settings: RolloutEngineSettings, python: str, modules: Sequence[str] = ()
    ) -> None:
        self._spec, self._python = spec, python
        self._setup = Setup(spec.engine, spec.settings, msgspec.Raw(encode(settings)), list(modules))
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loss: VerlError = ProcessLostError("the process of the engine has not started")
        self._is_connected = False

    async def start(self) -> None:
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
        self._is_connected = True
        self._reading = asyncio.create_task(self._read_replies(reader))
        write(self._writer, self._setup)
        await self._call("start")

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        return to_completion(await self._call("generate", list(token_ids), sampling))

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        plain = [(list(token_ids), sampling) for token_ids, sampling in requests]
        return [to_completion(record) for record in await self._call("generate_all", plain)]

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        logprobs: list[float] = await self._call("compute_logprobs", list(token_ids))
        return logprobs

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update")

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Load a bucket, of which only the path of a file in memory is sent."""
        with share(bucket) as shared:
            await self._call("load_bucket", shared)

    async def finish_weight_update(self, version: int) -> None:
        await self._call("finish_weight_update", version)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def version(self) -> int:
        version: int = await self._call("version")
        return version

    async def close(self) -> None:
        if self._process is None:
            return
        with suppress(VerlError, TimeoutError):
            await asyncio.wait_for(self._call("close"), CLOSE_TIMEOUT_S)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._is_connected:
            await self._reading
            self._writer.close()

    async def _call(self, method: str, *args: Any) -> Any:
        if not self._is_connected:
            raise self._loss
        id = next(self._ids)
        self._waiting[id] = reply = asyncio.get_running_loop().create_future()
        try:
            write(self._writer, Call(id, method, msgspec.Raw(encode(args))))
            return await reply
        except asyncio.CancelledError:
            if self._is_connected:
                write(self._writer, Call(id))
            raise
        finally:
            del self._waiting[id]

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        """Give replies to those who wait for them, until the process ends."""
        assert self._process is not None
        while (data := await read(reader)) is not None:
            reply: Reply = decode(data, Reply)
            if reply.id == 0 and reply.failure is not None:  # the engine could not be created
                self._loss = reply.failure.to_exception()
                self._fail()
            elif (waiting := self._waiting.get(reply.id)) is not None and not waiting.done():
                if reply.failure is None:
                    waiting.set_result(reply.result)
                else:
                    waiting.set_exception(reply.failure.to_exception())
        code = await self._process.wait()
        self._loss = ProcessLostError(
            f"the process of the engine, started by {self._python}, has ended with code {code}. {tail_stderr()}"
        )
        self._is_connected = False
        self._fail()

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._loss)
