import pickle
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms.aggregate import MODES, Totals, aggregate, count_totals
from verl.algorithms.losses import LossOptions, PolicyLoss, kl_penalty, vanilla
from verl.algorithms.objective import OutcomeObjective, PolicyObjective, make_loss_inputs, sft
from verl.algorithms.settings import AlgorithmSettings

pytestmark = pytest.mark.unit


def example():
    torch.manual_seed(0)
    offsets = torch.tensor([0, 4, 6, 11])
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1]).bool()
    draw = lambda: -torch.rand(11, dtype=torch.float64) * mask  # noqa: E731
    output = SimpleNamespace(logprobs=draw().requires_grad_(), entropy=draw().neg().requires_grad_())
    batch = SimpleNamespace(
        mask=mask,
        offsets=offsets,
        old_logprobs=draw(),
        ref_logprobs=draw(),
        advantages=torch.randn(11).double(),
        returns=None,
        weights=None,
        selected=None,
        shares=None,
        episode_tokens=None,
        episode_log_ratio=None,
        episode_lag=None,
        rollout_logprobs=None,
    )
    return output, batch, count_totals(mask, offsets)


def custom_loss(x, o):
    return -x.advantages * x.logprobs * o.clip_low


def custom_loss_with_a_report(x, o):
    return PolicyLoss(custom_loss(x, o), clipped_high=x.mask)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_policy_minus_entropy_plus_kl_in_one_aggregation(mode):
    output, batch, totals = example()
    objective = PolicyObjective(
        AlgorithmSettings(agg_mode=mode, scale=5.0, entropy_coeff=0.3, loss_kl_coef=0.7, loss_kl_type="k2")
    )
    loss, metrics = objective(output, batch, totals)
    share = lambda values: aggregate(values, batch.mask, batch.offsets, mode, totals, scale=5.0)  # noqa: E731
    policy = vanilla(make_loss_inputs(output.logprobs, batch), LossOptions())
    kl = share(kl_penalty(output.logprobs, batch.ref_logprobs, "k2"))
    expected = share(policy.loss) - 0.3 * share(output.entropy) + 0.7 * kl
    assert loss.item() == pytest.approx(expected.item())
    assert float(metrics["actor/pg_loss"]) == pytest.approx(float(share(policy.loss)))
    assert float(metrics["actor/kl_loss"]) == pytest.approx(float(kl))


def test_diagnostics_are_means_over_tokens_whatever_the_aggregation():
    output, batch, totals = example()
    _, metrics = PolicyObjective(AlgorithmSettings(agg_mode="seq-mean-token-sum"))(output, batch, totals)
    assert float(metrics["actor/entropy"]) == pytest.approx(float(output.entropy[batch.mask].mean()))
    kl = (batch.old_logprobs - output.logprobs)[batch.mask].mean()
    assert float(metrics["actor/ppo_kl"]) == pytest.approx(float(kl))
    assert not any(value.requires_grad for value in metrics.values())


def test_every_clip_has_a_separate_fraction():
    # The first token is not counted; then two at the upper clip, one at the lower, one at the dual, one free.
    log_ratio = torch.tensor([9.0, 0.5, 0.6, -0.5, 2.0, 0.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    mask, offsets = torch.tensor([0, 1, 1, 1, 1, 1]).bool(), torch.tensor([0, 6])
    output = SimpleNamespace(logprobs=log_ratio, entropy=torch.zeros(6))
    batch = example()[1]
    batch.mask, batch.offsets, batch.old_logprobs, batch.advantages = mask, offsets, torch.zeros(6), advantages
    _, metrics = PolicyObjective()(output, batch, count_totals(mask, offsets))
    fractions = {name: float(value) for name, value in metrics.items() if "clipfrac" in name}
    assert fractions == pytest.approx(
        {
            "actor/pg_clipfrac": 0.6,
            "actor/pg_clipfrac_upper": 0.4,
            "actor/pg_clipfrac_lower": 0.2,
        }
    )


def test_without_coefficients_entropy_and_reference_are_not_used():
    output, batch, totals = example()
    batch.ref_logprobs = None
    loss, metrics = PolicyObjective()(output, batch, totals)
    loss.backward()
    assert output.entropy.grad is None
    assert "actor/kl_loss" not in metrics


def test_a_batch_without_what_the_loss_needs_raises_an_error_that_names_it():
    output, batch, totals = example()
    batch.ref_logprobs = None
    with pytest.raises(ValueError, match="no ref_logprobs"):
        PolicyObjective(AlgorithmSettings(loss_kl_coef=0.1))(output, batch, totals)


def test_an_objective_can_be_sent_to_a_worker():
    objective = PolicyObjective(AlgorithmSettings(loss_kl_coef=0.1))
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_importance_weights_scale_the_policy_term_alone():
    output, batch, totals = example()
    plain = [PolicyObjective(AlgorithmSettings(loss_kl_coef=coef))(output, batch, totals)[0] for coef in (0.0, 0.5)]
    batch.weights = torch.full((11,), 3.0).double()
    weighted = PolicyObjective(AlgorithmSettings(loss_kl_coef=0.5))(output, batch, totals)[0]
    assert float(weighted) == pytest.approx(float(3 * plain[0] + (plain[1] - plain[0])))


def test_importance_weights_of_geo_mean_are_combined_geometrically():
    output, batch, totals = example()
    results = []
    for weights in ([4.0, 1.0] * 5 + [4.0], None):
        batch.weights = None if weights is None else torch.tensor(weights).double()
        policy = PolicyObjective(AlgorithmSettings(loss_mode="geo_mean"))
        results.append(torch.autograd.grad(policy(output, batch, totals)[0], output.logprobs, retain_graph=True)[0])
    means = [
        weights[mask].log().mean().exp()
        for weights, mask in zip(
            torch.tensor([4.0, 1.0] * 5 + [4.0]).split(batch.offsets.diff().tolist()),
            batch.mask.split(batch.offsets.diff().tolist()),
            strict=True,
        )
    ]
    expected = [mean * part for mean, part in zip(means, results[1].split(batch.offsets.diff().tolist()), strict=True)]
    assert torch.allclose(results[0], torch.cat(expected).nan_to_num())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_mode", ["gspo", "sapo", "geo_mean", "sppo"])
def test_losses_of_sequences_are_means_over_sequences_whatever_the_aggregation(loss_mode, mode):
    output, batch, totals = example()
    results = [
        float(
            PolicyObjective(AlgorithmSettings(loss_mode=loss_mode, agg_mode=name, scale=5.0))(output, batch, totals)[0]
        )
        for name in (mode, "seq-mean-token-mean")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["custom_loss", "custom_loss_with_a_report"])
def test_a_custom_loss_is_named_by_its_import_path(name):
    output, batch, totals = example()
    options = LossOptions(clip_low=0.5)
    loss, metrics = PolicyObjective(AlgorithmSettings(loss_mode=f"{__name__}:{name}", loss_options=options))(
        output, batch, totals
    )
    expected = -0.5 * (batch.advantages * output.logprobs)[batch.mask].mean()
    assert float(loss) == pytest.approx(float(expected))
    assert float(metrics["actor/pg_clipfrac_upper"]) == (1.0 if "report" in name else 0.0)


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(ValueError, match=r"policy_loss.loss_mode: 'ppo' is not one of vanilla, gspo"):
        PolicyObjective(AlgorithmSettings(loss_mode="ppo"))(*example())


def test_the_outcome_of_a_response_is_predicted_by_the_sum_of_its_log_ratios():
    output, batch, totals = example()
    batch.advantages = torch.tensor([1.0] * 4 + [0.0] * 2 + [0.25] * 5).double()
    batch.old_logprobs = batch.ref_logprobs
    loss, metrics = OutcomeObjective(beta=0.5)(output, batch, totals)
    gaps = torch.where(batch.mask, output.logprobs - batch.ref_logprobs, 0.0)
    logits = torch.stack([0.5 * part.sum() for part in gaps.split([4, 2, 5])])
    outcomes = torch.tensor([1.0, 0.0, 0.25]).double()
    chance = logits.sigmoid()
    expected = -(outcomes * chance.log() + (1 - outcomes) * (1 - chance).log()).mean()
    assert float(loss) == pytest.approx(float(expected))
    assert float(metrics["process/loss"]) == float(loss)
    right = ((logits > 0) == (outcomes > 0.5)).double().mean()
    assert float(metrics["process/accuracy"]) == pytest.approx(float(right))
    (gradient,) = torch.autograd.grad(loss, output.logprobs)
    slope = (0.5 * (chance - outcomes).detach() / 3).repeat_interleave(torch.tensor([4, 2, 5]))
    assert gradient.tolist() == pytest.approx((slope * batch.mask).tolist())


def test_sft_is_the_mean_negative_log_likelihood_of_generated_tokens():
    output, batch, totals = example()
    loss, metrics = sft(output, batch, totals)
    assert float(loss) == pytest.approx(float(-output.logprobs[batch.mask].mean()))
    assert float(metrics["train/loss"]) == float(loss)
    assert float(sft(output, batch, Totals(2 * totals.tokens, 6))[0]) == pytest.approx(float(loss) / 2)


def test_the_gradient_of_the_unbiased_kl_is_that_of_the_exact_kl_also_off_policy():
    logits, ref, old = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    lp, lp_ref, lp_old = (each.log_softmax(-1) for each in (logits, ref, old))
    exact = torch.autograd.grad((lp.exp() * (lp - lp_ref)).sum(), logits, retain_graph=True)[0]
    batch = SimpleNamespace(
        mask=torch.ones(6).bool(),
        offsets=torch.arange(7),
        old_logprobs=lp_old,
        ref_logprobs=lp_ref,
        advantages=torch.zeros(6).double(),
        weights=None,
        selected=None,
        shares=None,
        episode_tokens=None,
        episode_log_ratio=None,
        episode_lag=None,
        rollout_logprobs=None,
    )
    algorithm = AlgorithmSettings(loss_kl_coef=1.0, loss_kl_type="unbiased")
    objective = PolicyObjective(algorithm)
    kl = objective._kl(SimpleNamespace(logprobs=lp), batch, make_loss_inputs(lp, batch))
    expected = torch.autograd.grad((lp_old.exp() * kl).sum(), logits)[0]  # over tokens that the old policy samples
    assert expected.tolist() == pytest.approx(exact.tolist(), abs=1e-9)


def test_rejected_tokens_do_not_make_a_response_off_policy():
    output, batch, totals = example()
    batch.advantages = -torch.ones(11).double()
    lag = torch.tensor([0, 0, 9, 0, 0, 9, 0, 0, 1, 1, 1]).double()
    batch.old_logprobs = output.logprobs.detach()
    batch.rollout_logprobs = batch.old_logprobs + lag
    objective = PolicyObjective(AlgorithmSettings(loss_options=LossOptions(off_policy_mask_threshold=0.5)))

    def list_trained():
        output.logprobs.grad = None
        loss, metrics = objective(output, batch, totals)
        loss.backward()
        assert torch.isfinite(loss)
        return output.logprobs.grad.nonzero().flatten().tolist(), float(metrics["actor/off_policy_dropped"])

    assert list_trained() == ([], pytest.approx(7 / 7)), "each response has a mean above 0.5"
    batch.mask = batch.mask & (lag < 9)  # as rejection does: it leaves the first response 2 tokens, the second none
    assert list_trained() == ([1, 3], pytest.approx(3 / 7))
