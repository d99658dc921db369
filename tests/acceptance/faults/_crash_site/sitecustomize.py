"""Makes a method fail or replaces it, in whatever process it runs. Python imports this module from PYTHONPATH.

VERL_SHOW_REPLACE is `MODULE:CLASS.METHOD MODULE:FUNCTION`: the method becomes what the function, of a module that is
found then, returns for it.

VERL_SHOW_CRASH is `MODULE:CLASS.METHOD CALL RANK HOW`, e.g. `verl.data.plan:Planner.plan 2 0 KeyError`: the second call
on rank 0 fails. HOW is the name of an exception, of a signal, or `exit`.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pkgutil import resolve_name

PLANTED = "planted by the test"


class ReplacingFinder(MetaPathFinder):
    """Replaces a method of a class as soon as its module has been imported."""

    def __init__(self, place: str, replacement: str) -> None:
        self._module, _, path = place.partition(":")
        self._owner, _, self._method = path.rpartition(".")
        self._replacement = replacement

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            owner = getattr(module, self._owner) if self._owner else module
            setattr(owner, self._method, self._wrap(getattr(owner, self._method)))

        spec.loader.exec_module = exec_module
        return spec

    def _wrap(self, method):
        return resolve_name(self._replacement)(method)


class CrashFinder(ReplacingFinder):
    """Makes a method fail."""

    def __init__(self, place: str, call: str, rank: str, how: str) -> None:
        super().__init__(place, "")
        self._call, self._rank, self._how = int(call), int(rank), how

    def _wrap(self, method):
        calls = itertools.count(1)

        def maybe_crash():
            if get_rank() == self._rank and next(calls) == self._call:
                crash(self._how)

        @functools.wraps(method)
        def wrapped(*args, **kwargs):
            maybe_crash()
            return method(*args, **kwargs)

        @functools.wraps(method)
        async def wrapped_coroutine(*args, **kwargs):
            maybe_crash()
            return await method(*args, **kwargs)

        return wrapped_coroutine if inspect.iscoroutinefunction(method) else wrapped


def get_rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    return distributed.get_rank() if distributed is not None and distributed.is_initialized() else 0


def crash(how: str) -> None:
    if how == "exit":
        print("the code has called exit", file=sys.stderr, flush=True)
        os._exit(7)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "OutOfMemoryError":
        raise sys.modules["torch"].OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    raise getattr(builtins, how)(PLANTED)


if plan := os.environ.get("VERL_SHOW_CRASH"):
    sys.meta_path.insert(0, CrashFinder(*plan.split()))
if plan := os.environ.get("VERL_SHOW_REPLACE"):
    sys.meta_path.insert(0, ReplacingFinder(*plan.split()))
