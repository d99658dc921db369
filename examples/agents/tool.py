"""A tool: the model looks up prices that it cannot know, and is rewarded for the right sum.

python examples/agents/tool.py [MODEL] [--small]

`--small`: two small steps of a smaller model, on a laptop.
"""

import random
import sys

import verl
from verl import GRPOTrainer, TrainingConfig

FRUITS = ("apple", "banana", "cherry", "mango")


@verl.tool
async def price(fruit: str, *, row: dict) -> str:
    """Return the price of a fruit, in cents.

    Args:
        fruit: The name of the fruit.
    """
    return str(row["extra_info"]["prices"][fruit])  # an unknown fruit is an error that the model reads


def reward(response: str, ground_truth: str) -> float:
    """Return whether the last turn ends with the sum."""
    return float(response.split()[-1:] == [ground_truth])


def make_rows(count: int) -> list[dict]:
    rows = []
    for _ in range(count):
        prices = {fruit: random.randint(10, 99) for fruit in FRUITS}
        one, other = random.sample(FRUITS, 2)
        question = f"What do one {one} and one {other} cost together? End with the number."
        extra = {"prices": prices}
        rows.append({"prompt": [{"role": "user", "content": question}], "extra_info": extra})
        rows[-1]["ground_truth"] = str(prices[one] + prices[other])
    return rows


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--small"]
    is_small = "--small" in sys.argv
    model = arguments[0] if arguments else f"Qwen/Qwen2.5-{'0.5' if is_small else '1.5'}B-Instruct"
    config = TrainingConfig(batch_size=32, total_steps=50)
    if is_small:
        config = TrainingConfig(batch_size=4, group_size=4, total_steps=2)
    GRPOTrainer(model, config=config, tools=[price], reward=reward, prompts=make_rows(1600)).train()
