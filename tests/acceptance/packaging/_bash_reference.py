"""The arguments of a launch script as bash itself gives them to a recording python, in the sandbox.

Independent of `verl.migration`: the programs of the system are on PATH behind a folder with the recorder and with
launchers that execute what follows their options.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from verl.rewards.sandbox.sandbox import Limits, run

ROOT, HOME, USER = "/tmp/reference", "/tmp/my-home", "my-user"
NO_OPS = ("pip", "wandb", "huggingface-cli", "git", "module", "nvidia-smi", "sleep")
RECORDER = """#!/bin/bash
printf '%s\\0' "$@" > "/tmp/calls/$(date +%s%N)"
"""
LAUNCHER = """#!/bin/bash
[[ $1 == pip || $1 == start || $1 == stop || $1 == status ]] && exit 0
while [[ $# -gt 0 && $1 != python* && $1 != bash ]]; do shift; done
exec "$@"
"""
PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path

task = json.loads(sys.argv[1])
os.makedirs("/tmp/calls"), os.makedirs("/tmp/my-home"), os.makedirs(task["cwd"], exist_ok=True)
for path in task["folders"]:
    os.makedirs(path, exist_ok=True)
for path, content in task["programs"].items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)
    os.chmod(path, 0o755)
environment = {"PATH": "/tmp/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb", **task["environment"]}
done = subprocess.run(
    ["bash", task["script"], *task["arguments"]], cwd=task["cwd"], env=environment, capture_output=True, timeout=60
)
calls = [file.read_bytes().decode().split("\\0")[:-1] for file in sorted(Path("/tmp/calls").iterdir())]
print(json.dumps([calls, done.returncode, done.stderr.decode()]))
"""


class Header(NamedTuple):
    """What a script needs, from the comments at its start.

    `# given: NAME=VALUE`, `# arguments: ...`, and `# open: NAME` for variables that are left to the shell.
    """

    given: dict[str, str]
    arguments: list[str]
    open_names: list[str]
    is_part: bool


def read_header(text: str) -> Header:
    def find(name: str) -> list[str]:
        return [word for line in re.findall(rf"(?m)^# {name}: (.*)$", text) for word in shlex.split(line)]

    given = dict(word.split("=", 1) for word in find("given"))
    return Header(given, find("arguments"), find("open"), "# part of" in text)


def record(file: Path, header: Header) -> list[list[str]]:
    """Return the arguments of every run that the script starts, after the name of its module."""
    recorders = ("/tmp/bin/python", "/tmp/bin/python3", "/tmp/bin/torchrun", "/opt/conda/bin/python")
    programs = {
        **dict.fromkeys(recorders, RECORDER),
        **dict.fromkeys((f"/tmp/bin/{name}" for name in ("ray", "srun", "uv", "conda")), LAUNCHER),
        "/tmp/bin/accelerate": RECORDER,
        **dict.fromkeys((f"/tmp/bin/{name}" for name in NO_OPS), "#!/bin/sh\n"),
        "/tmp/bin/which": '#!/bin/bash\ntype -P "$@"\n',  # these two are links to /etc, which the sandbox hides
        "/tmp/bin/awk": '#!/bin/sh\nexec mawk "$@"\n',
        "/opt/venv/bin/activate": "",
    }
    task = {
        "script": f"{ROOT}{file}",
        "cwd": f"{ROOT}{Path.cwd()}",
        "arguments": header.arguments,
        "environment": {
            "HOME": HOME,
            "USER": USER,
            **header.given,
            **{name: f"${{{name}}}" for name in header.open_names},
        },
        "programs": programs,
        "folders": ["/workspace/verl", "/data/logs"],
    }
    shell_files = {f"reference{path}": path.read_bytes() for path in file.parent.glob("*.sh")}
    result = run(
        PROGRAM,
        argv=[json.dumps(task)],
        files=shell_files,
        folders=["/opt", "/workspace", "/data"],
        limits=Limits(seconds=90, processes=128),
    )
    assert result.status == "ok", result
    calls, code, errors = json.loads(result.stdout)
    assert code == 0, f"{file.name}: bash ended with {code}: {errors[-500:]}"
    return [after_module(words) for words in calls if find_module(words) is not None]


def find_module(words: list[str]) -> int | None:
    return next((index for index, word in enumerate(words) if re.search(r"\bverl[./]trainer[./]", word)), None)


def after_module(words: list[str]) -> list[str]:
    start = find_module(words)
    assert start is not None
    return [word.replace(HOME, "${HOME}").replace(USER, "${USER}").replace(ROOT, "") for word in words[start + 1 :]]
