"""Checks of `engine_kwargs.vllm`: arguments must exist, and must not duplicate a setting of verl."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from verl.config.schema import Config
from verl.config.schema.rules import ACTOR, ROLLOUT

_KEY = f"{ROLLOUT}.engine_kwargs.vllm"
_MODEL = "actor_rollout_ref.model"
_SETTINGS = {
    "model": f"{_MODEL}.path",
    "tokenizer": f"{_MODEL}.tokenizer_path",
    "trust_remote_code": f"{_MODEL}.trust_remote_code",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    **{name: f"{ROLLOUT}.{name}" for name in ("dtype", "load_format", "gpu_memory_utilization", "enforce_eager")},
    **{name: f"{ROLLOUT}.{name}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), f"{ACTOR}.peft.lora_rank"),
    "seed": "trainer.seed",
}
"""Engine arguments that have a setting of their own, which is validated."""

_RESERVED = ("logprobs_mode", "skip_tokenizer_init", "weight_transfer_config", "worker_extension_cls")
"""Engine arguments whose values verl depends on."""


def check_engine_arguments(config: Config) -> Iterator[str]:
    """Yield engine arguments that duplicate a setting, are reserved, or do not exist in the installed vLLM."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not rollout.engine_kwargs.vllm:
        return
    known = list_vllm_arguments()
    for name in rollout.engine_kwargs.vllm:
        key = f"{_KEY}.{name}"
        if name in _SETTINGS:
            yield f"{key}: has its own setting; set {_SETTINGS[name]} instead"
        elif name in _RESERVED:
            yield f"{key}: is set by verl and cannot be changed; remove it"
        elif known and name not in known:
            close = get_close_matches(name, [other for other in known if other not in _RESERVED], n=1, cutoff=0.75)
            fix = f"did you mean {_SETTINGS.get(close[0], f'{_KEY}.{close[0]}')}?" if close else "remove it"
            yield f"{key}: is not an engine argument of the installed vLLM; {fix}"


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
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
