"""Which samples are recorded, and what happens when writing is slow, fails, or the folder is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recording_console import RecordingConsole

from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Plan, Planner
from verl.tracking.sample_files import EPISODES, SCHEMA, write_samples
from verl.tracking.sink import Table
from verl.trainer.records.samples import RecordSettings, SampleRecorder
from verl.types import SampleHandle
from verl.workers.sample_rows import SampleFile

pytestmark = pytest.mark.unit

GROUPS, N = 8, 2


def handles(first: int = 0) -> list[SampleHandle]:
    return [
        SampleHandle(f"{group}/{index}", group, 4, 2, 1.0, 0, index=index, row=100 + group)
        for group in range(first, first + GROUPS)
        for index in range(N)
    ]


def plan_of(samples: Sequence[SampleHandle]) -> Plan:
    return Planner(2, BatchSizes(GROUPS, None, 1000)).plan(samples)


def read_tokens(indices: Sequence[Sequence[int]]) -> list[Any]:
    return [f"values {len(each)}" if each else None for each in indices]


class Writer:
    def __init__(self, size: int = 10) -> None:
        self.files: list[SampleFile] = []
        self.size = size
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def write(self, file: SampleFile) -> int:
        await self.may_write.wait()
        self.files.append(file)
        if self.size < 0:
            raise OSError("the disk is full")
        return self.size

    def recorder(self, folder: Path, **settings: Any) -> SampleRecorder:
        self.console = RecordingConsole()
        given = {"interval": 4, "per_validation": 4, "max_bytes": 100.0, **settings}
        return SampleRecorder(RecordSettings(folder, **given), self.write, self.console)


async def test_whole_groups_are_recorded_with_the_values_of_each_rank(tmp_path: Path) -> None:
    writer, samples = Writer(), handles(first=5)
    recorder = writer.recorder(tmp_path)
    recorder.record_trained(3, samples, plan_of(samples), read_tokens)
    await recorder.close()
    [file] = writer.files
    assert file.path == tmp_path / "samples" / "train_00000003.parquet"
    recorded = [ref for refs, _ in file.parts for ref in refs]
    assert sorted(recorded) == ["12/0", "12/1", "8/0", "8/1"]
    assert all(values == f"values {len(refs)}" for refs, values in file.parts)
    assert file.rows[12] == 112


async def test_validations_record_the_same_prompts_spread_over_all(tmp_path: Path) -> None:
    writer = Writer()
    recorder = writer.recorder(tmp_path)
    for step in (0, 5):
        recorder.record_validation(step, handles())
        await recorder.close()
    assert [file.path.name for file in writer.files] == ["val_00000000.parquet", "val_00000005.parquet"]
    assert [file.parts[0][0] for file in writer.files] == [["0/0", "0/1", "4/0", "4/1"]] * 2


async def test_all_samples_go_to_the_folders_of_launch_scripts_but_failed_ones(tmp_path: Path) -> None:
    writer, samples = Writer(), handles()
    recorder = writer.recorder(tmp_path, interval=None, per_validation=0, train_dir=tmp_path / "a", val_dir=tmp_path)
    recorder.record_trained(1, samples, plan_of(samples), read_tokens)
    recorder.record_validation(1, [*samples, SampleHandle(None, 9, 4, 2, 0.0, 0)])
    await recorder.close()
    assert [file.path for file in writer.files] == [tmp_path / "a" / "1.jsonl", tmp_path / "1.jsonl"]
    assert all(len(file.parts[0][0]) == GROUPS * N for file in writer.files)


async def test_a_slow_disk_skips_steps_and_never_waits(tmp_path: Path) -> None:
    writer, samples = Writer(), handles()
    recorder = writer.recorder(tmp_path)
    writer.may_write.clear()
    for step in (1, 2, 3):
        recorder.record_trained(step, samples, plan_of(samples), read_tokens)
        await asyncio.sleep(0)
    assert recorder.skipped == 2
    writer.may_write.set()
    await recorder.close()
    recorder.record_trained(4, samples, plan_of(samples), read_tokens)
    await recorder.close()
    assert [file.step for file in writer.files] == [1, 4]


async def test_an_error_is_reported_once_and_counted(tmp_path: Path) -> None:
    writer, samples = Writer(size=-1), handles()
    recorder = writer.recorder(tmp_path)
    for step in (1, 2):
        recorder.record_trained(step, samples, plan_of(samples), read_tokens)
        await recorder.close()
    assert recorder.skipped == 2
    [message] = writer.console.messages
    assert "train_00000001.parquet: samples were not recorded; training continues: the disk is full" in message


async def test_a_full_folder_gets_no_more_samples_also_after_a_resume(tmp_path: Path) -> None:
    writer, samples = Writer(size=60), handles()
    recorder = writer.recorder(tmp_path)
    for step in (1, 2, 3):
        recorder.record_trained(step, samples, plan_of(samples), read_tokens)
        await recorder.close()
    assert [file.step for file in writer.files] == [1, 2]
    assert sum("trainer.samples.max_gib" in message for message in writer.console.messages) == 1
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "train_00000001.parquet").write_bytes(bytes(100))
    writer.recorder(tmp_path).record_trained(4, samples, plan_of(samples), read_tokens)
    assert len(writer.files) == 2


async def test_trackers_get_the_first_responses_of_each_validation(tmp_path: Path) -> None:
    row = dict.fromkeys(SCHEMA.names)
    rows = [{**row, "prompt": f"{number}+1=", "response": "2", "score": 0.5} for number in range(4)]

    async def write(file: SampleFile) -> int:
        write_samples(file.path, rows)
        return 1

    shown: list[tuple[Table, int]] = []
    tracker = SimpleNamespace(log=None, close=None, log_table=lambda table, step: shown.append((table, step)))
    settings = RecordSettings(tmp_path, 1, 4, 1e6, val_table=3)
    recorder = SampleRecorder(settings, write, RecordingConsole(), tracker)
    samples = handles()
    recorder.record_trained(4, samples, plan_of(samples), read_tokens)
    recorder.record_validation(5, samples)
    await recorder.close()
    [(table, step)] = shown
    assert (table.name, step) == ("val/generations", 5)
    expected = {"response": "2", "ground_truth": None, "score": 0.5}
    assert table.rows == [{"prompt": f"{number}+1=", **expected} for number in range(3)]


async def test_recorded_episodes_of_some_prompts_are_passed_on_to_be_traced(tmp_path: Path) -> None:
    shown: list[tuple[Table, int]] = []

    async def write(file: SampleFile) -> int:
        times = {"started": 1.0, "generated": 2.0, "scored": 3.0}
        rows = [{"step": file.step, "group": group, "index": k, **times} for group in (4, 5) for k in range(2)]
        write_samples(file.path, rows)
        return 1

    tracker: Any = SimpleNamespace(log=None, close=None, log_table=lambda table, step: shown.append((table, step)))
    settings = RecordSettings(tmp_path, 1, 4, 1e6, is_traced=True, traced_groups=1)
    recorder = SampleRecorder(settings, write, RecordingConsole(), tracker)
    samples = handles()
    recorder.record_trained(5, samples, plan_of(samples), read_tokens)
    recorder.record_validation(5, samples)
    await recorder.close()
    [(table, step)] = shown
    assert (table.name, step) == (EPISODES, 5)
    assert [(row["group"], row["index"], row["scored"]) for row in table.rows] == [(4, 0, 3.0), (4, 1, 3.0)]
