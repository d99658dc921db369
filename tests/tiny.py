"""The model that tests train: a whole Qwen2, small enough to be made in a moment."""

from typing import Any

from transformers import Qwen2Config

__all__ = ["tiny_qwen2"]


def tiny_qwen2(**changes: Any) -> Qwen2Config:
    """Two layers over 64 tokens; `changes` as `Qwen2Config` names them."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    return Qwen2Config(**{**sizes, **changes})
