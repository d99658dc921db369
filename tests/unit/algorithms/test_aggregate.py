import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.aggregate import MODES, Totals, aggregate, count_totals, segment_sum

pytestmark = pytest.mark.unit

SCALE = 11.0


def flat(sequences):
    """Sequences of (value, masked) pairs -> values [T], mask [T], offsets [B+1]."""
    pairs = [pair for sequence in sequences for pair in sequence]
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([masked for _, masked in pairs], dtype=torch.bool)
    offsets = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)
    return values, mask, offsets


def by_the_formula(sequences, mode):
    kept = [[value for value, masked in sequence if masked] for sequence in sequences]
    kept = [values for values in kept if values]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, kept)) / sum(map(len, kept))
    if mode == "seq-mean-token-mean":
        return sum(sum(values) / len(values) for values in kept) / len(kept)
    total = sum(map(sum, kept)) / len(kept)
    return total / SCALE if mode == "seq-mean-token-sum-norm" else total


token = st.tuples(st.floats(-10, 10), st.booleans())
mini_batch = st.lists(st.lists(token, max_size=6), min_size=1, max_size=8)


@given(mini_batch, st.sampled_from(MODES), st.data())
@settings(max_examples=150, deadline=None)
def test_shares_of_any_cut_add_up_to_the_number_of_the_mini_batch(sequences, mode, data):
    totals = count_totals(*flat(sequences)[1:])
    order = data.draw(st.permutations(sequences))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequences)), max_size=4)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    shares = sum(float(aggregate(*flat(part), mode, totals, scale=SCALE)) for part in parts)
    assert shares == pytest.approx(by_the_formula(sequences, mode), abs=1e-9)


def test_a_sequence_without_generated_tokens_is_not_counted():
    assert count_totals(*flat([[(1.0, True), (2.0, False)], [(3.0, False)], []])[1:]) == Totals(tokens=1, sequences=1)


def test_masked_infinities_do_not_reach_the_loss_or_the_gradient():
    values = torch.tensor([1.0, float("inf")], requires_grad=True)
    share = aggregate(values, torch.tensor([True, False]), torch.tensor([0, 2]), "token-mean", Totals(1, 1))
    share.backward()
    assert share == 1.0
    assert values.grad.tolist() == [1.0, 0.0]


def test_the_sum_over_an_empty_sequence_is_zero():
    assert segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist() == [3.0, 0.0, 4.0]


@pytest.mark.parametrize("scale", [None, 0.0])
def test_seq_mean_token_sum_norm_requires_a_scale(scale):
    with pytest.raises(ValueError, match="loss_scale_factor"):
        aggregate(*flat([[(1.0, True)]]), "seq-mean-token-sum-norm", Totals(1, 1), scale=scale)


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="'mean' is not one of token-mean"):
        aggregate(*flat([[(1.0, True)]]), "mean", Totals(1, 1))
