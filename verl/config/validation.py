"""Checks of settings against each other: conflicts, which are errors, and hints about probable mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import algorithm_validation
from verl.config.batch_sizes import (
    BatchSizes,
    count_critic_optimizer_steps,
    count_optimizer_steps,
    count_policy_steps,
    count_train_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
)
from verl.config.engine_arguments import check_engine_arguments
from verl.config.features import (
    VLLM_LORA_RANKS,
    get_checkpoint_settings,
    list_adapters,
    may_score_code,
    saves_hf,
    uses_critic,
)
from verl.config.ignored import find_ignored_settings, find_unmet_condition
from verl.config.problems import ACTOR, ROLLOUT, ConfigProblem, get_value, is_overridden
from verl.config.schema import Config, SftConfig
from verl.config.schema.actor import OptimConfig

_VAL = f"{ROLLOUT}.val_kwargs"
_STEP_SIZES = (
    *(f"{section}.{name}" for section in (ACTOR, "critic") for name in ("ppo_mini_batch_size", "ppo_epochs")),
    *("data.train_batch_size", "trainer.critic_warmup", "algorithm.adv_estimator"),
)
"""The settings that determine the number of optimizer steps per step."""


# --- conflicts


def find_generation_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """Yield conflicts that matter whenever responses are generated or scored, with or without training."""
    rollout, ranks = config.actor_rollout_ref.rollout, count_train_ranks(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield ConfigProblem.at(
            f"{ROLLOUT}.max_model_len",
            f"{rollout.max_model_len} must be at least data.max_prompt_length + data.max_response_length = {longest}; "
            f"set {ROLLOUT}.max_model_len={longest}",
            *("data.max_prompt_length", "data.max_response_length"),
        )
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield ConfigProblem.at(
            f"{ROLLOUT}.max_num_batched_tokens",
            f"{rollout.max_num_batched_tokens} must be at least max_num_seqs ({rollout.max_num_seqs}), one token each; "
            f"set {ROLLOUT}.max_num_seqs={rollout.max_num_batched_tokens}",
            f"{ROLLOUT}.max_num_seqs",
        )
    if rollout.num_engines is not None and config.trainer.device == "cuda" and rollout.num_engines > ranks:
        yield ConfigProblem.at(
            f"{ROLLOUT}.num_engines",
            f"{rollout.num_engines} must not exceed the {ranks} devices of the run (trainer.nnodes x "
            f"trainer.n_gpus_per_node); set {ROLLOUT}.num_engines={ranks}",
            *("trainer.n_gpus_per_node", "trainer.nnodes"),
        )
    seconds, deadline = config.reward.sandbox.seconds, config.reward.deadline_s
    if is_overridden(config, "reward.sandbox.seconds") and seconds >= deadline and may_score_code(config):
        yield ConfigProblem.at(
            "reward.sandbox.seconds",
            f"{seconds:g} must be below reward.deadline_s={deadline:g}, the limit for scoring a response with all its "
            f"tests; set reward.deadline_s={max(60, 4 * seconds):g}",
            "reward.deadline_s",
        )
    yield from check_engine_arguments(config)


def find_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """Yield settings that cannot work together."""
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    yield from find_generation_conflicts(config)
    if rollout.temperature == 0:
        yield ConfigProblem.at(
            f"{ROLLOUT}.temperature",
            f"0 makes all responses to a prompt equal, so nothing can be learned; set {ROLLOUT}.temperature=1.0",
        )
    if rollout.val_kwargs.do_sample is True and rollout.val_kwargs.temperature == 0:
        yield ConfigProblem.at(
            f"{_VAL}.temperature",
            f"0 must be above 0 with do_sample=true; set {_VAL}.temperature=1.0",
            f"{_VAL}.do_sample",
        )
    if reward_model.enable and reward_model.model_path is None:
        yield ConfigProblem.at(
            "reward.reward_model.enable",
            "true requires a model; set reward.reward_model.model_path=my-org/reward-model",
            "reward.reward_model.model_path",
        )
    yield from find_run_conflicts(config)
    yield from _check_order(config)
    yield from _check_transports(config)
    yield from _check_warmups(config)
    yield from algorithm_validation.find_conflicts(config)


def find_run_conflicts(config: Config | SftConfig) -> Iterator[ConfigProblem]:
    """Yield conflicts of the settings that every run has."""
    trainer = config.trainer
    section, checkpoint = get_checkpoint_settings(config)
    if saves_hf(config) and "model" not in checkpoint.save_contents:
        yield ConfigProblem.at(
            f"{section}.save_contents",
            "trainer.save_hf and hf_model require the weights of the checkpoint; add model, or set "
            "trainer.save_hf=False and remove hf_model",
            "trainer.save_hf",
        )
    for section, peft in list_adapters(config):
        if peft.peft_type == "lora" and peft.lora_rank == 0:
            yield ConfigProblem.at(
                f"{section}.lora_rank",
                f"0 means no adapter, but peft_type=lora; set {section}.lora_rank=16",
                f"{section}.peft_type",
            )
        if peft.lora_rank > 0 and not peft.target_modules:
            yield ConfigProblem.at(
                f"{section}.target_modules",
                f"names no module for the adapter; set {section}.target_modules=all-linear",
                f"{section}.lora_rank",
            )
    if trainer.test_freq > 0 and config.data.val_files is None:
        yield ConfigProblem.at(
            "trainer.test_freq",
            f"{trainer.test_freq} requires validation data; set data.val_files=test.parquet",
            "data.val_files",
        )
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield ConfigProblem.at(
            "trainer.resume_mode",
            f"path requires a checkpoint; set trainer.resume_from_path={trainer.checkpoint_dir}/global_step_100",
            "trainer.resume_from_path",
        )


def _check_order(config: Config) -> Iterator[ConfigProblem]:
    """Check the order of the training prompts and the weights of their files."""
    data = config.data
    files = 1 if isinstance(data.train_files, str) else len(data.train_files)
    weights = data.train_weights
    if weights is not None and len(weights) != files:
        yield ConfigProblem.at(
            "data.train_weights",
            f"{len(weights)} weights for {files} entries of data.train_files; give one per entry; set "
            f"data.train_weights=[{','.join(['1'] * files)}]",
            "data.train_files",
        )
    elif weights is not None and min(weights) <= 0:
        yield ConfigProblem.at(
            "data.train_weights",
            f"{min(weights):g} must be above 0; remove the file from data.train_files and set "
            f"data.train_weights=[{','.join(f'{weight:g}' for weight in weights if weight > 0)}]",
        )
    for name in ("train_weights", "curriculum_key"):
        if data.sampler is not None and getattr(data, name) is not None:
            yield ConfigProblem.at(
                f"data.{name}",
                f"data.sampler={data.sampler} decides the order; set data.{name}=null, or data.sampler=null",
                "data.sampler",
            )
    for name in ("sampler", "curriculum_key"):
        if data.streaming is True and getattr(data, name) is not None:
            yield ConfigProblem.at(
                f"data.{name}",
                f"{getattr(data, name)} reads all rows before the first step, and data.streaming=true does not; set "
                "data.streaming=false",
                "data.streaming",
            )


def _check_transports(config: Config) -> Iterator[ConfigProblem]:
    """Check that weights and adapters can reach the engines."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    transport, max_rank = rollout.weight_transport, VLLM_LORA_RANKS[-1]
    is_direct = transport in ("nccl", "ipc")
    if is_direct and (config.trainer.device == "cpu" or rollout.name == "hf"):
        reason, key = f"rollout.name=vllm, but rollout.name={rollout.name}", f"{ROLLOUT}.name"
        if config.trainer.device == "cpu":
            reason, key = "accelerators, but trainer.device=cpu", "trainer.device"
        yield ConfigProblem.at(
            f"{ROLLOUT}.weight_transport", f"{transport} requires {reason}; set {ROLLOUT}.weight_transport=host", key
        )
    if rank == 0 or rollout.lora_transport != "adapter":
        return
    for key, is_unfit, reason in (
        (f"{ROLLOUT}.name", rollout.name == "hf", "rollout.name=hf loads full models"),
        (f"{ROLLOUT}.weight_transport", is_direct, f"weight_transport={transport} sends full models"),
        (f"{ACTOR}.peft.lora_rank", rank > max_rank, f"vLLM supports ranks up to {max_rank}"),
    ):
        if is_unfit:
            yield ConfigProblem.at(
                f"{ROLLOUT}.lora_transport",
                f"adapter is not supported: {reason}; set {ROLLOUT}.lora_transport=merged",
                key,
            )


def _check_warmups(config: Config) -> Iterator[ConfigProblem]:
    steps = config.trainer.total_training_steps
    updates = None if steps is None else count_optimizer_steps(config, count_policy_steps(config, steps))
    if updates != 0:  # 0: trainer.critic_warmup is too long, which is reported by itself
        yield from check_warmup(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, steps, updates, _STEP_SIZES)
    if uses_critic(config):
        updates = None if steps is None else count_critic_optimizer_steps(config, steps)
        yield from check_warmup("critic.optim", config.critic.optim, steps, updates, _STEP_SIZES)


def check_warmup(
    section: str, optim: OptimConfig, steps: int | None, updates: int | None, sizes: tuple[str, ...] = ()
) -> Iterator[ConfigProblem]:
    """Check that the warm-up ends within the run, and before its last step if the learning rate decays after it.

    Args:
        section: The key of the optimizer's settings.
        optim: Those settings.
        steps: Steps of the run, if known.
        updates: Optimizer steps of the run, if known.
        sizes: The settings that determine `updates`.
    """
    warmup, ratio, schedule = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type
    depends_on = (f"{section}.lr_scheduler_type", "trainer.total_training_steps", *sizes)
    if warmup is not None:
        longest = warmup if updates is None else updates - (schedule != "constant")
        if warmup > longest:
            yield ConfigProblem.at(
                f"{section}.lr_warmup_steps",
                f"{warmup} must be at most {longest} with lr_scheduler_type={schedule}: "
                f"trainer.total_training_steps={steps} means {updates} optimizer steps; "
                f"set {section}.lr_warmup_steps={longest}",
                *depends_on,
            )
    elif schedule != "constant" and (ratio == 1 if updates is None else round(ratio * updates) >= updates):
        yield ConfigProblem.at(
            f"{section}.lr_warmup_steps_ratio",
            f"{ratio} leaves no optimizer step for lr_scheduler_type={schedule}; "
            f"set {section}.lr_warmup_steps_ratio=0.1",
            *depends_on,
        )


# --- hints


def find_generation_hints(config: Config) -> Iterator[ConfigProblem]:
    """Yield probable mistakes of a run that only generates responses."""
    rollout = config.actor_rollout_ref.rollout
    yield from _check_temperature(config)
    if rollout.temperature == 0 and rollout.n > 1:
        yield ConfigProblem.at(
            f"{ROLLOUT}.n",
            f"{rollout.n} greedy responses to a prompt are all equal; set {ROLLOUT}.n=1, or {ROLLOUT}.temperature=1.0",
            f"{ROLLOUT}.temperature",
        )


def find_hints(config: Config) -> Iterator[ConfigProblem]:
    """Yield settings that work but are probably a mistake, and settings without effect."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield from _check_temperature(config)
    val = rollout.val_kwargs
    if val.n > 1 and (val.temperature == 0 or val.do_sample is False):
        yield ConfigProblem.at(
            f"{_VAL}.n",
            f"{val.n} greedy responses are all equal; set {_VAL}.temperature=1.0 or {_VAL}.n=1",
            *(f"{_VAL}.temperature", f"{_VAL}.do_sample"),
        )
    if data.streaming and not data.filter_overlong_prompts and data.truncation == "error":
        yield ConfigProblem.at(
            "data.streaming",
            "a prompt longer than data.max_prompt_length stops the run when it is read; set "
            "data.filter_overlong_prompts=true to leave out such prompts",
            *("data.filter_overlong_prompts", "data.truncation"),
        )
    yield from _check_batch_sizes(config, ACTOR, get_actor_batch_sizes(config))
    if uses_critic(config):
        yield from _check_batch_sizes(config, "critic", get_critic_batch_sizes(config))
    low, high = actor.clip_range
    if low > high and find_unmet_condition(config, f"{ACTOR}.clip_ratio_low") is None:
        yield ConfigProblem.at(
            f"{ACTOR}.clip_ratio_low",
            f"{low} is above clip_ratio_high={high}; usually the upper range is wider",
            *(f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_high"),
        )
    for name, cut, full in (("top_p", rollout.top_p < 1, "1.0"), ("top_k", rollout.top_k > 0, "-1")):
        if cut:
            yield ConfigProblem.at(
                f"{ROLLOUT}.{name}",
                f"with {getattr(rollout, name)} the engine's log-probs are those of the truncated distribution and the "
                "trainer's those of the full one, so training/rollout_probs_diff_mean is large by construction; to "
                f"compare them, set {ROLLOUT}.{name}={full}",
            )
    if config.reward.reward_manager.name == "dapo":
        yield ConfigProblem.at(
            "reward.reward_manager.name",
            "dapo scores exactly as naive does; set reward.overlong_buffer.enable=true for overlong reward shaping and "
            "algorithm.filter_groups.enable=true for dynamic sampling",
        )
    yield from algorithm_validation.find_hints(config)
    yield from find_ignored_settings(config)


def _check_temperature(config: Config) -> Iterator[ConfigProblem]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature > 1.5:
        yield ConfigProblem.at(
            f"{ROLLOUT}.temperature", f"{temperature} is mostly noise above 1.5; set {ROLLOUT}.temperature=1.0"
        )


def _check_batch_sizes(config: Config, section: str, sizes: BatchSizes) -> Iterator[ConfigProblem]:
    """Check mini-batches and micro-batches against the batch, the ranks and the longest sequence."""
    batch, n, ranks = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, count_train_ranks(config)
    longest, mini, tokens = get_max_sequence_tokens(config), sizes.mini_batch, sizes.micro_batch_tokens
    mini_key, tokens_key = f"{section}.ppo_mini_batch_size", f"{section}.ppo_max_token_len_per_gpu"
    if get_value(config, mini_key) is not None:  # null: the actor's, which is checked
        if mini > batch:
            yield ConfigProblem.at(
                mini_key,
                f"{mini} prompts is more than data.train_batch_size={batch}, so each step is one mini-batch; "
                f"set {mini_key}={batch}",
                "data.train_batch_size",
            )
        elif batch % mini:
            yield ConfigProblem.at(
                mini_key,
                f"{mini} does not divide data.train_batch_size={batch}: the last mini-batch of a step has "
                f"{batch % mini} prompts",
                "data.train_batch_size",
            )
        if min(mini, batch) * n < ranks:
            yield ConfigProblem.at(
                mini_key,
                f"a mini-batch of {min(mini, batch) * n} samples leaves some of the {ranks} train ranks idle",
                *(f"{ROLLOUT}.n", "data.train_batch_size", "trainer.n_gpus_per_node"),
            )
    if get_value(config, tokens_key) is not None and tokens is not None and tokens < longest:
        yield ConfigProblem.at(
            tokens_key,
            f"{tokens} is less than the longest sequence ({longest} tokens), which will exceed it; "
            f"set {tokens_key}={longest}",
            *("data.max_prompt_length", "data.max_response_length"),
        )
