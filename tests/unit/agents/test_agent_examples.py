"""The examples of agents play an episode, with replies that are given."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.agent_episode import AgentEpisode
from verl.agents.episode import refuse_to_score
from verl.agents.transcript import Transcript
from verl.config.schema import Config
from verl.custom_functions import load_function
from verl.types import Prompt, SamplingParams

pytestmark = pytest.mark.unit

TOKENIZER = bpe_tokenizer()


def make_prompt(example: str, *arguments: str) -> Prompt:
    row = load_function(f"examples/agents/{example}.py:make_rows", {}, "example")(*arguments, 1)[0]
    return Prompt(0, [1], "example", row.get("ground_truth"), row.get("extra_info", {}), raw=row["prompt"])


async def play(prompt: Prompt, settings: Config, *replies: str, max_tokens: int = 2000) -> Transcript:
    episode, sampling = AgentEpisode(settings, TOKENIZER), SamplingParams(max_tokens=max_tokens)
    try:
        return await episode(prompt, ListedReplies(TOKENIZER, *replies).generate, sampling)
    finally:
        await episode.close()


async def test_the_tool_returns_the_price_of_the_row() -> None:
    prompt = make_prompt("tool")
    call = '<tool_call>\n{"name": "price", "arguments": {"fruit": "mango"}}\n</tool_call>'
    transcript = await play(prompt, agent_config(function_tool_path="examples/agents/tool.py"), call, "It is 5")
    assert transcript.messages is not None
    answers = [message["content"] for message in transcript.messages if message["role"] == "tool"]
    assert answers == [str(prompt.extra_info["prices"]["mango"])]
    reward: Any = load_function("examples/agents/tool.py:reward", {}, "example")
    assert [reward("It is 5", "5"), reward("", "5")] == [1.0, 0.0]


async def test_the_game_is_won_with_the_number() -> None:
    prompt = make_prompt("game")
    settings = agent_config(environment="examples/agents/game.py:Game")
    transcript = await play(prompt, settings, "hm", "0", f"Is it {prompt.ground_truth}")
    assert [turn.reward for turn in transcript.turns] == [-0.1, 0.0, 1.0]
    assert not transcript.is_truncated


class FakeTextArena:
    """As textarena.make("GuessTheNumber-v0-raw"): observations are what is new since the last one."""

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 1
        self.secret, self.messages = 3 + seed, [(-1, "Guess a number.", "prompt")]

    def get_observation(self) -> tuple[int, list[tuple[int, str, str]]]:
        new, self.messages = self.messages, []
        return 0, new

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.is_won = action == f"[{self.secret}]"
        self.messages += [(0, action, "action"), (-1, "Right!" if self.is_won else "Higher.", "message")]
        return self.is_won, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {0: float(self.is_won)}, {}


@pytest.mark.parametrize("is_fake", [True, False], ids=["fake", "textarena"])
async def test_a_game_of_textarena_says_what_is_new_and_gives_its_reward(
    is_fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_fake:
        made = lambda name: FakeTextArena() if name == "GuessTheNumber-v0-raw" else None  # noqa: E731
        monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=made))
    else:
        pytest.importorskip("textarena")
    settings = agent_config(environment="examples/agents/textarena_game.py:TextArena")
    moves = [f"[{number}]" for number in range(1, 21)]
    transcript = await play(make_prompt("textarena_game", "GuessTheNumber-v0"), settings, *moves)
    assert transcript.failure is None
    assert transcript.messages is not None
    assert "uess" in transcript.messages[0]["content"]
    assert "igher" in transcript.messages[2]["content"]
    assert "[1]" not in transcript.messages[2]["content"]
    assert [turn.reward for turn in transcript.turns[:-1]] == [0.0] * (len(transcript.turns) - 1)
    assert transcript.turns[-1].reward == 1.0 or not is_fake


async def test_the_agent_asks_twice_over_the_gateway() -> None:
    prompt = make_prompt("unchanged_agent")
    settings = agent_config(agent="examples/agents/unchanged_agent.py:agent")
    transcript = await play(prompt, settings, "Let me see.", str(prompt.ground_truth))
    assert transcript.failure is None
    assert transcript.score == 1.0
    assert len(transcript.turns) == 2
    assert len(transcript.get_leaves()) == 1


async def test_the_agent_is_truncated_and_gets_0_if_its_tokens_are_used_up_after_the_first_reply() -> None:
    prompt = make_prompt("unchanged_agent")
    settings = agent_config(agent="examples/agents/unchanged_agent.py:agent")
    transcript = await play(prompt, settings, "Let me see, step by step.", max_tokens=4)
    assert transcript.failure is None
    assert transcript.is_truncated
    assert transcript.metrics["episode/truncated"] == 1.0
    assert [turn.completion.finish_reason for turn in transcript.turns] == ["length"]
    assert (await refuse_to_score(prompt, transcript, "")).score == 0.0
