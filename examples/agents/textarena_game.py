"""A game of TextArena: the model plays one of its single-player games, such as Hangman or Mastermind.

pip install textarena==0.7.4
python examples/agents/textarena_game.py [MODEL] [GAME] [--small]

`--small`: two small steps of a smaller model, on a laptop.
"""

import sys
from typing import Any

from verl import GRPOTrainer, TrainingConfig

RULES = "Play this game. Think briefly, then reply with one move in square brackets."


class TextArena:
    """Made once per episode. The score is the game's own: 1 for a win, less for a part of it."""

    async def reset(self, row: dict) -> list[dict]:
        """Start the game of the row. TextArena draws from Python's global generator, which the seed sets."""
        import textarena

        task = row["extra_info"]
        self.game = textarena.make(f"{task['game']}-raw")  # without wrappers: only what is new is observed
        self.game.reset(num_players=1, seed=task["seed"])
        *earlier, last = row["prompt"]
        return [*earlier, {**last, "content": f"{last['content']}\n\n{self.observe()}"}]

    async def step(self, reply) -> tuple[str, float, bool]:
        """Return what the game says, its reward at the end, and whether it is over."""
        is_over, _ = self.game.step(reply.content)
        message = self.observe()
        if not is_over:
            return message, 0.0, False
        rewards, _ = self.game.close()
        return message, float(rewards[0]), True

    def observe(self) -> str:
        """Return the new messages of the game, without the move that the model has just made."""
        player, messages = self.game.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender != player)


def make_rows(game: str, count: int) -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": RULES}]
    return [{"prompt": prompt, "extra_info": {"game": game, "seed": seed}} for seed in range(count)]


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--small"]
    is_small = "--small" in sys.argv
    model = arguments[0] if arguments else f"Qwen/Qwen2.5-{'0.5' if is_small else '1.5'}B-Instruct"
    game = arguments[1] if len(arguments) > 1 else "GuessTheNumber-v0"
    config = TrainingConfig(batch_size=32, total_steps=50)
    if is_small:
        config = TrainingConfig(batch_size=4, group_size=4, total_steps=2)
    GRPOTrainer(model, config=config, environment=TextArena, prompts=make_rows(game, 1600)).train()
