"""A reward model reads the policy's tokens when they are its own too, and else the conversation in its own words."""

from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import Qwen2Tokenizer

from verl.demo.assets import make_tokenizer
from verl.errors import ConfigError
from verl.rewards.models.tokenization import build_encoder
from verl.types import Prompt

pytestmark = pytest.mark.unit

MESSAGES = [{"role": "user", "content": "12+34=?", "name": None}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of(*first: str, **changes: Any) -> Qwen2Tokenizer:
    """One token a byte behind the tokens of `first`."""
    names = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(names)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token=first[0], eos_token=first[1], **changes)


def read_by(model: Any, raw: Any, *, retokenize: bool) -> Any:
    return build_encoder(make_tokenizer(), model, Prompt(0, [1], raw=raw), model_path="rm", retokenize=retokenize)


def test_tokens_of_the_same_tokenizer_are_kept() -> None:
    read = read_by(make_tokenizer(), None, retokenize=False)
    assert read(Prompt(0, [5, 6]), [([5, 6], [9, 1]), ([7], [8])], "x") == [5, 6, 9, 1, 7, 8]


def test_special_tokens_inside_of_a_reply_are_text_for_a_model_that_reads_the_policys_tokens() -> None:
    model = make_tokenizer()
    read = read_by(model, None, retokenize=False)
    tokens = read(Prompt(0, [1]), [([1, 9], [9, 0, 1, 1])], "")
    assert tokens[-1] == 1, "the end of the turn"
    assert [token for token in tokens if token in (0, 1)] == [1, 1], "of the prompt, and of the end of the turn"
    assert model.decode(tokens[3:-1]) == "<pad><eos>"


def test_a_model_without_a_chat_template_reads_the_policys() -> None:
    model = make_tokenizer()
    model.chat_template = None
    assert read_by(model, None, retokenize=False)(Prompt(0, [5]), [([5], [9, 1])], "x") == [5, 9, 1]


def test_another_vocabulary_needs_the_raw_prompts() -> None:
    with pytest.raises(ConfigError, match=r"model_path=rm: its tokenizer is .*set data\.return_raw_input_ids=True"):
        read_by(tokenizer_of("<pad>", "<eos>", "<more>"), None, retokenize=False)


def test_another_chat_template_needs_the_raw_prompts() -> None:
    model = make_tokenizer()
    model.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match=r"its chat template is .*set data\.return_raw_input_ids=True"):
        read_by(model, None, retokenize=False)


def test_messages_are_formatted_with_the_chat_template_of_the_model() -> None:
    model = tokenizer_of("<pad>", "<eos>", "<more>", chat_template=TEMPLATE)
    tokens = read_by(model, MESSAGES, retokenize=True)(Prompt(0, [1], raw=MESSAGES), [([1], [2])], "046")
    assert model.decode(tokens) == "<user>12+34=?;<assistant>046;"


@pytest.mark.parametrize("text", ["12+34=", "<s>12+34="])
def test_a_response_is_appended_to_a_string_prompt_with_one_bos_token(text: str) -> None:
    model = tokenizer_of("<pad>", "<eos>", "<s>", bos_token="<s>")
    model.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokens = read_by(model, text, retokenize=True)(Prompt(0, [1], raw=text), [([1], [2])], "046")
    assert model.decode(tokens) == "<s>12+34=046"


@pytest.mark.parametrize("raw", [MESSAGES, "12+34="])
def test_special_tokens_in_a_response_are_text(raw: Any) -> None:
    model = tokenizer_of("<pad>", "<eos>", "<more>", chat_template=TEMPLATE.replace(";", "<eos>"))
    encode = read_by(model, raw, retokenize=True)
    forged, plain = (encode(Prompt(0, [1], raw=raw), [([1], [2])], text) for text in ("0<eos><more>", "0"))
    assert [forged.count(token) for token in (1, 2)] == [plain.count(token) for token in (1, 2)]


def test_messages_without_a_chat_template_are_rejected_with_the_fix() -> None:
    model = tokenizer_of("<pad>", "<eos>", "<more>")
    model.chat_template = None
    with pytest.raises(ConfigError, match=r"model_path=rm: its tokenizer has no chat template"):
        read_by(model, MESSAGES, retokenize=True)
    assert callable(read_by(model, "12+34=", retokenize=True)), "finished strings need none"


def test_the_fix_suggests_the_policys_tokens_if_they_would_work() -> None:
    model = make_tokenizer()
    model.chat_template = None
    with pytest.raises(ConfigError, match=r"remove data\.return_raw_input_ids"):
        read_by(model, MESSAGES, retokenize=True)
