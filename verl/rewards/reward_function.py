"""A reward function: loaded, checked once, then called for every finished response. A failure is never a silent 0.

The user writes `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, sync or async, and sets its
file (or `package.module`) as `reward.custom_reward_function.path`. It returns a number, or a dict whose "score" is the
reward and whose other numbers are logged. Without a path, built-in scorers are chosen by the row's data source.

This module runs the function in the current process; `pool/` runs it in processes that may hang and die.
"""

from __future__ import annotations

import asyncio
import bdb
import difflib
import importlib
import inspect
import logging
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl import custom_functions
from verl.errors import RewardError
from verl.rewards import compose
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored, make_failure, parse_result, truncate
from verl.rewards.settings import RewardFunctionSettings

if TYPE_CHECKING:
    from verl.config.schema.root import Config

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
    "reasoning_gym": ["reasoning_gym/*"],
}
BUILTIN_SCORERS: dict[str, str] = {
    source: f"verl.rewards.scorers.{module}" for module, sources in _MODULES.items() for source in sources
}
"""Data source, or the first part of it -> module of its `compute_score`, for runs without a user function."""

_CHECKED = {"verl.rewards.scorers.code"}  # scorers with a `check_requirements`
_SETTING = "reward.custom_reward_function"
_PARAMETERS = ("prompt", "response", "ground_truth", "data_source", "extra_info")  # in any order, and any of them
_BATCH_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

OUR_FILES = (custom_functions.__file__, compose.__file__, __file__, str(Path(__file__).parent / "pool" / "worker.py"))
"""Files whose frames are dropped from the stacks that users see."""


class RewardFunction:
    """Scores responses in this process. It cannot be pickled: load it in the process that scores."""

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
        for module in _CHECKED & (paths | set(settings.builtin_kwargs if None in paths else ())):
            kwargs = {**settings.builtin_kwargs.get(module, {}), **settings.kwargs}
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
            self.warn(f"{self.label}: {key!r} is {skipped[key]}, which is not a number: it is not logged")
        return Scored(score, metrics)

    def to_failures(self, error: BaseException, requests: Sequence[RewardInput]) -> list[Failed]:
        """Return the failures of a call that raised, with the traceback from the user's first frame on."""
        cause = f"raised {type(error).__name__}\n{_format_user_traceback(error)}"
        fix = "Use less memory, or increase reward.memory_mb" if isinstance(error, MemoryError) else ""
        return [make_failure("error", self.label, cause, request, fix) for request in requests]

    async def score_request(self, request: RewardInput) -> RewardResult:
        """Score one response without a timeout. Quitting the debugger raises."""
        try:
            returned = self.call([request])
            return self.to_results(await returned if inspect.isawaitable(returned) else returned, [request])[0]
        except bdb.BdbQuit:
            raise
        except Exception as error:  # noqa: BLE001 - a failure of the user's function is a result
            return self.to_failures(error, [request])[0]

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> tuple[float, dict[str, float]]:
        """Score one response without a timeout, to try a function out.

        Returns:
            The score, and the other numbers that the function returned.

        Raises:
            RewardError: The function raised, or did not return a score.
        """
        result = await self.score_request(RewardInput(data_source, solution_str, ground_truth, extra_info))
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


def resolve_scorer(config: Config, data_source: str) -> str | None:
    """Return the name of what scores these rows in a run, like `describe_scorer`; it may not be a function."""
    from verl.config.features import uses_reward_function  # reward workers do not import the configuration

    model, function = config.reward.reward_model, config.reward.custom_reward_function
    if not uses_reward_function(config):
        return f"reward model {model.model_path}" if model.enable else "the agent or its environment"
    settings = RewardFunctionSettings(function.path, function.name, functions=config.reward.functions)
    scorer = describe_scorer(data_source, settings)
    return f"{scorer} + reward model {model.model_path}" if scorer is not None and model.enable else scorer


def describe_scorer(data_source: str, settings: RewardFunctionSettings) -> str | None:
    """Return the name of what scores the rows of a data source, for messages; None if nothing does. Loads nothing."""
    paths = [part.get("path") for part in settings.functions] if settings.functions else [settings.path]
    builtin = find_builtin(data_source)
    if None in paths and builtin is None:
        return None
    return builtin if paths == [None] else settings.label


def find_builtin(data_source: str) -> str | None:
    """Return the module of the built-in scorer of a data source, None if there is none."""
    return BUILTIN_SCORERS.get(data_source) or BUILTIN_SCORERS.get(f"{data_source.partition('/')[0]}/*")


def explain_no_scorer(data_source: str) -> str:
    """Return the message for a data source that has no built-in scorer."""
    near = difflib.get_close_matches(data_source, BUILTIN_SCORERS, n=1)
    known = f"did you mean {near[0]!r}?" if near else f"known data sources: {', '.join(sorted(BUILTIN_SCORERS))}."
    problem = f"data_source {data_source!r}: no built-in scorer knows it; {known} Fix the column"
    if not data_source:
        problem = "data_source: rows without one have no built-in scorer. Add the column"
    return f"{problem}, or set {_SETTING}.path=my_reward.py to use your function (in Python: reward=my_function)"


def _load_function(settings: RewardFunctionSettings, path: str | None, name: str, kwargs: Mapping[str, Any]) -> Scorer:
    """Load one function and check its signature."""
    builtin_kwargs = settings.builtin_kwargs
    if path is None:
        return lambda **request: _load_builtin(request["data_source"], builtin_kwargs)(**request)
    module, label = _load_module(path), RewardFunctionSettings(path, name).label
    scorer = getattr(module, name, None)
    if scorer is None:
        members = inspect.getmembers(module, inspect.isfunction)
        functions = [key for key, function in members if function.__module__ == module.__name__]
        has = f"it has: {', '.join(functions)}" if functions else "it defines no function"
        choice = functions[0] if len(functions) == 1 else "..."
        raise RewardError(f"{label}: there is no {name!r} in the file; {has}. Choose one with {_SETTING}.name={choice}")
    if not callable(scorer):
        raise RewardError(f"{label}: is a {type(scorer).__name__}, not a function; choose one with {_SETTING}.name=...")
    scorer = _adapt(scorer, label, kwargs, settings)
    return partial(scorer, **builtin_kwargs[path]) if path in builtin_kwargs else scorer


def _load_builtin(data_source: str, builtin_kwargs: Mapping[str, Mapping[str, Any]]) -> Scorer:
    module = find_builtin(data_source)
    if module is None:
        raise RewardError(explain_no_scorer(data_source))
    return partial(importlib.import_module(module).compute_score, **builtin_kwargs.get(module, {}))


def _load_module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    is_file = path.endswith(".py") or "/" in path or file.is_file()
    if is_file and not file.is_file():
        raise RewardError(
            f"{_SETTING}.path={path}: no such file in {file.absolute().parent}. "
            "Set the path of a Python file that every node can read, or the name of an installed module"
        )
    if is_file and file.suffix != ".py":
        raise RewardError(f"{_SETTING}.path={path}: is not a Python file; its name must end in .py")
    try:
        return custom_functions.load_file(file) if is_file else importlib.import_module(path)
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not f"{path}.".startswith(f"{error.name}."):
            cause = f"imports {error.name!r}, which is not installed here"
            raise RewardError(f"{_SETTING}.path={path}: {cause}; install it") from error
        raise RewardError(
            f"{_SETTING}.path={path}: is neither a file nor an importable module. "
            "Set the path of a Python file (my_reward.py) or the name of an installed module"
        ) from error
    except Exception as error:
        raise RewardError(f"{_SETTING}.path={path}: importing it failed\n{_format_user_traceback(error)}") from error


def _adapt(scorer: Scorer, label: str, kwargs: Mapping[str, Any], settings: RewardFunctionSettings) -> Scorer:
    """Return the function as it will be called: by its parameters' names, or like `compute_score`."""
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # some builtins have no signature: the first call will show
        return scorer
    parameters = _BATCH_PARAMETERS if settings.is_batched else RewardInput._fields
    is_by_name = "response" in signature.parameters and "solution_str" not in signature.parameters
    is_by_name = is_by_name and not settings.is_batched
    names = [name for name in _PARAMETERS if name in signature.parameters] if is_by_name else parameters
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
    except TypeError as error:
        extra = f", and reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        fix = _suggest_kwargs_fix(signature, kwargs)
        fix = fix or f"declare it as compute_score({', '.join(parameters[:-1])}, {parameters[-1]}=None)"
        raise RewardError(
            f"{label}: has the signature {signature}, but is called by name with "
            f"{', '.join(parameters[:-1])} and {parameters[-1]}{extra} ({error}); {fix}"
        ) from None
    return _call_by_name(scorer, label, names) if is_by_name else scorer


def _call_by_name(scorer: Scorer, label: str, names: Sequence[str]) -> Scorer:
    """Wrap a function of `names`, which are some of `_PARAMETERS`, to take the arguments of `compute_score`."""

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any) -> Any:
        prompt = _prompt_text(extra_info, label) if "prompt" in names else ""
        values = dict(zip(_PARAMETERS, (prompt, solution_str, ground_truth, data_source, extra_info), strict=True))
        return scorer(**{name: values[name] for name in names}, **more)

    async def score_async(*args: Any, **kwargs: Any) -> Any:
        return await score(*args, **kwargs)

    return score_async if inspect.iscoroutinefunction(scorer) else score


def _suggest_kwargs_fix(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Return the fix if a keyword-only parameter has no value, or `kwargs` has one that does not exist; else ""."""
    options = {name: one for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    missing = [name for name, one in options.items() if one.default is one.empty and name not in kwargs]
    if missing:
        return f"set {_SETTING}.reward_kwargs.{missing[0]}=..."
    unknown = [name for name in kwargs if name not in signature.parameters]
    return f"its options are {', '.join(options)}; remove {unknown[0]}" if options and unknown else ""


def _format_user_traceback(error: BaseException) -> str:
    """Format the traceback from the user's first frame on."""
    skipped = (*OUR_FILES, "<frozen importlib", asyncio.__path__[0])
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(skipped):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))


def pack_function(function: Scorer) -> bytes:
    """Pickle a function by value, with all it refers to: it need not be importable where it is loaded."""
    try:
        return custom_functions.pickle_by_value(function, [function])
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RewardError(
            f"{name}: cannot be sent to the reward workers: {error}. It may refer only to plain data and importable "
            "objects; open files, models and locks inside the function"
        ) from error


def unpack_function(function: bytes | Scorer) -> Scorer:
    """Invert `pack_function`; return a function that was not packed as it is."""
    return pickle.loads(function) if isinstance(function, bytes) else function


def _prompt_text(extra_info: Mapping[str, Any] | None, where: str) -> str:
    """Return the prompt as text; for a conversation, the last message."""
    raw = (extra_info or {}).get("raw_prompt")
    if raw is None:
        raise RewardError(f"{where}: takes `prompt`, but the row has no prompt (extra_info['raw_prompt'])")
    return raw if isinstance(raw, str) else str(raw[-1]["content"])
