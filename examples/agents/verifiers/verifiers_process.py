"""Plays episodes of the library verifiers: a request per line of standard input, a result per line of standard output.

The first line of standard input is the configuration.

Runs with the Python of an environment that has the library but not verl, so this file imports nothing of verl.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

HINT = "set PYTHON in verifiers_agent.py to the interpreter of an environment with verifiers==0.4.0 and uv"


async def main(config: dict[str, Any], results: Any) -> None:
    """Play episodes until standard input ends."""
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {HINT}") from error

    environment = vf.load_environment(vf.resolve_env_config(config))

    async def answer(request: dict[str, Any]) -> None:
        try:
            result: dict[str, Any] = {"reward": await play(vf, environment, request)}
        except Exception as error:  # noqa: BLE001 - the code of the library or of the task
            result = {"error": f"{type(error).__name__}: {error}"}
        write(results, {"id": request["id"], **result})

    playing: set[asyncio.Task[None]] = set()
    async with environment.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(answer(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


async def play(vf: Any, environment: Any, request: dict[str, Any]) -> float:
    """Return the reward of one episode. The library reads keys from environment variables only."""
    variable = f"VERL_API_KEY_{request['id']}"
    os.environ[variable] = request["api_key"]
    try:
        task_type = type(environment.taskset).task_type()
        task = task_type(task_type.data_type().model_validate(request["task"]), environment.config.taskset.task)
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        episode = await environment.run_episode(task, vf.ModelContext("policy", client))
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    if len(episode.traces) != 1:
        raise ValueError(f"{len(episode.traces)} agents played; only environments with one agent can be trained")
    return float(episode.traces[0].reward)


def write(results: Any, message: dict[str, Any]) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


if __name__ == "__main__":
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasks print goes to standard error
    try:
        asyncio.run(main(json.loads(sys.stdin.readline()), results))
    except Exception as error:  # noqa: BLE001 - reported where the process was started
        write(results, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
