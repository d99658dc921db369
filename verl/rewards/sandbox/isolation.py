"""The walls of the sandbox: which kinds there are, the command that builds each, and the system calls that none allows.

Three kinds, from the best: `bubblewrap`; `namespaces`, the same with util-linux's `unshare`; `limits`, where neither
works, as in most containers. `verl.rewards.sandbox.sandbox` takes the best that works on a machine, and says which.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import shlex
import shutil
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ENVIRONMENT", "KINDS", "MISSING", "build", "counts_processes", "packages", "python", "system_calls", "user"]

KINDS = ("bubblewrap", "namespaces", "limits")

MISSING = {
    "namespaces": "bubblewrap is missing or does not work here, `unshare` takes its place: programs have their own "
    "files and processes, and no network; install the package `bubblewrap` for the way that is tested most",
    "limits": "neither bubblewrap nor namespaces work here: programs are held by limits and a filter of system calls "
    "alone, and can read every file that their user can read; install the package `bubblewrap` and allow namespaces "
    "(docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or use a remote sandbox by URL",
}
"""What to tell the user about a kind that is not the best."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""All that a program sees of the environment. One thread a library: the limit on processes counts threads."""

_LINKED = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def python() -> list[str]:
    """The interpreter below the virtual environment, without `site`, whose .pth files cost more than all else."""
    return [os.path.realpath(sys.executable), "-s", "-S"]


@functools.cache
def packages() -> list[str]:
    """Where this environment's packages are: programs may import them."""
    paths = sysconfig.get_paths()
    return sorted({paths["purelib"], paths["platlib"]})


def user() -> int | None:
    """For root: a user that nobody else is, so that its processes are counted alone and no file is its own."""
    if os.geteuid() != 0:
        return None
    first, _, length = (int(field) for field in Path("/proc/self/uid_map").read_text().split()[:3])
    most = min(first + length, 1 << 31)
    return random.SystemRandom().randrange(most // 2, most - 8) if length >= 1 << 16 else None


def counts_processes(kind: str) -> bool:
    """Whether the kernel can limit a program's processes: it counts by user, and since 5.14 by user namespace."""
    if os.geteuid() == 0:
        return user() is not None
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    return kind != "limits" and release >= (5, 14)


def build(kind: str, inside: Sequence[str], disk_bytes: int) -> list[str] | None:
    """The command that runs `inside` within such walls; None where the tool for them is not installed."""
    if kind == "limits":
        return list(inside)
    tool = shutil.which("bwrap" if kind == "bubblewrap" else "unshare")
    if tool is None:
        return None
    return [tool, *(_bubblewrap if kind == "bubblewrap" else _unshare)(inside, disk_bytes)]


@functools.cache
def _shown() -> tuple[str, ...]:
    """What a program sees of this machine, read-only: the system's programs and libraries, Python and its packages."""
    wanted = ["/usr", "/etc/ld.so.cache", *(path for path in _LINKED if not os.path.islink(path))]
    for path in (sys.base_prefix, *packages()):
        if not any(Path(path).is_relative_to(other) for other in wanted):
            wanted.append(path)
    return tuple(path for path in wanted if os.path.exists(path))


def _links() -> list[tuple[str, str]]:
    return [(os.readlink(path), path) for path in _LINKED if os.path.islink(path)]


def _bubblewrap(inside: Sequence[str], disk_bytes: int) -> list[str]:
    command = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root keeps no user namespace but changes its user inside: the kernel counts no processes of root.
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", folder]
    for target, path in _links():
        command += ["--symlink", target, path]
    for path in _shown():
        for above in reversed(Path(path).parents[:-1]):  # bubblewrap would make them for their owner alone
            command += ["--perms", "755", "--dir", str(above)]
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *inside]


def _unshare(inside: Sequence[str], disk_bytes: int) -> list[str]:
    """The new root is built on /sys, since nothing that is shown lies below it."""
    script = ["set -e", "mount -t tmpfs -o mode=755,size=1m sandbox /sys", "cd /sys"]
    script += ["mkdir -p dev/shm proc tmp old", "ln -s /proc/self/fd dev/fd"]
    script += [f"ln -s /proc/self/fd/{fd} dev/{name}" for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    script += [f"mount -t tmpfs -o mode=1777,size={disk_bytes} sandbox {folder}" for folder in ("dev/shm", "tmp")]
    script += [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in _DEVICES]
    script += [f"ln -s {shlex.quote(target)} .{path}" for target, path in _links()]
    for path in _shown():
        old, new = shlex.quote(path), shlex.quote(f".{path}")
        script.append(f"mkdir -p {new}" if os.path.isdir(path) else f'mkdir -p "$(dirname {new})"; touch {new}')
        script.append(f"mount --rbind {old} {new}; mount -o remount,bind,ro,nosuid {new}")
    script += [
        "mount -t proc proc proc",
        "mount -o remount,bind,ro /sys",
        "pivot_root . old",
        "cd /tmp",
        "umount -l /old",
    ]
    rights = "-all,+setuid,+setgid" if os.geteuid() == 0 else "-all"
    script.append(f"exec setpriv --bounding-set={rights} --inh-caps=-all --no-new-privs -- {shlex.join(inside)}")
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    own = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    return [*users, *own, "sh", "-c", "\n".join(script)]


# Of each architecture: its mark in seccomp, `clone`, and the numbers of what no program here needs. In this order:
# socket, shmget, memfd_create (memory that no limit counts), ptrace, process_vm_readv, process_vm_writev, mount,
# umount2, pivot_root, chroot, unshare, setns, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd,
# name_to_handle_at, open_by_handle_at, syslog.
_ARCHITECTURES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        (41, 29, 319, 101, 310, 311, 165, 166, 155, 161, 272, 308, 248, 249, 250, 321, 298, 323, 303, 304, 103),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        (198, 194, 279, 117, 270, 271, 40, 39, 41, 51, 97, 268, 217, 218, 219, 280, 241, 282, 264, 265, 116),
    ),
}
# The same everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_getfd, mount_setattr, memfd_secret.
_NEW_CALLS = (425, 428, 429, 430, 432, 438, 442, 447)
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal.
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}
_CLONE3, _NEW_NAMESPACE = 435, 0x7E020000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38


def system_calls(signals: bool) -> bytes:
    """A seccomp program that refuses sockets, tracing, new namespaces and the like; empty for an unknown processor.

    Without `signals` a program cannot send any either: for where others' processes run as the same user.
    """
    known = _ARCHITECTURES.get(platform.machine())
    if known is None or sys.platform != "linux":
        return b""
    mark, clone, refused = known
    refused += _NEW_CALLS if signals else _NEW_CALLS + _SIGNALS[platform.machine()]

    def refuse_when(jump: int, number: int, errno: int = _EPERM) -> list[tuple[int, int, int, int]]:
        return [(jump, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno)]

    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, mark), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    rules += refuse_when(_AT_LEAST, 1 << 30)  # x86's third set of numbers
    rules += refuse_when(_EQUAL, _CLONE3, _ENOSYS)  # its flags lie in memory, out of reach: libc then takes `clone`
    for number in refused:
        rules += refuse_when(_EQUAL, number)
    rules += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16), *refuse_when(_ANY_BIT, _NEW_NAMESPACE)]
    rules.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)
