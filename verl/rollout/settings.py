"""Settings of a rollout engine as its process receives them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import rollout_dtype

if TYPE_CHECKING:
    from typing import Self

    from verl.config.schema import Config


@dataclass(frozen=True, slots=True)
class RolloutEngineSettings:
    """What every rollout engine is told. An engine with more settings has a subclass with its own `from_config`.

    Records cross processes, also to other versions of Python: fields are numbers, texts, and lists, dicts and
    dataclasses of these.
    """

    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int | None = None  # prompt and response; None: that of the model
    trust_remote_code: bool = False
    load_format: str = "dummy"  # "dummy": read no weights, since they will be synced; "auto": read the model's

    @classmethod
    def from_config(cls, config: Config, device: str, index: int) -> Self:
        """Return the settings of engine `index` of a run on devices of type `device`."""
        model = config.actor_rollout_ref.model
        return cls(
            model_path=model.path,
            dtype=rollout_dtype(config, device),
            device=device,
            max_model_len=get_max_sequence_tokens(config),
            trust_remote_code=model.trust_remote_code,
        )


def assign_cores(index: int, width: int) -> str:
    """Return the CPU cores of an engine, one per process; negative indices count from the last core down."""
    return "|".join(str((index * width + part) % (os.cpu_count() or 1)) for part in range(width))
