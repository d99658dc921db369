"""Several reward functions as one: weighted, clipped, each part a metric. A part is any reward function, sync or async.

>>> score = add_weighted({"correct": (is_correct, 1.0), "format": (clip_score(has_format, -0.5, 0.5), 0.2)})
>>> score("sums", "46", "46")
{'score': 1.1, 'correct': 1.0, 'format': 0.5}
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.rewards.result import require_number

Scorer = Callable[..., Any]
LoadFunction = Callable[[str | None, str, Mapping[str, Any]], Scorer]

_KEYS = {"path", "name", "reward_kwargs", "weight", "clip", "label"}


def add_weighted(parts: Mapping[str, tuple[Scorer, float]]) -> Scorer:
    """Return a function whose score is the sum of weight times score.

    Each part's score becomes a metric of the part's name, its other numbers metrics `<name>/<key>`.
    """

    def add(results: Sequence[Any]) -> dict[str, Any]:
        total, metrics = 0.0, dict[str, Any]()
        for (name, (_, weight)), result in zip(parts.items(), results, strict=True):
            more = dict(result) if isinstance(result, Mapping) else {"score": result}
            metrics[name] = require_number(f"the score of {name!r}", more.pop("score", None))
            total += weight * metrics[name]
            metrics |= {f"{name}/{key}": value for key, value in more.items()}
        return {"score": total, **metrics}

    return _combine_results([scorer for scorer, _ in parts.values()], add)


def clip_score(scorer: Scorer, low: float, high: float) -> Scorer:
    """Return the same function with its score limited to [low, high]."""

    def clip(result: Any) -> Any:
        if isinstance(result, Mapping):
            return {**result, "score": clip(result["score"])} if "score" in result else result
        return min(max(require_number("the score", result), low), high)

    return _combine_results([scorer], lambda results: clip(results[0]))


def combine(specs: Sequence[Mapping[str, Any]], load: LoadFunction) -> Scorer:
    """Build one function from `reward.functions`: {path, name, reward_kwargs, weight, clip: [low, high], label} each.

    `load(path, name, reward_kwargs)` loads a function; without a path it is the built-in scorer of the row's data
    source. The label names the part's metric; by default it is the function's name, or its file's for `compute_score`.
    """
    parts: dict[str, tuple[Scorer, float]] = {}
    for index, spec in enumerate(specs):
        setting = f"reward.functions[{index}]"
        unknown = sorted(spec.keys() - _KEYS)
        if unknown:
            raise RewardError(f"{setting}.{unknown[0]}: unknown key; known keys: {', '.join(sorted(_KEYS))}")
        path, name, kwargs = spec.get("path"), spec.get("name", "compute_score"), spec.get("reward_kwargs") or {}
        label = get_label(spec)
        if label in parts or label == "score":
            raise RewardError(f"{setting}: the metric name {label!r} is already used; set another with label=...")
        scorer = load(path, name, kwargs)
        scorer = partial(scorer, **kwargs) if kwargs else scorer
        clip = spec.get("clip")
        if clip is not None:
            if len(clip) != 2 or not clip[0] <= clip[1]:
                raise RewardError(f"{setting}.clip={clip}: must be [low, high] with low <= high")
            scorer = clip_score(scorer, float(clip[0]), float(clip[1]))
        parts[label] = scorer, float(spec.get("weight", 1.0))
    return add_weighted(parts)


def get_label(spec: Mapping[str, Any]) -> str:
    """Return the name of a part of `reward.functions`, by which its score is a metric."""
    path, name = spec.get("path"), spec.get("name", "compute_score")
    return str(spec.get("label") or (name if name != "compute_score" else Path(path or "shipped").stem))


def is_async(scorer: Scorer) -> bool:
    """Return whether calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


def _combine_results(scorers: Sequence[Scorer], combine: Callable[[Sequence[Any]], Any]) -> Scorer:
    """Return a function that calls all of `scorers`, async if one of them is, and combines their results."""

    def score(*args: Any, **kwargs: Any) -> Any:
        return combine([scorer(*args, **kwargs) for scorer in scorers])

    async def score_async(*args: Any, **kwargs: Any) -> Any:
        return combine(await asyncio.gather(*(_call(scorer, args, kwargs) for scorer in scorers)))

    return score_async if any(map(is_async, scorers)) else score


async def _call(scorer: Scorer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    result = scorer(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
