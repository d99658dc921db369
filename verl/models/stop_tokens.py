"""The tokens that end a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig


def find_stop_tokens(path: str, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a response of the model at `path`."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the model has no generation config
        generation = None
    return list_stop_tokens(generation, eos_token_id)


def list_stop_tokens(generation: GenerationConfig | None, eos_token_id: int | None) -> tuple[int, ...]:
    """Return the end tokens of a generation config and of a tokenizer."""
    ends = getattr(generation, "eos_token_id", None)
    return tuple(sorted({eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}))
