"""Hostile programs in the sandbox: none does harm, outlives its deadline by more than 1 s or leaves a process.

python tests/acceptance/sandbox.py [--short] [--kind bubblewrap|namespaces]

Then the speed: small good programs with 2 workers, compared with a bare `subprocess.run`.
"""

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _common import finish
from _hostile_programs import PROGRAMS

from verl.rewards.sandbox import isolation, sandbox
from verl.rewards.sandbox.sandbox import Limits

LATEST_SECONDS = 1.0
GOOD = "numbers = sorted(map(int, input().split()))\nprint(sum(numbers), numbers[len(numbers) // 2])\n"
GOOD_INPUT = " ".join(str(n * 7919 % 1000) for n in range(200))
TOKEN = f"canary-{random.SystemRandom().getrandbits(64):x}"


class Grounds:
    """What a program might harm: a folder and a file open to all, a port and a socket that listen, this process."""

    def __init__(self, folder):
        self.folder = folder / "open"
        self.folder.mkdir()
        self.secret = folder / "canary.txt"
        self.secret.write_text(TOKEN)
        for path, mode in ((folder, 0o755), (self.folder, 0o777), (self.secret, 0o644)):
            path.chmod(mode)
        self.at_home = Path.home() / f".{TOKEN}"
        with contextlib.suppress(OSError):
            self.at_home.touch()
        self.visitors = 0
        self.port = socket.create_server(("127.0.0.1", 0))
        self.file = socket.socket(socket.AF_UNIX)
        self.file.bind(str(self.folder / "socket"))
        self.file.listen()
        (self.folder / "socket").chmod(0o777)
        for server in (self.port, self.file):
            threading.Thread(target=self._count, args=(server,), daemon=True).start()

    def _count(self, server):
        while True:
            server.accept()[0].close()
            self.visitors += 1

    def argv(self):
        return [str(self.folder), str(self.secret), str(os.getpid()), str(self.port.getsockname()[1])]

    def damage(self):
        problems = [f"wrote {path.name}" for path in self.folder.iterdir() if path.name != "socket"]
        problems += ["came through a socket"] * bool(self.visitors)
        if "TracerPid:\t0\n" not in Path("/proc/self/status").read_text():
            problems.append("traces its grader")
        if self.secret.read_text() != TOKEN:
            problems.append("changed a file")
        return problems


def left_behind(user):
    """Processes of the sandbox's user (as root), or with its environment (otherwise): there must be none."""
    problems = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not path.name.isdigit() or int(path.name) == os.getpid():
                continue
            if path.stat().st_uid == user if user else f"SHOW={TOKEN}".encode() in (path / "environ").read_bytes():
                problems.append(int(path.name))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        problems.append("a child that nobody waited for")
    return problems


def attack(name, grounds, limits, latest, kind, user):
    """(what went wrong, the outcome in a word, seconds over the deadline)"""
    begun = time.monotonic()
    try:
        outcome = sandbox.run(PROGRAMS[name], argv=grounds.argv(), limits=limits, kind=kind)
    except Exception as error:  # noqa: BLE001 - reported
        return [f"raised {type(error).__name__}: {error}"], "raised", time.monotonic() - begun
    wrong = [line for line in outcome.stdout.splitlines() if line.startswith("HARM")][:3]
    wrong += ["printed the secret"] * (TOKEN in outcome.stdout + outcome.stderr)
    over = outcome.seconds - limits.seconds
    wrong += [f"outlived its deadline by {over:.2f} s"] * (over > latest)
    wrong += ["printed more than its limit"] * (max(map(len, (outcome.stdout, outcome.stderr))) > limits.output_bytes)
    wrong += [f"left {pid}" for pid in left_behind(user)] + grounds.damage()
    return wrong, outcome.status, over


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="shorter deadlines and fewer good programs")
    parser.add_argument(
        "--kind", choices=["bubblewrap", "namespaces"], help="the isolation (default: the best that works)"
    )
    arguments = parser.parse_args()
    kind = arguments.kind or sandbox.best_isolation()
    os.environ["CANARY_SECRET"] = TOKEN
    isolation.ENVIRONMENT["SHOW"] = TOKEN.removeprefix("canary-") if (user := isolation.choose_user()) else TOKEN
    if user:
        isolation.choose_user = lambda: user  # one for all, so that leftovers can be recognized
    limits = Limits(
        seconds=0.7 if arguments.short else 2.0,
        memory_bytes=256 << 20,
        processes=16,
        file_bytes=8 << 20,
        disk_bytes=16 << 20,
        output_bytes=256 << 10,
    )
    allowed = 10.0 if arguments.short else LATEST_SECONDS  # CI runs on machines that others use too
    failed, latest, begun = {}, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        grounds = Grounds(Path(name))
        for program in PROGRAMS:
            wrong, status, over = attack(program, grounds, limits, allowed, kind, user)
            latest = max(latest, over)
            print(f"{program:45} {status:10} {'; '.join(wrong) or 'no harm'}", flush=True)
            if wrong:
                failed[program] = wrong
        time.sleep(0.6)  # for the daemon that comes back later
        if late := grounds.damage() + left_behind(user):
            failed["later"] = late
        grounds.at_home.unlink(missing_ok=True)
    seconds = time.monotonic() - begun
    count = 40 if arguments.short else 400
    in_sandbox(0)
    rates = {"sandboxed_per_s": speed(in_sandbox, count), "bare_per_s": speed(bare, count)}
    finish(
        "sandbox",
        not failed and len(PROGRAMS) >= 40,
        isolation=kind,
        programs=len(PROGRAMS),
        harmed=failed,
        latest_over_deadline_s=round(latest, 2),
        seconds=round(seconds, 1),
        **{name: round(rate, 1) for name, rate in rates.items()},
    )


if __name__ == "__main__":
    main()
