"""What a run needs beside the policy, as its algorithm says: the checks and the assembly of a run ask here."""

from __future__ import annotations

from verl.config.schema import Config, SftConfig

__all__ = [
    "is_custom_function",
    "may_score_code",
    "prime_shares_reference",
    "saves_hf",
    "syncs_adapter_only",
    "uses_critic",
    "uses_policy_as_reference",
    "uses_preferences",
    "uses_reference",
    "uses_reward_function",
]


def is_custom_function(name: str) -> bool:
    """Whether an estimator or a loss is the user's own, written as package.module:function."""
    return ":" in name


def uses_reward_function(config: Config) -> bool:
    """Whether a function scores answers, shipped or the user's own. A reward model alone needs none."""
    reward = config.reward
    return not reward.reward_model.enable or bool(reward.functions) or reward.custom_reward_function.path is not None


def may_score_code(config: Config) -> bool:
    """Whether the shipped scorer of code may be called: chosen by the data source of a row, or by its name."""
    functions = config.reward.functions
    paths = [one.get("path") for one in functions] if functions else [config.reward.custom_reward_function.path]
    return uses_reward_function(config) and (None in paths or "verl.rewards.scorers.code" in paths)


def saves_hf(config: Config | SftConfig) -> bool:
    """Whether checkpoints also hold the model for `from_pretrained`, requested by either setting."""
    checkpoint = config.checkpoint if isinstance(config, SftConfig) else config.actor_rollout_ref.actor.checkpoint
    return config.trainer.save_hf or "hf_model" in checkpoint.save_contents


VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks of adapters that vLLM makes room for."""


def syncs_adapter_only(config: Config) -> bool:
    """Whether the engines hold the model's own weights and get the adapter alone."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    can = rollout.name == "vllm" and rollout.weight_transport in ("auto", "host") and rank <= VLLM_LORA_RANKS[-1]
    return rank > 0 and (rollout.lora_transport == "adapter" or (rollout.lora_transport == "auto" and can))


def uses_preferences(config: Config) -> bool:
    """Whether the loss compares the scored answers to a prompt with each other: it needs two, and no advantages."""
    return config.actor_rollout_ref.actor.policy_loss.loss_mode in ("dpo", "sppo")


def uses_critic(config: Config) -> bool:
    """Whether a value model is trained beside the policy."""
    wanted, estimator = config.critic.enable, config.algorithm.adv_estimator
    return (estimator == "gae" if wanted is None else wanted) and not uses_preferences(config)


def prime_shares_reference(config: Config) -> bool:
    """Whether PRIME's model is compared with the policy's reference, being the same, and not with one of its own."""
    prime, model = config.reward.prime, config.actor_rollout_ref.model
    return prime.enable and prime.model_path in (None, model.path) and config.trainer.ref_update_freq < 1


def uses_policy_as_reference(config: Config) -> bool:
    """Whether the reference is the policy with its adapter off, and no second copy of the weights."""
    adapted = config.actor_rollout_ref.actor.peft.lora_rank > 0
    return adapted and config.trainer.ref_update_freq < 1 and uses_reference(config)


def uses_reference(config: Config) -> bool:
    """Whether anything looks at the log-probs of the reference."""
    return (
        config.actor_rollout_ref.actor.use_kl_loss
        or config.algorithm.use_kl_in_reward
        or prime_shares_reference(config)
        or uses_preferences(config)
    )
