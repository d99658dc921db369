"""A reward function: loaded, checked once, then called for every finished response. A failure is never a silent 0.

The user writes `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, sync or async, and sets its
file (or `package.module`) as `reward.custom_reward_function.path`. It returns a number, or a dict whose "score" is the
reward and whose other numbers are logged. Without a path, built-in scorers are chosen by the row's data source.

This module runs the function in the current process; `pool/` runs it in processes that may hang and die.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards import compose
from verl.rewards.function_io import adapt_by_name, unpack_function
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored, make_failure, parse_result, truncate
from verl.rewards.settings import RewardFunctionSettings

Scorer = Callable[..., Any]

_MODULES = {
    "exact_match": ["addition"],
    "gsm8k": ["gsm8k", "openai/gsm8k"],
    "math": [
        *("math", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"),
        *("HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024"),
    ],
    "multiple_choice": ["mmlu", "cais/mmlu", "TIGER-Lab/MMLU-Pro", "allenai/ai2_arc", "Idavidrein/gpqa"],
    "qa": ["nq", "squad", "rajpurkar/squad", "hotpotqa", "trivia_qa", "searchR1_nq"],
    "code": ["code", "taco", "apps", "codecontests", "codeforces", "mbpp", "humaneval"],
    "json_schema": ["json_schema"],
}
BUILTIN_SCORERS: dict[str, str] = {
    source: f"verl.rewards.scorers.{module}" for module, sources in _MODULES.items() for source in sources
}
"""Data source -> module of its `compute_score`, for runs without a user function."""

_SETTING = "reward.custom_reward_function"
_BATCH_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class RewardFunction:
    """Scores responses in this process. Load it in the process that scores: a function from a file cannot be pickled.

    >>> score, metrics = await load_reward("my_reward.py").score("gsm8k", "... #### 72", "72")
    """

    def __init__(self, scorer: Scorer, settings: RewardFunctionSettings) -> None:
        self.label, self.is_batched = settings.label, settings.is_batched
        self.is_async = compose.is_async(scorer)
        self.warn: Callable[[str], None] = logging.getLogger(__name__).warning
        self._scorer = scorer
        self._kwargs = {} if settings.functions else settings.kwargs
        self._skipped: set[str] = set()

    @classmethod
    def load(cls, settings: RewardFunctionSettings) -> RewardFunction:
        """Load the function and check its signature, and what built-in scorers need on this machine."""
        paths = {part.get("path") for part in settings.functions} if settings.functions else {settings.path}
        for module, kwargs in settings.builtin_kwargs.items():
            if paths & {None, module}:
                importlib.import_module(module).check_requirements(**kwargs)
        load = partial(_load_function, settings)
        if settings.functions:
            return cls(compose.combine(settings.functions, load), settings)
        if settings.path is None and (settings.kwargs or settings.is_batched):
            value = f"reward_kwargs={dict(settings.kwargs)!r}" if settings.kwargs else "path=null"
            takes = "take no arguments" if settings.kwargs else "do not support reward_manager.name=batch"
            raise RewardError(
                f"{_SETTING}.{value}: the built-in scorers {takes}. "
                f"Remove the setting, or set {_SETTING}.path=my_reward.py to use your function"
            )
        if settings.function is not None:
            return cls(_adapt(unpack_function(settings.function), settings.label, settings.kwargs, settings), settings)
        return cls(load(settings.path, settings.name, settings.kwargs), settings)

    def call(self, requests: Sequence[RewardInput]) -> Any:
        """Return what the function returns, or its coroutine. Only a batched function takes more than one request."""
        if self.is_batched:
            columns = dict(zip(_BATCH_PARAMETERS, map(list, zip(*requests, strict=True)), strict=True))
            return self._scorer(**columns, **self._kwargs)
        [request] = requests
        return self._scorer(**request._asdict(), **self._kwargs)

    def to_results(self, returned: Any, requests: Sequence[RewardInput]) -> list[RewardResult]:
        """Convert what `call` returned; all fail when a batched function did not return one result for each."""
        if not self.is_batched:
            return [self._to_result(returned, requests[0])]
        if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
            cause = f"returned {truncate(returned)} for {len(requests)} responses: a batched function returns a list"
        elif len(returned) != len(requests):
            cause = f"returned {len(returned)} results for {len(requests)} responses"
        else:
            return [self._to_result(one, request) for one, request in zip(returned, requests, strict=True)]
        return [make_failure("invalid", self.label, cause, request) for request in requests]

    def _to_result(self, returned: Any, request: RewardInput) -> RewardResult:
        try:
            score, metrics, skipped = parse_result(returned)
        except ValueError as error:
            return make_failure("invalid", self.label, str(error), request)
        except Exception as error:  # noqa: BLE001 - methods of the user's object run here
            return self.to_failures(error, [request])[0]
        for key in sorted(skipped.keys() - self._skipped):
            self._skipped.add(key)
            self.warn(f"{self.label}: {key!r} is {skipped[key]}, no number: it is not logged")
        return Scored(score, metrics)

    def to_failures(self, error: BaseException, requests: Sequence[RewardInput]) -> list[Failed]:
        """Return the failures of a call that raised, with the traceback from the user's first frame on."""
        cause = f"raised {type(error).__name__}\n{_format_user_traceback(error)}"
        fix = "Use less memory, or increase reward.memory_mb" if isinstance(error, MemoryError) else ""
        return [make_failure("error", self.label, cause, request, fix) for request in requests]

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> tuple[float, dict[str, float]]:
        """Score one response, to try a function out, without a deadline.

        Returns:
            The score, and the other numbers that the function returned.

        Raises:
            RewardError: The function raised, or did not return a score.
        """
        requests = [RewardInput(data_source, solution_str, ground_truth, extra_info)]
        try:
            returned = self.call(requests)
            returned = await returned if inspect.isawaitable(returned) else returned
        except Exception as error:
            raise RewardError(self.to_failures(error, requests)[0].message) from error
        [result] = self.to_results(returned, requests)
        if isinstance(result, Failed):
            raise RewardError(result.message)
        return result.score, result.metrics


def load_reward(
    path: str | None, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Load a reward function, to try it out.

    Args:
        path: A Python file or `package.module`; None for the built-in scorers.
        name: The function in that file.
        kwargs: Passed to every call, like `reward.custom_reward_function.reward_kwargs`.
    """
    return RewardFunction.load(RewardFunctionSettings(path, name, kwargs or {}))


def describe_scorer(data_source: str, settings: RewardFunctionSettings) -> str | None:
    """Return the name of what scores the rows of a data source, for messages; None if nothing does. Loads nothing.

    >>> describe_scorer("gsm8k", RewardFunctionSettings()), describe_scorer("mine", RewardFunctionSettings())
    ('verl.rewards.scorers.gsm8k', None)
    """
    paths = [part.get("path") for part in settings.functions] if settings.functions else [settings.path]
    if None in paths and not has_builtin_scorer(data_source):
        return None
    return BUILTIN_SCORERS[data_source] if paths == [None] else settings.label


def explain_no_scorer(data_source: str) -> str:
    """Return the message for a data source that has no built-in scorer."""
    near = difflib.get_close_matches(data_source, BUILTIN_SCORERS, n=1)
    known = f"did you mean {near[0]!r}?" if near else f"known data sources: {', '.join(sorted(BUILTIN_SCORERS))}."
    problem = f"data_source {data_source!r}: no built-in scorer knows it; {known} Fix the column"
    if not data_source:
        problem = "data_source: rows without one have no built-in scorer. Add the column"
    return f"{problem}, or set {_SETTING}.path=my_reward.py to use your function (in Python: reward=my_function)"


def has_builtin_scorer(data_source: str) -> bool:
    return data_source in BUILTIN_SCORERS


def _load_function(settings: RewardFunctionSettings, path: str | None, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """Load one function and check its signature."""
    builtin_kwargs = settings.builtin_kwargs
    if path is None:
        return lambda **request: _load_builtin(request["data_source"], builtin_kwargs)(**request)
    module, label = _load_module(path), RewardFunctionSettings(path, name).label
    scorer = getattr(module, name, None)
    if scorer is None:
        functions = [key for key, value in vars(module).items() if _is_defined_in(module, value)]
        has = f"it has: {', '.join(functions)}" if functions else "it defines no function"
        choice = functions[0] if len(functions) == 1 else "..."
        raise RewardError(f"{label}: there is no {name!r} in the file; {has}. Choose one with {_SETTING}.name={choice}")
    if not callable(scorer):
        raise RewardError(f"{label}: is a {type(scorer).__name__}, not a function; choose one with {_SETTING}.name=...")
    scorer = _adapt(scorer, label, kwargs, settings)
    return partial(scorer, **builtin_kwargs[path]) if path in builtin_kwargs else scorer


def _adapt(scorer: Scorer, label: str, kwargs: Mapping[str, Any], settings: RewardFunctionSettings) -> Scorer:
    """Return the function as it will be called: by its parameters' names, or like `compute_score`."""
    if not settings.is_batched and (by_name := adapt_by_name(scorer, label, kwargs)) is not None:
        return by_name
    _check_signature(scorer, label, kwargs, _BATCH_PARAMETERS if settings.is_batched else RewardInput._fields)
    return scorer


def _load_builtin(data_source: str, builtin_kwargs: Mapping[str, Mapping[str, Any]]) -> Scorer:
    if not has_builtin_scorer(data_source):
        raise RewardError(explain_no_scorer(data_source))
    module = BUILTIN_SCORERS[data_source]
    return partial(importlib.import_module(module).compute_score, **builtin_kwargs.get(module, {}))


def _load_module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    is_file = path.endswith(".py") or "/" in path or file.is_file()
    if is_file and not file.is_file():
        raise RewardError(
            f"{_SETTING}.path={path}: no such file in {file.absolute().parent}. "
            "Set the path of a Python file that every node can read, or the name of an installed module"
        )
    # A unique name, so that a file called `math.py` shadows nothing; in sys.modules, so that its classes pickle.
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
            f"{_SETTING}.path={path}: is neither a file nor an importable module. "
            "Set the path of a Python file (my_reward.py) or the name of an installed module"
        ) from error
    except Exception as error:
        sys.modules.pop(name, None)
        trace = _format_user_traceback(error)
        raise RewardError(f"{_SETTING}.path={path}: importing it failed\n{trace}") from error


def _check_signature(scorer: Scorer, label: str, kwargs: Mapping[str, Any], parameters: Sequence[str]) -> None:
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # some builtins have no signature: the first call will show
        return
    try:
        signature.bind(**dict.fromkeys(parameters), **kwargs)
    except TypeError as error:
        extra = f", and reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        fix = _suggest_kwargs_fix(signature, kwargs)
        fix = fix or f"declare it as compute_score({', '.join(parameters[:-1])}, {parameters[-1]}=None)"
        raise RewardError(
            f"{label}: has the signature {signature}, but is called by name with "
            f"{', '.join(parameters[:-1])} and {parameters[-1]}{extra} ({error}); {fix}"
        ) from None


def _suggest_kwargs_fix(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Return the fix if a keyword-only parameter has no value, or `kwargs` has one that does not exist; else ""."""
    options = {name: one for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    missing = [name for name, one in options.items() if one.default is one.empty and name not in kwargs]
    if missing:
        return f"set {_SETTING}.reward_kwargs.{missing[0]}=..."
    unknown = [name for name in kwargs if name not in signature.parameters]
    return f"its options are {', '.join(options)}; remove {unknown[0]}" if options and unknown else ""


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _format_user_traceback(error: BaseException) -> str:
    """Format the traceback from the user's first frame on."""
    names = ("reward_function", "compose", "function_io", "pool/worker", "pool/in_process")
    skipped = (*(str(Path(__file__).parent / f"{name}.py") for name in names), "<frozen importlib", asyncio.__path__[0])
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(skipped):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
