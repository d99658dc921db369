"""What every run starts with, whatever it trains by: its devices, its trackers, and where it left off."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.cluster.device_pool import DevicePool
from verl.cluster.hangs import CallTarget, Deadline, track_call, watch_for_hangs
from verl.cluster.local import LocalPool, detect_local_device
from verl.cluster.nodes import count_live_devices
from verl.cluster.session import connect, detect_device, disconnect, write_timeline
from verl.config.batch_sizes import count_train_ranks
from verl.config.problems import ConfigProblem
from verl.config.schema import Config, Section, SftConfig
from verl.data.stream import PromptStream
from verl.errors import CheckpointError
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, timer
from verl.tracking.sinks import RunInfo, Sink, open_sinks
from verl.trainer.checkpointing import Checkpointer, SavedPolicy, find_checkpoint
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import LoopSchedule
from verl.trainer.worker_settings import deadlines
from verl.workers.base import RankGroup

__all__ = [
    "Runtime",
    "WithRunInfo",
    "build_checkpointer",
    "device_hints",
    "open_tracker",
    "resolve_path",
    "resume",
    "start_runtime",
    "with_changes",
]

C = TypeVar("C", Config, SftConfig)
S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Runtime(Generic[C]):
    """Where a run takes place. Its settings may have been changed to what is there."""

    config: C
    pool: DevicePool | LocalPool
    device: str


@asynccontextmanager
async def start_runtime(
    config: C, console: Console, restarts: RestartTracker, times: Metrics
) -> AsyncIterator[Runtime[C]]:
    """The devices of a run, in Ray's processes or in this one; leaving gives them back."""
    if config.trainer.local:
        yield Runtime(config, LocalPool(), _device(config, detect_local_device))
        return
    async with AsyncExitStack() as closing:
        limits = deadlines(config)
        closing.callback(disconnect)
        with timer(times, "start_ray"):
            if told := connect(config.ray_kwargs.ray_init.arguments()):
                console.note(told)
        if timeline := config.ray_kwargs.timeline_json_file:
            closing.callback(_write_timeline, Path(timeline), console)
        stalls = config.trainer.checkpoint_dir / "stalls"
        closing.enter_context(watch_for_hangs(stalls, console.note, console.advice, limits.reply))
        device = _device(config, detect_device)
        if restarts.has_restarted:
            config = await _with_devices_left(config, device, console)
        fix = f"set trainer.n_gpus_per_node to what a machine has: {_owned(device)}"
        ranks = count_train_ranks(config)
        pool = await asyncio.to_thread(DevicePool, ranks, device, fix=fix, deadline=limits.devices)
        closing.callback(pool.close)
        yield Runtime(config, pool, device)


def _write_timeline(path: Path, console: Console) -> None:
    try:
        write_timeline(path)
        console.note(f"Ray's timeline is in {path}: open it in https://ui.perfetto.dev or chrome://tracing")
    except Exception as error:  # noqa: BLE001 - the run has its end already, and it is not this
        console.note(f"Ray's timeline was not written to {path} (ray_kwargs.timeline_json_file): {error}")


def _device(config: Config | SftConfig, detect: Callable[[], str]) -> str:
    return detect() if config.trainer.device == "auto" else config.trainer.device


async def _with_devices_left(config: C, device: str, console: Console) -> C:
    """After a loss: wait until the cluster has devices for all ranks again, or go on with fewer, as configured."""
    wanted, settings = count_train_ranks(config), config.trainer.faults
    there = await count_live_devices(device, wanted)
    if there >= wanted:
        return config
    left = f"the cluster has {there} of {wanted} devices left"
    if there and settings.on_lost_node == "shrink":
        console.advice(f"{left}: the run goes on with {there} train ranks (trainer.faults.on_lost_node=shrink)")
        return with_changes(config, {"trainer": {"nnodes": 1, "n_gpus_per_node": there}})
    console.advice(
        f"{left}: waiting for others, up to trainer.faults.node_wait={settings.node_wait:g} s; with "
        "trainer.faults.on_lost_node=shrink the run would go on with fewer"
    )
    with track_call(f"have {wanted} devices", target=CallTarget("cluster"), deadline=Deadline(settings.node_wait)):
        await count_live_devices(device, wanted, timeout_s=settings.node_wait)
    return config  # if they are still too few, the pool says so


def _owned(device: str) -> str:
    return f"{os.cpu_count()} cores here" if device == "cpu" else "its GPUs"


def resolve_path(path: str) -> str:
    """A local path in full: workers on a cluster that was started elsewhere have another working directory. A name on a
    hub stays as it is."""
    found = Path(path).expanduser()
    return str(found.absolute()) if found.exists() else path


def with_changes(section: S, changes: Mapping[str, Any]) -> S:
    """A copy of frozen settings with some replaced, section by section."""
    update = {
        name: with_changes(getattr(section, name), value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return section.model_copy(update=update)


def device_hints(config: C, device: str, hints: Callable[[C], Iterable[ConfigProblem]]) -> list[str]:
    """What is probably not meant, but could not be said before it was known what trainer.device=auto is here."""
    known = {found.text for found in hints(config)}
    now = hints(with_changes(config, {"trainer": {"device": device}}))
    return [found.text for found in now if found.text not in known]


def open_tracker(config: Config | SftConfig, console: Console, schedule: LoopSchedule, version: int) -> Sink:
    console.total_steps = schedule.total_steps
    if schedule.save_every == -1 and "save_freq" not in config.trainer.model_fields_set:
        console.note(
            "hint: nothing will be saved (trainer.save_freq=-1), and the trained model is gone when the run ends; set "
            "trainer.save_freq=null for a checkpoint after the last step, or trainer.save_freq=20 for one every 20"
        )
    run = RunInfo(
        folder=config.trainer.checkpoint_dir,
        project=config.trainer.project_name,
        name=config.trainer.experiment_name,
        total_steps=schedule.total_steps,
        settings=config.model_dump(mode="json"),
        resumed_step=version or None,
        wandb_proxy=config.trainer.wandb_proxy,
    )
    return open_sinks([*config.trainer.logger, "jsonl"], run, console)


def build_checkpointer(config: Config | SftConfig, policy: SavedPolicy, console: Console) -> Checkpointer:
    return Checkpointer(
        WithRunInfo(policy, config),
        CheckpointDir(config.trainer.checkpoint_dir),
        console,
        keep=config.trainer.max_ckpts_to_keep,
        deadline=deadlines(config).checkpoint,
    )


@dataclass(frozen=True, slots=True)
class WithRunInfo:
    """A model whose checkpoints say by which command, and from which model, they were trained: two runs may have been
    given one folder, and nothing else tells them apart."""

    policy: SavedPolicy
    config: Config | SftConfig

    async def save(self, directory: str, trainer: Mapping[str, Any]) -> None:
        await self.policy.save(directory, {"run": _signature(self.config), **trainer})

    async def poll_save(self, *, wait: bool) -> Any:
        return await self.policy.poll_save(wait=wait)


def _signature(config: Config | SftConfig) -> dict[str, str]:
    if isinstance(config, SftConfig):
        return {"command": "sft", "model": resolve_path(config.model.path)}
    return {"command": "train", "model": resolve_path(config.actor_rollout_ref.model.path)}


def _check_signature(config: Config | SftConfig, checkpoint: Path, saved: Mapping[str, str] | None) -> None:
    """Refuse the checkpoint of another command, and unless it was named, of another model. Older ones have none."""
    if saved is None:
        return
    own, place = _signature(config), f"checkpoint {checkpoint}"
    anew = "give this run a folder of its own (trainer.experiment_name), or begin anew with trainer.resume_mode=disable"
    if saved["command"] != own["command"]:
        raise CheckpointError(
            f"{place}: is one of verl {saved['command']}, and verl {own['command']} cannot go on from it; {anew}. To "
            f"begin from its model: verl merge --local_dir {checkpoint}/actor --target_dir merged, and name merged as "
            "the model"
        )
    if config.trainer.resume_mode == "auto" and not _are_one(saved["model"], own["model"]):
        raise CheckpointError(
            f"{place}: was trained from the model {saved['model']}, and the settings name {own['model']}, which would "
            f"not be used; {anew}. If they are the same: trainer.resume_mode=path "
            f"trainer.resume_from_path={checkpoint}"
        )


def _are_one(before: str, now: str) -> bool:
    """Whether two paths or names may be of one model. A folder that is gone was probably moved."""
    return before == now or (
        Path(before).is_absolute() and (not Path(before).is_dir() or Path(before).resolve() == Path(now).resolve())
    )


async def resume(config: Config | SftConfig, policy: RankGroup, stream: PromptStream, console: Console) -> int:
    """Load what there is to resume; the version to go on from, 0 for a fresh start."""
    mode = config.trainer.resume_mode
    if mode == "disable":
        return 0
    if mode == "path":
        path = Path(config.trainer.resume_from_path or "").expanduser().absolute()
        number = path.name.removeprefix("global_step_")
        if not number.isdigit():
            raise CheckpointError(f"trainer.resume_from_path={path}: must end with global_step_<number>")
        source = CheckpointDir(path.parent)
        step: int | None = int(number)
        if damage := find_corruption(path, sums=False) or await policy.verify(str(path)):
            raise CheckpointError(f"trainer.resume_from_path={path}: is not whole: {'; '.join(damage)}")
    else:
        source = CheckpointDir(config.trainer.checkpoint_dir)
        step = await find_checkpoint(source, policy.verify, console, deadlines(config).checkpoint)
    if step is None:
        return 0
    saved = source.read_trainer_state(step)
    _check_signature(config, source.step_dir(step), saved.get("run"))
    stream.load(saved["data"])
    await policy.load(str(source.step_dir(step)))
    console.note(f"resumed from {source.step_dir(step)}: going on with step {step + 1}")
    return step
