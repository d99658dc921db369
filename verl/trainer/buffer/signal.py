"""Dynamic sampling: which groups have different scores, so that there is something to learn from them."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ConfigError
from verl.types import SampleHandle

_SCORE_NAMES = ("score", "seq_reward", "acc")  # acc: also of rewards that return only a number


def group_has_signal(samples: Sequence[SampleHandle], metric: str) -> bool:
    """Return whether a metric differs within a group: the score, or a number that the reward function returned.

    The score is that of the reward function, without penalties for length: a group in which every response is wrong has
    no signal, however long its responses are. `seq_final_reward` includes the penalties. A group with a single scored
    sample has no signal.
    """
    return len({_get_value(sample, metric) for sample in samples}) > 1


def get_raw_score(sample: SampleHandle) -> float:
    """Return the score of the reward function, without penalties for length."""
    return sample.metrics.get("raw_score", sample.score)


def _get_value(sample: SampleHandle, metric: str) -> float:
    if metric == "seq_final_reward":
        return sample.score
    if metric in sample.metrics:
        return sample.metrics[metric]
    if metric in _SCORE_NAMES:
        return get_raw_score(sample)
    raise ConfigError(
        [
            f"algorithm.filter_groups.metric={metric}: the reward of a response to prompt {sample.group} has no such "
            f"number; choose one of {', '.join(['score', *sorted(sample.metrics)])}, or return it from the reward "
            "function in a dict"
        ]
    )
