"""A real environment of Gymnasium, installed for the test alone, is played through the adapter."""

import subprocess
import sys
from pathlib import Path

import pytest
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.agent_episode import AgentEpisode
from verl.types import Prompt, SamplingParams

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

FILE = """
import gymnasium
from verl.agents.adapters import adapt_environment

make_cliff = adapt_environment(
    lambda row: gymnasium.make("CliffWalking-v1"), read_action=int, write_observation=lambda place: f"place {place}"
)
"""


@pytest.fixture
def gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "30"]
    command += ["--target", str(tmp_path / "packages"), "gymnasium==1.4.0", "farama-notifications"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if installed.returncode:
        pytest.skip(f"gymnasium cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


@pytest.mark.usefixtures("gymnasium")
async def test_a_cliff_is_walked_along(tmp_path: Path) -> None:
    file = tmp_path / "cliff.py"
    file.write_text(FILE)
    tokenizer = bpe_tokenizer()
    prompt = Prompt(0, [1], "cliff", "", {}, raw=[{"role": "user", "content": "Walk."}])
    moves = ["0", *"1" * 11, "2"]  # up, to the right, down to the goal
    model = ListedReplies(tokenizer, *moves)
    episode = AgentEpisode(agent_config(environment=f"{file}:make_cliff"), tokenizer)
    transcript = await episode(prompt, model.generate, SamplingParams(max_tokens=2000))
    assert transcript.failure is None
    assert [turn.reward for turn in transcript.turns] == [-1.0] * len(moves)
    assert not transcript.is_truncated  # the goal ended it
