import multiprocessing
import time

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def sleep(rank, seconds):
    time.sleep(seconds)


def fail_on_the_first(rank):
    if rank == 0:
        raise RuntimeError("the first rank fails")
    time.sleep(600)


def test_ranks_that_hang_end_at_the_deadline():
    with pytest.raises(TimeoutError, match="sleep on 2 ranks did not end within 1 s"):
        run_ranks(sleep, 2, 600, deadline_s=1)
    assert not multiprocessing.active_children()


def test_one_rank_that_fails_ends_the_others():
    with pytest.raises(Exception, match="the first rank fails"):
        run_ranks(fail_on_the_first, 2, deadline_s=100)
    assert not multiprocessing.active_children()
