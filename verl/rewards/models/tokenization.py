"""What a reward model reads: the conversation as the policy had it, token by token, or written again in the model's own
tokens by its own chat template (`data.return_raw_input_ids`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.data.chat import encode, render
from verl.errors import ConfigError
from verl.rewards.models.interface import SETTING
from verl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EncodeConversation", "build_encoder", "keep_tokens", "make_template_encoder"]

EncodeConversation = Callable[[Prompt, Sequence[int], str], list[int]]
"""(prompt, tokens of prompt and answer, text of the answer) -> what the reward model reads."""


def build_encoder(
    policy: PreTrainedTokenizerBase,
    model: PreTrainedTokenizerBase,
    example: Prompt,
    *,
    model_path: str,
    retokenize: bool,
) -> EncodeConversation:
    """How conversations such as that of `example` reach the model; a `ConfigError` when they cannot, with the mend.

    Tokens are passed on as they are when both tokenizers are one and the same, and the model's template is not another.
    """
    place = f"{SETTING}.model_path={model_path}"
    if retokenize:
        if not isinstance(example.raw, str) and model.chat_template is None:
            raise ConfigError(
                [
                    f"{place}: its tokenizer has no chat template, and the prompts are lists of messages; put one into "
                    "its tokenizer_config.json, or write the prompts as finished strings"
                    + ("; or leave out data.return_raw_input_ids=True" if _same_tokens(policy, model) else "")
                ]
            )
        return make_template_encoder(model)
    if not _same_tokens(policy, model):
        raise ConfigError([f"{place}: its tokenizer is not the policy's; set data.return_raw_input_ids=True"])
    if model.chat_template not in (None, policy.chat_template):
        raise ConfigError([f"{place}: its chat template is not the policy's; set data.return_raw_input_ids=True"])
    return keep_tokens


def keep_tokens(prompt: Prompt, tokens: Sequence[int], answer: str) -> list[int]:
    """The tokens of the policy: what a model wrote is not tokenised again."""
    return list(tokens)


def make_template_encoder(tokenizer: PreTrainedTokenizerBase) -> EncodeConversation:
    """Messages by the chat template, the answer as the last of them; after a finished string the answer simply follows.

    A string is tokenised as the model's card would do it, with the special tokens that its tokenizer puts around.
    """

    def read(prompt: Prompt, tokens: Sequence[int], answer: str) -> list[int]:
        if isinstance(prompt.raw, str):
            text = prompt.raw + answer
            begun = tokenizer.bos_token is not None and text.startswith(str(tokenizer.bos_token))
            return list(tokenizer(text, add_special_tokens=not begun, verbose=False).input_ids)
        messages = [*prompt.raw, {"role": "assistant", "content": answer}]
        return encode(tokenizer, [render(tokenizer, messages, {"add_generation_prompt": False})])[0]

    return read


def _same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both give the same ids to the same text."""
    probe = "What is 12 + 34?\n\n  It is 46; naïve, 漢字 and all."
    return one.get_vocab() == other.get_vocab() and encode(one, [probe]) == encode(other, [probe])
