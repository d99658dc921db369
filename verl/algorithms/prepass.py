"""Prepass: what a loss must know about the whole mini-batch before the first micro-batch is trained on.

Some losses compare a token with all others, or a response with one on another rank; or they need the ratio of a whole
episode, whose branches may be on several ranks. A prepass takes the current
log-probs of all tokens, over all ranks, and stores its result in fields of the batch. The update then handles every
token separately, and its gradient does not depend on how the mini-batch is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.correction import correct_mismatch
from verl.algorithms.losses import LossInputs, clip_log_ratio
from verl.algorithms.settings import Correction, LossOptions


@dataclass(frozen=True, slots=True)
class PrepassResult:
    """Batch fields to replace, each [T], and metrics, equal on all ranks."""

    fields: dict[str, Tensor]
    metrics: dict[str, float]


Prepass = Callable[[LossInputs, AdvantageInputs, Tensor, LossOptions], PrepassResult]
"""(tokens, their samples with access to other ranks, noise [T], options) -> result.

`noise` is uniform in [0, 1) and fixed per token, wherever it is computed.
"""


def token_noise(*identity: Tensor) -> Tensor:
    """Return a number in [0, 1) per token, a hash of its identity: int64 [T] each -> float64 [T].

    A token gets the same number on any rank and in any micro-batch.
    """
    state = torch.zeros_like(identity[0])
    for part in identity:
        for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29)):  # odd factors are invertible
            state = (state ^ part) * factor
            state = state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))
    return ((state >> 11) & ((1 << 53) - 1)).double() / 2**53


def covariance(x: LossInputs, samples: AdvantageInputs) -> Tensor:
    """(A - mean A) * (lp - mean lp), with means over all generated tokens of the mini-batch: [T]."""
    weights = samples.token_weights
    count, advantages, logprobs = samples.total(weights, x.advantages * weights, x.logprobs * weights)
    count = max(count, 1.0)
    return (x.advantages - advantages / count) * (x.logprobs - logprobs / count) * x.mask


def prepass_clip_cov(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Choose at random among tokens with a covariance in (lb, ub) that are not clipped already.

    Their expected number is `clip_cov_ratio` of all generated tokens.
    """
    cov, ratio = covariance(x, samples), x.ratio
    above, below = ratio > 1.0 + o.clip_high, ratio < 1.0 - o.clip_low
    is_clipped = ((x.advantages > 0) & above) | ((x.advantages < 0) & below)
    eligible = x.mask & (cov > o.clip_cov_lb) & (cov < o.clip_cov_ub) & ~is_clipped
    tokens, candidates = samples.total(samples.token_weights, samples.token_weights * eligible)
    return _select(eligible & (noise < o.clip_cov_ratio * tokens / max(candidates, 1.0)), samples)


def prepass_kl_cov(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Choose the `kl_cov_ratio` of all tokens with the largest covariance, at least one; noise breaks ties."""
    key, weights = -covariance(x, samples).double(), samples.token_weights
    count = max(1, int(o.kl_cov_ratio * samples.total(weights)[0]))
    first = _take_first(samples.gather(_take_first(torch.stack([key, noise, weights], 1)[x.mask], count)), count)
    if not len(first):
        return _select(torch.zeros_like(x.mask), samples)
    last_key, last_noise, _ = first[-1]
    return _select(x.mask & ((key < last_key) | ((key == last_key) & (noise <= last_noise))), samples)


def pairs(scores: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the best response of a group with the worst, the second best with the second worst, while scores differ.

    Among equal scores the response with less `noise` comes first, so that the order of the input does not matter.

    >>> better, worse = pairs(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([0.5, 0.1, 0.2, 0.4, 0.3]))
    >>> better.tolist(), worse.tolist()
    ([1, 4], [2, 0])
    """
    by_noise = noise.argsort()
    order = by_noise[scores[by_noise].argsort(stable=True, descending=True)]
    reverse = by_noise[scores[by_noise].argsort(stable=True)]
    half = len(scores) // 2
    differ = scores[order[:half]] > scores[reverse[:half]]
    return order[:half][differ], reverse[:half][differ]


def prepass_dpo(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Online DPO: margin = beta * ((lp - lp_ref) of the better response - that of the worse one), for every pair.

    The gradient of -log sigmoid(margin), averaged over pairs, with respect to lp is -+beta * sigmoid(-margin): stored
    as `advantages`. Responses without a pair are masked out; one without generated tokens is never paired.
    """
    if x.ref_logprobs is None:
        raise ValueError("dpo: the batch has no ref_logprobs; compute them with a reference model")
    shift = samples.sum_sequences(x.logprobs - x.ref_logprobs)

    def match(scores: Tensor, noises: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        generated = lengths.nonzero().squeeze(-1)
        better, worse = pairs(scores[generated], noises[generated])
        return generated[better], generated[worse]

    def margins(scores: Tensor, noises: Tensor, lengths: Tensor, shifts: Tensor) -> Tensor:
        better, worse = match(scores, noises, lengths)
        margin = o.dpo_beta * (shifts[better] - shifts[worse])
        return torch.zeros_like(scores).index_copy(0, better, margin).index_copy(0, worse, margin)

    def signs(scores: Tensor, noises: Tensor, lengths: Tensor) -> Tensor:
        better, worse = match(scores, noises, lengths)
        return torch.zeros_like(scores).index_fill(0, better, 1.0).index_fill(0, worse, -1.0)

    order = token_noise(samples.groups, samples.episode_names)  # equal for all branches of an episode
    columns = samples.scores, order, samples.lengths
    sign, margin = samples.per_group(signs, *columns), samples.per_group(margins, *columns, shift)
    paired = (sign != 0) * samples.episode_shares
    correct = (0.5 + 0.5 * margin.sign()) * paired  # a margin of 0 counts half
    count, loss, accuracy, total = samples.total(paired, -logsigmoid(margin) * paired, correct, margin * paired)
    divisor = max(count, 1.0)
    return PrepassResult(
        {
            "advantages": samples.per_token(sign * o.dpo_beta * torch.sigmoid(-margin)).to(x.logprobs.dtype),
            "mask": samples.per_token(paired) > 0,
        },
        {
            "actor/dpo_loss": loss / divisor,
            "actor/dpo_accuracy": accuracy / divisor,
            "actor/dpo_margin": total / divisor,
            "actor/dpo_pairs": count / 2,
        },
    )


def prepass_log_ratio(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Average d over whole episodes."""
    return PrepassResult({"episode_log_ratio": samples.average_episodes(x.logprobs - x.old_logprobs)}, {})


def prepass_clipped_log_ratio(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Average the clipped d of `geo_mean` over whole episodes."""
    return PrepassResult({"episode_log_ratio": samples.average_episodes(clip_log_ratio(x, o))}, {})


def prepass_lag(x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Average over whole episodes how much less likely the policy is to sample them than the engine was."""
    return PrepassResult({"episode_lag": samples.average_episodes(x.lag)}, {})


def prepass_correction(
    x: LossInputs, samples: AdvantageInputs, noise: Tensor, o: LossOptions, *, correction: Correction
) -> PrepassResult:
    """Correct the mismatch with the engine, whose log-probs are the old ones."""
    return PrepassResult(*correct_mismatch(samples, x.logprobs, x.old_logprobs, correction))


PREPASSES: dict[str, Prepass] = {"clip_cov": prepass_clip_cov, "kl_cov": prepass_kl_cov, "dpo": prepass_dpo}
"""`loss_mode` -> prepass, for the losses that need one."""

BRANCH_PREPASSES: dict[str, Prepass] = {
    "gspo": prepass_log_ratio,
    "sppo": prepass_log_ratio,
    "geo_mean": prepass_clipped_log_ratio,
}
"""`loss_mode` -> prepass, for the losses that need one if episodes have several branches."""


def _take_first(rows: Tensor, count: int) -> Tensor:
    """Return the first rows by key, then by noise, whose weights add up to `count`: (key, noise, weight) [n, 3]."""
    rows = rows[rows[:, 1].argsort()]
    rows = rows[rows[:, 0].argsort(stable=True)]
    return rows[: int((rows[:, 2].cumsum(0) < count - 1e-6).sum()) + 1]


def _select(selected: Tensor, samples: AdvantageInputs) -> PrepassResult:
    return PrepassResult({"selected": selected}, {"actor/chosen_tokens": samples.token_mean(selected)})
