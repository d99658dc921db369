"""Which files several packages own: whichever is installed last overwrites those of the others."""

from __future__ import annotations

import csv
import io
import sysconfig
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

Record = Mapping[str, Iterable[tuple[str, str]]]
"""Package -> (file, hash) of each of its files. A list of files without hashes has their sizes."""


def find_overwritten(records: Iterable[Record]) -> dict[str, list[str]]:
    """Return the files that several packages own with different contents, and these packages."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        for package, files in record.items():
            for file, content in files:
                if content and ".dist-info/" not in file:
                    owners[file][package] = content
    return {file: sorted(those) for file, those in owners.items() if len(set(those.values())) > 1}


def find_installed_records(folder: str | Path | None = None) -> list[Path]:
    """Return the lists of files of the installed packages, by default of this environment."""
    return sorted(Path(folder or sysconfig.get_path("purelib")).glob("*.dist-info/RECORD"))


def read_record(path: Path) -> Record:
    with path.open(newline="") as file:
        rows = [(row[0], row[1]) for row in csv.reader(file) if row]
    return {path.parent.name.partition("-")[0].lower(): rows}


def read_wheel(url: str) -> Record:
    """Return the files of a wheel without downloading it, with their checksums."""
    name = url.rpartition("/")[2].partition("-")[0].lower()
    with zipfile.ZipFile(_RangeReader(url)) as wheel:
        files = [(info.filename, f"crc={info.CRC}") for info in wheel.infolist() if not info.is_dir()]
    return {name: files}


class _RangeReader(io.RawIOBase):
    """The parts of a file on a server that are read, which must support ranges; the end is read at once."""

    def __init__(self, url: str, tail: int = 1 << 20) -> None:
        self._url, self._position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as reply:
            self._size = int(reply.headers["Content-Length"])
        self._start = max(0, self._size - tail)
        self._tail = self._fetch(self._start, self._size)

    def _fetch(self, start: int, end: int) -> bytes:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            content: bytes = reply.read()
        return content

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._position + size)
        start, self._position = self._position, end
        if start >= self._start:
            return self._tail[start - self._start : end - self._start]
        return self._fetch(start, end)
