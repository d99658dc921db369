"""A rollout actor whose engine sleeps: requests wait, weights wake it. And the order of the calls to vLLM."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fake_rollout_engine import FakeRolloutEngine
from verl.config.rollout_engines import get_rollout_engine
from verl.errors import ProcessLostError
from verl.rollout.engine import load_weights
from verl.rollout.settings import RolloutEngineSettings
from verl.rollout.vllm import engine as vllm_engine
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import AdapterSettings, VllmSettings
from verl.types import SamplingParams, hash_seed
from verl.workers import rollout
from verl.workers.rollout import RolloutActor

pytestmark = [pytest.mark.unit, pytest.mark.asyncio]


class RecordingLlm:
    """vLLM's client, which only writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            if name != "check_health":
                self.calls.append(" ".join(map(str, (name, *args, *kwargs.values()))))

        return call


async def record(settings: VllmSettings) -> list[str]:
    engine = VllmEngine(settings)
    engine._llm = llm = RecordingLlm()  # type: ignore[assignment]
    await engine.sleep()
    await engine.start_weight_update()
    await engine.finish_weight_update(1)
    await engine.start_weight_update()
    return llm.calls


async def test_memory_of_weights_is_allocated_before_a_sync_and_of_the_cache_after_it() -> None:
    assert await record(VllmSettings("model", sleeps=True)) == [
        "sleep 2 keep",  # pauses, too
        "wake_up ['weights']",
        "start_weight_update",
        "finish_weight_update 1",
        "wake_up ['kv_cache']",
        "pause_generation keep True",  # until the probe
        f"collective_rpc seed_sampling ({hash_seed(0, 1)},)",
        "pause_generation keep True",  # awake
        "start_weight_update",
    ]


async def test_weights_that_are_not_sent_again_stay_in_host_memory() -> None:
    adapter = AdapterSettings(rank=8, alpha=16, targets="all-linear", max_rank=8)
    assert (await record(VllmSettings("model", adapter=adapter, sleeps=True)))[0] == "sleep 1 keep"


class PreparingLlm(RecordingLlm):
    """Prepares requests, except those of the probe, until `prepared`; they never end."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self) -> None:
        super().__init__()
        self.prepared = asyncio.Event()

    async def add_request(self, *args: Any, priority: int, **kwargs: Any) -> Any:
        if priority == 0:
            await self.prepared.wait()
        self.calls.append("request" if priority == 0 else "probe")
        return SimpleNamespace(get=asyncio.Event().wait, close=lambda: None, request_id="0")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_request_that_is_prepared_during_an_update_does_not_run_before_the_probe(is_first: bool) -> None:
    engine = VllmEngine(VllmSettings("model"))
    engine._llm = llm = PreparingLlm()  # type: ignore[assignment]
    if is_first:  # nobody has resumed the engine yet
        await load_weights(engine, [], 0)
    generating = asyncio.ensure_future(engine.generate([1], SamplingParams(4)))
    await settle()
    await load_weights(engine, [], 1)
    llm.prepared.set()
    await settle()
    probing = asyncio.ensure_future(engine.compute_logprobs([[1, 2]]))
    await settle()
    assert llm.calls[-3:] == ["request", "probe", "resume_generation"]
    generating.cancel()
    probing.cancel()
    await asyncio.wait([generating, probing])


class DyingLlm(RecordingLlm):
    """Asks vLLM's process what it supports at the first request; a process that `is_dead` never replies."""

    is_dead = is_known = False

    async def get_supported_tasks(self) -> None:
        if self.is_dead and not self.is_known:
            await asyncio.Event().wait()
        self.is_known = True

    async def add_request(self, *args: Any, **kwargs: Any) -> None:
        await self.get_supported_tasks()
        raise EngineDeadError


async def test_the_first_probe_does_not_wait_for_a_process_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, engine = DyingLlm(), VllmEngine(VllmSettings("model"))

    async def start_vllm(*_: Any) -> DyingLlm:
        return llm

    monkeypatch.setattr(vllm_engine, "start_vllm", start_vllm)
    await engine.start()
    await load_weights(engine, [], 0)
    llm.is_dead = True
    with pytest.raises(ProcessLostError):
        await asyncio.wait_for(engine.compute_logprobs([[1, 2]]), 5)


async def test_requests_wait_for_the_weights_of_an_engine_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "make_engine", lambda *_: FakeRolloutEngine())
    actor = RolloutActor(get_rollout_engine("hf"), RolloutEngineSettings("model"))
    await actor.start()
    await load_weights(actor, [], 0)
    await actor.compute_logprobs([[1, 2]])
    await actor.enable(0)
    await actor.sleep()
    assert await actor.is_ready()
    request = asyncio.create_task(actor.generate([1, 2], SamplingParams(max_tokens=2)))
    await asyncio.sleep(0)
    assert not request.done()
    await load_weights(actor, [], 1)
    await asyncio.sleep(0)
    assert not request.done(), "the weights are not verified yet"
    await actor.compute_logprobs([[1, 2]])
    assert (await request).versions.tolist() == [1, 1]
