"""Sizes derived from the batch settings: what a step consists of, and how each number is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from verl.config.features import list_trained_models, uses_critic
from verl.config.paths import change_settings, get_value
from verl.config.schema import Config, Section, SftConfig
from verl.config.schema.conditions import ACTOR, DYNAMIC, REF, ROLLOUT
from verl.config.train_engines import get_train_engine

C = TypeVar("C", bound=Section)

_SAMPLE_SIZES = (
    *(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size_per_gpu"),
)
CPU_SEQUENCES = 256
"""What an engine on the CPU generates at once by default. On accelerators vLLM chooses: as many or more."""

RANKS_PER_EPISODE_WORKER = 8
EPISODES_PER_WORKER = 1024
"""Episodes that one episode worker runs at once before others help it, if there are as many cores for each."""
CORES_PER_EPISODE_WORKER = 16


@dataclass(frozen=True, slots=True)
class Size:
    """A derived size; `how` explains its value."""

    name: str
    value: int
    how: str


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How the responses of a step are split to train a model; micro-batches are limited by samples or by tokens.

    `mini_batch` counts prompts per optimizer step, over all ranks. A micro-batch is that of a rank, or of the ranks
    that share its tokens.
    """

    mini_batch: int
    micro_batch_samples: int | None
    micro_batch_tokens: int | None
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("mini_batch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")

    def count_optimizer_steps(self, prompts: int) -> int:
        return _ceil(prompts, self.mini_batch) * self.epochs


def resolve_batching(config: C, origins: dict[str, str]) -> C:
    """Return the settings with micro-batches limited by samples, if only their sizes in samples are given."""
    given = [key for key in _SAMPLE_SIZES if key in origins and get_value(config, key) is not None]
    if not given or DYNAMIC in origins:
        return config
    origins[DYNAMIC] = f"{given[0]} is given"
    return change_settings(config, {DYNAMIC: False})


def uses_dynamic_batches(config: Config) -> bool:
    """Whether micro-batches of the policy are limited by tokens; by default on accelerators."""
    wanted = config.actor_rollout_ref.actor.use_dynamic_bsz
    return config.trainer.device == "cuda" if wanted is None else wanted


def get_actor_batch_sizes(config: Config) -> BatchSizes:
    """Return the batch sizes of the policy."""
    actor = config.actor_rollout_ref.actor
    tokens = actor.ppo_max_token_len_per_gpu * count_sequence_ranks(config)
    return BatchSizes(
        mini_batch=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        micro_batch_samples=None if uses_dynamic_batches(config) else actor.ppo_micro_batch_size_per_gpu,
        micro_batch_tokens=tokens if uses_dynamic_batches(config) else None,
    )


def get_critic_batch_sizes(config: Config) -> BatchSizes:
    """Return the batch sizes of the critic; the actor's, where its own settings are null."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    dynamic = uses_dynamic_batches(config) if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    tokens = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    return BatchSizes(
        mini_batch=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        micro_batch_samples=None if dynamic else critic.ppo_micro_batch_size_per_gpu,
        micro_batch_tokens=tokens * count_sequence_ranks(config) if dynamic else None,
    )


def count_train_ranks(config: Config | SftConfig) -> int:
    """Return the number of train ranks: one per device, or n_gpus_per_node processes on a machine without any."""
    if config.trainer.local:
        return 1
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def count_sequence_ranks(config: Config | SftConfig) -> int:
    """Return the number of ranks that share the tokens of a sequence, and therefore have the same samples."""
    model = config.model if isinstance(config, SftConfig) else config.actor_rollout_ref.actor
    name = get_train_engine(model.strategy).sequence_size
    return 1 if name is None else int(attrgetter(name)(model))


def count_data_ranks(config: Config | SftConfig) -> int:
    """Return over how many ranks, or groups of ranks that get the same samples, the samples of a step are split."""
    return max(1, count_train_ranks(config) // get_group_size(config))


def get_group_size(config: Config | SftConfig) -> int:
    """Return the number of ranks that get the same samples, since they compute one model together."""
    model = config.model if isinstance(config, SftConfig) else config.actor_rollout_ref.actor
    return math.prod(attrgetter(name)(model) for name in get_train_engine(model.strategy).group_sizes)


def count_group_devices(config: Config | SftConfig) -> int:
    """Return the devices of the train workers that have to be on one node: those of the widest engine on them."""
    if isinstance(config, SftConfig):
        return 1
    shared = config.actor_rollout_ref.hybrid_engine or count_lent_engines(config) > 0
    widths = [count_engine_devices(config) if shared else 1]
    if config.reward.reward_model.enable:
        widths.append(config.reward.reward_model.rollout.tensor_model_parallel_size)
    return max(widths)


def count_rank_multiple(config: Config | SftConfig) -> int:
    """Return the number that must divide the count of train ranks."""
    models = [model.settings for model in list_trained_models(config)]
    sharding = [model.fsdp_config for model in models if model.strategy != "megatron"]
    layouts = [model.megatron for model in models if model.strategy == "megatron"]
    sizes = [max(1, fsdp.fsdp_size) for fsdp in sharding] + [fsdp.expert_parallel_size for fsdp in sharding]
    sizes += [layout.expert_model_parallel_size * layout.pipeline_model_parallel_size for layout in layouts]
    return math.lcm(count_group_devices(config), get_group_size(config), *sizes)


def count_engines(config: Config) -> int:
    """Return the number of rollout engines; at least one."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.num_engines is not None and not config.trainer.local:
        return rollout.num_engines
    return max(1, count_rollout_devices(config) // count_engine_devices(config))


def count_lent_engines(config: Config) -> int:
    """Return the number of rollout engines on devices that the train workers lend, in addition to `count_engines`."""
    if config.actor_rollout_ref.hybrid_engine or not config.actor_rollout_ref.rollout.lend_train_devices:
        return 0
    return count_train_ranks(config) // count_engine_devices(config)


def count_engine_devices(config: Config) -> int:
    """Return the number of devices of a rollout engine."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size


def count_rollout_devices(config: Config) -> int:
    """Return the number of devices on which the engines run: those of the train workers, or their own."""
    rollout = config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.hybrid_engine:
        return count_train_ranks(config)
    return (rollout.nnodes or 1) * (rollout.n_gpus_per_node or 1)


def count_extra_devices(config: Config | SftConfig) -> int:
    """Return the number of devices that a run reserves in addition to those of the train workers."""
    if isinstance(config, SftConfig) or config.actor_rollout_ref.hybrid_engine:
        return 0
    return count_rollout_devices(config)


def get_max_sequence_tokens(config: Config) -> int:
    """Return the maximum length of a sequence, prompt and response."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return config.actor_rollout_ref.rollout.max_model_len or longest


def count_total_steps(config: Config | SftConfig, prompts: int) -> int:
    """Return the steps of the run over `prompts` training prompts, or examples; a step may span two epochs."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return max(1, prompts * config.trainer.total_epochs // config.data.train_batch_size)


def get_run_ahead(config: Config) -> float:
    """Return how many batches generation may be ahead of training."""
    wanted, staleness = config.async_training.staleness_threshold, config.trainer.max_staleness
    return min(staleness, 1 if wanted is None else wanted)


def count_episode_workers(config: Config, cores: int) -> int:
    """Return how many episode workers run, on nodes with as many cores.

    They grow with the episodes that run at once, as far as there are cores, and with the train ranks. Runs in one
    process, and deterministic ones, have one.
    """
    if config.trainer.local or config.trainer.deterministic:
        return 1
    episodes = config.data.train_batch_size * (1 + get_run_ahead(config)) * config.actor_rollout_ref.rollout.n
    for_load = min(math.ceil(episodes / EPISODES_PER_WORKER), cores * config.trainer.nnodes // CORES_PER_EPISODE_WORKER)
    return max(1, for_load, count_train_ranks(config) // RANKS_PER_EPISODE_WORKER)


def count_validation_prompts(config: Config) -> int | None:
    """Return how many prompts are validated at once; None: all. Beside training, others need the engines, too."""
    wanted, rollout = config.data.val_batch_size, config.actor_rollout_ref.rollout
    if config.trainer.max_staleness == 0:
        return wanted
    for_training = config.data.train_batch_size * (1 + get_run_ahead(config)) * rollout.n
    most = max(1, int(for_training * config.trainer.validation_share / rollout.val_kwargs.n))
    return most if wanted is None else min(wanted, most)


def get_record_interval(config: Config) -> int | None:
    """Return every how many groups one is recorded, at least one in a step; None: none."""
    batch, responses, rollout = (
        config.data.train_batch_size,
        config.trainer.samples.per_step,
        config.actor_rollout_ref.rollout,
    )
    traced = rollout.trace.max_samples_per_step_per_worker or 0 if rollout.trace.backend else 0
    groups = max(1, responses // rollout.n, traced)
    return max(1, batch // groups) if responses or traced else None


def count_policy_steps(config: Config, steps: int) -> int:
    """Return how many of the first `steps` steps of the run train the policy; trainer.critic_warmup delays it."""
    return max(0, steps - config.trainer.critic_warmup) if uses_critic(config) else steps


def derive_sizes(config: Config) -> list[Size]:
    """Return all derived sizes in the order of a step."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    engines, responses = count_engines(config), data.train_batch_size * rollout.n
    longest = f"prompt {data.max_prompt_length} + response {data.max_response_length}"
    sequences = "engines x rollout.max_num_seqs"
    if rollout.max_num_seqs is None:
        more = "" if config.trainer.device == "cpu" else ", or more on accelerators"
        sequences = f"engines x {CPU_SEQUENCES}{more} (rollout.max_num_seqs=null)"
    at_once = min(responses, engines * (rollout.max_num_seqs or CPU_SEQUENCES))
    return [
        Size("prompts per step", data.train_batch_size, "data.train_batch_size"),
        Size("responses per step", responses, f"{data.train_batch_size} prompts x rollout.n={rollout.n}"),
        Size(
            "maximum tokens per sequence",
            get_max_sequence_tokens(config),
            "rollout.max_model_len" if rollout.max_model_len else longest,
        ),
        Size("engines", engines, _explain_engines(config)),
        Size("responses generated at once", at_once, sequences),
        Size("train ranks", count_train_ranks(config), _explain_ranks(config)),
        *_derive_model_sizes(config, get_actor_batch_sizes(config), "actor"),
        *(_derive_model_sizes(config, get_critic_batch_sizes(config), "critic") if uses_critic(config) else ()),
    ]


def derive_sft_sizes(config: SftConfig) -> list[Size]:
    """Return the derived sizes of supervised training."""
    data = config.data
    ranks, batch = count_train_ranks(config), data.train_batch_size
    rows = [
        Size("examples per step", batch, "data.train_batch_size"),
        Size("maximum tokens per example", data.max_length, "data.max_length"),
        Size("train ranks", ranks, _explain_ranks(config)),
    ]
    if data.packing:
        tokens = data.max_token_len_per_gpu * count_sequence_ranks(config)
        return [*rows, Size("tokens per micro-batch", tokens, f"max_token_len_per_gpu{_times_sequence_ranks(config)}")]
    micro = min(data.micro_batch_size_per_gpu, _ceil(batch, count_data_ranks(config)))
    return [
        *rows,
        Size("examples per micro-batch", micro, "data.micro_batch_size_per_gpu"),
        Size("... maximum tokens", micro * data.max_length, f"{micro} examples x {data.max_length} tokens"),
    ]


def _derive_model_sizes(config: Config, sizes: BatchSizes, section: str) -> list[Size]:
    """Return the sizes of a model's mini-batches and micro-batches."""
    model = "critic " if section == "critic" else ""
    n, ranks, longest = config.actor_rollout_ref.rollout.n, count_data_ranks(config), get_max_sequence_tokens(config)
    batch = config.data.train_batch_size
    mini_prompts = min(sizes.mini_batch, batch)
    mini = mini_prompts * n
    on_rank = _ceil(mini, ranks)
    trained = config.critic if section == "critic" else config.actor_rollout_ref.actor
    warmup, how_warmup = trained.optim.lr_warmup_steps, f"{section}.optim.lr_warmup_steps, in training steps"
    rows = [
        Size(
            f"{model}optimizer steps per step",
            sizes.count_optimizer_steps(batch),
            f"ceil({batch} / ppo_mini_batch_size={sizes.mini_batch}) x ppo_epochs={sizes.epochs}",
        ),
        *([Size(f"{model}learning rate warm-up steps", warmup, how_warmup)] if warmup else []),
        Size(f"samples per {model}mini-batch", mini, f"{mini_prompts} prompts x rollout.n={n}"),
        Size("... per rank", on_rank, f"{mini} / {_describe_data_ranks(config)}, rounded up"),
    ]
    if sizes.micro_batch_samples is None:
        assert sizes.micro_batch_tokens is not None
        how = f"{section}.ppo_max_token_len_per_gpu{_times_sequence_ranks(config)}"
        return [*rows, Size(f"tokens per {model}micro-batch", sizes.micro_batch_tokens, how)]
    micro = min(sizes.micro_batch_samples, on_rank)
    may_change = trained.use_dynamic_bsz is None and config.actor_rollout_ref.actor.use_dynamic_bsz is None
    more = ", or ppo_max_token_len_per_gpu on accelerators" if may_change and config.trainer.device == "auto" else ""
    return [
        *rows,
        Size(f"samples per {model}micro-batch", micro, f"{section}.ppo_micro_batch_size_per_gpu{more}"),
        Size("... maximum tokens", micro * longest, f"{micro} samples x {longest} tokens"),
        Size(f"micro-batches per {model}mini-batch", _ceil(on_rank, micro), f"{on_rank} samples / {micro}"),
    ]


def render_sizes(config: Config | SftConfig) -> str:
    """Return the derived sizes of a run as an aligned table: name, value, explanation."""
    rows = derive_sft_sizes(config) if isinstance(config, SftConfig) else derive_sizes(config)
    values = [f"{row.value:,}" for row in rows]
    names, digits = max(len(row.name) for row in rows), max(map(len, values))
    return "\n".join(
        f"{row.name:<{names}}  {value:>{digits}}  {row.how}" for row, value in zip(rows, values, strict=True)
    )


def _explain_ranks(config: Config | SftConfig) -> str:
    if config.trainer.local:
        return "trainer.local"
    return f"{config.trainer.nnodes} nodes x {config.trainer.n_gpus_per_node}"


def _describe_data_ranks(config: Config) -> str:
    count, size = count_data_ranks(config), get_group_size(config)
    if size == 1:
        return f"{count} ranks"
    return f"{count} group{'s' if count > 1 else ''} of {size} ranks"


def _times_sequence_ranks(config: Config | SftConfig) -> str:
    size = count_sequence_ranks(config)
    model = config.model if isinstance(config, SftConfig) else config.actor_rollout_ref.actor
    return "" if size == 1 else f" x {get_train_engine(model.strategy).sequence_size}={size}"


def _explain_engines(config: Config) -> str:
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.local:
        return "trainer.local"
    if rollout.num_engines is not None:
        return "rollout.num_engines"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    used = [f"rollout.{name}={getattr(rollout, name)}" for name in sizes if getattr(rollout, name) > 1]
    return " / ".join([f"{count_train_ranks(config)} devices", *(used or [f"rollout.{sizes[0]}=1"])])


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
