"""Statistics of several scored responses per prompt: mean@n, pass@k, maj@n, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.rewards.final_answer import extract_final_answer


@dataclass(frozen=True, slots=True)
class ScoredResponses:
    """The responses to one prompt that could be scored."""

    texts: Sequence[str]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    prompts: int


def pass_at_k(responses: int, correct: int, k: int) -> float:
    """Return the probability that at least one of `k` responses, drawn without replacement, is correct.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. (2021).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= correct <= responses or not 1 <= k <= responses:
        raise ValueError(f"pass@{k} of {correct} correct among {responses} responses: needs correct, k <= responses")
    return 1.0 - math.comb(responses - correct, k) / math.comb(responses, k)


def pass_rates(prompts: Sequence[Sequence[float]], k: int, threshold: float) -> list[float]:
    """Return the pass@k of every prompt with at least k scores; those from `threshold` on are of correct responses."""
    enough = (scores for scores in prompts if len(scores) >= k)
    return [pass_at_k(len(scores), sum(score >= threshold for score in scores), k) for scores in enough]


def majority_score(votes: Sequence[str], scores: Sequence[float]) -> float:
    """Return the mean score of the responses with the most frequent vote, their final answer; ties are averaged.

    >>> majority_score(["4", "4", "5"], [1.0, 1.0, 0.0])
    1.0
    """
    counts = Counter(votes)
    winners = {vote for vote, count in counts.items() if count == max(counts.values())}
    by_winner = [[s for vote, s in zip(votes, scores, strict=True) if vote == winner] for winner in winners]
    return float(np.mean([np.mean(of_winner) for of_winner in by_winner]))


def pass_counts(responses: int) -> list[int]:
    """Return the k of pass@k that are reported: powers of two, and the number of responses.

    >>> pass_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({*(2**power for power in range(responses.bit_length())), responses})


def bootstrap(values: Sequence[float], *, draws: int = 1000, seed: int = 0) -> Estimate:
    """Return the mean of the values with its bootstrap confidence interval."""
    array = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    means = np.array([random.choice(array, len(array)).mean() for _ in range(draws)])
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def summarize(
    prompts: Sequence[ScoredResponses],
    *,
    threshold: float,
    ks: Sequence[int] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Return all metrics of the prompts of one data source; a response with a score of `threshold` is correct.

    `ks` are by default the powers of two up to the number of responses. Prompts with fewer than k scored responses do
    not count for pass@k.
    """
    prompts = [responses for responses in prompts if responses.scores]
    if not prompts:
        return {}
    most = max(len(responses.scores) for responses in prompts)
    ks = ks or pass_counts(most)
    values: dict[str, list[float]] = {f"mean@{most}": [float(np.mean(responses.scores)) for responses in prompts]}
    for k in ks:
        values[f"pass@{k}"] = pass_rates([responses.scores for responses in prompts], k, threshold)
    if most > 1:
        values[f"maj@{most}"] = [
            majority_score([extract_final_answer(text) for text in responses.texts], responses.scores)
            for responses in prompts
        ]
    return {name: bootstrap(each, draws=draws, seed=seed) for name, each in values.items() if each}
