"""Chat templates in the shapes of well-known families, and BPE tokenizers with merges for them: made in a moment.

The templates are small and our own. They keep what matters for continuing a conversation: where turns begin and end,
what is stripped, what a template refuses, and what it changes in earlier turns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["SHAPES", "TOOL", "VOCABULARY", "ChatShape", "make_tokenizer"]

VOCABULARY = 512
"""Tokens of every tokenizer, special tokens included."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@dataclass(frozen=True)
class ChatShape:
    """A chat template with its special tokens. `stops` are those that a model of this family ends its turn with."""

    template: str
    tokens: tuple[str, ...]
    stops: tuple[str, ...]
    bos: str | None = None
    has_system: bool = True
    has_tools: bool = False
    max_calls: int = 2  # in one turn
    rewrites: bool = False  # earlier turns, when messages follow
    rewrites_with_tools: bool = False
    strips_right: tuple[str, ...] = ()  # special tokens that swallow the space behind them
    has_spaces: bool = False  # as SentencePiece: spaces are part of words, unknown characters are bytes

    @property
    def eos(self) -> str:
        return self.stops[0]


_QWEN_START = (
    "{{ '<|im_start|>system\n' }}{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}"
    "{% if tools %}{{ '\n\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
)
_QWEN_OTHERS = (
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
)
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

_CHATML = (
    _QWEN_START + "{% for m in messages %}" + _QWEN_OTHERS + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content }}" + _QWEN_CALLS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN3 = (
    _QWEN_START + "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + _QWEN_OTHERS + "{% elif m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else m.content %}"
    "{{ '<|im_start|>assistant\n' + said }}" + _QWEN_CALLS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday is Monday.\n\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson + '}' }}{% else %}"
    "{% if tools and loop.first %}{{ 'These are your tools.\n\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n\n' }}{% endfor %}{% endif %}"
    "{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL = (
    "{%- set first = 1 if messages[0].role == 'system' else 0 %}{% set ns = namespace(last=0, turn='assistant') %}"
    "{%- for m in messages[first:] %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{%- if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{%- if m.role == ns.turn %}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.turn = m.role %}"
    "{%- endif %}{%- if m.role == 'assistant' and m.tool_calls %}{% set ns.turn = 'user' %}{% endif %}{% endfor %}"
    "{{- bos_token }}{% for m in messages[first:] %}{% if m.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if first and loop.first %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}"
    "{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS] ["
    "{%- for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{- ', ' if not loop.last else ']' }}{% endfor %}{% else %} {{ m.content }}{% endif %}{{ eos_token }}"
    "{%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
_DEEPSEEK = (
    "{{- bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{%- for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{%- set ns = namespace(answers=false) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}"
    "{%- if ns.answers %}<｜tool▁outputs▁end｜>{% set ns.answers = false %}{% endif %}<｜User｜>{{ m.content }}"
    "{%- elif m.role == 'assistant' %}{% if ns.answers %}<｜tool▁outputs▁end｜>{% set ns.answers = false %}"
    "{%- else %}<｜Assistant｜>{% endif %}"
    "{%- if m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments"
    " + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
    "{%- else %}{{ m.content }}{% endif %}{{ eos_token }}"
    "{%- elif m.role == 'tool' %}{% if not ns.answers %}<｜tool▁outputs▁begin｜>{% set ns.answers = true %}{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{%- if ns.answers %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_GLM4 = (
    "[gMASK]<sop>{% for tool in tools or [] %}{% if loop.first %}{{ '<|system|>\nTools:' }}{% endif %}"
    "{{ '\n' + tool | tojson }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments.items() %}{{ '<arg>' + key + '=' + value + '</arg>\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>' + m.content + '</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_COMMAND_R = (
    "{{- bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{%- if m.role == 'assistant' %}<|CHATBOT_TOKEN|>{% elif m.role == 'user' %}<|USER_TOKEN|>"
    "{%- elif m.role == 'system' %}<|SYSTEM_TOKEN|>{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{- m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
_HARMONY = (
    "<|start|>system<|message|>You are helpful.\n# Valid channels: analysis, final.<|end|>"
    "{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{%- set ns = namespace(name=none, last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}"
    "{%- if '</think>' in m.content and loop.index0 > ns.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content.split('</think>')[0] }}<|end|>{% endif %}"
    "{%- if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ ns.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content.split('</think>')[-1] }}"
    "{%- if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if ns.name is none %}{{ raise_exception('a tool message without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_KIMI = (
    "{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{%- for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_system|>system<|im_middle|>You are helpful.<|im_end|>{% endif %}"
    "{%- if m.role == 'user' %}<|im_user|>user<|im_middle|>"
    "{%- elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{%- else %}<|im_system|>{{ m.name or m.role }}<|im_middle|>{% endif %}"
    "{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}"
    "{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)

SHAPES: dict[str, ChatShape] = {
    "ChatML": ChatShape(_CHATML, _QWEN_TOKENS, ("<|im_end|>", "<|endoftext|>"), has_tools=True),
    "Qwen3": ChatShape(_QWEN3, _QWEN_TOKENS, ("<|im_end|>", "<|endoftext|>"), has_tools=True, rewrites=True),
    "Llama 3": ChatShape(
        _LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        has_tools=True,
        max_calls=1,
    ),
    "Mistral": ChatShape(
        _MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        ("</s>",),
        bos="<s>",
        has_tools=True,
        rewrites_with_tools=True,
        has_spaces=True,
    ),
    "Gemma": ChatShape(
        _GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>", "<eos>"),
        bos="<bos>",
        has_system=False,
        has_spaces=True,
    ),
    "Phi 3": ChatShape(
        _PHI3,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("<|endoftext|>", "<|end|>"),
        strips_right=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        has_spaces=True,
    ),
    "DeepSeek": ChatShape(
        _DEEPSEEK,
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ),
            *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        ("<｜end▁of▁sentence｜>",),
        bos="<｜begin▁of▁sentence｜>",
        has_tools=True,
    ),
    "GLM-4": ChatShape(
        _GLM4,
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<tool_call>", "</tool_call>"),
        ),
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        has_tools=True,
    ),
    "Command R": ChatShape(
        _COMMAND_R,
        (
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        ),
        ("<|END_OF_TURN_TOKEN|>",),
        bos="<BOS_TOKEN>",
    ),
    "gpt-oss": ChatShape(
        _HARMONY,
        ("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
        has_tools=True,
        max_calls=1,
        rewrites=True,
    ),
    "Kimi": ChatShape(
        _KIMI,
        (
            *("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        ("<|im_end|>", "[EOS]"),
        has_tools=True,
    ),
    "Zephyr": ChatShape(_ZEPHYR, ("<s>", "</s>"), ("</s>",)),
}

_TEXT = """\
The capital of France is Paris, and the sum of 37 and 45 is 82.
Look up the key and tell me what you find: {"name": "lookup", "arguments": {"key": "a"}}
The quick brown fox jumps over the lazy dog. Überraschung! Das heißt: größer, kleiner; naïve café; 你好，世界; привет.
    def answer(question):
        return question + 1


<think>
Half of it is more than the other half.
</think>

You are a helpful assistant. Answer with the number only, higher or lower than the last one. user system tool
"""


@cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with the special tokens and the chat template of a shape."""
    shape = SHAPES[name]
    core = _train_words(len(shape.tokens)) if shape.has_spaces else _train_bytes(len(shape.tokens))
    core.add_special_tokens(
        [AddedToken(token, rstrip=token in shape.strips_right, normalized=False) for token in shape.tokens]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=shape.eos, bos_token=shape.bos, chat_template=shape.template
    )
    assert len(tokenizer) == VOCABULARY, (name, len(tokenizer))
    return tokenizer


def _train_bytes(reserved: int) -> Tokenizer:
    """Return a byte-level BPE that leaves room for special tokens. Newlines merge with each other and with spaces."""
    core = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(core, VOCABULARY - reserved, initial_alphabet=alphabet)
    return core


def _train_words(reserved: int) -> Tokenizer:
    """Return a BPE as SentencePiece makes them: spaces belong to words, and unknown characters become bytes."""
    octets = [f"<0x{code:02X}>" for code in range(256)]
    core = Tokenizer(models.BPE())
    newlines = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([newlines, pre_tokenizers.Metaspace(prepend_scheme="first")])
    _train(core, VOCABULARY - reserved - len(octets))
    learned = json.loads(core.to_str())["model"]
    vocabulary = {token: index for index, token in enumerate([*octets, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    core.model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<0x00>", fuse_unk=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def _train(core: Tokenizer, size: int, **options: Any) -> None:
    core.train_from_iterator([_TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
