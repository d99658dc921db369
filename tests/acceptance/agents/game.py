"""RL over several turns: higher/lower over 16 numbers within 5 guesses, against an environment with turn rewards.

make show-game [ARGS=--short]

A small model has seen players who write down what is possible, and then guess at random: "9 16 13". Now and then
they forget the answer. GRPO trains it through Ray, FSDP2 and vLLM. Held: success of at least 0.9, and fewer guesses
than at the start. `--short` (CI): three steps, after which no success is expected; held is that rewards and
turns are those of the game.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, metrics_of, train  # isort: skip - puts tests/ on the path
import pyarrow as pa
import pyarrow.parquet as pq
from _agents import PROMPTS, Conversation, Tools, conversation_grpo, make_chat_model, warm_up
from _game import FASTER, GUESSES, NUMBERS, answer

ENVIRONMENT = Path(__file__).with_name("_game.py")
START = {"role": "user", "content": "Guess."}
FORGETS = 0.1  # how often a player of the warm-up ignores the answer


def draw_game(draw: random.Random) -> tuple[Conversation, Tools]:
    """Return a game of a player who guesses at random among what it believes to be possible."""
    secret, low, high = draw.randint(1, NUMBERS), 1, NUMBERS
    messages: list[dict[str, Any]] = [START]
    for _ in range(GUESSES):
        guess = draw.randint(low, high)
        messages.append({"role": "assistant", "content": f"{low} {high} {guess}"})
        if guess == secret:
            break
        messages.append({"role": "user", "content": answer(guess, secret)})
        if draw.random() >= FORGETS:
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return messages, []


def write_rows(path: Path, count: int) -> None:
    rows = [
        {"data_source": "game", "prompt": [START], "reward_model": {"ground_truth": str(1 + index % NUMBERS)}}
        for index in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def settings(folder: Path, steps: int, *, short: bool) -> list[str]:
    return [
        *conversation_grpo(folder, steps, short=short, validate_every=20),
        "data.max_prompt_length=32",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.n=16",
        f"actor_rollout_ref.rollout.multi_turn.environment={ENVIRONMENT}:Game",
        "actor_rollout_ref.actor.optim.lr=4e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    short = options.short
    steps = options.steps or (3 if short else 60)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="verl-game-") as directory:
        folder = Path(directory)
        texts = [str(message["content"]) for _ in range(100) for message in draw_game(draw)[0]]
        make_chat_model(folder / "model", [*texts, "user\nassistant\n"])
        loss = warm_up(folder / "model", lambda: draw_game(draw), steps=100 if short else 400)
        print(f"loss of the warm-up: {loss:.3f}", flush=True)
        write_rows(folder / "train.parquet", PROMPTS * steps)
        write_rows(folder / "test.parquet", 256)
        code, watch = train(*settings(folder, steps, short=short), *options.overrides, deadline_s=2400)
        lines = metrics_of(folder / "run") if code == 0 else []
    rewards = [line["val/game/mean@1"] for line in lines if "val/game/mean@1" in line]
    turns = [line["episode/turns"] for line in lines if "episode/turns" in line]
    success = [line["reward/extra/success"] for line in lines if "reward/extra/success" in line]
    if code != 0 or len(rewards) < 2 or not turns or not success:
        finish("game", False, exit_code=code, rewards=rewards, turns=turns[:2], success=success[:2])
    last = sum(success[-3:]) / len(success[-3:])
    if short:
        worth = [line["reward/mean"] / line["reward/extra/success"] for line in lines if "reward/mean" in line]
        passed = all(1.0 <= value <= 1.0 + FASTER * (GUESSES - 1) for value in worth) and 1.0 <= min(turns) <= GUESSES
    else:
        passed = last >= 0.9 and turns[-1] < turns[0]
    finish(
        "game",
        passed,
        short=short,
        steps=steps,
        success=[round(value, 3) for value in (success[0], last)],
        turns=[round(value, 2) for value in (turns[0], turns[-1])],
        validation_rewards=[round(value, 3) for value in rewards],
        seconds=round(watch.seconds()),
    )


if __name__ == "__main__":
    main()
