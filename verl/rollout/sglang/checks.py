"""Checks of settings and of the installed package that concern SGLang only. Imports neither torch nor SGLang."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from verl.config.checks.conflict import Conflict
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT
from verl.installation import format_sglang_hint
from verl.rollout.engine_arguments import ArgumentRules, read_fields

_MIN_SGLANG = (0, 5, 23)
_KEY, _MODEL = f"{ROLLOUT}.engine_kwargs.sglang", "actor_rollout_ref.model"
ARGUMENTS = ArgumentRules(
    _KEY,
    "a server argument of the installed SGLang",
    settings={
        "model_path": f"{_MODEL}.path",
        "tokenizer_path": f"{_MODEL}.tokenizer_path",
        "trust_remote_code": f"{_MODEL}.trust_remote_code",
        "enable_fp32_lm_head": f"{_MODEL}.fp32_lm_head",
        "tp_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "ep_size": f"{ROLLOUT}.expert_parallel_size",
        "context_length": f"{ROLLOUT}.max_model_len",
        "max_running_requests": f"{ROLLOUT}.max_num_seqs",
        **dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens"), f"{ROLLOUT}.max_num_batched_tokens"),
        "max_total_tokens": f"{ROLLOUT}.cpu_cache_gib",
        "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
        "disable_cuda_graph": f"{ROLLOUT}.enforce_eager",
        "enable_memory_saver": f"{ROLLOUT}.free_cache_engine",
        **{name: f"{ROLLOUT}.{name}" for name in ("dtype", "load_format")},
        "device": "trainer.device",
        "random_seed": "trainer.seed",
    },
    reserved=(
        *("skip_tokenizer_init", "custom_weight_loader", "weight_version", "preferred_sampling_params"),
        *("enable_priority_scheduling", "disable_priority_preemption", "schedule_low_priority_values_first"),
        *("default_priority_value", "max_queued_requests"),
    ),
    unsupported={
        **dict.fromkeys(("quantization", "kv_cache_dtype"), "is not tested with weight updates"),
        **dict.fromkeys(
            ("modelopt_quant", "quantize_and_serve", "rl_quant_profile"), "is not tested with weight updates"
        ),
        **dict.fromkeys(
            ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
            "keeps the cache of old weights after an update",
        ),
        "enable_watermark": "changes how responses are sampled",
        "allow_auto_truncate": "shortens prompts",
        "weight_cache_mode": "shares weights that cannot be updated",
        "speculative_algorithm": "needs a draft model, which is not synced",
        **dict.fromkeys(("enable_lora", "lora_paths"), "is not supported: SGLang receives merged weights"),
        **dict.fromkeys(("dp_size", "pp_size", "nnodes", "tokenizer_worker_num"), "is not supported"),
        **dict.fromkeys(("enable_dp_attention", "disaggregation_mode"), "is not supported"),
    },
)


def find_problem() -> str:
    """Return what is wrong with the installed SGLang and how to fix it; empty if nothing is."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:  # a folder of that name has no origin
        return f"requires a package; {format_sglang_hint()}"
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return ""
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < _MIN_SGLANG:
        needed = ".".join(map(str, _MIN_SGLANG))
        return f"{installed} is too old: {needed} or newer is required; {format_sglang_hint()}"
    return ""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings with which SGLang does not work as a rollout engine."""
    rollout = config.actor_rollout_ref.rollout
    arguments = rollout.engine_kwargs.sglang
    known = list_sglang_arguments() if arguments and rollout.python is None else frozenset()
    yield from ARGUMENTS.find_conflicts(arguments, known)
    for name in ("pipeline_model_parallel_size", "data_parallel_size"):
        if (size := getattr(rollout, name)) > 1:
            yield Conflict(f"{ROLLOUT}.{name}", f"{size} is not supported with {ROLLOUT}.name=sglang", "=1")
    experts, devices = rollout.expert_parallel_size, rollout.tensor_model_parallel_size
    if devices % experts:
        reason = f"{experts} is not possible: SGLang distributes experts over a divisor of the engine's {devices}"
        yield Conflict(f"{ROLLOUT}.expert_parallel_size", f"{reason} devices", f"={devices}")


@cache
def list_sglang_arguments() -> frozenset[str]:
    """Return the names of SGLang's server arguments, read from its source, since importing it takes seconds.

    Empty if SGLang is not installed, or has no such source.
    """
    spec = find_spec("sglang")
    folders = spec.submodule_search_locations if spec is not None else None
    fields = Path(folders[0], "srt", "arg_groups", "fields") if folders else Path()
    return frozenset().union(*map(read_fields, fields.glob("*.py"))) if folders else frozenset()
