"""Mistakes in settings: what a user writes, the place that the answer names, and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GOOD = (
    *("data.train_files=train.parquet", "model.path=model", "rollout.n=4", "trainer.n_gpus_per_node=1"),
    *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "data.max_prompt_length=64"),
    *("data.max_response_length=64", "trainer.save_freq=-1", "rollout.name=hf"),
)
"""Settings of a run without mistakes, in the folder that `_mistaken_files.py` writes."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """What a user writes, in addition to `GOOD`; the place and the fix in the answer to it.

    The run would start if not `stops`, and the fix is then only a proposal.
    """

    written: str
    place: str
    fix: str
    stops: bool = True
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Return the command line, in which what is written replaces what `GOOD` says."""
        given = self.written.split()
        keys = {setting.partition("=")[0] for setting in given}
        return [*self.options, *(setting for setting in GOOD if setting.partition("=")[0] not in keys), *given]


A, OPTIM, R = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout"

MISSPELLED = (
    Mistake("trainer.sed=3", "trainer.sed", "Set trainer.seed=3"),
    Mistake("data.train_bach_size=8", "data.train_bach_size", "Set data.train_batch_size=8"),
    Mistake("data.max_promt_length=8", "data.max_promt_length", "Set data.max_prompt_length=8"),
    Mistake("data.trian_files=a.parquet", "data.trian_files", "Set data.train_files=a.parquet"),
    Mistake("algorithm.adv_estimater=rloo", "algorithm.adv_estimater", "Set algorithm.adv_estimator=rloo"),
    Mistake("trainer.total_epoch=2", "trainer.total_epoch", "Set trainer.total_epochs=2"),
    Mistake("actor.optim.lrr=1e-6", f"{OPTIM}.lrr", f"Set {OPTIM}.lr=1e-06"),
    Mistake("actor.clip_ration=0.2", f"{A}.clip_ration", f"Set {A}.clip_ratio=0.2"),
    Mistake("rollout.temprature=0.7", f"{R}.temprature", f"Set {R}.temperature=0.7"),
    Mistake("rollout.gpu_memory_utilisation=0.4", f"{R}.gpu_memory", f"Set {R}.gpu_memory_utilization=0.4"),
    Mistake(
        "reward.custom_reward_functon.path=r.py",
        "reward.custom_reward_functon.path",
        "Set reward.custom_reward_function.path=r.py",
    ),
    Mistake("~trainer.seeds", "trainer.seeds", "did you mean trainer.seed?"),
    Mistake("+trainer.foo=1", "trainer.foo", "settings of trainer: nnodes"),
    Mistake("nonsense.key=1", "nonsense.key", "run `verl config` to list all settings"),
    Mistake("rollout.name=vllm rollout.engine_kwargs.vllm.block_sise=16", "vllm.block_sise", "did you mean"),
)
"""Keys with a typo."""

OTHER_PROGRAMS = (
    Mistake("data.batch_size=8", "data.batch_size", "Set data.train_batch_size=8"),
    Mistake("actor.learning_rate=1e-6", f"{A}.learning_rate", f"Set {OPTIM}.lr=1e-06"),
    Mistake("trainer.num_train_epochs=2", "trainer.num_train_epochs", "Set trainer.total_epochs=2"),
    Mistake("trainer.max_steps=20", "trainer.max_steps", "Set trainer.total_training_steps=20"),
    Mistake("trainer.output_dir=out", "trainer.output_dir", "Set trainer.default_local_dir=out"),
    Mistake("rollout.num_generations=8", f"{R}.num_generations", f"Set {R}.n=8"),
    Mistake("rollout.max_new_tokens=32", f"{R}.max_new_tokens", "Set data.max_response_length=32"),
    Mistake("lora_rank=8", "lora_rank", f"Set {A}.peft.lora_rank=8"),
    Mistake("data.messages_key=messages", "data.messages_key", "remove it"),
    Mistake("--lr 1e-5", "--lr", "set optim.lr="),
    Mistake("--num-epochs 3", "--num-epochs", "set trainer.total_epochs="),
    Mistake("--output_dir=out", "--output_dir", "set trainer.default_local_dir="),
    Mistake("--model_name_or_path=org/model", "--model_name_or_path", "set model.path="),
    Mistake("--resume", "--resume", "rerun the command"),
    Mistake("--seed 4", "--seed", "set trainer.seed="),
    Mistake("--trainer.seed=3", "--trainer.seed=3", "write trainer.seed=3"),
    Mistake("--unheard-of", "--unheard-of", "write settings as key=value"),
    Mistake("--config-nam mine", "--config-nam", "use --config-name"),
)
"""Names and options of other trainers."""

PUBLIC_KEYS = (
    Mistake("actor.megatron.virtual_pipeline_model_parallel_size=2", f"{A}.megatron.virtual", "parallel_size=1"),
    Mistake("critic.megatron.use_dist_checkpointing=true", "critic.megatron.use_dist", "set critic.megatron.use_dist"),
    Mistake("actor.ppo_micro_batch_size=4", f"{A}.ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu instead"),
    Mistake("actor.optim.optimizer_impl=bitsandbytes.optim", f"{OPTIM}.optimizer_impl", f"set {OPTIM}.name instead"),
    Mistake("actor.optim.num_cycles=2", f"{OPTIM}.num_cycles", f"{OPTIM}.num_cycles=0.5"),
    Mistake("actor.fsdp_config.full_determinism=true", f"{A}.fsdp_config.full", "trainer.deterministic=true"),
    Mistake("actor.fsdp_config.qat.enable=true", f"{A}.fsdp_config.qat.enable", "remove it"),
    Mistake("model.tiled_mlp.enabled=true", "actor_rollout_ref.model.tiled_mlp.enabled", "remove it"),
    Mistake("model.enable_activation_offload=true", "model.enable_activation_offload", "remove it"),
    Mistake("actor.optim.exp_avg_dtype=fp8", f"{OPTIM}.exp_avg_dtype", f"settings of {OPTIM}: "),
    Mistake("rollout.mtp.enable=true", f"{R}.mtp", "remove it"),
    Mistake("rollout.agent.agent_loop_config_path=a.yaml", "agent.agent_loop_config_path", "default_agent_loop"),
    Mistake("rollout.profiler.enable=true", f"{R}.profiler", "remove it"),
    Mistake("data.validation_shuffle=true", "data.validation_shuffle", "data.validation_shuffle=false"),
    Mistake("data.gen_batch_size=64", "data.gen_batch_size", "remove it"),
    Mistake("data.image_key=pictures", "data.image_key", "remove it"),
    Mistake("critic.checkpoint.async_save=true", "critic.checkpoint.async_save", "critic.checkpoint.async_save=false"),
    Mistake("critic.model.lora.adapter_path=a", "critic.model.lora.adapter_path", "remove it"),
    Mistake("reward.reward_model.rollout.top_k=7", "reward_model.rollout.top_k", "use a judge as reward function"),
    Mistake("trainer.v1.sampler.custom_sampler.path=a.py", "custom_sampler.path", "set data.sampler instead"),
    Mistake("critic.optim.lr_warmup_init=1e-7", "critic.optim.lr_warmup_init", "settings of critic.optim: "),
    Mistake("actor.optim.muon_tp_mode=blockwise", f"{OPTIM}.muon_tp_mode", f"settings of {OPTIM}: "),
    Mistake("trainer.device=npu", "trainer.device", "remove it"),
)
"""Keys of the public configuration whose features do not exist here."""

VALUES = (
    Mistake("actor.optim.lr=high", f"{OPTIM}.lr", f"set {OPTIM}.lr=1e-06"),
    Mistake("actor.optim.lr=-1", f"{OPTIM}.lr", f"set {OPTIM}.lr=1e-06"),
    Mistake("actor.optim.name=sgd", f"{OPTIM}.name", f"set {OPTIM}.name=adamw"),
    Mistake("actor.optim=adam", OPTIM, f"set {OPTIM}.name="),
    Mistake("actor.optim.betas=[0.9]", f"{OPTIM}.betas", f"set {OPTIM}.betas=[0.9,0.999]"),
    Mistake("actor.optim.lr_warmup_steps=-2", f"{OPTIM}.lr_warmup_steps", f"set {OPTIM}.lr_warmup_steps=null"),
    Mistake("rollout.n=0", f"{R}.n", f"set {R}.n=1"),
    Mistake("rollout.temperature=-1", f"{R}.temperature", f"set {R}.temperature=1.0"),
    Mistake("rollout.temperature=0", f"{R}.temperature", f"set {R}.temperature=1.0"),
    Mistake("rollout.top_p=1.5", f"{R}.top_p", f"set {R}.top_p=1.0"),
    Mistake("rollout.name=vlm", f"{R}.name", f"set {R}.name=vllm"),
    Mistake("rollout.name=sglang", f"{R}.name", f"{R}.python to its interpreter"),
    Mistake("rollout.gpu_memory_utilization=90", f"{R}.gpu_memory_utilization", f"set {R}.gpu_memory_utilization=0.5"),
    Mistake("rollout.max_model_len=10", f"{R}.max_model_len", f"set {R}.max_model_len=128"),
    Mistake("rollout.name=vllm rollout.tensor_model_parallel_size=3", f"{R}.tensor_model", "parallel_size=1"),
    Mistake("data.max_prompt_length=0", "data.max_prompt_length", "set data.max_prompt_length=512"),
    Mistake("data.max_response_length=1.5", "data.max_response_length", "set data.max_response_length=512"),
    Mistake("data.truncation=cut", "data.truncation", "set data.truncation=error"),
    Mistake("data.shuffle=maybe", "data.shuffle", "set data.shuffle=true"),
    Mistake("data.train_weights=[0.5,0.5]", "data.train_weights", "give one per entry"),
    Mistake("actor.ppo_micro_batch_size_per_gpu=0", f"{A}.ppo_micro_batch_size_per_gpu", "_per_gpu=8"),
    Mistake("actor.clip_ratio=-0.2", f"{A}.clip_ratio", f"set {A}.clip_ratio=0.2"),
    Mistake("actor.grad_clip=0", f"{A}.grad_clip", f"set {A}.grad_clip=1.0"),
    Mistake("actor.strategy=deepspeed", f"{A}.strategy", f"set {A}.strategy=fsdp2"),
    Mistake("actor.loss_agg_mode=mean", f"{A}.loss_agg_mode", f"set {A}.loss_agg_mode=token-mean"),
    Mistake("actor.policy_loss.loss_mode=dapo", f"{A}.policy_loss.loss_mode", "loss_mode=vanilla"),
    Mistake("actor.entropy_coeff=x", f"{A}.entropy_coeff", f"set {A}.entropy_coeff=0.0"),
    Mistake("actor.peft.lora_rank=-8", f"{A}.peft.lora_rank", f"set {A}.peft.lora_rank=0"),
    Mistake("actor.fsdp_config.model_dtype=fp16", f"{A}.fsdp_config.model_dtype", "model_dtype=float32"),
    Mistake("actor.ulysses_sequence_parallel_size=3", f"{A}.ulysses", "sequence_parallel_size=1"),
    Mistake("algorithm.adv_estimator=grop", "algorithm.adv_estimator", "set algorithm.adv_estimator=grpo"),
    Mistake("algorithm.adv_estimator=ppo", "algorithm.adv_estimator", "set algorithm.adv_estimator=gae"),
    Mistake("algorithm.gamma=2", "algorithm.gamma", "set algorithm.gamma=1.0"),
    Mistake("trainer.logger=wandbb", "trainer.logger", "set trainer.logger=[console]"),
    Mistake("trainer.total_epochs=0", "trainer.total_epochs", "set trainer.total_epochs=1"),
    Mistake("trainer.save_freq=0", "trainer.save_freq", "set trainer.save_freq=null"),
    Mistake("trainer.test_freq=5", "trainer.test_freq", "set data.val_files=test.parquet"),
    Mistake("trainer.device=gpu", "trainer.device", "set trainer.device=cuda"),
    Mistake("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node", "set trainer.n_gpus_per_node=8"),
    Mistake("trainer.resume_mode=path", "trainer.resume_mode", "set trainer.resume_from_path="),
    Mistake("trainer.resume_mode=always", "trainer.resume_mode", "set trainer.resume_mode=auto"),
    Mistake("trainer.seed=-1", "trainer.seed", "set trainer.seed=1"),
    Mistake("trainer.seed=1,2", "trainer.seed", "add -m to run each"),
    Mistake("trainer.seed=", "trainer.seed", "set trainer.seed=1"),
    Mistake("trainer.max_staleness=-1", "trainer.max_staleness", "set trainer.max_staleness=0"),
    Mistake("reward.reward_manager.name=dappo", "reward.reward_manager.name", "set reward.reward_manager.name=dapo"),
    Mistake("reward.deadline_s=0", "reward.deadline_s", "set reward.deadline_s=60.0"),
    Mistake("reward.reward_model.enable=true", "reward.reward_model.enable", "set reward.reward_model.model_path="),
    Mistake("distillation.enable=true", "distillation.enable", "set distillation.teacher.path="),
    Mistake("model.external_lib=no_such_module", "actor_rollout_ref.model.external_lib", "give the name of a module"),
    Mistake("actor.optim.lr=${trainer.foo}", f"{OPTIM}.lr", "write its value"),
    Mistake("trainer.project_name={a", "trainer.project_name={a", "quote special characters"),
    Mistake("trainer.seed:3", "trainer.seed:3", "write settings as key=value"),
    Mistake("trainer", "trainer", "write settings as key=value"),
    Mistake("-m trainer.seed=1,two", "trainer.seed", "set trainer.seed=1"),
    Mistake("--config-name nothing", "--config-name", "available: broken, mine"),
    Mistake("--config-name mine", "trainer.sed", "Set trainer.seed=5"),
    Mistake("--config-name broken", "--config-name", "fix the file"),
    Mistake("--config-path here", "--config-path", "add --config-name NAME"),
)
"""Values that are not possible, alone or with others."""

PROBABLY_WRONG = (
    Mistake("actor.optim.lr=1e3", f"{OPTIM}.lr", f"set {OPTIM}.lr=1e-6, for example", stops=False),
    Mistake("rollout.n=1", f"{R}.n", f"set {R}.n=8", stops=False),
    Mistake("actor.kl_loss_coef=0.01", f"{A}.kl_loss_coef", "remove it", stops=False),
    Mistake("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.kl_coef", "set it to true", stops=False),
    Mistake("data.val_batch_size=8", "data.val_batch_size", "remove it", stops=False),
    Mistake("critic.optim.lr=1e-5", "critic.optim.lr", "remove it", stops=False),
    Mistake("reward.num_workers=4", "reward.num_workers", "remove it", stops=False),
    Mistake("rollout.agent.default_agent_loop=mine", f"{R}.agent.default_agent_loop", "remove it", stops=False),
    Mistake("actor.ppo_mini_batch_size=20", f"{A}.ppo_mini_batch_size", "ppo_mini_batch_size=8", stops=False),
)
"""Settings with which a run starts, and probably does not do what was wanted."""

SETTINGS = (*MISSPELLED, *OTHER_PROGRAMS, *PUBLIC_KEYS, *VALUES, *PROBABLY_WRONG)


def write_yaml(folder: Path) -> None:
    """Write the YAML files that the table names."""
    (folder / "mine.yaml").write_text("trainer:\n  sed: 5\n")
    (folder / "broken.yaml").write_text("trainer:\n  seed: [1\n")
