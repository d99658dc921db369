"""The example that plays tasks of the real library verifiers, in an environment of its own, through the gateway."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel, list_samples, play_episode
from verifiers_environment import PYTHON, find_verifiers

from verl.custom_functions import load_function, pickle_by_value
from verl.errors import ConfigError
from verl.types import Prompt, SamplingParams

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

SAMPLING = SamplingParams(max_tokens=2000, temperature=0.7, seed=5)
BASH_CALL = '<tool_call>{"name": "bash", "arguments": {"command": "expr 3 + 4"}}</tool_call>'
TASKSET = """
import os
import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace) -> float:
        if self.data.answer == "end":
            os._exit(3)
        print("a task may print")
        return float(self.data.answer in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        yield SumTask(SumData(prompt="3 + 4?", answer="7"), self.config.task)
"""
EXPORT = """
import sums, verifiers.v1 as vf
for task in sums.SumTaskset(vf.TasksetConfig(id="sums")):
    print(task.data.model_dump_json())
"""


def make_agent(config: dict[str, Any], python: str) -> Any:
    return load_function("examples/agents/verifiers/verifiers_agent.py:VerifiersAgent", {}, "example")(config, python)


@pytest.fixture
def adapt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return what makes agents of the tasks above with a harness of the library."""
    if find_verifiers() is None:
        pytest.skip("verifiers has no environment; make it with python tests/verifiers_environment.py")
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def adapt_harness(harness: str) -> Any:
        seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        agent = make_agent({"taskset": {"id": "sums"}, "agent": seat}, str(PYTHON))
        return pickle.loads(pickle_by_value(agent, [agent]))  # as the Python API sends it to workers

    return adapt_harness


def make_prompt(fields: str) -> Prompt:
    return Prompt(
        row=0, token_ids=[1], raw=[{"role": "user", "content": "What is 3 + 4?"}], extra_info={"task": fields}
    )


async def test_an_episode_with_tool_calls_becomes_one_exact_sample(adapt: Callable[[str], Any]) -> None:
    model = ScriptedModel(lambda prompt: "It is 7. é" if "<|im_start|>tool" in prompt else f"Let me see. {BASH_CALL}")
    transcript = await play_episode(adapt("bash"), model, SAMPLING, make_prompt('{"answer": "7"}'))
    [sample] = list_samples(transcript)
    assert transcript.score == 0.5
    assert len(transcript.turns) == 2
    assert "What is 3 + 4?" in model.prompts[0], "the prompt of the row"
    last, used = model.requests[-1]
    assert sample.tokens.tolist()[: len(last)] == last, "each request continues the tokens of the one before"
    assert used.temperature == 0.7
    generated = [token for turn in transcript.turns for token in turn.completion.token_ids]
    assert sample.tokens[sample.mask].tolist() == generated


async def test_an_episode_that_a_limit_ends_is_scored_and_truncated(adapt: Callable[[str], Any]) -> None:
    model = ScriptedModel(lambda _: f"7? {BASH_CALL}")
    transcript = await play_episode(adapt("bash"), model, SAMPLING, make_prompt('{"answer": "7"}'), max_turns=2)
    assert transcript.failure is None
    assert transcript.is_truncated
    assert transcript.score == 0.5
    assert len(transcript.turns) == 2


async def test_episodes_of_exported_tasks_share_a_process(adapt: Callable[[str], Any], tmp_path: Path) -> None:
    agent = adapt("null")
    exported = subprocess.run([PYTHON, "-c", EXPORT], cwd=tmp_path, capture_output=True, text=True, check=True)
    scores, processes = [], set()
    for reply in ("It is 7.", "It is 8."):
        model = ScriptedModel(lambda _, reply=reply: reply)
        transcript = await play_episode(agent, model, SAMPLING, make_prompt(exported.stdout))
        assert "\n3 + 4?" in model.prompts[0], "the prompt of the task"
        scores.append(transcript.score)
        processes.add(agent.get_process())
    assert scores == [0.5, 0.0]
    assert len(processes) == 1


async def test_a_failed_episode_has_no_score_and_the_next_one_is_played(adapt: Callable[[str], Any]) -> None:
    agent = adapt("null")
    wrong = await play_episode(agent, ScriptedModel(lambda _: "7"), SAMPLING, make_prompt("{}"))
    assert wrong.score is None
    assert wrong.failure is not None
    assert "answer" in wrong.failure.message, "the field that is missing"
    ended = await play_episode(agent, ScriptedModel(lambda _: "7"), SAMPLING, make_prompt('{"answer": "end"}'))
    assert ended.score is None
    assert ended.failure is not None
    assert "ended with code 3" in ended.failure.message
    transcript = await play_episode(agent, ScriptedModel(lambda _: "7"), SAMPLING, make_prompt('{"answer": "7"}'))
    assert transcript.score == 0.5


@pytest.mark.parametrize(("python", "reason"), [(sys.executable, "verifiers==0.4.0"), ("nowhere", "nowhere")])
async def test_a_python_without_the_library_ends_the_run_with_a_hint(python: str, reason: str) -> None:
    agent = make_agent({"taskset": {"id": "sums"}}, python)
    with pytest.raises(ConfigError, match=reason):
        await play_episode(agent, ScriptedModel(lambda _: "7"), SAMPLING, make_prompt(json.dumps({"answer": "7"})))


def test_the_configuration_is_not_an_argument_and_secrets_are_not_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments; env > {tmp_path}/environment\ncat > {tmp_path}/input\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden-from-tasks")
    monkeypatch.setenv("PROXY_URL", "http://user:hidden-password@proxy")
    monkeypatch.setenv("TASK_LEVEL", "3")
    process = make_agent({"taskset": {"token": "hidden-token"}}, str(python)).get_process()._process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)
    seen = (tmp_path / "environment").read_text()
    assert "hidden" not in (tmp_path / "arguments").read_text() + seen
    assert "TASK_LEVEL=3" in seen
    assert json.loads((tmp_path / "input").read_text()) == {"taskset": {"token": "hidden-token"}}
