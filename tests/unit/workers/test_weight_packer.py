"""Buckets of a train worker: packed one at a time, in memory that the engines of the node can map."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.weights.bucket import SharedBucket, unpack
from verl.workers import weight_packer
from verl.workers.weight_packer import WeightPacker

pytestmark = pytest.mark.unit

WEIGHTS = {f"w{index}": torch.full((16,), float(index)) for index in range(5)}
ONE_TENSOR = 64


class Gathering:
    def __init__(self) -> None:
        self.taken = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in WEIGHTS.items():
            self.taken += 1
            yield item


def read(bucket: SharedBucket) -> dict[str, list[float]]:
    return {name: each.tolist() for name, each in unpack(bucket.slots, torch.from_numpy(bucket.data.copy()))}


def test_at_most_two_buckets_exist_and_none_at_the_end() -> None:
    packer = WeightPacker(Gathering(), max_bytes=ONE_TENSOR, is_one_machine=True)
    packer.start()
    buckets: list[Any] = []
    while (bucket := packer.pack_next()) is not None:
        buckets.append(bucket)
        assert read(bucket) == {name: each.tolist() for name, each in [list(WEIGHTS.items())[len(buckets) - 1]]}
        assert len({each.path for each in buckets if Path(each.path).exists()}) <= 2
    assert len(buckets) == len(WEIGHTS)
    packer.finish()
    assert not any(Path(each.path).exists() for each in buckets)


def test_a_sync_that_ends_early_gathers_the_rest_with_the_other_ranks() -> None:
    first, second = Gathering(), Gathering()
    packers = [WeightPacker(gather, max_bytes=ONE_TENSOR, is_one_machine=True) for gather in (first, second)]
    packers[0].start()
    bucket: Any = packers[0].pack_next()
    packers[0].finish()
    packers[1].take_part()
    assert first.taken == second.taken == len(WEIGHTS)
    assert not Path(bucket.path).exists()
    packers[0].start()
    again: Any = packers[0].pack_next()
    assert list(read(again)) == ["w0"]
    packers[0].finish()


def test_engines_on_other_nodes_get_references_and_the_first_bucket_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_packer, "put", lambda bucket: ("reference", len(bucket.slots)))
    packer = WeightPacker(Gathering(), max_bytes=3 * ONE_TENSOR, is_one_machine=False)
    packer.start()
    tensors = [1, 3, 1]
    assert [packer.pack_next() for _ in range(4)] == [*(("reference", count) for count in tensors), None]
