"""Settings against each other: what cannot work (problems), and what works but is probably not meant (hints)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from verl.config.keys import look_up, written
from verl.config.schema import MISSING, Config, Setting, settings_of
from verl.config.sizes import max_sequence_tokens, optimiser_steps, train_ranks

__all__ = ["Finding", "contradictions", "hints", "missing", "unbuilt"]

_A = "actor_rollout_ref.actor"
_R = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_EXAMPLES = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}  # of trainer.logger; the other sinks need none
_UNBUILT = {  # what there is instead of a planned setting, where its default does not say it
    f"{_R}.tensor_model_parallel_size": f"an engine has one device, and {_R}.num_engines says how many engines",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and the settings that it rests on: if one of them is wrong in itself, this is not said."""

    keys: tuple[str, ...]
    text: str


def missing(config: Config) -> Iterator[Finding]:
    """What a run needs and does not have: required settings that nobody has given, packages that are not installed."""
    for key, setting in settings_of(Config).items():
        if setting.required and _value(config, key) == MISSING:
            yield Finding((key,), f"{key}: is required; set {key}={_EXAMPLES[key]}")
    sinks = config.trainer.logger
    absent = [sink for sink in sinks if sink in _PACKAGES and not _installed(_PACKAGES[sink])]
    rest = written([sink for sink in sinks if sink not in absent] or ["console"])
    for sink in absent:
        yield Finding(
            ("trainer.logger",),
            f"trainer.logger: {sink} needs its package; pip install {_PACKAGES[sink]}, or set trainer.logger={rest}",
        )


def unbuilt(config: Config) -> Iterator[Finding]:
    """Settings in use that are declared but do nothing yet: refused, never ignored."""
    known = settings_of(Config)
    for key, setting in known.items():
        if not setting.planned or setting.roof is not None:
            continue
        if setting.section is not None:
            used = [below for below in known if below.startswith(f"{key}.") and _changed(config, below)]
            if used:
                given = ", ".join(f"{below}={written(_value(config, below))}" for below in used)
                yield Finding((key, *used), f"{key}: is not built yet ({given}); leave it out, or add ~{key}")
        elif setting.planned is True:
            if _changed(config, key):
                value, default = written(_value(config, key)), written(setting.default)
                instead = f": {_UNBUILT[key]}" if key in _UNBUILT else ""
                yield Finding((key,), f"{key}: {value} is not built yet{instead}; set {key}={default}")
        else:
            yield from _planned_values(config, setting)


def _planned_values(config: Config, setting: Setting) -> Iterator[Finding]:
    value = _value(config, setting.key)
    assert isinstance(setting.planned, tuple)
    for item in value if isinstance(value, list) else [value]:
        if item in setting.planned:
            built = ", ".join(str(choice) for choice in setting.choices if choice not in setting.planned)
            mend = f"{setting.key}={written(setting.default)}"
            yield Finding((setting.key,), f"{setting.key}: {item} is not built yet (built: {built}); set {mend}")


def contradictions(config: Config) -> Iterator[Finding]:
    """Settings that cannot work together."""
    data, trainer = config.data, config.trainer
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    ranks = train_ranks(config)
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield Finding(
            (f"{_R}.max_model_len", "data.max_prompt_length", "data.max_response_length"),
            f"{_R}.max_model_len: {rollout.max_model_len} must hold data.max_prompt_length + data.max_response_length "
            f"= {longest}; set {_R}.max_model_len={longest}",
        )
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Finding(
            (f"{_R}.max_num_batched_tokens", f"{_R}.max_num_seqs"),
            f"{_R}.max_num_batched_tokens: {rollout.max_num_batched_tokens} must be at least max_num_seqs "
            f"({rollout.max_num_seqs}), one token each; set {_R}.max_num_seqs={rollout.max_num_batched_tokens}",
        )
    if rollout.num_engines is not None and trainer.device == "cuda" and rollout.num_engines > ranks:
        yield Finding(
            (f"{_R}.num_engines", "trainer.n_gpus_per_node", "trainer.nnodes"),
            f"{_R}.num_engines: {rollout.num_engines} must not exceed the {ranks} devices of the run (trainer.nnodes x "
            f"trainer.n_gpus_per_node); set {_R}.num_engines={ranks}",
        )
    if rollout.temperature == 0:
        yield Finding(
            (f"{_R}.temperature",),
            f"{_R}.temperature: 0 makes all answers to a prompt the same, so that nothing can be learned; "
            f"set {_R}.temperature=1.0",
        )
    if rollout.val_kwargs.do_sample is True and rollout.val_kwargs.temperature == 0:
        yield Finding(
            (f"{_R}.val_kwargs.do_sample", f"{_R}.val_kwargs.temperature"),
            f"{_R}.val_kwargs.temperature: 0 must be above 0 with do_sample=true; set {_R}.val_kwargs.temperature=1.0",
        )
    if rollout.weight_transport in ("nccl", "ipc") and trainer.device == "cpu":
        yield Finding(
            (f"{_R}.weight_transport", "trainer.device"),
            f"{_R}.weight_transport: {rollout.weight_transport} needs accelerators, and trainer.device=cpu; "
            f"set {_R}.weight_transport=host",
        )
    elif rollout.weight_transport in ("nccl", "ipc") and rollout.name == "hf":
        yield Finding(
            (f"{_R}.weight_transport", f"{_R}.name"),
            f"{_R}.weight_transport: {rollout.weight_transport} needs rollout.name=vllm, hf takes weights from host "
            f"memory; set {_R}.weight_transport=host",
        )
    if trainer.test_freq > 0 and data.val_files is None:
        yield Finding(
            ("trainer.test_freq", "data.val_files"),
            f"trainer.test_freq: {trainer.test_freq} needs data to validate on; set data.val_files=test.parquet",
        )
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield Finding(
            ("trainer.resume_mode", "trainer.resume_from_path"),
            "trainer.resume_mode: path needs a checkpoint; set "
            f"trainer.resume_from_path={trainer.checkpoint_dir}/global_step_100",
        )
    yield from _endless_warmup(config)


def _endless_warmup(config: Config) -> Iterator[Finding]:
    """A warm-up must end within the run, and before its last step if the learning rate is to fall after it."""
    optim, steps = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    total = None if steps is None else optimiser_steps(config, steps)
    warmup, ratio, kind = optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type
    rests_on = (
        *_keys(_A, "optim.lr_scheduler_type", "ppo_mini_batch_size", "ppo_epochs"),
        *("data.train_batch_size", "trainer.total_training_steps"),
    )
    if warmup is not None and total is not None:
        most = total if kind == "constant" else total - 1
        if warmup > most:
            yield Finding(
                (f"{_A}.optim.lr_warmup_steps", *rests_on),
                f"{_A}.optim.lr_warmup_steps: {warmup} must be at most {most} with lr_scheduler_type={kind}: "
                f"trainer.total_training_steps={steps} makes {total} optimiser steps; "
                f"set {_A}.optim.lr_warmup_steps={most}",
            )
    elif warmup is None and kind != "constant" and (ratio == 1 if total is None else round(ratio * total) >= total):
        yield Finding(
            (f"{_A}.optim.lr_warmup_steps_ratio", *rests_on),
            f"{_A}.optim.lr_warmup_steps_ratio: {ratio} leaves no optimiser step for lr_scheduler_type={kind}; "
            f"set {_A}.optim.lr_warmup_steps_ratio=0.1",
        )


def hints(config: Config) -> Iterator[Finding]:
    """What works, but is probably not meant."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks, longest, mini = train_ranks(config), max_sequence_tokens(config), actor.ppo_mini_batch_size
    if config.algorithm.adv_estimator in ("grpo", "grpo_vectorized") and rollout.n < 2:
        yield Finding(
            (f"{_R}.n", "algorithm.adv_estimator"),
            f"{_R}.n: {rollout.n} answer a prompt leaves GRPO no group to compare with; set {_R}.n=8",
        )
    if rollout.temperature > 1.5:
        yield Finding(
            (f"{_R}.temperature",),
            f"{_R}.temperature: {rollout.temperature} gives mostly noise above 1.5; try {_R}.temperature=1.0",
        )
    if rollout.val_kwargs.n > 1 and (rollout.val_kwargs.temperature == 0 or rollout.val_kwargs.do_sample is False):
        yield Finding(
            (f"{_R}.val_kwargs.n", f"{_R}.val_kwargs.temperature", f"{_R}.val_kwargs.do_sample"),
            f"{_R}.val_kwargs.n: {rollout.val_kwargs.n} greedy answers are all the same; set "
            f"{_R}.val_kwargs.temperature=1.0 or {_R}.val_kwargs.n=1",
        )
    if mini > data.train_batch_size:
        yield Finding(
            (f"{_A}.ppo_mini_batch_size", "data.train_batch_size"),
            f"{_A}.ppo_mini_batch_size: {mini} prompts is more than data.train_batch_size={data.train_batch_size}: "
            f"each step is one mini-batch; set {_A}.ppo_mini_batch_size={data.train_batch_size}",
        )
    elif data.train_batch_size % mini:
        yield Finding(
            (f"{_A}.ppo_mini_batch_size", "data.train_batch_size"),
            f"{_A}.ppo_mini_batch_size: {mini} does not divide data.train_batch_size={data.train_batch_size}: the last "
            f"mini-batch of a step has {data.train_batch_size % mini} prompts",
        )
    if min(mini, data.train_batch_size) * rollout.n < ranks:
        yield Finding(
            (f"{_A}.ppo_mini_batch_size", f"{_R}.n", "data.train_batch_size", "trainer.n_gpus_per_node"),
            f"{_A}.ppo_mini_batch_size: a mini-batch of {min(mini, data.train_batch_size) * rollout.n} samples leaves "
            f"some of the {ranks} train ranks without work",
        )
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield Finding(
            (f"{_A}.ppo_max_token_len_per_gpu", "data.max_prompt_length", "data.max_response_length"),
            f"{_A}.ppo_max_token_len_per_gpu: {actor.ppo_max_token_len_per_gpu} is less than the longest sequence "
            f"({longest} tokens), which will exceed it; set {_A}.ppo_max_token_len_per_gpu={longest}",
        )
    low, high = actor.clip_range
    if low > high:
        yield Finding(
            (f"{_A}.clip_ratio", f"{_A}.clip_ratio_low", f"{_A}.clip_ratio_high"),
            f"{_A}.clip_ratio_low: {low} is above clip_ratio_high={high}; clipping is usually wider upwards",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Finding(
            (f"{_A}.use_kl_loss", f"{_A}.kl_loss_coef"),
            f"{_A}.kl_loss_coef: 0 computes the reference for nothing; set {_A}.use_kl_loss=false",
        )
    cuts = {"top_p": "1.0"} if rollout.top_p < 1 else {}
    cuts |= {"top_k": "-1"} if rollout.top_k > 0 else {}
    for name, whole in cuts.items():
        yield Finding(
            (f"{_R}.{name}",),
            f"{_R}.{name}: {getattr(rollout, name)} makes the engine's log-probs those of the cut distribution, and "
            f"the trainer's are of the whole one: training/rollout_probs_diff_mean is large by construction; to "
            f"compare the two, set {_R}.{name}={whole}",
        )
    if config.trainer.deterministic and rollout.name == "vllm":
        yield Finding(
            ("trainer.deterministic", f"{_R}.name"),
            "trainer.deterministic: with vLLM only the sampling is seeded, and the last bits of its log-probs may "
            f"differ between runs; for runs that are equal to the bit, set {_R}.name=hf",
        )
    if actor.use_torch_compile and "use_torch_compile" in actor.model_fields_set:
        yield Finding(
            (f"{_A}.use_torch_compile",),
            f"{_A}.use_torch_compile=true has no effect: nothing is compiled yet",
        )
    yield from _without_effect(config)


@dataclass(frozen=True, slots=True)
class _Mute:
    """Settings that do nothing while `when` holds."""

    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    why: str
    rests_on: tuple[str, ...]


def _keys(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


_ENGINE_ONLY = (
    "gpu_memory_utilization",
    "cpu_cache_gib",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "load_format",
    "engine_kwargs.vllm",
)

_MUTES = (
    _Mute(
        _keys(_A, "kl_loss_coef", "kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{_A}.use_kl_loss=false",
        (f"{_A}.use_kl_loss",),
    ),
    _Mute(
        _keys(_REF, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu"),
        lambda c: True,
        f"the reference is cut as {_R}.log_prob_micro_batch_size_per_gpu and log_prob_max_token_len_per_gpu say",
        (),
    ),
    _Mute(
        ("algorithm.kl_penalty", *_keys("algorithm.kl_ctrl", "type", "kl_coef", "horizon", "target_kl")),
        lambda c: not c.algorithm.use_kl_in_reward,
        f"algorithm.use_kl_in_reward=false (the KL of the loss is {_A}.kl_loss_coef)",
        ("algorithm.use_kl_in_reward",),
    ),
    _Mute(
        _keys("algorithm", "gamma", "lam"),
        lambda c: c.algorithm.adv_estimator in ("grpo", "grpo_vectorized"),
        "algorithm.adv_estimator=grpo does not discount",
        ("algorithm.adv_estimator",),
    ),
    _Mute(
        _keys(_A, "loss_scale_factor"),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        f"only {_A}.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        (f"{_A}.loss_agg_mode",),
    ),
    _Mute(
        _keys(_A, "clip_ratio"),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are both given",
        _keys(_A, "clip_ratio_low", "clip_ratio_high"),
    ),
    _Mute(
        (
            *_keys(_A, "ppo_max_token_len_per_gpu"),
            *_keys(_R, "log_prob_max_token_len_per_gpu"),
        ),
        lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{_A}.use_dynamic_bsz=false",
        (f"{_A}.use_dynamic_bsz",),
    ),
    _Mute(
        (
            *_keys(_A, "ppo_micro_batch_size_per_gpu"),
            *_keys(_R, "log_prob_micro_batch_size_per_gpu"),
        ),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{_A}.use_dynamic_bsz=true counts tokens",
        (f"{_A}.use_dynamic_bsz",),
    ),
    _Mute(
        _keys(_A, "optim.lr_warmup_steps_ratio"),
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps is not None,
        f"{_A}.optim.lr_warmup_steps is given",
        (f"{_A}.optim.lr_warmup_steps",),
    ),
    _Mute(
        _keys(_A, "optim.min_lr_ratio"),
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant",
        f"{_A}.optim.lr_scheduler_type=constant",
        (f"{_A}.optim.lr_scheduler_type",),
    ),
    _Mute(
        _keys(_R, *_ENGINE_ONLY),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        f"{_R}.name=hf",
        (f"{_R}.name",),
    ),
    _Mute(
        _keys(_R, "val_kwargs.temperature", "val_kwargs.top_p", "val_kwargs.top_k"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample is False,
        f"{_R}.val_kwargs.do_sample=false is greedy",
        (f"{_R}.val_kwargs.do_sample",),
    ),
    _Mute(
        _keys(_R, "gpu_memory_utilization"),
        lambda c: c.trainer.device == "cpu",
        f"trainer.device=cpu; {_R}.cpu_cache_gib is what counts",
        ("trainer.device",),
    ),
    _Mute(
        _keys(_R, "cpu_cache_gib"),
        lambda c: c.trainer.device == "cuda",
        f"trainer.device=cuda; {_R}.gpu_memory_utilization is what counts",
        ("trainer.device",),
    ),
    _Mute(
        _keys("reward.custom_reward_function", "name", "reward_kwargs"),
        lambda c: c.reward.custom_reward_function.path is None,
        "reward.custom_reward_function.path is not given",
        ("reward.custom_reward_function.path",),
    ),
    _Mute(
        (*_keys("data", "val_batch_size", "val_max_samples"),),
        lambda c: c.data.val_files is None,
        "data.val_files is not given",
        ("data.val_files",),
    ),
    _Mute(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=true leaves nothing to cut",
        ("data.filter_overlong_prompts",),
    ),
    _Mute(
        ("data.seed",),
        lambda c: not c.data.shuffle,
        "data.shuffle=false",
        ("data.shuffle",),
    ),
    _Mute(
        ("trainer.total_epochs",),
        lambda c: c.trainer.total_training_steps is not None,
        "trainer.total_training_steps is given",
        ("trainer.total_training_steps",),
    ),
    _Mute(
        ("trainer.max_ckpts_to_keep",),
        lambda c: c.trainer.save_freq == -1,
        "trainer.save_freq=-1 saves none",
        ("trainer.save_freq",),
    ),
    _Mute(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "path",
        "trainer.resume_mode is not path",
        ("trainer.resume_mode",),
    ),
)


def _without_effect(config: Config) -> Iterator[Finding]:
    for mute in _MUTES:
        if not mute.when(config):
            continue
        for key in mute.keys:
            if _changed(config, key):
                value = written(_value(config, key))
                yield Finding((key, *mute.rests_on), f"{key}={value} has no effect: {mute.why}")


def _value(config: Config, key: str) -> object:
    return look_up(config, tuple(key.split(".")))


def _changed(config: Config, key: str) -> bool:
    setting = settings_of(Config)[key]
    return setting.section is None and _value(config, key) != setting.default


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a mere folder of that name, as wandb leaves, has no origin
