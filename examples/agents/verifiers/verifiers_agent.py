"""An agent that plays tasks of the library verifiers (version 0.4) through the gateway.

Copy this folder, set `CONFIG` and `PYTHON` below, and train with
`actor_rollout_ref.rollout.agent.default_agent_loop=verifiers_agent.py:agent`.

The library pins versions that verl does not have, so the library runs in an environment of its own: each worker starts
one process of `PYTHON`, which loads the tasks, plays the worker's episodes, and ends with the worker.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl.agents.builtin_agents import Task
from verl.errors import ConfigError
from verl.redaction import is_secret_name, redact

# The library's `EnvConfig`: a taskset, and the harness and runtime of its one agent.
CONFIG = {"taskset": {"id": "my-tasks"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
# The interpreter of an environment that has verifiers==0.4.0, uv and the package of the tasks.
PYTHON = "DIR/bin/python"
# Environment variables with secrets that the tasks need, such as the key of a judge.
KEYS: tuple[str, ...] = ()

SETTING = "actor_rollout_ref.rollout.agent.default_agent_loop"
PROGRAM = Path(__file__).with_name("verifiers_process.py")


class VerifiersAgent:
    """An agent that takes a URL and a key, and returns the reward of the task.

    The task of a row is in `extra_info.task`: the fields of the library's `TaskData` as JSON text. If the task has no
    prompt, the prompt of the row is used.
    """

    def __init__(self, config: Mapping[str, Any], python: str) -> None:
        self._config, self._python = config, python
        self._starting = threading.Lock()
        self._process: VerifiersProcess | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifiersAgent, (self._config, self._python)  # each worker starts its own process

    def __call__(self, task: Task, base_url: str, api_key: str) -> float:
        fields = {"prompt": task.messages, **json.loads(task.row["extra_info"].get("task", "{}"))}
        return self.get_process().play({"task": fields, "base_url": base_url, "api_key": api_key})

    def get_process(self) -> VerifiersProcess:
        """Return the process, a new one if the last has ended."""
        with self._starting:
            if self._process is None or self._process.has_ended:
                self._process = VerifiersProcess(self._config, self._python)
            return self._process


class VerifiersProcess:
    """A process with the library. Requests and results are lines of JSON; each thread waits for its own result."""

    def __init__(self, config: Mapping[str, Any], python: str) -> None:
        path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**filter_environment(os.environ), "PATH": path},
                start_new_session=True,  # the process ends with its standard input, not at Ctrl-C
                text=True,
            )
        except OSError as error:
            raise ConfigError([f"{SETTING}: the Python of verifiers cannot be started: {error}"]) from error
        self._send(config)  # not as an argument, which other users of the machine could read
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, Future[float]] = {}
        self._end: Exception | None = None
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    def play(self, request: Mapping[str, Any]) -> float:
        """Return the reward of an episode."""
        future: Future[float] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end
            number = next(self._ids)
            self._waiting[number] = future
            self._send({"id": number, **request})
        return future.result()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_read` finds out why

    def _read(self) -> None:
        assert self._process.stdout is not None
        end: Exception | None = None
        for line in self._process.stdout:
            result = json.loads(line)
            if "id" not in result:
                end = ConfigError([f"{SETTING}: verifiers cannot be used: {result['error']}"])
                continue
            with self._lock:
                future = self._waiting.pop(result["id"])
            if "error" in result:
                future.set_exception(RuntimeError(result["error"]))
            else:
                future.set_result(result["reward"])
        code = self._process.wait()
        with self._lock:
            self._end = end or RuntimeError(f"the process of verifiers ended with code {code}")
            for future in self._waiting.values():
                future.set_exception(self._end)


def filter_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without secrets, except those that the tasks need (`KEYS`)."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEYS or not (is_secret_name(name) or redact(value) != value)
    }


agent = VerifiersAgent(CONFIG, PYTHON)
