"""How an agent of the gateway ends: with a score, a posted reward, a limit or a failure."""

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from agent_config import agent_config
from gateway_agents import QUESTION, SAMPLING, ask_once, count_turns, open_client, play
from openai import OpenAI
from scripted_model import ScriptedModel

from verl.agents.agent_episode import AgentEpisode
from verl.agents.builtin_agents import Task
from verl.config.paths import change_settings
from verl.types import Prompt

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]


async def test_after_the_end_requests_are_refused() -> None:
    given: list[tuple[str, str]] = []

    async def agent(task: Task, base_url: str, api_key: str) -> float:
        given.append((base_url, api_key))
        return await ask_once(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    episode = AgentEpisode(agent_config(agent="test"), model.tokenizer, agent=agent)
    prompt = Prompt(row=0, token_ids=[1], raw=[QUESTION])
    await asyncio.gather(*(episode(prompt, model.generate, SAMPLING) for _ in range(2)))
    (first_url, first_key), (second_url, second_key) = given
    assert first_url != second_url
    assert first_key != second_key
    async with open_client(first_url, first_key) as client:
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model="any", messages=[QUESTION])
    assert error.value.status_code == 410
    assert len(model.requests) == 2
    await episode.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(first_url)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_an_agent_that_does_not_end_is_abandoned(is_sync: bool) -> None:
    release, addresses = threading.Event(), []

    def ask(base_url: str, api_key: str) -> None:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="any", messages=[QUESTION])

    def linger(task: Task, base_url: str, api_key: str) -> float:
        addresses.append((base_url, api_key))
        ask(base_url, api_key)
        release.wait(60)
        return 1.0

    async def linger_in_loop(task: Task, base_url: str, api_key: str) -> float:
        return linger(task, base_url, api_key)

    model = ScriptedModel(count_turns)
    episode = AgentEpisode(
        agent_config(agent="test", deadline_s=4.0), model.tokenizer, agent=linger if is_sync else linger_in_loop
    )
    transcript = await episode(Prompt(row=0, token_ids=[1], raw=[QUESTION]), model.generate, SAMPLING)
    assert transcript.is_truncated
    assert transcript.metrics["episode/deadline_exceeded"] == 1.0
    with pytest.raises(openai.APIStatusError) as refused:
        await asyncio.to_thread(ask, *addresses[0])
    assert refused.value.status_code == 410
    assert len(transcript.turns) == 1
    release.set()
    await episode.close()


@pytest.mark.parametrize(("returned", "score"), [(None, 0.5), (0.25, 0.25)])
async def test_a_reward_can_be_sent(returned: float | None, score: float) -> None:
    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> float | None:
        headers = {"Authorization": f"Bearer {reward_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            url = base_url.removesuffix("/v1") + "/reward"
            numbers = ('"1"', "null", "true", "NaN", "-Infinity", "1e400", "1" * 400, "-100.5", "1e9")
            for wrong in ({}, [1], *(f'{{"reward": {number}}}' for number in numbers)):
                content = wrong if isinstance(wrong, str) else json.dumps(wrong)
                assert (await client.post(url, content=content)).status_code == 400
            await ask_once(task, base_url, api_key)
            assert (await client.post(url, json={"reward": 0.5})).json() == {"reward": 0.5}
        return returned

    transcript = await play(agent, ScriptedModel(count_turns))
    assert transcript.failure is None, transcript.failure
    assert transcript.score == score


async def test_a_reward_that_was_sent_is_kept_when_a_limit_or_the_timeout_ends_the_agent() -> None:
    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        headers = {"Authorization": f"Bearer {reward_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            await client.post(f"{base_url}/reward", json={"reward": 0.5})
        await ask_once(task, base_url, api_key)
        await asyncio.sleep(60)

    for settings in ({"max_turns": 1}, {"deadline_s": 4.0}):
        transcript = await play(agent, ScriptedModel(count_turns), **settings)
        assert transcript.is_truncated
        assert transcript.score == 0.5


async def test_the_key_for_requests_does_not_post_rewards_nor_the_other_way_round() -> None:
    status: list[int] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        async with httpx.AsyncClient() as client:
            for key, path in ((api_key, "reward"), (reward_key, "chat/completions"), (reward_key, "models")):
                headers, method = {"Authorization": f"Bearer {key}"}, "GET" if path == "models" else "POST"
                body = {"reward": 1.0, "messages": task.messages}
                response = await client.request(method, f"{base_url}/{path}", headers=headers, json=body)
                status.append(response.status_code)

    transcript = await play(agent, ScriptedModel(count_turns))
    assert status == [401] * 3
    assert transcript.score is None
    assert len(transcript.turns) == 1


async def test_a_run_with_a_reward_refuses_rewards_of_agents() -> None:
    codes: list[str] = []

    async def agent(task: Task, base_url: str, api_key: str, reward_key: str) -> None:
        await ask_once(task, base_url, api_key)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {reward_key}"}) as client:
            response = await client.post(f"{base_url}/reward", json={"reward": 1.0})
            codes.append(response.json()["error"]["code"])

    model = ScriptedModel(count_turns)
    settings = change_settings(agent_config(agent="test"), {"reward.custom_reward_function.path": "reward.py"})
    episode = AgentEpisode(settings, model.tokenizer, agent=agent)
    transcript = await episode(Prompt(row=0, token_ids=[1], raw=[QUESTION]), model.generate, SAMPLING)
    await episode.close()
    assert codes == ["reward_refused"]
    assert transcript.score is None


async def fail_in_agent(task: Task, base_url: str, api_key: str) -> float:
    raise KeyError("no such file")


async def exit_agent(task: Task, base_url: str, api_key: str) -> float:
    raise SystemExit(3)


def exit_synchronously(task: Task, base_url: str, api_key: str) -> float:
    raise SystemExit(3)


async def cancel_itself(task: Task, base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


async def return_text(task: Task, base_url: str, api_key: str) -> Any:
    await ask_once(task, base_url, api_key)
    return "42"


async def ask_nothing(task: Task, base_url: str, api_key: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (fail_in_agent, "no such file"),
        (exit_agent, "sys.exit(3)"),
        (exit_synchronously, "sys.exit(3)"),
        (cancel_itself, "CancelledError"),
        (return_text, "returned str"),
        (ask_nothing, "without a reply"),
    ],
)
async def test_an_agent_that_fails_gives_no_score(agent: Any, message: str) -> None:
    model = ScriptedModel(count_turns)
    transcript = await play(agent, model)
    assert transcript.failure is not None
    assert message in transcript.failure.message
    assert transcript.metrics["episode/attempts"] == 2
