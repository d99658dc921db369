"""The kinds of isolation: the command that sets up each, and the system calls that all of them forbid.

From best to worst: `bubblewrap`; `namespaces`, the same with `unshare` of util-linux; `limits`, where neither works, as
in most containers.
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

KINDS = ("bubblewrap", "namespaces", "limits")

WARNINGS = {
    "namespaces": "bubblewrap is missing or does not work here, so `unshare` is used: programs have their own files "
    "and processes, and no network; install the package `bubblewrap`, which is tested more",
    "limits": "neither bubblewrap nor namespaces work here: programs are restricted only by limits and a system call "
    "filter, and can read every file that their user can read; install the package `bubblewrap` and allow namespaces "
    "(docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or use a remote sandbox by URL",
}
"""Kind -> what it lacks, and how to get a better one."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a program. Libraries get one thread: the limit on processes counts threads."""

_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def python_command() -> list[str]:
    """Return the interpreter without the virtual environment and `site`, whose .pth files take most of the startup."""
    return [os.path.realpath(sys.executable), "-s", "-S"]


@functools.cache
def package_paths() -> list[str]:
    """Return the folders of this environment's packages, which programs may import."""
    paths = sysconfig.get_paths()
    return sorted({paths["purelib"], paths["platlib"]})


def choose_user() -> int | None:
    """Return, for root, a random unused user id: it owns no files, and the kernel counts its processes separately."""
    if os.geteuid() != 0:
        return None
    first, _, length = (int(field) for field in Path("/proc/self/uid_map").read_text().split()[:3])
    end = min(first + length, 1 << 31)
    return random.SystemRandom().randrange(end // 2, end - 8) if length >= 1 << 16 else None


def can_limit_processes(kind: str) -> bool:
    """Return whether the kernel can limit a program's processes: it counts per user, since 5.14 per user namespace."""
    if os.geteuid() == 0:
        return choose_user() is not None
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    return kind != "limits" and release >= (5, 14)


def build_command(kind: str, guest: Sequence[str], disk_bytes: int) -> list[str] | None:
    """Return the command that runs `guest` isolated; None if its tool is not installed."""
    if kind == "limits":
        return list(guest)
    tool = shutil.which("bwrap" if kind == "bubblewrap" else "unshare")
    if tool is None:
        return None
    return [tool, *(_bubblewrap_arguments if kind == "bubblewrap" else _unshare_arguments)(guest, disk_bytes)]


@functools.cache
def _visible_paths() -> tuple[str, ...]:
    """Return what a program can read of this machine: system programs and libraries, Python and its packages."""
    paths = ["/usr", "/etc/ld.so.cache", *(path for path in _SYSTEM_FOLDERS if not os.path.islink(path))]
    for path in (sys.base_prefix, *package_paths()):
        if not any(Path(path).is_relative_to(other) for other in paths):
            paths.append(path)
    return tuple(path for path in paths if os.path.exists(path))


def _links() -> list[tuple[str, str]]:
    return [(os.readlink(path), path) for path in _SYSTEM_FOLDERS if os.path.islink(path)]


def _bubblewrap_arguments(guest: Sequence[str], disk_bytes: int) -> list[str]:
    command = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root changes its user inside instead of using a user namespace: the kernel does not limit root's processes.
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", folder]
    for target, path in _links():
        command += ["--symlink", target, path]
    for path in _visible_paths():
        for above in reversed(Path(path).parents[:-1]):  # else bubblewrap makes them readable by their owner only
            command += ["--perms", "755", "--dir", str(above)]
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *guest]


def _unshare_arguments(guest: Sequence[str], disk_bytes: int) -> list[str]:
    """The new root is built on /sys, which contains none of the visible paths."""
    script = ["set -e", "mount -t tmpfs -o mode=755,size=1m sandbox /sys", "cd /sys"]
    script += ["mkdir -p dev/shm proc tmp old", "ln -s /proc/self/fd dev/fd"]
    script += [f"ln -s /proc/self/fd/{fd} dev/{name}" for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    script += [f"mount -t tmpfs -o mode=1777,size={disk_bytes} sandbox {folder}" for folder in ("dev/shm", "tmp")]
    script += [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in _DEVICES]
    script += [f"ln -s {shlex.quote(target)} .{path}" for target, path in _links()]
    for path in _visible_paths():
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
    script.append(f"exec setpriv --bounding-set={rights} --inh-caps=-all --no-new-privs -- {shlex.join(guest)}")
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    return [*users, *namespaces, "sh", "-c", "\n".join(script)]


# Per architecture: its id in seccomp, `clone`, and the system calls that no program here needs:
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
# Everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_getfd, mount_setattr, memfd_secret.
_NEW_CALLS = (425, 428, 429, 430, 432, 438, 442, 447)
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal.
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297, 424), "aarch64": (129, 130, 131, 138, 240, 424)}
_CLONE3, _NEW_NAMESPACE = 435, 0x7E020000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38


def build_seccomp_filter(*, allow_signals: bool) -> bytes:
    """Return a seccomp program that forbids sockets, tracing, new namespaces and more; empty on other processors.

    Signals are forbidden where processes of others run as the same user.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None or sys.platform != "linux":
        return b""
    mark, clone, forbidden = architecture
    forbidden += _NEW_CALLS if allow_signals else _NEW_CALLS + _SIGNALS[platform.machine()]

    def forbid_when(jump: int, operand: int, errno: int = _EPERM) -> list[tuple[int, int, int, int]]:
        return [(jump, 0, 1, operand), (_RETURN, 0, 0, _ERRNO | errno)]

    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, mark), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    rules += forbid_when(_AT_LEAST, 1 << 30)  # the x32 calls of x86
    rules += forbid_when(_EQUAL, _CLONE3, _ENOSYS)  # seccomp cannot read its flags; libc falls back to `clone`
    for call in forbidden:
        rules += forbid_when(_EQUAL, call)
    rules += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, 16), *forbid_when(_ANY_BIT, _NEW_NAMESPACE)]
    rules.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)
