"""Converts the settings of a run to those of its workers, engines and planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.cluster.hangs.pending_calls import Timeouts
from verl.config.batch_sizes import (
    count_engine_devices,
    count_policy_steps,
    count_sequence_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    uses_dynamic_batches,
)
from verl.config.features import (
    compute_dtype,
    frees_engine_memory,
    get_quantization,
    may_pause_requests,
    prime_shares_reference,
    resolve_dtype,
    rollout_dtype,
    saves_hf,
    scores_responses,
    syncs_adapter_only,
    uses_critic,
    uses_policy_as_reference,
    uses_reference,
    uses_reward_function,
)
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema.actor import ActorConfig, OptimConfig, PeftConfig, RefConfig
from verl.config.schema.critic import CriticConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.root import Config
from verl.config.schema.sft import SftConfig, SftModelConfig
from verl.config.train_engines import get_train_engine
from verl.data.micro_batches import MicroBatchLimit
from verl.data.plan import Planner
from verl.errors import ConfigError
from verl.memory_plan.out_of_memory import rl_memory_advice
from verl.rewards.settings import RewardModelSettings
from verl.rollout.settings import RolloutEngineSettings, assign_cores
from verl.trainer.build.algorithm_settings import algorithm_settings
from verl.trainer.build.reward_settings import reward_components, reward_function_settings
from verl.training.registry import get_settings_class
from verl.training.settings import EngineSettings, LoraSettings, Schedule
from verl.weights.probe import TOLERANCES
from verl.workers.train_settings import TrainSettings

if TYPE_CHECKING:
    from verl.workers.episodes import DatasetSettings, EpisodeSettings


def timeouts(config: Config | SftConfig) -> Timeouts:
    """Return how long one process waits for another; forever if all run in one process."""
    if config.trainer.local:
        return Timeouts.unlimited()
    limits = Timeouts.from_config(config.trainer.deadlines)
    if isinstance(config, Config) and may_pause_requests(config):  # while the model is trained and its weights are sent
        paused_s = 2 * (limits.train.seconds + limits.weights.seconds)
        limits = replace(limits, generation=limits.generation._replace(seconds=limits.generation.seconds + paused_s))
    return limits


def train_settings(config: Config, total_steps: int, device: str) -> TrainSettings:
    """Return the models of a train worker: the policy, and those that its algorithm needs."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    critic, prime = config.critic, config.reward.prime
    policy_steps = count_policy_steps(config, total_steps)
    if not policy_steps:
        warmup = config.trainer.critic_warmup
        raise ConfigError([f"trainer.critic_warmup: {warmup} must be below the {total_steps} steps of the run"])
    trained, frozen = _policy_settings(config, device)
    has_reference = uses_reference(config) and not uses_policy_as_reference(config)
    prime_path = prime.model_path or model.path
    prime_model = replace(
        trained,
        model_path=prime_path,
        role="process",
        lora=None,
        optimizer=actor.optim.name,
        schedule=Schedule(prime.lr),
        weight_decay=0.0,
        grad_clip=prime.grad_clip,
    )
    has_prime_reference = prime.enable and not prime_shares_reference(config)
    return TrainSettings(
        seed=config.trainer.seed,
        external_modules=model.external_modules,
        timeouts=timeouts(config),
        deterministic=config.trainer.deterministic and device != "cpu",
        memory_advice=rl_memory_advice(config),
        actor=replace(
            with_optimizer(trained, "actor_rollout_ref.actor.optim", actor.optim, policy_steps),
            router_replay=actor.router_replay.mode != "disabled",
            router_aux_loss_coef=actor.router_aux_loss_coef,
        ),
        reference=_reference_settings(config, trained, frozen) if has_reference else None,
        reference_is_actor=uses_policy_as_reference(config),
        critic=_critic_settings(config, total_steps, device) if uses_critic(config) else None,
        prime=prime_model if prime.enable else None,
        prime_reference=replace(frozen, model_path=prime_path) if has_prime_reference else None,
        teacher=_teacher_settings(config, frozen) if config.distillation.enable else None,
        algorithm=algorithm_settings(config),
        sync_dtype=rollout_dtype(config, device),
        sync_adapter_only=syncs_adapter_only(config, device),
        sync_bucket_bytes=config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * 2**20,
        shares_devices=frees_engine_memory(config, device),
        engine_width=count_engine_devices(config),
        weight_sender=get_rollout_engine(config.actor_rollout_ref.rollout.name).weight_sender,
        tokenizer_path=model.tokenizer_path,
        save_hf=saves_hf(config),
        save_contents=_contents(actor.checkpoint.save_contents, critic.checkpoint.save_contents),
        load_contents=_contents(actor.checkpoint.load_contents, critic.checkpoint.load_contents),
    )


def _policy_settings(config: Config, device: str) -> tuple[EngineSettings, EngineSettings]:
    """Return the settings of the policy, without its optimizer, and of a reference of the same model."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    base = replace(
        model_settings(actor, model.path, device),
        temperature=config.actor_rollout_ref.rollout.temperature,
        trust_remote_code=model.trust_remote_code,
        fp32_lm_head=model.fp32_lm_head,
        compile=actor.use_torch_compile and device != "cpu",
        logprob_chunk=model.logprob_chunk_size,
        shared_prompts=actor.use_prefix_grouper,
        sequence_parallel_size=actor.ulysses_sequence_parallel_size,
    )
    trained = replace(
        base,
        lora=lora_settings(actor.peft, config.trainer.seed, model.lora_adapter_path),
        grad_clip=actor.grad_clip,
        max_skipped_steps=config.trainer.faults.max_skipped_steps,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )
    section = getattr(config.actor_rollout_ref.ref, get_train_engine(actor.strategy).section, None)
    offloads = device != "cpu" and section is not None and section.param_offload
    return trained, base.freeze(param_offload=offloads)


def _reference_settings(config: Config, trained: EngineSettings, frozen: EngineSettings) -> EngineSettings:
    """Return the settings of the reference. An average is float32: bfloat16 would round its small changes away."""
    is_average = config.trainer.ref_update_freq > 0 and config.trainer.ref_update_ratio < 1
    return replace(frozen, lora=trained.lora, param_dtype="float32" if is_average else frozen.param_dtype)


def _teacher_settings(config: Config, frozen: EngineSettings) -> EngineSettings:
    """Return the settings of the teacher, stored in the data type in which it computes since it is never updated."""
    teacher = config.distillation.teacher
    assert teacher.path is not None
    return replace(
        frozen,
        model_path=teacher.path,
        role="teacher",
        expert_parallel_size=1,  # the model may not be an MoE
        param_dtype=frozen.compute_dtype,
        stochastic_rounding=False,
        param_offload=frozen.device != "cpu" and teacher.param_offload,
    )


def _critic_settings(config: Config, total_steps: int, device: str) -> EngineSettings:
    model, critic = config.actor_rollout_ref.model, config.critic
    settings = replace(
        model_settings(critic, critic.model.path or model.path, device),
        head="value",
        role="critic",
        lora=lora_settings(critic.peft, config.trainer.seed),
        grad_clip=critic.grad_clip,
        max_skipped_steps=config.trainer.faults.max_skipped_steps,
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        temperature=config.actor_rollout_ref.rollout.temperature,
        trust_remote_code=model.trust_remote_code,
        shared_prompts=config.actor_rollout_ref.actor.use_prefix_grouper,
        sequence_parallel_size=config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
    )
    return with_optimizer(settings, "critic.optim", critic.optim, total_steps)


def model_settings(owner: ActorConfig | CriticConfig | SftModelConfig, path: str, device: str) -> EngineSettings:
    """Return the data types and the sharding of a model from the section of its training engine."""
    section = getattr(owner, get_train_engine(owner.strategy).section)
    return get_settings_class(owner.strategy).from_section(section, path, device)


def lora_settings(peft: PeftConfig, seed: int, path: str | None = None) -> LoraSettings | None:
    """Return the settings of the adapter, which starts from the adapter in `path` if given; None if none is trained."""
    if peft.lora_rank == 0:
        return None
    targets = peft.target_modules if isinstance(peft.target_modules, str) else tuple(peft.target_modules)
    return LoraSettings(peft.lora_rank, peft.lora_alpha, targets, seed, path)


def _contents(actor: Sequence[str], critic: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the contents by folder of a checkpoint; the other models follow the actor."""
    return {"actor": actor, "critic": critic, "process": actor, "reference": actor}


def with_optimizer(settings: EngineSettings, section: str, optim: OptimConfig, steps: int) -> EngineSettings:
    """Add the optimizer and its schedule over `steps` steps; `section` is the name of its settings, for messages."""
    warmup = optim.lr_warmup_steps
    warmup = round(optim.lr_warmup_steps_ratio * steps) if warmup is None else warmup
    try:
        schedule = Schedule(optim.lr, optim.lr_scheduler_type, warmup, steps, optim.min_lr_ratio, optim.init_lr_ratio)
    except ValueError as error:  # the number of steps is known only after the data has been read
        raise ConfigError([f"{section}: {error}"]) from error
    if warmup > steps:
        raise ConfigError([f"{section}.lr_warmup_steps: {warmup} must not be more than the {steps} steps of the run"])
    return replace(
        settings,
        optimizer=optim.name,
        schedule=schedule,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        muon_momentum=optim.muon_momentum,
        muon_adjust_lr=optim.muon_adjust_lr,
    )


def build_planner(config: Config, ranks: int) -> Planner:
    actor = config.actor_rollout_ref.actor
    return Planner(
        ranks,
        get_actor_batch_sizes(config),
        forward=_forward_limit(config, config.actor_rollout_ref.rollout),
        reference=_forward_limit(config, config.actor_rollout_ref.ref),
        shuffle_seed=config.trainer.seed if actor.shuffle else None,
        critic=get_critic_batch_sizes(config) if uses_critic(config) else None,
        components=list(reward_components(config)),
        shared_prompts=actor.use_prefix_grouper,
    )


def _forward_limit(config: Config, section: RolloutConfig | RefConfig) -> MicroBatchLimit | None:
    """Return the micro-batch size of log-prob passes; None if the settings leave it open."""
    if not uses_dynamic_batches(config):
        samples = section.log_prob_micro_batch_size_per_gpu
        return None if samples is None else MicroBatchLimit(samples, None)
    tokens = section.log_prob_max_token_len_per_gpu
    return None if tokens is None else MicroBatchLimit(None, tokens * count_sequence_ranks(config))


def episode_settings(
    config: Config, datasets: dict[str, DatasetSettings], workers: int, reward: Callable[..., Any] | None = None
) -> EpisodeSettings:
    """Return the settings of each of `workers` episode workers. `reward` replaces the configured reward function."""
    from verl.workers.episodes import EpisodeSettings  # imports Ray, which a replay may not have

    has_function = uses_reward_function(config) and scores_responses(config)
    function = reward_function_settings(config, workers, reward) if has_function else None
    return EpisodeSettings(config, datasets, function, list(reward_components(config)), timeouts(config))


def reward_model_settings(config: Config, device: str, index: int) -> RewardModelSettings:
    model = config.reward.reward_model
    assert model.model_path is not None
    factory = get_rollout_engine(model.rollout.name).reward_model
    assert factory is not None, "the name is checked against the engines that run reward models"
    is_alone = config.trainer.deterministic and device == "cpu"  # the last bits of a score depend on its batch
    return RewardModelSettings(
        factory,
        model_path=model.model_path,
        batch=1 if is_alone else model.micro_batch_size_per_gpu,
        deadline_s=config.reward.deadline_s,
        dtype=resolve_dtype("auto", device),
        device=device,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        memory_fraction=model.rollout.gpu_memory_utilization,
        tensor_parallel_size=model.rollout.tensor_model_parallel_size,
        deterministic=config.trainer.deterministic,
        cpu_cores=assign_cores(-1 - index, model.rollout.tensor_model_parallel_size) if device == "cpu" else "",
        external_modules=config.actor_rollout_ref.model.external_modules,
    )


def engine_settings(config: Config, device: str, index: int) -> RolloutEngineSettings:
    """Return the settings of rollout engine `index`, of the record that its engine has."""
    spec = get_rollout_engine(config.actor_rollout_ref.rollout.name)
    settings: RolloutEngineSettings = spec.load(spec.settings).from_config(config, device, index)
    return settings


def coarsest_dtype(config: Config, device: str) -> str:
    """Return the coarser type of trainer and engines, by which their log-probs may differ."""
    engine = rollout_dtype(config, device) if get_quantization(config) is None else "fp8"
    return max(engine, compute_dtype(config, device), key=TOLERANCES.__getitem__)
