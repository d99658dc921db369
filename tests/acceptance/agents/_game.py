"""The environment of show-game: guess a number of 1 to 16; each answer says whether it is higher or lower."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.agents.builtin_agents import Step

NUMBERS, GUESSES = 16, 5
FASTER = 0.1  # what each guess less is worth


class Game:
    """One game. The last number of a reply is the guess.

    Rewards are per turn: 1 for the number, and a little for each guess that is left.
    """

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        self.secret, self.left = int(row["ground_truth"]), GUESSES
        return list(row["prompt"])

    async def step(self, reply: Any) -> Step:
        self.left -= 1
        numbers = re.findall(r"\b\d{1,2}\b", reply.content)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.secret:
            return Step(reward=1.0 + FASTER * self.left, done=True, metrics={"success": 1.0})
        messages = [{"role": "user", "content": answer(guess, self.secret)}]
        return Step(messages, done=self.left == 0, metrics={"success": 0.0})


def answer(guess: int | None, secret: int) -> str:
    if guess is None:
        return "No."
    return "Higher." if guess < secret else "Lower."
