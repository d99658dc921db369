"""Run an acceptance script as root and as an ordinary user, with each kind of isolation, and collect its JSON lines.

Root gives the script a mount namespace in which every user can read Python, its packages and this repository, and a
volume below /usr. Without root, there is only the user who runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _common import ROOT, finish

from verl.rewards.sandbox.isolation import KINDS

VOLUME = next((path for path in ("/usr/local/src", "/usr/src", "/usr/games") if Path(path).is_dir()), "")
_ORDINARY = 54_321  # and the next ones, so that what runs at the same time does not share a user
_SETUP = """
set -e
mount -t tmpfs -o mode=755 show /mnt
mkdir -m 755 /mnt/python /mnt/packages /mnt/verl
mount --bind "$1" /mnt/python; mount --bind "$2" /mnt/packages; mount --bind "$3" /mnt/verl
test -z "$4" || { mount -t tmpfs -o mode=755 show "$4"; mkdir -p "$1"; mount --bind /mnt/python "$1"; }
test -z "$5" || { mount -t tmpfs -o mode=777 show "$5"; echo safe > "$5/volume.txt"; chmod 666 "$5/volume.txt"; }
shift 5
exec "$@"
"""


def scenarios() -> list[tuple[str, str]]:
    """Return (user, kind): every kind as root, where this is root, and as an ordinary user."""
    if shutil.which("bwrap") is None:
        error = "bubblewrap is missing, and its isolation cannot be tested: run `apt-get install bubblewrap`"
        finish(Path(sys.argv[0]).stem, False, error=error)
    users = ("root", "ordinary") if os.geteuid() == 0 else ("ordinary",)
    return [(user, kind) for user in users for kind in KINDS]


def run_as_each(
    script: str, cases: list[tuple[str, str]], *arguments: str, at_once: int = 2
) -> Iterator[dict[str, Any]]:
    """Run the script for each case, with `--case USER KIND`; yield the figures of its last line, or what there was."""
    with ThreadPoolExecutor(at_once) as workers:
        yield from workers.map(lambda case: _run(script, case, arguments), cases)


def _run(script: str, case: tuple[str, str], arguments: tuple[str, ...]) -> dict[str, Any]:
    index = [*arguments, "--case", *case]
    uid = 0 if case[0] == "root" else _ORDINARY + KINDS.index(case[1])
    done = subprocess.run(_command(uid, script, index), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or ["no output"]
    for line in lines[:-1]:
        print(f"{case[0]:8} {case[1]:10} {line}", flush=True)
    try:
        return dict(json.loads(lines[-1]))
    except ValueError:
        print(lines[-1], flush=True)
        return {"user": case[0], "isolation": case[1], "pass": False, "error": lines[-1][-300:]}


def _command(uid: int, script: str, arguments: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    prefix, packages = sys.base_prefix, sysconfig.get_paths()["purelib"]
    private = next((str(path) for path in Path(prefix).parents if path.stat().st_mode & 0o5 != 0o5), "")
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "/mnt/verl:/mnt/verl/tests/acceptance:/mnt/verl/tests:/mnt/packages",
        "SHOW_VOLUME": VOLUME,
    }
    return [
        *("unshare", "--mount", "sh", "-c", _SETUP, "sh", prefix, packages, str(ROOT), private, VOLUME),
        *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *(["--bounding-set=-all"] if uid else [])),
        *(os.path.realpath(sys.executable), f"/mnt/verl/tests/acceptance/security/{script}", *arguments),
    ]
