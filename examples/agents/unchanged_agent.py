"""An agent written with an SDK, unchanged: it asks the model at a URL, and verl records what the model generates.

python examples/agents/unchanged_agent.py [MODEL] [--small]

`--small`: two small steps of a smaller model, on a laptop.
"""

import random
import sys

from openai import AsyncOpenAI

from verl import GRPOTrainer, TrainingConfig


async def solve(client: AsyncOpenAI, question: str) -> str:
    """Draft a solution, have the model check it, and return the answer. It knows nothing of verl."""
    messages = [{"role": "user", "content": question}]
    draft = await client.chat.completions.create(model="policy", messages=messages)
    messages += [draft.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "user", "content": "Check it, and reply with the final number alone."}]
    final = await client.chat.completions.create(model="policy", messages=messages)
    return final.choices[0].message.content or ""


async def agent(task, base_url: str, api_key: str) -> float:
    """Run the agent on a row of the data, and return its score."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await solve(client, task.messages[-1]["content"])
    return float(answer.strip() == task.row["ground_truth"])


def make_rows(count: int) -> list[dict]:
    pairs = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(count)]
    return [
        {"prompt": [{"role": "user", "content": f"What is {a} times {b}?"}], "ground_truth": str(a * b)}
        for a, b in pairs
    ]


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--small"]
    is_small = "--small" in sys.argv
    model = arguments[0] if arguments else f"Qwen/Qwen2.5-{'0.5' if is_small else '1.5'}B-Instruct"
    config = TrainingConfig(batch_size=32, total_steps=50)
    if is_small:
        config = TrainingConfig(batch_size=4, group_size=4, total_steps=2)
    GRPOTrainer(model, config=config, agent=agent, prompts=make_rows(1600)).train()
