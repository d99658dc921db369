"""The program inside the sandbox that runs a launch script and records what the script starts.

Sent as source to a Python that does not see verl, so it imports only the standard library. The script finds links to
harmless programs and stand-ins for all others on its PATH. A stand-in writes its arguments, separated by NUL, and its
environment to one file per call, and exits with 0. Commands that do not exist are recorded by bash's
`command_not_found_handle`. `sys.argv[1]` is the task as JSON; the result goes to stdout as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BASE = Path("/tmp/verl-migrate")
HARMLESS = (
    "[ awk basename bash bc cat cmp comm cut dirname echo egrep env expr false fgrep find fold gawk getopt grep "
    "gzip head join jq ls mawk md5sum mktemp nice nl nohup numfmt od paste printenv printf pwd readlink realpath "
    "rev sed seq setsid sha256sum shuf sort split stat stdbuf tac tail tar test timeout tr true tty uniq wc which "
    "xargs yes zcat"
)
RECORDED = (
    "accelerate chmod chown conda cp date deepspeed df docker free hostname id ln mkdir mpirun mv nproc numactl "
    "pip pip3 poetry python python3 ray rm rmdir sh sleep srun sudo tee torchrun touch truncate uname uv which whoami"
)
STAND_IN = r"""#!/usr/bin/bash -p
if [[ ${BASH_SOURCE[0]} != "$0" ]]; then  # a file that does not exist here is sourced
    builtin printf '%s\0' - source "${BASH_SOURCE[0]}" >"BASE/calls/$EPOCHREALTIME.$BASHPID"
    return 0
fi
name=${0##*/}
if [[ $name == unknown ]]; then
    name=$1
    shift
fi
case $name in
sleep) exit 0 ;;
sh) exec bash "$@" ;;
which) type -P "$@"; exit ;;
esac
output=-
[[ -p /dev/stdout ]] && output=used
call=BASE/calls/$EPOCHREALTIME.$BASHPID
printf '%s\0' "$output" "$name" "$@" >"$call"
command -p env -0 >"$call.env"
case $name in
python* | torchrun) exit 0 ;;
tee) exec cat ;;
whoami) echo "$USER" ;;
date | df | free | hostname | id | nproc | uname) command -p "$name" "$@" ;;
chmod | chown | cp | ln | mkdir | mv | rm | rmdir | touch | truncate) command -p "$name" "$@" 2>/dev/null ;;
*) # a launcher of another shell or script
    for ((i = 1; i <= $#; i++)); do
        word=${!i}
        case $word in
        bash | sh | */bash | */sh) exec bash "${@:i+1}" ;;
        *.sh | *.slurm | *.sbatch) [[ -f $word ]] && exec bash "${@:i}" ;;
        *" -m verl."*) exec bash -c "$word" ;;
        esac
    done
    ;;
esac
exit 0
""".replace("BASE", str(BASE))


def main() -> None:
    """Run the script of the task and write how the script ended and every recorded call."""
    task = json.loads(sys.argv[1])
    _write_programs()
    for path in (*task["folders"], *task["missing"]):
        with contextlib.suppress(OSError):  # bash complains about this path again
            _write_missing(Path(path), is_folder=path in task["folders"])
    exit_code = _run(task)
    calls = [_read_call(file) for file in sorted((BASE / "calls").iterdir()) if file.suffix != ".env"]
    output = {name: (BASE / name).read_bytes()[-(1 << 16) :].decode(errors="replace") for name in ("out", "err")}
    sys.stdout.write(json.dumps({"exit_code": exit_code, "calls": calls[: task["max_calls"]], **output}))


def _write_programs() -> None:
    (BASE / "calls").mkdir(parents=True)
    (BASE / "home").mkdir()
    programs = BASE / "bin"
    programs.mkdir()
    functions = [f'command_not_found_handle() {{ {programs}/unknown "$@"; }}']
    for name in (*RECORDED.split(), "unknown"):
        file = programs / name
        file.write_text(STAND_IN)
        file.chmod(0o755)
        found = shutil.which(name)  # functions come first, also if the script replaces PATH or uses absolute paths
        functions += [f'function {path} {{ {file} "$@"; }}' for path in (name, found) if path and name != "unknown"]
    for name in HARMLESS.split():
        found = shutil.which(name) or shutil.which({"awk": "mawk"}.get(name, name))  # awk may be a link to /etc
        if found:
            (programs / name).symlink_to(found)
    (BASE / "functions.sh").write_text("\n".join(functions) + "\n")


def _write_missing(path: Path, is_folder: bool) -> None:
    """Write a folder, or a stand-in for a file that the script sources, executes, or writes."""
    (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(STAND_IN)
        path.chmod(0o755)


def _run(task: dict[str, Any]) -> int | None:
    """Run the script; return its exit code, or None if it or a program that it left running exceeds the timeout."""
    environment = {"BASH_ENV": f"{BASE}/functions.sh", "PATH": f"{BASE}/bin", **task["environment"]}
    ended, held = os.pipe()  # closed when the last process of the script has ended
    timeout_at = time.monotonic() + task["timeout_s"]
    os.makedirs(task["cwd"], exist_ok=True)
    with open(BASE / "out", "wb") as out, open(BASE / "err", "wb") as err:
        process = subprocess.Popen(
            [shutil.which("bash") or "bash", task["script"], *task["arguments"]],
            cwd=task["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[held],
        )
    os.close(held)
    is_over = bool(select.select([ended], [], [], max(0.0, timeout_at - time.monotonic()))[0])
    return process.wait() if is_over else None


def _read_call(file: Path) -> dict[str, Any]:
    output, *words = file.read_bytes().decode(errors="replace").split("\0")[:-1]
    saved = Path(f"{file}.env")
    lines = saved.read_bytes().decode(errors="replace").split("\0")[:-1] if saved.exists() else []
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    return {"is_output_used": output == "used", "words": words, "environment": environment}


if __name__ == "__main__":
    main()
