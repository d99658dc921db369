"""A reward model without weights."""

from __future__ import annotations

from collections.abc import Sequence

from verl.rewards.models.interface import check_tokens
from verl.rewards.settings import RewardModelSettings

FACTORY = "tests.fake_reward_model:FakeRewardModel"


class FakeRewardModel:
    """Scores a sequence by the mean of its token ids."""

    def __init__(self, settings: RewardModelSettings | None = None, *, limit: int = 128, vocabulary: int = 64) -> None:
        self.limit, self.vocabulary = limit, vocabulary

    async def start(self) -> None:
        """Do nothing."""

    def check_input(self, token_ids: Sequence[int]) -> str | None:
        return check_tokens(token_ids, self.limit, self.vocabulary)

    async def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        return [sum(tokens) / len(tokens) for tokens in batch]

    async def close(self) -> None:
        """Do nothing."""
