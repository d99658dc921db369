import pickle
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms.aggregate import MODES, Totals, aggregate, totals_of
from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import vanilla
from verl.algorithms.objective import PolicyObjective, sft

pytestmark = pytest.mark.unit


def example():
    torch.manual_seed(0)
    offsets = torch.tensor([0, 4, 6, 11])
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1]).bool()
    draw = lambda: -torch.rand(11, dtype=torch.float64) * mask  # noqa: E731
    output = SimpleNamespace(logprobs=draw().requires_grad_(), entropy=draw().neg().requires_grad_())
    batch = SimpleNamespace(
        mask=mask, offsets=offsets, old_logprobs=draw(), ref_logprobs=draw(), advantages=torch.randn(11).double()
    )
    return output, batch, totals_of(mask, offsets)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_policy_minus_entropy_plus_kl_in_one_aggregation(mode):
    output, batch, totals = example()
    objective = PolicyObjective(agg_mode=mode, scale=5.0, entropy_coeff=0.3, kl_coef=0.7, kl_type="k2")
    loss, metrics = objective(output, batch, totals)
    share = lambda values: aggregate(values, batch.mask, batch.offsets, mode, totals, scale=5.0)  # noqa: E731
    policy = vanilla(output.logprobs, batch.old_logprobs, batch.advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0)
    kl = share(kl_penalty(output.logprobs, batch.ref_logprobs, "k2"))
    assert float(loss) == pytest.approx(float(share(policy.loss) - 0.3 * share(output.entropy) + 0.7 * kl))
    assert float(metrics["actor/pg_loss"]) == pytest.approx(float(share(policy.loss)))
    assert float(metrics["actor/kl_loss"]) == pytest.approx(float(kl))


def test_diagnostics_are_means_over_tokens_whatever_the_aggregation():
    output, batch, totals = example()
    _, metrics = PolicyObjective(agg_mode="seq-mean-token-sum")(output, batch, totals)
    assert float(metrics["actor/entropy"]) == pytest.approx(float(output.entropy[batch.mask].mean()))
    kl = (batch.old_logprobs - output.logprobs)[batch.mask].mean()
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(float(kl))
    assert not any(value.requires_grad for value in metrics.values())


def test_every_clip_has_a_fraction_of_its_own():
    # The first token is not counted; then two at the upper clip, one at the lower, one at the dual, one free.
    log_ratio = torch.tensor([9.0, 0.5, 0.6, -0.5, 2.0, 0.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    mask, offsets = torch.tensor([0, 1, 1, 1, 1, 1]).bool(), torch.tensor([0, 6])
    output = SimpleNamespace(logprobs=log_ratio, entropy=torch.zeros(6))
    batch = SimpleNamespace(mask=mask, offsets=offsets, old_logprobs=torch.zeros(6), advantages=advantages)
    _, metrics = PolicyObjective()(output, batch, totals_of(mask, offsets))
    fractions = {name: float(value) for name, value in metrics.items() if "clipfrac" in name}
    assert fractions == pytest.approx(
        {
            "actor/pg_clipfrac": 0.6,
            "actor/pg_clipfrac_upper": 0.4,
            "actor/pg_clipfrac_lower": 0.2,
            "actor/pg_clipfrac_dual": 0.2,
        }
    )


def test_without_a_coefficient_entropy_and_reference_are_left_alone():
    output, batch, totals = example()
    batch.ref_logprobs = None
    loss, metrics = PolicyObjective()(output, batch, totals)
    loss.backward()
    assert output.entropy.grad is None
    assert "actor/kl_loss" not in metrics


def test_a_batch_without_what_the_loss_needs_is_refused_by_name():
    output, batch, totals = example()
    batch.ref_logprobs = None
    with pytest.raises(ValueError, match="no ref_logprobs"):
        PolicyObjective(kl_coef=0.1)(output, batch, totals)


def test_an_objective_can_be_sent_to_a_worker():
    objective = PolicyObjective(kl_coef=0.1)
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_sft_is_the_mean_negative_log_likelihood_of_generated_tokens():
    output, batch, totals = example()
    loss, metrics = sft(output, batch, totals)
    assert float(loss) == pytest.approx(float(-output.logprobs[batch.mask].mean()))
    assert float(metrics["sft/loss"]) == float(loss)
    assert float(sft(output, batch, Totals(2 * totals.tokens, 6))[0]) == pytest.approx(float(loss) / 2)
