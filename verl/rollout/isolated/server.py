"""The process of an engine in another Python environment: `python -m verl.rollout.isolated.server SOCKET PARENT`.

It runs the engine that the first message names, and calls its methods as the messages say, many at once. It ends with
its parent, and when the connection is closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pkgutil import resolve_name

from verl.child_process import end_with_parent
from verl.custom_functions import import_external
from verl.rollout.engine import RolloutEngine
from verl.rollout.isolated.messages import ARGUMENTS, Call, Failure, Reply, Setup, decode, read, write


async def serve(connection: socket.socket) -> None:
    """Serve calls until the connection is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    first = await read(reader)
    if first is None:
        return
    try:
        engine = _make_engine(decode(first, Setup))
    except Exception as error:  # noqa: BLE001 - process boundary: reported as the failure of `start`
        write(writer, Reply(0, failure=Failure.from_exception(error)))
        await writer.drain()
        return
    running: dict[int, asyncio.Task[None]] = {}
    while (data := await read(reader)) is not None:
        call: Call = decode(data, Call)
        if call.method:
            task = running[call.id] = asyncio.create_task(_answer(engine, call, writer))
            task.add_done_callback(lambda _, id=call.id: running.pop(id))  # type: ignore[misc]
        elif call.id in running:
            running[call.id].cancel()


def _make_engine(setup: Setup) -> RolloutEngine:
    import_external(setup.modules)
    settings = decode(setup.settings, resolve_name(setup.settings_type))
    engine: RolloutEngine = resolve_name(setup.engine)(settings)
    return engine


async def _answer(engine: RolloutEngine, call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        arguments = decode(call.arguments, ARGUMENTS[call.method])
        reply = Reply(call.id, await getattr(engine, call.method)(*arguments))
    except Exception as error:  # noqa: BLE001 - process boundary: raised again where the call was made
        reply = Reply(call.id, failure=Failure.from_exception(error))
    write(writer, reply)
    await writer.drain()


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    try:
        asyncio.run(serve(socket.socket(fileno=descriptor)))
    finally:
        os._exit(0)  # without waiting for threads of the engine: nobody can ask for anything any more


if __name__ == "__main__":
    main()
