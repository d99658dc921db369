"""The answers of `verl train` to keys of launch scripts that are not settings here."""

from __future__ import annotations

from verl.config.legacy.key_rules import Rules, always_on, ignored, missing, switch

ONE, OFF = ("1",), ("false", "0", "none", "disabled")

MEGATRON = missing("Megatron-Core")
VEOMNI = missing("VeOmni")
NPU = missing("Ascend NPUs")
IMAGES = missing("images and videos")
MTP = missing("multi-token prediction", *OFF)
ASYNC = missing("asynchronous training")
SEVERAL_TEACHERS = missing("several teachers")
CUSTOM_DATASET = missing("custom data set classes")

NO_PADDING = always_on("batches are packed without padding; results do not depend on it")
CHUNKED = always_on("log-probs and entropies are computed in chunks and recomputed in the backward pass")
KERNELS = ignored("choice of kernels; the results are the same")
REDUCE_DTYPE = ignored("gradients are always reduced in float32, which is at least as exact")
PREFETCH = ignored("FSDP2 schedules its communication itself; the results are the same")
ORIG_PARAMS = always_on("FSDP2 keeps the original parameters")
SHARED_MEMORY = ignored("models are read from where they are; copy them to fast storage yourself")
PROFILER = ignored("a profile holds all that trainer.profile.tools records of a step, in the folder of the run")
PROFILED = always_on("it runs in the train workers, which trainer.profile records as a whole")
ENGINE_PROFILER = missing("profiling of engines", *OFF)
EXACT_LENGTHS = ignored("lengths follow data.max_prompt_length and data.max_response_length")
TEACHER_ENGINE = ignored("the teacher runs in the train workers, not in an engine of its own")
DYNAMIC = ignored("log-prob passes are batched as training is (actor_rollout_ref.actor.use_dynamic_bsz)")
BUFFER_DTYPE = ignored("buffers keep the type of the model")
CHECKPOINT_ENGINE = ignored("weights are sent by weight_transport; the results are the same")
CHECKPOINT_STRICT = ignored("checkpoints are always verified and loaded completely")

CHUNK_SIZE = ignored("actor_rollout_ref.model.logprob_chunk_size sets the size of chunks; the results are the same")
BY_ROLE = ignored("what is trained follows from the role of the model")
SEED = ignored("trainer.seed seeds every random choice of a run")
DETERMINISM = missing("determinism of one engine alone", *OFF, instead="trainer.deterministic=true")
PACKED = ignored("batches have no padding")
ENGINE_STRATEGY = missing("other training engines than FSDP2", "fsdp", "fsdp2")
OTHER_ADAPTERS = "other adapters than LoRA with its usual initial values"
CUSTOM_MANAGER = missing("custom reward managers", "register", instead="reward.custom_reward_function.path")
GENERATIVE = "generative reward models"
MODEL_FILES = missing("a model whose parts have different sources")
COMPILED = ignored("actor_rollout_ref.actor.use_torch_compile decides for all models; the results are the same")

_A, _R, _REF, _M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))

SEQUENCES = ignored(f"all models share sequences as the actor does ({_A}.ulysses_sequence_parallel_size)")
_ENGINES = {
    f"{_A}.megatron": MEGATRON,
    f"{_REF}.megatron": MEGATRON,
    "critic.megatron": MEGATRON,
    f"{_A}.engine": MEGATRON,
    f"{_A}.model_engine": missing("Megatron-Core", "fsdp", "fsdp2", "dp"),
    "model_engine": missing("Megatron-Core", "fsdp", "fsdp2", "dp"),
    f"{_A}.optim.lr_decay_steps": MEGATRON,
    f"{_A}.veomni": VEOMNI,
    f"{_REF}.veomni": VEOMNI,
    f"{_R}.engine_kwargs.trtllm": missing("TensorRT-LLM"),
    f"{_R}.moe_tensor_parallel_size": missing("TensorRT-LLM"),
    **{
        f"{section}.{name}": rule
        for section in (_A, "critic")
        for name, rule in {
            "optim.override_optimizer_config": MEGATRON,
            "optim.min_lr": missing("an absolute minimum learning rate", "0", instead=f"{section}.optim.min_lr_ratio"),
            "optim.optimizer_impl": missing(
                "optimizers of other packages", "torch.optim", instead=f"{section}.optim.name"
            ),
            "optim.total_training_steps": ignored("schedules end with the run (trainer.total_training_steps)"),
            "optim.num_cycles": missing("cosine schedules of another length than half a cycle", "0.5"),
            "optim.zero_indexed_step": ignored("schedules count steps from 1: the first step of a warm-up trains too"),
            "checkpoint.strict": CHECKPOINT_STRICT,
            "checkpoint.async_save": missing("checkpoints that are saved during the next step", *OFF),
            "ppo_micro_batch_size": missing(
                "micro-batch sizes of all GPUs together", instead=f"{section}.ppo_micro_batch_size_per_gpu"
            ),
            "data_loader_seed": SEED,
        }.items()
    },
    **{f"{section}.rollout_n": ignored(f"follows {_R}.n") for section in (_A, _REF, "critic")},
    **{
        f"{section}.log_prob_micro_batch_size": missing(
            "micro-batch sizes of all GPUs together", instead=f"{section}.log_prob_micro_batch_size_per_gpu"
        )
        for section in (_R, _REF)
    },
    "trainer.use_legacy_worker_impl": ignored("there is one implementation of workers"),
    "async_training": ASYNC,
    f"{_R}.total_rollout_steps": ASYNC,
    "data.gen_batch_size": missing("batches of generation that differ from data.train_batch_size"),
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
            "entropy_from_logits_chunk_size": CHUNK_SIZE,
            "seed": SEED,
            "full_determinism": DETERMINISM,
            "use_torch_compile": COMPILED,
            "pad_to_length": PACKED,
            "pad_to_length_bucket": PACKED,
            "forward_only": BY_ROLE,
            "strategy": ENGINE_STRATEGY,
            "turbo_config": ignored("only the engine fsdp_turbo reads it, which is not supported yet"),
            **{name.removeprefix("."): rule for name, rule in switch(".qat", "quantization-aware training").items()},
        }.items()
    },
    f"{_REF}.strategy": missing("another engine for the reference than for the actor", "fsdp", "fsdp2"),
    f"{_REF}.use_torch_compile": ignored("the reference is compiled as the actor is"),
    f"{_REF}.fsdp_config.model_dtype": ignored(
        f"the reference is stored as the actor is ({_A}.fsdp_config.model_dtype)"
    ),
    f"{_REF}.fsdp_config.dtype": ignored(f"the reference computes as the actor does ({_A}.fsdp_config.dtype)"),
    f"{_REF}.router_replay": ignored(f"the reference routes by itself; see {_A}.router_replay.mode"),
    f"{_REF}.fsdp_config.fsdp_size": ignored(f"the reference is sharded as the actor is ({_A}.fsdp_config.fsdp_size)"),
    f"{_REF}.fsdp_config.expert_parallel_size": ignored("the reference follows the actor"),
    f"{_REF}.fsdp_config.optimizer_offload": ignored("the reference has no optimizer"),
    f"{_REF}.fsdp_config.reshard_after_forward": ignored("the reference follows the actor"),
    f"{_REF}.fsdp_config.offload_policy": ignored(f"use {_REF}.fsdp_config.param_offload to save memory"),
    **{f"{section}.log_prob_use_dynamic_bsz": DYNAMIC for section in (_R, _REF)},
    **{f"{section}.entropy_checkpointing": CHUNKED for section in (_A, _REF)},
    **{f"{section}.entropy_from_logits_with_chunking": CHUNKED for section in (_A, _REF)},
    **{f"{section}.entropy_from_logits_chunk_size": CHUNK_SIZE for section in (_A, _REF)},
    **{f"{section}.pad_to_length": PACKED for section in (_A, _REF)},
    f"{_A}.use_remove_padding": NO_PADDING,
    f"{_A}.use_fused_kernels": always_on("logits are never stored as a whole"),
    f"{_A}.calculate_entropy": always_on("the entropy is a metric of every step"),
    f"{_A}.freeze_vision_tower": missing("images and videos", *OFF),
    f"{_A}.policy_loss.dro_beta": missing("DRO"),
    f"{_A}.router_replay.record_file": missing("routing replay from files"),
    f"{_A}.router_replay.replay_file": missing("routing replay from files"),
    **switch(f"{_A}.qat", "quantization-aware training"),
    f"{_A}.calculate_sum_pi_squared": ignored("computed if algorithm.adv_estimator needs it"),
    "actor_rollout_ref.nccl_timeout": ignored("trainer.deadlines sets the time limits of workers"),
}
_ADAPTER = {
    "type": missing(OTHER_ADAPTERS, "lora"),
    "dropout": missing("dropout in adapters", "0", "0.0"),
    "dropout_position": ignored("adapters have no dropout"),
    "exclude_modules": missing("adapters that exclude modules", "[]", instead=f"{_A}.peft.target_modules"),
    "lora_A_init_method": missing(OTHER_ADAPTERS, "kaiming"),
    "lora_B_init_method": missing(OTHER_ADAPTERS, "zero"),
    "a2a_experimental": missing("Megatron-Core", *OFF),
    "dtype": missing("another type for adapters than for their model"),
    **dict.fromkeys(
        ("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
        ignored("an adapter freezes all of its model"),
    ),
}
_MODEL = {
    f"{section}.{name}": rule
    for section in (_M, "critic.model")
    for name, rule in {
        "use_fused_kernels": always_on("logits are never stored as a whole"),
        "fused_kernel_options": KERNELS,
        "use_liger": KERNELS,
        "use_shm": SHARED_MEMORY,
        "enable_activation_offload": missing("offloading of activations", *OFF),
        "exclude_modules": missing("adapters that exclude modules", instead=f"{_A}.peft.target_modules"),
        "mtp": MTP,
        "override_config": missing("changes of a model's configuration", "{}"),
        "hf_config_path": MODEL_FILES,
        "custom_chat_template": missing("chat templates that are not in the tokenizer's files"),
        "tiled_mlp.num_shards": ignored(f"{section}.tiled_mlp.enabled turns on tiled MLPs"),
        "tiled_mlp.enabled": missing("tiled MLPs", *OFF),
        **{f"lora.{key}": answer for key, answer in _ADAPTER.items()},
    }.items()
}
_CRITIC = {
    "critic.model.tokenizer_path": ignored("the critic reads the tokens of the policy"),
    "critic.model.trust_remote_code": ignored(f"{_M}.trust_remote_code decides for all models"),
    "critic.model.external_lib": missing("modules for the critic alone", instead=f"{_M}.external_lib"),
    "critic.model.lora_adapter_path": missing("a critic that starts from an adapter"),
    "critic.model.lora.adapter_path": missing("a critic that starts from an adapter"),
    "critic.model.lora.merge": ignored("a critic generates nothing"),
    "critic.forward_max_token_len_per_gpu": ignored("passes without gradient are batched as training is"),
    "critic.forward_micro_batch_size_per_gpu": ignored("passes without gradient are batched as training is"),
    "critic.forward_micro_batch_size": ignored("passes without gradient are batched as training is"),
    "critic.shuffle": ignored(f"the critic trains on the mini-batches of the actor ({_A}.shuffle)"),
    "critic.loss_scale_factor": missing("a loss scale of the critic", instead="critic.loss_agg_mode"),
    "critic.profiler": PROFILED,
}
_ROLLOUT = {
    f"{_R}.checkpoint_engine": CHECKPOINT_ENGINE,
    f"{_R}.multi_stage_wake_up": always_on("engines wake for the weights first, then for the cache"),
    f"{_R}.layered_summon": always_on("weights are gathered one at a time"),
    f"{_R}.mode": always_on("engines answer requests one by one, as they finish"),
    f"{_R}.full_determinism": DETERMINISM,
    f"{_R}.seed": SEED,
    f"{_R}.logprobs_mode": missing("log-probs of other distributions than the sampled one", "processed_logprobs"),
    f"{_R}.over_sample_rate": missing("more prompts than a step uses", "0"),
    f"{_R}.multi_turn.num_repeat_rollouts": missing("repeated turns"),
    f"{_R}.agent.num_workers": ignored("one episode worker serves several train workers; the results are the same"),
    f"{_R}.agent.agent_loop_config_path": missing(
        "agents that a YAML file lists", instead=f"{_R}.agent.default_agent_loop"
    ),
    f"{_R}.agent.custom_async_server": missing("custom rollout servers", instead=f"{_R}.name"),
    f"{_R}.agent.custom_async_server.name": ignored("custom_async_server.path names the file"),
    f"{_R}.trace": ignored(f"{_R}.trace.backend turns on tracing of episodes, which is not supported yet"),
    f"{_R}.trace.backend": missing("tracing of episodes"),
    f"{_R}.moe_load_balance_metrics_interval": missing("metrics of the load of experts", "0"),
    **switch(f"{_R}.prometheus", "metrics of one engine alone", instead="trainer.prometheus.enable"),
    f"{_R}.quantization_config_file": missing("quantization by a configuration file", instead=f"{_R}.quantization"),
    f"{_R}.mtp": MTP,
    f"{_R}.qat": missing("quantization-aware training"),
    **switch(f"{_R}.disaggregation", "separate engines for prefill and decoding", "enabled"),
    f"{_R}.do_sample": missing("greedy responses in training", "true", instead=f"{_R}.temperature"),
    f"{_R}.ignore_eos": missing("responses that go on after their end", *OFF),
    f"{_R}.skip_tokenizer_init": always_on("engines receive and return token ids"),
    f"{_R}.enable_rollout_routing_replay": missing(
        "a second switch for routing replay", "false", instead=f"{_A}.router_replay.mode=R3"
    ),
    "reward.reward_model.rollout.prompt_length": EXACT_LENGTHS,
    "reward.reward_model.rollout.response_length": EXACT_LENGTHS,
}
_PARALLEL = ("expert_parallel_size", "pipeline_model_parallel_size")
_JUDGE = "use a judge as reward function (docs/rewards.md)"
_DATA = {
    "data.image_key": IMAGES,
    "data.video_key": IMAGES,
    "data.image_patch_size": IMAGES,
    "data.return_multi_modal_inputs": missing("images and videos", *OFF),
    "data.custom_cls": CUSTOM_DATASET,
    "data.return_raw_chat": always_on("prompts stay chat messages until they are rendered"),
    "data.trust_remote_code": ignored(f"{_M}.trust_remote_code decides for model and tokenizer"),
    "data.dataloader_num_workers": ignored("episode workers read prompts when they need them"),
    "data.output_path": ignored("only `verl generate` writes responses; there it is --output"),
    "data.use_shm": ignored("data are read from where they are; the results are the same"),
    **{
        f"data.{name}": ignored(f"prompts are rendered with the tools of the episodes ({_R}.multi_turn.{name})")
        for name in ("tool_config_path", "function_tool_path")
    },
    "data.return_full_prompt": ignored("no part of a run reads it"),
    "data.validation_shuffle": missing("shuffled validation data", *OFF),
    "data.audio_key": missing("audio"),
    "data.mm_processor_kwargs": missing("images and videos", "{}"),
    "data.reward_fn_key": missing("another column of data sources", "data_source"),
}
_RM, _CORRECTION = "reward.reward_model", "algorithm.rollout_correction"
_REWARD = {
    f"{_RM}.enable_resource_pool": missing("GPUs of its own for the reward model", *OFF),
    f"{_RM}.n_gpus_per_node": ignored(f"{_RM}.replicas sets the number of reward models"),
    f"{_RM}.nnodes": ignored(f"{_RM}.replicas sets the number of reward models"),
    **dict.fromkeys((f"{_RM}.reward_loop_source", f"{_RM}.reward_loop_module_path"), CUSTOM_MANAGER),
    f"{_RM}.reward_loop_class_name": CUSTOM_MANAGER,
    "reward.reward_manager.source": CUSTOM_MANAGER,
    "reward.reward_manager.module": ignored("reward.reward_manager.source turns on custom reward managers"),
    "reward.reward_manager.module.path": CUSTOM_MANAGER,
    f"{_RM}.model.external_lib": missing("modules for the reward model alone", instead=f"{_M}.external_lib"),
    f"{_RM}.model.trust_remote_code": ignored(f"{_M}.trust_remote_code decides for all models"),
    f"{_RM}.rollout": ignored("affects the speed and memory of the reward model's engine, which verl tunes"),
    **{f"{_RM}.rollout.{name}": missing("parallelism of this kind in reward models", *ONE) for name in _PARALLEL},
    f"{_RM}.rollout.data_parallel_size": missing("engines with replicas", *ONE, instead=f"{_RM}.replicas"),
    **{
        f"{_RM}.rollout.{name}": missing(GENERATIVE, *harmless, instead=_JUDGE)
        for name, harmless in {
            "temperature": ("1", "1.0"),
            "top_k": ("-1",),
            "top_p": ("1", "1.0"),
            "n": ONE,
            "do_sample": ("true",),
            "ignore_eos": OFF,
        }.items()
    },
    f"{_RM}.rollout.dtype": ignored("the reward model computes in the type of its device, bfloat16 on GPUs"),
    f"{_RM}.rollout.full_determinism": DETERMINISM,
    f"{_RM}.rollout.seed": SEED,
    f"{_RM}.rollout.engine_kwargs": missing("engine arguments of the reward model", "{}"),
    f"{_RM}.rollout.limit_images": IMAGES,
    f"{_RM}.rollout.quantization": missing("quantized reward models"),
    f"{_RM}.rollout.quantization_config_file": missing("quantized reward models"),
    f"{_RM}.rollout.mtp": MTP,
    **switch(f"{_RM}.rollout.disaggregation", "separate engines for prefill and decoding", "enabled"),
    **dict.fromkeys(
        ("sandbox_fusion.max_concurrent", "reward.sandbox_fusion.max_concurrent"),
        ignored("reward.num_workers limits how many programs run at once"),
    ),
    "reward.reward_kwargs.max_resp_len": EXACT_LENGTHS,
    "reward.reward_model.reward_kwargs.max_resp_len": EXACT_LENGTHS,
    "reward.overlong_buffer.log": always_on("the penalty is a metric"),
    "algorithm.filter_groups.max_inflight_gen_batches": missing("several batches in generation at once", *ONE),
    "algorithm.use_pf_ppo": missing("PF-PPO", *OFF),
    "algorithm.pf_ppo": ignored("algorithm.use_pf_ppo turns on PF-PPO, which is not supported yet"),
    f"{_CORRECTION}.loss_type": missing("the REINFORCE loss of rollout correction", "ppo_clip"),
}
_DISTILLATION = {
    "distillation.distillation_loss.loss_mode": missing(
        "distillation by another estimate of the KL", "k1", "kl", "full", instead="distillation.mode"
    ),
    "distillation.distillation_loss.topk": ignored("the KL is of the sampled token, or exact over the vocabulary"),
    "distillation.distillation_loss.policy_loss_mode": missing(
        "another policy loss for the teacher's reward", "vanilla", instead=f"{_A}.policy_loss.loss_mode"
    ),
    **{
        f"distillation.distillation_loss.{name}": missing(
            "another clip ratio for the teacher's reward", "0.2", instead=f"{_A}.{name}"
        )
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    },
    "distillation.n_gpus_per_node": TEACHER_ENGINE,
    "distillation.nnodes": TEACHER_ENGINE,
    "distillation.teacher_models.teacher_model": TEACHER_ENGINE,
    "distillation.teacher_models": SEVERAL_TEACHERS,
    "distillation.teacher_key": SEVERAL_TEACHERS,
}
_GENERATE = "use `verl generate` with `verl eval`"
_TRAINER = {
    "trainer.balance_batch": always_on("tokens are balanced over ranks and micro-batches"),
    "trainer.log_val_generations": ignored("trackers get numbers; `verl generate` writes responses to a file"),
    "trainer.max_critic_ckpt_to_keep": ignored("a checkpoint holds actor and critic; set trainer.max_ckpts_to_keep"),
    "trainer.default_hdfs_dir": missing("checkpoints on HDFS"),
    "trainer.rollout_data_dir": missing("files with the responses of training"),
    "trainer.validation_data_dir": missing("files with the responses of validation", instead=_GENERATE),
    "trainer.esi_redundant_time": missing("instances that announce their end", "0", instead="trainer.max_hours"),
    "trainer.val_only": missing("training runs that only validate", *OFF, instead=_GENERATE),
    "trainer.del_local_ckpt_after_load": missing(
        "deleting a checkpoint after a resume", *OFF, instead="trainer.max_ckpts_to_keep"
    ),
    "trainer.ray_wait_register_center_timeout": ignored("the time limits of trainer apply"),
    "trainer.use_v1": ignored("there is one trainer"),
    "trainer.v1": ignored("trainer.v1.trainer_mode turns on asynchronous training, which is not supported yet"),
    "trainer.v1.trainer_mode": missing("asynchronous training", "sync"),
    "trainer.v1.sampler.custom_sampler.path": missing("custom samplers of finished episodes", instead="data.sampler"),
    "trainer.v1.sampler.sync_refill_failed_groups": missing("new prompts in place of failed groups", *OFF),
    "transfer_queue": ignored("samples are kept in Ray's object store; the results are the same"),
    **{
        key: rule
        for name in ("rollout", "rollout_tq", "async_rollout")
        for key, rule in switch(f"skip.{name}", "responses from a file").items()
    },
    f"{_A}.profiler": PROFILER,
    f"{_R}.profiler": PROFILER,
    f"{_R}.profiler.enable": ENGINE_PROFILER,
    f"{_REF}.profiler": PROFILED,
    **{f"{section}.profiler.tool_config.npu": NPU for section in (_A, _R, _REF, "critic")},
    "global_profiler": PROFILER,
    "hydra": ignored("verl reads settings with Hydra but does not run under it"),
}
_STRATEGIES = {
    "veomni": "VeOmni",
    **dict.fromkeys(("automodel", "torchtitan", "fsdp_turbo", "mindspeed"), "other training engines than FSDP2"),
}

TRAIN_RULES = Rules(
    {**_ENGINES, **_SHARDING, **_MODEL, **_CRITIC, **_ROLLOUT, **_DATA, **_REWARD, **_DISTILLATION, **_TRAINER},
    {
        "trainer.device": {"npu": "Ascend NPUs"},
        "trainer.profile.tools": {"npu": "Ascend NPUs"},
        f"{_A}.strategy": _STRATEGIES,
        "critic.strategy": _STRATEGIES,
        _A: dict.fromkeys(("mlite_actor", "megatron_actor"), "Megatron-Core"),
        f"{_R}.name": {"trtllm": "TensorRT-LLM"},
        f"{_CORRECTION}.rollout_rs": {".*token_k1.*|.*,.*": "rejection by k1, or by several estimates at once"},
        f"{_CORRECTION}.rollout_rs_threshold": {".*[_,].*": "several thresholds of rejection in one setting"},
        f"{_A}.policy_loss.loss_mode": dict.fromkeys(("dppo_tv", "dppo_kl"), "DPPO"),
    },
    {_A: ("dp_actor",), _REF: ("dp_ref",), "critic": ("dp_critic",), _M: ("hf_model",)},
)
