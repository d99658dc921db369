"""Checks of the training prompts, and of how responses are generated and scored."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from verl.config.batch_sizes import count_engine_devices, count_rollout_devices
from verl.config.checks.conflict import Conflict
from verl.config.features import (
    differs_by_truncation,
    get_importance_weights,
    get_quantization,
    has_environment,
    may_score_code,
)
from verl.config.paths import is_overridden
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT

_VAL, _MASK = f"{ROLLOUT}.val_kwargs", f"{ROLLOUT}.keep_sampling_mask"
_MAX_KEPT = 256  # each of them takes 4 bytes for every token of a batch


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts of a run that generates responses, with or without training."""
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        reason = f"must be at least data.max_prompt_length + data.max_response_length = {longest}"
        yield Conflict(f"{ROLLOUT}.max_model_len", f"{rollout.max_model_len} {reason}", f"={longest}")
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if (tokens or inf) < (sequences or 1):
        reason = f"{tokens} must be at least max_num_seqs ({sequences}), one token each"
        yield Conflict(f"{ROLLOUT}.max_num_batched_tokens", reason, f"set {ROLLOUT}.max_num_seqs={tokens}")
    devices, width = count_rollout_devices(config), count_engine_devices(config)
    most = max(1, devices // width)
    if rollout.num_engines is not None and config.trainer.device == "cuda" and rollout.num_engines > most:
        reason = f"must not exceed the {devices} devices of the engines (nnodes x n_gpus_per_node), {width} for each"
        yield Conflict(f"{ROLLOUT}.num_engines", f"{rollout.num_engines} {reason}", f"={most}")
    seconds, limit = config.reward.sandbox.seconds, config.reward.deadline_s
    if is_overridden(config, "reward.sandbox.seconds") and seconds >= limit and may_score_code(config):
        reason = f"{seconds:g} must be below reward.deadline_s={limit:g}, the limit for a response with all its tests"
        yield Conflict("reward.sandbox.seconds", reason, f"set reward.deadline_s={max(60, 4 * seconds):g}")


def find_training_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts of how the responses of a training run are sampled and scored."""
    rollout, reward_model = config.actor_rollout_ref.rollout, config.reward.reward_model
    if rollout.temperature == 0:
        reason = "0 makes all responses to a prompt equal, so nothing can be learned"
        yield Conflict(f"{ROLLOUT}.temperature", reason, "=1.0")
    if rollout.val_kwargs.do_sample is True and rollout.val_kwargs.temperature == 0:
        yield Conflict(f"{_VAL}.temperature", "0 must be above 0 with do_sample=true", "=1.0")
    if reward_model.enable and reward_model.model_path is None:
        fix = "set reward.reward_model.model_path=my-org/reward-model"
        yield Conflict("reward.reward_model.enable", "true requires a model", fix)
    if rollout.keep_sampling_mask:
        yield from _check_sampling_mask(config)


def _check_sampling_mask(config: Config) -> Iterator[Conflict]:
    """Check that the kept tokens have a limit, that the engine returns them, and that they suffice."""
    rollout = config.actor_rollout_ref.rollout
    if not 0 < rollout.top_k <= _MAX_KEPT:
        reason = f"true requires {ROLLOUT}.top_k, which limits how many tokens are kept, from 1 to {_MAX_KEPT}"
        yield Conflict(_MASK, f"{reason}, not {rollout.top_k}", f"set {ROLLOUT}.top_k=64, or {_MASK}=false")
    if not get_rollout_engine(rollout.name).capabilities.returns_sampling_mask:
        reason = f"true requires an engine that returns the kept tokens, but {ROLLOUT}.name={rollout.name} does not"
        yield Conflict(_MASK, reason, "=false")
    if config.distillation.enable:
        reason = "true hides from distillation.enable=true what the teacher says about tokens that were not kept"
        yield Conflict(_MASK, reason, "=false")


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield probable mistakes of a run that only generates responses."""
    rollout = config.actor_rollout_ref.rollout
    yield from _check_temperature(config)
    if rollout.temperature == 0 and rollout.n > 1:
        reason = f"{rollout.n} greedy responses to a prompt are all equal"
        yield Conflict(f"{ROLLOUT}.n", reason, f"=1, or {ROLLOUT}.temperature=1.0")


def find_training_hints(config: Config) -> Iterator[Conflict]:
    """Yield probable mistakes of how the responses of a training run are generated and scored."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    yield from _check_temperature(config)
    val = rollout.val_kwargs
    if val.n > 1 and (val.temperature == 0 or val.do_sample is False):
        yield Conflict(
            f"{_VAL}.n", f"{val.n} greedy responses are all equal", f"set {_VAL}.temperature=1.0 or {_VAL}.n=1"
        )
    for name, cut, full in (("top_p", rollout.top_p < 1, "1.0"), ("top_k", rollout.top_k > 0, "-1")):
        if cut and differs_by_truncation(config):
            yield Conflict(
                f"{ROLLOUT}.{name}",
                f"with {getattr(rollout, name)} the engine's log-probs are those of the truncated distribution and the "
                "trainer's those of the full one, so training/rollout_probs_diff_mean is large by construction",
                f"to compare them, set {ROLLOUT}.{name}={full}, or {_MASK}=true with a top_k of at most {_MAX_KEPT}",
            )
    is_corrected = get_importance_weights(config) or correction.rollout_rs or correction.bypass_mode
    if get_quantization(config) and not is_corrected:
        yield Conflict(
            f"{ROLLOUT}.{'quantization' if rollout.quantization else 'dtype'}",
            "quantized engines and the trainer compute different probabilities, which biases the update",
            "set algorithm.rollout_correction.preset=tis",
        )
    yield from _find_unused_rewards(config)
    if config.reward.reward_manager.name == "dapo":
        yield Conflict(
            "reward.reward_manager.name",
            "dapo scores exactly as naive does",
            "set reward.overlong_buffer.enable=true for overlong reward shaping and "
            "algorithm.filter_groups.enable=true for dynamic sampling",
        )


def find_data_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between the samplers, the weights of files and streaming."""
    data, weights = config.data, config.data.train_weights
    files = 1 if isinstance(data.train_files, str) else len(data.train_files)
    if weights is not None and len(weights) != files:
        reason = f"{len(weights)} weights for {files} entries of data.train_files; give one per entry"
        yield Conflict("data.train_weights", reason, f"=[{','.join(['1'] * files)}]")
    elif weights is not None and min(weights) <= 0:
        rest = ",".join(f"{weight:g}" for weight in weights if weight > 0)
        fix = f"remove the file from data.train_files and set data.train_weights=[{rest}]"
        yield Conflict("data.train_weights", f"{min(weights):g} must be above 0", fix)
    for name in ("train_weights", "curriculum_key"):
        if data.sampler is not None and getattr(data, name) is not None:
            reason = f"data.sampler={data.sampler} decides the order"
            yield Conflict(f"data.{name}", reason, "=null, or data.sampler=null")
    for name in ("sampler", "curriculum_key"):
        if data.streaming is True and getattr(data, name) is not None:
            reason = f"{getattr(data, name)} reads all rows before the first step, and data.streaming=true does not"
            yield Conflict(f"data.{name}", reason, "set data.streaming=false")


def find_data_hints(config: Config) -> Iterator[Conflict]:
    """Yield a setting by which a long prompt would stop the run."""
    data = config.data
    if data.streaming and not data.filter_overlong_prompts and data.truncation == "error":
        reason = "a prompt longer than data.max_prompt_length stops the run when it is read"
        yield Conflict("data.streaming", reason, "set data.filter_overlong_prompts=true to drop such prompts")


def _find_unused_rewards(config: Config) -> Iterator[Conflict]:
    """Yield the rewards that are configured beside an environment, whose own rewards score its episodes."""
    reward = config.reward
    given = {
        "reward.custom_reward_function.path": reward.custom_reward_function.path,
        "reward.functions": reward.functions,
        "reward.reward_model.enable": reward.reward_model.enable,
    }
    for key in (key for key, value in given.items() if value and has_environment(config)):
        yield Conflict(
            key,
            f"has no effect on episodes of {ROLLOUT}.multi_turn.environment, whose score is the sum of the rewards "
            "that `step` returns; it scores only rows that choose another agent (column agent_name)",
            "return the reward from `step`, or remove the setting",
        )


def _check_temperature(config: Config) -> Iterator[Conflict]:
    temperature = config.actor_rollout_ref.rollout.temperature
    if temperature > 1.5:
        yield Conflict(f"{ROLLOUT}.temperature", f"{temperature} is mostly noise above 1.5", "=1.0")
