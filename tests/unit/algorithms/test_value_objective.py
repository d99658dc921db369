import pickle
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.aggregate import MODES, aggregate, count_totals
from verl.algorithms.losses import value_loss
from verl.algorithms.objective import ValueObjective, ValueOutput
from verl.algorithms.settings import AlgorithmSettings
from verl.data.flat_batch import FlatBatch

pytestmark = pytest.mark.unit


def example():
    torch.manual_seed(0)
    offsets = torch.tensor([0, 4, 6, 11, 13])
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0]).bool()
    old, returns, values = (torch.randn(13, dtype=torch.float64) * mask for _ in range(3))
    batch = FlatBatch(torch.arange(13), offsets, mask, values=old, returns=returns)
    return values.requires_grad_(), batch, count_totals(mask, offsets)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 2))
def test_the_loss_is_the_larger_of_two_halved_squares(v, old, ret, eps):
    loss, clipped = value_loss(*torch.tensor([v, old, ret], dtype=torch.float64), eps)
    free, clipped_error = abs(v - ret), abs(min(max(v, old - eps), old + eps) - ret)
    assert float(loss) == pytest.approx(0.5 * max(free, clipped_error) ** 2)
    assert bool(clipped) == (clipped_error * clipped_error > free * free)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 2))
def test_the_gradient_is_the_distance_to_the_return_and_none_where_clipped(v, old, ret, eps):
    values = torch.tensor(v, dtype=torch.float64, requires_grad=True)
    loss, clipped = value_loss(values, *torch.tensor([old, ret], dtype=torch.float64), eps)
    loss.backward()
    if clipped:
        assert float(values.grad) == 0.0
    elif abs(v - old) < eps:  # else |clip(v) - R| = |v - R| is possible, where the maximum has two slopes
        assert float(values.grad) == pytest.approx(v - ret)


def test_the_value_clip_applies_only_in_the_direction_of_the_return():
    old, returns = torch.zeros(3), torch.tensor([2.0, 2.0, -2.0])
    _, clipped = value_loss(torch.tensor([1.0, 0.3, 1.0]), old, returns, 0.5)
    assert clipped.tolist() == [True, False, False]


@pytest.mark.parametrize("mode", MODES)
def test_the_objective_aggregates_the_loss_and_reports_means_over_tokens(mode):
    values, batch, totals = example()
    loss, metrics = ValueObjective(AlgorithmSettings(value_clip=0.2, value_agg_mode=mode, scale=5.0))(
        ValueOutput(values), batch, totals
    )
    tokens, clipped = value_loss(values, batch.values, batch.returns, 0.2)
    expected = aggregate(tokens, batch.mask, batch.offsets, mode, totals, scale=5.0)
    assert 0 < float(clipped[batch.mask].double().mean()) < 1
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "critic/vf_loss": float(expected.detach()),
            "critic/vf_clipfrac": float(clipped[batch.mask].double().mean()),
            "critic/vpred_mean": float(values.detach()[batch.mask].mean()),
        }
    )
    torch.testing.assert_close(loss, expected)
    assert not any(value.requires_grad for value in metrics.values())


@settings(deadline=None)
@given(st.permutations(range(4)), st.sets(st.integers(1, 3)), st.sampled_from(MODES))
def test_shares_of_any_cut_add_up_to_the_whole(order, cuts, mode):
    values, batch, totals = example()
    objective = ValueObjective(AlgorithmSettings(value_clip=0.2, value_agg_mode=mode, scale=5.0))
    loss, metrics = objective(ValueOutput(values), batch, totals)
    (gradient,) = torch.autograd.grad(loss, values)

    edges = [0, *sorted(cuts), 4]
    parts = [list(order[a:b]) for a, b in pairwise(edges)]
    indices = batch.with_(tokens=torch.arange(13))
    shares = []
    for part in parts:
        share, metric_share = objective(ValueOutput(values[indices.select(part).tokens]), batch.select(part), totals)
        share.backward()
        shares.append(metric_share)
    torch.testing.assert_close(values.grad, gradient)
    for name, value in metrics.items():
        assert float(sum(metric_share[name] for metric_share in shares)) == pytest.approx(float(value))


@pytest.mark.parametrize("name", ["values", "returns"])
def test_a_batch_without_what_the_loss_needs_raises_an_error_that_names_it(name):
    values, batch, totals = example()
    with pytest.raises(ValueError, match=f"no {name};"):
        ValueObjective()(SimpleNamespace(values=values), batch.with_(**{name: None}), totals)


def test_an_objective_can_be_sent_to_a_worker():
    objective = ValueObjective(AlgorithmSettings(value_clip=0.1))
    assert pickle.loads(pickle.dumps(objective)) == objective
