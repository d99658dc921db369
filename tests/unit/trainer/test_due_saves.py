"""The order of a step after which a save is due, and of a save that is not due."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from verl.trainer.rl_trainer import RLTrainer

pytestmark = pytest.mark.unit


class Recorded:
    """The parts of a trainer; some of their methods record that they were called."""

    def __init__(self, *, due: bool) -> None:
        self.calls: list[str] = []

        def method(name: str) -> Any:
            async def call(*_: Any) -> dict[str, float]:
                self.calls.append(name)
                return {}

            return call

        policy = MagicMock(**{name: method(name) for name in ("prepare", "update", "check")})
        weights = MagicMock(free_devices=method("free_devices"), sync=method("sync"), outliers=[])
        buffer = MagicMock(take=AsyncMock(return_value=[]), metrics={}, position=0, warnings=[])
        planner = MagicMock()
        planner.plan.return_value = SimpleNamespace(metrics={}, warnings=[])
        records, episodes = MagicMock(replay=None), MagicMock()
        records.samples.skipped = 0
        episodes.failures.end_step.return_value = {}
        throughput = MagicMock()
        throughput.measure.return_value = {}
        self.trainer = RLTrainer(
            buffer,
            planner,
            policy,
            weights,
            episodes,
            None,
            MagicMock(),
            throughput,
            records,
            saves_at=lambda version: due,
        )


async def test_before_a_save_that_is_due_models_are_checked_while_engines_sleep() -> None:
    recorded = Recorded(due=True)
    await recorded.trainer.step(3)
    await recorded.trainer.prepare_save(4)
    assert recorded.calls == ["free_devices", "prepare", "update", "check", "sync"]


async def test_no_other_step_pays_for_a_check() -> None:
    recorded = Recorded(due=False)
    await recorded.trainer.step(3)
    assert recorded.calls == ["free_devices", "prepare", "update", "sync"]


async def test_engines_sleep_for_the_check_of_a_save_that_is_not_due() -> None:
    recorded = Recorded(due=False)
    await recorded.trainer.prepare_save(4)
    assert recorded.calls == ["free_devices"]
