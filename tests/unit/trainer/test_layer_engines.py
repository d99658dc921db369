"""Which rollout engines can be compared with the trainer layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl.config.load import load
from verl.errors import EngineError
from verl.trainer.replay.layers import Comparer

pytestmark = pytest.mark.unit

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("engine", [(f"{ROLLOUT}.name=sglang",), (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.python=python3")])
async def test_an_engine_in_another_process_is_refused_before_it_starts(engine: tuple[str, ...]) -> None:
    [loaded] = load([f"{ROLLOUT}.n=8", *engine], complete=False)
    recorded: Any = SimpleNamespace(config=loaded.config, settings=lambda device: SimpleNamespace(external_modules=()))
    policy: Any = SimpleNamespace(actor=SimpleNamespace(settings=SimpleNamespace(device="cpu")))
    with pytest.raises(EngineError, match="cannot be compared layer by layer"):
        async with Comparer(recorded, policy).start_engine():
            pass
