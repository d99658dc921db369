"""The process inside the sandbox that starts the program: it sets limits, drops privileges, and waits for the program.

Sent as source to a Python that does not see verl, so it imports only the standard library, and little of it, since
every run pays for imports. `main` forks. The child becomes the program. The parent, the guard, reports how the program
ended and kills what it left running; in a pid namespace it is the first process, and the kernel does the killing.
The guard cannot be read or traced by the program, although both may have the same user id.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import site
import sys
import time
from types import ModuleType
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _DROP_BOUND, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR, _RECURSIVE, _HERE, _READ_ONLY, _NO_SUID = 442, 0x8000, -100, 1, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_MAY_KILL, _SETGID, _SETUID = 5, 6, 7
_KILL, _TERM = 9, 15


def main() -> None:
    """Run the task. `sys.argv` holds two descriptors: of the task, and for writing `started` and the exit status."""
    task_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(task_fd, "rb") as file:
        task = marshal.load(file)
    _LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if task["kind"] == "limits":
        _LIBC.prctl(_SET_PDEATHSIG, _TERM, 0, 0, 0)
        _LIBC.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    if task["kind"] == "namespaces":
        _make_read_only("/", task["writable"])
    kept = {_SETGID, _SETUID} if task["user"] is not None else set()
    _drop_capabilities(kept | {_MAY_KILL} if kept and task["kind"] == "limits" else kept)
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
    if task["kind"] == "limits":
        import signal

        signal.signal(_TERM, lambda *_: os.kill(program, _KILL))
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    if task["kind"] == "limits":
        _kill_orphans(task["user"])
    os.write(status_fd, b"%d\n" % status)
    os._exit(0)


def _kill_orphans(user: int | None) -> None:
    """Kill what the program left running, until nothing is left: this process inherits orphans."""
    while True:
        if user is not None:
            _kill_all_of(user)
        else:
            _kill_descendants()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)
        except ChildProcessError:
            return


def _kill_descendants() -> None:
    """Kill all processes below this one, once none of them can start another: else some start as fast as others die."""
    stopped: list[int] = []
    while new := [pid for pid in _list_descendants() if pid not in stopped]:
        for pid in new:
            _try(resource.prlimit, pid, resource.RLIMIT_NPROC, (0, 0))
        stopped += new
    for pid in stopped:
        _try(os.kill, pid, _KILL)


def _try(action: Any, *args: Any) -> None:
    """Do something to a process that may have ended."""
    try:
        action(*args)
    except ProcessLookupError:
        return


def _list_descendants() -> list[int]:
    pids = [os.getpid()]
    for parent in pids:  # grows during the loop
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    pids += map(int, file.read().split())
        except OSError:
            pass
    return pids[1:]


def _kill_all_of(user: int) -> None:
    """Kill all processes of a user, from a process of that user. They may stop it, so the wait for it is limited."""
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, _KILL)
        finally:
            os._exit(0)
    for _ in range(200):
        if os.waitpid(killer, os.WNOHANG)[0]:
            return
        time.sleep(0.001)


def _make_read_only(path: str, writable: list[str]) -> None:
    """Make everything that is mounted at or below `path` read-only, also what was mounted there before."""

    def change(at: str, flags: int, to_set: int, to_clear: int) -> None:
        attributes = (ctypes.c_uint64 * 4)(to_set, to_clear, 0, 0)
        size = ctypes.sizeof(attributes)
        if _LIBC.syscall(_MOUNT_SETATTR, _HERE, at.encode(), flags, ctypes.byref(attributes), size):
            raise OSError(
                ctypes.get_errno(), f"mount_setattr (Linux 5.12) failed: {os.strerror(ctypes.get_errno())}", at
            )

    change(path, _RECURSIVE, _READ_ONLY | _NO_SUID, 0)
    for each in writable:
        change(each, 0, 0, _READ_ONLY)


def _drop_capabilities(kept: set[int]) -> None:
    """Give up all capabilities except `kept`, for this process and all that it starts."""
    for capability in set(range(64)) - kept:
        _LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)
    bits = sum(1 << capability for capability in kept)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0)
    number = _CAPSET.get(os.uname().machine)
    if number is not None and _LIBC.syscall(number, ctypes.byref(header), ctypes.byref(sets)) and os.geteuid() == 0:
        raise OSError(ctypes.get_errno(), "the kernel keeps capabilities")


def _drop_privileges(task: dict[str, Any]) -> None:
    for name, limit in task["rlimits"]:
        resource.setrlimit(name, (limit, limit))
    if task["user"] is not None:
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])
    _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # else a program cannot read its own /proc/self
    _LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if task["landlock_version"]:
        _restrict_files(task["landlock_version"], task["landlock_rules"])
    rules: bytes = task["seccomp_filter"]
    if rules:
        buffer = ctypes.create_string_buffer(rules, len(rules))

        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]

        program = Filter(len(rules) // 8, ctypes.cast(buffer, ctypes.c_void_p))
        if _LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel rejected the system call filter")


def _restrict_files(version: int, rules: list[tuple[str, bool]]) -> None:
    """Let the program use only the paths of `rules`, and reach no process outside, with Landlock."""
    every = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    read, of_a_file = 0b1101, 0b1100000000000111  # execute, read, list; execute, write, read, truncate, ioctl
    network, scope = 0b11, 0b11  # no ports; no abstract sockets and signals
    fields = (every, *([network] if version >= 4 else []), *([scope] if version >= 6 else []))
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = _LIBC.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    for path, is_writable in rules:
        try:
            fd = os.open(path, os.O_PATH)
        except OSError:
            continue  # without a rule it stays out of reach
        allowed = (every if is_writable else read & every) & (every if os.path.isdir(path) else of_a_file)
        rule = allowed.to_bytes(8, "little") + fd.to_bytes(4, "little")
        _LIBC.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        os.close(fd)
    if ruleset < 0 or _LIBC.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock failed")
    os.close(ruleset)


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
