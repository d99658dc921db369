"""Which models and functions a run uses, derived from its settings."""

from __future__ import annotations

from typing import NamedTuple

from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import MISSING, Config, SftConfig
from verl.config.schema.actor import ActorConfig, CheckpointConfig, ModelConfig, OptimConfig
from verl.config.schema.conditions import ACTOR
from verl.config.schema.critic import CriticConfig
from verl.config.schema.reward import RewardRolloutConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.sft import SftModelConfig
from verl.config.train_engines import get_train_engine
from verl.models.model_folder import is_moe


def uses_reward_function(config: Config) -> bool:
    """Whether a reward function scores responses, built-in or custom; a reward model alone needs none."""
    reward = config.reward
    if reward.functions or reward.custom_reward_function.path is not None:
        return True
    return not reward.reward_model.enable and not may_score_itself(config)


def may_score_itself(config: Config) -> bool:
    """Whether episodes bring their own score: from an environment, or from an agent of the user."""
    rollout = config.actor_rollout_ref.rollout
    is_custom = rollout.agent.default_agent_loop not in ("tool_agent", "single_turn")
    return has_environment(config) or (rollout.multi_turn.enable and is_custom)


def has_environment(config: Config) -> bool:
    """Whether an environment scores episodes, instead of reward functions and models."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    return turns.enable and turns.environment is not None


def may_score_code(config: Config) -> bool:
    """Whether the built-in code scorer may be called: by the data source of a row, or by its path."""
    functions = config.reward.functions
    paths = (
        [function.get("path") for function in functions] if functions else [config.reward.custom_reward_function.path]
    )
    return uses_reward_function(config) and (None in paths or "verl.rewards.scorers.code" in paths)


def saves_hf(config: Config | SftConfig) -> bool | None:
    """Whether checkpoints also hold the model for `from_pretrained`, requested by either setting; None: the last.

    Not by default with an adapter, whose base model may be far larger than what is trained.
    """
    _, checkpoint = get_checkpoint_settings(config)
    if "hf_model" in checkpoint.save_contents:
        return True
    is_adapter = list_trained_models(config)[0].settings.peft.lora_rank > 0
    has_weights = "model" in checkpoint.save_contents and not is_adapter
    return config.trainer.save_hf if has_weights or config.trainer.save_hf else False


def get_checkpoint_settings(config: Config | SftConfig) -> tuple[str, CheckpointConfig]:
    """Return the settings for the policy's checkpoints, with their key."""
    if isinstance(config, SftConfig):
        return "checkpoint", config.checkpoint
    return "actor_rollout_ref.actor.checkpoint", config.actor_rollout_ref.actor.checkpoint


def get_model_settings(config: Config | SftConfig) -> tuple[str, ModelConfig]:
    """Return the settings of the model that is trained, with their key."""
    if isinstance(config, SftConfig):
        return "model", config.model
    return "actor_rollout_ref.model", config.actor_rollout_ref.model


class TrainedModel(NamedTuple):
    """The settings of a model that is trained, and those of its optimizer, each with their key."""

    key: str
    settings: ActorConfig | CriticConfig | SftModelConfig
    optim_key: str
    optim: OptimConfig


def list_trained_models(config: Config | SftConfig) -> list[TrainedModel]:
    """Return the models that are trained; the first is the policy, or the model of supervised fine-tuning."""
    if isinstance(config, SftConfig):
        return [TrainedModel("model", config.model, "optim", config.optim)]
    actor, critic = config.actor_rollout_ref.actor, config.critic
    models = [TrainedModel(ACTOR, actor, f"{ACTOR}.optim", actor.optim)]
    return [*models, TrainedModel("critic", critic, "critic.optim", critic.optim)] if uses_critic(config) else models


def data_splits(config: Config | SftConfig) -> dict[str, list[str]]:
    """Return the paths and patterns of the data files by split, of the splits that have any."""
    entries = {"train": config.data.train_files, "val": config.data.val_files}
    return {
        split: [files] if isinstance(files, str) else files
        for split, files in entries.items()
        if files and files != MISSING
    }


def list_engines(config: Config | SftConfig) -> list[tuple[str, RolloutConfig | RewardRolloutConfig]]:
    """Return the settings of the engines of the policy and of the reward model, each with its key."""
    if isinstance(config, SftConfig):
        return []
    model = config.reward.reward_model
    reward_engines = [("reward.reward_model.rollout", model.rollout)] if model.enable else []
    return [("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout), *reward_engines]


def frees_engine_memory(config: Config, device: str) -> bool:
    """Whether rollout engines sleep while the train workers on the same devices work."""
    if not config.actor_rollout_ref.hybrid_engine:
        return config.actor_rollout_ref.rollout.lend_train_devices
    wanted = config.actor_rollout_ref.rollout.free_cache_engine
    return device != "cpu" if wanted is None else wanted


def may_pause_requests(config: Config) -> bool:
    """Whether engines may sleep under requests that go on after the next weight sync."""
    return config.trainer.max_staleness > 0 and frees_engine_memory(config, config.trainer.device)


def get_quantization(config: Config) -> str | None:
    """Return vLLM's name for how rollout engines quantize their weights; None if they do not."""
    rollout = config.actor_rollout_ref.rollout
    wanted = rollout.quantization or ("fp8" if rollout.dtype == "fp8" else None)
    return "fp8_per_block" if wanted == "fp8" else wanted


def syncs_adapter_only(config: Config, device: str) -> bool:
    """Whether the engines load the base model and weight sync sends only the adapter."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    if rank == 0 or rollout.lora_transport != "auto":
        return rank > 0 and rollout.lora_transport == "adapter"
    max_rank = get_rollout_engine(rollout.name).capabilities.max_lora_rank
    has_kernels = device != "cpu" or not is_moe(config.actor_rollout_ref.model.path)
    return rollout.weight_transport in ("auto", "host") and rank <= max_rank and has_kernels


def differs_by_truncation(config: Config) -> bool:
    """Whether `top_p` or `top_k` truncates the distribution of the engine's log-probs, but not the trainer's."""
    rollout = config.actor_rollout_ref.rollout
    is_truncated = get_rollout_engine(rollout.name).capabilities.has_truncated_logprobs
    return is_truncated and (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.keep_sampling_mask


def get_importance_weights(config: Config) -> str | None:
    """Return the kind of importance weights; None: no weights.

    With "auto" tokens have weights if they may be older than the weights that they train, unless another correction is
    chosen, or log-probs of the engine are those of a truncated distribution.
    """
    correction = config.algorithm.rollout_correction
    if correction.rollout_is != "auto":
        return correction.rollout_is
    is_corrected = correction.rollout_rs or correction.has_ratio_to_engine
    return "token" if config.trainer.max_staleness > 0 and not (differs_by_truncation(config) or is_corrected) else None


def uses_preferences(config: Config) -> bool:
    """Whether the loss compares the scored responses of a group; it needs two of them, and no advantages."""
    return config.actor_rollout_ref.actor.policy_loss.loss_mode in ("dpo", "sppo")


def uses_critic(config: Config) -> bool:
    """Whether a value model is trained."""
    enable, estimator = config.critic.enable, config.algorithm.adv_estimator
    has_values = estimator == "gae" if enable is None else enable
    return has_values and not uses_preferences(config) and uses_task_rewards(config)


def uses_task_rewards(config: Config) -> bool:
    """Whether training responses are scored; distillation alone needs no scores."""
    return config.distillation.use_task_rewards or not config.distillation.enable


def scores_responses(config: Config) -> bool:
    """Whether any responses are scored, in training or in validation."""
    return uses_task_rewards(config) or config.data.val_files is not None


def prime_shares_reference(config: Config) -> bool:
    """Whether PRIME uses the policy's reference as its own, since both start from the same model."""
    prime, model = config.reward.prime, config.actor_rollout_ref.model
    return prime.enable and prime.model_path in (None, model.path) and config.trainer.ref_update_freq < 1


def uses_policy_as_reference(config: Config) -> bool:
    """Whether the reference is the policy with its adapter disabled, instead of a second copy of the weights."""
    adapted = config.actor_rollout_ref.actor.peft.lora_rank > 0
    return adapted and config.trainer.ref_update_freq < 1 and uses_reference(config)


def uses_reference(config: Config) -> bool:
    """Whether anything uses the log-probs of the reference policy."""
    return (
        config.actor_rollout_ref.actor.use_kl_loss
        or config.algorithm.use_kl_in_reward
        or prime_shares_reference(config)
        or config.actor_rollout_ref.actor.policy_loss.loss_mode == "dpo"
    )


def compute_dtype(config: Config, device: str) -> str:
    """Return the data type in which the policy computes."""
    actor = config.actor_rollout_ref.actor
    return resolve_dtype(getattr(actor, get_train_engine(actor.strategy).section).dtype, device)


def rollout_dtype(config: Config, device: str) -> str:
    """Return the data type in which the engines compute and weights are sent, also to engines that quantize them."""
    wanted = config.actor_rollout_ref.rollout.dtype
    if wanted == "fp8" or (wanted == "auto" and get_quantization(config) is not None):
        return "bfloat16"
    return compute_dtype(config, device) if wanted == "auto" else wanted


def resolve_dtype(wanted: str, device: str) -> str:
    """Return a data type, which for "auto" depends on the device."""
    return wanted if wanted != "auto" else ("float32" if device == "cpu" else "bfloat16")


def transport_name(config: Config) -> str:
    """Return how weights are sent to the engines."""
    wanted = config.actor_rollout_ref.rollout.weight_transport
    return "host" if wanted == "auto" else wanted
