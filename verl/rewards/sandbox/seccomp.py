"""The system calls that no program in the sandbox may make, as a seccomp filter."""

from __future__ import annotations

import platform
import struct
import sys

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name -> its numbers on x86_64 and aarch64, which has only the successors of older calls.
_FORBIDDEN: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    # Kernel memory and objects that outlive the program, which no limit counts.
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218)},
    "keyctl": (250, 219),
    # Other processes.
    **{
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "pidfd_getfd": (438, 438),
    },
    # Other views of the file system.
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97)},
    **{"setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsmount": (432, 432), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264)},
    "open_by_handle_at": (304, 265),
    # Large parts of the kernel that no program here needs.
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425)},
    "syslog": (103, 116),
}
# Where the program shares its user id with other processes and files.
_FORBIDDEN_AS_SAME_USER: dict[str, tuple[int, int]] = {
    "socketpair": (53, 199),  # its owner is sent signals
    # Signals, limits and priorities of others.
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "setpriority": (141, 140)},
    **{"ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119)},
    **{"sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238)},
    **{"move_pages": (279, 239), "process_madvise": (440, 440), "process_mrelease": (448, 448)},
    # What Landlock does not check: modes, owners, times, attributes, and notifications about files.
    **{"chmod": (90, 53), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, 54)},
    **{"fchown": (93, 55), "lchown": (94, 54), "fchownat": (260, 54), "utime": (132, 88), "utimes": (235, 88)},
    **{"futimesat": (261, 88), "utimensat": (280, 88), "truncate": (76, 45), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
    **{"inotify_init": (253, 26), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
}
_CLONE, _FCNTL, _PRLIMIT = (56, 220), (72, 25), (302, 261)
_CLONE3, _NEW_NAMESPACE = 435, 0x7E020000
_OWNER_COMMANDS = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: they send signals

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38

_Rule = tuple[int, int, int, int]  # operation, instructions to skip if true and if false, operand


def build_seccomp_filter(*, shares_user: bool) -> bytes:
    """Return a seccomp program that forbids sockets, tracing, new namespaces and more; empty on other processors.

    With `shares_user`, other processes and files belong to the user of the program: then it may not signal or change
    them either.
    """
    if platform.machine() not in _ARCHITECTURES or sys.platform != "linux":
        return b""
    arch = list(_ARCHITECTURES).index(platform.machine())
    forbidden = _FORBIDDEN | (_FORBIDDEN_AS_SAME_USER if shares_user else {})
    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]), (_RETURN, 0, 0, _KILL)]
    rules += [(_LOAD, 0, 0, 0), *_forbid_when(_AT_LEAST, 1 << 30)]  # the x32 calls of x86
    rules += _forbid_when(_EQUAL, _CLONE3, _ENOSYS)  # seccomp cannot read its flags; libc falls back to `clone`
    for number in sorted({numbers[arch] for numbers in forbidden.values()}):
        rules += _forbid_when(_EQUAL, number)
    rules += _check_argument(_CLONE[arch], 0, _forbid_when(_ANY_BIT, _NEW_NAMESPACE))
    if shares_user:
        owners = [rule for command in _OWNER_COMMANDS for rule in _forbid_when(_EQUAL, command)]
        rules += _check_argument(_FCNTL[arch], 1, owners)
        rules += _check_argument(_PRLIMIT[arch], 0, [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _ERRNO | _EPERM)])
    rules.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def _forbid_when(test: int, operand: int, errno: int = _EPERM) -> list[_Rule]:
    return [(test, 0, 1, operand), (_RETURN, 0, 0, _ERRNO | errno)]


def _check_argument(number: int, argument: int, tests: list[_Rule]) -> list[_Rule]:
    """Return rules that apply `tests` to an argument of one call, and allow the call otherwise."""
    body = [(_LOAD, 0, 0, 16 + 8 * argument), *tests, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
