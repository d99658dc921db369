"""What every run starts with: its devices, its metric loggers, and the checkpoint it resumes from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.cluster.device_pool import DevicePool, count_live_devices
from verl.cluster.hangs.pending_calls import CallTarget, Timeout, track_call
from verl.cluster.hangs.registry import watch_for_hangs
from verl.cluster.local import LocalPool, detect_local_device
from verl.cluster.session import detect_device, disconnect, reconnect, write_timeline
from verl.cluster.worker_logs import copy_worker_logs
from verl.config.batch_sizes import count_extra_devices, count_group_devices, count_rank_multiple, count_train_ranks
from verl.config.checks import Check, asynchronous, device_support, run_checks, trainer
from verl.config.paths import change_settings, get_value, with_changes
from verl.config.schema import Config, Section, SftConfig
from verl.data.samplers import PromptStream
from verl.errors import CheckpointError, ConfigError
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.console import Console
from verl.tracking.metrics import Metrics, timer
from verl.tracking.prometheus.exporter import ReadEngines, open_exporter
from verl.tracking.run_folder import RunFolder
from verl.tracking.sink import RunInfo
from verl.tracking.sinks import KEEP_ALL, Sinks, open_record, open_sinks
from verl.trainer.build.preflight import advise_on_cores
from verl.trainer.build.run_sources import DATA, Sources, digest_sources, find_changes
from verl.trainer.build.worker_settings import timeouts
from verl.trainer.checkpointing import Checkpointer, find_checkpoint
from verl.trainer.profiling import build_profiler, nsys_options
from verl.trainer.records.start import record_start
from verl.trainer.records.timeline import add_phases
from verl.trainer.restarts import RestartTracker
from verl.trainer.train_loop import KeepWeights, LoopSchedule, TrainLoop, TrainTask
from verl.workers.train_base import RankGroup

C = TypeVar("C", Config, SftConfig)
S = TypeVar("S", bound=Section)
T = TypeVar("T", bound=TrainTask)
G = TypeVar("G", bound=RankGroup)


def _write_timeline(path: Path, folder: Path, console: Console) -> None:
    try:
        write_timeline(path)
        if (folder / "phases.jsonl").exists():  # the run was not stopped before its start
            add_phases(path, chain.from_iterable(RunFolder(folder).read_phases().values()))
        console.note(f"Ray's timeline is in {path}: open it in https://ui.perfetto.dev or chrome://tracing")
    except Exception as error:  # noqa: BLE001 - must not hide how the run has ended
        console.note(f"Ray's timeline was not written to {path} (ray_kwargs.timeline_json_file): {error}")


async def _fit_to_devices(config: C, device: str, console: Console) -> C:
    """Wait until the cluster has devices for all ranks again, or continue with fewer, as configured."""
    wanted, settings = count_train_ranks(config), config.trainer.faults
    extra = count_extra_devices(config)
    count = await count_live_devices(device, wanted + extra) - extra
    if count >= wanted:
        return config
    left = f"the cluster has {count} of {wanted} devices left"
    count -= count % count_rank_multiple(config)
    if count > 0 and settings.on_lost_node == "shrink":
        console.advice(f"{left}: continuing with {count} train ranks (trainer.faults.on_lost_node=shrink)")
        return with_changes(config, {"trainer": {"nnodes": 1, "n_gpus_per_node": count}})
    console.advice(
        f"{left}: waiting up to trainer.faults.node_wait={settings.node_wait:g} s for more; set "
        "trainer.faults.on_lost_node=shrink to continue with fewer"
    )
    with track_call(f"have {wanted} devices", target=CallTarget("cluster"), timeout=Timeout(settings.node_wait)):
        await count_live_devices(device, wanted + extra, timeout_s=settings.node_wait)
    return config  # the pool raises if there are still too few


def resolve_path(path: str) -> str:
    """Return the absolute path of what exists here; anything else, such as a name on the hub, unchanged."""
    local = Path(path).expanduser()
    return str(local.absolute()) if local.exists() else path


def with_absolute_paths(config: C, keys: Iterable[str]) -> C:
    """Return the settings with local paths in full: workers may have another working directory."""
    changes: dict[str, Any] = {"trainer.default_local_dir": str(config.trainer.checkpoint_dir.absolute())}
    for key in keys:
        value: Any = attrgetter(key)(config)
        changes[key] = [*map(resolve_path, value)] if isinstance(value, list) else value and resolve_path(value)
    return change_settings(config, changes)


def device_hints(config: C, device: str, checks: Sequence[Check]) -> list[str]:
    """Return the hints that depend on the device that trainer.device=auto selected."""
    known = run_checks(checks, config)
    hints = run_checks(checks, with_changes(config, {"trainer": {"device": device}}))
    return [hint for hint in hints if hint not in known]


def open_tracker(
    config: Config | SftConfig,
    console: Console,
    schedule: LoopSchedule,
    version: int,
    read_engines: ReadEngines | None = None,
) -> Sinks:
    """Open the metric loggers of a run. `read_engines` asks its rollout engines for what they count."""
    console.history.total_steps = schedule.total_steps
    run = RunInfo(
        folder=config.trainer.checkpoint_dir,
        project=config.trainer.project_name,
        name=config.trainer.experiment_name,
        total_steps=schedule.total_steps,
        settings=config.model_dump(mode="json"),
        resumed_step=version or None,
        wandb_proxy=config.trainer.wandb_proxy,
    )
    sinks = open_sinks([*config.trainer.logger, "jsonl"], run, console)
    prometheus = config.trainer.prometheus
    if not prometheus.enable:
        return sinks
    return Sinks([sinks, open_exporter(prometheus.host, prometheus.port, run, console, read_engines)])


class RunBuilder(Generic[C]):
    """The stages that building any run begins and ends with. Each registers with `closing` how to undo it."""

    paths: tuple[str, ...] = ()
    """The settings that are paths, to be made absolute."""

    def __init__(
        self,
        config: C,
        console: Console,
        restarts: RestartTracker,
        closing: AsyncExitStack,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.config: C = with_absolute_paths(config, self.paths)
        self._origins = origins or {}
        self._left_open: dict[str, Any] = {}  # settings that the start has resolved -> their given values
        self.console, self.restarts, self._closing = console, restarts, closing
        self.times = Metrics()
        console.is_animated &= not config.trainer.local  # a spinner would write over the prompt of a debugger
        self._closing_stage = ExitStack()
        closing.callback(self._closing_stage.close)

    async def start_runtime(self) -> None:
        """Reserve the devices, in Ray or in this process. From here on the settings fit the devices that exist."""
        self.pool: DevicePool | LocalPool
        device, is_local = self.config.trainer.device, self.config.trainer.local
        if is_local:
            self.pool, self.device = LocalPool(), detect_local_device() if device == "auto" else device
            self._check_device()
            return
        limits = timeouts(self.config)
        self._closing.callback(disconnect)
        with timer(self.times, "start_ray"), self.console.stage("starting Ray"):
            options, wait_s = self.config.ray_kwargs.ray_init.arguments(), self.config.trainer.faults.node_wait
            if note := await reconnect(options, wait_s if self.restarts.has_restarted else 0.0):
                self.console.note(note)
        if timeline := self.config.ray_kwargs.timeline_json_file:
            self._closing.callback(_write_timeline, Path(timeline), self.config.trainer.checkpoint_dir, self.console)
        hangs = self.config.trainer.checkpoint_dir / "hangs"
        self._closing.enter_context(watch_for_hangs(hangs, self.console.note, self.console.advice, limits.reply))
        self._closing.enter_context(copy_worker_logs(self.config.trainer.checkpoint_dir / "logs"))
        self.device = detect_device() if device == "auto" else device
        self._check_device()
        if self.restarts.has_restarted:
            self.config = await _fit_to_devices(self.config, self.device, self.console)
        ranks, width = count_train_ranks(self.config), count_group_devices(self.config)
        if advice := advise_on_cores(self.config.trainer.n_gpus_per_node, self.device, os.cpu_count() or 1):
            self.console.advice(advice)
        self.pool = await self.reserve_devices(ranks, width, "trainer.n_gpus_per_node")

    @property
    def given(self) -> C:
        """The settings before `resolve`: a run that reads them again resolves them again."""
        return change_settings(self.config, self._left_open)

    def resolve(self, key: str, value: Any) -> None:
        """Set what the settings leave open until the devices are known. The record of the start has both values."""
        self._left_open[key] = get_value(self.config, key)
        self.config = change_settings(self.config, {key: value})

    async def reserve_devices(self, count: int, width: int, setting: str) -> DevicePool:
        """Reserve devices of the cluster until the run ends; `setting` is what to lower if there are too few."""
        owned = f"{os.cpu_count()} cores here" if self.device == "cpu" else "its GPUs"
        fix, timeout = f"set {setting} to what a machine has: {owned}", timeouts(self.config).devices
        pool = await asyncio.to_thread(DevicePool.reserve, count, self.device, width=width, fix=fix, timeout=timeout)
        self._closing.callback(pool.close)
        return pool

    def _check_device(self) -> None:
        """Refuse settings that the device, which is known now, does not support."""
        config: Config | SftConfig = with_changes(self.config, {"trainer": {"device": self.device}})
        checks: list[Check] = [trainer.find_profile_conflicts]
        if isinstance(config, Config):
            checks += [device_support.find_conflicts, asynchronous.find_conflicts]
        if problems := run_checks(checks, config):
            raise ConfigError(problems)

    async def spawn_train_workers(self, group: type[G]) -> G:
        ranks, nsys = count_train_ranks(self.config), nsys_options(self.config)
        workers = group.spawn(self.pool, ranks, timeouts=timeouts(self.config), nsys=nsys)
        self._closing.callback(workers.close)
        if self.device != "cpu":
            await workers.check_devices()  # before engines take minutes to fail for the same reason
        return workers

    async def resume(
        self,
        workers: RankGroup,
        stream: PromptStream,
        schedule: LoopSchedule,
        read_engines: ReadEngines | None = None,
    ) -> int:
        """Load the checkpoint to resume from, if there is one, and open the files of the run; return its version."""
        self._sources = await asyncio.to_thread(digest_sources, self.config)
        version = await resume(self.config, workers, stream, self.console, self._sources)
        self.restarts.resumed(version)
        self.tracker = open_tracker(self.config, self.console, schedule, version, read_engines)
        self._closing.callback(self.tracker.close)
        self.tracker.log(self.times, version)
        resolved = {key: get_value(self.config, key) for key in self._left_open}
        await record_start(self.given, self._origins, version, schedule.total_steps, self.console, resolved)
        return version

    def open_record(self, name: str, version: int) -> BufferedSink:
        """Open a file of records in the run's folder, next to the metrics."""
        record = open_record(name, self.config.trainer.checkpoint_dir, version or None, self.console)
        self._closing.callback(record.close)
        return record

    def build_loop(
        self, task: T, workers: RankGroup, schedule: LoopSchedule, version: int, keep_weights: KeepWeights | None = None
    ) -> TrainLoop[T]:
        checkpointer = build_checkpointer(
            self.config, workers, self.console, self.restarts.run_id, sources=self._sources
        )
        profiler = build_profiler(self.config, workers, self.console)
        ending = self.console.stage("ending the processes", is_logged=False)
        self._closing.callback(self._closing_stage.enter_context, ending)  # closing begins with this
        loop = TrainLoop(
            task,
            schedule,
            checkpointer,
            self.tracker,
            self.console,
            self.restarts,
            version=version,
            profiler=profiler,
            keep_weights=keep_weights,
        )
        warnings = self.open_record("warnings", KEEP_ALL)
        record_advice = self.console.report_advice(
            lambda text, rule: warnings.log({"text": text, "rule": rule}, loop.version)
        )
        self._closing.enter_context(record_advice)
        return loop

    def note(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.note(line)


def build_checkpointer(
    config: Config | SftConfig, workers: RankGroup, console: Console, run_id: str = "", *, sources: Sources
) -> Checkpointer:
    return Checkpointer(
        workers,
        CheckpointDir(config.trainer.checkpoint_dir, run_id),
        console,
        run=_signature(config) | {"sources": dict(sources)},
        keep=config.trainer.max_ckpts_to_keep,
        timeout=timeouts(config).checkpoint,
    )


def _signature(config: Config | SftConfig) -> dict[str, Any]:
    """Return the command and the model, which checkpoints record."""
    if isinstance(config, SftConfig):
        return {"command": "sft", "model": resolve_path(config.model.path)}
    return {"command": "train", "model": resolve_path(config.actor_rollout_ref.model.path)}


def _check_signature(config: Config | SftConfig, checkpoint: Path, saved: Mapping[str, Any] | None) -> None:
    """Refuse the checkpoint of another command, or of another model unless the checkpoint was named."""
    if saved is None:  # an old checkpoint
        return
    current = _signature(config)
    fix = "give this run another folder (trainer.experiment_name), or start over with trainer.resume_mode=disable"
    if saved["command"] != current["command"]:
        raise CheckpointError(
            f"checkpoint {checkpoint}: was written by verl {saved['command']}, and verl {current['command']} cannot "
            f"resume from it; {fix}. To start from its model, run verl merge --local_dir {checkpoint}/actor "
            "--target_dir merged and use merged as the model"
        )
    if config.trainer.resume_mode == "auto" and not _may_be_same(saved["model"], current["model"]):
        raise CheckpointError(
            f"checkpoint {checkpoint}: was trained from the model {saved['model']}, but the settings name "
            f"{current['model']}, which would be ignored; {fix}. If they are the same, set trainer.resume_mode=path "
            f"trainer.resume_from_path={checkpoint}"
        )


def _may_be_same(before: str, now: str) -> bool:
    """Whether two paths or names may be the same model. A folder that no longer exists was probably moved."""
    return before == now or (
        Path(before).is_absolute() and (not Path(before).is_dir() or Path(before).resolve() == Path(now).resolve())
    )


def _check_sources(config: Config | SftConfig, checkpoint: Path, saved: Sources, current: Sources) -> list[str]:
    """Return notes about code that has changed since a checkpoint; refuse other data unless it was named."""
    changes = find_changes(saved, current)
    if DATA in changes and config.trainer.resume_mode == "auto":
        raise CheckpointError(
            f"checkpoint {checkpoint}: was trained on data of other content than {DATA} has now, so its position in "
            "the data has no meaning; restore the files, or start over with trainer.resume_mode=disable. To continue "
            "with the new data at the same position, set trainer.resume_mode=path "
            f"trainer.resume_from_path={checkpoint}"
        )
    return [f"{setting}: what it names has changed since {checkpoint.name} was saved" for setting in changes]


async def resume(
    config: Config | SftConfig, policy: RankGroup, stream: PromptStream, console: Console, sources: Sources
) -> int:
    """Load the checkpoint to resume from, if there is one; return its version, 0 for a fresh start."""
    mode = config.trainer.resume_mode
    if mode == "disable":
        return 0
    if mode == "path":
        path = Path(config.trainer.resume_from_path or "").expanduser().absolute()
        digits = path.name.removeprefix("global_step_")
        if not digits.isdigit():
            raise CheckpointError(f"trainer.resume_from_path={path}: must end with global_step_<number>")
        source = CheckpointDir(path.parent)
        step: int | None = int(digits)
        if damage := find_corruption(path, checksums=False) or await policy.verify(str(path)):
            raise CheckpointError(f"trainer.resume_from_path={path}: is incomplete: {'; '.join(damage)}")
    else:
        source = CheckpointDir(config.trainer.checkpoint_dir)
        step = await find_checkpoint(source, policy.verify, console, timeouts(config).checkpoint)
    if step is None:
        return 0
    saved = source.read_trainer_state(step)
    run = saved.get("run") or {}
    _check_signature(config, source.step_dir(step), run or None)
    stream.load(saved["data"])
    notes = _check_sources(config, source.step_dir(step), run.get("sources", {}), sources)
    await policy.load(str(source.step_dir(step)))
    console.note(f"resumed from {source.step_dir(step)}: continuing with step {step + 1}")
    for note in notes:
        console.advice(note)
    return step
