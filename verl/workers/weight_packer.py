"""Packs the weights of a train worker into buckets, one at a time, while rollout engines load the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verl.cluster.object_store import put
from verl.weights.bucket import SharedBucket, SharedBuffer, WeightBucket, allocate_memory, pack

OPEN_BUCKETS = 2  # the one that is loaded, and the one that is packed


class WeightPacker:
    """The weights of one rank. Rank 0 returns buckets; all others take part in gathering.

    On a machine that the engines share, buckets are files in memory, and never copied. Else they go into the
    object store.
    """

    def __init__(
        self, gather: Callable[[], Iterator[tuple[str, Tensor]]], *, max_bytes: int, is_one_machine: bool
    ) -> None:
        self._gather, self._max_bytes, self._is_one_machine = gather, max_bytes, is_one_machine
        self._buckets: Iterator[WeightBucket] = iter(())
        self._buffers: deque[SharedBuffer] = deque()

    def start(self) -> None:
        """Begin with the first weights."""
        allocate = self._allocate if self._is_one_machine else allocate_memory
        self._buckets = pack(self._gather(), max_bytes=self._max_bytes, allocate=allocate)

    def pack_next(self) -> object:
        """Return the next bucket, or a reference to it; None after the last one."""
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        if self._is_one_machine:
            return SharedBucket(bucket.slots, self._buffers[-1].path, bucket.data.nbytes)
        return put(bucket)

    def finish(self) -> None:
        """Gather what is left, for the other ranks, and free the buckets: all engines have loaded them."""
        deque(self._buckets, maxlen=0)
        while self._buffers:
            self._buffers.popleft().close()

    def gather_all(self) -> None:
        """Take part in gathering all weights, for rank 0."""
        deque(self._gather(), maxlen=0)

    def _allocate(self, size: int) -> npt.NDArray[np.uint8]:
        self._buffers.append(SharedBuffer(size))
        if len(self._buffers) > OPEN_BUCKETS:
            self._buffers.popleft().close()
        return self._buffers[-1].data
