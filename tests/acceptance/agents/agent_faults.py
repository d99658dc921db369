"""Hostile and failing tools, servers, environments and agents: none stalls a step, none is scored 0 for a failure.

make show-agent-faults [ARGS=--short]

Each fault happens in an episode of its own, all at once on one event loop, next to episodes that work. Held: every
episode ends within its deadlines; failures of infrastructure have no score and were attempted twice; mistakes are
answered; a call that may have arrived is not sent twice within an attempt; nothing is said after the end of an episode;
and the episodes that work are not disturbed. `--short` (CI) is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import finish  # isort: skip - puts tests/ on the path
import _faulty
from agent_config import agent_config
from chat_bpe import bpe_tokenizer
from listed_replies import ListedReplies

from verl.agents.agent_episode import AgentEpisode
from verl.agents.transcript import Transcript
from verl.config.schema import Config
from verl.custom_functions import load_file
from verl.types import Prompt, SamplingParams

FILE = str(Path(_faulty.__file__))
AGENT_S, DEADLINE_S, TOOL_S = 12.0, 120.0, 8.0  # of agents that hang, of other episodes, of calls
MARGIN_S = 60.0  # all of it shares a machine; what hangs does so for an hour
PROMPT = Prompt(0, [1], "s", "", {}, raw=[{"role": "user", "content": "Go."}])
TOKENIZER = bpe_tokenizer()
ANSWERED, FAILED, TRUNCATED, SCORED = "answered", "failed", "truncated", "scored"


@dataclass(frozen=True)
class Case:
    name: str
    expected: str
    settings: Config
    replies: tuple[str, ...]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def limits(deadline_s: float = DEADLINE_S, **changes: Any) -> Config:
    return agent_config(deadline_s=deadline_s, tool_deadline_s=TOOL_S, **changes)


def list_cases(url: str) -> list[Case]:
    tools = limits(function_tool_path=FILE, max_invalid_calls=2)
    infrastructure = ("hangs", "ignores_cancel", "refuses_connection", "times_out", "breaks_pipe", "sleeps", "spins")
    infrastructure += ("ends_its_process", "kills_itself")
    harmless = ("writes_much", "returns_nothing", "returns_an_object", "returns_surrogates", "raises")
    harmless += (
        "raises_without_text",
        "recurses",
        "raises_a_group",
        "exits",
        "exits_in_a_coroutine",
        "raises_unpicklable",
    )
    cases = [Case(name, FAILED, tools, (call(name), call(name))) for name in infrastructure]
    cases += [Case(name, ANSWERED, tools, (call(name), "done")) for name in harmless]
    cases += [Case("returns_unpicklable", FAILED, tools, (call("returns_unpicklable"),) * 2)]
    mistakes = {
        "no such tool": call("nothing"),
        "wrong type": call("typed", '{"count": "many"}'),
        "unknown argument": call("typed", '{"number": 1}'),
        "no JSON": "<tool_call>\nlookup\n</tool_call>",
        "half a call": '<tool_call>\n{"name": "typed"',
        "arguments are a list": call("typed", "[1]"),
    }
    cases += [Case(name, ANSWERED, tools, (text, "done")) for name, text in mistakes.items()]
    cases += [Case("too many mistakes", TRUNCATED, tools, (call("nothing"),) * 3)]
    environments = {
        "RaisesInReset": FAILED,
        "HangsInReset": FAILED,
        "HangsInStep": FAILED,
        "ReturnsNonsense": FAILED,
        "ReturnsNan": FAILED,
        "RaisesInClose": SCORED,
        "HangsInClose": SCORED,
        "Exits": FAILED,
        "NeverEnds": TRUNCATED,
    }
    cases += [
        Case(name, expected, limits(environment=f"{FILE}:{name}", max_turns=4), ("hm",) * 8)
        for name, expected in environments.items()
    ]
    agents = {
        "agent_hangs": TRUNCATED,
        "agent_hangs_at_once": FAILED,
        "agent_talks_forever": TRUNCATED,
        "agent_raises": FAILED,
        "agent_exits": FAILED,
        "agent_returns_text": FAILED,
        "agent_returns_nan": FAILED,
        "agent_says_nothing": FAILED,
        "agent_calls_after_the_end": SCORED,
        "agent_swallows_limits": SCORED,
        "agent_blocks": FAILED,
        "agent_uses_a_wrong_key": FAILED,
    }
    hanging = ("agent_hangs", "agent_hangs_at_once", "agent_blocks")
    cases += [
        Case(
            name,
            expected,
            limits(AGENT_S if name in hanging else DEADLINE_S, agent=f"{FILE}:{name}", max_turns=4),
            ("hm",) * 20,
        )
        for name, expected in agents.items()
    ]
    server = limits(tool_server=url)
    cases += [Case(f"server {name}", FAILED, server, (call(name),) * 2) for name in FaultyServer.FAILING]
    cases += [Case(f"server {name}", ANSWERED, server, (call(name), "done")) for name in FaultyServer.ANSWERING]
    return cases


class FaultyServer:
    """A tool server of plain JSON, whose tools answer in the ways of their names. It counts the calls that arrive."""

    FAILING = ("half", "closes", "never", "error_500", "no_json", "wrong_shape", "nan_reward")
    ANSWERING = ("error_400", "error_field", "huge")

    def __init__(self) -> None:
        self.arrivals: Counter[tuple[str, str]] = Counter()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /tools"):
                names = (*self.FAILING, *self.ANSWERING)
                return self._write(writer, 200, json.dumps([{"name": name, "parameters": {}} for name in names]))
            if not head.startswith("POST /call"):
                return self._write(writer, 404, "{}")
            size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-len"))
            body = json.loads(await reader.readexactly(size))
            self.arrivals[body["name"], body["episode"]] += 1
            await self._answer(body["name"], writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return None
        finally:
            writer.close()

    async def _answer(self, name: str, writer: asyncio.StreamWriter) -> None:
        if name == "closes":
            return
        if name == "half":
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"result"')
            return
        if name == "never":
            await asyncio.sleep(10 * TOOL_S)
            return
        status, text = {
            "error_500": (500, "oops"),
            "no_json": (200, "<html>"),
            "wrong_shape": (200, "[1]"),
            "nan_reward": (200, '{"result": "x", "reward": "much"}'),
            "error_400": (400, '{"error": "wrong"}'),
            "error_field": (200, '{"error": "wrong"}'),
            "huge": (200, json.dumps({"result": "x" * 5_000_000})),
        }[name]
        self._write(writer, status, text)
        await writer.drain()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, status: int, text: str) -> None:
        body = text.encode()
        writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def judge(case: Case, transcript: Transcript, seconds: float) -> str | None:
    """Return what is wrong with how an episode ended."""
    if seconds > 2 * case.settings.actor_rollout_ref.rollout.multi_turn.deadline_s + MARGIN_S:
        return f"took {seconds:.1f} s"
    if transcript.failure is not None:
        ended = FAILED
    elif transcript.is_truncated:
        ended = TRUNCATED
    else:
        ended = SCORED if transcript.score is not None else ANSWERED
    if ended != case.expected:
        return f"{ended}, expected {case.expected}: {transcript.failure}"
    if ended == FAILED and transcript.score is not None:
        return f"failed, but has the score {transcript.score}"
    if ended == FAILED and transcript.metrics.get("episode/attempts") != 2:
        return f"was attempted {transcript.metrics.get('episode/attempts')} times"
    return None


def make_episodes(cases: Sequence[Case]) -> dict[int, AgentEpisode]:
    """Return one for each settings, as workers have one."""
    settings = {id(case.settings): case.settings for case in cases}
    return {key: AgentEpisode(each, TOKENIZER) for key, each in settings.items()}


async def run() -> dict[str, Any]:
    server = FaultyServer()
    url = await server.start()
    problems: dict[str, str] = {}
    slowest = 0.0
    tools = load_file(Path(FILE))  # as the episodes load it
    cases = await asyncio.to_thread(list_cases, url)
    good = Case("works", ANSWERED, limits(function_tool_path=FILE), (call("typed", '{"count": 3}'), "done"))

    async def play(case: Case) -> None:
        nonlocal slowest
        episode = episodes[id(case.settings)]
        start = time.monotonic()
        model = ListedReplies(TOKENIZER, *case.replies)
        transcript = await episode(PROMPT, model.generate, SamplingParams(max_tokens=3000))
        seconds = time.monotonic() - start
        slowest = max(slowest, seconds)
        if problem := judge(case, transcript, seconds):
            problems[case.name] = problem
        if case.name == "agent_calls_after_the_end":
            tools.ENDED.set()

    everything = [*cases, *[good] * 20]
    episodes = await asyncio.to_thread(make_episodes, everything)
    await asyncio.gather(*map(play, everything))
    end = time.monotonic() + MARGIN_S
    while len(tools.LATE) < 3 and time.monotonic() < end:
        await asyncio.sleep(0.1)
    if twice := [name for (name, _), count in server.arrivals.items() if count > 1]:
        problems["sent twice"] = ", ".join(twice)
    arrived = Counter(name for name, _ in server.arrivals)
    if missing := [name for name in (*server.FAILING, *server.ANSWERING) if not arrived[name]]:
        problems["never arrived"] = ", ".join(missing)
    if set(tools.LATE) != {"401", "EpisodeLimitError"}:
        problems["after the end"] = str(tools.LATE)
    for episode in episodes.values():
        await asyncio.wait([asyncio.ensure_future(episode.close())], timeout=5)
    server.close()
    return {"faults": len(cases), "working": 20, "problems": problems, "slowest_s": round(slowest, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.parse_args()
    figures = asyncio.run(run())
    finish("agent_faults", not figures["problems"] and figures["faults"] >= 40, **figures)


if __name__ == "__main__":
    main()
