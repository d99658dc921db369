"""Advantage estimators: how much better an answer, or a token of it, was than could be expected.

An estimator is a function of `AdvantageInputs` that returns advantages per token, [T]; one that trains a critic returns
`(advantages, returns)`. Your own is `package.module:function` in `algorithm.adv_estimator`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl.algorithms.aggregate import segment_ids, segment_sum
from verl.algorithms.settings import EstimatorOptions

__all__ = [
    "ESTIMATORS",
    "AdvantageInputs",
    "Estimator",
    "EstimatorOptions",
    "explained_variance",
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "prime",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "return_to_go",
    "rloo",
    "whiten",
    "win_rate",
]

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The answers of a step as an estimator sees them: B sequences on this rank, and a way to the other ranks.

    Tokens lie end to end between `offsets`. What concerns groups and whole batches goes over all ranks, through
    `per_group` and `total`: an estimator is written as if there were one rank.
    """

    scores: Tensor  # [B] float64, after any KL penalty
    groups: Tensor  # [B] int64: the prompt that each sequence answers
    mask: Tensor  # [T] bool: the model generated this token
    offsets: Tensor  # [B+1]
    rewards: Tensor  # [T] float64: the same scores spread over tokens
    values: Tensor | None = None  # [T] float64, of the critic
    baselines: Tensor | None = None  # [B] float64: the score of the greedy answer to the same prompt
    process: Tensor | None = None  # [T] float64: token rewards of a process reward model
    options: EstimatorOptions = field(default_factory=EstimatorOptions)
    rank: int = 0
    gather: Callable[[Tensor], Tensor] = lambda rows: rows  # rows [n, k] of this rank -> rows [N, k] of all ranks

    @property
    def lengths(self) -> Tensor:
        """[B]: generated tokens of each sequence."""
        return segment_sum(self.mask.double(), self.offsets)

    def per_group(self, formula: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Apply a formula to the n samples of each prompt, on whatever ranks they are: columns [B] -> [B].

        `formula` is called once per prompt with one [n] tensor for each column, and returns [n].
        """
        own = torch.full_like(columns[0], self.rank)
        rows = self.gather(torch.stack([own, self.groups.to(own.dtype), *columns], dim=1))
        _, group, counts = torch.unique(rows[:, 1], return_inverse=True, return_counts=True)
        order = torch.argsort(group, stable=True)
        parts = rows[order, 2:].split(counts.tolist())
        result = rows.new_zeros(len(rows))
        if parts:
            result[order] = torch.cat([formula(*part.unbind(1)) for part in parts])
        return result[rows[:, 0] == self.rank]

    def total(self, *values: Tensor) -> list[float]:
        """Sums over all elements of each tensor, on all ranks."""
        sums = torch.stack([value.double().sum() for value in values])
        return self.gather(sums[None]).sum(0).tolist()

    def select(self, indices: Tensor, mask: Tensor, offsets: Tensor) -> AdvantageInputs:
        """Some of the sequences, laid end to end anew, with their scores alone."""
        return replace(
            self,
            scores=self.scores[indices],
            groups=self.groups[indices],
            mask=mask,
            offsets=offsets,
            rewards=torch.zeros(len(mask), dtype=self.rewards.dtype),
            values=None,
            baselines=None,
            process=None,
        )

    def per_token(self, values: Tensor) -> Tensor:
        """One value per sequence [B] -> the same on each of its generated tokens [T]."""
        return values[segment_ids(self.offsets)] * self.mask


Estimator = Callable[[AdvantageInputs], "Tensor | tuple[Tensor, Tensor]"]


def grpo(x: AdvantageInputs) -> Tensor:
    """(s - mean_g) / (std_g + 1e-6), unbiased; without the division it is Dr.GRPO. A group of one keeps its score."""

    def formula(s: Tensor) -> Tensor:
        if len(s) == 1:
            return s
        return (s - s.mean()) / (s.std() + EPS if x.options.by_std else 1.0)

    return x.per_token(x.per_group(formula, x.scores))


def rloo(x: AdvantageInputs) -> Tensor:
    """n/(n-1) * (s - mean_g): each score less the mean of the others. A group of one keeps its score."""

    def formula(s: Tensor) -> Tensor:
        n = len(s)
        return s if n == 1 else n / (n - 1) * (s - s.mean())

    return x.per_token(x.per_group(formula, x.scores))


def opo(x: AdvantageInputs) -> Tensor:
    """s - sum(len * s) / sum(len): the baseline of least variance, longer answers count more."""
    baseline = x.per_group(lambda s, n: ((n * s).sum() / n.sum().clamp(min=1)).expand(len(s)), x.scores, x.lengths)
    return x.per_token(x.scores - baseline)


def gpg(x: AdvantageInputs) -> Tensor:
    """B / (number of non-zero scores) * (s - mean_g)."""
    samples, nonzero = x.total(torch.ones_like(x.scores), x.scores != 0)
    return x.per_token(samples / max(nonzero, 1.0) * x.per_group(_centred, x.scores))


def grpo_passk(x: AdvantageInputs) -> Tensor:
    """Only the best answer of a group counts: s_max - s_second, over std_g if asked. An answer that is alone, since
    the others could not be scored, leads nobody: zero."""

    def formula(s: Tensor) -> Tensor:
        if len(s) < 2:
            return torch.zeros_like(s)
        (best, second), places = s.topk(2)
        lead = (best - second) / (s.std() + EPS if x.options.by_std else 1.0)
        return torch.zeros_like(s).scatter(0, places[:1], lead)

    return x.per_token(x.per_group(formula, x.scores))


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """The discounted return to go, whitened over the batch."""
    return whiten(return_to_go(x.rewards, x.mask, x.offsets, x.options.gamma), x)


def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Tensor:
    """s - mean_g on every token, whitened over the batch."""
    return whiten(x.per_token(x.per_group(_centred, x.scores)), x)


def remax(x: AdvantageInputs) -> Tensor:
    """The return to go, less the score of the greedy answer to the same prompt."""
    if x.baselines is None:
        raise ValueError("remax: the samples have no greedy baseline; run a greedy episode for each prompt")
    return return_to_go(x.rewards, x.mask, x.offsets, 1.0) - x.per_token(x.baselines)


def win_rate(x: AdvantageInputs) -> Tensor:
    """How often an answer beats the others of its group, a tie being half a win, less 1/2: what SPPO aims at."""

    def formula(s: Tensor) -> Tensor:
        wins = (s[:, None] > s).double() + 0.5 * (s[:, None] == s).double()
        if len(s) == 1:
            return torch.zeros_like(s)
        return (wins.sum(1) - 0.5) / (len(s) - 1) - 0.5  # an answer does not meet itself

    return x.per_token(x.per_group(formula, x.scores))


def prime(x: AdvantageInputs) -> Tensor:
    """RLOO on the scores, plus the return to go of the process rewards less what the others' tokens got on average."""
    if x.process is None:
        raise ValueError("prime: the samples have no process rewards; a process reward model must have seen them")

    def others(means: Tensor) -> Tensor:
        return (means.sum() - means) / max(len(means) - 1, 1)

    means = segment_sum(x.process * x.mask, x.offsets) / x.lengths.clamp(min=1)
    gained = x.process - x.per_token(x.per_group(others, means))
    return rloo(x) + return_to_go(gained, x.mask, x.offsets, x.options.gamma)


def gae(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """delta = r + gamma*V' - V, A = delta + gamma*lam*A', right to left over the generated tokens: (whitened A, A + V).

    V' and A' are those of the next generated token: what a tool wrote in between is skipped.
    """
    if x.values is None:
        raise ValueError("gae: the samples have no values; a critic must have seen them")
    gamma, lam = x.options.gamma, x.options.lam
    deltas = x.rewards + gamma * _next_generated(x.values, x.mask, x.offsets) - x.values
    advantages = return_to_go(deltas, x.mask, x.offsets, gamma * lam)
    return whiten(advantages, x), (advantages + x.values) * x.mask


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "prime": prime,
    "win_rate": win_rate,
}
"""`algorithm.adv_estimator` -> the function that it is. PRIME takes `prime` for rloo, and SPPO takes `win_rate`."""


def whiten(values: Tensor, x: AdvantageInputs) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8) over all generated tokens of all ranks, unbiased: [T] -> [T]."""
    count, total = x.total(x.mask, values * x.mask)
    centred = (values - total / max(count, 1.0)) * x.mask
    (squares,) = x.total(centred.square())
    return centred / (squares / max(count - 1.0, 1.0) + 1e-8) ** 0.5


def explained_variance(x: AdvantageInputs, returns: Tensor) -> float:
    """1 - var(R - V) / var(R) over all generated tokens: 1 for a critic that knows, 0 for one that knows nothing."""
    assert x.values is not None
    error = (returns - x.values) * x.mask
    count, r, rr, e, ee = x.total(x.mask, returns * x.mask, (returns * x.mask).square(), error, error.square())
    count = max(count, 1.0)
    variance = rr / count - (r / count) ** 2
    return 1.0 - (ee / count - (e / count) ** 2) / variance if variance > 1e-12 else 0.0


def return_to_go(rewards: Tensor, mask: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """R = r + decay * R', right to left over the generated tokens of each sequence: [T] -> [T], 0 elsewhere."""
    places = mask.nonzero().squeeze(-1)
    if not len(places):
        return torch.zeros_like(rewards)
    row = segment_ids(offsets)[places]
    counts = torch.bincount(row, minlength=len(offsets) - 1)
    column = counts.cumsum(0)[row] - 1 - torch.arange(len(places), device=places.device)  # 0: the last one generated
    table = rewards.new_zeros(len(counts), int(counts.max()))
    table[row, column] = rewards[places]
    for k in range(1, table.shape[1]):
        table[:, k] += decay * table[:, k - 1]
    return torch.zeros_like(rewards).index_copy(0, places, table[row, column])


def _next_generated(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """At each generated token, the value at the next one of its sequence; 0 at the last: [T] -> [T]."""
    places = mask.nonzero().squeeze(-1)
    row = segment_ids(offsets)[places]
    following = torch.where(row[1:] == row[:-1], values[places[1:]], 0.0)
    return torch.zeros_like(values).index_copy(0, places[:-1], following)


def _centred(s: Tensor) -> Tensor:
    return s - s.mean()
