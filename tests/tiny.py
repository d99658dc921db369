"""The models that tests train, a whole Qwen2 and its cousins, and the tokenizer of their chats: made in a moment."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

__all__ = [
    "CHAT_TEMPLATE",
    "FAMILIES",
    "WINDOW",
    "chat_tokenizer",
    "save_family",
    "save_peft_adapter",
    "tiny_family",
    "tiny_qwen2",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


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


WINDOW = 16
"""The sliding window of the families that have one, in tokens."""

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen2": (Qwen2Config, {}),
    "Qwen3": (transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "Llama 3": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "Mistral": (transformers.MistralConfig, {"sliding_window": WINDOW, "head_dim": 32}),
    "Gemma 2": (
        transformers.Gemma2Config,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    ),
    "Gemma 3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Phi 3": (transformers.Phi3Config, {"sliding_window": WINDOW}),
    "Qwen3-MoE": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
"""What makes them different from each other, at the smallest size."""


def tiny_family(name: str, **changes: Any) -> PreTrainedConfig:
    """Two layers over 64 tokens, of that family."""
    kind, own = FAMILIES[name]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(**{**sizes, **own, **changes})


def save_family(name: str, folder: Path, **changes: Any) -> str:
    """A model of that family in `folder`, its weights so large that a wrong scale, window or expert shows."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_family(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def save_peft_adapter(model: Path, folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> None:
    """An adapter as PEFT saves it, of rank 4, whose values are large enough to show; `config` as `LoraConfig` names."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
                parameter.data = parameter.data.to(dtype)
    adapted.save_pretrained(folder)


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character, beside two marks that its chat template puts around messages."""
    marks = {"<|start|>": 0, "<|end|>": 1, "<|unknown|>": 2}
    characters = {chr(code): code for code in range(3, 127)}
    core = Tokenizer(models.WordLevel({**marks, **characters}, unk_token="<|unknown|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=template,
    )


def load_packed(path: str | Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a model for packed sequences that stores its weights and computes in `dtype`."""
    from verl.training.fsdp.model_loader import load_model
    from verl.training.fsdp.settings import FsdpSettings

    name = str(dtype).removeprefix("torch.")
    return load_model(FsdpSettings(str(path), **{"param_dtype": name, "compute_dtype": name, **settings}))
