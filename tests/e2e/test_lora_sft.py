"""An adapter trained by `verl sft` and merged. RL of an adapter with vLLM is shown by `make show-lora`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.checkpoint.shards import read_index
from verl.demo.assets import read_problems
from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(0)]


def verl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_supervised_training_of_an_adapter_saves_it_and_the_merged_model(assets: Assets, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "response": answer} for prompt, answer in read_problems(assets.train)[:64]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    done = verl(
        "sft",
        f"model.path={assets.model}",
        "model.lora_rank=8",
        f"data.train_files={tmp_path / 'train.parquet'}",
        "data.train_batch_size=16",
        "data.max_length=32",
        "optim.lr=1e-2",
        "trainer.local=True",
        "trainer.total_training_steps=4",
        "trainer.save_freq=4",
        "trainer.save_hf=True",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
    actor = tmp_path / "run" / "global_step_4" / "actor"
    assert all(".lora_" in name for name in read_index(actor).tensors if name.startswith("model."))
    test = verl("merge", "test", "--local_dir", actor, "--test_hf_dir", actor / "huggingface")
    assert test.returncode == 0, test.stderr
