"""Which tokens each rank of a sequence group has. The exchange itself is tested on real ranks, in tests/distributed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.training.sequence_parallel import SequenceGroup

pytestmark = pytest.mark.unit


class Group:
    """The size and rank of a process group."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


@given(count=st.integers(1, 40), size=st.integers(1, 9))
def test_every_token_is_on_one_rank_and_all_ranks_have_equally_many(count, size):
    groups = [SequenceGroup(Group(rank, size)) for rank in range(size)]
    rows = torch.arange(1, count + 1)[:, None]
    taken = [group.take(rows) for group in groups]
    assert {len(part) for part in taken} == {-(-count // size)}
    assert torch.equal(torch.cat(taken)[:count], rows)
    assert not torch.cat(taken)[count:].any()
    parts = [group.part(count) for group in groups]
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(count))
