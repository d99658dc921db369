"""Profiles of single steps: when the train workers record, and how Nsight Systems is started."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from verl.config.batch_sizes import count_train_ranks
from verl.config.schema import Config, SftConfig
from verl.tracking.console import Console
from verl.training.settings import ProfileSettings
from verl.workers.train_base import RankGroup


class RunProfiler:
    """Has the train workers record some steps of a run."""

    def __init__(self, workers: RankGroup, steps: frozenset[int], settings: ProfileSettings, console: Console) -> None:
        self._workers, self._steps, self._settings, self._console = workers, steps, settings, console

    @asynccontextmanager
    async def recording(self, step: int) -> AsyncIterator[None]:
        """Record the block as a step, if it is to be profiled. If it fails, nothing is written."""
        if step not in self._steps:
            yield
            return
        await self._workers.start_profile(self._settings, step)
        yield
        await self._workers.stop_profile()
        self._console.note(f"the profile of step {step} is in {Path(self._settings.directory, f'global_step_{step}')}")


def build_profiler(config: Config | SftConfig, workers: RankGroup, console: Console) -> RunProfiler | None:
    """Return the profiler of a run; None if no step is to be profiled."""
    steps = config.trainer.profile_steps
    return RunProfiler(workers, steps, _profile_settings(config), console) if steps else None


def nsys_options(config: Config | SftConfig) -> dict[int, dict[str, str]]:
    """Return the options of `nsys profile` by rank, for the ranks that run under it."""
    settings = _profile_settings(config)
    if not config.trainer.profile_steps or "nsys" not in settings.tools:
        return {}
    options = {
        "t": "cuda,nvtx,osrt,cudnn,cublas",
        "capture-range": "cudaProfilerApi",  # the worker opens it for the steps to profile
        "capture-range-end": f"repeat:{len(config.trainer.profile_steps)}",
        "cuda-memory-usage": "true",
        "kill": "none",
    }
    return {rank: {**options, "o": str(Path(settings.directory, f"nsys_rank_{rank}"))} for rank in settings.ranks}


def _profile_settings(config: Config | SftConfig) -> ProfileSettings:
    profile = config.trainer.profile
    folder = Path(profile.directory).expanduser() if profile.directory else config.trainer.checkpoint_dir / "profiles"
    ranks = range(count_train_ranks(config)) if profile.all_ranks else profile.ranks
    return ProfileSettings(str(folder.absolute()), tuple(dict.fromkeys(profile.tools)), frozenset(ranks))
