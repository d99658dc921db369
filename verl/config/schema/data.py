"""`data.*`: which prompts, how many, how long."""

from __future__ import annotations

from typing import Any, Literal

from verl.config.schema.base import Section, setting

__all__ = ["DataConfig"]


class DataConfig(Section):
    train_files: str | list[str] = setting(
        None, "Training prompts: Parquet or JSONL, one file or a list.", required=True
    )
    val_files: str | list[str] | None = setting(None, "Held-out prompts for validation; null: no validation.")
    prompt_key: str = setting("prompt", "Column of the prompt: chat messages, or a finished string.")
    max_prompt_length: int = setting(512, "Longest prompt.", unit="tokens", ge=1)
    max_response_length: int = setting(512, "Longest answer.", unit="tokens", ge=1)
    train_batch_size: int = setting(
        1024, "Prompts drawn a step; each is answered rollout.n times.", unit="prompts", ge=1
    )
    val_batch_size: int | None = setting(None, "Prompts validated at once; null: all of them.", unit="prompts", ge=1)
    shuffle: bool = setting(True, "Draw the training prompts in a new random order every epoch.")
    seed: int | None = setting(None, "Seed of that order; null: trainer.seed.")
    filter_overlong_prompts: bool = setting(False, "Leave out prompts longer than max_prompt_length, and say how many.")
    truncation: Literal["error", "left", "right", "middle"] = setting(
        "error", "What happens to a longer prompt that was not left out: an error, or which side is cut."
    )
    train_weights: list[float] | None = setting(
        None, "Shares of the drawn prompts, one for each entry of train_files; null: every row equally often."
    )
    curriculum_key: str | None = setting(None, "Column of numbers: each epoch goes from the lowest to the highest.")
    sampler: str | None = setting(
        None, "Your own order of rows, as package.module:function or file.py:function; see docs/data.md."
    )
    streaming: bool | None = setting(
        None, "Read training rows only when their turn comes; null: from 1,000,000 rows or 1 GiB on."
    )
    shuffle_buffer_size: int = setting(
        16384, "With streaming: rows that are shuffled among each other, and held in memory.", unit="rows", ge=1
    )
    num_workers: int | None = setting(
        None, "Processes that tokenise prompts at start; null: as many as pay; 0: none.", unit="processes", ge=0
    )
    cache_dir: str | None = setting(None, "Where lengths of prompts are kept for the next start; null: ~/.cache/verl.")
    train_max_samples: int = setting(-1, "Use only the first so many training rows; -1: all.", unit="rows", ge=-1)
    val_max_samples: int = setting(-1, "Use only the first so many validation rows; -1: all.", unit="rows", ge=-1)
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Passed to the tokenizer's chat template as they are.")
    return_raw_input_ids: bool = setting(False, "Tokenize prompts for the reward model with its own chat template.")
