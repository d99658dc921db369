"""What an engine minimises: losses put together, each term divided by the same totals of the whole mini-batch.

An objective is a frozen record of plain numbers, so that it can be sent to a worker, and a callable
`(output, batch, totals) -> (loss share, metric shares)`. It asks of `output` and `batch` only the attributes below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl.algorithms.aggregate import Totals, aggregate
from verl.algorithms.kl import EXACT, kl_penalty
from verl.algorithms.losses import LOSSES, PER_SEQUENCE, LossInputs, LossOptions, PolicyLoss
from verl.custom_functions import load_function

__all__ = ["OutcomeObjective", "PolicyObjective", "make_loss_inputs", "sft"]


class Output(Protocol):
    """Of the model, each [T]; the exact KL where a reference was given."""

    @property
    def logprobs(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...
    @property
    def kl(self) -> Tensor | None: ...


class Batch(Protocol):
    """Of the data: mask [T], offsets [B+1], the others [T] or None where not known."""

    @property
    def mask(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def old_logprobs(self) -> Tensor | None: ...
    @property
    def ref_logprobs(self) -> Tensor | None: ...
    @property
    def advantages(self) -> Tensor | None: ...
    @property
    def returns(self) -> Tensor | None: ...
    @property
    def weights(self) -> Tensor | None: ...
    @property
    def chosen(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Policy loss - entropy_coeff * entropy + kl_coef * KL to the reference.

    `loss_mode` is a name of `LOSSES` or a user's `package.module:function`. `scale` is the length L of
    `seq-mean-token-sum-norm`; `kl_coef=None` leaves the KL out and needs no reference.
    """

    loss_mode: str = "vanilla"
    options: LossOptions = field(default_factory=LossOptions)
    agg_mode: str = "token-mean"
    scale: float | None = None
    entropy_coeff: float = 0.0
    kl_coef: float | None = None
    kl_type: str = "low_var_kl"

    def __call__(self, output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def share(values: Tensor, mode: str = self.agg_mode) -> Tensor:
            return aggregate(values, batch.mask, batch.offsets, mode, totals, scale=self.scale)

        def token_mean(values: Tensor | None) -> Tensor:
            values = output.logprobs * 0 if values is None else values.to(output.logprobs.dtype)
            return share(values.detach(), "token-mean")

        tokens = make_loss_inputs(output.logprobs, batch)
        policy = self._policy_loss(tokens)
        weighted = policy.loss if batch.weights is None else policy.loss * batch.weights
        loss = share(weighted, "seq-mean-token-mean" if self.loss_mode in PER_SEQUENCE else self.agg_mode)
        upper, lower = token_mean(policy.clipped_high), token_mean(policy.clipped_low)
        metrics = {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": upper + lower,
            "actor/pg_clipfrac_upper": upper,
            "actor/pg_clipfrac_lower": lower,
            "actor/pg_clipfrac_dual": token_mean(policy.clipped_dual),
            "actor/ppo_kl": token_mean(tokens.old_logprobs - tokens.logprobs),
            "actor/entropy": token_mean(output.entropy),
        }
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * share(output.entropy)
        if self.kl_coef is not None:
            kl = share(self._kl(output, batch))
            loss = loss + self.kl_coef * kl
            metrics["actor/kl_loss"] = kl.detach()
        return loss, metrics

    def _kl(self, output: Output, batch: Batch) -> Tensor:
        if self.kl_type == EXACT:
            return _known(output.kl, "kl")
        return kl_penalty(output.logprobs, _known(batch.ref_logprobs, "ref_logprobs"), self.kl_type)

    def _policy_loss(self, tokens: LossInputs) -> PolicyLoss:
        found = load_function(self.loss_mode, LOSSES, "policy_loss.loss_mode")(tokens, self.options)
        return PolicyLoss(found) if isinstance(found, Tensor) else found


def make_loss_inputs(logprobs: Tensor, batch: Batch) -> LossInputs:
    """What a policy loss sees of a batch whose tokens have these log-probs now."""
    return LossInputs(
        logprobs,
        _known(batch.old_logprobs, "old_logprobs"),
        _known(batch.advantages, "advantages"),
        batch.mask,
        batch.offsets,
        batch.ref_logprobs,
        batch.chosen,
    )


@dataclass(frozen=True, slots=True)
class OutcomeObjective:
    """PRIME's process reward model: beta * sum(lp - lp_ref) of an answer is the logit of its being right.

    Binary cross-entropy with the outcome, which lies in `returns` (0 to 1) on every token; the mean over answers.
    """

    beta: float

    def __call__(self, output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        ref, outcome = _known(batch.ref_logprobs, "ref_logprobs"), _known(batch.returns, "returns")
        tokens = LossInputs(output.logprobs, ref, outcome, batch.mask, batch.offsets)
        logits = self.beta * tokens.sequence_sum(output.logprobs - ref)
        losses = binary_cross_entropy_with_logits(logits, outcome, reduction="none")
        right = ((logits > 0) == (outcome > 0.5)).to(losses.dtype)
        loss, accuracy = (
            aggregate(values, batch.mask, batch.offsets, "seq-mean-token-mean", totals) for values in (losses, right)
        )
        return loss, {"process/loss": loss.detach(), "process/accuracy": accuracy}


def sft(output: Output, batch: Batch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the masked tokens, as a mean over tokens: supervised training."""
    loss = aggregate(-output.logprobs, batch.mask, batch.offsets, "token-mean", totals)
    return loss, {"train/loss": loss.detach()}


def _known(values: Tensor | None, name: str) -> Tensor:
    if values is None:
        raise ValueError(f"PolicyObjective: the batch has no {name}; compute them before the update")
    return values
