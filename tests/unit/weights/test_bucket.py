"""Weights are unchanged by packing, whatever their shapes, dtypes and number of buckets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.types import LocalShard
from verl.weights.bucket import pack, share, unpack

pytestmark = pytest.mark.unit

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, max_bytes=st.integers(1, 500), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_unpacking_returns_what_was_packed(shapes: list[tuple[int, ...]], max_bytes: int, dtype: torch.dtype) -> None:
    weights = {f"w{i}": torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)}
    buckets = list(pack(weights.items(), max_bytes=max_bytes))
    back = [pair for bucket in buckets for pair in unpack(bucket.slots, torch.from_numpy(bucket.data))]
    assert [name for name, _ in back] == list(weights)
    for name, tensor in back:
        assert tensor.dtype == dtype
        assert torch.equal(tensor, weights[name])


def test_a_bucket_exceeds_its_size_only_for_a_tensor_that_is_larger_alone() -> None:
    weights = [(f"w{i}", torch.zeros(n)) for i, n in enumerate([10, 10, 100, 10])]
    buckets = list(pack(weights, max_bytes=128))
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["w0", "w1"], ["w2"], ["w3"]]


def test_only_floating_point_tensors_are_cast() -> None:
    [bucket] = pack([("w", torch.ones(3)), ("steps", torch.tensor([7]))], max_bytes=1000, dtype=torch.bfloat16)
    assert [slot.dtype for slot in bucket.slots] == ["bfloat16", "int64"]


def test_ranks_write_their_parts_into_the_same_buffer_and_convert_them() -> None:
    whole, buffer = torch.arange(12.0).view(4, 3), np.zeros(1000, np.uint8)
    for start in (0, 2):
        rows = LocalShard(whole[start : start + 2], (start, 0), (4, 3), torch.bfloat16)
        nothing = LocalShard(None, (0,), (8,), torch.bfloat16)
        [bucket] = pack([("w", rows), ("bias", nothing)], max_bytes=1000, allocate=lambda _: buffer)
    tensors = dict(unpack(bucket.slots, torch.from_numpy(bucket.data)))
    assert torch.equal(tensors["w"], whole.bfloat16())
    assert torch.equal(tensors["bias"], torch.zeros(8, dtype=torch.bfloat16))


def test_a_sliced_tensor_is_packed_by_value() -> None:
    square = torch.arange(9.0).view(3, 3)
    [bucket] = pack([("column", square[:, 1])], max_bytes=1000)
    [(_, column)] = unpack(bucket.slots, torch.from_numpy(bucket.data))
    assert column.tolist() == [1.0, 4.0, 7.0]


def test_a_bucket_is_shared_by_its_path_until_it_is_closed() -> None:
    [bucket] = pack([("w", torch.arange(5.0))], max_bytes=1000)
    with share(bucket) as shared:
        mapped = shared.data
        [(name, tensor)] = unpack(shared.slots, torch.from_numpy(mapped.copy()))
        assert (name, tensor.tolist()) == ("w", [0.0, 1.0, 2.0, 3.0, 4.0])
        with share(shared) as same:
            assert same is shared
    assert not Path(shared.path).exists()
    assert mapped.tobytes() == bucket.data.tobytes(), "who has mapped it keeps it"
