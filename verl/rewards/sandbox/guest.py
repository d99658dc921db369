"""The process inside the sandbox that starts the program: it sets limits, drops privileges, and waits for the program.

Sent as source to a Python that does not see verl, so it imports only the standard library, and little of it, since
every run pays for imports. `main` forks. The child becomes the program. The parent, the first process of its pid
namespace, reports how the program ended; when it exits, the kernel kills whatever else runs in the namespace.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import site
import sys
from types import ModuleType
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_KILL, _TERM = 9, 15


def main() -> None:
    """Run the task. `sys.argv` holds two descriptors: of the task, and for writing `started` and the exit status."""
    task_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(task_fd, "rb") as file:
        task = marshal.load(file)
    if not task["has_namespaces"]:
        _LIBC.prctl(_SET_PDEATHSIG, _TERM, 0, 0, 0)
        _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    program = os.fork()
    if program:
        _wait_for(program, status_fd, task)
    _drop_privileges(task)
    os.write(status_fd, b"started\n")
    os.close(status_fd)
    _execute(task["source"], task["files"], task["argv"], task["package_paths"])


def _wait_for(program: int, status_fd: int, task: dict[str, Any]) -> None:
    """Wait for the program, but not for daemons that it started; they are killed."""
    for fd in (0, 1, 2):
        os.close(fd)
    if not task["has_namespaces"]:
        import signal

        signal.signal(_TERM, lambda *_: os.kill(program, _KILL))
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    if not task["has_namespaces"]:
        _kill_orphans(task["user"])
    os.write(status_fd, b"%d\n" % status)
    os._exit(0)


def _kill_orphans(user: int | None) -> None:
    """Kill what the program left running, where no pid namespace does: this process inherits orphans."""
    while True:
        if user is not None and os.fork() == 0:
            os.setresuid(user, user, user)
            os.kill(-1, _KILL)
            os._exit(0)
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for child in file.read().split() if user is None else ():
                os.kill(int(child), _KILL)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            return


def _drop_privileges(task: dict[str, Any]) -> None:
    for name, limit in task["rlimits"]:
        resource.setrlimit(name, (limit, limit))
    if task["user"] is not None:
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])
        # A change of user makes /proc/self unreadable.
        _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rules: bytes = task["seccomp_filter"]
    if rules:
        buffer = ctypes.create_string_buffer(rules, len(rules))

        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]

        program = Filter(len(rules) // 8, ctypes.cast(buffer, ctypes.c_void_p))
        if _LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel rejected the system call filter")


def _execute(source: str, files: dict[str, str | bytes], argv: list[str], package_paths: list[str]) -> None:
    for name, content in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    sys.argv = ["main.py", *argv]
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path), *package_paths]
    site.setquit()
    program = ModuleType("__main__")
    program.__file__ = "main.py"
    sys.modules["__main__"] = program
    exec(compile(source, "main.py", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
