"""A server whose replies are given as headers and parts of a body, for tests of clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

Reply = tuple[Mapping[str, str], AsyncIterator[bytes]]


async def send(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def send_without_end() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * (1 << 20)


@asynccontextmanager
async def serve(reply: Callable[[Mapping[str, Any]], Reply]) -> AsyncIterator[str]:
    """Run a server that replies to each request, given as JSON, with headers and a body."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = next((int(line.split(":")[1]) for line in head.splitlines() if "content-length" in line), 0)
            headers, body = reply(json.loads(await reader.readexactly(size) or b"{}"))
            lines = [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "connection: close", "", ""]).encode())
            async for part in body:
                writer.write(part)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
