"""Settings of reward functions, reward models and the overlong penalty, as they are sent to workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardFunctionSettings:
    """The reward function to load, and how it is called.

    `path` is a Python file or `package.module`; None chooses a built-in scorer by each row's data source. `kwargs` are
    passed to every call. `functions` are several functions to add up (`compose.combine`), instead of one. With a
    `batch_size`, the function is called with lists of up to that many responses. `builtin_kwargs` are further arguments
    of built-in scorers, by module. `function` is a function object, or a packed one, that is used instead of `path`.

    `workers` processes run the function, each with `memory_mb` (None: no limit); 0: the process of the caller runs it.
    `timeout_s` limits one call.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    functions: Sequence[Mapping[str, Any]] = ()
    batch_size: int | None = None
    builtin_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    function: bytes | Callable[..., Any] | None = None
    workers: int = 1
    timeout_s: float = 300.0
    memory_mb: int | None = None

    @property
    def is_batched(self) -> bool:
        return self.batch_size is not None and not self.functions

    @property
    def label(self) -> str:
        """The function's name in messages: `my_reward.py:compute_score`."""
        if self.functions:
            parts = (RewardFunctionSettings(part.get("path"), part.get("name", self.name)) for part in self.functions)
            return " + ".join(part.label for part in parts)
        return "the built-in scorer" if self.path is None else f"{self.path}:{self.name}"


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Overlong reward shaping (DAPO): the last `buffer` of `max_length` tokens cost up to `factor`."""

    buffer: int
    factor: float
    max_length: int

    def compute(self, length: int) -> float:
        """Return 0 up to `max_length - buffer` tokens, then linearly less, down to `-factor` from `max_length` on."""
        over = min(length, self.max_length) - (self.max_length - self.buffer)
        return -self.factor * (over / self.buffer) if over > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """A reward model, and the size and timeout of its batches.

    `factory` is the `RewardModel` of an engine as package.module:name; it is called with these settings.
    """

    factory: str
    model_path: str
    batch: int
    deadline_s: float
    dtype: str = "float32"
    device: str = "cpu"
    trust_remote_code: bool = False
    memory_fraction: float = 0.5  # of the device
    tensor_parallel_size: int = 1
    deterministic: bool = False  # scores do not depend on other conversations
    cpu_cores: str = ""
    external_modules: Sequence[str] = ()  # imported before the model is loaded
