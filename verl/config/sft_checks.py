"""The settings of supervised training against each other: what cannot work, what is without effect, and the sizes that
follow."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import Size, how_ranks, train_ranks
from verl.config.checks import endless_warmup, missing, of_any_run
from verl.config.mutes import IgnoredRule, without_effect
from verl.config.mutes.training import OF_ANY_RUN, of_schedule, of_sharding, without_adapter
from verl.config.problems import ConfigProblem, keys_of
from verl.config.schema import SftConfig

__all__ = ["contradictions", "hints", "missing", "saves_hf", "sft_sizes"]


def contradictions(config: SftConfig) -> Iterator[ConfigProblem]:
    """Settings that cannot work together."""
    yield from of_any_run(config)
    steps = config.trainer.total_training_steps
    yield from endless_warmup("optim", config.optim, steps, steps)
    if saves_hf(config) and "model" not in config.checkpoint.save_contents:
        yield ConfigProblem(
            ("trainer.save_hf", "checkpoint.save_contents"),
            "checkpoint.save_contents: trainer.save_hf or hf_model makes a model of the weights in the checkpoint, and "
            "they are left out; add model, or set trainer.save_hf=False and take out hf_model",
        )


def hints(config: SftConfig) -> Iterator[ConfigProblem]:
    """What works, but is probably not meant."""
    data, ranks = config.data, train_ranks(config)
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
    yield from without_effect(config, _MUTES)


def sft_sizes(config: SftConfig) -> list[Size]:
    """What a step is made of, and how each number comes about."""
    data = config.data
    ranks, batch = train_ranks(config), data.train_batch_size
    rows = [
        Size("examples a step", batch, "data.train_batch_size"),
        Size("tokens of an example, at most", data.max_length, "data.max_length"),
        Size("train ranks", ranks, how_ranks(config)),
    ]
    if data.packing:
        return [*rows, Size("tokens of a micro-batch and rank", data.max_token_len_per_gpu, "max_token_len_per_gpu")]
    micro = min(data.micro_batch_size_per_gpu, -(-batch // ranks))
    return [
        *rows,
        Size("examples of a micro-batch and rank", micro, "data.micro_batch_size_per_gpu"),
        Size("... tokens of it, at most", micro * data.max_length, f"{micro} examples x {data.max_length} tokens"),
    ]


def saves_hf(config: SftConfig) -> bool:
    """Whether checkpoints also hold the model for `from_pretrained`, asked for in either spelling."""
    return config.trainer.save_hf or "hf_model" in config.checkpoint.save_contents


_MUTES = (
    *OF_ANY_RUN,
    *of_schedule("optim", lambda c: c.optim),
    *of_sharding("model.fsdp_config", lambda c: c.model.fsdp_config),
    without_adapter("model.peft", lambda c: c.model.peft),
    IgnoredRule(
        keys_of("data", "prompt_key", "response_key"),
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
