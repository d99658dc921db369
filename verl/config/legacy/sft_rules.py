"""The answers of `verl sft` to keys of launch scripts that are no settings here."""

from __future__ import annotations

from verl.config.legacy.key_rules import Rules, always_on, ignored, missing
from verl.config.legacy.train_rules import (
    CUSTOM_DATASET,
    IMAGES,
    KERNELS,
    MEGATRON,
    MTP,
    NO_PADDING,
    ONE,
    PREFETCH,
    SHARED_MEMORY,
)

_MEGATRON_ENGINE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("use_mbridge", "vanilla_mbridge", "use_megatron_fsdp", "use_dist_checkpointing", "override_transformer_config"),
    *("grad_offload", "impl_cfg", "attention_backend_override", "tp", "pp", "vpp", "cp", "ep", "etp"),
)

SFT_RULES = Rules(
    {
        **{f"engine.{name}": MEGATRON for name in _MEGATRON_ENGINE},
        "engine": missing("other training engines than FSDP2", "fsdp", "fsdp2", "automodel"),
        "engine.strategy": missing("other training engines than FSDP2", "fsdp", "fsdp2"),
        "engine.distributed_strategy": missing("other training engines than FSDP2", "fsdp", "fsdp2"),
        "engine.cp_size": missing("context parallelism", *ONE),
        "engine.pp_size": missing("pipeline parallelism", *ONE),
        "engine.tp_size": missing("tensor parallelism in training", *ONE),
        "engine.forward_prefetch": PREFETCH,
        "engine.use_remove_padding": NO_PADDING,
        "engine.use_torch_compile": ignored("`verl sft` compiles nothing; the results are the same"),
        "engine.attn_implementation": KERNELS,
        "engine.backend_config": KERNELS,
        "model.use_remove_padding": NO_PADDING,
        "model.use_liger": KERNELS,
        "model.use_fused_kernels": always_on("logits are never stored as a whole"),
        "model.use_shm": SHARED_MEMORY,
        "model.mtp": MTP,
        "data.pad_mode": NO_PADDING,
        "data.ignore_input_ids_mismatch": ignored(
            "conversations are rendered as a whole, and tokens that no turn can be assigned to are an error"
        ),
        "data.balance_dp_token": always_on("tokens are balanced over ranks"),
        "data.image_key": IMAGES,
        "data.image_patch_size": IMAGES,
        "data.custom_cls": CUSTOM_DATASET,
        "optim.override_optimizer_config": MEGATRON,
        "optim.min_lr": missing("an absolute minimum learning rate", "0", instead="optim.min_lr_ratio"),
        "optim.lr_warmup_init": missing(
            "an absolute learning rate at the start of the warm-up", "0", instead="optim.init_lr_ratio"
        ),
        "optim.optimizer_impl": missing(
            "optimizers of other packages",
            "torch.optim",
            "transformer_engine.pytorch.optimizers.fused_adam",
            instead="optim.name",
        ),
        "optim.exp_avg_dtype": ignored(
            "AdamW's moments have the type of the master weights; see optim.name=adamw_8bit"
        ),
        "optim.exp_avg_sq_dtype": ignored(
            "AdamW's moments have the type of the master weights; see optim.name=adamw_8bit"
        ),
        "optim.master_weights": always_on("unless model.fsdp_config.model_dtype=bfloat16, master weights are float32"),
        "optim.store_param_remainders": ignored("a way to store master weights; the results are the same"),
        "trainer.default_hdfs_dir": missing("checkpoints on HDFS"),
        "hydra": ignored("verl reads settings with Hydra but does not run under it"),
    },
    {"trainer.device": {"npu": "Ascend NPUs"}, "optim": {"megatron": "Megatron-Core", "veomni": "VeOmni"}},
    {"optim": ("fsdp", "automodel"), "model": ("hf_model",)},
)
