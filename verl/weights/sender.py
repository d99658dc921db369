"""Sending weights from device to device: what a train worker asks of the sender of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class WeightSource(Protocol):
    """The trained model of a rank, as weights with the names of a Hugging Face checkpoint."""

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what `weights` yields, on the meta device."""
        ...


EngineClient = Callable[[str, Callable[[int], tuple[Any, ...]]], None]
"""(method, arguments): calls the method of every rollout engine, engine k with `arguments(k)`, and waits for all."""


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """Settings of a sender: one of the engine's `device_transports`, and who takes part.

    Attributes:
        transport: The value of `weight_transport`.
        rank: The train rank.
        dtype: Of the weights that are sent.
        engines: Number of rollout engines.
        width: Devices of an engine.
        bucket_bytes: How much is sent at once.
        address: A free port of this machine, by which the engines can reach it.
    """

    transport: str
    rank: int
    dtype: torch.dtype
    engines: int
    width: int
    bucket_bytes: int
    address: tuple[str, int]


class WeightSender(Protocol):
    """One per train rank: rank 0 sends, the others take part in gathering the shards."""

    def __init__(self, settings: SenderSettings, source: WeightSource, client: EngineClient) -> None: ...

    def send(self, version: int) -> None:
        """Send all weights to all engines, which use them as `version` afterwards."""
        ...
