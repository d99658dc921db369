"""A game: the model guesses a number, and an environment says whether it is higher or lower.

python examples/agents/game.py [MODEL] [--small]

`--small`: two small steps of a smaller model, on a laptop.
"""

import random
import re
import sys

from verl import GRPOTrainer, TrainingConfig

GUESSES = 7


class Game:
    """Made once per episode. Each turn has its own reward; their sum is the score of the episode."""

    async def reset(self, row: dict) -> list[dict]:
        self.secret, self.left = int(row["ground_truth"]), GUESSES
        return row["prompt"]

    async def step(self, reply) -> tuple[str, float, bool]:
        """Return the next message, the reward of the reply, and whether the game is over."""
        self.left -= 1
        numbers = re.findall(r"\d+", reply.content)
        if not numbers:
            return "Please say a number.", -0.1, self.left == 0
        guess = int(numbers[-1])
        if guess == self.secret:
            return "Right!", 1.0, True
        return "Higher." if guess < self.secret else "Lower.", 0.0, self.left == 0


def make_rows(count: int) -> list[dict]:
    rules = f"I think of a number from 1 to 64. Guess it in {GUESSES} turns. Reply with one number at a time."
    prompt = [{"role": "user", "content": rules}]
    return [{"prompt": prompt, "ground_truth": str(random.randint(1, 64))} for _ in range(count)]


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--small"]
    is_small = "--small" in sys.argv
    model = arguments[0] if arguments else f"Qwen/Qwen2.5-{'0.5' if is_small else '1.5'}B-Instruct"
    config = TrainingConfig(batch_size=32, total_steps=50)
    if is_small:
        config = TrainingConfig(batch_size=4, group_size=4, total_steps=2)
    GRPOTrainer(model, config=config, environment=Game, prompts=make_rows(1600)).train()
