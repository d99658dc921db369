"""Checks of settings against each other: conflicts, which are errors, and hints about probable mistakes.

A conflict names in full each setting whose default could cause it: if one of these is itself invalid and was replaced
by its default, the conflict is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from verl.config import algorithm_validation, device_validation
from verl.config.accelerator_validation import find_accelerator_conflicts
from verl.config.batch_sizes import (
    BatchSizes,
    count_data_ranks,
    count_engine_devices,
    count_policy_steps,
    count_rollout_devices,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
    get_ulysses_size,
)
from verl.config.features import (
    get_checkpoint_settings,
    get_quantization,
    list_adapters,
    list_optimizers,
    may_score_code,
    saves_hf,
    uses_critic,
)
from verl.config.ignored import find_ignored_settings, find_unmet_condition
from verl.config.parallelism import find_parallel_conflicts
from verl.config.paths import get_value, is_overridden
from verl.config.profile_validation import find_profile_conflicts
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import Config, SftConfig
from verl.config.schema.actor import FsdpConfig, OptimConfig
from verl.config.schema.rules import ACTOR, ROLLOUT

_VAL = f"{ROLLOUT}.val_kwargs"


# --- conflicts


def find_generation_conflicts(config: Config) -> Iterator[str]:
    """Yield conflicts that matter whenever responses are generated or scored, with or without training."""
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"{ROLLOUT}.max_model_len: {rollout.max_model_len} must be at least data.max_prompt_length + "
            f"data.max_response_length = {longest}; set {ROLLOUT}.max_model_len={longest}"
        )
    if (rollout.max_num_batched_tokens or inf) < (rollout.max_num_seqs or 1):
        yield (
            f"{ROLLOUT}.max_num_batched_tokens: {rollout.max_num_batched_tokens} must be at least max_num_seqs "
            f"({rollout.max_num_seqs}), one token each; set {ROLLOUT}.max_num_seqs={rollout.max_num_batched_tokens}"
        )
    devices = count_rollout_devices(config)
    most = max(1, devices // count_engine_devices(config))
    if rollout.num_engines is not None and config.trainer.device == "cuda" and rollout.num_engines > most:
        yield (
            f"{ROLLOUT}.num_engines: {rollout.num_engines} must not exceed the {devices} devices of the engines "
            f"(nnodes x n_gpus_per_node), {count_engine_devices(config)} for each; set "
            f"{ROLLOUT}.num_engines={most}"
        )
    seconds, deadline = config.reward.sandbox.seconds, config.reward.deadline_s
    if is_overridden(config, "reward.sandbox.seconds") and seconds >= deadline and may_score_code(config):
        yield (
            f"reward.sandbox.seconds: {seconds:g} must be below reward.deadline_s={deadline:g}, the limit for scoring "
            f"a response with all its tests; set reward.deadline_s={max(60, 4 * seconds):g}"
        )
    yield from find_accelerator_conflicts(config)


def find_conflicts(config: Config) -> Iterator[str]:
    """Yield settings that cannot work together."""
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    yield from find_generation_conflicts(config)
    if rollout.temperature == 0:
        yield (
            f"{ROLLOUT}.temperature: 0 makes all responses to a prompt equal, so nothing can be learned; set "
            f"{ROLLOUT}.temperature=1.0"
        )
    if rollout.val_kwargs.do_sample is True and rollout.val_kwargs.temperature == 0:
        yield f"{_VAL}.temperature: 0 must be above 0 with do_sample=true; set {_VAL}.temperature=1.0"
    if reward_model.enable and reward_model.model_path is None:
        yield (
            "reward.reward_model.enable: true requires a model; set reward.reward_model.model_path=my-org/reward-model"
        )
    yield from _find_run_conflicts(config)
    yield from _check_order(config)
    yield from device_validation.find_conflicts(config)
    yield from _check_warmups(config)
    yield from _check_routing(config)
    yield from algorithm_validation.find_conflicts(config)


def _find_run_conflicts(config: Config | SftConfig) -> Iterator[str]:
    """Yield conflicts of the settings that every run has."""
    trainer = config.trainer
    yield from find_parallel_conflicts(config)
    yield from find_profile_conflicts(config)
    section, checkpoint = get_checkpoint_settings(config)
    if saves_hf(config) and "model" not in checkpoint.save_contents:
        yield (
            f"{section}.save_contents: trainer.save_hf and hf_model require the weights of the checkpoint; add model, "
            "or set trainer.save_hf=False and remove hf_model"
        )
    for section, optim, fsdp_section, fsdp in list_optimizers(config):
        if optim.name == "muon" and fsdp.stochastic_rounding:
            yield (
                f"{fsdp_section}.stochastic_rounding: is not supported with {section}.name=muon; set "
                f"{fsdp_section}.model_dtype=float32, or {section}.name=adamw"
            )
    for section, peft in list_adapters(config):
        if peft.peft_type == "lora" and peft.lora_rank == 0:
            yield f"{section}.lora_rank: 0 means no adapter, but peft_type=lora; set {section}.lora_rank=16"
        if peft.lora_rank > 0 and not peft.target_modules:
            yield f"{section}.target_modules: names no module for the adapter; set {section}.target_modules=all-linear"
    if trainer.test_freq > 0 and config.data.val_files is None:
        yield f"trainer.test_freq: {trainer.test_freq} requires validation data; set data.val_files=test.parquet"
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield (
            "trainer.resume_mode: path requires a checkpoint; set "
            f"trainer.resume_from_path={trainer.checkpoint_dir}/global_step_100"
        )


def _check_order(config: Config) -> Iterator[str]:
    """Check the order of the training prompts and the weights of their files."""
    data = config.data
    files = 1 if isinstance(data.train_files, str) else len(data.train_files)
    weights = data.train_weights
    if weights is not None and len(weights) != files:
        yield (
            f"data.train_weights: {len(weights)} weights for {files} entries of data.train_files; give one per entry; "
            f"set data.train_weights=[{','.join(['1'] * files)}]"
        )
    elif weights is not None and min(weights) <= 0:
        yield (
            f"data.train_weights: {min(weights):g} must be above 0; remove the file from data.train_files and set "
            f"data.train_weights=[{','.join(f'{weight:g}' for weight in weights if weight > 0)}]"
        )
    for name in ("train_weights", "curriculum_key"):
        if data.sampler is not None and getattr(data, name) is not None:
            yield (
                f"data.{name}: data.sampler={data.sampler} decides the order; set data.{name}=null, or "
                "data.sampler=null"
            )
    for name in ("sampler", "curriculum_key"):
        if data.streaming is True and getattr(data, name) is not None:
            yield (
                f"data.{name}: {getattr(data, name)} reads all rows before the first step, and data.streaming=true "
                "does not; set data.streaming=false"
            )


def _check_routing(config: Config) -> Iterator[str]:
    """Check that the experts to replay or to balance are known."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode, coefficient = actor.router_replay.mode, actor.router_aux_loss_coef
    if mode == "R3" and not get_rollout_engine(rollout.name).capabilities.returns_routed_experts:
        yield (
            f"{ACTOR}.router_replay.mode: R3 requires an engine that returns its experts, but {ROLLOUT}.name="
            f"{rollout.name} does not; set {ACTOR}.router_replay.mode=R2"
        )
    if config.algorithm.rollout_correction.bypass_mode and mode != "R3":
        setting = (
            f"{ACTOR}.router_replay.mode: R2" if mode == "R2" else f"{ACTOR}.router_aux_loss_coef: {coefficient:g}"
        )
        if mode == "R2" or coefficient:
            yield (
                f"{setting} uses the experts of the old log-prob pass, which "
                "algorithm.rollout_correction.bypass_mode=true skips; set "
                f"{ACTOR}.router_replay.mode=R3, or algorithm.rollout_correction.bypass_mode=false"
            )


def _check_warmups(config: Config) -> Iterator[str]:
    steps = config.trainer.total_training_steps
    policy_steps = None if steps is None else count_policy_steps(config, steps)
    if policy_steps != 0:  # 0: trainer.critic_warmup is too long, which is reported by itself
        yield from _check_warmup(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, policy_steps)
    if uses_critic(config):
        yield from _check_warmup("critic.optim", config.critic.optim, steps)


def _check_warmup(section: str, optim: OptimConfig, steps: int | None) -> Iterator[str]:
    """Check that the warm-up ends within the run, and before its last step if the learning rate decays after it."""
    warmup, ratio, schedule = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type
    if warmup is not None:
        longest = warmup if steps is None else steps - (schedule != "constant")
        if warmup > longest:
            yield (
                f"{section}.lr_warmup_steps: {warmup} must be at most {longest} with lr_scheduler_type={schedule}: the "
                f"model is trained for {steps} steps (trainer.total_training_steps); set "
                f"{section}.lr_warmup_steps={longest}"
            )
    elif schedule != "constant" and (ratio == 1 if steps is None else round(ratio * steps) >= steps):
        yield (
            f"{section}.lr_warmup_steps_ratio: {ratio} leaves no step for lr_scheduler_type={schedule}; set "
            f"{section}.lr_warmup_steps_ratio=0.1"
        )


# --- hints


def find_generation_hints(config: Config) -> Iterator[str]:
    """Yield probable mistakes of a run that only generates responses."""
    rollout = config.actor_rollout_ref.rollout
    yield from _check_temperature(config)
    if rollout.temperature == 0 and rollout.n > 1:
        yield (
            f"{ROLLOUT}.n: {rollout.n} greedy responses to a prompt are all equal; set {ROLLOUT}.n=1, or "
            f"{ROLLOUT}.temperature=1.0"
        )


def find_hints(config: Config) -> Iterator[str]:
    """Yield settings that work but are probably a mistake, and settings without effect."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield from _check_temperature(config)
    val = rollout.val_kwargs
    if val.n > 1 and (val.temperature == 0 or val.do_sample is False):
        yield f"{_VAL}.n: {val.n} greedy responses are all equal; set {_VAL}.temperature=1.0 or {_VAL}.n=1"
    if data.streaming and not data.filter_overlong_prompts and data.truncation == "error":
        yield (
            "data.streaming: a prompt longer than data.max_prompt_length stops the run when it is read; set "
            "data.filter_overlong_prompts=true to leave out such prompts"
        )
    yield from _check_batch_sizes(config, ACTOR, get_actor_batch_sizes(config))
    if uses_critic(config):
        yield from _check_batch_sizes(config, "critic", get_critic_batch_sizes(config))
    low, high = actor.clip_range
    if low > high and find_unmet_condition(config, f"{ACTOR}.clip_ratio_low") is None:
        yield f"{ACTOR}.clip_ratio_low: {low} is above clip_ratio_high={high}; usually the upper range is wider"
    is_truncated = get_rollout_engine(rollout.name).capabilities.has_truncated_logprobs
    for name, cut, full in (("top_p", rollout.top_p < 1, "1.0"), ("top_k", rollout.top_k > 0, "-1")):
        if cut and is_truncated:
            yield (
                f"{ROLLOUT}.{name}: with {getattr(rollout, name)} the engine's log-probs are those of the truncated "
                "distribution and the trainer's those of the full one, so training/rollout_probs_diff_mean is large "
                f"by construction; to compare them, set {ROLLOUT}.{name}={full}"
            )
    correction = config.algorithm.rollout_correction
    if get_quantization(config) and not (correction.rollout_is or correction.rollout_rs or correction.bypass_mode):
        key = "quantization" if rollout.quantization else "dtype"
        yield (
            f"{ROLLOUT}.{key}: quantized engines and the trainer compute different probabilities, which biases the "
            "update; set algorithm.rollout_correction.preset=tis"
        )
    yield from _check_master_weights(f"{ACTOR}.fsdp_config", actor.fsdp_config, actor.optim.lr)
    if uses_critic(config):
        yield from _check_master_weights("critic.fsdp_config", config.critic.fsdp_config, config.critic.optim.lr)
    if config.reward.reward_manager.name == "dapo":
        yield (
            "reward.reward_manager.name: dapo scores exactly as naive does; set reward.overlong_buffer.enable=true "
            "for overlong reward shaping and algorithm.filter_groups.enable=true for dynamic sampling"
        )
    yield from algorithm_validation.find_hints(config)
    yield from find_ignored_settings(config)


def _check_temperature(config: Config) -> Iterator[str]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature > 1.5:
        yield f"{ROLLOUT}.temperature: {temperature} is mostly noise above 1.5; set {ROLLOUT}.temperature=1.0"


def _check_master_weights(section: str, fsdp: FsdpConfig, lr: float) -> Iterator[str]:
    """Check that weights can hold small updates."""
    if fsdp.model_dtype == "bfloat16" and not fsdp.stochastic_rounding and lr < 1e-4:
        yield (
            f"{section}.model_dtype: a bfloat16 weight drops updates below 1/512 of its size, so with lr={lr:g} "
            f"almost none of them moves; set {section}.model_dtype=float32, or {section}.stochastic_rounding=true"
        )


def _check_batch_sizes(config: Config, section: str, sizes: BatchSizes) -> Iterator[str]:
    """Check mini-batches and micro-batches against the batch, the ranks and the longest sequence."""
    batch, n, ranks = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, count_data_ranks(config)
    longest, mini, tokens = get_max_sequence_tokens(config), sizes.mini_batch, sizes.micro_batch_tokens
    mini_key, tokens_key = f"{section}.ppo_mini_batch_size", f"{section}.ppo_max_token_len_per_gpu"
    if get_value(config, mini_key) is not None:  # null: the actor's, which is checked
        if mini > batch:
            yield (
                f"{mini_key}: {mini} prompts is more than data.train_batch_size={batch}, so each step is one "
                f"mini-batch; set {mini_key}={batch}"
            )
        elif batch % mini:
            yield (
                f"{mini_key}: {mini} does not divide data.train_batch_size={batch}: the last mini-batch of a step has "
                f"{batch % mini} prompts"
            )
        if min(mini, batch) * n < ranks:
            yield (
                f"{mini_key}: a mini-batch of {min(mini, batch) * n} samples leaves some of the {ranks} train ranks "
                "idle"
            )
    if get_value(config, tokens_key) is not None and tokens is not None and tokens < longest:
        yield (
            f"{tokens_key}: {tokens} is less than the longest sequence ({longest} tokens), which will exceed it; set "
            f"{tokens_key}={-(-longest // get_ulysses_size(config))}"
        )


# --- supervised training


def find_sft_conflicts(config: SftConfig) -> Iterator[str]:
    """Yield settings of supervised training that cannot work together."""
    yield from _find_run_conflicts(config)
    yield from _check_warmup("optim", config.optim, config.trainer.total_training_steps)


def find_sft_hints(config: SftConfig) -> Iterator[str]:
    """Yield settings of supervised training that work but are probably a mistake, and settings without effect."""
    data, ranks = config.data, count_data_ranks(config)
    if data.train_batch_size < ranks:
        yield (
            f"data.train_batch_size: {data.train_batch_size} examples leave some of the {ranks} train ranks idle; set "
            f"data.train_batch_size={ranks} or more"
        )
    share = -(-data.max_length // get_ulysses_size(config))
    if data.packing and data.max_token_len_per_gpu < share:
        yield (
            f"data.max_token_len_per_gpu: {data.max_token_len_per_gpu} is less than data.max_length={data.max_length}, "
            f"so longer examples will exceed it; set data.max_token_len_per_gpu={share}"
        )
    yield from _check_master_weights("model.fsdp_config", config.model.fsdp_config, config.optim.lr)
    yield from find_ignored_settings(config)
