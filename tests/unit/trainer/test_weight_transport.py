"""weight_transport=auto: from device to device only where `verl gpu-check` has passed, and in ways that it tries."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from recording_console import RecordingConsole

from verl.cluster.device_pool import DevicePool
from verl.cluster.gpu_record import GpuRecord
from verl.config.features import transport_name
from verl.config.load import load_dict
from verl.config.schema import Config
from verl.gpu_check.stages import STAGES
from verl.trainer.build import rl_builder, weight_transport
from verl.trainer.build.rl_builder import RLBuilder
from verl.trainer.build.weight_transport import KEY, choose_transport
from verl.trainer.restarts import RestartTracker

pytestmark = pytest.mark.unit

R = "actor_rollout_ref.rollout"
REQUIRED = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "trainer.n_gpus_per_node=4")
OWN_DEVICES = ("actor_rollout_ref.hybrid_engine=False", f"{R}.n_gpus_per_node=4")
ALL = GpuRecord(frozenset(STAGES))


def config_of(*settings: str) -> Config:
    return load_dict({}, [*REQUIRED, *settings]).config


def choose(*settings: str, records: dict[str, GpuRecord] | None = None) -> tuple[str, str]:
    return choose_transport(config_of(*settings), "cuda", lambda: {"gpu-1": ALL} if records is None else records)


def without(*stages: str) -> GpuRecord:
    return GpuRecord(ALL.passed - {*stages})


def test_engines_on_the_same_devices_get_weights_by_ipc_and_others_by_nccl() -> None:
    assert choose() == (
        "ipc",
        f"weights go to the engines by CUDA IPC ({KEY}=auto), with which `verl gpu-check` has passed",
    )
    assert choose(*OWN_DEVICES)[0] == "nccl"
    assert choose(f"{R}.tensor_model_parallel_size=2")[0] == "ipc"


def test_required_stages_exist() -> None:
    required = {weight_transport._WIDE_STAGE, *(name for names in weight_transport._STAGES.values() for name in names)}
    assert required <= set(STAGES)


@pytest.mark.parametrize(
    ("settings", "record", "reason"),
    [
        (
            (),
            GpuRecord(problem="`verl gpu-check` has not run"),
            "`verl gpu-check` has not run on gpu-1; run `verl gpu-check` once",
        ),
        ((), without("train-ipc"), "`verl gpu-check` has not passed train-ipc on gpu-1"),
        ((), without("sharing", "versions"), "has not passed sharing, versions on gpu-1"),
        (OWN_DEVICES, without("train-nccl"), "has not passed train-nccl on gpu-1"),
        ((f"{R}.tensor_model_parallel_size=2",), without("train-tp2"), "has not passed train-tp2 on gpu-1"),
    ],
)
def test_what_has_not_passed_is_named_with_the_fix(settings: tuple[str, ...], record: GpuRecord, reason: str) -> None:
    transport, line = choose(*settings, records={"gpu-1": record})
    assert transport == "host"
    assert reason in line
    assert line.startswith(f"weights go to the engines through host memory ({KEY}=auto): ")
    assert line.endswith(f"later runs send weights by {'NCCL' if settings == OWN_DEVICES else 'CUDA IPC'}")


def test_stages_of_other_transports_and_narrow_engines_are_not_needed() -> None:
    assert choose(records={"gpu-1": without("train-nccl", "collectives", "train-tp2", "train-fp8")})[0] == "ipc"
    assert choose(*OWN_DEVICES, records={"gpu-1": without("train-ipc", "sharing")})[0] == "nccl"


def test_every_node_of_the_run_must_have_passed() -> None:
    assert choose(records={"gpu-1": ALL, "gpu-2": ALL})[0] == "ipc"
    transport, line = choose(records={"gpu-1": ALL, "gpu-2": GpuRecord(problem="`verl gpu-check` has not run")})
    assert transport == "host"
    assert "has not run on gpu-2;" in line


def test_nccl_is_not_chosen_for_a_network_that_nothing_has_checked() -> None:
    transport, line = choose(*OWN_DEVICES, records={"gpu-1": ALL, "gpu-2": ALL})
    assert transport == "host"
    assert line.endswith(f"between the 2 nodes of the run; set {KEY}=nccl to use it all the same")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("trainer.local=True",), "trainer.local=true runs all in one process"),
        (("actor_rollout_ref.actor.peft.lora_rank=8",), "only the adapter is sent"),
        ((f"{R}.name=hf",), "ipc is not supported by rollout.name=hf"),
        ((*OWN_DEVICES, f"{R}.lend_train_devices=True"), "nccl does not reach both kinds of engines"),
        (("actor_rollout_ref.actor.strategy=megatron",), "does not try ipc with strategy=megatron"),
        ((f"{R}.pipeline_model_parallel_size=2",), "does not try ipc with pipeline or data parallel engines"),
    ],
)
def test_settings_that_need_host_memory_or_are_never_checked_keep_it(settings: tuple[str, ...], reason: str) -> None:
    def fail() -> Any:
        pytest.fail("the nodes need not be asked")

    transport, line = choose_transport(config_of(*settings), "cuda", fail)
    assert transport == "host"
    assert reason in line


def test_a_merged_adapter_is_sent_as_full_weights() -> None:
    assert choose("actor_rollout_ref.actor.peft.lora_rank=8", f"{R}.lora_transport=merged")[0] == "ipc"


class Pool(DevicePool):
    """Reserved devices on two nodes, without Ray."""

    def __init__(self, *nodes: str) -> None:
        self._nodes = nodes

    def list_nodes(self) -> list[str]:
        return [*self._nodes]


def build(config: Config, device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RLBuilder, list[str]]:
    """Return a builder after its choice of the transport, and the nodes that were asked."""
    asked: list[str] = []

    def read(nodes: set[str]) -> dict[str, GpuRecord]:
        asked.extend(sorted(nodes))
        return dict.fromkeys(nodes, ALL)

    monkeypatch.setattr(rl_builder, "read_gpu_records", read)
    console = RecordingConsole()
    builder = RLBuilder(config, console, RestartTracker(console), AsyncExitStack())
    builder.device = device
    asyncio.run(builder.resolve_transport([Pool("a", "a", "b"), Pool("b")]))
    return builder, asked


def test_a_start_asks_the_nodes_of_its_devices_and_prints_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, asked = build(config_of(), "cuda", monkeypatch)
    assert asked == ["a", "b"]
    assert transport_name(builder.config) == "ipc"
    assert any("by CUDA IPC" in text for text in builder.console.messages)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("given", "device"), [("host", "cuda"), ("ipc", "cuda"), ("auto", "cpu")])
def test_a_given_transport_and_a_cpu_ask_nobody(given: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, asked = build(config_of(f"{R}.weight_transport={given}"), device, monkeypatch)
    assert asked == []
    assert builder.config.actor_rollout_ref.rollout.weight_transport == given


async def test_the_folder_has_the_given_settings_and_what_the_start_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run, or one that reads settings.yaml, chooses again."""
    recorded: list[Any] = []

    async def record(config: Config, origins: Any, version: int, steps: int, console: Any, resolved: Any) -> None:
        recorded.extend([transport_name(config), config.actor_rollout_ref.rollout.weight_transport, resolved])

    async def resume(*_: Any) -> int:
        return 3

    class Tracker:
        def log(self, *_: Any) -> None: ...
        def close(self) -> None: ...

    for name, stand_in in {"resume": resume, "record_start": record, "digest_sources": lambda _: {}}.items():
        monkeypatch.setattr(f"verl.trainer.build.runtime.{name}", stand_in)
    monkeypatch.setattr("verl.trainer.build.runtime.open_tracker", lambda *_: Tracker())
    console = RecordingConsole()
    builder = RLBuilder(config_of(), console, RestartTracker(console), AsyncExitStack())
    builder.resolve(KEY, "ipc")
    schedule: Any = type("Schedule", (), {"total_steps": 5})
    workers: Any = None
    assert await builder.resume(workers, workers, schedule) == 3
    assert recorded == ["host", "auto", {KEY: "ipc"}]
    assert transport_name(builder.config) == "ipc"
