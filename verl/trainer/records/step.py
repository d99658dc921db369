"""The files that a step writes to."""

from __future__ import annotations

from dataclasses import dataclass

from verl.tracking.buffered_sink import BufferedSink
from verl.trainer.records.replay import StepRecorder
from verl.trainer.records.samples import SampleRecorder


@dataclass(frozen=True, slots=True)
class StepRecords:
    """The files of a run that grow with every step.

    Args:
        trained: `trained.jsonl`, the positions in the data that were trained on.
        phases: `phases.jsonl`, when each phase of the controller and of every train rank began and ended.
        samples: `samples/`, responses with scores and the numbers of every token.
        replay: `replay/`, steps that can be run again; None: none.
    """

    trained: BufferedSink
    phases: BufferedSink
    samples: SampleRecorder
    replay: StepRecorder | None = None
