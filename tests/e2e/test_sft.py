"""`verl sft` as a user meets it: the documented settings but for paths and sizes, with real Ray and FSDP2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.demo.assets import read_problems
from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.rotating(3)]

DOCUMENTED = """
data:
  train_files: {folder}/sft_train.parquet
  val_files: {folder}/sft_val.parquet
  prompt_key: prompt
  response_key: response
  micro_batch_size_per_gpu: 4

model:
  path: {folder}/model

trainer:
  n_gpus_per_node: 2
  nnodes: 1
  total_epochs: 3
  save_freq: 500
  project_name: my-sft
  logger: ["console"]

optim:
  lr: 2e-5
  weight_decay: 0.01
  warmup_steps_proportion: 0.1
  lr_scheduler: cosine
"""


@pytest.fixture(scope="module", name="assets")
def examples(assets: Assets) -> Assets:
    for name, file, count in (("train", assets.train, 640), ("val", assets.test, 64)):
        rows = [{"prompt": prompt, "response": answer} for prompt, answer in read_problems(file)[:count]]
        pq.write_table(pa.Table.from_pylist(rows), assets.folder / f"sft_{name}.parquet")
    (assets.folder / "sft_config.yaml").write_text(DOCUMENTED.format(folder=assets.folder))
    return assets


def command(assets: Assets, folder: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-m", "verl", "sft", "--config-path", str(assets.folder), "--config-name", "sft_config"),
        *("data.train_batch_size=64", f"trainer.default_local_dir={folder}", *overrides),
    ]


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_the_documented_settings_train_stop_go_on_and_merge(assets: Assets, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = subprocess.Popen(
        command(assets, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    assert stopped.stdout is not None
    output = ""
    for line in stopped.stdout:
        output += line
        if line.startswith("step  4/30"):
            os.killpg(stopped.pid, signal.SIGTERM)  # as `timeout` does
    assert stopped.wait() == 143, output
    assert "saved and stopped after step" in output
    assert "Traceback" not in output
    done = max(losses(run))
    assert 4 <= done < 30

    again = subprocess.run(command(assets, run), capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"continuing with step {done + 1}" in again.stdout
    assert "validation 30/30  loss " in again.stdout
    assert sorted(losses(run)) == list(range(1, 31))

    # One process and other micro-batches give the same losses, from the first step to the last: none was done twice.
    alone = tmp_path / "alone"
    overrides = ("trainer.local=True", "data.packing=True", "data.max_token_len_per_gpu=640", "trainer.save_freq=-1")
    whole = subprocess.run(command(assets, alone, *overrides), capture_output=True, text=True, timeout=900)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)

    merged = tmp_path / "merged"
    arguments = ["--local_dir", str(run / "global_step_30" / "actor"), "--target_dir", str(merged)]
    merge = subprocess.run([sys.executable, "-m", "verl", "merge", *arguments], capture_output=True, text=True)
    assert merge.returncode == 0, merge.stdout + merge.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    assert tokenizer.encode("12+34=") == AutoTokenizer.from_pretrained(assets.model).encode("12+34=")
    before = AutoModelForCausalLM.from_pretrained(assets.model)
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert any(not torch.equal(now, then) for now, then in pairs)
