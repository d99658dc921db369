"""The answers of `verl train` to keys of launch scripts that are no settings here."""

from __future__ import annotations

from verl.config.legacy.key_rules import Rules, always_on, ignored, needs

ONE, OFF = ("1",), ("false", "0", "none", "disabled")

MEGATRON = needs("Megatron-Core")
VEOMNI = needs("VeOmni")
NPU = needs("Ascend NPUs")
IMAGES = needs("images and videos")
MTP = needs("multi-token prediction", *OFF)
ASYNC = needs("asynchronous training")
SEVERAL_TEACHERS = needs("several teachers")
CUSTOM_DATASET = needs("custom data set classes")

NO_PADDING = always_on("batches are packed without padding; results do not depend on it")
CHUNKED = always_on("log-probs and entropies are computed in chunks and recomputed in the backward pass")
KERNELS = ignored("choice of kernels; the results are the same")
REDUCE_DTYPE = ignored("gradients are always reduced in float32, which is at least as exact")
PREFETCH = ignored("FSDP2 schedules its communication itself; the results are the same")
ORIG_PARAMS = always_on("FSDP2 keeps the original parameters")
SHARED_MEMORY = ignored("models are read from where they are; copy them to fast storage yourself")
PROFILER = ignored("a profile holds all that trainer.profile.tools records of a step, in the folder of the run")
PROFILED = always_on("it runs in the train workers, which trainer.profile records as a whole")
ENGINE_PROFILER = needs("profiling of engines", *OFF)
EXACT_LENGTHS = ignored("lengths follow data.max_prompt_length and data.max_response_length")
TEACHER_ENGINE = ignored("the teacher runs in the train workers, not in an engine of its own")
DYNAMIC = ignored("log-prob passes are batched as training is (actor_rollout_ref.actor.use_dynamic_bsz)")
BUFFER_DTYPE = ignored("buffers keep the type of the model")
CHECKPOINT_ENGINE = ignored("weights are sent by weight_transport; the results are the same")
CHECKPOINT_STRICT = ignored("checkpoints are always verified and loaded completely")

_A, _R, _REF, _M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))

SEQUENCES = ignored(f"all models share sequences as the actor does ({_A}.ulysses_sequence_parallel_size)")
_ENGINES = {
    f"{_A}.megatron": MEGATRON,
    f"{_REF}.megatron": MEGATRON,
    "critic.megatron": MEGATRON,
    f"{_A}.engine": MEGATRON,
    f"{_A}.model_engine": needs("Megatron-Core", "fsdp", "fsdp2", "dp"),
    "model_engine": needs("Megatron-Core", "fsdp", "fsdp2", "dp"),
    f"{_A}.optim.override_optimizer_config": MEGATRON,
    f"{_A}.optim.lr_decay_steps": MEGATRON,
    f"{_A}.optim.min_lr": needs("an absolute minimum learning rate", "0", instead=f"{_A}.optim.min_lr_ratio"),
    f"{_A}.optim.optimizer_impl": needs("optimizers of other packages", "torch.optim", instead=f"{_A}.optim.name"),
    f"{_A}.veomni": VEOMNI,
    f"{_REF}.veomni": VEOMNI,
    f"{_A}.pad_to_length": ignored("batches have no padding"),
    f"{_R}.engine_kwargs.trtllm": needs("TensorRT-LLM"),
    f"{_R}.moe_tensor_parallel_size": needs("TensorRT-LLM"),
    f"{_A}.checkpoint.strict": CHECKPOINT_STRICT,
    "trainer.use_legacy_worker_impl": ignored("there is one implementation of workers"),
    "async_training": ASYNC,
    f"{_R}.total_rollout_steps": ASYNC,
    "data.gen_batch_size": needs("batches of generation that differ from data.train_batch_size"),
}
_SHARDING = {
    **{f"{section}.use_remove_padding": NO_PADDING for section in (_M, "critic.model", "reward.reward_model.model")},
    **{f"{section}.ulysses_sequence_parallel_size": SEQUENCES for section in (_REF, "critic")},
    **{f"{section}.fsdp_config.ulysses_sequence_parallel_size": SEQUENCES for section in (_REF, "critic")},
    **{
        f"{section}.{name}": rule
        for section in (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp_config")
        for name, rule in {
            "mixed_precision.reduce_dtype": REDUCE_DTYPE,
            "mixed_precision.buffer_dtype": BUFFER_DTYPE,
            "forward_prefetch": PREFETCH,
            "use_orig_params": ORIG_PARAMS,
            "wrap_policy": ignored("every layer is sharded by itself"),
            "entropy_checkpointing": CHUNKED,
            "entropy_from_logits_with_chunking": CHUNKED,
        }.items()
    },
    f"{_REF}.strategy": needs("another engine for the reference than for the actor", "fsdp", "fsdp2"),
    f"{_REF}.use_torch_compile": ignored("the reference is compiled as the actor is"),
    f"{_REF}.fsdp_config.model_dtype": ignored(
        f"the reference is stored as the actor is ({_A}.fsdp_config.model_dtype)"
    ),
    f"{_REF}.fsdp_config.fsdp_size": ignored(f"the reference is sharded as the actor is ({_A}.fsdp_config.fsdp_size)"),
    f"{_REF}.fsdp_config.expert_parallel_size": ignored("the reference follows the actor"),
    f"{_REF}.fsdp_config.optimizer_offload": ignored("the reference has no optimizer"),
    f"{_REF}.fsdp_config.reshard_after_forward": ignored("the reference follows the actor"),
    f"{_REF}.fsdp_config.offload_policy": ignored(f"use {_REF}.fsdp_config.param_offload to save memory"),
    **{f"{section}.log_prob_use_dynamic_bsz": DYNAMIC for section in (_R, _REF)},
    **{f"{section}.entropy_checkpointing": CHUNKED for section in (_A, _REF)},
    **{f"{section}.entropy_from_logits_with_chunking": CHUNKED for section in (_A, _REF)},
    f"{_A}.calculate_sum_pi_squared": ignored("computed if algorithm.adv_estimator needs it"),
    "actor_rollout_ref.nccl_timeout": ignored("trainer.deadlines sets the time limits of workers"),
}
_MODEL = {
    f"{_M}.use_fused_kernels": always_on("logits are never stored as a whole"),
    f"{_M}.fused_kernel_options": KERNELS,
    f"{_M}.use_liger": KERNELS,
    f"{_M}.use_shm": SHARED_MEMORY,
    f"{_M}.enable_activation_offload": needs("offloading of activations", *OFF),
    f"{_M}.exclude_modules": needs("adapters that exclude modules", instead=f"{_A}.peft.target_modules"),
    f"{_M}.lora.lora_A_init_method": needs("other initial values of adapters", "kaiming"),
    f"{_M}.mtp": MTP,
    f"{_M}.override_config": needs("changes of a model's configuration"),
}
_ROLLOUT = {
    f"{_R}.checkpoint_engine": CHECKPOINT_ENGINE,
    f"{_R}.multi_stage_wake_up": always_on("engines wake for the weights first, then for the cache"),
    f"{_R}.layered_summon": always_on("weights are gathered one at a time"),
    f"{_R}.mode": always_on("engines answer requests one by one, as they finish"),
    f"{_R}.do_sample": needs("greedy responses in training", "true", instead=f"{_R}.temperature"),
    f"{_R}.ignore_eos": needs("responses that go on after their end", *OFF),
    f"{_R}.skip_tokenizer_init": always_on("engines receive and return token ids"),
    f"{_R}.enable_rollout_routing_replay": needs(
        "a second switch for routing replay", "false", instead=f"{_A}.router_replay.mode=R3"
    ),
    "reward.reward_model.rollout.prompt_length": EXACT_LENGTHS,
    "reward.reward_model.rollout.response_length": EXACT_LENGTHS,
}
_DATA = {
    "data.image_key": IMAGES,
    "data.video_key": IMAGES,
    "data.image_patch_size": IMAGES,
    "data.return_multi_modal_inputs": needs("images and videos", *OFF),
    "data.custom_cls": CUSTOM_DATASET,
    "data.return_raw_chat": always_on("prompts stay chat messages until they are rendered"),
    "data.trust_remote_code": ignored(f"{_M}.trust_remote_code decides for model and tokenizer"),
    "data.dataloader_num_workers": ignored("episode workers read prompts when they need them"),
    "data.output_path": ignored("only `verl generate` writes responses; there it is --output"),
    "data.reward_fn_key": needs("another column of data sources", "data_source"),
}
_REWARD = {
    "reward.reward_kwargs.max_resp_len": EXACT_LENGTHS,
    "reward.reward_model.reward_kwargs.max_resp_len": EXACT_LENGTHS,
    "reward.overlong_buffer.log": always_on("the penalty is a metric"),
    "algorithm.rollout_correction.loss_type": needs("the REINFORCE loss of rollout correction", "ppo_clip"),
}
_DISTILLATION = {
    "distillation.distillation_loss.loss_mode": needs(
        "distillation by another estimate of the KL", "k1", "kl", "full", instead="distillation.mode"
    ),
    "distillation.distillation_loss.topk": ignored("the KL is of the sampled token, or exact over the vocabulary"),
    "distillation.n_gpus_per_node": TEACHER_ENGINE,
    "distillation.nnodes": TEACHER_ENGINE,
    "distillation.teacher_models.teacher_model": TEACHER_ENGINE,
    "distillation.teacher_models": SEVERAL_TEACHERS,
    "distillation.teacher_key": SEVERAL_TEACHERS,
}
_TRAINER = {
    "trainer.balance_batch": always_on("tokens are balanced over ranks and micro-batches"),
    "trainer.log_val_generations": ignored("trackers get numbers; `verl generate` writes responses to a file"),
    "trainer.max_critic_ckpt_to_keep": ignored("a checkpoint holds actor and critic; set trainer.max_ckpts_to_keep"),
    "trainer.default_hdfs_dir": needs("checkpoints on HDFS"),
    f"{_A}.profiler": PROFILER,
    f"{_R}.profiler": PROFILER,
    f"{_R}.profiler.enable": ENGINE_PROFILER,
    f"{_REF}.profiler": PROFILED,
    **{f"{section}.profiler.tool_config.npu": NPU for section in (_A, _R, _REF)},
    "global_profiler": PROFILER,
    "hydra": ignored("verl reads settings with Hydra but does not run under it"),
}
_STRATEGIES = {
    "veomni": "VeOmni",
    **dict.fromkeys(("automodel", "torchtitan", "fsdp_turbo", "mindspeed"), "other training engines than FSDP2"),
}

TRAIN_RULES = Rules(
    {**_ENGINES, **_SHARDING, **_MODEL, **_ROLLOUT, **_DATA, **_REWARD, **_DISTILLATION, **_TRAINER},
    {
        "trainer.device": {"npu": "Ascend NPUs"},
        "trainer.profile.tools": {"npu": "Ascend NPUs"},
        f"{_A}.strategy": _STRATEGIES,
        "critic.strategy": _STRATEGIES,
        _A: dict.fromkeys(("mlite_actor", "megatron_actor"), "Megatron-Core"),
        f"{_R}.name": {"trtllm": "TensorRT-LLM"},
        f"{_A}.policy_loss.loss_mode": dict.fromkeys(("dppo_tv", "dppo_kl"), "DPPO"),
    },
    {_A: ("dp_actor",), _REF: ("dp_ref",), "critic": ("dp_critic",), _M: ("hf_model",)},
)
