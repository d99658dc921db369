"""A model whose replies are written in a test, behind the chat template and the tokens of a real one.

Its tokenizer merges characters, and its replies are not what the tokenizer would make of their text: text that is
tokenized again shows.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from agent_config import agent_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.agents.agent_episode import AgentEpisode
from verl.agents.transcript import Transcript
from verl.types import Completion, Prompt, Sample, SamplingParams

__all__ = [
    "CHAT_TEMPLATE",
    "LOOKUP_CALL",
    "ScriptedModel",
    "call_lookup",
    "chatml_tokenizer",
    "list_samples",
    "play_episode",
]

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.role == 'tool' }}\n{{ m.content }}"
    '{% for call in m.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LOOKUP_CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}</tool_call>'


def call_lookup(prompt: str) -> str:
    """Reply after two results of the tool `lookup`, which is called for one at a time."""
    results = prompt.count("<|im_start|>tool lookup\n")
    return f"It is {results}, yes and no. é" if results == 2 else f"Let me see. {LOOKUP_CALL}"


@cache
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and their merges, with ChatML's marks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    words = ["system user assistant tool lookup question answer the of and is it yes no name arguments"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", extra_special_tokens=marks[:1], chat_template=CHAT_TEMPLATE
    )


class ScriptedModel:
    """`reply(prompt)` is what the model says after a prompt. `requests` are what it was asked.

    With a `gate`, each request waits there before it gets a reply; what the gate raises is the engine's failure.
    """

    def __init__(self, reply: Callable[[str], str], gate: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._reply, self._gate = reply, gate
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.tokenizer = chatml_tokenizer()

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(token_ids) for token_ids, _ in self.requests]

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.requests.append((list(token_ids), sampling))
        if self._gate is None:
            await asyncio.sleep(0)
        else:
            await self._gate(len(self.requests) - 1)
        text = self._reply(self.tokenizer.decode(token_ids))
        ids = [token for character in text for token in self.tokenizer.encode(character, add_special_tokens=False)]
        ids.append(self.tokenizer.eos_token_id)
        finish_reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        state = np.random.default_rng(zlib.crc32(repr((list(token_ids), ids)).encode()))
        logprobs = -state.random(len(ids), np.float32)
        return Completion(ids, logprobs, np.full(len(ids), 3, np.int32), finish_reason)


async def play_episode(
    agent: Callable[..., Any], model: ScriptedModel, sampling: SamplingParams, prompt: Prompt, **settings: Any
) -> Transcript:
    """Play one episode with an agent, and close what it has opened."""
    episode = AgentEpisode(agent_config(agent="test", **settings), model.tokenizer, agent=agent)
    try:
        return await episode(prompt, model.generate, sampling)
    finally:
        await episode.close()


def list_samples(transcript: Transcript) -> list[Sample]:
    assert transcript.failure is None, transcript.failure
    return transcript.to_samples(0, 0, 1.0, {})
