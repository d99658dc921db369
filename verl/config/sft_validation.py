"""The settings of supervised training against each other: what cannot work, what is without effect, and the sizes that
follow."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_train_ranks
from verl.config.features import saves_hf
from verl.config.ignored import IgnoredRule, find_ignored_settings
from verl.config.ignored.training import OF_ANY_RUN, of_schedule, of_sharding, without_adapter
from verl.config.problems import ConfigProblem, prefix_keys
from verl.config.schema import SftConfig
from verl.config.validation import check_warmup, find_run_conflicts

__all__ = ["find_conflicts", "find_hints"]


def find_conflicts(config: SftConfig) -> Iterator[ConfigProblem]:
    """Settings that cannot work together."""
    yield from find_run_conflicts(config)
    steps = config.trainer.total_training_steps
    yield from check_warmup("optim", config.optim, steps, steps)
    if saves_hf(config) and "model" not in config.checkpoint.save_contents:
        yield ConfigProblem(
            ("trainer.save_hf", "checkpoint.save_contents"),
            "checkpoint.save_contents: trainer.save_hf or hf_model makes a model of the weights in the checkpoint, and "
            "they are left out; add model, or set trainer.save_hf=False and take out hf_model",
        )


def find_hints(config: SftConfig) -> Iterator[ConfigProblem]:
    """What works, but is probably not meant."""
    data, ranks = config.data, count_train_ranks(config)
    if data.train_batch_size < ranks:
        yield ConfigProblem(
            ("data.train_batch_size", "trainer.n_gpus_per_node", "trainer.nnodes"),
            f"data.train_batch_size: {data.train_batch_size} examples leave some of the {ranks} train ranks without "
            f"work; set data.train_batch_size={ranks} or more",
        )
    if data.packing and data.max_token_len_per_gpu < data.max_length:
        yield ConfigProblem(
            ("data.max_token_len_per_gpu", "data.max_length", "data.packing"),
            f"data.max_token_len_per_gpu: {data.max_token_len_per_gpu} is less than data.max_length={data.max_length}: "
            f"longer examples will exceed it; set data.max_token_len_per_gpu={data.max_length}",
        )
    yield from find_ignored_settings(config, _MUTES)


_MUTES = (
    *OF_ANY_RUN,
    *of_schedule("optim", lambda c: c.optim),
    *of_sharding("model.fsdp_config", lambda c: c.model.fsdp_config),
    without_adapter("model.peft", lambda c: c.model.peft),
    IgnoredRule(
        prefix_keys("data", "prompt_key", "response_key"),
        lambda c: c.data.messages_key is not None,
        "data.messages_key is given: its conversations are all that is read",
        ("data.messages_key",),
    ),
    IgnoredRule(
        ("data.max_token_len_per_gpu",),
        lambda c: not c.data.packing,
        "data.packing=false counts examples",
        ("data.packing",),
    ),
    IgnoredRule(
        ("data.micro_batch_size_per_gpu",),
        lambda c: c.data.packing,
        "data.packing=true counts tokens",
        ("data.packing",),
    ),
    IgnoredRule(("data.seed",), lambda c: not c.data.shuffle, "data.shuffle=false", ("data.shuffle",)),
    IgnoredRule(
        ("data.val_max_samples", "trainer.val_before_train"),
        lambda c: c.data.val_files is None,
        "data.val_files is not given",
        ("data.val_files",),
    ),
    IgnoredRule(
        ("checkpoint.load_contents",),
        lambda c: c.trainer.resume_mode == "disable",
        "trainer.resume_mode=disable loads nothing",
        ("trainer.resume_mode",),
    ),
    IgnoredRule(
        ("trainer.faults.max_engine_restarts", "trainer.deadlines.generation", "trainer.deadlines.weights"),
        lambda c: True,
        "supervised training has no rollout engines",
        (),
    ),
)
