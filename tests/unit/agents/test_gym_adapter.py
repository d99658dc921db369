"""Environments of other libraries: numbers become messages, and a reply that is no action is answered."""

from dataclasses import dataclass
from typing import Any

import pytest
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.adapters import adapt_environment
from verl.agents.agent_episode import AgentEpisode
from verl.agents.transcript import Transcript
from verl.types import Prompt, SamplingParams

pytestmark = pytest.mark.unit

TOKENIZER = bpe_tokenizer()
PROMPT = Prompt(0, [1], "s", "3", {}, raw=[{"role": "user", "content": "Reach the goal."}])
closed: list[str] = []


class Corridor:
    """As in Gymnasium: move until the place of the row is reached."""

    def __init__(self, goal: int) -> None:
        self.place, self.goal = 0, goal

    def reset(self) -> tuple[int, dict[str, Any]]:
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.place, -0.1, self.place == self.goal, self.place > 10, {}

    def close(self) -> None:
        closed.append("corridor")


@dataclass
class Result:
    observation: dict[str, int]
    reward: float | None
    done: bool


class Client:
    """As in OpenEnv: coroutines, and results with names."""

    def __init__(self) -> None:
        self.count = 0

    async def reset(self) -> Result:
        return Result({"count": 0}, None, False)

    async def step(self, action: dict[str, int]) -> Result:
        self.count += action["add"]
        return Result({"count": self.count}, 1.0, self.count >= 2)


make_corridor = adapt_environment(
    lambda row: Corridor(int(row["ground_truth"])), read_action=int, write_observation=lambda place: f"at {place}"
)
make_client = adapt_environment(lambda row: Client(), read_action=lambda text: {"add": int(text)})


async def play(name: str, *replies: str) -> Transcript:
    episode = AgentEpisode(agent_config(environment=f"{__file__}:{name}"), TOKENIZER)
    return await episode(PROMPT, ListedReplies(TOKENIZER, *replies).generate, SamplingParams(max_tokens=800))


async def test_an_environment_of_gymnasium_s_kind_is_played() -> None:
    transcript = await play("make_corridor", "1", "far", "2")
    assert transcript.messages is not None
    said = [message["content"] for message in transcript.messages if message["role"] == "user"]
    assert said[0] == "Reach the goal.\n\nat 0"
    assert said[1] == "at 1"
    assert said[2].startswith("Error: invalid literal for int()")
    assert [turn.reward for turn in transcript.turns] == [-0.1, 0.0, -0.1]
    assert not transcript.is_truncated
    assert transcript.failure is None


async def test_a_client_of_openenv_s_kind_is_played() -> None:
    transcript = await play("make_client", "1", "1")
    assert [turn.reward for turn in transcript.turns] == [1.0, 1.0]
    assert transcript.failure is None
