import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.aggregate import count_totals, segment_sum
from verl.algorithms.losses import LossInputs, LossOptions, vanilla
from verl.algorithms.objective import ModelOutput, PolicyObjective
from verl.algorithms.prepass import covariance, pairs, prepass_clip_cov, prepass_dpo, prepass_kl_cov, token_noise
from verl.algorithms.settings import AlgorithmSettings
from verl.data.flat_batch import FlatBatch

pytestmark = pytest.mark.unit

scores_and_noise = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=9, unique_by=lambda row: row[1])


def mini_batch(count=2000, seed=0):
    """Sequences of 10 tokens in groups of four, with random values for a prepass."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.7
    offsets = torch.arange(0, count + 1, 10)
    x = LossInputs(draw[0], draw[0] + 0.3 * draw[1], draw[2], mask, offsets, ref_logprobs=draw[0] + 0.3 * draw[3])
    responses = len(offsets) - 1
    episodes = AdvantageInputs(
        scores=torch.randint(0, 2, (responses,), generator=generator).double(),
        groups=torch.arange(responses) // 4,
        mask=mask,
        offsets=offsets,
        rewards=torch.zeros(count).double(),
    )
    return x, episodes, torch.rand(count, generator=generator, dtype=torch.float64)


def test_noise_belongs_to_the_token_and_looks_random():
    sample, position = (grid.flatten() for grid in torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij"))
    noise = token_noise(sample, position)
    order = torch.randperm(10_000)
    assert torch.equal(token_noise(sample[order], position[order]), noise[order])
    assert len(noise.unique()) == 10_000
    assert noise.histc(10, 0, 1).sub(1000).abs().max() < 150
    rows = noise.view(100, 100)
    assert torch.corrcoef(torch.stack([rows[:-1].flatten(), rows[1:].flatten()]))[0, 1].abs() < 0.05
    assert torch.corrcoef(torch.stack([rows[:, :-1].flatten(), rows[:, 1:].flatten()]))[0, 1].abs() < 0.05


def test_clip_cov_chooses_its_share_of_free_tokens_within_the_bounds():
    x, episodes, noise = mini_batch()
    o = LossOptions(clip_cov_ratio=0.05, clip_cov_lb=0.2, clip_cov_ub=3.0)
    results = prepass_clip_cov(x, episodes, noise, o)
    chosen, cov, plain = results.fields["selected"], covariance(x, episodes), vanilla(x, o)
    is_clipped = plain.clipped_high | plain.clipped_low
    assert not (chosen & (~x.mask | is_clipped | (cov <= 0.2) | (cov >= 3.0))).any()
    share = chosen.sum() / x.mask.sum()
    assert float(share) == pytest.approx(0.05, abs=0.02)
    assert results.metrics["actor/chosen_tokens"] == pytest.approx(float(share))


@pytest.mark.parametrize("tied", [False, True])
def test_kl_cov_chooses_exactly_its_share_also_among_equals(tied):
    x, episodes, noise = mini_batch()
    if tied:
        x = LossInputs(x.logprobs, x.old_logprobs, torch.zeros_like(x.advantages), x.mask, x.offsets)
    chosen = prepass_kl_cov(x, episodes, noise, LossOptions(kl_cov_ratio=0.1)).fields["selected"]
    assert int(chosen.sum()) == int(x.mask.sum()) // 10
    assert not (chosen & ~x.mask).any()
    cov = covariance(x, episodes)
    assert cov[chosen].min() >= cov[x.mask & ~chosen].max()


def test_kl_cov_chooses_at_least_one_and_none_of_an_empty_batch():
    x, episodes, noise = mini_batch(count=20)
    assert prepass_kl_cov(x, episodes, noise, LossOptions()).fields["selected"].sum() == 1
    nothing = [torch.zeros_like(x.mask)] * 2
    x = LossInputs(x.logprobs, x.old_logprobs, x.advantages, nothing[0], x.offsets)
    episodes = AdvantageInputs(episodes.scores, episodes.groups, nothing[1], x.offsets, episodes.rewards)
    assert not prepass_kl_cov(x, episodes, noise, LossOptions()).fields["selected"].any()


@given(scores_and_noise, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_pairs_join_better_with_worse_and_do_not_depend_on_the_order(rows, random):
    def match(rows):
        better, worse = pairs(*(torch.tensor([row[k] for row in rows], dtype=torch.float64) for k in range(2)))
        return [(rows[i], rows[j]) for i, j in zip(better.tolist(), worse.tolist(), strict=True)]

    joined = match(rows)
    assert all(better[0] > worse[0] for better, worse in joined)
    assert len({row for pair in joined for row in pair}) == 2 * len(joined)
    assert match(random.sample(rows, len(rows))) == joined
    rest = [row[0] for row in rows if all(row not in pair for pair in joined)]
    assert len(set(rest)) <= 1 or len(rest) < 2


def test_dpo_has_the_gradient_of_its_loss_over_pairs():
    x, episodes, noise = mini_batch(count=200)
    episodes.mask[:10] = False  # a response without generated tokens is in no pair
    o = LossOptions(dpo_beta=0.3)
    logprobs = x.logprobs.clone().requires_grad_()
    shift = segment_sum((logprobs - x.ref_logprobs) * x.mask, x.offsets)
    responses = [i for i in range(len(episodes.scores)) if episodes.lengths[i]]
    draws = token_noise(episodes.groups, episodes.episode_names)
    margins = []
    for group in episodes.groups.unique():
        members = torch.tensor([i for i in responses if episodes.groups[i] == group])
        better, worse = pairs(episodes.scores[members], draws[members])
        margins += [0.3 * (shift[members[i]] - shift[members[j]]) for i, j in zip(better, worse, strict=True)]
    margin = torch.stack(margins)
    loss = -logsigmoid(margin).mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    results = prepass_dpo(x, episodes, noise, o)
    assert results.metrics["actor/dpo_loss"] == pytest.approx(loss.item())
    assert results.metrics["actor/dpo_pairs"] == len(margins)
    assert results.metrics["actor/dpo_margin"] == pytest.approx(margin.mean().item())
    assert results.metrics["actor/dpo_accuracy"] == pytest.approx((margin > 0).double().mean().item())
    batch = FlatBatch(torch.zeros_like(x.mask).long(), x.offsets, x.mask, old_logprobs=x.old_logprobs)
    batch = batch.with_(**results.fields)
    output = ModelOutput(logprobs, torch.zeros_like(logprobs))
    share, _ = PolicyObjective(AlgorithmSettings(loss_mode="dpo", loss_options=o))(
        output, batch, count_totals(batch.mask, batch.offsets)
    )
    assert torch.allclose(torch.autograd.grad(share, logprobs)[0], gradient)


def test_a_mini_batch_of_equal_scores_has_no_pairs_and_no_loss():
    x, episodes, noise = mini_batch(count=40)
    episodes.scores.fill_(1.0)
    results = prepass_dpo(x, episodes, noise, LossOptions())
    assert not results.fields["mask"].any()
    assert results.metrics["actor/dpo_pairs"] == 0
    assert results.metrics["actor/dpo_loss"] == 0


def test_dpo_requires_a_reference():
    x, episodes, noise = mini_batch(count=40)
    x = LossInputs(x.logprobs, x.old_logprobs, x.advantages, x.mask, x.offsets)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        prepass_dpo(x, episodes, noise, LossOptions())
