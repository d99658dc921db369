"""A real trace of a tiny update: which spans it has, of which steps and ranks, and that nothing happens without one."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_steps import SAMPLES, step_of
from recording_console import RecordingConsole
from tiny import save_family

from verl.algorithms.settings import AlgorithmSettings
from verl.cluster.device_pool import DevicePool
from verl.cluster.local import LocalPool
from verl.cluster.object_store import put
from verl.config.load import load_dict
from verl.data.plan import Plan
from verl.trainer.profiling import RunProfiler, build_profiler, nsys_options
from verl.training.fsdp.settings import FsdpSettings
from verl.training.profiler import StepProfiler, span
from verl.training.settings import ProfileSettings, Schedule
from verl.workers.train import PolicyGroup, TrainSettings

pytestmark = pytest.mark.unit

PHASES = {"prepare", "old log-probs", "reference log-probs", "advantages", "update", "actor update"}
PASSES = {"forward", "backward", "optimizer step"}
REQUIRED = ("actor_rollout_ref.model.path=policy", "data.train_files=prompts.parquet")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[PolicyGroup]:
    """A train worker with a tiny model, in this process."""
    model = save_family("Qwen2", tmp_path / "model")
    actor = FsdpSettings(model, compute_dtype="float32", schedule=Schedule(1e-3))
    reference = FsdpSettings(model, compute_dtype="float32", trainable=False)
    group = PolicyGroup.spawn(LocalPool(), 1)
    settings = TrainSettings(actor=actor, reference=reference, algorithm=AlgorithmSettings(loss_kl_coef=0.1))
    asyncio.run(group.start(settings))
    yield group
    group.close()


async def train(workers: PolicyGroup, profiler: RunProfiler, steps: int) -> None:
    for number in range(1, steps + 1):
        step = step_of(SAMPLES)
        plan: Any = Plan([replace(step.plan, refs=[put(sample) for sample in step.samples])], {}, [])
        async with profiler.recording(number):
            await workers.prepare(plan)
            await workers.update()


def events_of(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


def test_the_trace_of_a_chosen_step_has_its_phases_operators_and_allocations(
    workers: PolicyGroup, tmp_path: Path
) -> None:
    console, folder = RecordingConsole(), tmp_path / "profiles"
    settings = ProfileSettings(str(folder), ("torch",), frozenset({0}))
    asyncio.run(train(workers, RunProfiler(workers, frozenset({2}), settings, console), steps=3))
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.gz")] == ["global_step_2/trace_rank_0.json.gz"]
    events = events_of(folder / "global_step_2" / "trace_rank_0.json.gz")
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    assert {event["name"] for event in spans} >= PHASES | PASSES
    assert {"aten::mm", "[memory]"} <= {event["name"] for event in events}
    within = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in spans}
    for inner, outer in (("old log-probs", "prepare"), ("backward", "actor update"), ("actor update", "update")):
        assert within[outer][0] <= within[inner][0] <= within[inner][1] <= within[outer][1]
    assert any(str(folder / "global_step_2") in line for line in console.messages)


def test_a_rank_that_is_not_profiled_records_nothing(workers: PolicyGroup, tmp_path: Path) -> None:
    settings = ProfileSettings(str(tmp_path / "profiles"), ("torch",), frozenset({1}))
    asyncio.run(train(workers, RunProfiler(workers, frozenset({1}), settings, RecordingConsole()), steps=1))
    assert not (tmp_path / "profiles").exists()


def test_without_a_profile_a_span_calls_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("verl.training.profiler.record_function", fail)
    with span("update"):
        pass


def test_a_run_that_profiles_nothing_has_no_profiler() -> None:
    config = load_dict({}, [*REQUIRED]).config
    assert build_profiler(config, PolicyGroup([]), RecordingConsole()) is None
    assert not nsys_options(config)


def test_nsys_runs_the_chosen_ranks_and_records_the_chosen_steps() -> None:
    run = ("trainer.device=cuda", "trainer.n_gpus_per_node=4", "trainer.default_local_dir=/runs/one")
    profile = ("trainer.profile.steps=[2,5]", "trainer.profile.tools=nsys", "trainer.profile.ranks=[0,3]")
    options = nsys_options(load_dict({}, [*REQUIRED, *run, *profile]).config)
    assert options.keys() == {0, 3}
    assert options[3]["o"] == "/runs/one/profiles/nsys_rank_3"
    assert options[3]["capture-range-end"] == "repeat:2"


def test_nsys_options_are_in_the_runtime_environment_of_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Actor:
        def options(self, **options: Any) -> Actor:
            given.update(options)
            return self

        def remote(self, *_: Any) -> None: ...

    monkeypatch.setattr("verl.cluster.device_pool.ray.remote", lambda _: Actor())
    pool = object.__new__(DevicePool)
    pool.spawn(object, nsys={"t": "cuda"})
    assert given["runtime_env"] == {"nsight": {"t": "cuda"}}
    given.clear()
    pool.spawn(object)
    assert "runtime_env" not in given


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls are recorded in place of a GPU")
def test_a_memory_snapshot_is_written_when_the_step_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, Any]] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **how: calls.append(("record", how)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(("dump", path)))
    profiler = StepProfiler(ProfileSettings(str(tmp_path), ("memory",), frozenset({1})), step=3, rank=1, device="cuda")
    profiler.stop()
    assert [name for name, _ in calls] == ["record", "dump", "record"]
    assert calls[1][1] == str(tmp_path / "global_step_3" / "memory_rank_1.pickle")
    assert calls[2][1] == {"enabled": None}
