"""What scores of several answers a prompt say of a model: mean@n, pass@k, maj@n, and how sure one can be of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.rewards.scorers.gsm8k import final_number
from verl.rewards.scorers.math import last_boxed

__all__ = ["Answers", "Estimate", "bootstrap", "final_answer", "majority", "pass_at_k", "summary"]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one prompt that could be scored."""

    texts: Sequence[str]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts, and the interval that holds 95 % of the means of prompts drawn again (bootstrap)."""

    value: float
    low: float
    high: float
    prompts: int


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The chance that at least one of `k` answers is right, if they are drawn from these without putting back.

    It is unbiased: 1 - C(n-c, k) / C(n, k). (Chen et al. 2021)

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= right <= answers or not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {right} right answers among {answers}: there must be at least k, and no fewer")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def majority(answers: Answers) -> float:
    """The score of the answer that is given most often; where several are, the mean of theirs.

    >>> majority(Answers(["#### 4", "so #### 4", "#### 5"], [1.0, 1.0, 0.0]))
    1.0
    """
    votes = [final_answer(text) for text in answers.texts]
    counts = Counter(votes)
    winners = {vote for vote, count in counts.items() if count == max(counts.values())}
    scores = [[s for vote, s in zip(votes, answers.scores, strict=True) if vote == winner] for winner in winners]
    return float(np.mean([np.mean(own) for own in scores]))


def final_answer(text: str) -> str:
    """What an answer comes down to: the number after ####, what is in the last box, or else the text in plain words.

    >>> final_answer("2 + 2 = 4\\n#### 4"), final_answer(r"It is \\boxed{ 4 }."), final_answer(" The Answer!")
    ('4', '4', 'the answer')
    """
    if (number := final_number(text)) is not None:
        return f"{number.normalize():f}"
    if (boxed := last_boxed(text)) is not None:
        return " ".join(boxed.split())
    return " ".join(re.sub(r"[^\w\s.+-]", " ", text.casefold()).split()).strip(".")


def bootstrap(values: Sequence[float], *, draws: int = 1000, seed: int = 0) -> Estimate:
    """The mean, with its interval."""
    array = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    means = np.array([random.choice(array, len(array)).mean() for _ in range(draws)])
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def summary(
    prompts: Sequence[Answers], *, threshold: float, ks: Sequence[int] | None = None, draws: int = 1000, seed: int = 0
) -> dict[str, Estimate]:
    """All figures of the prompts of one data source. An answer is right from a score of `threshold` on.

    `ks` of pass@k: powers of two up to the number of answers, unless they are given. A prompt with fewer than k scored
    answers does not count for pass@k.
    """
    prompts = [answers for answers in prompts if answers.scores]
    if not prompts:
        return {}
    most = max(len(answers.scores) for answers in prompts)
    ks = ks or sorted({*(2**power for power in range(most.bit_length())), most})
    figures: dict[str, list[float]] = {f"mean@{most}": [float(np.mean(answers.scores)) for answers in prompts]}
    for k in ks:
        enough = [answers for answers in prompts if len(answers.scores) >= k]
        right = [sum(score >= threshold for score in answers.scores) for answers in enough]
        figures[f"pass@{k}"] = [pass_at_k(len(a.scores), c, k) for a, c in zip(enough, right, strict=True)]
    if most > 1:
        figures[f"maj@{most}"] = [majority(answers) for answers in prompts]
    return {name: bootstrap(values, draws=draws, seed=seed) for name, values in figures.items() if values}
