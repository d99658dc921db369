"""The model that tests train, a whole Qwen2, and the tokenizer of their chats: both made in a moment."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

__all__ = ["chat_tokenizer", "tiny_qwen2"]

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
