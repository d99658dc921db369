"""Checks that a rollout engine can run in another Python environment (`actor_rollout_ref.rollout.python`)."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from verl.config.rollout_engines import RolloutEngineSpec

_PACKAGES = ("torch", "transformers")
"""What every engine needs besides its own packages."""
_VERSION = "verl:__version__"
_TIMEOUT_S = 120.0
_ASK = "import sys; from verl.config.interpreters import describe_installation as d; print(d(*sys.argv[1:]), end='')"


@cache
def find_interpreter_problem(python: str, spec: RolloutEngineSpec) -> str:
    """Return why `python` cannot run the engine, and how to fix it; empty if it can. Starts the interpreter."""
    if not Path(python).is_file():
        return (
            f"{python} does not exist on this machine; give the path of a Python interpreter, such as venv/bin/python"
        )
    command = (python, "-P", "-c", _ASK, resolve_name(_VERSION), spec.find_problem or "")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be started: {error}; give the path of a Python interpreter"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{python} cannot import verl ({reason}); install the same version of verl in that environment"
    return f"{python}: {spec.name} {done.stdout}" if done.stdout else ""


def describe_installation(wanted: str, find_problem: str) -> str:
    """Return what this environment lacks to run an engine; called in the other interpreter.

    Args:
        wanted: The version of verl.
        find_problem: The function of the engine's spec, or "".
    """
    if (installed := resolve_name(_VERSION)) != wanted:
        return f"needs verl {wanted}, and verl {installed} is installed; install the same version there"
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        return f"needs {', '.join(missing)}; install {'it' if len(missing) == 1 else 'them'} there"
    return str(resolve_name(find_problem)()) if find_problem else ""
