"""What engines count for Prometheus: vLLM and SGLang register their metrics with prometheus_client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, Metric

REPLY_S = 1.0
_PREFIXES = ("vllm:", "sglang:")


def collect_engine_metrics() -> list[Metric]:
    """Return the metrics of the engine that runs in this process; none if it counts nothing."""
    return [metric for metric in REGISTRY.collect() if metric.name.startswith(_PREFIXES)]


async def read_engine_metrics(engines: Mapping[int, Any]) -> dict[int, list[Metric]]:
    """Return the metrics of the engines that reply within `REPLY_S`, by the id of the engine.

    Engines that do not reply are left to their supervisor.
    """

    async def read(engine: Any) -> list[Metric]:
        async with asyncio.timeout(REPLY_S):
            return await engine.read_metrics()

    replies = await asyncio.gather(*map(read, engines.values()), return_exceptions=True)
    pairs = zip(engines, replies, strict=True)
    return {engine: reply for engine, reply in pairs if not isinstance(reply, BaseException)}
