"""Messages between a rollout actor and an engine in another Python environment: pickles after their length.

A call is (id, method, arguments), and without a method cancels the call with that id; a reply is (id, has succeeded,
result or error). Arguments, results and errors are encoded by themselves, so that a value that cannot be read fails one
call. Both sides have the same version of verl, but may have other versions of Python, numpy and torch.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import struct
from dataclasses import fields, is_dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")
_PROTOCOL = 4  # numpy 1 cannot read arrays that numpy 2 pickled with protocol 5


class _ByName(pickle.Pickler):
    """Pickles records by the names of their fields: by position, another version of a record would be misread."""

    def reducer_override(self, value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return _make_record, (type(value), {field.name: getattr(value, field.name) for field in fields(value)})
        return NotImplemented


def _make_record(record_type: Any, values: dict[str, Any]) -> Any:
    return record_type(**values)


def encode(value: Any) -> bytes:
    file = io.BytesIO()
    _ByName(file, _PROTOCOL).dump(value)
    return file.getvalue()


decode = pickle.loads


async def read(stream: asyncio.StreamReader) -> Any:
    """Return the next message; None when the other side has closed the connection."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return decode(await stream.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write(stream: asyncio.StreamWriter, message: tuple[Any, ...]) -> None:
    data = encode(message)
    stream.writelines((_LENGTH.pack(len(data)), data))
