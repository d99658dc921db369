"""Profiles of a train worker, one step at a time: PyTorch traces, memory snapshots, ranges for Nsight Systems.

Traces show the phases of a step as spans. Without a profile a span does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from verl.private_files import make_folder
from verl.training.settings import ProfileSettings

MEMORY_EVENTS = 1_000_000
"""The newest allocations and frees that a memory snapshot holds."""

_is_recording = False  # torch asks itself the same, but only after microseconds


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name a block, or as a decorator the calls of a function, in the profile that is being recorded, if any."""
    if not _is_recording:
        yield
        return
    with record_function(name):
        yield


class StepProfiler:
    """Records what this process does from now until `stop`, with each tool of the settings."""

    def __init__(self, settings: ProfileSettings, *, step: int, rank: int, device: str) -> None:
        global _is_recording
        folder = Path(settings.directory, f"global_step_{step}")
        make_folder(folder)
        self._recorders = ExitStack()
        for tool in settings.tools:
            self._recorders.enter_context(_RECORDERS[tool](folder / _FILES[tool].format(rank=rank), device))
        _is_recording = True

    def stop(self) -> None:
        """Stop recording and write the files."""
        global _is_recording
        _is_recording = False
        self._recorders.close()


@contextmanager
def _record_trace(path: Path, device: str) -> Iterator[None]:
    activities = [ProfilerActivity.CPU, *([] if device == "cpu" else [ProfilerActivity.CUDA])]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
        yield
    recorded.export_chrome_trace(str(path))


@contextmanager
def _record_memory(path: Path, device: str) -> Iterator[None]:
    """Record allocations and frees with their stacks. Needs a GPU, so that CI does not run it."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _mark_for_nsys(path: Path, device: str) -> Iterator[None]:
    """Open the capture range of `nsys`, which Ray has started this process under. Needs a GPU, as above."""
    torch.cuda.profiler.start()
    try:
        with torch.autograd.profiler.emit_nvtx():  # spans and operators become NVTX ranges
            yield
    finally:
        torch.cuda.profiler.stop()


_RECORDERS: dict[str, Callable[[Path, str], AbstractContextManager[None]]] = {
    "torch": _record_trace,
    "memory": _record_memory,
    "nsys": _mark_for_nsys,
}
_FILES = {"torch": "trace_rank_{rank}.json.gz", "memory": "memory_rank_{rank}.pickle", "nsys": ""}
"""Tool -> its file in the folder of a step; nsys itself writes one for all steps."""
