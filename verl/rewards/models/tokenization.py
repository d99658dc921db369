"""Tokens that a reward model reads: those of the policy, or the conversation tokenized again with the model's own
tokenizer and chat template (`data.return_raw_input_ids`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.data.chat import encode, render
from verl.data.special_tokens import get_special_text
from verl.errors import ConfigError
from verl.rewards.models.interface import SETTING
from verl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TurnTokens = tuple[Sequence[int], Sequence[int]]
"""The context of a reply, which is the prompt in the first turn, and the generated reply."""
EncodeConversation = Callable[[Prompt, Sequence[TurnTokens], str], list[int]]
"""(prompt, tokens of all turns, text of the response) -> tokens for the reward model."""


def build_encoder(
    policy: PreTrainedTokenizerBase,
    model: PreTrainedTokenizerBase,
    example: Prompt,
    *,
    model_path: str,
    retokenize: bool,
) -> EncodeConversation:
    """Return the encoder of conversations like that of `example`; raise a `ConfigError` if the model cannot read them.

    Tokens of the policy are used as they are if both tokenizers, and their chat templates, are the same.
    """
    setting = f"{SETTING}.model_path={model_path}"
    if retokenize:
        if not isinstance(example.raw, str) and model.chat_template is None:
            raise ConfigError(
                [
                    f"{setting}: its tokenizer has no chat template, but the prompts are lists of messages; add one to "
                    "its tokenizer_config.json, or write the prompts as plain strings"
                    + ("; or remove data.return_raw_input_ids=True" if _is_same_tokenizer(policy, model) else "")
                ]
            )
        return _make_template_encoder(model)
    if not _is_same_tokenizer(policy, model):
        raise ConfigError([f"{setting}: its tokenizer is not the policy's; set data.return_raw_input_ids=True"])
    if model.chat_template not in (None, policy.chat_template):
        raise ConfigError([f"{setting}: its chat template is not the policy's; set data.return_raw_input_ids=True"])
    return _make_token_encoder(model)


def _make_token_encoder(tokenizer: PreTrainedTokenizerBase) -> EncodeConversation:
    """Return an encoder that keeps the tokens of the policy, except for special tokens inside of a reply.

    A reply could end its turn and forge another with them, so they become text. The last token, which ends a turn, is
    kept.
    """

    def keep_tokens(prompt: Prompt, turns: Sequence[TurnTokens], response: str) -> list[int]:
        special = get_special_text(tokenizer)
        return [
            token
            for context, reply in turns
            for part in (context, special.spell(reply[:-1]), reply[-1:])
            for token in part
        ]

    return keep_tokens


def _make_template_encoder(tokenizer: PreTrainedTokenizerBase) -> EncodeConversation:
    """Return an encoder that applies the chat template to messages, and appends the response to a plain string."""

    def encode_conversation(prompt: Prompt, turns: Sequence[TurnTokens], response: str) -> list[int]:
        if isinstance(prompt.raw, str):
            text = render(tokenizer, prompt.raw, {}) + get_special_text(tokenizer).mark(response)
            has_bos = tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token))
            return encode(tokenizer, [text], add_special_tokens=not has_bos)[0]
        messages = [*prompt.raw, {"role": "assistant", "content": response}]
        return encode(tokenizer, [render(tokenizer, messages, {"add_generation_prompt": False})])[0]

    return encode_conversation


def _is_same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    probe = "What is 12 + 34?\n\n  It is 46; naïve, 漢字 and all."
    return one.get_vocab() == other.get_vocab() and encode(one, [probe]) == encode(other, [probe])
