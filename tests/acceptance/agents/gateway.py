"""An unchanged agent of the `openai` SDK trains, and its samples are those of the same agent against `model.chat`.

make show-gateway [ARGS=--short]

The task is that of `tools.py`, but the agent calls the tool itself. It takes two steps of GRPO in deterministic mode:
written against `model.chat`, with the SDK, streamed, and with a client that loses every second reply, so that the SDK
tries again. Held: all have the same weights afterwards, to the bit, and the same metrics; calls without the
episode's key are refused. Then the SDK's agent is trained: accuracy rises by 0.25 in 20 steps.

`--short` (CI): without the agent that neither streams nor tries again, and without the training.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, metrics_of, train  # isort: skip - puts tests/ on the path
from _agents import make_chat_model, warm_up
from _lookup_tool import lookup
from tools import draw_conversation, settings, write_rows

AGENTS = Path(__file__).with_name("_sdk_agents.py")
NAMES = ("direct", "plain", "streamed", "retried")
STEPS, TRAINED_STEPS, RISE = 2, 20, 0.25
UNTIMED = ("actor/", "critic/", "reward/", "episode/", "response_length/", "prompt_length/")
UNCOMPARED = ("tools/calls", "tools/invalid_calls", "episode/attempts")
TURNS = "episode/turns"


def choose_agent(name: str) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    return [
        f"{rollout}.agent.default_agent_loop={AGENTS}:{name}",
        f"{rollout}.multi_turn.function_tool_path=null",
        f"{rollout}.multi_turn.format=hermes",
        "reward.custom_reward_function.path=null",
    ]


def run_two_steps(folder: Path, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the hash of the weights, and the metrics without times."""
    run = folder / name
    overrides = [*settings(folder, STEPS, short=True), *choose_agent(name), f"trainer.default_local_dir={run}"]
    overrides += ["trainer.save_freq=2", "trainer.save_hf=true", "trainer.test_freq=-1", "data.val_files=null"]
    code, _ = train(*overrides, deadline_s=900)
    if code != 0:
        finish("gateway", False, exit_code=code, agent=name)
    weights = run / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors"
    lines = [line for line in metrics_of(run) if TURNS in line]
    # The gateway counts calls itself, as agents with tools of the run do. On a loaded machine a client may give up: an
    # attempt more, which must not change the samples.
    compared = [key for key in lines[0] if key.startswith(UNTIMED) and not key.endswith(UNCOMPARED)]
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16], [
        {key: line[key] for key in compared} for line in lines
    ]


def compare(one: tuple[str, list[dict[str, Any]]], other: tuple[str, list[dict[str, Any]]]) -> list[str]:
    """Return what differs: the weights, or metrics by name."""
    keys = {
        key
        for mine, theirs in zip(one[1], other[1], strict=True)
        for key in mine.keys() | theirs.keys()
        if repr(mine.get(key)) != repr(theirs.get(key))  # nan equals nan
    }
    return [*(["weights"] if one[0] != other[0] else []), *sorted(keys)]


def train_agent(folder: Path) -> list[float]:
    run = folder / "trained"
    overrides = [*settings(folder, TRAINED_STEPS, short=False), *choose_agent("plain")]
    code, _ = train(*overrides, f"trainer.default_local_dir={run}", deadline_s=1800)
    key = "val/with_tool/mean@1"
    return [line[key] for line in metrics_of(run) if key in line] if code == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    names = tuple(name for name in NAMES if name != "plain" or not short)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="verl-gateway-") as directory:
        folder = Path(directory)
        texts = [str(message["content"]) for _ in range(200) for message in draw_conversation(draw)[0]]
        make_chat_model(folder / "model", [*texts, str(lookup.schema), "system\nuser\nassistant\ntool\n"])
        warm_up(folder / "model", lambda: draw_conversation(draw), steps=150 if short else 250)
        write_rows(folder / "train.parquet", draw, 32 * TRAINED_STEPS)
        write_rows(folder / "test.parquet", draw, 256)
        results = {name: run_two_steps(folder, name) for name in names}
        accuracy = [] if short else train_agent(folder)
    first = results[names[0]]
    different = {name: found for name, result in results.items() if (found := compare(first, result))}
    turns = [line[TURNS] for line in first[1]]
    rose = short or (len(accuracy) > 1 and accuracy[-1] - accuracy[0] >= RISE)
    finish(
        "gateway",
        not different and min(turns) > 1 and rose,
        short=short,
        agents=list(names),
        different=different,
        weights={name: result[0] for name, result in results.items()},
        metrics_compared=sum(len(line) for line in first[1]),
        turns=[round(value, 3) for value in turns],
        accuracy=[round(value, 3) for value in accuracy],
    )


if __name__ == "__main__":
    main()
