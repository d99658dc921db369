"""What a loss must know of the whole mini-batch before the first micro-batch is trained on.

Some formulas compare a token with all others, or an answer with another one that may lie on another rank. A survey
takes the log-probs that all tokens have now, over all ranks, and writes what it finds into fields of the batch. The
update that follows then sees every token by itself, and its gradient does not depend on how the mini-batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.aggregate import segment_sum
from verl.algorithms.losses import LossInputs, LossOptions

__all__ = [
    "PREPASSES",
    "Prepass",
    "PrepassResult",
    "covariance",
    "pairs",
    "prepass_clip_cov",
    "prepass_dpo",
    "prepass_kl_cov",
    "token_noise",
]


@dataclass(frozen=True, slots=True)
class PrepassResult:
    """Fields of the batch to replace, each [T], and numbers for the user, the same on all ranks."""

    fields: dict[str, Tensor]
    metrics: dict[str, float]


Prepass = Callable[[LossInputs, AdvantageInputs, Tensor, LossOptions], PrepassResult]
"""(tokens, their episodes with the way to other ranks, noise [T], options) -> what was found.

`noise` is a random number in [0, 1) that belongs to a token, wherever it is computed.
"""


def token_noise(*identity: Tensor) -> Tensor:
    """A number in [0, 1) for each token, a hash of what identifies it: integers [T] each -> [T] float64.

    The same token gets the same number on any rank and in any micro-batch.
    """
    state = torch.zeros_like(identity[0])
    for part in identity:
        for factor, shift in ((-7046029254386353131, 32), (-4417276706812531889, 29)):  # odd: no information is lost
            state = (state ^ part) * factor
            state = state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))
    return ((state >> 11) & ((1 << 53) - 1)).double() / 2**53


def covariance(x: LossInputs, episodes: AdvantageInputs) -> Tensor:
    """(A - mean A) * (lp - mean lp), the means over all generated tokens of the mini-batch: [T]."""
    count, advantages, logprobs = episodes.total(x.mask, x.advantages * x.mask, x.logprobs * x.mask)
    count = max(count, 1.0)
    return (x.advantages - advantages / count) * (x.logprobs - logprobs / count) * x.mask


def prepass_clip_cov(x: LossInputs, episodes: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Of the tokens with a covariance in (lb, ub) that no clip holds already, some at random: `clip_cov_ratio` of all
    tokens, in expectation."""
    cov, ratio = covariance(x, episodes), x.ratio
    above, below = ratio > 1.0 + o.clip_high, (ratio < 1.0 - o.clip_low) | (ratio > o.clip_c)
    held = ((x.advantages > 0) & above) | ((x.advantages < 0) & below)
    eligible = x.mask & (cov > o.clip_cov_lb) & (cov < o.clip_cov_ub) & ~held
    tokens, candidates = episodes.total(x.mask, eligible)
    return _chosen(eligible & (noise < o.clip_cov_ratio * tokens / max(candidates, 1.0)), episodes)


def prepass_kl_cov(x: LossInputs, episodes: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """The `kl_cov_ratio` of all tokens with the largest covariance, at least one; the noise settles ties."""
    falling = -covariance(x, episodes).double()
    (tokens,) = episodes.total(x.mask)
    count = max(1, int(o.kl_cov_ratio * tokens))
    first = _sorted(episodes.gather(_sorted(torch.stack([falling, noise], 1)[x.mask])[:count]))[:count]
    if not len(first):
        return _chosen(torch.zeros_like(x.mask), episodes)
    last, draw = first[-1]
    return _chosen(x.mask & ((falling < last) | ((falling == last) & (noise <= draw))), episodes)


def pairs(scores: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The best answer of a group with the worst, the second best with the second worst, while their scores differ.

    Of answers with equal scores the one with less `noise` comes first, in whatever order they are given.

    >>> better, worse = pairs(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([0.5, 0.1, 0.2, 0.4, 0.3]))
    >>> better.tolist(), worse.tolist()
    ([1, 4], [2, 0])
    """
    drawn = noise.argsort()
    order = drawn[scores[drawn].argsort(stable=True, descending=True)]
    reverse = drawn[scores[drawn].argsort(stable=True)]
    half = len(scores) // 2
    differ = scores[order[:half]] > scores[reverse[:half]]
    return order[:half][differ], reverse[:half][differ]


def prepass_dpo(x: LossInputs, episodes: AdvantageInputs, noise: Tensor, o: LossOptions) -> PrepassResult:
    """Online DPO: margin = beta * ((lp - lp_ref) of the better answer - that of the worse one), for every pair.

    The loss -log sigmoid(margin), a mean over pairs, moves lp by +-beta * sigmoid(-margin): that is left as
    `advantages`. Answers without a pair are left out of the mask; one without a generated token has none.
    """
    if x.ref_logprobs is None:
        raise ValueError("dpo: the batch has no ref_logprobs; it is held to a reference")
    shift = segment_sum((x.logprobs - x.ref_logprobs).double() * x.mask, x.offsets)

    def matched(scores: Tensor, draws: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        some = lengths.nonzero().squeeze(-1)
        better, worse = pairs(scores[some], draws[some])
        return some[better], some[worse]

    def margins(scores: Tensor, draws: Tensor, lengths: Tensor, shifts: Tensor) -> Tensor:
        better, worse = matched(scores, draws, lengths)
        found = o.dpo_beta * (shifts[better] - shifts[worse])
        return torch.zeros_like(scores).index_copy(0, better, found).index_copy(0, worse, found)

    def side(scores: Tensor, draws: Tensor, lengths: Tensor) -> Tensor:
        better, worse = matched(scores, draws, lengths)
        return torch.zeros_like(scores).index_fill(0, better, 1.0).index_fill(0, worse, -1.0)

    answers = episodes.scores, segment_sum(noise, x.offsets), episodes.lengths
    sides, margin = episodes.per_group(side, *answers), episodes.per_group(margins, *answers, shift)
    paired = sides != 0
    won = (0.5 + 0.5 * margin.sign()) * paired  # a margin of 0 is half right
    count, loss, right, total = episodes.total(paired, -logsigmoid(margin) * paired, won, margin * paired)
    some = max(count, 1.0)
    return PrepassResult(
        {
            "advantages": episodes.per_token(sides * o.dpo_beta * torch.sigmoid(-margin)).to(x.logprobs.dtype),
            "mask": episodes.per_token(paired.double()) > 0,
        },
        {
            "actor/dpo_loss": loss / some,
            "actor/dpo_accuracy": right / some,
            "actor/dpo_margin": total / some,
            "actor/dpo_pairs": count / 2,
        },
    )


PREPASSES: dict[str, Prepass] = {"clip_cov": prepass_clip_cov, "kl_cov": prepass_kl_cov, "dpo": prepass_dpo}
"""Losses that need one."""


def _sorted(rows: Tensor) -> Tensor:
    """Rows of two columns by the first, then by the second: [n, 2] -> [n, 2]."""
    rows = rows[rows[:, 1].argsort()]
    return rows[rows[:, 0].argsort(stable=True)]


def _chosen(chosen: Tensor, episodes: AdvantageInputs) -> PrepassResult:
    found, tokens = episodes.total(chosen, episodes.mask)
    return PrepassResult({"chosen": chosen}, {"actor/chosen_tokens": found / max(tokens, 1.0)})
