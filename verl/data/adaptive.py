"""Adaptive samplers: the next prompt depends on the scores of earlier ones.

A sampler is any class with the methods of `ScoreAware`, made as `cls(rows, seed, column, **sampler_kwargs)`. `row` is
called once for every position, in order. `record` is called in the order of positions too, when the trainer takes the
finished groups of a step, and not when they finish: the order of prompts follows from the seed and the scores, whatever
the timing. The state is part of checkpoints, together with the rows that were drawn but not recorded yet.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from verl.config.schema.data import DataConfig
from verl.custom_functions import load_function
from verl.data.samplers import Sampler, ShuffledSampler, make_random
from verl.errors import ConfigError, DataError

MAX_TRIES = 100  # attempts to draw a row that is not in flight

Column = Callable[[str], list[Any]]


class ScoreAware(Protocol):
    """The methods of an adaptive sampler."""

    def row(self, position: int) -> int:
        """Return the row of the next position."""

    def record(self, row: int, scores: Sequence[float]) -> None:
        """Record the scores of one group of responses to a row; empty if none could be scored."""

    def state(self) -> dict[str, Any]:
        """Return all that `row` depends on, as JSON: dicts with text as keys, lists, numbers and text."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class _MeanScores:
    """The recent mean score of each row, and the rows in flight: drawn, but not recorded yet.

    A mean counts the last group of a row half, the one before a quarter, and so on. Scores are clamped to 0 to 1.
    """

    def __init__(self, rows: int) -> None:
        self.means = np.full(rows, np.nan)  # NaN: never scored
        self._in_flight: Counter[int] = Counter()

    def start(self, row: int) -> int:
        self._in_flight[row] += 1
        return row

    def is_in_flight(self, row: int) -> bool:
        return self._in_flight[row] > 0

    def record(self, row: int, scores: Sequence[float]) -> None:
        self._in_flight[row] -= 1
        if scores:
            mean, before = min(max(fmean(scores), 0.0), 1.0), float(self.means[row])
            self.means[row] = mean if np.isnan(before) else (before + mean) / 2

    def state(self) -> dict[str, Any]:
        scored = np.flatnonzero(~np.isnan(self.means))
        return {
            "rows": scored.tolist(),
            "means": self.means[scored].tolist(),
            "in_flight": sorted(self._in_flight.elements()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.means[:] = np.nan
        self.means[state["rows"]] = state["means"]
        self._in_flight = Counter(state["in_flight"])


class DifficultySampler:
    """Draws prompts by measured difficulty: most often those whose recent mean score is near `target`.

    The weight of a row falls linearly with the distance from `target`, from 1 to `floor`. Rows without a score have
    weight 1. A row is not drawn again while it is in flight.
    """

    def __init__(self, rows: int, seed: int, column: Column, *, target: float = 0.5, floor: float = 0.05) -> None:
        if not 0 <= target <= 1:
            raise ValueError(f"target={target}: is a mean score, from 0 to 1")
        if not 0 < floor <= 1:
            raise ValueError(f"floor={floor}: must be above 0, or solved prompts are never tried again; at most 1")
        self._seed, self._target, self._floor = seed, target, floor
        self._scores = _MeanScores(rows)
        self._sums: np.ndarray | None = None  # cumulative weights; None after a change

    def row(self, position: int) -> int:
        if self._sums is None:
            distance = np.abs(self._scores.means - self._target) / max(self._target, 1 - self._target)
            self._sums = np.cumsum(np.nan_to_num(1 - distance, nan=1.0).clip(self._floor, 1.0))
        random, row = make_random(self._seed, position), 0
        for _ in range(MAX_TRIES):
            row = int(np.searchsorted(self._sums, random.random_sample() * self._sums[-1], side="right"))
            if not self._scores.is_in_flight(row):
                break
        return self._scores.start(row)

    def record(self, row: int, scores: Sequence[float]) -> None:
        self._scores.record(row, scores)
        self._sums = None

    def state(self) -> dict[str, Any]:
        return self._scores.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._scores.load_state(state)
        self._sums = None


class ReplaySampler:
    """Shuffled epochs, in which `fraction` of all draws are replays: rows whose recent mean score is below `threshold`.

    Replays are spread evenly over the batch. While no row is hard, or all of them are in flight, the next row of the
    epoch comes instead.
    """

    def __init__(self, rows: int, seed: int, column: Column, *, fraction: float = 0.25, threshold: float = 0.5) -> None:
        if not 0 < fraction < 1:
            raise ValueError(f"fraction={fraction}: must be between 0 and 1")
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold}: is a mean score, above 0 and at most 1")
        self._seed, self._fraction, self._threshold = seed, fraction, threshold
        self._epochs = ShuffledSampler(rows, seed)
        self._scores = _MeanScores(rows)
        self._position = 0  # in the epochs, without replays

    def row(self, position: int) -> int:
        if int((position + 1) * self._fraction) > int(position * self._fraction):
            hard = np.flatnonzero(self._scores.means < self._threshold)
            free = [row for row in hard.tolist() if not self._scores.is_in_flight(row)]
            if free:
                return self._scores.start(free[make_random(self._seed, position).randint(len(free))])
        self._position += 1
        return self._scores.start(self._epochs.row(self._position - 1))

    def record(self, row: int, scores: Sequence[float]) -> None:
        self._scores.record(row, scores)

    def state(self) -> dict[str, Any]:
        return {"position": self._position, **self._scores.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        self._scores.load_state(state)


SAMPLERS: dict[str, Callable[..., ScoreAware]] = {"difficulty": DifficultySampler, "replay": ReplaySampler}
"""`data.sampler` -> class."""


class AdaptiveSampler(Sampler):
    """A `ScoreAware` object as a sampler, with checks of what it returns."""

    is_adaptive = True

    def __init__(
        self, make: Callable[..., ScoreAware], name: str, rows: int, seed: int, column: Column, kwargs: dict[str, Any]
    ) -> None:
        super().__init__(rows, {"sampler": name, "seed": seed, "sampler_kwargs": kwargs})
        self._name, self._inner = name, make(rows, seed, column, **kwargs)
        methods = [method for method in vars(ScoreAware) if not method.startswith("_")]
        if missing := [method for method in methods if not callable(getattr(self._inner, method, None))]:
            raise self._error(f"has no method {missing[0]}; an adaptive sampler has {', '.join(methods)}")

    def row(self, position: int) -> int:
        """Draw the row of the next position. Each position is drawn once."""
        row = self._inner.row(position)
        if not isinstance(row, int | np.integer) or not 0 <= row < self.length:
            raise self._error(f"returned {row!r} at position {position}; rows go from 0 to {self.length - 1}")
        return int(row)

    def record(self, row: int, scores: Sequence[float]) -> None:
        """Report the scores of a group, in the order of positions."""
        self._inner.record(row, scores)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state = self._inner.state()
        try:
            if json.loads(json.dumps(state)) == state:
                return state
        except (TypeError, ValueError):
            pass
        raise self._error("returned a state that changes when it is saved as JSON; use dicts, lists, numbers and text")

    def load_state(self, state: dict[str, Any]) -> None:
        self._inner.load_state(state)

    def _error(self, problem: str) -> DataError:
        return DataError(f"data.sampler={self._name} {problem}")


def takes_scores(sampler: Callable[..., Any]) -> bool:
    """Return whether what `data.sampler` names is a class of adaptive samplers, not a function for whole epochs."""
    return inspect.isclass(sampler)


def load_sampler(data: DataConfig) -> Callable[..., Any]:
    """Load what data.sampler names, a class or a function, and check that it takes data.sampler_kwargs."""
    assert data.sampler is not None
    try:
        sampler = load_function(data.sampler, SAMPLERS, "data.sampler")
        arguments = ("rows", "seed", "column") if takes_scores(sampler) else ("epoch", "seed", "rows", "column")
        inspect.signature(sampler).bind(*arguments, **data.sampler_kwargs)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    except TypeError as error:
        given = ", ".join([*arguments, *(f"{key}=..." for key in data.sampler_kwargs)])
        problem = f"data.sampler: {data.sampler} cannot be called with ({given}): {error}"
        raise ConfigError([f"{problem}; check data.sampler_kwargs"]) from error
    return sampler
