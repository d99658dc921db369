"""Checks of how models are trained: parallelism, batch sizes, optimizers, adapters, MoE routing."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.batch_sizes import (
    BatchSizes,
    count_data_ranks,
    count_policy_steps,
    count_sequence_ranks,
    count_train_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
)
from verl.config.checks.conflict import Conflict
from verl.config.features import list_trained_models, uses_critic
from verl.config.paths import get_value
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import Config, SftConfig
from verl.config.schema.actor import FsdpConfig, OptimConfig
from verl.config.schema.conditions import ACTOR, ROLLOUT
from verl.config.train_engines import get_train_engine

_RANKS = "train ranks of the run (trainer.nnodes x trainer.n_gpus_per_node)"
_LARGE_LR = 0.1
_REPLAY, _BYPASS = f"{ACTOR}.router_replay.mode", "algorithm.rollout_correction.bypass_mode"


def find_conflicts(config: Config | SftConfig) -> Iterator[Conflict]:
    """Yield settings of parallelism, optimizers and adapters that cannot work together."""
    ranks = count_train_ranks(config)
    yield from _check_ulysses(config, ranks)
    for key, model, optim_key, optim in list_trained_models(config):
        fsdp, peft = model.fsdp_config, model.peft
        yield from _check_experts(f"{key}.fsdp_config", fsdp, optim, ranks)
        yield from _check_sharding(f"{key}.fsdp_config", fsdp, ranks)
        if optim.name == "muon" and fsdp.stochastic_rounding:
            reason = f"is not supported with {optim_key}.name=muon"
            fix = f"set {key}.fsdp_config.model_dtype=float32, or {optim_key}.name=adamw"
            yield Conflict(f"{key}.fsdp_config.stochastic_rounding", reason, fix)
        steps = config.trainer.total_training_steps
        if steps is not None and isinstance(config, Config) and key == ACTOR:
            steps = count_policy_steps(config, steps)
        if steps != 0:  # 0: trainer.critic_warmup is too long, which is reported separately
            yield from _check_warmup(optim_key, optim, steps)
        if peft.peft_type == "lora" and peft.lora_rank == 0:
            yield Conflict(f"{key}.peft.lora_rank", "0 means no adapter, but peft_type=lora", "=16")
        if peft.lora_rank > 0 and not peft.target_modules:
            yield Conflict(f"{key}.peft.target_modules", "is empty, but the adapter needs modules", "=all-linear")


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield batch sizes and dtypes of the policy and the critic that are probably a mistake."""
    yield from _check_batch_sizes(config, ACTOR, get_actor_batch_sizes(config))
    if uses_critic(config):
        yield from _check_batch_sizes(config, "critic", get_critic_batch_sizes(config))
    yield from _check_learning_rates(config)
    yield from _check_master_weights(config)


def find_sft_hints(config: SftConfig) -> Iterator[Conflict]:
    """Yield batch sizes and dtypes of supervised fine-tuning that are probably a mistake."""
    data, ranks, tokens = config.data, count_data_ranks(config), config.data.max_token_len_per_gpu
    if data.train_batch_size < ranks:
        reason = f"{data.train_batch_size} examples leave some of the {ranks} train ranks idle"
        yield Conflict("data.train_batch_size", reason, f"={ranks} or more")
    share = -(-data.max_length // count_sequence_ranks(config))
    if data.packing and tokens < share:
        reason = f"{tokens} is less than data.max_length={data.max_length}, so longer examples will exceed it"
        yield Conflict("data.max_token_len_per_gpu", reason, f"={share}")
    yield from _check_learning_rates(config)
    yield from _check_master_weights(config)


def find_routing_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings by which the experts to replay or to balance would be unknown."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode, coefficient = actor.router_replay.mode, actor.router_aux_loss_coef
    if mode == "R3" and not get_rollout_engine(rollout.name).capabilities.returns_routed_experts:
        reason = f"R3 requires an engine that returns its experts, but {ROLLOUT}.name={rollout.name} does not"
        yield Conflict(_REPLAY, reason, "=R2")
    if config.algorithm.rollout_correction.bypass_mode and (mode == "R2" or (coefficient and mode != "R3")):
        key, value = (_REPLAY, mode) if mode == "R2" else (f"{ACTOR}.router_aux_loss_coef", f"{coefficient:g}")
        reason = f"{value} uses the experts of the old log-prob pass, which {_BYPASS}=true skips"
        yield Conflict(key, reason, f"set {_REPLAY}=R3, or {_BYPASS}=false")


def _check_ulysses(config: Config | SftConfig, ranks: int) -> Iterator[Conflict]:
    model = list_trained_models(config)[0]
    if get_train_engine(model.settings.strategy).sequence_size != "ulysses_sequence_parallel_size":
        return
    size, key = count_sequence_ranks(config), f"{model.key}.ulysses_sequence_parallel_size"
    if ranks % size:
        yield Conflict(key, f"{size} does not divide the {ranks} {_RANKS}", f"={_nearest_divisor(ranks, size)}")
    if isinstance(config, SftConfig) or size == 1:
        return
    distillation = config.distillation
    if distillation.enable and distillation.mode == "loss" and distillation.teacher.use_own_chat_template:
        yield Conflict(
            key,
            f"{size} is not supported with distillation.mode=loss and distillation.teacher.use_own_chat_template=true: "
            "the ranks would have other tokens of the teacher than of the policy",
            "=1, or distillation.mode=reward",
        )


def _check_sharding(section: str, fsdp: FsdpConfig, ranks: int) -> Iterator[Conflict]:
    key, size = f"{section}.fsdp_size", fsdp.fsdp_size
    if size == 0 or ranks % size:
        reason = f"{size} does not divide the {ranks} {_RANKS}, and -1 means all of them"
        yield Conflict(key, reason, f"={_nearest_divisor(ranks, size)}")
    elif fsdp.stochastic_rounding and size not in (-1, ranks):
        rounding = f"{section}.stochastic_rounding"
        reason = f"with {rounding}=true: the copies of the model would be rounded differently"
        yield Conflict(key, f"{size} is not supported {reason}", f"=-1, or {rounding}=false")


def _check_experts(section: str, fsdp: FsdpConfig, optim: OptimConfig, ranks: int) -> Iterator[Conflict]:
    key, size = f"{section}.expert_parallel_size", fsdp.expert_parallel_size
    copy = ranks if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, ranks)
    if copy % size:
        reason = f"{size} does not divide the {copy} ranks that share one copy of the model"
        yield Conflict(key, reason, f"={_nearest_divisor(copy, size)}")
    elif size > 1 and (optim.name == "adamw_8bit" or fsdp.stochastic_rounding):
        yield Conflict(key, f"{size} is not supported with 8-bit moments or stochastic rounding", "=1")


def _check_warmup(section: str, optim: OptimConfig, steps: int | None) -> Iterator[Conflict]:
    """Check that the warm-up ends within the run, and before its last step if the learning rate decays after it."""
    warmup, ratio, schedule = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type
    if warmup is not None:
        longest = warmup if steps is None else steps - (schedule != "constant")
        if warmup > longest:
            yield Conflict(
                f"{section}.lr_warmup_steps",
                f"{warmup} must be at most {longest} with lr_scheduler_type={schedule}: the model is trained for "
                f"{steps} steps (trainer.total_training_steps)",
                f"={longest}",
            )
    elif schedule != "constant" and (ratio == 1 if steps is None else round(ratio * steps) >= steps):
        reason = f"{ratio} leaves no step for lr_scheduler_type={schedule}"
        yield Conflict(f"{section}.lr_warmup_steps_ratio", reason, "=0.1")


def _check_batch_sizes(config: Config, section: str, sizes: BatchSizes) -> Iterator[Conflict]:
    batch, n, ranks = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, count_data_ranks(config)
    longest, mini, tokens = get_max_sequence_tokens(config), sizes.mini_batch, sizes.micro_batch_tokens
    key = f"{section}.ppo_mini_batch_size"
    if get_value(config, key) is not None:  # null: the actor's, which is checked
        samples = min(mini, batch) * n
        if mini > batch:
            reason = f"{mini} prompts is more than data.train_batch_size={batch}, so each step is one mini-batch"
            yield Conflict(key, reason, f"={batch}")
        elif batch % mini:
            reason = f"the last mini-batch of a step has {batch % mini} prompts"
            yield Conflict(key, f"{mini} does not divide data.train_batch_size={batch}: {reason}")
        if samples < ranks:
            yield Conflict(key, f"a mini-batch of {samples} samples leaves some of the {ranks} train ranks idle")
    key = f"{section}.ppo_max_token_len_per_gpu"
    if get_value(config, key) is not None and tokens is not None and tokens < longest:
        reason = f"{tokens} is less than the longest sequence ({longest} tokens), which will exceed it"
        yield Conflict(key, reason, f"={-(-longest // count_sequence_ranks(config))}")


def _check_learning_rates(config: Config | SftConfig) -> Iterator[Conflict]:
    for _, _, key, optim in list_trained_models(config):
        if optim.lr >= _LARGE_LR:
            reason = f"{optim.lr:g} is far above usual learning rates (1e-7 to 1e-3, with Muon 2e-2)"
            yield Conflict(f"{key}.lr", f"{reason} and will destroy the model", "=1e-6, for example")


def _check_master_weights(config: Config | SftConfig) -> Iterator[Conflict]:
    """Check that weights can hold small updates."""
    for key, model, _, optim in list_trained_models(config):
        fsdp, section = model.fsdp_config, f"{key}.fsdp_config"
        if fsdp.model_dtype == "bfloat16" and not fsdp.stochastic_rounding and optim.lr < 1e-4:
            reason = f"a bfloat16 weight drops updates below 1/512 of its size: nearly all of them with lr={optim.lr:g}"
            yield Conflict(f"{section}.model_dtype", reason, f"=float32, or {section}.stochastic_rounding=true")


def _nearest_divisor(ranks: int, size: int) -> int:
    """Return the largest divisor of `ranks` that is at most `size`.

    >>> _nearest_divisor(8, 5)
    4
    """
    return max(divisor for divisor in range(1, max(1, min(size, ranks)) + 1) if ranks % divisor == 0)
