"""An adapter from the command line to a model of its own: real Ray, FSDP2 and vLLM, then transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from verl.checkpoint.format import entries
from verl.demo.assets import read_problems
from verl.demo.folder import Assets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def verl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def train(assets: Assets, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return verl(
        "train",
        f"actor_rollout_ref.model.path={assets.model}",
        f"data.train_files={assets.train}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.actor.lora_rank=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={Path(__file__).parents[1] / 'acceptance' / '_rewards.py'}",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={folder}",
        *overrides,
    )


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
    assert all(".lora_" in name for name in entries(actor) if name.startswith("model."))
    test = verl("merge", "test", "--local_dir", actor, "--test_hf_dir", actor / "huggingface")
    assert test.returncode == 0, test.stderr


def test_an_adapter_trains_with_vllm_goes_on_with_transformers_and_is_exported(assets: Assets, tmp_path: Path) -> None:
    first = train(assets, tmp_path / "run", "trainer.total_training_steps=2", "trainer.save_freq=2")
    assert first.returncode == 0, first.stdout + first.stderr
    again = train(
        assets,
        tmp_path / "run",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "actor_rollout_ref.rollout.name=hf",  # gets all weights, with the adapter merged in
        "trainer.local=True",
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on with step 3" in again.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["training/rollout_logprobs_diff_max"] < 1e-4 for line in steps)
    assert all(line["weights/probe_gap"] < 1e-4 for line in steps)

    actor = tmp_path / "run" / "global_step_3" / "actor"
    assert all(".lora_" in name for name in entries(actor) if name.startswith("model."))
    done = verl("merge", "--local_dir", actor, "--target_dir", tmp_path / "adapter", "--adapter")
    assert done.returncode == 0, done.stderr
    plain = AutoModelForCausalLM.from_pretrained(assets.model)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = plain(tokens).logits
        after = PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
    assert float((after - before).abs().max()) > 1e-3
