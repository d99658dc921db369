"""The models and the data of the combinations, made in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.chat_bpe import TOOL_TEMPLATE, bpe_tokenizer
from tests.combinations.factors import PROMPTS

CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>' for a in range(3)]
"""Each is one token, so that a model which was never trained calls tools."""
_LIKELY = {"<|im_end|>": 12.0, **dict.fromkeys(CALLS, 7.0), **dict.fromkeys("0123456789", 6.0)}
"""What is added to the logits of some tokens: others have about 0."""


def make_assets(folder: Path) -> None:
    """Write the models that `factors` names, and prompts for three steps."""
    tokenizer = bpe_tokenizer(
        [], template=TOOL_TEMPLATE.replace("tool.function | tojson", "tool.function.name"), vocabulary=272
    )
    tokenizer.add_tokens(CALLS)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    kinds: dict[str, tuple[type[Any], PreTrainedConfig]] = {
        "model": (Qwen2ForCausalLM, Qwen2Config(**sizes)),
        "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts)),
        "teacher": (
            Qwen2ForCausalLM,
            Qwen2Config(**sizes | {"hidden_size": 128, "num_attention_heads": 4}),
        ),
        "reward": (Qwen2ForSequenceClassification, Qwen2Config(**sizes, num_labels=1)),
    }
    for seed, (name, (kind, config)) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = kind(config)
        if name != "reward":
            _raise_logits(model, tokenizer)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{'Say ' * (index % 3)}{index}."}],
            "reward_model": {"ground_truth": str(index)},
        }
        for index in range(3 * PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def _raise_logits(model: Any, tokenizer: Any) -> None:
    """Make some tokens likely: the first number of every state is large, and only their logits depend on it."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0
        norm = (2.0**2 + model.config.hidden_size * 0.1**2) ** 0.5 / model.config.hidden_size**0.5
        model.lm_head.weight[:, 0] = 0.0
        for token, logit in _LIKELY.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token), 0] = logit * norm / 2.0
