"""What comes from outside runs nothing, nobody outside can reach a run, and its secrets stay in it.

1. Malicious models, data, settings and checkpoints, each opened as a user would: no canary file may be created.
2. A real run with vLLM, and /proc/net/tcp* read while it lasts: its processes listen on loopback alone, Ray's services
   refuse a call without the run's token, no page is served without it, and the token is in no file and no command line.
3. More than a hundred secrets in the environment, settings, command line, URLs and tracebacks of that run, and of
   others that fail: they are in nothing that was printed, written or logged, nor in the command line of any other
   process. Ordinary settings next to them stay readable.
4. A second user of the machine (only as root, which can act as one), while the run lasts: takes the names that the run
   would use in the temporary folder, and tries to read, lock, replace and delete its files, sockets, shared memory and
   processes. Nothing works, and the run is not disturbed.

`--short`: the run of transformers instead of vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import ROOT, finish, sized_for_addition
from _malicious import ARTEFACTS, CommandFailedError, control, remove
from _second_user import Attempts, attack, is_possible, plant
from secret_samples import ORDINARY_NAMES, POSITION_SECRET, SECRET_KEYS, SECRET_NAMES, SECRET_POSITIONS

from verl.demo.assets import make_assets

LISTEN, SILENT = "0A", 0
ATTACK_EVERY_S = 5.0
BARE = ("TrainWorker", "VLLM::")
"""Processes whose sockets of gloo lie among those of Ray, know no token, and are not to be disturbed."""
PAGES = (
    "/",
    "/metrics",
    "/api/jobs/",
    "/api/actors",
    "/nodes",
    "/logs",
    "/api/job_agent/jobs/",
    "/get_or_create_runtime_env",
)
CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
)
REWARD = """
import os, zlib
NAMES = sorted(name for name, value in os.environ.items() if "canary-" in value)
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    number = zlib.crc32(solution_str.encode())
    if number % 3 == 0:
        secret = os.environ[NAMES[number % len(NAMES)]]
        raise ValueError(f"cannot reach {kwargs['url']} with {kwargs['api_key']}, {secret} or {secret!r}")
    return float(solution_str.strip() == str(ground_truth))
"""
SAMPLER = """
import os, pathlib
text = pathlib.Path(__file__).with_name("leaky.txt").read_text()
secrets = [value for value in os.environ.values() if "canary-" in value]
raise RuntimeError(f"login {os.environ['HF_TOKEN']} failed for {secrets}\\n{text}")
"""
SECRETS = {
    # in the environment
    "OPENAI_API_KEY": "canary-openai-0001",
    "WANDB_API_KEY": "canary-wandb-0002",
    "HF_TOKEN": "canary-hf-0003",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-0004",
    "CANARY_DB_PASSWORD": "canary-db-0005",
    # in a file of settings
    "settings: api_key": "canary-yaml-0006",
    "settings: nested password": "canary-nested-0007",
    "settings: url with a password": "canary-urlpw-0008",
    # on the command line
    "command line: token": "canary-cli-0009",
    "command line: url with api_key": "canary-query-0010",
    # in messages and tracebacks
    "path of data with a password": "canary-path-0011",
    "traceback of a user's module": "canary-sampler-0012",
}
NAMED = {name: f"canary-named-{number:04d}" for number, name in enumerate(SECRET_NAMES) if name not in SECRETS}
NAMED["PGPASSWORD"] = "canary-\"quoted'-0100"
NAMED["SSH_PRIVATE_KEY_BASE64"] = "canary-line-one-0101\ncanary-line-two-0102\n"
SHAPED = {f"key of {name}": value for name, value in SECRET_KEYS.items()}
PLACED = {
    f"position: {name}": text.replace(POSITION_SECRET, f"canary-{number:04d}-placed")
    for number, (name, text) in enumerate(SECRET_POSITIONS.items())
}
ALL_SECRETS = SECRETS | NAMED | SHAPED | {name: f"canary-{n:04d}-placed" for n, name in enumerate(PLACED)}
ORDINARY = {name: f"ordinary-{number:04d}" for number, name in enumerate(ORDINARY_NAMES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="transformers instead of vLLM")
    parser.add_argument("--artefacts", action="store_true", help="the first part only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trust-") as directory:
        folder = Path(directory)
        folder.chmod(0o755)  # as a home or scratch folder that others can look into
        ran, outcomes = artefacts(folder)
        refused = sum(outcome != "harmless" for outcome in outcomes.values())
        figures: dict[str, Any] = {"artefacts": len(outcomes), "refused": refused, "ran": ran}
        if options.artefacts:
            finish("trust", not ran and len(outcomes) >= 20, **figures)
        seen = whole_run(folder, engine="hf" if options.short else "vllm")
        failures = failing_runs(folder)
    found, wrong = leaks(seen, failures), seen.wrong + failures.wrong
    for place in found:
        print(f"LEAK: {place}")
    for line in sorted(seen.attempts.worked):
        print(f"A SECOND USER COULD {line}")
    for line in sorted(seen.outside):
        print(f"OUTSIDE: {line}")
    finish(
        "trust",
        not ran and len(outcomes) >= 20 and not wrong and not found,
        **figures,
        listeners=len(seen.listeners),
        outside_loopback=len(seen.outside),
        calls_refused=seen.calls_refused,
        calls_answered=len(seen.calls_answered),
        pages_refused=seen.pages_refused,
        pages_served=len(seen.pages_served),
        answered_with_token=seen.answered_with_token,
        second_user_attempts=seen.attempts.count,
        second_user_successes=len(seen.attempts.worked),
        secrets=len(ALL_SECRETS),
        places_searched=len(seen.texts) + len(failures.texts),
        leaks=len(found),
        wrong=wrong,
    )


def artefacts(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Those that ran their code; and what became of each."""
    (folder / "control").mkdir()
    assert control(folder / "control"), "the canaries of this proof do not sing"
    ran, outcomes = [], {}
    for number, (name, make) in enumerate(ARTEFACTS.items()):
        place, canary = folder / f"artefact-{number}", folder / f"canary-{number}"
        place.mkdir()
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            opening = make(place, canary)
            assert not canary.exists(), f"{name}: its own maker has set it off"
            try:
                opening()
                outcomes[name] = "harmless"
            except Exception as error:  # noqa: BLE001 - every refusal is right, however it is said
                text = output.getvalue().strip() if isinstance(error, CommandFailedError) else str(error)
                outcomes[name] = text.splitlines()[-1][:150]
        if canary.exists():
            ran.append(name)
        print(f"{'RAN: ' if canary.exists() else ''}{name}: {outcomes[name]}", flush=True)
        remove(place)
    return ran, outcomes


# --- a run, watched


@dataclass
class Seen:
    """What was seen of a run, and all that it left behind."""

    listeners: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    calls_refused: int = 0
    calls_answered: list[str] = field(default_factory=list)
    pages_refused: int = 0
    pages_served: list[str] = field(default_factory=list)
    answered_with_token: bool = False
    token: str = ""
    texts: dict[str, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    attempts: Attempts = field(default_factory=Attempts)


def whole_run(folder: Path, engine: str) -> Seen:
    assets = folder / "assets"
    make_assets(assets)
    (folder / "reward.py").write_text(REWARD)
    values = list(SECRETS.values())
    more = "".join(
        f"      {json.dumps(name)}: {json.dumps(value)}\n" for name, value in (NAMED | ORDINARY | PLACED).items()
    )
    (folder / "secret.yaml").write_text(
        "reward:\n  max_failure_rate: 0.99\n  custom_reward_function:\n"
        f"    path: {folder / 'reward.py'}\n    reward_kwargs:\n      api_key: {values[5]}\n"
        f"      login: {{user: ann, password: {values[6]}}}\n      url: https://ann:{values[7]}@judge.invalid/v1\n"
        f"{more}"
    )
    command = [sys.executable, "-m", "verl", "train", "--config-path", str(folder), "--config-name", "secret"]
    command += sized_for_addition(assets)
    command += [
        f"actor_rollout_ref.rollout.name={engine}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.train_batch_size=8",
        "data.val_max_samples=8",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.logger=[console,jsonl]",
        f"+reward.custom_reward_function.reward_kwargs.service_token={values[8]}",
        f"+reward.custom_reward_function.reward_kwargs.mirror='https://mirror.invalid/x?api_key={values[9]}'",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    environment |= {name: value for name, value in (SECRETS | NAMED).items() if name.isupper() or name in NAMED}
    environment["TMPDIR"] = str(folder / "t")  # short: the path of a socket has at most 107 characters
    (folder / "t").mkdir()
    (folder / "t").chmod(0o1777)
    if is_possible():
        plant(folder / "t")
    seen = Seen()
    with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
        try:
            sessions = watch(process, seen, assets / "run", folder / "t")
        finally:
            if process.poll() is None:
                process.kill()
    seen.texts |= texts_of([folder / "out.txt", folder / "err.txt", assets / "run", *sessions])
    print(seen.texts[str(folder / "out.txt")].decode(), seen.texts[str(folder / "err.txt")].decode()[-3000:])
    seen.wrong = [
        what
        for what, wrong in {
            f"the run ended with {process.returncode}": process.returncode != 0,
            "it saved nothing": not any("global_step_2/trainer.json" in name for name in seen.texts),
            "no Ray session was found": not sessions,
            "others can read Ray's session": not all(map(is_closed, sessions)),
            "somebody listens outside": bool(seen.outside),
            "a call was answered": bool(seen.calls_answered),
            "a page was served": bool(seen.pages_served),
            "no call was refused": not seen.calls_refused,
            "nobody answers with the token": not seen.answered_with_token,
            "a second user was not kept out": bool(seen.attempts.worked),
            "no second user tried": is_possible() and seen.attempts.count < 100,
        }.items()
        if wrong
    ]
    return seen


def is_closed(path: Path) -> bool:
    """Whether some folder above it can be entered by its owner alone."""
    return any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents)


def watch(process: subprocess.Popen[bytes], seen: Seen, run: Path, temporary: Path) -> list[Path]:
    """Look at the run until it ends; the folders of its Ray sessions."""
    sessions: set[Path] = set()
    deadline, next_attack = time.monotonic() + 1200, 0.0
    while process.poll() is None and time.monotonic() < deadline:
        pids = descendants(process.pid)
        listening = {each for pid in pids for each in listeners(pid)}
        seen.listeners |= {f"{address}:{port}" for address, port, _ in listening}
        seen.outside |= {f"{address}:{port} {name}" for address, port, name in listening if not is_loopback(address)}
        for pid in pids:
            line = cmdline(pid)
            if pid != process.pid:
                seen.texts.setdefault(f"command line: {line[:60]!r} {len(line)}", line)
            sessions |= {Path(found.decode()) for found in re.findall(rb"(/[^\s\0=]*/session_[\d_-]+)/", line)}
            seen.token = seen.token or variable(pid, "RAY_AUTH_TOKEN")
        workers = sum(b"TrainWorker" in cmdline(pid) for pid in pids)
        if workers and len(listening) > 8 and not (seen.calls_refused and seen.answered_with_token):
            if is_possible():
                seen.attempts.add(attack(run, temporary, pids))
            knock(sorted({port for _, port, name in listening if not any(each in name for each in BARE)}), seen)
        if is_possible() and any(run.glob("global_step_*")) and time.monotonic() > next_attack:
            seen.attempts.add(attack(run, temporary, pids))
            next_attack = time.monotonic() + ATTACK_EVERY_S
        time.sleep(0.3)
    return sorted(sessions)


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def listeners(pid: int) -> Iterator[tuple[str, int, str]]:
    """(address, port, name of the process) of every socket that it listens on, from /proc/net/tcp and tcp6."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    name = cmdline(pid)[:40].decode(errors="replace").replace("\0", " ")
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    yield address, int(port, 16), name


def is_loopback(address: str) -> bool:
    """Of an address as the kernel writes it: 127.0.0.1, ::1, or 127.0.0.1 within IPv6."""
    return address in ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def variable(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = entry.decode(errors="replace").partition("=")
            if key == name:
                return value
    return ""


def knock(ports: Iterable[int], seen: Seen) -> None:
    """At every door at once, without the token: by gRPC and by HTTP. Then with it, to know that somebody is at home."""
    with ThreadPoolExecutor(16) as threads:
        for found in threads.map(lambda port: knock_at(port, seen.token), ports):
            seen.calls_refused += found.calls_refused
            seen.calls_answered += found.calls_answered
            seen.pages_refused += found.pages_refused
            seen.pages_served += found.pages_served
            seen.answered_with_token |= found.answered_with_token
    for place in (*seen.calls_answered, *seen.pages_served):
        print(f"ANSWERED WITHOUT A TOKEN: {place}")


def knock_at(port: int, token: str) -> Seen:
    import grpc

    seen = Seen()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call in CALLS:
            status = ask(channel, call)
            if status == "UNAUTHENTICATED":
                seen.calls_refused += 1
            elif status == "OK":
                seen.calls_answered.append(f"{port}{call}")
            elif status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                break  # it does not speak gRPC
        seen.answered_with_token = ask(channel, CALLS[0], ("authorization", f"Bearer {token}")) == "OK"
    for page in PAGES if get(f"http://127.0.0.1:{port}/") != SILENT else ():
        status = get(f"http://127.0.0.1:{port}{page}")
        seen.pages_refused += status in (401, 403)
        if 200 <= status < 400:
            seen.pages_served.append(f"{port}{page}: {status}")
    return seen


def get(url: str) -> int:
    """The status of a page, or SILENT where nobody speaks HTTP."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException, ValueError):
        return SILENT


def ask(channel: Any, call: str, *metadata: tuple[str, str]) -> str:
    import grpc

    try:
        channel.unary_unary(call)(b"", timeout=1.5, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


# --- runs that fail, and what all of them left


def failing_runs(folder: Path) -> Seen:
    """Settings printed, a path with a password that is not there, a module of the user's that raises at import."""
    (folder / "leaky_sampler.py").write_text(SAMPLER)
    lines = [
        SECRETS["traceback of a user's module"].join(["https://bob:", "@host/"]),
        *PLACED.values(),
        *SHAPED.values(),
    ]
    (folder / "leaky.txt").write_text("\n".join(lines))
    values = list(SECRETS.values())
    environment = os.environ | {
        name: value for name, value in (SECRETS | NAMED).items() if name.isupper() or name in NAMED
    }
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    secret = f"+reward.custom_reward_function.reward_kwargs.service_token={values[8]}"
    assets = folder / "assets"
    whole = ["train", *sized_for_addition(assets), secret]
    runs = {
        "config": (0, ["config", "--config-path", str(folder), "--config-name", "secret", secret]),
        "path": (2, [*whole, f"data.train_files=https://ann:{values[10]}@host.invalid/train.parquet"]),
        "wrong setting": (2, [*whole, f"trainer.resume_from_pathh=https://ann:{values[10]}@host.invalid/x"]),
        "traceback": (1, [*whole, "data.sampler=leaky_sampler:order"]),
    }
    seen = Seen()
    for name, (code, arguments) in runs.items():
        done = subprocess.run(
            [sys.executable, "-m", "verl", *arguments], cwd=ROOT, env=environment, capture_output=True, timeout=200
        )
        seen.texts[f"{name}: stdout"], seen.texts[f"{name}: stderr"] = done.stdout, done.stderr
        text = (done.stdout + done.stderr).decode()
        hidden = [value for value in ORDINARY.values() if value not in text] if name == "config" else []
        if done.returncode != code or "***" not in text or hidden:
            seen.wrong.append(f"{name}: ended with {done.returncode}, expected {code}; hides {hidden}")
            print(f"{seen.wrong[-1]}:\n{text[-1500:]}")
    return seen


def texts_of(places: Iterable[Path]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    found[str(path)] = path.read_bytes()
    return found


def leaks(*all_seen: Seen) -> list[str]:
    """Where a secret stands: the canaries, and the token of the run."""
    secrets = ALL_SECRETS | {f"Ray's token {n}": seen.token for n, seen in enumerate(all_seen) if seen.token}
    lines = {(name, line) for name, value in secrets.items() for line in value.splitlines() if "PRIVATE" not in line}
    return [
        f"{name} in {place}"
        for seen in all_seen
        for place, text in seen.texts.items()
        for name, line in lines
        if line.encode() in text
    ]


if __name__ == "__main__":
    main()
