"""Settings, environment and warnings in the folder of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from recording_console import RecordingConsole

from verl.config.load import load
from verl.trainer.records.start import record_start

pytestmark = pytest.mark.unit

GIVEN = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m", "optim.lr=1e-5"]


def test_each_start_is_a_line_and_the_settings_can_be_loaded_again(tmp_path: Path) -> None:
    secret = ["trainer.wandb_proxy=http://user:hunter2@proxy", "trainer.logger=wandb"]
    [loaded] = load([*GIVEN, *secret, f"trainer.default_local_dir={tmp_path}"], complete=False)
    for version in (0, 3):
        asyncio.run(record_start(loaded.config, loaded.origins, version, 8, RecordingConsole(), {"a.key": version}))
    lines = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["total_steps"]) for line in lines] == [(0, 8), (3, 8)]
    key = "actor_rollout_ref.actor.optim.lr"
    assert lines[0]["settings"][key] == {"value": 1e-5, "origin": "command line, as optim.lr"}
    assert "versions" in lines[0]["environment"]
    assert [line["resolved"] for line in lines] == [{"a.key": 0}, {"a.key": 3}]
    text = (tmp_path / "settings.yaml").read_text()
    assert "command line, as optim.lr" in text
    assert "hunter2" not in text + json.dumps(lines)
    assert yaml.safe_load(text)["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-5


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    [loaded] = load([*GIVEN, f"trainer.default_local_dir={tmp_path}"], complete=False)
    (tmp_path / "settings.tmp").mkdir()
    console = RecordingConsole()
    asyncio.run(record_start(loaded.config, {}, 0, 8, console))
    assert any("settings.yaml: cannot be written" in text for text in console.messages)
