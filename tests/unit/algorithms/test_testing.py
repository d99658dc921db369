import pytest
import torch

from verl.algorithms.advantages import ESTIMATORS, grpo
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.losses import LOSSES
from verl.algorithms.testing import check_estimator, check_loss, run_on_ranks

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_keeps_the_invariants(name):
    check_estimator(ESTIMATORS[name])


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_keeps_the_invariants(name):
    check_loss(LOSSES[name])


@pytest.mark.parametrize(
    ("estimator", "invariant"),
    [
        (lambda x: None, "it returns advantages"),
        (lambda x: x.scores, r"advantages are \[T\]"),
        (lambda x: x.per_token(x.scores) / 0.0, "advantages are finite"),
        (lambda x: grpo(x) + 1.0, "advantages are 0 outside the mask"),
        (lambda x: (grpo(x), x.values), "returns are 0 outside the mask"),
        (lambda x: x.per_token(torch.arange(len(x.scores)).double()), "do not depend on the order"),
        (lambda x: x.per_token(x.scores - x.scores.sum()), "advantages are the same on 2 ranks"),
        (lambda x: grpo(x) * (x.total(x.mask)[0] if len(x.scores) else 1.0), "gather equally often"),
    ],
)
def test_an_estimator_that_violates_an_invariant_is_named(estimator, invariant):
    with pytest.raises(AssertionError, match=f"invariant violated: (.*|all ranks ){invariant}"):
        check_estimator(estimator)


@pytest.mark.parametrize(
    ("loss", "invariant"),
    [
        (lambda x, o: 0.0, "it returns a tensor"),
        (lambda x, o: segment_sum(x.logprobs, x.offsets), r"the loss is \[T\]"),
        (lambda x, o: (x.logprobs - x.old_logprobs).exp().exp(), "finite, also at log-ratios of 50"),
        (lambda x, o: x.logprobs.detach(), "a gradient reaches logprobs"),
        (lambda x, o: x.logprobs - x.logprobs.mean(), "tokens outside the mask have no gradient"),
        (lambda x, o: x.logprobs * (x.mask * x.ratio).sum(), "does not depend on the other sequences"),
    ],
)
def test_a_loss_that_violates_an_invariant_is_named(loss, invariant):
    with pytest.raises(AssertionError, match=f"invariant violated: .*{invariant}"):
        check_loss(loss)


def test_simulated_ranks_gather_in_rank_order_repeatedly():
    def run(part, rank, gather):
        once = gather(torch.tensor(part)[:, None]).flatten()
        return gather(once.sum()[None, None] + rank).flatten().tolist()

    assert run_on_ranks([[1.0, 2.0], [], [4.0]], run) == [[7.0, 8.0, 9.0]] * 3


def test_an_error_on_one_rank_is_raised():
    def run(part, rank, gather):
        if rank == 1:
            raise ZeroDivisionError
        return gather(torch.ones(1, 1))

    with pytest.raises(ZeroDivisionError):
        run_on_ranks([0, 1, 2], run)
