"""Runs a launch script in the sandbox and returns the arguments of every program that it starts.

The script sees no network, an empty home, system programs read-only, and stand-ins for everything that would do work
(`recorder`). Its working directory is a copy of the shell files of its own folder. Paths and variables that the script
needs and the sandbox lacks are found in bash's messages, replaced, and the script is run again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from verl.errors import RewardError, VerlError
from verl.rewards.sandbox.sandbox import Limits, best_isolation, run

TIMEOUT_S = 20.0
_MAX_ROUNDS, _MAX_SECONDS, _MAX_CALLS, _MAX_FOLDERS, _MAX_FILE_BYTES = 12, 60.0, 2000, 64, 1 << 18
_LIMITS = Limits(seconds=TIMEOUT_S + 10, processes=128, output_bytes=64 << 20)
_BASE = "/tmp/verl-migrate"
_ROOT = f"{_BASE}/root"
"""The folder in the sandbox that stands for / of this machine."""
_VARIABLES = {"HOME": f"{_BASE}/home", "USER": "verl-migrate-user"}
_SHELL_FILES = (".sh", ".bash", ".env", ".slurm", ".sbatch")
_SYSTEM_FOLDERS = ("bin", "dev", "lib", "lib32", "lib64", "proc", "sbin", "sys", "tmp", "usr")
_OWN_VARIABLES = ("BASH_ENV", "OLDPWD", "PATH", "PWD", "SHLVL", "_")

_COMPLAINT = re.compile(r"^\S*?(?:: line \d+|\bbash): (.+)$", re.MULTILINE)
_NO_PATH = re.compile(r"(?:(cd|pushd): )?(.+?): (?:No such file or directory|command not found)")
_NO_VARIABLE = re.compile(r"(\w+): (unbound variable|parameter (?:null or )?not set|.+)")
_DEFAULT = r"\$\{{{0}:?[-+=]"
_ASSIGNMENT = r"\b{0}(?:\[[^]]*\])?\+?=|\b(?:for|read|mapfile|getopts|select|local|declare|printf -v)\b[^\n;|]*\b{0}\b"
_INTERPRETER = re.compile(r"(?<![\w$}.~/])/[\w./-]+/bin/(?:python[\d.]*|torchrun|ray|accelerate)\b")
_PLAIN_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?=[}/%#^,]))")
_QUOTED = re.compile(r"(?m)(?:^|(?<=\s))#.*$|'[^']*'")
_SHELL_VARIABLES = re.compile(
    r"\d+|BASH\w*|[A-Z]*PWD|E?UID|PPID|RANDOM|SECONDS|LINENO|FUNCNAME|HOSTNAME|REPLY|OPT\w+|PATH|IFS"
)


class Call(NamedTuple):
    """One program that the script started.

    `is_output_used` says whether the script reads the output, which is empty here. `exports` are the environment
    variables that the script set. `folder` is the working directory if the script changed it.
    """

    words: list[str]
    is_output_used: bool = False
    exports: Mapping[str, str] = MappingProxyType({})
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """What a script did: its calls, its exit code (None after a timeout), bash's messages, and its last output.

    `variables` are read by the script but set nowhere: their value here is `${NAME}`, or empty if the script depends on
    the value.
    """

    calls: list[Call]
    exit_code: int | None
    complaints: list[str] = field(default_factory=list)
    output: str = ""
    variables: frozenset[str] = frozenset()


def restore_variables(text: str) -> str:
    """Return a text of the sandbox with paths of this machine, `${HOME}` and `${USER}`."""
    for name, value in _VARIABLES.items():
        text = text.replace(value, f"${{{name}}}")
    return text.replace(_ROOT, "")


def capture(file: Path, variables: Mapping[str, str], arguments: Sequence[str]) -> Capture:
    """Run a script with environment variables and arguments.

    Raises:
        VerlError: If the script cannot be read, or no sandbox works on this machine. Nothing is executed then.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlError(f"{file}: cannot be read: {error}") from error
    _require_sandbox()
    script = _Script(file, text, dict(variables), arguments)
    script.run_completely()
    return script.leave_variables_open()


def _require_sandbox() -> None:
    try:
        kind, reason = best_isolation(), ""
    except RewardError as error:
        kind, reason = "limits", f"\n{error}"
    if kind == "limits":
        raise VerlError(
            "verl migrate runs the script in a sandbox, and neither bubblewrap nor namespaces work on this machine; "
            f"install bubblewrap (apt-get install bubblewrap). Nothing was executed.{reason}"
        )


class _Script:
    """A script, and what was added to its sandbox so far."""

    def __init__(self, file: Path, text: str, variables: dict[str, str], arguments: Sequence[str]) -> None:
        self._file, self._text, self._arguments = Path(os.path.abspath(file)), text, arguments
        self._cwd = Path.cwd()
        self._given = {**_VARIABLES, "LANG": "C.UTF-8", "TERM": "dumb", **variables}
        self._required: set[str] = set()
        self._folders: set[str] = set()
        self._missing: set[str] = set(_INTERPRETER.findall(text))
        self._files: dict[str, bytes] = {str(self._file): text.encode()}
        self._add_siblings(text)
        self._last = Capture([], 0)

    def run_completely(self) -> None:
        """Run the script until bash misses nothing that can be replaced."""
        started_at = time.monotonic()
        for _ in range(_MAX_ROUNDS):
            self._last = self._run(self._required)
            if self._last.exit_code is None or time.monotonic() - started_at > _MAX_SECONDS:
                return
            before = self._count_additions()
            for complaint in self._last.complaints:
                self._add_what_is_missing(complaint)
            if self._count_additions() == before:
                return

    def leave_variables_open(self) -> Capture:
        """Return the calls with `${NAME}` for variables that are set nowhere, if the script does the same with them."""
        unset = self._find_unset()
        if unset and self._last.exit_code is not None:
            opened = self._run(self._required | unset)
            if _without(opened, unset) == _without(self._last, set()):
                self._last = opened
        kept = {name for value in self._given.values() for name in re.findall(r"\$\{(\w+)\}", value)}
        return replace(self._last, variables=frozenset(self._required | unset | kept))

    def _find_unset(self) -> set[str]:
        """Return the variables that the script uses, but neither sets nor gives a default."""
        texts = [_QUOTED.sub("", content.decode(errors="replace")) for content in self._files.values()]
        text = "\n".join(texts)
        used = {plain or braced for plain, braced in _PLAIN_USE.findall(text)}
        names = {name for name in used - set(self._given) - self._required if not _SHELL_VARIABLES.fullmatch(name)}
        return {name for name in names if not re.search(f"{_DEFAULT}|{_ASSIGNMENT}".format(name), text)}

    def _add_siblings(self, text: str) -> None:
        """Add the shell files of the script's folder that a text names, and those that they name."""
        for path in sorted(self._file.parent.iterdir()):
            if path.suffix in _SHELL_FILES and path.name in text and self._add_file(path):
                self._add_siblings(self._files[str(path)].decode(errors="replace"))

    def _count_additions(self) -> int:
        return sum(map(len, (self._required, self._folders, self._missing, self._files)))

    def _add_what_is_missing(self, complaint: str) -> None:
        """Add the path or the variable that bash misses to the sandbox."""
        if (match := _NO_PATH.fullmatch(complaint)) and ("/" in match[2] or match[1]):
            is_folder = match[1] is not None
            bases = [""] if match[2].startswith("/") else [f"{_ROOT}{self._cwd}/", f"{_ROOT}{self._file.parent}/"]
            for path in {os.path.normpath(base + match[2]) for base in bases}:
                self._add_path(path, is_folder)
        elif match := _NO_VARIABLE.fullmatch(complaint):
            name, reason = match.groups()
            if reason == "unbound variable" or re.search(rf"\$\{{{name}:?\?", self._text):
                self._required |= {name} - set(self._given) if not name.isdigit() else set()

    def _add_path(self, path: str, is_folder: bool) -> None:
        if is_folder:
            self._folders.add(path)
        elif not path.startswith(f"{_ROOT}/") or not self._add_file(Path(path.removeprefix(_ROOT))):
            self._missing.add(path)

    def _add_file(self, path: Path) -> bool:
        """Add a small file to the sandbox, if it is below the working directory or the script's folder."""
        is_near = any(path.is_relative_to(folder) for folder in (self._cwd, self._file.parent))
        try:
            is_small = path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES
            if str(path) in self._files or not is_near or not is_small:
                return False
            self._files[str(path)] = path.read_bytes()
        except OSError:
            return False
        return True

    def _run(self, open_variables: set[str]) -> Capture:
        given = {**self._given, **{name: f"${{{name}}}" for name in open_variables}}
        cwd = f"{_ROOT}{self._cwd}"
        task = {
            "script": f"{_ROOT}{self._file}",
            "cwd": cwd,
            "arguments": list(self._arguments),
            "environment": given,
            "folders": sorted(self._folders),
            "missing": sorted(self._missing),
            "max_calls": _MAX_CALLS,
            "timeout_s": TIMEOUT_S,
        }
        tops = {path.split("/")[1] for path in (*self._folders, *self._missing)} - set(_SYSTEM_FOLDERS)
        result = run(
            Path(__file__).with_name("recorder.py").read_text(encoding="utf-8"),
            argv=[json.dumps(task)],
            files={f"{_ROOT}{path}"[1:].removeprefix("tmp/"): content for path, content in self._files.items()},
            folders=[f"/{name}" for name in sorted(tops)[:_MAX_FOLDERS]],
            limits=_LIMITS,
        )
        if result.status != "ok":
            raise VerlError(f"{self._file}: the sandbox ended with {result.status}: {result.stderr.strip()[-300:]}")
        raw = json.loads(result.stdout)
        calls = [_read_call(call, given, cwd) for call in raw["calls"]]
        complaints = [text for text in _COMPLAINT.findall(f"{raw['err']}\n{raw['out']}") if "ulimit: " not in text]
        output = f"{raw['out'].strip()}\n{raw['err'].strip()}".strip()
        return Capture(calls, raw["exit_code"], list(dict.fromkeys(complaints)), output)


def _read_call(raw: Any, given: Mapping[str, str], cwd: str) -> Call:
    environment = raw["environment"]
    exports = {
        name: value
        for name, value in environment.items()
        if given.get(name) != value and name not in _OWN_VARIABLES and not name.startswith("BASH_FUNC")
    }
    folder = environment.get("PWD", cwd)
    return Call(raw["words"], raw["is_output_used"], exports, folder if folder != cwd else None)


def _without(result: Capture, names: set[str]) -> list[list[str]]:
    """Return the arguments of all calls with empty values of variables, and without empty words."""
    pattern = re.compile("|".join(rf"\$\{{{name}\}}" for name in names) or "(?!)")
    return [[word for text in call.words if (word := pattern.sub("", text))] for call in result.calls]
