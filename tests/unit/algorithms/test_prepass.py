import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.aggregate import count_totals, segment_sum
from verl.algorithms.losses import LossInputs, LossOptions, vanilla
from verl.algorithms.objective import PolicyObjective
from verl.algorithms.prepass import covariance, pairs, prepass_clip_cov, prepass_dpo, prepass_kl_cov, token_noise
from verl.data.flat_batch import FlatBatch
from verl.training.engine import ModelOutput

pytestmark = pytest.mark.unit

scores_and_noise = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=9, unique_by=lambda row: row[1])


def mini_batch(count=2000, seed=0):
    """Sequences of 10 tokens in groups of four, with something on each token for a survey to see."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.7
    offsets = torch.arange(0, count + 1, 10)
    x = LossInputs(draw[0], draw[0] + 0.3 * draw[1], draw[2], mask, offsets, ref_logprobs=draw[0] + 0.3 * draw[3])
    answers = len(offsets) - 1
    episodes = AdvantageInputs(
        scores=torch.randint(0, 2, (answers,), generator=generator).double(),
        groups=torch.arange(answers) // 4,
        mask=mask,
        offsets=offsets,
        rewards=torch.zeros(count).double(),
    )
    return x, episodes, torch.rand(count, generator=generator, dtype=torch.float64)


def test_noise_belongs_to_the_token_and_looks_random():
    sample, place = (grid.flatten() for grid in torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij"))
    noise = token_noise(sample, place)
    order = torch.randperm(10_000)
    assert torch.equal(token_noise(sample[order], place[order]), noise[order])
    assert len(noise.unique()) == 10_000
    assert noise.histc(10, 0, 1).sub(1000).abs().max() < 150
    rows = noise.view(100, 100)
    assert torch.corrcoef(torch.stack([rows[:-1].flatten(), rows[1:].flatten()]))[0, 1].abs() < 0.05
    assert torch.corrcoef(torch.stack([rows[:, :-1].flatten(), rows[:, 1:].flatten()]))[0, 1].abs() < 0.05


def test_clip_cov_chooses_its_share_of_free_tokens_within_the_bounds():
    x, episodes, noise = mini_batch()
    o = LossOptions(clip_cov_ratio=0.05, clip_cov_lb=0.2, clip_cov_ub=3.0)
    found = prepass_clip_cov(x, episodes, noise, o)
    chosen, cov, plain = found.fields["chosen"], covariance(x, episodes), vanilla(x, o)
    held = plain.clipped_high | plain.clipped_low | plain.clipped_dual
    assert not (chosen & (~x.mask | held | (cov <= 0.2) | (cov >= 3.0))).any()
    share = chosen.sum() / x.mask.sum()
    assert float(share) == pytest.approx(0.05, abs=0.02)
    assert found.metrics["actor/chosen_tokens"] == pytest.approx(float(share))


@pytest.mark.parametrize("tied", [False, True])
def test_kl_cov_chooses_exactly_its_share_also_among_equals(tied):
    x, episodes, noise = mini_batch()
    if tied:
        x = LossInputs(x.logprobs, x.old_logprobs, torch.zeros_like(x.advantages), x.mask, x.offsets)
    chosen = prepass_kl_cov(x, episodes, noise, LossOptions(kl_cov_ratio=0.1)).fields["chosen"]
    assert int(chosen.sum()) == int(x.mask.sum()) // 10
    assert not (chosen & ~x.mask).any()
    cov = covariance(x, episodes)
    assert cov[chosen].min() >= cov[x.mask & ~chosen].max()


def test_kl_cov_chooses_at_least_one_and_of_nothing_none():
    x, episodes, noise = mini_batch(count=20)
    assert prepass_kl_cov(x, episodes, noise, LossOptions()).fields["chosen"].sum() == 1
    nothing = [torch.zeros_like(x.mask)] * 2
    x = LossInputs(x.logprobs, x.old_logprobs, x.advantages, nothing[0], x.offsets)
    episodes = AdvantageInputs(episodes.scores, episodes.groups, nothing[1], x.offsets, episodes.rewards)
    assert not prepass_kl_cov(x, episodes, noise, LossOptions()).fields["chosen"].any()


@given(scores_and_noise, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_pairs_join_better_with_worse_and_do_not_depend_on_the_order(rows, random):
    def found(rows):
        better, worse = pairs(*(torch.tensor([row[k] for row in rows], dtype=torch.float64) for k in range(2)))
        return [(rows[i], rows[j]) for i, j in zip(better.tolist(), worse.tolist(), strict=True)]

    joined = found(rows)
    assert all(better[0] > worse[0] for better, worse in joined)
    assert len({row for pair in joined for row in pair}) == 2 * len(joined)
    assert found(random.sample(rows, len(rows))) == joined
    rest = [row[0] for row in rows if all(row not in pair for pair in joined)]
    assert len(set(rest)) <= 1 or len(rest) < 2


def test_dpo_has_the_gradient_of_its_loss_over_pairs():
    x, episodes, noise = mini_batch(count=200)
    episodes.mask[:10] = False  # an answer that wrote nothing is in no pair
    o = LossOptions(dpo_beta=0.3)
    logprobs = x.logprobs.clone().requires_grad_()
    shift = segment_sum((logprobs - x.ref_logprobs) * x.mask, x.offsets)
    answers = [i for i in range(len(episodes.scores)) if episodes.lengths[i]]
    draws = segment_sum(noise, x.offsets)
    margins = []
    for group in episodes.groups.unique():
        mine = torch.tensor([i for i in answers if episodes.groups[i] == group])
        better, worse = pairs(episodes.scores[mine], draws[mine])
        margins += [0.3 * (shift[mine[i]] - shift[mine[j]]) for i, j in zip(better, worse, strict=True)]
    margin = torch.stack(margins)
    loss = -logsigmoid(margin).mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    found = prepass_dpo(x, episodes, noise, o)
    assert found.metrics["actor/dpo_loss"] == pytest.approx(loss.item())
    assert found.metrics["actor/dpo_pairs"] == len(margins)
    assert found.metrics["actor/dpo_margin"] == pytest.approx(margin.mean().item())
    assert found.metrics["actor/dpo_accuracy"] == pytest.approx((margin > 0).double().mean().item())
    batch = FlatBatch(torch.zeros_like(x.mask).long(), x.offsets, x.mask, old_logprobs=x.old_logprobs)
    batch = batch.with_(**found.fields)
    output = ModelOutput(logprobs, torch.zeros_like(logprobs))
    share, _ = PolicyObjective("dpo", o)(output, batch, count_totals(batch.mask, batch.offsets))
    assert torch.allclose(torch.autograd.grad(share, logprobs)[0], gradient)


def test_a_mini_batch_of_equal_scores_has_no_pairs_and_no_loss():
    x, episodes, noise = mini_batch(count=40)
    episodes.scores.fill_(1.0)
    found = prepass_dpo(x, episodes, noise, LossOptions())
    assert not found.fields["mask"].any()
    assert found.metrics["actor/dpo_pairs"] == 0
    assert found.metrics["actor/dpo_loss"] == 0


def test_dpo_asks_for_a_reference():
    x, episodes, noise = mini_batch(count=40)
    x = LossInputs(x.logprobs, x.old_logprobs, x.advantages, x.mask, x.offsets)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        prepass_dpo(x, episodes, noise, LossOptions())
