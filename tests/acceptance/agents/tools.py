"""RL teaches a model to use a tool: a random secret per episode is behind a `lookup` tool, and cannot be memorized.

make show-tools [ARGS=--short]

A small model has seen conversations that mix guesses, right calls and wrong ones. GRPO then trains it on the reward of
naming the secret, through Ray, FSDP2 and vLLM. Held: without the tool its accuracy is at chance, 1 of 10; with it, at
least 0.9 after RL, from at most 0.6; and the invalid calls per episode fall to less than half, from the first 5 steps
to the last 5.

`--short` (CI): fewer steps, and a rise of 0.15.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from _common import finish, metrics_of, train  # isort: skip - puts tests/ on the path
import pyarrow as pa
import pyarrow.parquet as pq
from _agents import PROMPTS, Conversation, Tools, conversation_grpo, make_chat_model, warm_up
from _lookup_tool import lookup

KEYS = ("red", "blue", "green", "gold", "pink", "gray", "teal", "lime")
TOOL_FILE = Path(__file__).with_name("_lookup_tool.py")
VALIDATION = 256
COMPARED = 5  # steps at the start and at the end; one step alone varies by chance
CHANCE = 0.1
WITHOUT_TOOL = 0.2  # of the conversations of the warm-up
GUESSES, RIGHT_CALLS = 0.45, 0.30  # of those with the tool; in the others the first call is wrong


def ask(key: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {key}?"}


def write_call(key: str, name: str = "lookup") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


def draw_conversation(draw: random.Random) -> tuple[Conversation, Tools]:
    """Return a guess, a right call, or a wrong call and what may follow it; and the tools."""
    key, secret = draw.choice(KEYS), str(draw.randrange(10))
    guess = {"role": "assistant", "content": str(draw.randrange(10))}
    looked_up = [
        {"role": "assistant", "content": write_call(key)},
        {"role": "tool", "content": secret},
        {"role": "assistant", "content": secret},
    ]
    if draw.random() < WITHOUT_TOOL:
        return [ask(key), guess], []
    kind = draw.random()
    if kind < GUESSES:
        return [ask(key), guess], [lookup.schema]
    if kind < GUESSES + RIGHT_CALLS:
        return [ask(key), *looked_up], [lookup.schema]
    wrong, problem = draw.choice(
        [
            (write_call(key, "search"), "Error: there is no tool 'search'; there are: lookup"),
            (write_call(draw.choice([other for other in KEYS if other != key])), "Error: no such key"),
        ]
    )
    mistake = [{"role": "assistant", "content": wrong}, {"role": "tool", "content": problem}]
    return [ask(key), *mistake, *(looked_up if draw.random() < 0.5 else [guess])], [lookup.schema]


def write_rows(path: Path, draw: random.Random, count: int, *, without: bool = False) -> None:
    """Write prompts with their secrets; with `without`, also the same number that have no tool."""
    rows: list[dict[str, Any]] = []
    for has_tool in (True, False) if without else (True,):
        for _ in range(count):
            key = draw.choice(KEYS)
            rows.append(
                {
                    "data_source": "with_tool" if has_tool else "without_tool",
                    "prompt": [ask(key)],
                    "reward_model": {"ground_truth": str(draw.randrange(10))},
                    "extra_info": {"key": key},
                    "tools": ["lookup"] if has_tool else [],
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), path)


def settings(folder: Path, steps: int, *, short: bool) -> list[str]:
    return [
        *conversation_grpo(folder, steps, short=short, validate_every=10),
        "data.max_prompt_length=160",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={TOOL_FILE}",
        "actor_rollout_ref.rollout.multi_turn.max_turns=4",
        f"reward.custom_reward_function.path={TOOL_FILE}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    short = options.short
    steps = options.steps or (12 if short else 40)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="verl-tools-") as directory:
        folder = Path(directory)
        texts = [str(message["content"]) for _ in range(200) for message in draw_conversation(draw)[0]]
        make_chat_model(folder / "model", [*texts, str(lookup.schema), "system\nuser\nassistant\ntool\n"])
        loss = warm_up(folder / "model", lambda: draw_conversation(draw), steps=250)
        print(f"loss of the warm-up: {loss:.3f}", flush=True)
        write_rows(folder / "train.parquet", draw, PROMPTS * steps)
        write_rows(folder / "test.parquet", draw, VALIDATION, without=True)
        code, watch = train(*settings(folder, steps, short=short), *options.overrides, deadline_s=2400)
        lines = metrics_of(folder / "run") if code == 0 else []
    with_tool = [line["val/with_tool/mean@1"] for line in lines if "val/with_tool/mean@1" in line]
    without = [line["val/without_tool/mean@1"] for line in lines if "val/without_tool/mean@1" in line]
    invalid = [line["tools/invalid_calls"] for line in lines if "tools/invalid_calls" in line]
    if code != 0 or len(with_tool) < 2 or not invalid:
        finish("tools", False, exit_code=code, accuracy=with_tool, keys=sorted({key for line in lines for key in line}))
    at_chance = max(without) <= CHANCE + 0.08  # 4 standard errors of a share of 0.1 among 256
    first, last = mean(invalid[:COMPARED]), mean(invalid[-COMPARED:])
    if short:
        learned = with_tool[-1] - with_tool[0] >= 0.15
    else:
        learned = with_tool[0] <= 0.6 and with_tool[-1] >= 0.9 and last < 0.5 * first
    finish(
        "tools",
        learned and at_chance,
        short=short,
        steps=steps,
        accuracy=[round(value, 3) for value in with_tool],
        without_tool=[round(value, 3) for value in without],
        invalid_calls=[round(value, 3) for value in (first, last)],
        seconds=round(watch.seconds()),
    )


if __name__ == "__main__":
    main()
