"""Packs the weights of a train worker into buckets, one at a time, while rollout engines load the previous one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from verl.cluster.object_store import put
from verl.types import LocalShard
from verl.weights.bucket import Allocate, SharedBucket, SharedBuffer, WeightBucket, allocate_memory, pack

OPEN_BUCKETS = 2  # one is loaded while the next is packed
FIRST_SHARE = 8  # the first bucket is smaller by this factor, so that engines soon have something to load


Weights = Iterator[tuple[str, Tensor]]
Shards = Iterator[tuple[str, LocalShard]]


class WeightPacker:
    """The weights of one rank. Rank 0 returns buckets; all others take part.

    Buckets go into the object store. On a machine that the engines share they are files in memory instead, and never
    copied. There, all ranks write what they have of each weight (`shards`) into the same files; where that is not
    possible, or on several machines, rank 0 writes weights that all ranks `gather`.
    """

    def __init__(
        self,
        gather: Callable[[], Weights],
        *,
        max_bytes: int,
        is_one_machine: bool,
        shards: Callable[[], Shards | None] = lambda: None,
    ) -> None:
        self._gather, self._shards, self._is_one_machine = gather, shards, is_one_machine
        self._max_bytes = max_bytes
        self._buckets: Iterator[WeightBucket] = iter(())
        self._buffers: deque[SharedBuffer] = deque()

    def start(self) -> None:
        """Begin with the first weights; for rank 0."""
        if self._is_one_machine and (shards := self._shards()) is not None:
            self._buckets = self._pack_together(shards, self._allocate_for_all)
        else:
            allocate = self._allocate if self._is_one_machine else allocate_memory
            self._buckets = self._pack(self._gather(), allocate)

    def pack_next(self) -> object:
        """Return the next bucket, or a reference to it; None after the last one."""
        bucket = next(self._buckets, None)
        if bucket is None:
            self._free_buffers(keep=1)  # engines still load the last bucket
            return None
        if self._is_one_machine:
            return SharedBucket(bucket.slots, self._buffers[-1].path, bucket.data.nbytes)
        return put(bucket)

    def finish(self) -> None:
        """Pack what is left, for the other ranks, and free the buckets: all engines have loaded them."""
        deque(self._buckets, maxlen=0)
        self._free_buffers(keep=0)

    def take_part(self) -> None:
        """Do the part of this rank for all weights, while rank 0 packs."""
        if self._is_one_machine and (shards := self._shards()) is not None:
            deque(self._pack_together(shards, self._map), maxlen=0)
        else:
            deque(self._gather(), maxlen=0)

    def _pack(self, weights: Weights | Shards, allocate: Allocate) -> Iterator[WeightBucket]:
        first_bytes = self._max_bytes // FIRST_SHARE
        return pack(weights, max_bytes=self._max_bytes, first_bytes=first_bytes, allocate=allocate)

    def _pack_together(self, shards: Shards, allocate: Allocate) -> Iterator[WeightBucket]:
        for bucket in self._pack(shards, allocate):
            dist.barrier()  # all ranks have written
            yield bucket

    def _allocate(self, size: int) -> npt.NDArray[np.uint8]:
        """Return a new buffer. An old one must not be written to: vLLM reads it until it has all weights of a layer."""
        self._buffers.append(SharedBuffer(size))
        self._free_buffers(keep=OPEN_BUCKETS)
        return self._buffers[-1].data

    def _free_buffers(self, *, keep: int) -> None:
        while len(self._buffers) > keep:
            self._buffers.popleft().close()

    def _allocate_for_all(self, size: int) -> npt.NDArray[np.uint8]:
        data = self._allocate(size)
        dist.broadcast_object_list([self._buffers[-1].path])
        return data

    def _map(self, size: int) -> npt.NDArray[np.uint8]:
        """Wait for the buffer that rank 0 has allocated."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received)
        return np.memmap(received[0], np.uint8, "r+", shape=(size,))
