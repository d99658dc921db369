"""The tokens of an episode: a tree of turns, whose paths from the root to a leaf become samples.

Tokens that the model generated are stored as the engine returned them, never decoded and tokenized again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.types import Completion, Failed, Sample


@dataclass(eq=False, slots=True)
class Turn:
    """One generated reply after `context`, the tokens since `parent` that were not generated.

    The context of a turn without a parent is the whole prompt. `reward` is the reward of this turn alone.
    """

    context: list[int]
    completion: Completion
    parent: Turn | None = None
    reward: float = 0.0

    def path(self) -> list[Turn]:
        turns: list[Turn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def get_tokens(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        return [token for turn in self.path() for part in (turn.context, turn.completion.token_ids) for token in part]

    def count_generated(self) -> int:
        """Return the number of generated tokens up to the end of this turn."""
        return sum(len(turn.completion.token_ids) for turn in self.path())


@dataclass
class Transcript:
    """All turns of an episode, in the order in which they ended, and the outcome of the episode.

    `score` is the reward that the agent or environment gave to the episode, besides the rewards of its turns; if None,
    a reward function or model scores the episode. An episode with a `failure` is not trained on. `messages` are the
    conversation of an episode with several turns.
    """

    turns: list[Turn] = field(default_factory=list)
    score: float | None = None
    failure: Failed | None = None
    is_truncated: bool = False  # ended by a limit of tokens, turns or time, and not by the model or its environment
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None

    def add(self, context: Sequence[int], completion: Completion, parent: Turn | None = None) -> Turn:
        """Add a turn that continues `parent`, or starts with the whole prompt."""
        turn = Turn(list(context), completion, parent)
        self.turns.append(turn)
        return turn

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def get_leaves(self) -> list[Turn]:
        """Return the turns that no other turn continues: the ends of the branches."""
        continued = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in continued]

    @property
    def own_score(self) -> float | None:
        """The episode's own score plus the rewards of its turns; None if the episode failed or has no own score."""
        return None if self.score is None or self.failure else self.score + sum(turn.reward for turn in self.turns)

    @property
    def finish_reason(self) -> str:
        return "length" if self.is_truncated else self.last.completion.finish_reason

    def to_samples(self, group: int, index: int, score: float, metrics: dict[str, float]) -> list[Sample]:
        """Return one sample for each branch. All have the score of the episode."""
        leaves = self.get_leaves()
        samples = [self._to_sample(leaf, group, index, score, metrics) for leaf in leaves]
        if len(leaves) == 1:
            return samples
        uses = Counter(id(turn) for leaf in leaves for turn in leaf.path())
        total = sum(len(turn.completion.token_ids) for turn in self.turns)
        return [
            replace(sample, branches=len(leaves), shares=_share_turns(leaf, uses), episode_tokens=total)
            for leaf, sample in zip(leaves, samples, strict=True)
        ]

    def _to_sample(self, leaf: Turn, group: int, index: int, score: float, metrics: dict[str, float]) -> Sample:
        path = leaf.path()
        lengths = [count for turn in path for count in (len(turn.context), len(turn.completion.token_ids))]
        mask = np.repeat([False, True] * len(path), lengths)
        logprobs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
        logprobs[mask] = np.concatenate([turn.completion.logprobs for turn in path])
        versions[mask] = np.concatenate([turn.completion.versions for turn in path])
        experts: npt.NDArray[np.integer] | None = None
        for turn in path:
            if (routed := turn.completion.routed_experts) is not None:
                known = routed[:0] if experts is None else experts
                # Tokens of earlier turns keep the experts that they were generated with.
                experts = np.concatenate([known, routed[len(known) :]])
        ends = np.cumsum(lengths)[1::2].tolist()
        return Sample(
            group=group,
            tokens=np.array(leaf.get_tokens(), np.int32),
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            score=score,
            finish_reason=self.finish_reason if leaf is self.last else leaf.completion.finish_reason,
            metrics=metrics,
            routed_experts=experts,
            engines=frozenset(turn.completion.engine for turn in path),
            turn_rewards=tuple((end - 1, turn.reward) for end, turn in zip(ends, path, strict=True) if turn.reward),
            index=index,
        )


def _share_turns(leaf: Turn, uses: Mapping[int, int]) -> npt.NDArray[np.float32]:
    """Return 1 / the number of branches that contain the turn of each token."""
    path = leaf.path()
    shares = np.array([1 / uses[id(turn)] for turn in path], np.float32)
    return np.repeat(shares, [len(turn.context) + len(turn.completion.token_ids) for turn in path])
