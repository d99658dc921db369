"""Defaults of launch scripts that differ from those of verl."""

from __future__ import annotations

from typing import NamedTuple


class OtherDefault(NamedTuple):
    """The default of a setting where a launch script comes from.

    `is_kept` says whether a migrated command sets it, since a run would otherwise give other results or speed.
    """

    value: str
    reason: str
    is_kept: bool = True


TRAIN_DEFAULTS = {
    "algorithm.adv_estimator": OtherDefault("gae", "PPO with a critic; here GRPO"),
    "trainer.total_epochs": OtherDefault("30", "passes over the data"),
    "actor_rollout_ref.rollout.enforce_eager": OtherDefault("false", "CUDA graphs; here too, on accelerators", False),
    "actor_rollout_ref.rollout.max_num_seqs": OtherDefault("1024", "sequences generated at once; here vLLM decides"),
    "actor_rollout_ref.rollout.max_num_batched_tokens": OtherDefault("8192", "here vLLM decides"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": OtherDefault("2", "here one device per engine", False),
    "actor_rollout_ref.rollout.dtype": OtherDefault("bfloat16", "here as the trainer: the same on GPUs", False),
    "actor_rollout_ref.rollout.calculate_log_probs": OtherDefault("false", "here always on", False),
    "critic.ppo_max_token_len_per_gpu": OtherDefault("32768", "here that of the actor; results are the same", False),
    "trainer.logger": OtherDefault("[console,wandb]", "here no package is needed", False),
    "trainer.project_name": OtherDefault("verl_examples", "only a name", False),
    "trainer.experiment_name": OtherDefault("gsm8k", "only a name", False),
}
SFT_DEFAULTS = {
    "optim.lr": OtherDefault("1e-3", "learning rate"),
    "data.messages_key": OtherDefault("messages", "conversations; here prompts with responses"),
    "data.max_length": OtherDefault("1024", "longest example"),
    "data.packing": OtherDefault("true", "micro-batches by tokens; results are the same"),
    "data.max_token_len_per_gpu": OtherDefault("8192", "tokens per micro-batch; results are the same"),
    "trainer.total_epochs": OtherDefault("4", "passes over the data"),
    "trainer.n_gpus_per_node": OtherDefault("1", "there torchrun decides"),
    "trainer.save_freq": OtherDefault("-1", "checkpoints; here one after the last step"),
    "trainer.logger": OtherDefault("[console,wandb]", "here no package is needed", False),
    "trainer.project_name": OtherDefault("gsm8k-sft", "only a name", False),
    "trainer.experiment_name": OtherDefault("test", "only a name", False),
}
