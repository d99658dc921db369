"""Packs the weights of a train worker into buckets, one at a time, while rollout engines load the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verl.cluster.object_store import put
from verl.weights.bucket import SharedBucket, SharedBuffer, WeightBucket, count_buckets, pack

OPEN_BUCKETS = 2  # the one that is loaded, and the one that is packed


class WeightPacker:
    """The weights of one rank. Rank 0 returns buckets; all others take part in gathering.

    On a machine that the engines share, buckets are files in memory, and never copied. Else they go into the
    object store.
    """

    def __init__(
        self,
        gather: Callable[[], Iterator[tuple[str, Tensor]]],
        rank: int,
        *,
        max_bytes: int,
        is_one_machine: bool,
    ) -> None:
        self._gather, self._rank, self._max_bytes, self._is_one_machine = gather, rank, max_bytes, is_one_machine
        self._buckets: Iterator[WeightBucket | None] = iter(())
        self._buffers: deque[SharedBuffer] = deque()

    def start(self) -> None:
        """Begin with the first weights, also if an earlier sync did not end."""
        self.free()
        if self._rank > 0:
            self._buckets = count_buckets(self._gather(), max_bytes=self._max_bytes)
        elif self._is_one_machine:
            self._buckets = pack(self._gather(), max_bytes=self._max_bytes, allocate=self._allocate)
        else:
            self._buckets = pack(self._gather(), max_bytes=self._max_bytes)

    def pack_next(self) -> object:
        """Return the next bucket, or a reference to it; None after the last one, and on other ranks."""
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        if self._is_one_machine:
            return SharedBucket(bucket.slots, self._buffers[-1].path, bucket.data.nbytes)
        return put(bucket)

    def free(self) -> None:
        """Free the buckets: all engines have loaded them."""
        self._buckets = iter(())
        while self._buffers:
            self._buffers.popleft().close()

    def _allocate(self, size: int) -> npt.NDArray[np.uint8]:
        self._buffers.append(SharedBuffer(size))
        if len(self._buffers) > OPEN_BUCKETS:
            self._buffers.popleft().close()
        return self._buffers[-1].data
