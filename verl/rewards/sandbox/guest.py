"""What runs inside the sandbox, before and around the program: sets limits, gives up rights, then guards the program.

Sent as text to a Python that sees nothing of verl, so it imports the standard library alone, and little of it: what is
imported here is paid for by every run. `main` forks. The parent, the first process of its pid namespace, waits for the
program and reports how it ended; when it goes, the kernel ends whatever else is left in the namespace. The child
becomes the program.
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
    """`sys.argv` holds two descriptors: where to read the task, and where to write `started` and the exit status."""
    task_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(task_fd, "rb") as file:
        task = marshal.load(file)
    if not task["alone"]:
        _LIBC.prctl(_SET_PDEATHSIG, _TERM, 0, 0, 0)
        _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    program = os.fork()
    if program:
        _guard(program, status_fd, task)
    _give_up_rights(task)
    os.write(status_fd, b"started\n")
    os.close(status_fd)
    _become(task["source"], task["files"], task["argv"], task["packages"])


def _guard(program: int, status_fd: int, task: dict[str, Any]) -> None:
    """Waits for the program, and for nobody else: a daemon that it left behind ends here."""
    for fd in (0, 1, 2):
        os.close(fd)
    if not task["alone"]:
        import signal

        signal.signal(_TERM, lambda *_: os.kill(program, _KILL))
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    if not task["alone"]:
        _sweep(task["user"])
    os.write(status_fd, b"%d\n" % status)
    os._exit(0)


def _sweep(user: int | None) -> None:
    """Ends all that the program left, where no pid namespace does it: orphans are handed to this process."""
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


def _give_up_rights(task: dict[str, Any]) -> None:
    for what, most in task["limits"]:
        resource.setrlimit(what, (most, most))
    if task["user"] is not None:
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])
        # Its own /proc/self is a program's to read; a change of user took that away.
        _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rules: bytes = task["system_calls"]
    if rules:
        held = ctypes.create_string_buffer(rules, len(rules))

        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]

        filtered = Filter(len(rules) // 8, ctypes.cast(held, ctypes.c_void_p))
        if _LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(filtered), 0, 0):
            raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def _become(source: str, files: dict[str, str | bytes], argv: list[str], packages: list[str]) -> None:
    for name, content in files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    sys.argv = ["main.py", *argv]
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path), *packages]
    site.setquit()
    program = ModuleType("__main__")
    program.__file__ = "main.py"
    sys.modules["__main__"] = program
    exec(compile(source, "main.py", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
