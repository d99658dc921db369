"""Settings without effect: of optimisers, sharding, adapters and micro-batches, and of what every run has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config.batch_sizes import get_critic_batch_sizes
from verl.config.features import uses_policy_as_reference
from verl.config.ignored.rule import IgnoredRule
from verl.config.problems import ACTOR, REF, ROLLOUT, prefix_keys
from verl.config.schema.actor import FsdpConfig, OptimConfig, PeftConfig

__all__ = ["OF_ANY_RUN", "TRAINING", "of_schedule", "of_sharding", "without_adapter"]


def of_schedule(section: str, optim: Callable[[Any], OptimConfig]) -> tuple[IgnoredRule, IgnoredRule]:
    """Of the optimiser whose settings stand in `section`."""
    return (
        IgnoredRule(
            (f"{section}.lr_warmup_steps_ratio",),
            lambda c: optim(c).lr_warmup_steps is not None,
            f"{section}.lr_warmup_steps is given",
            (f"{section}.lr_warmup_steps",),
        ),
        IgnoredRule(
            (f"{section}.min_lr_ratio",),
            lambda c: optim(c).lr_scheduler_type == "constant",
            f"{section}.lr_scheduler_type=constant",
            (f"{section}.lr_scheduler_type",),
        ),
    )


OF_ANY_RUN = (
    IgnoredRule(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps is given",
        ("trainer.total_training_steps",),
    ),
    IgnoredRule(
        ("trainer.max_ckpts_to_keep", "trainer.save_hf"),
        lambda c: c.trainer.save_freq == -1,
        "trainer.save_freq=-1 saves none",
        ("trainer.save_freq",),
    ),
    IgnoredRule(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "path",
        "trainer.resume_mode is not path",
        ("trainer.resume_mode",),
    ),
    IgnoredRule(
        ("trainer.wandb_proxy",),
        lambda c: "wandb" not in c.trainer.logger,
        "trainer.logger does not name wandb",
        ("trainer.logger",),
    ),
)
"""Whatever the run trains by."""


def of_sharding(section: str, fsdp: Callable[[Any], FsdpConfig]) -> tuple[IgnoredRule, IgnoredRule]:
    """Of a section with sharded training: what is offloaded twice, or from host memory to host memory."""
    return (
        IgnoredRule(
            prefix_keys(section, "param_offload", "optimizer_offload", "offload_policy"),
            lambda c: c.trainer.device == "cpu",
            _NO_DEVICE,
            ("trainer.device",),
        ),
        IgnoredRule(
            prefix_keys(section, "param_offload", "optimizer_offload"),
            lambda c: fsdp(c).offload_policy,
            f"{section}.offload_policy=true keeps weights, gradients and moments in host memory as it is",
            (f"{section}.offload_policy",),
        ),
    )


_NO_DEVICE = "on a CPU (trainer.device) all is in host memory"


def without_adapter(section: str, peft: Callable[[Any], PeftConfig], *more: str) -> IgnoredRule:
    """Of a section with an adapter: what says more of one that there is not."""
    return IgnoredRule(
        (*prefix_keys(section, "lora_alpha", "target_modules"), *more),
        lambda c: peft(c).lora_rank == 0,
        f"{section}.lora_rank=0 is no adapter",
        (f"{section}.lora_rank",),
    )


_DYNAMIC = (f"{ACTOR}.use_dynamic_bsz", "critic.use_dynamic_bsz")

TRAINING = (
    IgnoredRule(
        (f"{REF}.fsdp_config.param_offload",),
        lambda c: uses_policy_as_reference(c) and not c.reward.prime.enable,
        f"with an adapter the reference is the policy itself, and {ACTOR}.fsdp_config.param_offload counts",
        (f"{ACTOR}.peft.lora_rank", "trainer.ref_update_freq"),
    ),
    IgnoredRule(
        (f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
        lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=false",
        (f"{ACTOR}.use_dynamic_bsz",),
    ),
    IgnoredRule(
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=true counts tokens",
        (f"{ACTOR}.use_dynamic_bsz",),
    ),
    IgnoredRule(
        ("critic.ppo_max_token_len_per_gpu",),
        lambda c: get_critic_batch_sizes(c).micro_batch_tokens is None,
        "the critic's use_dynamic_bsz is false",
        _DYNAMIC,
    ),
    IgnoredRule(
        ("critic.ppo_micro_batch_size_per_gpu",),
        lambda c: get_critic_batch_sizes(c).micro_batch_samples is None,
        "the critic's use_dynamic_bsz is true, and counts tokens",
        _DYNAMIC,
    ),
    *of_schedule(f"{ACTOR}.optim", lambda c: c.actor_rollout_ref.actor.optim),
    *of_schedule("critic.optim", lambda c: c.critic.optim),
    *of_sharding(f"{ACTOR}.fsdp_config", lambda c: c.actor_rollout_ref.actor.fsdp_config),
    *of_sharding("critic.fsdp_config", lambda c: c.critic.fsdp_config),
    without_adapter(f"{ACTOR}.peft", lambda c: c.actor_rollout_ref.actor.peft, f"{ROLLOUT}.lora_transport"),
    without_adapter("critic.peft", lambda c: c.critic.peft),
    IgnoredRule(
        (f"{REF}.fsdp_config.param_offload",),
        lambda c: c.trainer.device == "cpu",
        _NO_DEVICE,
        ("trainer.device",),
    ),
    IgnoredRule(
        (f"{ACTOR}.checkpoint.load_contents", "critic.checkpoint.load_contents"),
        lambda c: c.trainer.resume_mode == "disable",
        "trainer.resume_mode=disable loads nothing",
        ("trainer.resume_mode",),
    ),
)
