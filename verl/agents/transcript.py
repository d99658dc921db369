"""The tokens of an episode: a tree of turns, whose paths from the root to a leaf become samples.

Tokens that the model generated are stored as the engine returned them, never decoded and tokenized again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.types import Completion, Failed, Sample


@dataclass(eq=False, slots=True)
class Turn:
    """One generated reply after `context`, the tokens since `parent` that were not generated.

    The context of a turn without a parent begins with the prompt of the episode, `prompt_tokens` long; what follows the
    prompt counts as response. `reward` is the reward of this turn alone. Turns of a group that begin in the same
    `state`, a number below 2**53, may be compared with each other.
    """

    context: list[int]
    completion: Completion
    prompt_tokens: int
    parent: Turn | None = None
    reward: float = 0.0
    state: int = 0

    def path(self) -> list[Turn]:
        turns: list[Turn] = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def get_tokens(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        return [token for turn in self.path() for part in (turn.context, turn.completion.token_ids) for token in part]

    def count_response(self) -> int:
        """Return the number of tokens from the prompt to the end of this turn, generated or not."""
        tokens = sum(len(turn.context) + len(turn.completion.token_ids) for turn in self.path())
        return tokens - self.prompt_tokens


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

    def add(
        self,
        context: Sequence[int],
        completion: Completion,
        parent: Turn | None = None,
        *,
        prompt_tokens: int | None = None,
    ) -> Turn:
        """Add a turn that continues `parent`, or starts with the prompt: the whole context by default."""
        if prompt_tokens is None:
            prompt_tokens = len(context) if parent is None else parent.prompt_tokens
        turn = Turn(list(context), completion, prompt_tokens, parent)
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
        """Whether a limit ended the episode or the last reply of any branch ("length"), or not ("stop")."""
        reasons = [leaf.completion.finish_reason for leaf in self.get_leaves()]
        return "length" if self.is_truncated or "length" in reasons else reasons[-1]

    def count_generated(self) -> int:
        """Return the number of tokens that the model generated in all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def response_length(self) -> int:
        """Tokens that the longest branch uses of the budget for a response."""
        return max(leaf.count_response() for leaf in self.get_leaves())

    def to_samples(self, group: int, index: int, score: float, metrics: dict[str, float]) -> list[Sample]:
        """Return one sample for each branch."""
        leaves = self.get_leaves()
        episode = partial(
            Sample,
            group=group,
            index=index,
            score=score,
            metrics=metrics,
            finish_reason=self.finish_reason,
            engines=frozenset(
                engine for turn in self.turns for engine in (turn.completion.engine, *turn.completion.earlier_engines)
            ),
            branches=len(leaves),
            episode_tokens=self.count_generated(),
            preemptions=sum(turn.completion.preemptions for turn in self.turns),
        )
        uses = Counter(id(turn) for leaf in leaves for turn in leaf.path())
        shares = [_share_turns(leaf, uses) if len(leaves) > 1 else None for leaf in leaves]
        return [
            episode(
                **_lay_turns(leaf), turn_rewards=self._place_rewards(leaf), turns=self._list_turns(leaf), shares=share
            )
            for leaf, share in zip(leaves, shares, strict=True)
        ]

    def _place_rewards(self, leaf: Turn) -> tuple[tuple[int, float], ...]:
        """Return the rewards of turns and their positions in the branch that ends with `leaf`.

        A reward is at the end of the last turn of the branch that ended before it was earned, so that it is credited
        only to what led to it; at position 0, in the prompt, if it was earned before the branch began.
        """
        path = {id(turn) for turn in leaf.path()}
        rewards = defaultdict[int, float](float)
        end = position = 0
        for turn in self.turns:
            if id(turn) in path:
                end += len(turn.context) + len(turn.completion.token_ids)
                position = end - 1
            rewards[position] += turn.reward
        return tuple((position, reward) for position, reward in rewards.items() if reward)

    def _list_turns(self, leaf: Turn) -> tuple[tuple[int, int, float, int], ...]:
        """Return (position of the last token, index in the episode, reward, state) of the turns up to `leaf`."""
        indices, path = {id(turn): index for index, turn in enumerate(self.turns)}, leaf.path()
        ends = np.cumsum([len(turn.context) + len(turn.completion.token_ids) for turn in path]).tolist()
        return tuple(
            (end - 1, indices[id(turn)], turn.reward, turn.state) for end, turn in zip(ends, path, strict=True)
        )


def _lay_turns(leaf: Turn) -> dict[str, Any]:
    """Return the arrays of a sample for the branch that ends with `leaf`."""
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
    kept = [ids for turn in path if (ids := turn.completion.kept_ids) is not None]
    return {
        "tokens": np.array(leaf.get_tokens(), np.int32),
        "mask": mask,
        "logprobs": logprobs,
        "versions": versions,
        "routed_experts": experts,
        "kept_ids": np.concatenate(kept) if kept else None,
    }


def _share_turns(leaf: Turn, uses: Mapping[int, int]) -> npt.NDArray[np.float32]:
    """Return 1 / the number of branches that contain the turn of each token."""
    path = leaf.path()
    shares = np.array([1 / uses[id(turn)] for turn in path], np.float32)
    return np.repeat(shares, [len(turn.context) + len(turn.completion.token_ids) for turn in path])
