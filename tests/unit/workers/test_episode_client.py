"""Requests for groups of episodes: how far those of a step are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config.load import load
from verl.workers import episode_pool
from verl.workers.episode_pool import EpisodeClient

pytestmark = pytest.mark.unit


async def test_progress_counts_responses_and_extrapolates(monkeypatch: pytest.MonkeyPatch) -> None:
    now, gates = [100.0], [asyncio.Event() for _ in range(4)]
    monkeypatch.setattr(episode_pool.time, "monotonic", lambda: now[0])

    class Pool:
        async def run(self, request: Any) -> list[Any]:
            await gates[request.row].wait()
            return []

    async def run_while_available(work: Awaitable[Any]) -> Any:
        return await work

    supervisor = SimpleNamespace(run_while_available=run_while_available)
    failures = SimpleNamespace(keep_scored=lambda handles: handles)
    [loaded] = load(["rollout.n=8", "model.path=m", "data.train_files=a.parquet"])
    client = EpisodeClient(loaded.config, Pool(), supervisor, failures, (0,))  # type: ignore[arg-type]
    assert str(client.measure_progress("train")) == ""
    step = [asyncio.ensure_future(client.run_group(row, row)) for row in range(4)]
    await asyncio.sleep(0)
    assert str(client.measure_progress("train")) == "32 responses"
    gates[0].set()
    await step[0]
    now[0] += 20.0
    assert str(client.measure_progress("train")) == "8 of 32 responses, about 1m00s left"
    for gate in gates:
        gate.set()
    await asyncio.gather(*step)
    gates[0].clear()
    again = asyncio.ensure_future(client.run_group(0, 0))
    await asyncio.sleep(0)
    assert str(client.measure_progress("train")) == "8 responses", "the next step begins at 0"
    gates[1].clear()
    beside = asyncio.ensure_future(client.run_group(1, 1))
    await asyncio.sleep(0)
    gates[0].set()
    await again
    assert str(client.measure_progress("train")).startswith("8 of 16 responses")
    client.begin_step()
    assert str(client.measure_progress("train")) == "8 responses", "those that go on belong to the next step"
    gates[1].set()
    await beside
