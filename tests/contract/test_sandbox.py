"""The sandbox: how programs end, what they see, and the kinds of isolation. See also `make show-sandbox`."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl.errors import RewardError
from verl.rewards.sandbox import isolation, sandbox, seccomp
from verl.rewards.sandbox.sandbox import Limits, best_isolation, run

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]


@pytest.fixture
def fresh() -> Iterator[None]:
    best_isolation.cache_clear()
    yield
    best_isolation.cache_clear()


def owner(process: Path) -> int | None:
    """Whose it is; None when it has just ended."""
    with contextlib.suppress(OSError):
        return process.stat().st_uid
    return None


def works(kind: str) -> bool:
    try:
        return run("import json; print(1)", kind=kind).stdout == "1\n"
    except RewardError:
        return False


@pytest.fixture(params=isolation.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of isolation that works on this machine."""
    if not works(request.param):
        pytest.skip(f"{request.param} does not work on this machine")
    return str(request.param)


@pytest.mark.parametrize("kind", ["bubblewrap", "namespaces"])
def test_folders_are_empty_and_writable_and_end_with_the_program(kind: str) -> None:
    if not works(kind):
        pytest.skip(f"{kind} does not work on this machine")
    source = """
import os
for folder in ("/data", "/usr-of-a-test"):
    print(os.listdir(folder), open(folder + "/x", "w").write("abc"))
try:
    open("/usr/x", "w")
except OSError as error:
    print(error.strerror)
"""
    result = run(source, kind=kind, folders=["/data", "/usr-of-a-test"])
    assert result.stdout == "[] 3\n[] 3\nRead-only file system\n", result
    assert not Path("/usr-of-a-test").exists()


def test_a_program_reads_prints_and_ends(kind: str) -> None:
    source = "import sys, part\nprint(input(), sys.argv[1:], open('a/b.txt').read(), part.x)\n"
    source += "print(2, file=sys.stderr)\nexit(3)"
    files = {"a/b.txt": b"bytes", "part.py": "x = 7"}
    outcome = run(source, stdin="line\n", argv=["1"], files=files, kind=kind)
    assert (outcome.status, outcome.exit_code) == ("error", 3)
    assert (outcome.stdout, outcome.stderr) == ("line ['1'] bytes 7\n", "2\n")


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("", "ok", 0),
        ("raise ValueError", "error", 1),
        ("not python", "error", 1),
        ("import os; os._exit(255)", "error", 255),
        ("import os; os.abort()", "killed", -6),
        ("import os; os.kill(os.getpid(), 15)", "killed", -15),
        ("while True: print('x' * 1000)", "output", None),
    ],
)
def test_the_end_of_a_program_is_reported(source: str, status: str, code: int | None) -> None:
    outcome = run(source, limits=Limits(output_bytes=10_000))
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert len(outcome.stdout) <= 10_000


def test_a_timeout_keeps_the_output() -> None:
    outcome = run("import time\nprint('begun', flush=True)\ntime.sleep(60)", limits=Limits(seconds=3.0))
    assert (outcome.status, outcome.stdout) == ("timeout", "begun\n")
    assert 3.0 <= outcome.seconds < 10


def test_a_daemon_that_keeps_the_pipes_open_does_not_block_the_grader() -> None:
    outcome = run("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(3600)\nprint('gone')")
    assert (outcome.status, outcome.stdout) == ("ok", "gone\n")


@pytest.mark.rotating(0)
@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_without_namespaces_daemons_are_ended_too(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    user = isolation.choose_user()
    monkeypatch.setattr(isolation, "choose_user", lambda: user)
    source = f"""
import os, time
for name in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        os.close(1)
        time.sleep(60)
print(*os.listdir("."), flush=True)
time.sleep({60 if seconds < 30 else 0})
"""
    outcome = run(source, kind="limits", files={"my-own-file": ""}, limits=Limits(seconds=seconds))
    assert (outcome.status, outcome.stdout) == ("timeout" if seconds < 30 else "ok", "my-own-file\n")
    if user is not None:
        assert user not in map(owner, Path("/proc").glob("[0-9]*"))


def test_processes_of_one_program_are_limited_together() -> None:
    source = """
import os, time
for made in range(20):
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: break
print(made)
"""
    assert 1 <= int(run(source, limits=Limits(processes=6)).stdout) <= 6


@pytest.mark.rotating(5)
def test_memory_is_limited_for_one_process_and_for_all() -> None:
    limits = Limits(memory_bytes=100 << 20, seconds=20)
    assert "MemoryError" in run("x = bytearray(200 << 20)", limits=limits).stderr
    source = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
    source += "x = bytearray(b'x') * (50 << 20)\ntime.sleep(60)"
    assert run(source, limits=limits).status == "memory"


def test_the_disk_is_limited() -> None:
    source = "for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert run(source, limits=Limits(disk_bytes=4 << 20)).status != "ok"
    source = "with open('f', 'wb') as file: file.write(b'x' * 2000)"
    assert "File too large" in run(source, limits=Limits(file_bytes=1000)).stderr


def test_environment_variables_and_home_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    (tmp_path / "secret.txt").write_text("secret")
    tmp_path.chmod(0o755)
    if best_isolation() == "limits":
        pytest.skip("limits hide no files")
    outcome = run(f"import os\nprint(dict(os.environ), os.path.exists('{tmp_path}'), os.listdir('/'), os.listdir())")
    assert "secret" not in outcome.stdout
    assert " False " in outcome.stdout
    assert "'home'" not in outcome.stdout
    assert outcome.stdout.endswith("[]\n")


def test_the_guard_cannot_be_reached(kind: str) -> None:
    """What a program writes to the status of its guard would turn its 0 into a failure of the machine."""
    source = """
import os
for pid in (1, os.getppid()):
    for way in (f"/proc/{pid}/mem", *(f"/proc/{pid}/fd/{fd}" for fd in range(32))):
        try: os.write(os.open(way, os.O_WRONLY), b"garbage"); print(way)
        except OSError: pass
exit(1)
"""
    outcome = run(source, kind=kind)
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("error", 1, "")


@pytest.mark.parametrize("status", ["garbage", "-1", "1e9", "", "\udcff"])
def test_an_unreadable_status_is_the_fault_of_the_program(status: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"started\n" + status.encode(errors="surrogateescape"))
    os.close(writer)
    with subprocess.Popen(["true"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        monitor = sandbox._Monitor(process, reader, "limits", "/", Limits())
        monitor.wait()
        assert (monitor.result().status, os.close(reader)) == ("killed", None)


def test_standard_input_can_only_be_read(kind: str) -> None:
    source = """
import os
for action in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 1 << 20),
               lambda: os.write(os.open("/dev/stdin", os.O_RDWR), b"x")):
    try: action(); print("changed")
    except OSError: pass
print(open("/dev/stdin").read())
"""
    assert run(source, stdin="given", kind=kind).stdout == "given\n"


def test_no_kernel_objects_are_left(kind: str) -> None:
    source = "import ctypes\nlibc = ctypes.CDLL(None)\n"
    source += "print(libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600), libc.shmget(0, 4096, 0o1600))"
    assert run(source, kind=kind).stdout == "-1 -1 -1\n"


@pytest.mark.rotating(1)
def test_memory_in_sockets_counts(kind: str) -> None:
    source = """
import os, socket, time
for _ in range(11):
    if os.fork() == 0: break
held = []
while True:
    try: held += socket.socketpair()
    except OSError: time.sleep(60)
    for end in held[-2:]:
        end.setblocking(False)
        try:
            while True: end.send(b"x" * 65536)
        except BlockingIOError: pass
"""
    is_refused = kind == "limits" and os.geteuid() != 0
    limits = Limits(memory_bytes=256 << 20, processes=16, seconds=2 if is_refused else 15)
    assert run(source, limits=limits, kind=kind).status == ("timeout" if is_refused else "memory")


@pytest.mark.rotating(3)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a volume")
def test_volumes_below_a_visible_folder_are_read_only(kind: str) -> None:
    script = """
import sys
from verl.rewards.sandbox.sandbox import run
source = "try:\\n    open('/usr/local/src/file', 'a').write('x'); print('wrote')\\nexcept OSError: print('refused')"
print(run(source, kind=sys.argv[1]).stdout, end="")
"""
    mount = (
        "mount -t tmpfs -o mode=777 volume /usr/local/src && touch /usr/local/src/file && chmod 666 /usr/local/src/file"
    )
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", script, kind]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "refused\n"


def test_limits_with_landlock_hide_files_and_processes(tmp_path: Path) -> None:
    if not works("limits") or not isolation.landlock_version():
        pytest.skip("this needs limits, and a kernel with Landlock")
    (tmp_path / "secret.txt").write_text("secret")
    for path in (tmp_path, tmp_path / "secret.txt"):
        path.chmod(0o777)
    source = f"""
import os
for path in ("{tmp_path}/secret.txt", "/etc/passwd", "/proc/{os.getpid()}/environ", "/proc/{os.getpid()}/mem"):
    try: print(open(path).read())
    except OSError: pass
for path in ("{tmp_path}/new", "/tmp/new", "/dev/shm/new", "/var/tmp/new"):
    try: open(path, "w"); print(path)
    except OSError: pass
with open("mine", "w") as file: file.write("works")
print(open("mine").read())
"""
    assert run(source, kind="limits").stdout == "works\n"


@pytest.mark.rotating(2)
def test_deeply_nested_folders_are_removed() -> None:
    if not works("limits"):
        pytest.skip("limits do not work on this machine")
    before = set(Path(tempfile.gettempdir()).glob("sandbox-*"))
    source = "import os\nos.mkdir('shut', 0)\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    assert run(source, kind="limits").status in ("ok", "disk")
    assert set(Path(tempfile.gettempdir()).glob("sandbox-*")) <= before


def test_the_gaps_of_limits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "choose_user", lambda: None)
    monkeypatch.setattr(isolation, "landlock_version", lambda: 0)
    assert "read the memory of this run" in isolation.describe("limits")
    monkeypatch.setattr(isolation, "landlock_version", lambda: 7)
    assert "memory" not in isolation.describe("limits")


def test_there_is_no_network_and_no_tracing() -> None:
    source = "import ctypes, socket\nprint(ctypes.CDLL(None).ptrace(0, 0, 0, 0))\nsocket.socket()"
    outcome = run(source)
    assert outcome.stdout == "-1\n"
    assert "PermissionError" in outcome.stderr


def test_two_programs_can_be_joined_by_descriptors() -> None:
    reader, writer = os.pipe()
    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(run, "print('from the first')", stdout=writer)
        second = run("print(input().upper())", stdin=reader)
    assert second.stdout == "FROM THE FIRST\n"
    assert first.result().stdout == ""


@pytest.mark.rotating(4)
def test_threads_run_programs_at_once_and_leave_no_descriptor() -> None:
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda n: run("print(input())", stdin=str(n)), range(8)))
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(8)]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() < 50


def test_a_machine_that_cannot_run_programs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "build_command", lambda *_: ["sh", "-c", "echo no space >&2; exit 7"])
    with pytest.raises(RewardError, match="bubblewrap did not start: no space"):
        run("print(1)", kind="bubblewrap")
    monkeypatch.setattr(isolation, "build_command", lambda *_: None)
    with pytest.raises(RewardError, match="not installed; install the package `bubblewrap`"):
        run("print(1)", kind="bubblewrap")


@pytest.mark.usefixtures("fresh")
def test_missing_isolation_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    build = isolation.build_command
    monkeypatch.setattr(
        isolation, "build_command", lambda kind, *rest: None if kind == "bubblewrap" else build(kind, *rest)
    )
    if not works("namespaces"):
        pytest.skip("namespaces do not work on this machine")
    with caplog.at_level(logging.WARNING):
        assert best_isolation() == "namespaces"
    assert "bubblewrap is missing" in caplog.text
    assert "install the package `bubblewrap`" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_no_isolation_at_all_is_an_error_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "build_command", lambda kind, *_: ["sh", "-c", f"echo {kind} is broken >&2"])
    with pytest.raises(RewardError, match="no program can be run safely") as caught:
        best_isolation()
    assert all(f"{kind} is broken" in str(caught.value) for kind in isolation.KINDS)


def interpret(rules: bytes, arch: int, number: int, first: int = 0, second: int = 0) -> int:
    """What a seccomp program of the few instructions that ours has returns."""
    data = {0: number, 4: arch, 16: first, 24: second}
    steps, at, held = list(struct.iter_unpack("HBBI", rules)), 0, 0
    while True:
        code, yes, no, value = steps[at]
        if code == 0x06:
            return value
        if code == 0x20:
            held = data[value]
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += yes if holds else no
        at += 1


@pytest.mark.parametrize(
    ("machine", "arch", "clone", "socket", "kill", "read"),
    [("x86_64", 0xC000003E, 56, 41, 62, 0), ("aarch64", 0xC00000B7, 220, 198, 129, 63)],
)
def test_the_seccomp_filter_forbids_the_listed_calls(
    machine: str, arch: int, clone: int, socket: int, kill: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
    allow, refused, unknown = 0x7FFF0000, 0x50001, 0x50026
    rules = seccomp.build_seccomp_filter(shares_user=False)
    assert interpret(rules, arch, read) == interpret(rules, arch, kill) == allow
    assert interpret(rules, arch, socket) == refused
    assert interpret(rules, arch, clone, first=17) == allow
    assert interpret(rules, arch, clone, first=0x10000000 | 17) == refused
    assert interpret(rules, arch, 435) == unknown
    assert interpret(rules, arch, 1 << 30) == refused
    assert interpret(rules, arch ^ 1, read) == 0x80000000
    shared = seccomp.build_seccomp_filter(shares_user=True)
    assert interpret(shared, arch, read) == allow
    assert interpret(shared, arch, kill) == refused
    fcntl, prlimit = (72, 302) if machine == "x86_64" else (25, 261)
    assert [interpret(shared, arch, fcntl, second=command) for command in (2, 8, 10)] == [allow, refused, refused]
    assert [interpret(shared, arch, prlimit, first=pid) for pid in (0, 1)] == [allow, refused]


def test_an_unknown_processor_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    assert seccomp.build_seccomp_filter(shares_user=False) == b""


def test_root_gives_each_run_its_own_user() -> None:
    users = {isolation.choose_user() for _ in range(8)}
    assert users == {None} if os.geteuid() else len(users) == 8 and 0 not in users


def test_the_records_are_what_the_scorer_relies_on() -> None:
    assert sandbox.ProgramResult("ok", 0, "", "", 0.1) == sandbox.ProgramResult("ok", 0, "", "", 0.1)
    with pytest.raises(AttributeError):
        Limits().seconds = 3.0  # type: ignore[misc]
