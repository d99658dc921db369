"""Several rewards as one: weighted, clipped, each part a metric. A part is any reward function, plain or async.

>>> score = weighted({"answer": (right, 1.0), "form": (clipped(tidy, -0.5, 0.5), 0.2)})
>>> score("sums", "46", "46")
{'score': 1.1, 'answer': 1.0, 'form': 0.5}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.rewards.result import require_number

__all__ = ["clipped", "combine", "is_async", "weighted"]

Scorer = Callable[..., Any]
Find = Callable[[str | None, str, Mapping[str, Any]], Scorer]

_KEYS = {"path", "name", "reward_kwargs", "weight", "clip", "label"}


def weighted(parts: Mapping[str, tuple[Scorer, float]]) -> Scorer:
    """The sum of weight times score. Each part's score is a metric by its name, its other numbers `<name>/<key>`."""

    def add_up(results: Sequence[Any]) -> dict[str, Any]:
        total, metrics = 0.0, dict[str, Any]()
        for (name, (_, weight)), result in zip(parts.items(), results, strict=True):
            more = dict(result) if isinstance(result, Mapping) else {"score": result}
            metrics[name] = require_number(f"the score of {name!r}", more.pop("score", None))
            total += weight * metrics[name]
            metrics |= {f"{name}/{key}": value for key, value in more.items()}
        return {"score": total, **metrics}

    def score(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return add_up([scorer(*args, **kwargs) for scorer, _ in parts.values()])

    async def score_async(*args: Any, **kwargs: Any) -> dict[str, Any]:
        import asyncio

        return add_up(await asyncio.gather(*(_whatever(scorer, args, kwargs) for scorer, _ in parts.values())))

    return score_async if any(is_async(scorer) for scorer, _ in parts.values()) else score


def clipped(scorer: Scorer, low: float, high: float) -> Scorer:
    """The same reward, its score held between `low` and `high`."""

    def clip(result: Any) -> Any:
        if isinstance(result, Mapping):
            return {**result, "score": clip(result["score"])} if "score" in result else result
        return min(max(require_number("the score", result), low), high)

    def score(*args: Any, **kwargs: Any) -> Any:
        return clip(scorer(*args, **kwargs))

    async def score_async(*args: Any, **kwargs: Any) -> Any:
        return clip(await scorer(*args, **kwargs))

    return score_async if is_async(scorer) else score


def combine(specs: Sequence[Mapping[str, Any]], find: Find) -> Scorer:
    """One reward of several, each given as {path, name, reward_kwargs, weight, clip: [low, high], label}.

    `find(path, name, reward_kwargs)` loads a function; path null is the shipped scorer of the row's data source. The
    label is the part's name among the metrics: without one, the function's name, or its file's for a `compute_score`.
    """
    parts: dict[str, tuple[Scorer, float]] = {}
    for place_in_list, spec in enumerate(specs):
        place = f"reward.functions[{place_in_list}]"
        unknown = sorted(spec.keys() - _KEYS)
        if unknown:
            raise RewardError(f"{place}.{unknown[0]}: there is no such key; it has: {', '.join(sorted(_KEYS))}")
        path, name, kwargs = spec.get("path"), spec.get("name", "compute_score"), spec.get("reward_kwargs") or {}
        label = spec.get("label") or (name if name != "compute_score" else Path(path or "shipped").stem)
        if label in parts or label == "score":
            raise RewardError(f"{place}: {label!r} is already the name of a metric; give it another with label=...")
        scorer = find(path, name, kwargs)
        scorer = partial(scorer, **kwargs) if kwargs else scorer
        clip = spec.get("clip")
        if clip is not None:
            if len(clip) != 2 or not clip[0] <= clip[1]:
                raise RewardError(f"{place}.clip={clip}: must be [low, high], the low one first")
            scorer = clipped(scorer, float(clip[0]), float(clip[1]))
        parts[label] = scorer, float(spec.get("weight", 1.0))
    return weighted(parts)


def is_async(scorer: Scorer) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(getattr(scorer, "__call__", None))  # noqa: B004


async def _whatever(scorer: Scorer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    result = scorer(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
