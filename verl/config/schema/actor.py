"""`actor_rollout_ref.{model,actor,ref}.*`: the policy, how it is trained, and the reference it is held to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl.config.schema.base import CustomFunction, Dtype, Section, section, setting

__all__ = [
    "ActorCheckpointConfig",
    "ActorConfig",
    "Aggregation",
    "FsdpConfig",
    "KlKind",
    "MegatronConfig",
    "ModelConfig",
    "OptimConfig",
    "PeftConfig",
    "RefConfig",
]

Beta = Annotated[float, Field(ge=0, lt=1)]
KlKind = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
    "full",
]
PolicyLoss = Literal["vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "clip_cov", "kl_cov", "dpo", "sppo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Content = Literal["model", "optimizer", "extra", "hf_model"]


class ModelConfig(Section):
    path: str = setting(None, "Hugging Face name or local directory of the model.", required=True)
    tokenizer_path: str | None = setting(None, "Where the tokenizer lies; null: beside the model.")
    trust_remote_code: bool = setting(False, "Allow Python code that comes with the model to run.")
    enable_gradient_checkpointing: bool = setting(
        True, "Recompute activations in the backward pass: less memory, about a third more time."
    )


class OptimConfig(Section):
    lr: float = setting(1e-6, "Learning rate of AdamW; steps once per optimiser step.", gt=0)
    weight_decay: float = setting(0.01, "Weight decay of AdamW.", ge=0)
    betas: tuple[Beta, Beta] = setting((0.9, 0.999), "Decay rates of AdamW's two moments.")
    eps: float = setting(1e-8, "Added to the denominator of AdamW.", gt=0)
    lr_warmup_steps: int | None = setting(
        None,
        "Optimiser steps in which the learning rate rises from 0; null: lr_warmup_steps_ratio decides.",
        unit="steps",
        ge=0,
    )
    lr_warmup_steps_ratio: float = setting(0.0, "The same as a share of all optimiser steps.", unit="share", ge=0, le=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant", "What the learning rate does after the warm-up."
    )
    min_lr_ratio: float = setting(0.0, "Where linear and cosine end, as a share of lr.", unit="share", ge=0, le=1)


class PolicyLossConfig(Section):
    loss_mode: PolicyLoss | CustomFunction = setting(
        "vanilla", "Policy loss; dpo and sppo compare the scored answers to a prompt, against the reference."
    )
    tau_pos: float = setting(1.0, "How steeply sapo's gate closes where the advantage is positive.", gt=0)
    tau_neg: float = setting(1.05, "The same where it is negative.", gt=0)
    clip_cov_ratio: float = setting(
        2e-4,
        "Of all tokens, so many lose their gradient (clip_cov): drawn from those within its bounds.",
        unit="share",
        ge=0,
        le=1,
    )
    clip_cov_lb: float = setting(1.0, "Lower bound of the covariance of log-prob and advantage (clip_cov).")
    clip_cov_ub: float = setting(5.0, "Upper bound of it (clip_cov).")
    kl_cov_ratio: float = setting(
        2e-4,
        "Of all tokens, so many are held to the old policy (kl_cov): those of the largest covariance.",
        unit="share",
        ge=0,
        le=1,
    )
    ppo_kl_coef: float = setting(0.1, "Weight of the distance to the old policy on these (kl_cov).", ge=0)
    dpo_beta: float = setting(0.1, "How strongly dpo holds the policy to the reference.", gt=0)
    sppo_eta: float = setting(1.0, "How far sppo moves from the reference for an answer that wins.", gt=0)


class FsdpConfig(Section):
    model_dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of the master weights and moments.")
    dtype: Dtype = setting("auto", "Type of the computation; auto: bfloat16 on accelerators, float32 on a CPU.")
    reshard_after_forward: bool = setting(
        True, "Free a layer's gathered weights between forward and backward: less memory, more traffic."
    )
    param_offload: bool = setting(
        False, "Keep the weights in host memory while this model is not used, so while answers are generated."
    )
    optimizer_offload: bool = setting(False, "Keep the optimiser's moments in host memory but for its step.")
    offload_policy: bool = setting(
        False, "FSDP2's own offloading: weights, gradients and moments always lie in host memory, where AdamW runs."
    )


class MegatronConfig(Section):
    tensor_model_parallel_size: int = setting(1, "Ranks that share each layer.", unit="ranks", ge=1)
    pipeline_model_parallel_size: int = setting(1, "Stages that the layers are cut into.", unit="stages", ge=1)


class PeftConfig(Section):
    peft_type: Literal["lora"] | None = setting(None, "Kind of adapter; null: lora, if there is a lora_rank.")
    lora_rank: int = setting(0, "Rank of an adapter that is trained instead of all weights; 0: no adapter.", ge=0)
    lora_alpha: int = setting(16, "What the adapter adds is multiplied by lora_alpha / lora_rank.", ge=1)
    target_modules: str | list[str] = setting(
        "all-linear", "Linear modules that get an adapter: endings of their names, or a pattern for whole names."
    )


class CheckpointConfig(Section):
    save_contents: list[Content] = setting(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds; extra: schedules, random states.",
        planned=("hf_model",),
    )
    load_contents: list[Content] = setting(
        ["model", "optimizer", "extra"], "What a resumed run takes from it; hf_model is for others, and not read."
    )


class ActorCheckpointConfig(CheckpointConfig):
    save_contents: list[Content] = setting(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds; extra: schedules, random states; hf_model: as trainer.save_hf.",
    )


class ActorConfig(Section):
    strategy: Literal["fsdp2", "megatron"] = setting("fsdp2", "Training engine.", planned=("megatron",))
    optim: OptimConfig = section(OptimConfig, "Optimiser and its schedule.")
    ppo_mini_batch_size: int = setting(
        256, "Prompts per optimiser step, over all ranks; times rollout.n samples.", unit="prompts", ge=1
    )
    ppo_micro_batch_size_per_gpu: int = setting(
        8, "Samples a rank takes at once; changes speed and memory, never the gradient.", unit="samples", ge=1
    )
    use_dynamic_bsz: bool = setting(False, "Fill micro-batches up to a number of tokens instead of samples.")
    ppo_max_token_len_per_gpu: int = setting(
        16384, "That number of tokens; only a sample that is itself longer exceeds it.", unit="tokens", ge=1
    )
    ppo_epochs: int = setting(1, "Passes over the answers of a step.", unit="passes", ge=1)
    shuffle: bool = setting(False, "Draw the mini-batches of a step in random order.")
    clip_ratio: float = setting(0.2, "How far the ratio of new to old probability may move from 1.", gt=0, lt=1)
    clip_ratio_low: float | None = setting(None, "The same downwards; null: clip_ratio.", gt=0, lt=1)
    clip_ratio_high: float | None = setting(None, "The same upwards; null: clip_ratio.", gt=0)
    clip_ratio_c: float = setting(3.0, "Limit of the loss where the advantage is negative (dual clip).", gt=1)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "Which policy loss.")
    loss_agg_mode: Aggregation = setting("token-mean", "How the losses of tokens become one number.")
    loss_scale_factor: float | None = setting(
        None, "Length that seq-mean-token-sum-norm divides by; null: data.max_response_length.", unit="tokens", gt=0
    )
    entropy_coeff: float = setting(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = setting(False, "Hold the policy to the reference by a KL term in the loss.")
    kl_loss_coef: float = setting(0.001, "Weight of that term.", ge=0)
    kl_loss_type: KlKind = setting(
        "low_var_kl", "Its estimator; a trailing + takes k2's gradient; full: exact over the vocabulary."
    )
    grad_clip: float | None = setting(1.0, "Largest norm of the gradient; longer ones are scaled down.", gt=0)
    use_torch_compile: bool = setting(
        True, "Compile the kernels of log-probs and entropies, on accelerators; if that fails they run as written."
    )
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training.")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-Core.", planned=True)
    peft: PeftConfig = section(PeftConfig, "An adapter (LoRA).")
    checkpoint: ActorCheckpointConfig = section(ActorCheckpointConfig, "Contents of checkpoints.")

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefFsdpConfig(Section):
    param_offload: bool = setting(False, "Keep the reference's weights in host memory while it is not used.")


class RefConfig(Section):
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "Samples a rank takes at once for the reference; null: as the actor.", unit="samples", ge=1
    )
    log_prob_max_token_len_per_gpu: int | None = setting(
        None, "Tokens a rank takes at once with use_dynamic_bsz; null: as the actor.", unit="tokens", ge=1
    )
    fsdp_config: RefFsdpConfig = section(RefFsdpConfig, "Sharding of the reference.")
