"""A reward function: found, checked once, then called for every finished answer. A failure is never a silent 0.

The user writes `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or async, and gives its
file (or `package.module`) as `reward.custom_reward_function.path`. It returns a number, or a dict whose "score" is the
reward and whose other numbers are logged. Without a path, shipped scorers are chosen by the row's data source.

What is here runs in the process that it is called in; `pool.py` runs it in processes that may hang and die.
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
from types import MappingProxyType, ModuleType
from typing import Any

from verl.errors import RewardError
from verl.rewards import compose
from verl.rewards.function_io import adapt_by_name, unpack_function
from verl.rewards.result import Failed, RewardInput, RewardResult, Scored, make_failure, parse_result, truncate

__all__ = [
    "BUILTIN_SCORERS",
    "RewardFunction",
    "describe_scorer",
    "explain_no_scorer",
    "format_function_name",
    "has_builtin_scorer",
    "load_reward",
]

Scorer = Callable[..., Any]
Arguments = Mapping[str, Mapping[str, Any]]
"""Module of a shipped scorer -> further arguments of its `compute_score`."""

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
"""Data source -> module of its `compute_score`, for runs without a function of their own."""

_SETTING = "reward.custom_reward_function"
_BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class RewardFunction:
    """Scores answers in this process. Load it in the process that scores: a function from a file does not travel.

    >>> score, metrics = await load_reward("my_reward.py").score("gsm8k", "... #### 72", "72")
    """

    def __init__(
        self,
        scorer: Scorer | None,
        where: str,
        kwargs: Mapping[str, Any],
        *,
        batched: bool = False,
        shipped: Arguments = MappingProxyType({}),
    ) -> None:
        self.where, self.batched = where, batched
        self.is_async = scorer is not None and compose.is_async(scorer)
        self.note: Callable[[str], None] = logging.getLogger(__name__).warning
        self._scorer = scorer
        self._kwargs, self._shipped = dict(kwargs), shipped
        self._skipped: set[str] = set()

    def call(self, answer: RewardInput) -> Any:
        """What the function returns, as it is; of an async one, the coroutine."""
        scorer = self._scorer or _shipped(answer.data_source, self._shipped)
        return scorer(**answer._asdict(), **self._kwargs)

    def call_batch(self, answers: Sequence[RewardInput]) -> Any:
        """What a batched function returns, as it is."""
        assert self._scorer is not None
        columns = dict(zip(_BATCHED, map(list, zip(*answers, strict=True)), strict=True))
        return self._scorer(**columns, **self._kwargs)

    def to_result(self, result: Any, answer: RewardInput) -> RewardResult:
        """What was returned, read as a score; foreign objects may do anything when they are looked at."""
        try:
            score, metrics, skipped = parse_result(result)
        except ValueError as error:
            return make_failure("invalid", self.where, str(error), answer)
        except Exception as error:  # noqa: BLE001 - the user's own object: reported like the user's own function
            return self.make_error(error, answer)
        for key in sorted(skipped.keys() - self._skipped):
            self._skipped.add(key)
            self.note(f"{self.where}: {key!r} is {skipped[key]}, no number: it is not logged")
        return Scored(score, metrics)

    def to_results(self, result: Any, answers: Sequence[RewardInput]) -> list[RewardResult]:
        """One outcome an answer; all of them fail when the function did not return one result for each."""
        if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
            what = f"returned {truncate(result)} for {len(answers)} answers: a batched function returns a list"
        elif len(result) != len(answers):
            what = f"returned {len(result)} results for {len(answers)} answers"
        else:
            return [self.to_result(one, answer) for one, answer in zip(result, answers, strict=True)]
        return [make_failure("invalid", self.where, what, answer) for answer in answers]

    def make_error(self, error: BaseException, answer: RewardInput) -> Failed:
        """The failure of one answer by an exception, with its traceback from the user's first frame on."""
        what = f"raised {type(error).__name__}\n{_users_traceback(error)}"
        mend = "use less memory, or allow more with reward.memory_mb" if isinstance(error, MemoryError) else ""
        return make_failure("error", self.where, what, answer, mend)

    async def score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> tuple[float, dict[str, float]]:
        """The reward of one answer and the other numbers that came with it, to try a function out: no deadline.

        A failure is a `RewardError`.
        """
        answer = RewardInput(data_source, solution_str, ground_truth, extra_info)
        if self._scorer is None:
            _shipped(data_source, self._shipped)  # an unknown source is a mistake in the data, not in a function
        try:
            result = self.call(answer)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise RewardError(self.make_error(error, answer).message) from error
        outcome = self.to_result(result, answer)
        if isinstance(outcome, Failed):
            raise RewardError(outcome.message)
        return outcome.score, outcome.metrics


def load_reward(
    path: str | None,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    functions: Sequence[Mapping[str, Any]] = (),
    batched: bool = False,
    shipped: Arguments = MappingProxyType({}),
    function: bytes | Scorer | None = None,
    prompts: bool = True,
) -> RewardFunction:
    """The user's function `name` from `path` (a file, or `package.module`), or the shipped scorers when path is None.

    `kwargs` (`reward.custom_reward_function.reward_kwargs`) are handed to every call. `functions` are several, weighted
    and added up (`compose.combine`), instead of one. A `batched` function is called with lists: (data_sources,
    solution_strs, ground_truths, extra_infos) -> results. `shipped` holds further arguments of shipped scorers, by
    module; what they ask of this machine is asked now. A `function` that was given as one, or packed for its way here,
    takes the place of that in `path`, which is then only its name. Where `prompts` are not kept, one that asks for them
    is refused now, and not at its first answer.
    """
    kwargs, where = kwargs or {}, format_function_name(path, name, functions)
    paths = {one.get("path") for one in functions} if functions else {path}
    for module in shipped:
        if paths & {None, module}:
            importlib.import_module(module).check_requirements(**shipped[module])
    if functions:
        return RewardFunction(compose.combine(functions, partial(_find, shipped=shipped, prompts=prompts)), where, {})
    if path is None:
        if kwargs or batched:
            given = f"reward_kwargs={dict(kwargs)!r}" if kwargs else "path=null"
            takes = "take no arguments" if kwargs else "take one answer at a time, and reward_manager.name=batch many"
            raise RewardError(
                f"{_SETTING}.{given}: the shipped scorers {takes}; "
                f"leave it out, or give your own function with {_SETTING}.path=my_reward.py"
            )
        return RewardFunction(None, where, {}, shipped=shipped)
    if function is not None:
        scorer = _fitting(unpack_function(function), where, kwargs, batched=batched, prompts=prompts)
    else:
        scorer = _find(path, name, kwargs, batched=batched, shipped=shipped, prompts=prompts)
    return RewardFunction(scorer, where, kwargs, batched=batched)


def format_function_name(
    path: str | None, name: str = "compute_score", functions: Sequence[Mapping[str, Any]] = ()
) -> str:
    """How messages call it: `my_reward.py:compute_score`."""
    if functions:
        return " + ".join(format_function_name(one.get("path"), one.get("name", "compute_score")) for one in functions)
    return "the shipped scorer" if path is None else f"{path}:{name}"


def describe_scorer(
    data_source: str,
    path: str | None,
    name: str = "compute_score",
    functions: Sequence[Mapping[str, Any]] = (),
) -> str | None:
    """What scores the rows of this data source, as messages call it; None when nothing does. Loads nothing.

    >>> scorer_of("gsm8k", None), scorer_of("gsm8k", "my_reward.py"), scorer_of("mine", None)
    ('verl.rewards.scorers.gsm8k', 'my_reward.py:compute_score', None)
    """
    paths = [one.get("path") for one in functions] if functions else [path]
    if None in paths and not has_builtin_scorer(data_source):
        return None
    return BUILTIN_SCORERS[data_source] if paths == [None] else format_function_name(path, name, functions)


def explain_no_scorer(data_source: str) -> str:
    """What to do about a data source that no shipped scorer knows."""
    near = difflib.get_close_matches(data_source, BUILTIN_SCORERS, n=1)
    known = f"did you mean {near[0]!r}?" if near else f"they know {', '.join(sorted(BUILTIN_SCORERS))}."
    what = f"data_source {data_source!r}: no shipped scorer knows it; {known} Correct the column"
    if not data_source:
        what = "data_source: rows without one have no shipped scorer. Add the column"
    return f"{what}, or give your own function with {_SETTING}.path=my_reward.py (in Python: reward=my_function)"


def has_builtin_scorer(data_source: str) -> bool:
    """Whether a shipped scorer knows this data source."""
    return data_source in BUILTIN_SCORERS


def _find(
    path: str | None,
    name: str,
    kwargs: Mapping[str, Any],
    *,
    batched: bool = False,
    shipped: Arguments,
    prompts: bool,
) -> Scorer:
    """The function, found and held to its signature."""
    if path is None:
        return lambda **answer: _shipped(answer["data_source"], shipped)(**answer)
    module, where = _load_module(path), format_function_name(path, name)
    scorer = getattr(module, name, None)
    if scorer is None:
        functions = [key for key, value in vars(module).items() if _defined_here(value, module)]
        has = f"it has: {', '.join(functions)}" if functions else "it defines no function"
        choice = functions[0] if len(functions) == 1 else "..."
        raise RewardError(f"{where}: there is no {name!r} in the file; {has}. Choose one with {_SETTING}.name={choice}")
    if not callable(scorer):
        raise RewardError(f"{where}: is a {type(scorer).__name__}, not a function; choose one with {_SETTING}.name=...")
    scorer = _fitting(scorer, where, kwargs, batched=batched, prompts=prompts)
    return partial(scorer, **shipped[path]) if path in shipped else scorer


def _fitting(scorer: Scorer, where: str, kwargs: Mapping[str, Any], *, batched: bool, prompts: bool) -> Scorer:
    """The function as it will be called: by the names that it gives its parameters, or as `compute_score` is."""
    if not batched and (by_name := adapt_by_name(scorer, where, kwargs, prompts=prompts)) is not None:
        return by_name
    _check_signature(scorer, where, kwargs, _BATCHED if batched else RewardInput._fields)
    return scorer


def _shipped(data_source: str, arguments: Arguments) -> Scorer:
    if not has_builtin_scorer(data_source):
        raise RewardError(explain_no_scorer(data_source))
    module = BUILTIN_SCORERS[data_source]
    return partial(importlib.import_module(module).compute_score, **arguments.get(module, {}))


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
        raise RewardError(f"{_SETTING}.path={path}: failed while it was imported\n{_users_traceback(error)}") from error


def _check_signature(scorer: Scorer, where: str, kwargs: Mapping[str, Any], parameters: Sequence[str]) -> None:
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # some builtins tell no signature: the first call will
        return
    try:
        signature.bind(**dict.fromkeys(parameters), **kwargs)
    except TypeError as error:
        extra = f", and reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        mend = _of_its_own(signature, kwargs)
        mend = mend or f"declare it as compute_score({', '.join(parameters[:-1])}, {parameters[-1]}=None)"
        raise RewardError(
            f"{where}: has the signature {signature}, but is called by name with "
            f"{', '.join(parameters[:-1])} and {parameters[-1]}{extra} ({error}); {mend}"
        ) from None


def _of_its_own(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """The mend where a function names its own arguments, and one of them is missing or there is none of that name."""
    own = {name: one for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    missing = [name for name, one in own.items() if one.default is one.empty and name not in kwargs]
    if missing:
        return f"set {_SETTING}.reward_kwargs.{missing[0]}=..."
    unknown = [name for name in kwargs if name not in signature.parameters]
    return f"of its own it takes {', '.join(own)}; leave {unknown[0]} out" if own and unknown else ""


def _defined_here(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _users_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: ours help nobody."""
    names = ("reward_function", "compose", "function_io", "pool/worker", "pool/in_process")
    ours = tuple(str(Path(__file__).parent / f"{name}.py") for name in names)
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(
        (*ours, "<frozen importlib", asyncio.__path__[0])
    ):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
