"""The settings of `verl sft`: the documented file as written, its checks, and what does nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config.batch_sizes import derive_sft_sizes
from verl.config.load import load_sft
from verl.config.schema import Config, SftConfig, collect_settings
from verl.errors import ConfigError

pytestmark = pytest.mark.unit

DOCUMENTED = """
data:
  train_files: /data/sft_train.parquet
  val_files: /data/sft_val.parquet
  prompt_key: prompt
  response_key: response
  micro_batch_size_per_gpu: 4
model:
  path: Qwen/Qwen2.5-7B-Instruct
trainer:
  n_gpus_per_node: 4
  nnodes: 1
  total_epochs: 3
  save_freq: 500
  project_name: my-sft
  logger: ["console", "jsonl"]
optim:
  lr: 2e-5
  weight_decay: 0.01
  warmup_steps_proportion: 0.1
  lr_scheduler: cosine
"""
NEEDED = ("data.train_files=train.parquet", "model.path=a/b", "trainer.n_gpus_per_node=2")


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_sft([*NEEDED, *overrides])
    return raised.value.problems


def hints(*overrides: str) -> tuple[str, ...]:
    return load_sft([*NEEDED, *overrides])[0].hints


def test_the_documented_file_loads_as_written(tmp_path: Path) -> None:
    (tmp_path / "sft_config.yaml").write_text(DOCUMENTED)
    [loaded] = load_sft(["--config-path", str(tmp_path), "--config-name", "sft_config"])
    config = loaded.config
    assert (config.optim.lr, config.optim.lr_warmup_steps_ratio, config.optim.lr_scheduler_type) == (
        2e-5,
        0.1,
        "cosine",
    )
    assert (config.data.response_key, config.data.micro_batch_size_per_gpu) == ("response", 4)
    assert config.trainer.checkpoint_dir.as_posix() == "checkpoints/my-sft/default"
    assert sorted(loaded.hints) == [
        "optim.lr_scheduler is an alias of optim.lr_scheduler_type",
        "optim.warmup_steps_proportion is an alias of optim.lr_warmup_steps_ratio",
    ]


def test_what_is_required_is_asked_for() -> None:
    with pytest.raises(ConfigError) as raised:
        load_sft([])
    assert [text.partition(":")[0] for text in raised.value.problems] == ["data.train_files", "model.path"]


def test_a_setting_of_the_other_command_is_named_as_such() -> None:
    assert problems("actor_rollout_ref.rollout.n=8") == [
        "actor_rollout_ref.rollout.n: is a setting of `verl train`, not of `verl sft`; remove it"
    ]
    assert "did you mean optim.lr_scheduler_type?" in problems("optim.lr_scheduler_typ=cosine")[0]


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert "data.val_files" in problems("trainer.test_freq=5")[0]
    assert (
        "must be at most 9"
        in problems("trainer.total_training_steps=10", "optim.lr_warmup_steps=10", "optim.lr_scheduler=linear")[0]
    )
    assert "add model" in problems("trainer.save_hf=True", "trainer.save_freq=1", "checkpoint.save_contents=[extra]")[0]


@pytest.mark.parametrize(
    ("ignored", "switches_on"),
    [
        ("data.max_token_len_per_gpu=4096", ["data.packing=True"]),
        ("data.seed=3", None),
        ("data.response_key=answer", None),
        ("model.lora_alpha=32", ["model.lora_rank=8"]),
        ("optim.min_lr_ratio=0.1", ["optim.lr_scheduler=cosine"]),
        ("data.val_max_samples=8", ["data.val_files=val.parquet"]),
        ("trainer.save_hf=True", None),
    ],
)
def test_an_ignored_setting_is_reported_until_its_switch_is_set(ignored: str, switches_on: list[str] | None) -> None:
    switches = {
        "data.seed=3": ["data.shuffle=False"],
        "data.response_key=answer": ["data.messages_key=messages"],
        "trainer.save_hf=True": ["trainer.save_freq=-1"],
    }
    reported = hints(ignored, *switches.get(ignored, []))
    key = ignored.partition("=")[0].replace("model.lora", "model.peft.lora")
    assert any(text.startswith(key) and "has no effect" in text for text in reported)
    assert not any("has no effect" in text for text in hints(ignored, *(switches_on or [])))


def test_an_adapter_is_asked_for_in_either_spelling_and_needs_a_rank() -> None:
    for spelling in ("model.peft.lora_rank=8", "model.lora_rank=8"):
        [loaded] = load_sft([*NEEDED, spelling, "model.peft.peft_type=lora"])
        assert loaded.config.model.peft.lora_rank == 8
    with pytest.raises(ConfigError, match=r"set model\.peft\.lora_rank=16"):
        load_sft([*NEEDED, "model.peft.peft_type=lora"])


def test_fewer_examples_than_ranks_and_a_budget_below_an_example_are_hinted_at() -> None:
    assert any("idle" in text for text in hints("data.train_batch_size=1"))
    assert any("will exceed it" in text for text in hints("data.packing=True", "data.max_token_len_per_gpu=100"))


def test_the_sizes_of_a_step_follow_from_the_settings() -> None:
    by_count = {row.name: row.value for row in derive_sft_sizes(load_sft(NEEDED)[0].config)}
    assert by_count["examples per micro-batch"] == 4
    assert by_count["... maximum tokens"] == 4 * 2048
    by_tokens = {row.name: row.value for row in derive_sft_sizes(load_sft([*NEEDED, "data.packing=True"])[0].config)}
    assert by_tokens["tokens per micro-batch"] == 16384


def test_settings_of_both_commands_are_declared_equally() -> None:
    train, sft = collect_settings(Config), collect_settings(SftConfig)
    own = {"data.train_batch_size"}  # prompts there, examples here
    both = [key for key in sft if key in train and key.startswith(("trainer.", "ray_kwargs.")) and key not in own]
    assert len(both) > 30
    assert all(train[key].default == sft[key].default and train[key].doc == sft[key].doc for key in both)
