"""Objectives: what an engine minimizes. Every term is normalized by the same totals of the whole mini-batch.

An objective is a callable `(output, batch, totals) -> (loss share, metric shares)`, picklable so that it can be sent to
a worker. It uses only the attributes of `Batch` below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl.algorithms.aggregate import BranchWeights, Totals, aggregate
from verl.algorithms.correction import PROBS_DIFF
from verl.algorithms.losses import (
    EXACT_KL,
    LOSSES,
    PER_SEQUENCE,
    UNBIASED_KL,
    LossInputs,
    PolicyLoss,
    clamp_teacher_kl,
    find_off_policy,
    kl_penalty,
    value_loss,
)
from verl.algorithms.settings import AlgorithmSettings
from verl.custom_functions import load_function


class ModelOutput(NamedTuple):
    """The result of a policy's forward pass, aligned with the tokens of its batch and 0 where the mask is False.

    `logprobs [T]`: log-prob of token t given the tokens before it in its sequence.
    `entropy [T]`: entropy of the distribution that token t was sampled from.
    `kl [T]`: KL from that distribution to the reference's, exact over the vocabulary; None without a reference.
    `teacher_kl [T]`: the same to the teacher's distribution.
    `routed_experts [T, layers, k]`: experts that the layers of an MoE used; None unless the engine records them.
    `sum_pi_squared [T]`: sum over the vocabulary of the squares of that distribution; None unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None = None
    teacher_kl: Tensor | None = None
    routed_experts: Tensor | None = None
    sum_pi_squared: Tensor | None = None


class ValueOutput(NamedTuple):
    """The result of a critic's forward pass, aligned with the tokens of its batch and 0 where the mask is False.

    `values [T]`: value of the state that token t was sampled from, that is of the tokens before it in its sequence.
    """

    values: Tensor


class Batch(Protocol):
    """A micro-batch: mask [T], offsets [B+1]; the others are [T], or None if not computed."""

    mask: Tensor
    offsets: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    weights: Tensor | None
    selected: Tensor | None
    shares: Tensor | None
    episode_tokens: Tensor | None
    episode_log_ratio: Tensor | None
    rollout_logprobs: Tensor | None
    episode_lag: Tensor | None


def weigh_branches(batch: Batch) -> BranchWeights | None:
    """Return how the tokens of a batch are weighed, if its episodes have several branches."""
    if batch.shares is None or batch.episode_tokens is None:
        return None
    return BranchWeights(batch.shares, batch.episode_tokens)


def compute_share(
    values: Tensor, batch: Batch, totals: Totals, mode: str = "token-mean", *, scale: float | None = None
) -> Tensor:
    """Return the share of a batch in the aggregate of its mini-batch; see `aggregate`."""
    return aggregate(values, batch.mask, batch.offsets, mode, totals, scale=scale, branches=weigh_branches(batch))


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Policy loss - entropy_coeff * entropy + loss_kl_coef * KL to the reference + coef * KL to the teacher."""

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)

    def __call__(self, output: ModelOutput, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self.algorithm

        def share(values: Tensor, mode: str = algorithm.agg_mode) -> Tensor:
            return compute_share(values, batch, totals, mode, scale=algorithm.scale)

        def token_mean(values: Tensor | None) -> Tensor:
            values = output.logprobs * 0 if values is None else values.to(output.logprobs.dtype)
            return share(values.detach(), "token-mean")

        inputs = make_loss_inputs(output.logprobs, batch)
        policy = self._policy_loss(inputs)
        weights = self._weights(inputs, batch.weights)
        losses, threshold = policy.loss * weights, algorithm.loss_options.off_policy_mask_threshold
        dropped = None if threshold is None else find_off_policy(inputs, threshold)
        if dropped is not None:  # they stay in the totals, which are known before the current log-probs
            losses = torch.where(dropped, 0.0, losses)
        loss = share(losses, "seq-mean-token-mean" if algorithm.loss_mode in PER_SEQUENCE else algorithm.agg_mode)
        upper, lower = token_mean(policy.clipped_high), token_mean(policy.clipped_low)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": upper + lower,
            "actor/pg_clipfrac_upper": upper,
            "actor/pg_clipfrac_lower": token_mean(policy.clipped_dual),
            "actor/ppo_kl": token_mean(inputs.old_logprobs - inputs.logprobs),
            "actor/entropy": token_mean(output.entropy),
        }
        if dropped is not None:
            metrics["actor/off_policy_dropped"] = token_mean(dropped)
        if algorithm.correction.bypass:  # the old log-probs are those of the engine
            metrics[PROBS_DIFF] = token_mean((inputs.logprobs.exp() - inputs.old_logprobs.exp()).abs())
        if algorithm.entropy_coeff:
            loss = loss - algorithm.entropy_coeff * share(output.entropy)
        if algorithm.loss_kl_coef is not None:
            kl = share(self._kl(output, batch, inputs))
            loss = loss + algorithm.loss_kl_coef * kl
            metrics["actor/kl_loss"] = kl.detach()
        if algorithm.distillation is not None and algorithm.distillation.mode == "loss":
            teacher_kl = _require(output.teacher_kl, "teacher_kl")
            clamped, is_clamped = clamp_teacher_kl(teacher_kl, algorithm.distillation)
            loss = loss + algorithm.distillation.coef * share(clamped)
            metrics["actor/distillation_kl"] = token_mean(teacher_kl)
            if is_clamped is not None:
                metrics["actor/distillation_clipfrac"] = token_mean(is_clamped)
        return loss, metrics

    def _weights(self, inputs: LossInputs, weights: Tensor | None) -> Tensor | float:
        """Return the importance weight of each token; a loss of whole sequences takes their mean."""
        if weights is None:
            return 1.0
        return average_weights(weights, self.algorithm.loss_mode, inputs.sequence_mean)

    def _kl(self, output: ModelOutput, batch: Batch, inputs: LossInputs) -> Tensor:
        kind = self.algorithm.loss_kl_type
        if kind == EXACT_KL:
            return _require(output.kl, "kl")
        if kind == UNBIASED_KL:
            return inputs.ratio * kl_penalty(output.logprobs, _require(batch.ref_logprobs, "ref_logprobs"), "k3")
        return kl_penalty(output.logprobs, _require(batch.ref_logprobs, "ref_logprobs"), kind)

    def _policy_loss(self, inputs: LossInputs) -> PolicyLoss:
        function = load_function(self.algorithm.loss_mode, LOSSES, "policy_loss.loss_mode")
        loss = function(inputs, self.algorithm.loss_options)
        return PolicyLoss(loss) if isinstance(loss, Tensor) else loss


def make_loss_inputs(logprobs: Tensor, batch: Batch) -> LossInputs:
    """Return the inputs of a policy loss for a batch with these current log-probs [T]."""
    return LossInputs(
        logprobs,
        _require(batch.old_logprobs, "old_logprobs"),
        _require(batch.advantages, "advantages"),
        batch.mask,
        batch.offsets,
        batch.ref_logprobs,
        batch.selected,
        weigh_branches(batch),
        batch.episode_log_ratio,
        batch.rollout_logprobs,
        batch.episode_lag,
    )


def average_weights(weights: Tensor, loss_mode: str, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return importance weights [T] as a loss uses them; `mean` averages over sequences: [T] -> [T].

    A loss with one ratio per sequence takes their geometric mean, which is 0 if a weight is 0; one with an error per
    sequence takes their mean.
    """
    if loss_mode == "geo_mean":
        has_zero = mean((weights == 0).to(weights.dtype)) > 0
        return mean(weights.clamp(min=1e-30).log()).exp().masked_fill(has_zero, 0.0)
    return mean(weights) if loss_mode in ("dpo", "sppo") else weights


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The clipped value loss of a critic."""

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)

    def __call__(self, output: ValueOutput, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self.algorithm
        old_values, returns = _require(batch.values, "values"), _require(batch.returns, "returns")
        losses, clipped = value_loss(output.values, old_values, returns, algorithm.value_clip)
        loss = compute_share(losses, batch, totals, algorithm.value_agg_mode, scale=algorithm.scale)
        return loss, {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": compute_share(clipped, batch, totals),
            "critic/vpred_mean": compute_share(output.values.detach(), batch, totals),
        }


@dataclass(frozen=True, slots=True)
class OutcomeObjective:
    """PRIME's reward model: beta * sum(lp - lp_ref) of a response is the logit of its being correct.

    Binary cross-entropy with the outcome (0 to 1), which is the advantage of every token; averaged over responses. Per
    token sg[loss] + (sigmoid(logit) - outcome) * beta * n * (lp - sg[lp]): the mean has the same value and gradient.
    """

    beta: float

    def __call__(self, output: ModelOutput, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        x = make_loss_inputs(output.logprobs, batch)  # the old log-probs are those of the reference
        scale, outcome = self.beta * x.episode_tokens, x.advantages
        logits = scale * x.mean_log_ratio(x.logprobs - x.old_logprobs)
        losses = binary_cross_entropy_with_logits(logits, outcome, reduction="none")
        losses = losses + (logits.sigmoid() - outcome) * scale * (x.logprobs - x.logprobs.detach())
        is_correct = ((logits > 0) == (outcome > 0.5)).to(losses.dtype)
        loss, accuracy = (
            compute_share(values, batch, totals, "seq-mean-token-mean") for values in (losses, is_correct)
        )
        return loss, {"process/loss": loss.detach(), "process/accuracy": accuracy}


def sft(output: ModelOutput, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens, averaged over tokens: supervised fine-tuning."""
    loss = compute_share(-output.logprobs, batch, totals)
    return loss, {"train/loss": loss.detach()}


def _require(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"the batch has no {name}; compute them before the update")
    return values
