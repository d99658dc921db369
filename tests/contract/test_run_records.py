"""What a run writes to its folder, with real models in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl.cli import main
from verl.demo.assets import make_assets

pytestmark = pytest.mark.contract


def train(folder: Path, *more: str) -> int:
    assets = make_assets(folder / "assets")
    return main(
        [
            *(
                "train",
                f"data.train_files={assets.train}",
                f"data.val_files={assets.test}",
                f"model.path={assets.model}",
            ),
            *("rollout.name=hf", "rollout.n=4", "data.max_prompt_length=8", "data.max_response_length=4"),
            *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "trainer.total_training_steps=1"),
            *("trainer.n_gpus_per_node=1", "data.val_max_samples=64", "trainer.local=True", "trainer.test_freq=1"),
            *(f"trainer.default_local_dir={folder / 'run'}", *more),
        ]
    )


def test_recorded_samples_have_text_scores_and_log_probs_of_both_sides(tmp_path: Path) -> None:
    assert train(tmp_path, f"trainer.rollout_data_dir={tmp_path / 'all'}", "trainer.samples.per_step=8") == 0
    rows = pq.read_table(tmp_path / "run" / "samples" / "train_00000001.parquet").to_pylist()
    assert [(row["group"], row["index"]) for row in rows] == [(group, index) for group in (0, 2) for index in range(4)]
    for row in rows:
        mask = np.array(row["mask"])
        gap = np.abs(np.array(row["logprobs"]) - np.array(row["rollout_logprobs"]))[mask]
        assert mask.any()
        assert gap.max() < 1e-4
        assert "".join(row["pieces"][: len(mask) - mask.sum()]) == row["prompt"]
        assert 0 < row["started"] <= row["generated"] <= row["scored"]
    lines = [json.loads(line) for line in (tmp_path / "all" / "1.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    assert [line["gts"] for line in lines[:4]] == [rows[0]["ground_truth"]] * 4
    assert pq.read_table(tmp_path / "run" / "samples" / "val_00000001.parquet").num_rows == 8


def test_a_run_that_only_validates_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "trainer.val_only=True", f"trainer.validation_data_dir={tmp_path / 'val'}") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/addition/mean@1" in line] == [0]
    assert len((tmp_path / "val" / "0.jsonl").read_text().splitlines()) == 64
    assert not [*(tmp_path / "run").glob("global_step_*")]
    assert "validated\n" in capsys.readouterr().out
