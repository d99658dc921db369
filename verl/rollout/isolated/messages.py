"""Messages between a rollout actor and an engine in another Python environment.

A message is MessagePack after its length. Records are encoded by their fields and decoded into their types, arrays are
encoded as bytes. Nothing is pickled: both sides may have other versions of Python, numpy and torch.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from verl import errors
from verl.errors import ConfigError, EngineError, VerlError
from verl.types import Completion, SamplingParams
from verl.weights.bucket import SharedBucket

_LENGTH = struct.Struct("<Q")
_ARRAY = 1  # the extension type of MessagePack

ARGUMENTS: dict[str, Any] = {
    "start": tuple[()],
    "generate": tuple[list[int], SamplingParams],
    "generate_all": tuple[list[tuple[list[int], SamplingParams]]],
    "compute_logprobs": tuple[list[int]],
    "start_weight_update": tuple[()],
    "load_bucket": tuple[SharedBucket],
    "finish_weight_update": tuple[int],
    "sleep": tuple[()],
    "version": tuple[()],
    "close": tuple[()],
}
"""The methods of `RolloutEngine` that can be called, with the types of their arguments."""


class Setup(msgspec.Struct):
    """The first message: the engine as package.module:name, the type of its settings, and the settings."""

    engine: str
    settings_type: str
    settings: msgspec.Raw
    modules: list[str] = []


class Call(msgspec.Struct):
    """A call of a method. Without a method: the call `id` is canceled."""

    id: int
    method: str = ""
    arguments: msgspec.Raw = msgspec.Raw(b"\x90")  # an empty list


class Failure(msgspec.Struct):
    """An exception: its class in `verl.errors`, and its message; all problems of a `ConfigError`."""

    kind: str
    message: str
    problems: list[str] = []

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        if isinstance(error, VerlError):
            return cls(type(error).__name__, str(error), getattr(error, "problems", []))
        return cls(EngineError.__name__, f"{type(error).__name__}: {error}")

    def to_exception(self) -> VerlError:
        if self.kind == ConfigError.__name__:
            return ConfigError(self.problems)
        kind: type[VerlError] = getattr(errors, self.kind, EngineError)
        return kind(self.message)


class Reply(msgspec.Struct):
    """The result of a call, or how it failed."""

    id: int
    result: Any = None
    failure: Failure | None = None


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def decode(data: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """Return a value as `kind`; without it, records are dicts."""
    return msgspec.msgpack.decode(data, type=kind, ext_hook=_decode_array)


def to_completion(record: dict[str, Any]) -> Completion:
    """Return a response. Its type is not decoded by msgspec: the types of its arrays are not importable at run time."""
    return Completion(**{field.name: record[field.name] for field in fields(Completion)})


async def read(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None when the other side has closed the connection."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write(stream: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    data = encode(message)
    stream.writelines((_LENGTH.pack(len(data)), data))


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        header = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(_ARRAY, _LENGTH.pack(len(header)) + header + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another Python environment")


def _decode_array(code: int, data: memoryview) -> Any:
    assert code == _ARRAY
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    end = _LENGTH.size + length
    dtype, shape = msgspec.msgpack.decode(data[_LENGTH.size : end])
    return np.frombuffer(data[end:], np.dtype(dtype)).reshape(shape).copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
