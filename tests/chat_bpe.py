"""A byte-level BPE tokenizer with merges and a chat template with tools: what real chat models have, but small."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

__all__ = ["TOOL_TEMPLATE", "bpe_tokenizer"]

TOOL_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or () %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = (
    '<tool_call>\n{"name": "lookup", "arguments": {"key": "red"}}\n</tool_call>',
    '{"name": "lookup", "description": "Return the value of a key.", "parameters": {"properties": {"key": {"type": '
    '"string"}}, "required": ["key"], "type": "object"}}',
    "system\nuser\nassistant\ntool\nThe answer is the value of the key. Higher. Lower. Error: there is no tool\n\n",
)


def bpe_tokenizer(
    texts: Sequence[str] = _TEXTS, template: str = TOOL_TEMPLATE, vocabulary: int = 512
) -> Qwen2Tokenizer:
    """Return a tokenizer trained on `texts`, whose turns end with <|im_end|>. It may be saved with a Qwen2 model."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(list(texts) * 4, trainer)
    model = json.loads(core.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )
