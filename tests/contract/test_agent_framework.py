"""An agent of a real framework, unchanged and in an environment of its own, plays episodes through the gateway."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted_model import ScriptedModel, call_lookup, list_samples, play_episode

from verl.agents.builtin_agents import Task
from verl.types import Prompt, SamplingParams

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

FRAMEWORK = "openai-agents<1"
PROMPT = Prompt(row=0, token_ids=[1], raw=[{"role": "user", "content": "What is a?"}])
PROGRAM = '''
import asyncio, os, sys
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

@function_tool
def lookup(key: str) -> str:
    """Return a value."""
    return {"a": "7"}[key]

async def main(question: str, mode: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI()  # its URL and key are in the environment
    model = OpenAIChatCompletionsModel("any", client)
    settings = ModelSettings(temperature=0.0)
    agent = Agent(name="a", instructions="Use the tool.", tools=[lookup], model=model, model_settings=settings)
    if mode == "streamed":
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    reward = 1.0 if result.final_output.startswith("It is 2") else 0.0
    client.api_key = os.environ["REWARD_KEY"]
    await client.post("/reward", body={"reward": reward}, cast_to=object)

asyncio.run(main(*sys.argv[1:]))
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with the framework."""
    folder = tmp_path_factory.mktemp("framework")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    interpreter = folder / "bin" / "python"
    options = ["--quiet", "--retries", "1", "--timeout", "30"]
    command = [interpreter, "-m", "pip", "install", *options, FRAMEWORK]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if installed.returncode:
        pytest.skip(f"{FRAMEWORK} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return interpreter


async def test_an_agent_in_another_process_becomes_one_exact_sample(python: Path) -> None:
    async def run_program(task: Task, base_url: str, api_key: str, reward_key: str, mode: str) -> None:
        keys = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "REWARD_KEY": reward_key}
        environment = {**os.environ, **keys}
        arguments = (str(python), "-c", PROGRAM, task.messages[0]["content"], mode)
        process = await asyncio.create_subprocess_exec(*arguments, env=environment, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()

    async def plain(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await run_program(task, base_url, api_key, reward_key, "plain")

    async def streamed(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await run_program(task, base_url, api_key, reward_key, "streamed")

    sampling = SamplingParams(max_tokens=1000, temperature=0.7, seed=5)
    samples = []
    for agent in (plain, streamed):
        model = ScriptedModel(call_lookup)
        transcript = await play_episode(agent, model, sampling, PROMPT)
        [sample] = list_samples(transcript)
        assert transcript.score == 1.0
        assert len(transcript.turns) == 3
        last, used = model.requests[-1]
        assert sample.tokens.tolist()[: len(last)] == last, "each request continues the tokens of the one before"
        assert used.temperature == 0.7
        generated = [token for turn in transcript.turns for token in turn.completion.token_ids]
        assert sample.tokens[sample.mask].tolist() == generated
        samples.append(sample)
    for name in ("tokens", "mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(samples[0], name), getattr(samples[1], name))
