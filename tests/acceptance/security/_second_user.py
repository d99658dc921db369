"""Another user of the machine, who tries to read, block, plant and delete what belongs to a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOBODY = 65534
SHARED_MEMORY = "/dev/shm"


def is_possible() -> bool:
    """Whether this process can act as another user."""
    return os.geteuid() == 0


def as_nobody(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of another user, without groups and capabilities."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            signal.alarm(60)
            os.write(writer, json.dumps(work()).encode()[:60_000])
            code = 0
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the second user's process failed"
    return json.loads(text)


@dataclass
class Attempts:
    """What the second user tried, and what worked."""

    count: int = 0
    worked: set[str] = field(default_factory=set)

    def add(self, result: tuple[int, list[str]]) -> None:
        self.count, self.worked = self.count + result[0], self.worked | set(result[1])


def plant(temporary: Path) -> None:
    """Take the names in a temporary folder that a run would use, before it starts."""
    mine = f"verl-{os.getuid()}"

    def work() -> None:
        (temporary / mine).mkdir()
        (temporary / mine).chmod(0o777)
        (temporary / f"{mine}-1").symlink_to(temporary / mine)
        (temporary / f"{mine}-2").touch()
        (temporary / "torchinductor_root").mkdir()

    as_nobody(work)


def attack(run: Path, temporary: Path, pids: list[int]) -> tuple[int, list[str]]:
    """Try everything on a run that is active: (the number of attempts, those that worked)."""
    paths = sorted({*_walk(run), *_walk(temporary), *_open_files(pids, (str(run), str(temporary), SHARED_MEMORY))})
    names = sorted(_abstract_sockets(pids))
    me = os.getpid()

    def work() -> tuple[int, list[str]]:
        attempts = [*_on_paths(paths, run), *_on_processes(pid for pid in pids if pid != me), *_on_sockets(names)]
        return len(attempts), [name for name, action in attempts if _works(action)]

    count, worked = as_nobody(work)
    return count, worked


def _works(action: Callable[[], Any]) -> bool:
    try:
        return action() is not False
    except (OSError, ValueError):
        return False


def _on_paths(paths: Iterable[str], run: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    for path in paths:
        yield f"read {path}", lambda path=path: _touch(path, os.O_RDONLY)
        yield f"write {path}", lambda path=path: _touch(path, os.O_RDWR)
        yield f"connect to {path}", lambda path=path: _connect(path)
    lock = str(run / ".run.lock")
    for path in (lock, str(run)):
        yield f"lock {path}", lambda path=path: _lock(path)
    yield "delete the lock", lambda: os.unlink(lock)
    yield "replace the lock", lambda: os.rename(lock, f"{lock}.old")
    yield "move the run", lambda: os.rename(run, f"{run}-moved")
    yield "plant a lock", lambda: os.close(os.open(lock, os.O_CREAT | os.O_WRONLY))
    yield "plant a checkpoint", lambda: os.mkdir(run / "global_step_999")
    yield "choose the checkpoint", lambda: Path(run, "latest_checkpointed_iteration.txt").write_text("1")
    yield "list the run", lambda: os.listdir(run)


def _on_processes(pids: Iterable[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for pid in pids:
        for file in ("environ", "mem", "maps"):
            yield f"read /proc/{pid}/{file}", lambda pid=pid, file=file: bool(Path(f"/proc/{pid}/{file}").read_bytes())
        yield f"list the files of {pid}", lambda pid=pid: os.listdir(f"/proc/{pid}/fd")
        yield f"stop {pid}", lambda pid=pid: os.kill(pid, 0)


def _on_sockets(names: Iterable[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in names:
        yield f"connect to {name}", lambda name=name: _connect("\0" + name[1:])


def _touch(path: str, flags: int) -> bool:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.listdir(path)
        return True
    if os.lstat(path).st_uid == NOBODY or stat.S_ISLNK(os.lstat(path).st_mode):
        return False  # what the second user has planted
    os.close(os.open(path, flags | os.O_NONBLOCK))
    return True


def _connect(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(path)
    return True


def _lock(path: str) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _walk(root: Path) -> Iterator[str]:
    """All that lies in a folder, except what the second user has put there."""
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid != NOBODY:
                    yield path


def _open_files(pids: Iterable[int], roots: tuple[str, ...]) -> Iterator[str]:
    """Files below `roots` that these processes have open or mapped: also such as no walk would find."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{entry}")
                    if target.startswith(roots) and not target.endswith(" (deleted)"):
                        yield target
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                target = line.partition("/")[1] + line.partition("/")[2]
                if target.startswith(SHARED_MEMORY) and not target.endswith(" (deleted)"):
                    yield target


def _abstract_sockets(pids: Iterable[int]) -> Iterator[str]:
    """Names of sockets that these processes listen on and that no permission of a file protects."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}").removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@") and fields[6] in inodes:
            yield fields[7]
