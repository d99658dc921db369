"""Checks of the order and the length of training prompts."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks.conflict import Conflict
from verl.config.schema import Config


def find_conflicts(config: Config) -> Iterator[Conflict]:
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


def find_hints(config: Config) -> Iterator[Conflict]:
    """Yield a setting by which a long prompt would stop the run."""
    data = config.data
    if data.streaming and not data.filter_overlong_prompts and data.truncation == "error":
        reason = "a prompt longer than data.max_prompt_length stops the run when it is read"
        yield Conflict("data.streaming", reason, "set data.filter_overlong_prompts=true to drop such prompts")
