"""Episodes with tools, environments and agents of the user, and how each kind of trouble ends them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sample_tools
from agent_config import agent_config, change_limits
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import Step, Task, ToolAgent
from verl.agents.chat_model import ChatModel
from verl.agents.tools.results import ToolResult
from verl.agents.tools.servers import ServerSource
from verl.agents.transcript import Transcript
from verl.config.schema import Config
from verl.types import Prompt, SamplingParams

pytestmark = pytest.mark.unit

TOKENIZER = bpe_tokenizer()
FILE = sample_tools.__file__
PROMPT = Prompt(
    row=0,
    token_ids=[1],
    data_source="s",
    ground_truth="7",
    extra_info={"values": {"red": "7"}},
    raw=[{"role": "user", "content": "What is red?"}],
)
TOOLS = agent_config(function_tool_path=FILE, tool_deadline_s=1.0)
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>'


def call(name: str) -> str:
    return CALL.replace("lookup", name).replace('"key": "red"', "")


async def play(settings: Config, *replies: str, prompt: Prompt = PROMPT) -> Transcript:
    script = ListedReplies(TOKENIZER, *replies)
    return await AgentEpisode(settings, TOKENIZER)(prompt, script.generate, SamplingParams(max_tokens=800))


def contents(transcript: Transcript, role: str) -> list[str]:
    assert transcript.messages is not None
    return [message["content"] for message in transcript.messages if message["role"] == role]


async def test_a_tool_is_called_and_its_answer_is_context() -> None:
    transcript = await play(TOOLS, CALL, "7")
    assert contents(transcript, "tool") == ["7"]
    assert transcript.failure is None
    assert not transcript.is_truncated
    assert transcript.metrics["tools/calls"] == 1
    [sample] = transcript.to_samples(0, 0, 1.0, {})
    generated = [token for turn in transcript.turns for token in turn.completion.token_ids]
    assert sample.tokens[sample.mask].tolist() == generated


async def test_mistakes_are_answered_counted_and_bounded() -> None:
    settings = change_limits(TOOLS, max_invalid_calls=2)
    corrected = await play(settings, call("search"), "<tool_call>\n{", CALL, "7")
    assert corrected.metrics["tools/invalid_calls"] == 2
    assert contents(corrected, "tool")[0].startswith("Error: there is no tool 'search'")
    ended = await play(settings, call("search"), call("search"), call("search"), "7")
    assert ended.is_truncated
    assert ended.failure is None
    assert len(ended.turns) == 3


async def test_calls_beyond_the_limit_of_a_turn_are_not_made() -> None:
    transcript = await play(TOOLS, f"{CALL}\n{CALL}", "7")
    assert contents(transcript, "tool") == ["7", "Error: at most 1 calls at a time are allowed"]
    both = await play(change_limits(TOOLS, max_parallel_calls=2), f"{CALL}\n{CALL}", "7")
    assert contents(both, "tool") == ["7", "7"]


async def test_turns_of_the_model_and_of_tools_are_limited() -> None:
    by_model = await play(change_limits(TOOLS, max_turns=2), CALL, CALL, CALL)
    assert (len(by_model.turns), by_model.is_truncated) == (2, True)
    by_tools = await play(change_limits(TOOLS, max_user_turns=1), CALL, CALL, CALL)
    assert (len(by_tools.turns), by_tools.is_truncated) == (2, True)
    assert by_tools.finish_reason == "length"


async def test_a_failure_of_a_tool_is_repeated_once_and_never_a_score() -> None:
    for name in ("unreachable", "never"):
        transcript = await play(TOOLS, call(name), call(name))
        assert transcript.metrics["episode/attempts"] == 2
        assert transcript.failure is not None
        assert transcript.score is None


async def test_the_reason_of_a_repeated_episode_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await play(TOOLS, call("unreachable"), CALL, "7")
    assert "attempt 1 of an episode failed: ConnectionRefusedError: port 1" in caplog.text


async def test_a_call_that_may_have_arrived_is_not_sent_twice_in_an_attempt() -> None:
    transcript = await play(TOOLS, call("unreachable"), CALL, "7")
    assert transcript.failure is None  # the second attempt took another way
    assert contents(transcript, "tool") == ["7"]
    assert [turn.parent is None for turn in transcript.turns] == [True, False]  # nothing of the first attempt is left


async def test_rows_choose_their_tools_and_their_agent() -> None:
    chosen = replace(PROMPT, extra_info={**PROMPT.extra_info, "tools": ["add"]})
    transcript = await play(TOOLS, CALL, "7", prompt=chosen)
    assert contents(transcript, "tool") == ["Error: there is no tool 'lookup'; there are: add"]
    single = replace(PROMPT, extra_info={**PROMPT.extra_info, "agent_name": "single_turn"})
    assert (await play(TOOLS, CALL, prompt=single)).messages is None


class Countdown:
    """Ends after as many replies as the row says; each earns what it counts."""

    closed = 0

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.left = int(row["ground_truth"])
        return [{"role": "user", "content": f"{self.left} left"}]

    async def step(self, reply: Any) -> Step:
        self.left -= 1
        messages = [{"role": "user", "content": f"{self.left} left"}]
        return Step(messages, reward=float(reply.content), done=self.left == 0)

    def close(self) -> None:
        Countdown.closed += 1


class Broken(Countdown):
    async def step(self, reply: Any) -> Step:
        raise ValueError("no such state")


ENVIRONMENT = agent_config(environment=f"{__file__}:Countdown")


async def test_an_environment_gives_each_turn_its_reward() -> None:
    transcript = await play(ENVIRONMENT, "1", "2", "3", prompt=replace(PROMPT, ground_truth="3"))
    assert [turn.reward for turn in transcript.turns] == [1.0, 2.0, 3.0]
    assert transcript.score == 0.0
    [sample] = transcript.to_samples(0, 0, 6.0, {})
    assert [reward for _, reward in sample.turn_rewards] == [1.0, 2.0, 3.0]
    ends = [position for position, _ in sample.turn_rewards]
    assert all(sample.mask[end] for end in ends)  # on the last token of each turn


async def test_an_episode_that_its_limit_ends_keeps_the_rewards_of_its_turns() -> None:
    short, prompt = change_limits(ENVIRONMENT, max_turns=2), replace(PROMPT, ground_truth="3")
    transcript = await play(short, "1", "2", "3", prompt=prompt)
    assert transcript.is_truncated
    assert transcript.own_score == 3.0


async def test_an_environment_that_raises_fails_the_episode() -> None:
    broken = agent_config(environment=f"{__file__}:Broken")
    transcript = await play(broken, "1", "1")
    assert transcript.failure is not None
    assert "Broken.step raised ValueError: no such state" in transcript.failure.message


async def guess_twice(task: Task, model: ChatModel) -> float:
    reply = await model.chat(task.messages)
    again = await model.chat([*task.messages, reply.message, {"role": "user", "content": "Sure?"}])
    return float(again.content == task.row["ground_truth"])


async def swallow_everything(task: Task, model: ChatModel) -> float:
    await model.chat(task.messages)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(0.05)
        await model.chat(task.messages)
    return 1.0


async def raise_an_error(task: Task, model: ChatModel) -> float:
    await model.chat(task.messages)
    raise KeyError("oops")


def by_name(name: str, **changes: Any) -> Config:
    return agent_config(agent=f"{__file__}:{name}", **changes)


async def test_an_agent_of_the_user_scores_its_episode() -> None:
    transcript = await play(by_name("guess_twice"), "8", "7")
    assert transcript.score == 1.0
    assert len(transcript.get_leaves()) == 1


async def test_an_agent_that_exceeds_its_timeout_is_abandoned_and_gets_no_further_reply() -> None:
    transcript = await play(by_name("swallow_everything", deadline_s=0.2), "8", "9")
    assert transcript.is_truncated
    assert transcript.metrics["episode/deadline_exceeded"] == 1.0
    await asyncio.sleep(0.2)
    assert len(transcript.turns) == 1


async def test_an_agent_that_raises_fails_its_episode() -> None:
    transcript = await play(by_name("raise_an_error"), "8", "8")
    assert transcript.failure is not None
    assert "the agent raise_an_error raised KeyError: 'oops'" in transcript.failure.message


async def leave(task: Task, model: ChatModel) -> float:
    await model.chat(task.messages)
    raise SystemExit(3)


async def test_sys_exit_in_user_code_does_not_end_the_worker() -> None:
    transcript = await play(TOOLS, call("leave"), "7")
    assert contents(transcript, "tool") == ["Error: RuntimeError: sys.exit(3)"]
    left = await play(by_name("leave"), "8", "8")
    assert left.failure is not None
    assert "sys.exit(3)" in left.failure.message


class OneSession:
    """A session of a tool server that serves one episode at a time."""

    max_sessions = 1

    async def call(self, name: str, arguments: Any) -> ToolResult:
        await asyncio.sleep(0.4)
        return ToolResult("7")

    async def close(self) -> None:
        pass

    def when_ended(self, callback: Callable[[], None]) -> None:
        callback()


async def test_waiting_for_a_session_of_a_tool_server_does_not_count_as_time_of_the_episode() -> None:
    script = ListedReplies(TOKENIZER, *[CALL, "7"] * 3)
    episode = AgentEpisode(change_limits(TOOLS, deadline_s=0.8), TOKENIZER)
    [function_source] = episode._sources
    server: Any = ServerSource(OneSession, function_source.list_schemas()[:1], OneSession.max_sessions)
    episode._agents["tool_agent"] = ToolAgent(episode._settings, [server])
    playing = (episode(PROMPT, script.generate, SamplingParams(max_tokens=800)) for _ in range(3))
    transcripts = await asyncio.gather(*playing)
    assert [(each.failure, each.is_truncated, len(each.turns)) for each in transcripts] == [(None, False, 2)] * 3
