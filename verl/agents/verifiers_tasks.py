"""Tasks of the library verifiers (version 0.4), played through the gateway.

    from verl.agents.verifiers_tasks import adapt_verifiers

    agent = adapt_verifiers(
        {"taskset": {"id": "my-tasks"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}},
        python="environments/verifiers/bin/python",
    )

and `rollout.agent.default_agent_loop=tasks.py:agent`. The library pins versions that verl does not have, so it runs in
an environment of its own: each worker starts one process of its Python, which loads the environment and plays the
worker's episodes, and ends with the worker.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agents.builtin_agents import Task
from verl.errors import ConfigError

_SETTING = "actor_rollout_ref.rollout.agent.default_agent_loop"
_PROGRAM = Path(__file__).with_name("verifiers_process.py")


def adapt_verifiers(config: Mapping[str, Any], *, python: str | Path = sys.executable) -> VerifiersAgent:
    """Return an agent that plays an environment of verifiers and returns its reward.

    The task of a row is in `extra_info.task`: the fields of the library's `TaskData` as JSON text. Without a prompt
    among them, it is the prompt of the row.

    Args:
        config: The library's `EnvConfig`: taskset, and harness and runtime of its one agent.
        python: The interpreter of an environment with verifiers.
    """
    return VerifiersAgent(json.dumps(config), str(python))


@dataclass(frozen=True)
class VerifiersAgent:
    """An agent that takes a URL and a key. Equal ones share the process of a worker."""

    config: str
    python: str

    def __call__(self, task: Task, base_url: str, api_key: str) -> float:
        fields = {"prompt": task.messages, **json.loads(task.row["extra_info"].get("task", "{}"))}
        return find_process(self).play({"task": fields, "base_url": base_url, "api_key": api_key})


class VerifiersProcess:
    """A process with the library. Requests and results are lines of JSON; threads wait for theirs."""

    def __init__(self, agent: VerifiersAgent) -> None:
        command = [agent.python, "-P", str(_PROGRAM), agent.config]
        path = os.pathsep.join([str(Path(agent.python).parent), os.environ.get("PATH", os.defpath)])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PATH": path},
                start_new_session=True,  # it ends with its standard input, not at Ctrl-C
                text=True,
            )
        except OSError as error:
            raise ConfigError([f"{_SETTING}: the Python of verifiers cannot be started: {error}"]) from error
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
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, **request}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # `_read` finds out why
        return future.result()

    def _read(self) -> None:
        assert self._process.stdout is not None
        end: Exception | None = None
        for line in self._process.stdout:
            result = json.loads(line)
            if "id" not in result:
                end = ConfigError([f"{_SETTING}: verifiers cannot be used: {result['error']}"])
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


_starting = threading.Lock()
_processes: dict[VerifiersAgent, VerifiersProcess] = {}


def find_process(agent: VerifiersAgent) -> VerifiersProcess:
    """Return this worker's process of an agent, a new one if the last has ended."""
    with _starting:
        process = _processes.get(agent)
        if process is None or process.has_ended:
            process = _processes[agent] = VerifiersProcess(agent)
        return process
