"""`data.*`: the prompts."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.base import Count, Section, setting
from verl.config.schema.conditions import OnlyIf, needs_given, unless, unless_given

_TRUNCATES = unless(
    ".filter_overlong_prompts", True, reason="data.filter_overlong_prompts=true leaves nothing to truncate"
)
_VALIDATES = needs_given(".val_files")
_IS_RANDOM = OnlyIf(
    (".shuffle", ".sampler", ".train_weights"),
    lambda shuffle, sampler, weights: shuffle or sampler is not None or weights is not None,
    "data.shuffle=false",
)
_USES_BUFFER = OnlyIf(
    (".streaming", ".shuffle", ".curriculum_key", ".sampler"),
    lambda streaming, shuffle, curriculum, sampler: streaming is not False and shuffle and not (curriculum or sampler),
    "only a streamed data set (data.streaming=true) with data.shuffle=true uses a shuffle buffer",
)
_MEASURES_AT_START = OnlyIf(
    (".streaming", ".val_files"),
    lambda streaming, val_files: streaming is not True or val_files is not None,
    "data.streaming=true tokenizes prompts as they are read",
)


class DataConfig(Section):
    train_files: str | list[str] = setting(required=True)
    """Training prompts: Parquet or JSONL, one file or a list; paths, or addresses such as hf://datasets/..."""
    val_files: str | list[str] | None = setting(None)
    """Validation prompts; null: no validation."""
    prompt_key: str = setting("prompt")
    """Column of the prompt: chat messages, or a formatted string."""
    max_prompt_length: Count = setting(512, unit="tokens")
    """Maximum prompt length."""
    max_response_length: Count = setting(512, unit="tokens")
    """Maximum response length."""
    train_batch_size: Count = setting(1024, unit="prompts")
    """Prompts per step; each gets rollout.n responses."""
    val_batch_size: Count | None = setting(None, unit="prompts", only_if=_VALIDATES)
    """Prompts per validation batch; null: all at once."""
    shuffle: bool = setting(True, only_if=unless_given(".sampler", ", which decides the order"))
    """Shuffle the training prompts every epoch."""
    seed: int | None = setting(None, only_if=_IS_RANDOM)
    """Seed of the shuffling; null: trainer.seed."""
    filter_overlong_prompts: bool = setting(False)
    """Drop prompts longer than max_prompt_length, and report how many."""
    truncation: Literal["error", "left", "right", "middle"] = setting("error", only_if=_TRUNCATES)
    """How a longer prompt is handled: an error, or the side that is cut off."""
    train_weights: list[float] | None = setting(None)
    """Sampling weights, one per entry of train_files; null: all rows equally often."""
    curriculum_key: str | None = setting(None)
    """Numeric column that orders each epoch, lowest first."""
    sampler: str | None = setting(None)
    """difficulty or replay (by scores), or your own as package.module:name or file.py:name; see docs/data.md."""
    sampler_kwargs: dict[str, Any] = setting({}, only_if=needs_given(".sampler"))
    """Keyword arguments of the sampler."""
    streaming: bool | None = setting(None)
    """Read training rows only when they are needed; null: from 1,000,000 rows or 1 GiB on."""
    shuffle_buffer_size: Count = setting(16384, unit="rows", only_if=_USES_BUFFER)
    """Rows in the shuffle buffer of a streamed data set."""
    num_workers: int | None = setting(None, unit="processes", ge=0, only_if=_MEASURES_AT_START)
    """Processes that tokenize prompts at startup; null: chosen by size; 0: none."""
    cache_dir: str | None = setting(None, only_if=_MEASURES_AT_START)
    """Cache directory of prompt lengths; null: ~/.cache/verl."""
    train_max_samples: int = setting(-1, unit="rows", ge=-1)
    """Maximum training rows, from the first; -1: all."""
    val_max_samples: int = setting(-1, unit="rows", ge=-1, only_if=_VALIDATES)
    """Maximum validation rows, from the first; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Keyword arguments for the tokenizer's chat template."""
    return_raw_input_ids: bool = setting(False)
    """Tokenize prompts for the reward model with its own chat template."""
