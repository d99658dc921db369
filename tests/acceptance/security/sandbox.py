"""Hostile programs in the sandbox: none does harm, outlives its deadline by more than 1 s or leaves a process.

make show-sandbox [ARGS=--short]

Every program runs with every kind of isolation, as root and as an ordinary user. None may turn its 0 into a failure of
the machine. What `limits` does not promise is printed. `--short`: each program with one isolation, and those of the
classes that once did harm with all. Then the speed: small good programs with 2 workers, and a bare `subprocess.run`.
"""

import argparse
import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _common import finish
from _hostile_programs import ESSENTIAL, PROGRAMS
from _users import run_as_each, scenarios

from verl.rewards.sandbox import isolation, sandbox
from verl.rewards.sandbox.sandbox import Limits

LATEST_SECONDS = 1.0
GOOD = "numbers = sorted(map(int, input().split()))\nprint(sum(numbers), numbers[len(numbers) // 2])\n"
GOOD_INPUT = " ".join(str(n * 7919 % 1000) for n in range(200))
MARK = f"{random.SystemRandom().getrandbits(64):x}"
TOKEN = f"canary-{MARK}"
PLACES = ("/dev/shm", "/tmp", "/var/tmp", "/run/lock", "/run/user", "/dev/mqueue", "/var/crash")


class Grounds:
    """What a program might harm: files of all and of this user, a port and a socket that listen, this process."""

    def __init__(self, folder, user):
        self.user = user
        self.folder = folder / "open"
        self.folder.mkdir()
        self.secret = folder / "canary.txt"
        self.home = folder / "home"
        self.home.mkdir()
        self.volume = os.environ.get("SHOW_VOLUME", "")
        self.files = {self.secret: TOKEN, self.home / ".bashrc": "safe", self.home / "thesis.txt": "safe"}
        for path, text in self.files.items():
            path.write_text(text)
        for path, mode in ((folder, 0o755), (self.folder, 0o777), *((path, 0o644) for path in self.files)):
            path.chmod(mode)
        self.visitors = 0
        self.port = socket.create_server(("127.0.0.1", 0))
        self.file = socket.socket(socket.AF_UNIX)
        self.file.bind(str(self.folder / "socket"))
        self.file.listen()
        (self.folder / "socket").chmod(0o777)
        for server in (self.port, self.file):
            threading.Thread(target=self._count, args=(server,), daemon=True).start()
        self.before = self._look()

    def _count(self, server):
        while True:
            server.accept()[0].close()
            self.visitors += 1

    def argv(self):
        home = str(self.home)
        return [
            str(self.folder),
            str(self.secret),
            str(os.getpid()),
            str(self.port.getsockname()[1]),
            home,
            self.volume,
        ]

    def _look(self):
        """What must stay as it is: {what: how}."""
        state = {f"limit {name}": resource.getrlimit(name) for name in range(16)}
        state["cores"] = os.sched_getaffinity(0)
        for path in self.files:
            status = path.stat() if path.exists() else None
            state[path.name] = status and (path.read_text(), status.st_mode, status.st_mtime, status.st_nlink)
        state["folder"] = sorted(path.name for path in self.folder.iterdir())
        state["home"] = sorted(path.name for path in self.home.iterdir())
        state["volume"] = [path.read_text() for path in Path(self.volume).iterdir()] if self.volume else []
        for name in ("msg", "sem", "shm"):
            lines = Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]
            state[f"System V {name}"] = sum(str(self.user) in line.split() for line in lines)
        state["left"] = sorted(path for place in PLACES for path in self._of_user(place))
        return state

    def _of_user(self, place):
        """What programs left in a place for all: as root of their user, else of the user who grades."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == self.user:
                        yield entry.path

    def damage(self):
        now = self._look()
        problems = [f"{name}: {before} -> {now[name]}" for name, before in self.before.items() if now[name] != before]
        self.before = now
        problems += ["came through a socket"] * bool(self.visitors)
        if "TracerPid:\t0\n" not in Path("/proc/self/status").read_text():
            problems.append("traces its grader")
        return problems


def left_behind(user):
    """Processes of the sandbox's user (as root), or with its environment (otherwise): there must be none."""
    problems = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not path.name.isdigit() or int(path.name) == os.getpid():
                continue
            if path.stat().st_uid == user if user else f"SHOW={MARK}".encode() in (path / "environ").read_bytes():
                problems.append((path / "stat").read_text()[:60])
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        problems.append("a child that nobody waited for")
    return problems


def attack(name, grounds, limits, latest, kind, user):
    """(what went wrong, the outcome in a word, seconds over the deadline)"""
    begun = time.monotonic()
    try:
        outcome = sandbox.run(PROGRAMS[name], argv=grounds.argv(), limits=limits, kind=kind)
    except Exception as error:  # noqa: BLE001 - reported: it would spare the program its 0
        return [f"raised {type(error).__name__}: {error}"], "raised", time.monotonic() - begun
    wrong = [line for line in outcome.stdout.splitlines() if line.startswith("HARM")][:3]
    wrong += ["printed the secret"] * (TOKEN in outcome.stdout + outcome.stderr)
    over = outcome.seconds - limits.seconds
    wrong += [f"outlived its deadline by {over:.2f} s"] * (over > latest)
    wrong += ["printed more than its limit"] * (max(map(len, (outcome.stdout, outcome.stderr))) > limits.output_bytes)
    wrong += [f"left {pid}" for pid in left_behind(user)] + grounds.damage()
    return wrong, outcome.status, over


def run_case(kind, programs, *, short):
    """Attack with one kind of isolation, as the user who runs this: the figures."""
    os.environ["CANARY_SECRET"] = TOKEN
    isolation.ENVIRONMENT["SHOW"] = MARK
    if user := isolation.choose_user():
        isolation.choose_user = lambda: user  # one for all, so that leftovers can be recognized
    limits = Limits(
        seconds=0.7 if short else 2.0,
        memory_bytes=256 << 20,
        processes=16,
        file_bytes=8 << 20,
        disk_bytes=16 << 20,
        output_bytes=256 << 10,
    )
    allowed = 10.0 if short else LATEST_SECONDS  # CI runs on machines that others use too
    failed, latest, begun = {}, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        grounds = Grounds(Path(name), user or os.geteuid())
        for program in programs:
            wrong, status, over = attack(program, grounds, limits, allowed, kind, user)
            latest = max(latest, over)
            print(f"{program:45} {status:10} {'; '.join(wrong) or 'no harm'}", flush=True)
            if wrong:
                failed[program] = wrong
        time.sleep(0.6)  # for the daemon that comes back later
        if late := grounds.damage() + left_behind(user):
            failed["later"] = late
    gaps = isolation.list_gaps() if kind == "limits" else []
    for gap in gaps:
        print(f"not promised by {kind}: programs {gap}", flush=True)
    figures = {"programs": len(programs), "harmed": failed, "latest_over_deadline_s": round(latest, 2)}
    return figures | {"not_promised": gaps, "seconds": round(time.monotonic() - begun, 1)}


def speed(work, count):
    """Programs per second with 2 workers."""
    with ThreadPoolExecutor(2) as workers:
        begun = time.monotonic()
        list(workers.map(work, range(count)))
        return count / (time.monotonic() - begun)


def in_sandbox(_):
    outcome = sandbox.run(GOOD, stdin=GOOD_INPUT)
    assert (outcome.status, outcome.stdout) == ("ok", expected), outcome


def bare(_):
    done = subprocess.run([sys.executable, "-c", GOOD], input=GOOD_INPUT, capture_output=True, text=True, check=True)
    assert done.stdout == expected


numbers = sorted(map(int, GOOD_INPUT.split()))
expected = f"{sum(numbers)} {numbers[100]}\n"


def choose(case, cases):
    """The programs of a case in the short form."""
    others = [name for name in PROGRAMS if name not in ESSENTIAL]
    return [*ESSENTIAL, *others[cases.index(case) :: len(cases)]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="each program with one isolation, and shorter deadlines")
    parser.add_argument("--case", nargs=2, metavar=("USER", "KIND"), help="only this one; the user is the current one")
    parser.add_argument("--cases", nargs="*", default=[], help="all that run, as USER-KIND")
    arguments = parser.parse_args()
    if arguments.case:
        user, kind = arguments.case
        cases = [tuple(case.split("-")) for case in arguments.cases] or [(user, kind)]
        programs = choose((user, kind), cases) if arguments.short else list(PROGRAMS)
        figures = run_case(kind, programs, short=arguments.short)
        finish("sandbox case", not figures["harmed"], user=user, isolation=kind, **figures)
    begun = time.monotonic()
    cases = scenarios()
    short = ["--short"] if arguments.short else []
    results = list(run_as_each("sandbox.py", cases, *short, "--cases", *(f"{user}-{kind}" for user, kind in cases)))
    harmed = {f"{one['user']} {one['isolation']}": one.get("harmed", one) for one in results if not one["pass"]}
    in_sandbox(0)
    count = 40 if arguments.short else 400
    rates = {"sandboxed_per_s": speed(in_sandbox, count), "bare_per_s": speed(bare, count)}
    finish(
        "sandbox",
        not harmed and len(PROGRAMS) >= 100,
        programs=len(PROGRAMS),
        attacks=sum(one.get("programs", 0) for one in results),
        isolation={f"{one['user']} {one['isolation']}": one["pass"] for one in results},
        harmed=harmed,
        latest_over_deadline_s=max(one.get("latest_over_deadline_s", 0) for one in results),
        not_promised={one["user"]: one["not_promised"] for one in results if one.get("not_promised")},
        seconds=round(time.monotonic() - begun, 1),
        load_per_core=round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        **{name: round(rate, 1) for name, rate in rates.items()},
    )


if __name__ == "__main__":
    main()
