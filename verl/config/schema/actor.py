"""`actor_rollout_ref.{model,actor,ref}.*`: the policy, its training, and the reference policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl.config.schema.base import (
    Count,
    CustomFunction,
    Dtype,
    Fraction,
    Positive,
    RegisteredName,
    Section,
    section,
    setting,
)
from verl.config.schema.conditions import (
    BY_SAMPLES,
    BY_TOKENS,
    HAS_DEVICE_MEMORY,
    ROLLOUT,
    OnlyIf,
    needs,
    unless,
    unless_given,
)
from verl.config.train_engines import DEFAULT_ENGINE, list_train_engines

Beta = Annotated[float, Field(ge=0, lt=1)]
_Kl = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
_KlWithK2Gradient = Literal["kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
KlKind = Literal[_Kl, _KlWithK2Gradient, "full"]
PolicyLoss = Literal[
    "vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "geo_mean", "gpg", "clip_cov", "kl_cov", "dpo", "sppo"
]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Content = Literal["model", "optimizer", "extra", "hf_model"]

_CLIP_COV = needs(".loss_mode", "clip_cov")
_KL_COV = needs(".loss_mode", "kl_cov")
_SAPO = needs(".loss_mode", "sapo")
_DUAL_CLIP = needs(".policy_loss.loss_mode", "vanilla", "dppo_tv", "dppo_kl")
_MUON = needs(".name", "muon")
_WARMS_UP = OnlyIf(
    (".lr_warmup_steps", ".lr_warmup_steps_ratio"),
    lambda steps, ratio: ratio > 0 if steps is None else steps > 0,
    "neither {section}.lr_warmup_steps nor lr_warmup_steps_ratio is above 0",
)
_DECAYS = unless(".lr_scheduler_type", "constant")
_OFFLOAD = (
    HAS_DEVICE_MEMORY,
    unless(".offload_policy", True, reason="{section}.offload_policy=true already keeps everything in host memory"),
)
_HAS_ADAPTER = unless(".lora_rank", 0, reason="{section}.lora_rank=0 means no adapter")
_CLIPPED = needs(".policy_loss.loss_mode", "vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "clip_cov")
_CLIP_RATIO = OnlyIf(
    (".clip_ratio_low", ".clip_ratio_high"),
    lambda low, high: low is None or high is None,
    "clip_ratio_low and clip_ratio_high are both given",
)
_AGGREGATES = OnlyIf(
    (".policy_loss.loss_mode", ".use_kl_loss", ".entropy_coeff"),
    lambda loss, kl, entropy: loss not in ("gspo", "sapo", "geo_mean", "dpo", "sppo") or kl or entropy != 0,
    "{section}.policy_loss.loss_mode=gspo, sapo, geo_mean, dpo and sppo average over sequences by definition",
)
_COMPILES = OnlyIf(
    (".use_torch_compile", "trainer.device"),
    lambda compiles, device: not compiles or device != "cpu",
    "on CPU (trainer.device) nothing is compiled, since compiling takes longer than it saves",
)


class ModelConfig(Section):
    path: str = setting(required=True)
    """Hugging Face name or local directory of the model."""
    tokenizer_path: str | None = setting(None)
    """Hugging Face name or local directory of the tokenizer; null: that of the model."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model."""
    external_lib: str | list[str] | None = setting(None)
    """Python modules to import in every process of a run before models are loaded: own engines and models."""
    lora_adapter_path: str | None = setting(None)
    """Directory of a LoRA adapter in PEFT format to start from; settings of peft default to the adapter's."""
    enable_gradient_checkpointing: bool = setting(True)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    fp32_lm_head: bool = setting(False)
    """Compute logits in float32, whatever the model computes in; in the trainer, in vLLM and in SGLang."""
    logprob_chunk_size: Count | None = setting(None, unit="tokens")
    """Positions whose logits exist at a time in training; null: 4,096 on accelerators, 64 MiB of logits on CPU."""

    @property
    def external_modules(self) -> tuple[str, ...]:
        """The modules that `external_lib` names."""
        modules = self.external_lib
        return (modules,) if isinstance(modules, str) else tuple(modules or ())


class TrainEngineName(RegisteredName):
    @classmethod
    def list_names(cls) -> list[str]:
        return list_train_engines()


class OptimConfig(Section):
    name: Literal["adamw", "adamw_8bit", "muon"] = setting("adamw")
    """Optimizer; adamw_8bit: 8-bit moments; muon: Muon for matrices of hidden layers, AdamW for the rest."""
    lr: Positive = setting(1e-6)
    """Learning rate."""
    weight_decay: float = setting(0.01, ge=0)
    """Weight decay, decoupled as in AdamW."""
    betas: tuple[Beta, Beta] = setting((0.9, 0.999))
    """Decay rates of AdamW's two moments."""
    eps: Positive = setting(1e-8)
    """Epsilon of AdamW."""
    muon_momentum: Beta = setting(0.95, only_if=_MUON)
    """Decay rate of Muon's momentum."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = setting("match_rms_adamw", only_if=_MUON)
    """Scale of Muon's updates: match_rms_adamw: as large as AdamW's, so lr is the same; original: larger."""
    lr_warmup_steps: int | None = setting(None, unit="steps", ge=0)
    """Training steps of linear warm-up; null: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = setting(0.0, only_if=unless_given(".lr_warmup_steps"))
    """Warm-up as a fraction of all training steps."""
    init_lr_ratio: Fraction = setting(0.0, only_if=_WARMS_UP)
    """Learning rate at the start of the warm-up as a fraction of lr."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting("constant")
    """Learning rate schedule after the warm-up."""
    min_lr_ratio: Fraction = setting(0.0, only_if=_DECAYS)
    """Final learning rate as a fraction of lr (linear, cosine)."""


class PolicyLossConfig(Section):
    loss_mode: PolicyLoss | CustomFunction = setting("vanilla")
    """Policy loss; dpo and sppo compare the scored responses of a group, dpo also with the reference."""
    tau_pos: Positive = setting(1.0, only_if=_SAPO)
    """Temperature of the sapo gate for positive advantages."""
    tau_neg: Positive = setting(1.05, only_if=_SAPO)
    """Temperature of the sapo gate for negative advantages."""
    clip_cov_ratio: Fraction = setting(2e-4, only_if=_CLIP_COV)
    """Fraction of tokens, within the bounds, that lose their gradient (clip_cov)."""
    clip_cov_lb: float = setting(1.0, only_if=_CLIP_COV)
    """Lower bound of the covariance of log-prob and advantage (clip_cov)."""
    clip_cov_ub: float = setting(5.0, only_if=_CLIP_COV)
    """Upper bound of the covariance of log-prob and advantage (clip_cov)."""
    kl_cov_ratio: Fraction = setting(2e-4, only_if=_KL_COV)
    """Fraction of tokens, of largest covariance, with a KL penalty (kl_cov)."""
    ppo_kl_coef: float = setting(0.1, ge=0, only_if=_KL_COV)
    """Coefficient of the KL to the old policy on the tokens of kl_cov_ratio (kl_cov)."""
    dpo_beta: Positive = setting(0.1, only_if=needs(".loss_mode", "dpo"))
    """Strength of the pull toward the reference (dpo)."""
    sppo_eta: Positive = setting(1.0, only_if=needs(".loss_mode", "sppo"))
    """Target of a response's log-ratio, per win rate above 1/2 (sppo)."""
    off_policy_mask_threshold: Positive | None = setting(
        None, unit="nats", only_if=unless(".loss_mode", "dpo", "sppo", reason="dpo and sppo have no advantages")
    )
    """Drop responses with negative advantage whose mean log(p_engine / p) is above it; null: keep all."""


class FsdpConfig(Section):
    model_dtype: Literal["float32", "bfloat16"] = setting("float32")
    """Type of the master weights and optimizer moments."""
    stochastic_rounding: bool = setting(False, only_if=needs(".model_dtype", "bfloat16"))
    """Round bfloat16 weights up or down at random, so that small updates are not lost; moments are not bfloat16."""
    dtype: Dtype = setting("auto")
    """Type of the computation; auto: bfloat16 on accelerators, float32 on CPU."""
    fsdp_size: int = setting(-1, unit="ranks", ge=-1)
    """Ranks over which one copy of the model is sharded; the other ranks hold further copies (HSDP); -1: all."""
    expert_parallel_size: Count = setting(1, unit="ranks")
    """Ranks over which the experts of an MoE are distributed; tokens travel to them, instead of weights."""
    reshard_after_forward: bool = setting(True)
    """Free a layer's gathered weights between forward and backward: less memory, more communication."""
    param_offload: bool = setting(False, only_if=_OFFLOAD)
    """Move the weights to host memory while the model is idle, as during generation."""
    optimizer_offload: bool = setting(False, only_if=_OFFLOAD)
    """Keep the optimizer state in host memory except during its step."""
    offload_policy: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """FSDP2 CPU offload: weights, gradients and optimizer state stay in host memory; AdamW runs there."""
    use_torch_compile: bool = setting(False, only_if=_COMPILES)
    """Compile the layers of the model, on accelerators; if compilation fails they run uncompiled."""


class MegatronTransformerConfig(Section):
    num_layers_in_first_pipeline_stage: Count | None = setting(None, unit="layers")
    """Layers of the first pipeline stage, which also has the embeddings; null: as many as the others."""
    num_layers_in_last_pipeline_stage: Count | None = setting(None, unit="layers")
    """Layers of the last pipeline stage, which also has the head; null: as many as the others."""


class MegatronConfig(Section):
    dtype: Dtype = setting("auto")
    """Type of the weights and of the computation; auto: bfloat16 on accelerators; the optimizer's are float32."""
    tensor_model_parallel_size: Count = setting(1, unit="ranks")
    """Ranks that share the matrices of every layer and the vocabulary; it must divide the key-value heads."""
    pipeline_model_parallel_size: Count = setting(1, unit="stages")
    """Pipeline stages; each has some of the layers."""
    expert_model_parallel_size: Count = setting(1, unit="ranks")
    """Ranks over which the experts of an MoE are distributed."""
    context_parallel_size: Count = setting(1, unit="ranks")
    """Ranks that share the tokens of every sequence, for long ones; times the tensor size it must divide the heads."""
    param_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Move the weights to host memory while the model is idle, as during generation."""
    grad_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Free the memory of the gradients while the model is idle."""
    optimizer_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Keep the optimizer's float32 weights and moments in host memory except during its step."""
    override_transformer_config: MegatronTransformerConfig = section(
        MegatronTransformerConfig, "Layers of pipeline stages."
    )


class RefMegatronConfig(Section):
    param_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Move the reference weights to host memory while they are not in use."""
    tensor_model_parallel_size: Count | None = setting(None, unit="ranks")
    """That of the actor, which is also the default."""
    pipeline_model_parallel_size: Count | None = setting(None, unit="stages")
    """That of the actor, which is also the default."""
    expert_model_parallel_size: Count | None = setting(None, unit="ranks")
    """That of the actor, which is also the default."""
    context_parallel_size: Count | None = setting(None, unit="ranks")
    """That of the actor, which is also the default."""


class PeftConfig(Section):
    peft_type: Literal["lora"] | None = setting(None)
    """Type of adapter; null: lora if lora_rank is above 0."""
    lora_rank: int = setting(0, ge=0)
    """Rank of the adapter that is trained instead of all weights; 0: no adapter."""
    lora_alpha: Count = setting(16, only_if=_HAS_ADAPTER)
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    target_modules: str | list[str] = setting("all-linear", only_if=_HAS_ADAPTER)
    """Linear modules with an adapter: suffixes of names, or a pattern."""


class RouterReplayConfig(Section):
    mode: Literal["disabled", "R2", "R3"] = setting("disabled")
    """Experts used in training; R2: those of the old log-prob pass; R3: those that the engine used."""


class CheckpointConfig(Section):
    save_contents: list[Content] = setting(["model", "optimizer", "extra"], planned=("hf_model",))
    """Contents of a checkpoint; extra: schedules, random states."""
    load_contents: list[Content] = setting(
        ["model", "optimizer", "extra"],
        only_if=unless("trainer.resume_mode", "disable", reason="trainer.resume_mode=disable loads nothing"),
    )
    """What a resumed run loads from a checkpoint; hf_model is an export and is never loaded."""


class ActorCheckpointConfig(CheckpointConfig):
    save_contents: list[Content] = setting(["model", "optimizer", "extra"])
    """Contents of a checkpoint; extra: schedules, random states; hf_model: same as trainer.save_hf."""


class ActorConfig(Section):
    strategy: TrainEngineName = setting(DEFAULT_ENGINE)
    """Training engine."""
    optim: OptimConfig = section(OptimConfig, "Optimizer and learning rate schedule.")
    ppo_mini_batch_size: Count = setting(256, unit="prompts")
    """Prompts per optimizer step over all ranks; each has rollout.n samples."""
    ppo_micro_batch_size_per_gpu: Count = setting(8, unit="samples", only_if=BY_SAMPLES)
    """Samples per rank and pass; does not change the gradient."""
    use_dynamic_bsz: bool | None = setting(None)
    """Limit micro-batches by tokens, not samples; null: on accelerators, if no size in samples is given."""
    ppo_max_token_len_per_gpu: Count = setting(16384, unit="tokens", only_if=BY_TOKENS)
    """Maximum tokens per micro-batch; longer samples run alone."""
    use_prefix_grouper: bool = setting(
        False, only_if=unless(f"{ROLLOUT}.n", 1, reason=f"{ROLLOUT}.n=1: every prompt has one response")
    )
    """Compute a prompt once for its responses in a micro-batch, in all models; does not change the gradient."""
    ppo_epochs: Count = setting(1, unit="passes")
    """Passes over the responses of a step."""
    shuffle: bool = setting(False)
    """Shuffle the samples of a step before they are split into mini-batches."""
    clip_ratio: Positive = setting(0.2, only_if=(_CLIPPED, _CLIP_RATIO))
    """Clip range of the probability ratio around 1."""
    clip_ratio_low: Positive | None = setting(None, only_if=_CLIPPED)
    """Lower clip range; null: clip_ratio; from 1 on (cispo) there is no lower bound."""
    clip_ratio_high: Positive | None = setting(None, only_if=_CLIPPED)
    """Upper clip range; null: clip_ratio."""
    clip_ratio_c: float = setting(3.0, gt=1, only_if=_DUAL_CLIP)
    """Upper bound of the ratio for negative advantages (dual clip)."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "The policy loss.")
    loss_agg_mode: Aggregation = setting("token-mean", only_if=_AGGREGATES)
    """How per-token losses are reduced."""
    loss_scale_factor: Positive | None = setting(
        None, unit="tokens", only_if=(_AGGREGATES, needs(".loss_agg_mode", "seq-mean-token-sum-norm"))
    )
    """Divisor of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = setting(0.0)
    """Coefficient of the entropy bonus."""
    use_kl_loss: bool = setting(False)
    """Add a KL penalty against the reference policy to the loss."""
    kl_loss_coef: float = setting(0.001, ge=0, only_if=needs(".use_kl_loss"))
    """Coefficient of the KL penalty in the loss."""
    kl_loss_type: KlKind | Literal["unbiased"] = setting("low_var_kl", only_if=needs(".use_kl_loss"))
    """KL estimator; a trailing + takes the gradient of k2; unbiased: k3 times the ratio; full: exact."""
    router_replay: RouterReplayConfig = section(RouterReplayConfig, "Routing replay of MoE models.")
    router_aux_loss_coef: float = setting(0.0, ge=0)
    """Coefficient of the load-balancing loss of MoE routers; 0: none."""
    grad_clip: Positive | None = setting(1.0)
    """Maximum norm of the gradient; null: no clipping."""
    use_torch_compile: bool = setting(True, only_if=_COMPILES)
    """Compile the log-prob and entropy kernels, on accelerators; if compilation fails they run uncompiled."""
    ulysses_sequence_parallel_size: Count = setting(1)
    """Ranks that share the tokens of every sequence, for long ones, in all models; they must divide the heads."""
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (FSDP2).")
    megatron: MegatronConfig = section(MegatronConfig, "Megatron-Core (strategy=megatron).")
    peft: PeftConfig = section(PeftConfig, "LoRA adapter.")
    checkpoint: ActorCheckpointConfig = section(ActorCheckpointConfig, "Contents of checkpoints.")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range below and above 1."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


class RefFsdpConfig(Section):
    param_offload: bool = setting(False, only_if=HAS_DEVICE_MEMORY)
    """Move the reference weights to host memory while they are not in use."""


class RefConfig(Section):
    log_prob_micro_batch_size_per_gpu: Count | None = setting(None, unit="samples", only_if=BY_SAMPLES)
    """Samples per rank and pass; null: same as rollout."""
    log_prob_max_token_len_per_gpu: Count | None = setting(None, unit="tokens", only_if=BY_TOKENS)
    """Tokens per rank and pass; null: same as rollout."""
    fsdp_config: RefFsdpConfig = section(RefFsdpConfig, "Sharding of the reference.")
    megatron: RefMegatronConfig = section(RefMegatronConfig, "The layout of the reference (strategy=megatron).")
