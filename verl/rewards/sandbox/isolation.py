"""The kinds of isolation, and the command that sets up each.

From best to worst: `bubblewrap`; `namespaces`, the same with `unshare` of util-linux; `limits`, where neither works, as
in most containers. All of them forbid system calls (`seccomp`); `limits` uses Landlock where the kernel has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import random
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

KINDS = ("bubblewrap", "namespaces", "limits")

WAYS = (
    "install the package `bubblewrap`; allow user namespaces (sysctl user.max_user_namespaces=10000; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0; docker: --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined); or set reward.sandbox.url to a remote sandbox"
)
"""How to get a better isolation than `limits`."""

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
_LANDLOCK_CREATE_RULESET = 444


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


def limit_processes(kind: str, count: int) -> int:
    """Return the limit that allows `count` processes: the kernel counts per user, since 5.14 per user namespace."""
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    counts_alone = choose_user() is not None or (kind != "limits" and os.geteuid() != 0 and release >= (5, 14))
    return count if counts_alone else count + _count_tasks(os.geteuid())


def _count_tasks(user: int) -> int:
    """Return how many processes and threads a user has."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(path / "task")) if path.stat().st_uid == user else 0
    return count


def describe(kind: str) -> str:
    """Return what `kind` lacks on this machine."""
    if kind == "bubblewrap":
        return "nothing is known to be missing"
    if kind == "namespaces":
        return (
            "bubblewrap is missing or does not work here, so `unshare` is used: programs have their own files and "
            "processes, and no network; install the package `bubblewrap`, which is tested more"
        )
    return "neither bubblewrap nor namespaces work here. Programs " + "; ".join(list_gaps())


def list_gaps() -> list[str]:
    """Return what `limits` does not protect from on this machine."""
    gaps = ["see that files exist, with their size and time", "write to the disk of their temporary folder"]
    if os.geteuid() == 0 and choose_user() is not None:
        return gaps if landlock_version() else ["read and write what every user may", *gaps[1:]]
    gaps.append("share the limit on processes with everything else of this user")
    if not landlock_version():
        gaps[0] = (
            "read the memory of this run with the expected results, and read, write and delete every file of this user"
        )
    return gaps


@functools.cache
def landlock_version() -> int:
    """Return the version of Landlock of this kernel; 0 without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)) if sys.platform == "linux" else 0


def landlock_rules(folder: str) -> list[tuple[str, bool]]:
    """Return the paths that a program may use with `limits`, and whether it may also write there."""
    devices = [(f"/dev/{name}", name == "null") for name in _DEVICES]
    return [*((path, False) for path in _visible_paths()), *devices, (folder, True)]


def build_command(kind: str, guest: Sequence[str], disk_bytes: int, folders: Sequence[str]) -> list[str] | None:
    """Return the command that runs `guest` isolated, with empty `folders`; None if its tool is not installed."""
    if kind == "limits":
        return list(guest)
    tool = shutil.which("bwrap" if kind == "bubblewrap" else "unshare")
    if tool is None:
        return None
    return [tool, *(_bubblewrap_arguments if kind == "bubblewrap" else _unshare_arguments)(guest, disk_bytes, folders)]


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


def _bubblewrap_arguments(guest: Sequence[str], disk_bytes: int, folders: Sequence[str]) -> list[str]:
    command = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    # Root changes its user inside instead of using a user namespace: the kernel does not limit root's processes.
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp", *folders):
        command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", folder]
    for target, path in _links():
        command += ["--symlink", target, path]
    for path in _visible_paths():
        for above in reversed(Path(path).parents[:-1]):  # else bubblewrap makes them readable by their owner only
            command += ["--perms", "755", "--dir", str(above)]
        command += ["--ro-bind", path, path]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *guest]


def _unshare_arguments(guest: Sequence[str], disk_bytes: int, folders: Sequence[str]) -> list[str]:
    """The new root is built on /sys, which contains none of the visible paths. The guest makes it read-only."""
    script = ["set -e", "mount -t tmpfs -o mode=755,size=1m sandbox /sys", "cd /sys"]
    script += ["mkdir -p dev proc old", "ln -s /proc/self/fd dev/fd"]
    script += [f"ln -s /proc/self/fd/{fd} dev/{name}" for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    for folder in ("/dev/shm", "/tmp", *folders):
        path = shlex.quote(f".{folder}")
        script.append(f"mkdir -p {path}; mount -t tmpfs -o mode=1777,size={disk_bytes} sandbox {path}")
    script += [f"touch dev/{name}; mount --bind /dev/{name} dev/{name}" for name in _DEVICES]
    script += [f"ln -s {shlex.quote(target)} .{path}" for target, path in _links()]
    for path in _visible_paths():
        old, new = shlex.quote(path), shlex.quote(f".{path}")
        script.append(f"mkdir -p {new}" if os.path.isdir(path) else f'mkdir -p "$(dirname {new})"; touch {new}')
        script.append(f"mount --rbind {old} {new}")
    script += ["mount -t proc proc proc", "pivot_root . old", "cd /tmp", "umount -l /old", f"exec {shlex.join(guest)}"]
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    return [*users, *namespaces, "sh", "-c", "\n".join(script)]
