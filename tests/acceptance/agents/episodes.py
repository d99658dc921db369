"""Thousands of episodes at once in one worker: as fast as the slowest of them, and nothing left afterwards.

make show-episodes [ARGS=--short]

2,000 episodes of 5 turns run on one event loop, with a fake engine and a tool class whose calls take random times.
Held: the whole takes at most 1.2 times the slowest chain of delays, the 99th percentile of the event loop's lag is
below 50 ms, every episode has its 5 turns, and no session of the tool, file or task is left. `--short` (CI): 200
episodes, without the bounds of time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import finish  # isort: skip - puts tests/ on the path
import numpy as np
import psutil
from agent_config import agent_config
from chat_bpe import bpe_tokenizer

from verl.agents.agent_episode import AgentEpisode
from verl.types import Completion, Prompt, SamplingParams

TURNS = 5
SCALE_S, SHORT_SCALE_S = 20.0, 2.0  # the longest call of a tool
ENGINE_S = 1.0  # the longest reply of the engine
SLOWER, LAG_S = 1.2, 0.05
TOKENIZER = bpe_tokenizer()
SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Take a note.",
        "parameters": {"type": "object", "properties": {"delay": {"type": "number"}}, "required": ["delay"]},
    },
}


@dataclass
class Chain:
    """The delays of one episode, drawn before it starts; the sum of those of its turns is the time it has to take."""

    tools: list[float]
    engine: list[float]
    replies: int = 0

    @classmethod
    def draw(cls, draw: random.Random) -> Chain:
        return cls([round(draw.random(), 3) for _ in range(TURNS - 1)], [draw.random() for _ in range(TURNS)])

    def get_seconds(self, scale_s: float) -> float:
        return scale_s * sum(self.tools) + ENGINE_S * sum(self.engine)


class Engine:
    """Replies with calls of the tool, and at last with text, after the delays of a chain."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self._tokenizer = chain, TOKENIZER

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        turn = self._chain.replies
        self._chain.replies += 1
        await asyncio.sleep(ENGINE_S * self._chain.engine[turn])
        text = "Done."
        if turn < TURNS - 1:
            call = {"name": "note", "arguments": {"delay": self._chain.tools[turn]}}
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


async def measure_lag(lags: list[float]) -> None:
    """Record how much later than asked the event loop wakes this task up."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - start - 0.01)


async def run(count: int, scale_s: float, tool_file: Path) -> dict[str, float]:
    from _session_tool import Notebook

    draw = random.Random(0)
    episode = AgentEpisode(agent_config(tool_config_path=str(tool_file)), TOKENIZER)
    chains = [Chain.draw(draw) for _ in range(count)]
    prompt = Prompt(0, [1], "s", "", {}, raw=[{"role": "user", "content": "Take notes."}])
    files, tasks = psutil.Process().num_fds(), len(asyncio.all_tasks())
    lags: list[float] = []
    probe = asyncio.create_task(measure_lag(lags))
    start = time.perf_counter()
    sampling = SamplingParams(max_tokens=4000)
    transcripts = await asyncio.gather(*(episode(prompt, Engine(chain).generate, sampling) for chain in chains))
    seconds = time.perf_counter() - start
    probe.cancel()
    await asyncio.sleep(0.1)
    await episode.close()
    complete = sum(len(each.turns) == TURNS and each.failure is None for each in transcripts)
    slowest = max(chain.get_seconds(scale_s) for chain in chains)
    return {
        "episodes": count,
        "complete": complete,
        "seconds": round(seconds, 2),
        "slowest_chain_s": round(slowest, 2),
        "slower": round(seconds / slowest, 3),
        "lag_p99_ms": round(1e3 * float(np.percentile(lags, 99)), 1),
        "sessions": Notebook.sessions,
        "sessions_left": len(Notebook.opened),
        "files_left": psutil.Process().num_fds() - files,
        "tasks_left": len(asyncio.all_tasks()) - tasks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    scale_s = SHORT_SCALE_S if short else SCALE_S
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tools.yaml"
        spec = {"class_name": "_session_tool.Notebook", "config": {"scale_s": scale_s}, "tool_schema": SCHEMA}
        file.write_text(json.dumps({"tools": [spec]}))
        figures = asyncio.run(run(200 if short else 2000, scale_s, file))
    whole = figures["complete"] == figures["sessions"] == figures["episodes"]
    clean = figures["sessions_left"] == 0 and figures["files_left"] <= 0 and figures["tasks_left"] <= 0
    fast = short or (figures["slower"] <= SLOWER and figures["lag_p99_ms"] < 1e3 * LAG_S)
    finish("episodes", whole and clean and fast, short=short, **figures)


if __name__ == "__main__":
    main()
