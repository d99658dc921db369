"""A reward function: found, checked once, then called for every finished answer. A failure is never a silent 0.

The user writes `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or async, and gives its
file (or `package.module`) as `reward.custom_reward_function.path`. It returns a number, or a dict whose "score" is the
reward and whose other numbers are logged. Without a path, shipped scorers are chosen by the row's data source.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards import exact, gsm8k

__all__ = ["SHIPPED", "RewardFunction", "load_reward"]

Scorer = Callable[..., Any]

SHIPPED: dict[str, Scorer] = {
    "addition": exact.compute_score,
    "gsm8k": gsm8k.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
}
"""Data source -> scorer, for runs without a function of their own."""

_SETTING = "reward.custom_reward_function"
_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_THREADS = 32


class _LateError(Exception):
    """Ours, so that a TimeoutError of the user's function stays an error of the user's function."""


class RewardFunction:
    """Scores one answer at a time. Load it in the process that scores: a function from a file does not travel.

    >>> score, metrics = await load_reward("my_reward.py").score("gsm8k", "... #### 72", "72")
    """

    def __init__(self, scorer: Scorer | None, where: str, kwargs: Mapping[str, Any], deadline_s: float = 300.0) -> None:
        self._scorer = scorer
        self._where = where
        self._kwargs = dict(kwargs)
        self._deadline_s = deadline_s
        self._threads = asyncio.Semaphore(_THREADS)

    def knows(self, data_source: str) -> bool:
        """Whether rows of this data source can be scored: asked before a run starts, for every source in the data."""
        return self._scorer is not None or data_source in SHIPPED

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> tuple[float, dict[str, float]]:
        """The reward of one answer, and the other numbers that came with it. A RewardError after `deadline_s`.

        Plain functions run in threads, so many at a time; waiting for one is not counted against the deadline.
        """
        scorer = self._scorer or SHIPPED.get(data_source)
        if scorer is None:
            raise RewardError(
                f"data_source {data_source!r}: no shipped scorer knows it (shipped: {', '.join(sorted(SHIPPED))}); "
                f"give your own with {_SETTING}.path=my_reward.py, or correct the data_source column"
            )
        call = dict(zip(_PARAMETERS, (data_source, solution_str, ground_truth, extra_info), strict=True)) | self._kwargs
        try:
            if _is_async(scorer):
                result = await self._in_time(scorer(**call))
            else:
                async with self._threads:
                    result = await self._in_time(_in_thread(scorer, call))
        except _LateError:
            what = f"gave no score within its deadline of {self._deadline_s:g} s"
            raise RewardError(self._about(what, data_source, solution_str, ground_truth)) from None
        except Exception as error:
            what = f"raised {type(error).__name__}\n{_users_traceback(error, scorer)}"
            raise RewardError(self._about(what, data_source, solution_str, ground_truth)) from error
        try:
            return _read(result)
        except ValueError as error:
            raise RewardError(self._about(str(error), data_source, solution_str, ground_truth)) from None

    async def _in_time(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=self._deadline_s)
            if not task.done():
                raise _LateError
            return task.result()
        finally:
            task.cancel()

    def _about(self, what: str, data_source: str, solution_str: str, ground_truth: Any) -> str:
        return (
            f"{self._where}: {what.rstrip()}\n"
            f"  data_source:  {data_source!r}\n"
            f"  answer:       {_short(solution_str)}\n"
            f"  ground truth: {_short(ground_truth)}\n"
            "  a reward must be a finite number, or a dict with a 'score' and more finite numbers; mend the function: "
            "an answer that cannot be judged is a decision of yours, not a 0 of ours"
        )


def load_reward(
    path: str | None,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = 300.0,
) -> RewardFunction:
    """The user's function `name` from `path` (a file, or `package.module`), or the shipped scorers when path is None.

    `kwargs` (`reward.custom_reward_function.reward_kwargs`) are handed to every call; one that takes longer than
    `deadline_s` is an error.
    """
    kwargs = kwargs or {}
    if path is None:
        if kwargs:
            raise RewardError(
                f"{_SETTING}.reward_kwargs={dict(kwargs)!r}: the shipped scorers take no arguments; "
                f"leave it out, or give your own function with {_SETTING}.path=my_reward.py"
            )
        return RewardFunction(None, "the shipped scorer", {}, deadline_s)
    module = _load_module(path)
    where = f"{path}:{name}"
    scorer = getattr(module, name, None)
    if scorer is None:
        functions = [key for key, value in vars(module).items() if _defined_here(value, module)]
        has = f"it has: {', '.join(functions)}" if functions else "it defines no function"
        raise RewardError(f"{where}: there is no {name!r} in the file; {has}. Choose one with {_SETTING}.name=...")
    if not callable(scorer):
        raise RewardError(f"{where}: is a {type(scorer).__name__}, not a function; choose one with {_SETTING}.name=...")
    _check_signature(scorer, where, kwargs)
    return RewardFunction(scorer, where, kwargs, deadline_s)


async def _in_thread(scorer: Scorer, call: Mapping[str, Any]) -> Any:
    """The result of a plain function in a daemon thread: one that never returns does not keep the process alive."""
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result((context.run(scorer, **call), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            outcome.set_result((None, error))

    threading.Thread(target=run, name="reward", daemon=True).start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result


def _load_module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    is_file = path.endswith(".py") or "/" in path or file.is_file()
    if is_file and not file.is_file():
        raise RewardError(
            f"{_SETTING}.path={path}: no such file (looked in {file.absolute().parent}); "
            "give the path of a Python file that every node can read, or the name of an installed module"
        )
    # A name of its own, so that a file called `math.py` shadows nothing; in sys.modules, so that its classes pickle.
    name = f"verl_reward_{hashlib.sha1(str(file.resolve()).encode()).hexdigest()[:12]}" if is_file else path
    try:
        if not is_file:
            return importlib.import_module(path)
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise RewardError(f"{_SETTING}.path={path}: is not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except RewardError:
        raise
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise RewardError(f"{_SETTING}.path={path}: imports {error.name!r}, which is not installed here") from error
        raise RewardError(
            f"{_SETTING}.path={path}: is neither a file nor an importable module; "
            "give the path of a Python file (my_reward.py) or the name of an installed module"
        ) from error
    except Exception as error:
        sys.modules.pop(name, None)
        raise RewardError(
            f"{_SETTING}.path={path}: failed while it was imported\n{_users_traceback(error, str(file))}"
        ) from error


def _check_signature(scorer: Scorer, where: str, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # some builtins tell no signature: the first call will
        return
    try:
        signature.bind(**dict.fromkeys(_PARAMETERS), **kwargs)
    except TypeError as error:
        extra = f", and reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        raise RewardError(
            f"{where}: has the signature {signature}, but is called by name with "
            f"data_source, solution_str, ground_truth and extra_info{extra} ({error}); "
            "declare it as compute_score(data_source, solution_str, ground_truth, extra_info=None)"
        ) from None


def _read(result: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(result, Mapping):
        return _number("the score", result), {}
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score' (its keys: {', '.join(map(str, result)) or 'none'})")
    more = {str(key): _number(f"{key!r}", value) for key, value in result.items() if key != "score"}
    return _number("'score'", result["score"]), more


def _number(what: str, value: Any) -> float:
    """Any finite scalar that is a number: also a bool, and a numpy or torch scalar."""
    if value is None or isinstance(value, str | bytes) or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"returned {_short(value)} as {what}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {_short(value)} as {what}") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number} as {what}")
    return number


def _short(value: Any, limit: int = 200) -> str:
    """The first 200 characters, as a Python literal where it is text."""
    text = value if isinstance(value, str) else repr(value)
    cut = f" ... ({len(text):,} characters)" if len(text) > limit else ""
    return (repr(text[:limit]) if isinstance(value, str) else text[:limit]) + cut


def _is_async(scorer: Scorer) -> bool:
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


def _defined_here(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _users_traceback(error: BaseException, scorer: Scorer | str) -> str:
    """The traceback from the first frame in the user's file on: ours and the thread pool's help nobody."""
    file = scorer if isinstance(scorer, str) else getattr(getattr(scorer, "__code__", None), "co_filename", None)
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != file:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
