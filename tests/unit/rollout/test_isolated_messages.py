"""Messages between a rollout actor and an engine in another Python environment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config.rollout_engines import get_rollout_engine
from verl.errors import ConfigError, EngineError
from verl.rollout.isolated.engine import IsolatedEngine
from verl.rollout.isolated.messages import decode, encode, write
from verl.rollout.isolated.server import EngineServer

pytestmark = pytest.mark.unit

UNREADABLE = b"\x80\x04cmissing_package\nrecord\n."


@dataclass(frozen=True, slots=True)
class Record:
    first: int
    second: int = 0


class Written(list[bytes]):
    """A stream that keeps what is written."""

    async def drain(self) -> None: ...

    def writelines(self, parts: Any) -> None:
        self.append(b"".join(parts))

    @property
    def messages(self) -> list[Any]:
        return [decode(data[8:]) for data in self]


@dataclass(frozen=True, slots=True)
class Reordered:
    second: int
    first: int


@dataclass(frozen=True, slots=True)
class Renamed:
    first: int
    other: int


def test_records_are_read_by_the_names_of_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode((Record(1, 2), [Record(3)]))
    assert decode(data) == (Record(1, 2), [Record(3, 0)])
    monkeypatch.setattr(f"{__name__}.Record", Reordered)
    assert decode(data) == (Reordered(first=1, second=2), [Reordered(first=3, second=0)])
    monkeypatch.setattr(f"{__name__}.Record", Renamed)
    with pytest.raises(TypeError, match="second"):
        decode(data)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(UNREADABLE, "missing_package"), (encode((1, 2)), "division"), (encode(("setting",)), "setting: is wrong")],
)
async def test_a_call_that_fails_is_answered_with_its_error(arguments: bytes, error: str) -> None:
    async def divide(*numbers: Any) -> float:
        if numbers == ("setting",):
            raise ConfigError(["setting: is wrong"])
        raise ZeroDivisionError("division by zero")

    server, stream = EngineServer(), Written()
    server._engine = SimpleNamespace(divide=divide)  # type: ignore[assignment]
    await server._answer(stream, 7, "divide", arguments)  # type: ignore[arg-type]
    [(id, has_succeeded, value)] = stream.messages
    assert (id, has_succeeded) == (7, False)
    assert isinstance(decode(value), ConfigError if "setting" in error else EngineError)
    assert error in str(decode(value))


async def test_a_call_is_answered_although_the_engine_could_not_be_created() -> None:
    stream = Written()
    await EngineServer()._answer(stream, 7, "close", encode(()))  # type: ignore[arg-type]
    [(id, has_succeeded, _)] = stream.messages
    assert (id, has_succeeded) == (7, False)


async def test_a_reply_that_cannot_be_read_fails_only_its_call() -> None:
    engine = IsolatedEngine(get_rollout_engine("hf"), None, "/envs/other/bin/python")  # type: ignore[arg-type]
    stream, reader, loop = Written(), asyncio.StreamReader(), asyncio.get_running_loop()
    for id, value in ((1, UNREADABLE), (2, encode(5))):
        engine._waiting[id] = loop.create_future()
        write(stream, (id, True, value))  # type: ignore[arg-type]
    reader.feed_data(b"".join(stream))
    reader.feed_eof()

    async def wait() -> int:
        return 0

    await engine._read_replies(SimpleNamespace(wait=wait), reader)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"/envs/other/bin/python has sent .*missing_package"):
        await engine._waiting[1]
    assert await engine._waiting[2] == 5
