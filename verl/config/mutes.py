"""Settings without effect: which do nothing beside which others, and why. None of them goes unsaid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.findings import ACTOR, REF, ROLLOUT, Finding, changed, keys_below, keys_of, value_of
from verl.config.keys import written
from verl.config.needs import (
    is_own_function,
    may_score_code,
    reference_is_policy,
    uses_critic,
    uses_preferences,
    uses_reference,
    uses_reward_function,
)
from verl.config.schema import Config, Section
from verl.config.schema.actor import FsdpConfig, OptimConfig, PeftConfig
from verl.config.sizes import critic_cut

__all__ = ["OF_ANY_RUN", "Mute", "mute_of", "of_schedule", "without_adapter", "without_effect"]


@dataclass(frozen=True, slots=True)
class Mute:
    """Settings that do nothing while `when` holds."""

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str
    rests_on: tuple[str, ...]


def without_effect(config: Section, mutes: Sequence[Mute] | None = None) -> Iterator[Finding]:
    """Every setting that was given and does nothing, with the first reason for it."""
    mutes = _MUTES if mutes is None else mutes
    for key in dict.fromkeys(key for mute in mutes for key in mute.keys):
        mute = mute_of(config, key, mutes) if changed(config, key) else None
        if mute is not None:
            value = written(value_of(config, key))
            yield Finding((key, *mute.rests_on), f"{key}={value} has no effect: {mute.why}")


def mute_of(config: Section, key: str, mutes: Sequence[Mute] | None = None) -> Mute | None:
    """Why the setting of that key does nothing in this run, whatever its value; None if it is in effect."""
    return next((mute for mute in (_MUTES if mutes is None else mutes) if key in mute.keys and mute.when(config)), None)


# --- the algorithm

_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
_CORRECTION = "algorithm.rollout_correction"


def _only(choice: str, *names: str, use: tuple[str, ...]) -> Mute:
    """Settings that only these estimators or losses use. One of the user's own may use any."""

    def others(config: Config) -> bool:
        chosen = str(value_of(config, choice))
        return chosen not in names and not is_own_function(chosen)

    return Mute(use, others, f"only {choice}={' or '.join(names)} uses it", (choice,))


def _aggregates_by_sequence_alone(config: Config) -> bool:
    """Losses that are means over sequences by definition, and no other term of the objective to aggregate."""
    actor = config.actor_rollout_ref.actor
    by_sequence = actor.policy_loss.loss_mode in ("gspo", "geo_mean", "dpo", "sppo")
    return by_sequence and not actor.use_kl_loss and actor.entropy_coeff == 0


_ALGORITHM = (
    Mute(
        (
            *keys_of("algorithm", "adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo"),
            *("trainer.critic_warmup", *keys_below("critic")),
        ),
        uses_preferences,
        f"{_LOSS}=dpo and sppo compare scores, without advantages",
        (_LOSS,),
    ),
    Mute(
        ("algorithm.gamma",),
        lambda c: (
            not c.reward.prime.enable
            and c.algorithm.adv_estimator not in ("gae", "reinforce_plus_plus")
            and not is_own_function(c.algorithm.adv_estimator)
        ),
        f"only {_ESTIMATOR}=gae or reinforce_plus_plus, and PRIME, use it",
        (_ESTIMATOR, "reward.prime.enable"),
    ),
    _only(_ESTIMATOR, "gae", use=("algorithm.lam",)),
    _only(_ESTIMATOR, "grpo", "grpo_vectorized", "grpo_passk", use=("algorithm.norm_adv_by_std_in_grpo",)),
    Mute(
        ("trainer.critic_warmup", *(key for key in keys_below("critic") if key != "critic.enable")),
        lambda c: not uses_critic(c),
        f"only {_ESTIMATOR}=gae trains a critic, or one of your own with critic.enable=true",
        (_ESTIMATOR, "critic.enable"),
    ),
    Mute(
        ("algorithm.kl_penalty", *keys_below("algorithm.kl_ctrl")),
        lambda c: not c.algorithm.use_kl_in_reward,
        f"algorithm.use_kl_in_reward=false; set it to true, or weigh the KL of the loss by {ACTOR}.kl_loss_coef",
        ("algorithm.use_kl_in_reward",),
    ),
    Mute(
        keys_of("algorithm.kl_ctrl", "horizon", "target_kl"),
        lambda c: c.algorithm.kl_ctrl.type != "adaptive",
        "algorithm.kl_ctrl.type=fixed does not steer",
        ("algorithm.kl_ctrl.type",),
    ),
    Mute(
        keys_of("algorithm.filter_groups", "metric", "max_num_gen_batches"),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=false",
        ("algorithm.filter_groups.enable",),
    ),
    Mute(
        keys_of(_CORRECTION, "rollout_is_threshold", "rollout_is_batch_normalize"),
        lambda c: c.algorithm.rollout_correction.rollout_is is None,
        f"{_CORRECTION}.rollout_is=null",
        (f"{_CORRECTION}.rollout_is",),
    ),
    Mute(
        keys_of(_CORRECTION, "rollout_rs_threshold", "rollout_rs_threshold_lower"),
        lambda c: c.algorithm.rollout_correction.rollout_rs is None,
        f"{_CORRECTION}.rollout_rs=null",
        (f"{_CORRECTION}.rollout_rs",),
    ),
    Mute(
        keys_of("reward.overlong_buffer", "len", "penalty_factor"),
        lambda c: not c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable=false",
        ("reward.overlong_buffer.enable",),
    ),
    Mute(
        tuple(key for key in keys_below("reward.prime") if key != "reward.prime.enable"),
        lambda c: not c.reward.prime.enable,
        "reward.prime.enable=false",
        ("reward.prime.enable",),
    ),
)

_POLICY_LOSS = (
    _only(
        _LOSS,
        *("vanilla", "gspo", "cispo", "geo_mean", "clip_cov"),
        use=keys_of(ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
    ),
    _only(_LOSS, "vanilla", "clip_cov", use=(f"{ACTOR}.clip_ratio_c",)),
    _only(_LOSS, "sapo", use=keys_of(f"{ACTOR}.policy_loss", "tau_pos", "tau_neg")),
    _only(_LOSS, "clip_cov", use=keys_of(f"{ACTOR}.policy_loss", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    _only(_LOSS, "kl_cov", use=keys_of(f"{ACTOR}.policy_loss", "kl_cov_ratio", "ppo_kl_coef")),
    _only(_LOSS, "dpo", use=(f"{ACTOR}.policy_loss.dpo_beta",)),
    _only(_LOSS, "sppo", use=(f"{ACTOR}.policy_loss.sppo_eta",)),
    Mute(
        keys_of(ACTOR, "loss_agg_mode", "loss_scale_factor"),
        _aggregates_by_sequence_alone,
        f"{_LOSS}=gspo, geo_mean, dpo and sppo are means over sequences by definition",
        (_LOSS, *keys_of(ACTOR, "use_kl_loss", "entropy_coeff")),
    ),
    Mute(
        keys_of(ACTOR, "loss_scale_factor"),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"only {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        (f"{ACTOR}.loss_agg_mode",),
    ),
    Mute(
        keys_of(ACTOR, "clip_ratio"),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both given",
        keys_of(ACTOR, "clip_ratio_low", "clip_ratio_high"),
    ),
    Mute(
        keys_of(ACTOR, "kl_loss_coef", "kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{ACTOR}.use_kl_loss=false",
        (f"{ACTOR}.use_kl_loss",),
    ),
    Mute(
        ("trainer.ref_update_freq", *keys_below(REF)),
        lambda c: not uses_reference(c),
        "there is no reference; use_kl_loss, use_kl_in_reward, loss_mode=dpo or sppo, or reward.prime would make one",
        (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", _LOSS, "reward.prime.enable"),
    ),
    Mute(
        keys_of(REF, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
        lambda c: True,
        f"the reference is cut as {ROLLOUT}.log_prob_micro_batch_size_per_gpu and log_prob_max_token_len_per_gpu say",
        (),
    ),
)


# --- training


def of_schedule(section: str, optim: Callable[[Any], OptimConfig]) -> tuple[Mute, Mute]:
    """Of the optimiser whose settings stand in `section`."""
    return (
        Mute(
            (f"{section}.lr_warmup_steps_ratio",),
            lambda c: optim(c).lr_warmup_steps is not None,
            f"{section}.lr_warmup_steps is given",
            (f"{section}.lr_warmup_steps",),
        ),
        Mute(
            (f"{section}.min_lr_ratio",),
            lambda c: optim(c).lr_scheduler_type == "constant",
            f"{section}.lr_scheduler_type=constant",
            (f"{section}.lr_scheduler_type",),
        ),
    )


OF_ANY_RUN = (
    Mute(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps is given",
        ("trainer.total_training_steps",),
    ),
    Mute(
        ("trainer.max_ckpts_to_keep", "trainer.save_hf"),
        lambda c: c.trainer.save_freq == -1,
        "trainer.save_freq=-1 saves none",
        ("trainer.save_freq",),
    ),
    Mute(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "path",
        "trainer.resume_mode is not path",
        ("trainer.resume_mode",),
    ),
    Mute(
        ("trainer.wandb_proxy",),
        lambda c: "wandb" not in c.trainer.logger,
        "trainer.logger does not name wandb",
        ("trainer.logger",),
    ),
)
"""Whatever the run trains by."""


def of_sharding(section: str, fsdp: Callable[[Any], FsdpConfig]) -> tuple[Mute, Mute]:
    """Of a section with sharded training: what is offloaded twice, or from host memory to host memory."""
    return (
        Mute(
            keys_of(section, "param_offload", "optimizer_offload", "offload_policy"),
            lambda c: c.trainer.device == "cpu",
            _NO_DEVICE,
            ("trainer.device",),
        ),
        Mute(
            keys_of(section, "param_offload", "optimizer_offload"),
            lambda c: fsdp(c).offload_policy,
            f"{section}.offload_policy=true keeps weights, gradients and moments in host memory as it is",
            (f"{section}.offload_policy",),
        ),
    )


_NO_DEVICE = "on a CPU (trainer.device) all is in host memory"


def without_adapter(section: str, peft: Callable[[Any], PeftConfig], *more: str) -> Mute:
    """Of a section with an adapter: what says more of one that there is not."""
    return Mute(
        (*keys_of(section, "lora_alpha", "target_modules"), *more),
        lambda c: peft(c).lora_rank == 0,
        f"{section}.lora_rank=0 is no adapter",
        (f"{section}.lora_rank",),
    )


_DYNAMIC = (f"{ACTOR}.use_dynamic_bsz", "critic.use_dynamic_bsz")

_TRAINING = (
    Mute(
        (f"{REF}.fsdp_config.param_offload",),
        lambda c: reference_is_policy(c) and not c.reward.prime.enable,
        f"with an adapter the reference is the policy itself, and {ACTOR}.fsdp_config.param_offload counts",
        (f"{ACTOR}.peft.lora_rank", "trainer.ref_update_freq"),
    ),
    Mute(
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=false",
        (f"{ACTOR}.use_dynamic_bsz",),
    ),
    Mute(
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=true counts tokens",
        (f"{ACTOR}.use_dynamic_bsz",),
    ),
    Mute(
        ("critic.ppo_max_token_len_per_gpu",),
        lambda c: critic_cut(c).micro_batch_tokens is None,
        "the critic's use_dynamic_bsz is false",
        _DYNAMIC,
    ),
    Mute(
        ("critic.ppo_micro_batch_size_per_gpu",),
        lambda c: critic_cut(c).micro_batch_samples is None,
        "the critic's use_dynamic_bsz is true, and counts tokens",
        _DYNAMIC,
    ),
    *of_schedule(f"{ACTOR}.optim", lambda c: c.actor_rollout_ref.actor.optim),
    *of_schedule("critic.optim", lambda c: c.critic.optim),
    *of_sharding(f"{ACTOR}.fsdp_config", lambda c: c.actor_rollout_ref.actor.fsdp_config),
    *of_sharding("critic.fsdp_config", lambda c: c.critic.fsdp_config),
    without_adapter(f"{ACTOR}.peft", lambda c: c.actor_rollout_ref.actor.peft, f"{ROLLOUT}.lora_transport"),
    without_adapter("critic.peft", lambda c: c.critic.peft),
    Mute(
        (f"{REF}.fsdp_config.param_offload",),
        lambda c: c.trainer.device == "cpu",
        _NO_DEVICE,
        ("trainer.device",),
    ),
    Mute(
        (f"{ACTOR}.checkpoint.load_contents", "critic.checkpoint.load_contents"),
        lambda c: c.trainer.resume_mode == "disable",
        "trainer.resume_mode=disable loads nothing",
        ("trainer.resume_mode",),
    ),
)


# --- generation and data

_ENGINE_ONLY = (
    "gpu_memory_utilization",
    "cpu_cache_gib",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "load_format",
    "engine_kwargs.vllm",
)

_GENERATION = (
    Mute(
        keys_of(ROLLOUT, *_ENGINE_ONLY),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        f"{ROLLOUT}.name=hf",
        (f"{ROLLOUT}.name",),
    ),
    Mute(
        keys_of(ROLLOUT, "val_kwargs.temperature", "val_kwargs.top_p", "val_kwargs.top_k"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample is False,
        f"{ROLLOUT}.val_kwargs.do_sample=false is greedy",
        (f"{ROLLOUT}.val_kwargs.do_sample",),
    ),
    Mute(
        keys_of(ROLLOUT, "val_kwargs.top_p", "val_kwargs.top_k"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.temperature == 0,
        f"{ROLLOUT}.val_kwargs.temperature=0 is greedy",
        (f"{ROLLOUT}.val_kwargs.temperature",),
    ),
    Mute(
        keys_of(ROLLOUT, "gpu_memory_utilization"),
        lambda c: c.trainer.device == "cpu",
        f"trainer.device=cpu; {ROLLOUT}.cpu_cache_gib is what counts",
        ("trainer.device",),
    ),
    Mute(
        keys_of(ROLLOUT, "cpu_cache_gib"),
        lambda c: c.trainer.device == "cuda",
        f"trainer.device=cuda; {ROLLOUT}.gpu_memory_utilization is what counts",
        ("trainer.device",),
    ),
)

_MODEL = "reward.reward_model"

_DATA = (
    Mute(
        tuple(key for key in keys_below(_MODEL) if key != f"{_MODEL}.enable"),
        lambda c: not c.reward.reward_model.enable,
        f"{_MODEL}.enable=false",
        (f"{_MODEL}.enable",),
    ),
    Mute(
        (f"{_MODEL}.weight",),
        lambda c: not uses_reward_function(c),
        "the reward model alone is the reward",
        ("reward.custom_reward_function.path", "reward.functions"),
    ),
    Mute(
        (f"{_MODEL}.rollout.gpu_memory_utilization",),
        lambda c: c.reward.reward_model.rollout.name == "hf",
        f"{_MODEL}.rollout.name=hf takes what it needs",
        (f"{_MODEL}.rollout.name",),
    ),
    Mute(
        (f"{_MODEL}.rollout.gpu_memory_utilization",),
        lambda c: c.trainer.device == "cpu",
        "trainer.device=cpu",
        ("trainer.device",),
    ),
    Mute(
        ("reward.memory_mb", "reward.num_workers", "reward.batch_size", "reward.reward_manager.name"),
        lambda c: not uses_reward_function(c),
        f"{_MODEL} alone scores, and no function",
        (f"{_MODEL}.enable", "reward.custom_reward_function.path", "reward.functions"),
    ),
    Mute(
        ("reward.num_workers",),
        lambda c: c.reward.reward_manager.name != "prime",
        "only reward.reward_manager.name=prime scores in several processes",
        ("reward.reward_manager.name",),
    ),
    Mute(
        ("reward.batch_size",),
        lambda c: c.reward.reward_manager.name != "batch",
        "only reward.reward_manager.name=batch takes several answers at once",
        ("reward.reward_manager.name",),
    ),
    Mute(
        keys_of("reward.custom_reward_function", "path", "name", "reward_kwargs"),
        lambda c: bool(c.reward.functions),
        "reward.functions is given, and holds all of them",
        ("reward.functions",),
    ),
    Mute(
        keys_of("reward.custom_reward_function", "name", "reward_kwargs"),
        lambda c: c.reward.custom_reward_function.path is None,
        "reward.custom_reward_function.path is not given",
        ("reward.custom_reward_function.path",),
    ),
    Mute(
        (*keys_below("reward.sandbox"), *keys_below("reward.code")),
        lambda c: not may_score_code(c),
        "only verl.rewards.code runs programs, and it scores nothing here",
        ("reward.custom_reward_function.path", "reward.functions"),
    ),
    Mute(
        keys_of("reward.sandbox", "processes", "require"),
        lambda c: c.reward.sandbox.url is not None,
        "reward.sandbox.url is given: how programs are walled in there is the service's affair",
        ("reward.sandbox.url",),
    ),
    Mute(
        keys_of("data", "val_batch_size", "val_max_samples"),
        lambda c: c.data.val_files is None,
        "data.val_files is not given",
        ("data.val_files",),
    ),
    Mute(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=true leaves nothing to cut",
        ("data.filter_overlong_prompts",),
    ),
    Mute(
        ("data.seed",),
        lambda c: not c.data.shuffle and c.data.sampler is None and c.data.train_weights is None,
        "data.shuffle=false",
        ("data.shuffle", "data.sampler", "data.train_weights"),
    ),
    Mute(
        ("data.shuffle",),
        lambda c: c.data.sampler is not None,
        "data.sampler is given, and has the last word on the order",
        ("data.sampler",),
    ),
    Mute(
        ("data.shuffle_buffer_size",),
        lambda c: c.data.streaming is False or not c.data.shuffle or bool(c.data.curriculum_key or c.data.sampler),
        "only a streamed data set (data.streaming=true) is shuffled by buffer, with data.shuffle=true",
        keys_of("data", "streaming", "shuffle", "curriculum_key", "sampler"),
    ),
    Mute(
        keys_of("data", "num_workers", "cache_dir"),
        lambda c: c.data.streaming is True and c.data.val_files is None,
        "data.streaming=true measures prompts when they are read",
        keys_of("data", "streaming", "val_files"),
    ),
)

_MUTES = (*_ALGORITHM, *_POLICY_LOSS, *_TRAINING, *OF_ANY_RUN, *_GENERATION, *_DATA)
