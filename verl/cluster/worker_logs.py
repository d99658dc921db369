"""The output of each worker, copied while a run goes on from Ray's files into files with the workers' names.

Ray writes what a process prints into its session folder, under the id of the process. The copies are in the folder of
the run, without secrets, and bounded. A thread of the controller makes them: it reads the files of all nodes whose
session folder it sees, usually those of its machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl.cluster.hangs.pending_calls import CallTarget
from verl.cluster.hangs.registry import list_processes
from verl.cluster.ray_private import get_session_folder
from verl.private_files import make_folder
from verl.redaction import redact

TICK_S = 1.0
CHUNK_BYTES = 128 << 10
"""What is copied of a file at once, so that a process that prints a lot does not keep the controller busy."""
MAX_BYTES = 16 << 20
"""The size of a copy from which on only the end of a process's output is added, when the run ends."""
_END_BYTES = 64 << 10
MAX_LOOKS = 5
"""How often the files of a process are looked for; Ray makes them when it starts the process."""

_folder: Path | None = None


def get_worker_log(target: CallTarget) -> Path | None:
    """Return the file with the output of a worker; None if it is not copied."""
    return None if _folder is None else _folder / f"{str(target).replace(' ', '-')}.log"


class LogCopier:
    """Copies what processes have written since the last time.

    Args:
        session: Ray's session folder on this machine.
        list_processes: Returns the pid of each worker.
    """

    def __init__(self, session: Path, list_processes: Callable[[], Mapping[CallTarget, int]]) -> None:
        self._session, self._list_processes = session, list_processes
        self._sources: dict[Path, tuple[CallTarget, int]] = {}  # the worker, and how much has been copied
        self._looks: dict[int, int] = {}  # pid -> how often its files were looked for
        self._began = time.time()  # older files are of processes that had the same pid

    def copy(self, *, is_last: bool = False) -> None:
        """Copy the next part of each file; at the end of the run also what was left out, if it is the end of a file."""
        self._find_sources()
        for source, (target, start) in list(self._sources.items()):
            with contextlib.suppress(OSError):  # a full disk, or Ray has removed the file
                self._sources[source] = target, self._copy(source, start, target, is_last=is_last)

    def _find_sources(self) -> None:
        """Look for the files of processes that are new. Those of other machines are not here."""
        new = {
            pid: target
            for target, pid in self._list_processes().items()
            if self._looks.setdefault(pid, 0)
            < MAX_LOOKS  # a thousand workers must not mean a thousand looks per second
        }
        if not new:
            return
        with contextlib.suppress(OSError), os.scandir(self._session / "logs") as entries:
            for entry in entries:
                name, source = entry.name, Path(entry.path)
                pid = name.rpartition("-")[2].partition(".")[0]
                if not name.startswith("worker-") or not pid.isdigit() or int(pid) not in new:
                    continue
                if source not in self._sources and entry.stat().st_mtime >= self._began:
                    self._sources[source] = new[int(pid)], 0
        self._looks.update((pid, self._looks[pid] + 1) for pid in new)

    def _copy(self, source: Path, start: int, target: CallTarget, *, is_last: bool) -> int:
        """Copy a part of a file that begins at `start`; return where the next one begins."""
        path, size = get_worker_log(target), source.stat().st_size
        assert path is not None, "the copier has been started with a folder"
        begin, limit = start, CHUNK_BYTES
        if is_last:
            begin, limit = max(start, size - _END_BYTES), _END_BYTES
        elif path.exists() and path.stat().st_size > MAX_BYTES:
            return start
        if begin >= size:
            return start
        with source.open("rb") as file:
            file.seek(begin)
            data = file.read(limit)
        if begin > start:  # the rest of a line may be the rest of a secret
            cut = data.find(b"\n") + 1
            begin, data = begin + cut, data[cut:]
        is_cut = not is_last and (len(data) < limit or b"\n" in data)
        whole = data[: data.rfind(b"\n") + 1] if is_cut else data
        head = f"--- {target}: output of {source}\n" if start == 0 else ""
        head += f"--- {begin - start:,} bytes are only in that file\n" if begin > start else ""
        with path.open("a", encoding="utf-8") as copy:
            lines = whole.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
            copy.write(head + redact(lines))
        return begin + len(whole)


@contextlib.contextmanager
def copy_worker_logs(folder: Path) -> Iterator[None]:
    """Copy the output of all actors that register into `folder` during the block, one file for each."""
    global _folder
    session = get_session_folder()
    if session is None:
        yield
        return
    make_folder(folder)
    for path in folder.glob("*.log"):
        if path.stat().st_size > MAX_BYTES // 2:
            os.replace(path, path.with_suffix(".log.1"))
    _folder, copier, ended = folder, LogCopier(Path(session), list_processes), threading.Event()

    def run() -> None:
        while not ended.wait(TICK_S):
            copier.copy()
        copier.copy(is_last=True)

    thread = threading.Thread(target=run, name="worker logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=10 * TICK_S)
        _folder = None
