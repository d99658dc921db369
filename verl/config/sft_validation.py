"""Checks of the settings of supervised training against each other."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import count_train_ranks
from verl.config.ignored import find_ignored_settings
from verl.config.problems import ConfigProblem
from verl.config.schema import SftConfig
from verl.config.validation import check_warmup, find_run_conflicts


def find_conflicts(config: SftConfig) -> Iterator[ConfigProblem]:
    """Yield settings that cannot work together."""
    steps = config.trainer.total_training_steps
    yield from find_run_conflicts(config)
    yield from check_warmup("optim", config.optim, steps, steps)


def find_hints(config: SftConfig) -> Iterator[ConfigProblem]:
    """Yield settings that work but are probably a mistake, and settings without effect."""
    data, ranks = config.data, count_train_ranks(config)
    if data.train_batch_size < ranks:
        yield ConfigProblem.at(
            "data.train_batch_size",
            f"{data.train_batch_size} examples leave some of the {ranks} train ranks idle; set "
            f"data.train_batch_size={ranks} or more",
            *("trainer.n_gpus_per_node", "trainer.nnodes"),
        )
    if data.packing and data.max_token_len_per_gpu < data.max_length:
        yield ConfigProblem.at(
            "data.max_token_len_per_gpu",
            f"{data.max_token_len_per_gpu} is less than data.max_length={data.max_length}, so longer examples will "
            f"exceed it; set data.max_token_len_per_gpu={data.max_length}",
            *("data.max_length", "data.packing"),
        )
    yield from find_ignored_settings(config)
