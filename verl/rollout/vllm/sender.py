"""The sending end of vLLM's device transports, on the train workers. Never run on a GPU.

vLLM implements both ends of its "nccl" and "ipc" backends; this gives it the weights and a client of the engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, WeightTransferInitRequest
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest as UpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from verl.rollout.vllm.ipc_handles import encode_handles
from verl.weights.sender import EngineClient, SenderSettings
from verl.weights.sender import WeightSource as TrainedWeights


class _Source(WeightSource):
    """The train engine's weights in the form that vLLM's trainer-side engines expect."""

    def __init__(self, engine: TrainedWeights, dtype: torch.dtype) -> None:
        self._engine, self._dtype = engine, dtype
        self._metadata = [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in engine.weight_shapes(dtype)]

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(each.dtype.itemsize * math.prod(each.shape) for each in self._metadata)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.weights(self._dtype)


class _Control:
    """vLLM's control-plane protocol on an `EngineClient`; sets the version when an update ends."""

    def __init__(self, client: EngineClient, width: int) -> None:
        self._client, self._width = client, width
        self.version = -1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def arguments(engine: int) -> tuple[Any, ...]:
            offset = engine * self._width
            shifted = {"rank_offset": init_info["rank_offset"] + offset} if "rank_offset" in init_info else {}
            return (WeightTransferInitRequest(init_info=init_info | shifted),)

        self._client("init_weight_transfer_engine", arguments)

    def start_weight_update(self) -> None:
        self._client("start_weight_update", lambda engine: ())

    def update_weights(self, update_info: Any) -> None:
        if "ipc_handles" in update_info:
            update_info = update_info | {"ipc_handles": encode_handles(update_info["ipc_handles"])}
        self._client("update_weights", lambda engine: (UpdateRequest(update_info=update_info),))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client("finish_weight_update", lambda engine: (self.version,))


class VllmSender:
    """A `WeightSender` by vLLM's trainer-side engines."""

    def __init__(self, settings: SenderSettings, source: TrainedWeights, client: EngineClient) -> None:
        weights = _Source(source, settings.dtype)
        options: dict[str, Any] = {
            "rank": settings.rank,
            "packed": True,
            "packed_buffer_size_bytes": max(settings.bucket_bytes, weights.largest),
        }
        info = (
            NCCLTrainerInitInfo(*settings.address, settings.engines * settings.width + 1, **options)
            if settings.transport == "nccl"
            else IPCTrainerInitInfo(**options)
        )
        self._control = _Control(client, settings.width)
        self._sender = WeightTransferTrainerFactory.trainer_init(info, client=self._control, source=weights)

    def send(self, version: int) -> None:
        self._control.version = version
        self._sender.send_weights()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
