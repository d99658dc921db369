"""The process of an engine in another Python environment: `python -m verl.rollout.isolated.server SOCKET PARENT`.

It calls the methods of an engine as the messages say, many at once. It ends with its parent, and when the connection is
closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from verl.child_process import end_with_parent
from verl.custom_functions import import_external
from verl.errors import EngineError
from verl.rollout.engine import RolloutEngine
from verl.rollout.isolated.messages import decode, encode, read, write
from verl.rollout.settings import RolloutEngineSettings


class EngineServer:
    """An engine and the calls that run."""

    _engine: RolloutEngine

    async def import_modules(self, modules: Sequence[str]) -> None:
        import_external(modules)

    async def create(self, factory: str, settings: RolloutEngineSettings) -> None:
        self._engine = resolve_name(factory)(settings)

    async def serve(self, connection: socket.socket) -> None:
        """Serve calls until the connection is closed."""
        reader, writer = await asyncio.open_connection(sock=connection)
        running: dict[int, asyncio.Task[None]] = {}
        while (message := await read(reader)) is not None:
            id, method, arguments = message
            if method is not None:
                task = running[id] = asyncio.create_task(self._answer(writer, id, method, arguments))
                task.add_done_callback(lambda _, id=id: running.pop(id))  # type: ignore[misc]
            elif id in running:
                running[id].cancel()

    async def _answer(self, writer: asyncio.StreamWriter, id: int, method: str, arguments: bytes) -> None:
        try:
            target: Any = self if method in ("import_modules", "create") else self._engine
            reply = (id, True, encode(await getattr(target, method)(*decode(arguments))))
        except Exception as error:  # noqa: BLE001 - process boundary: raised again where the call was made
            is_known = type(error).__module__ == EngineError.__module__
            reply = (id, False, encode(error if is_known else EngineError(f"{type(error).__name__}: {error}")))
        write(writer, reply)
        await writer.drain()


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    code = 1
    try:
        asyncio.run(EngineServer().serve(socket.socket(fileno=descriptor)))
        code = 0
    except Exception:  # noqa: BLE001 - nothing above reports it
        traceback.print_exc()
    finally:
        os._exit(code)  # without waiting for threads of the engine: no more calls can arrive


if __name__ == "__main__":
    main()
