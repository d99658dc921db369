"""The sizes that follow from the batch settings: what a step is made of, and how each number comes about."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema import Config

__all__ = [
    "Size",
    "derived_sizes",
    "engine_count",
    "max_sequence_tokens",
    "optimiser_steps",
    "render_sizes",
    "total_steps",
    "train_ranks",
]


@dataclass(frozen=True, slots=True)
class Size:
    """One row of the table."""

    name: str
    value: int
    how: str


def train_ranks(config: Config) -> int:
    """Processes that train: one per device, or as many as asked for on a machine without any."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def engine_count(config: Config) -> int:
    """Rollout engines of the run; at least one."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.num_engines is not None:
        return rollout.num_engines
    return max(1, train_ranks(config) // rollout.tensor_model_parallel_size)


def max_sequence_tokens(config: Config) -> int:
    """The longest sequence, prompt and answer, that any part of the run must hold."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or longest


def total_steps(config: Config, prompts: int) -> int:
    """Steps of the run over `prompts` training prompts; a step may reach over the end of an epoch."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return max(1, prompts * config.trainer.total_epochs // config.data.train_batch_size)


def optimiser_steps(config: Config, steps: int = 1) -> int:
    """Optimiser steps of so many steps of the run."""
    actor = config.actor_rollout_ref.actor
    return steps * _ceil(config.data.train_batch_size, actor.ppo_mini_batch_size) * actor.ppo_epochs


def derived_sizes(config: Config, *, prompts: int | None = None) -> list[Size]:
    """All derived sizes, in the order in which a step meets them; `prompts` is the number in the data, once known."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks, engines, longest = train_ranks(config), engine_count(config), max_sequence_tokens(config)
    mini_prompts = min(actor.ppo_mini_batch_size, data.train_batch_size)
    answers = data.train_batch_size * rollout.n
    mini_samples = mini_prompts * rollout.n
    rank_samples = _ceil(mini_samples, ranks)

    rows = [
        Size("prompts a step", data.train_batch_size, "data.train_batch_size"),
        Size("answers a step", answers, f"{data.train_batch_size} prompts x rollout.n={rollout.n}"),
        Size("tokens of a sequence, at most", longest, _how_longest(config)),
        Size("engines", engines, _how_engines(config)),
        Size(
            "answers generated at once", min(answers, engines * rollout.max_num_seqs), "engines x rollout.max_num_seqs"
        ),
        Size("train ranks", ranks, f"{config.trainer.nnodes} nodes x {config.trainer.n_gpus_per_node}"),
        Size(
            "optimiser steps a step",
            optimiser_steps(config),
            f"ceil({data.train_batch_size} / ppo_mini_batch_size={actor.ppo_mini_batch_size}) x "
            f"ppo_epochs={actor.ppo_epochs}",
        ),
        Size("samples of a mini-batch", mini_samples, f"{mini_prompts} prompts x rollout.n={rollout.n}"),
        Size("... on one rank", rank_samples, f"{mini_samples} / {ranks} ranks, rounded up"),
    ]
    if actor.use_dynamic_bsz:
        rows.append(
            Size("tokens of a micro-batch and rank", actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu")
        )
    else:
        micro = min(actor.ppo_micro_batch_size_per_gpu, rank_samples)
        rows += [
            Size("samples of a micro-batch and rank", micro, "actor.ppo_micro_batch_size_per_gpu"),
            Size("... tokens of it, at most", micro * longest, f"{micro} samples x {longest} tokens"),
            Size("micro-batches of a mini-batch", _ceil(rank_samples, micro), f"{rank_samples} samples / {micro}"),
        ]
    if prompts is not None:
        rows.append(
            Size(
                "steps an epoch",
                max(1, prompts // data.train_batch_size),
                f"{prompts} prompts / {data.train_batch_size}",
            )
        )
        rows.append(Size("steps of the run", total_steps(config, prompts), _how_steps(config, prompts)))
    return rows


def render_sizes(rows: list[Size]) -> str:
    """The table as text: name, number, how it comes about."""
    values = [f"{row.value:,}" for row in rows]
    names = max(len(row.name) for row in rows)
    digits = max(len(value) for value in values)
    return "\n".join(
        f"{row.name:<{names}}  {value:>{digits}}  {row.how}" for row, value in zip(rows, values, strict=True)
    )


def _how_longest(config: Config) -> str:
    if config.actor_rollout_ref.rollout.max_model_len is not None:
        return "rollout.max_model_len"
    return f"prompt {config.data.max_prompt_length} + response {config.data.max_response_length}"


def _how_engines(config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    if rollout.num_engines is not None:
        return "rollout.num_engines"
    return f"{train_ranks(config)} devices / rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}"


def _how_steps(config: Config, prompts: int) -> str:
    if config.trainer.total_training_steps is not None:
        return "trainer.total_training_steps"
    return f"{prompts} prompts x trainer.total_epochs={config.trainer.total_epochs} / {config.data.train_batch_size}"


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
