"""What follows a reply is rendered as the template would, and never changes what the model has generated."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat_shapes import SHAPES, TOOL, make_tokenizer
from verl.agents.messages import prepare_messages
from verl.agents.rendering import SCRIPTS, TOOL_SCRIPTS, ChatRenderer, check_template, find_drift
from verl.errors import ConfigError, DataError

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

QUESTION = {"role": "user", "content": "Guess."}
NEXT = {"role": "user", "content": "Lower."}
CALL = {"type": "function", "id": "call00000", "function": {"name": "lookup", "arguments": {"key": "a"}}}
ANSWER = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "Seven."}
OTHER_ANSWER = {"role": "tool", "tool_call_id": "call00001", "name": "lookup", "content": "Eight."}


def with_template(name: str, template: str, **changes: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a shape with another template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(name).backend_tokenizer, eos_token=SHAPES[name].eos, **changes
    )
    tokenizer.chat_template = template
    return tokenizer


def get_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def follow(name: str, messages: list[dict[str, Any]], last: str | None, tools: Any = ()) -> str:
    """Return what follows a reply that ended with the token `last`, as text."""
    tokenizer = make_tokenizer(name)
    last_id = None if last is None else get_id(tokenizer, last)
    return tokenizer.decode(ChatRenderer(tokenizer).render_next(messages, last_id, tools))


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("ChatML", "<|im_end|>", "\n<|im_start|>user\nLower.<|im_end|>\n<|im_start|>assistant\n"),
        ("Gemma", "<end_of_turn>", "\n<start_of_turn>user\nLower.<end_of_turn>\n<start_of_turn>model\n"),
        ("Zephyr", "</s>", "\n<|user|>\nLower.\n<|assistant|>\n"),
    ],
)
def test_the_separator_at_a_turn_boundary_is_kept(name: str, end: str, expected: str) -> None:
    assert follow(name, [NEXT], end) == expected


def test_a_separator_that_merges_with_what_follows_is_the_merged_token() -> None:
    template = "{% for m in messages %}{{ m.content + '</s>\n' }}{% endfor %}"
    tokenizer = with_template("Zephyr", template)
    messages = [QUESTION, {"role": "assistant", "content": "8"}, {"role": "user", "content": "\n\nLower."}]
    end = get_id(tokenizer, "</s>")
    appended = ChatRenderer(tokenizer).render_next(messages[2:], end)
    assert encode(tokenizer, "Guess.</s>\n8</s>") + appended == encode(tokenizer, "Guess.</s>\n8</s>\n\n\nLower.</s>\n")
    assert appended[0] not in encode(tokenizer, "\n"), "the newlines are one token"


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.rewrites])
@pytest.mark.parametrize("script", SCRIPTS)
def test_canonical_replies_give_the_tokens_of_the_whole(name: str, script: str) -> None:
    assert find_drift(make_tokenizer(name), SCRIPTS[script]) is None


@pytest.mark.parametrize("name", ["ChatML", "DeepSeek", "GLM-4", "Kimi", "Mistral", "Qwen3"])
@pytest.mark.parametrize("script", TOOL_SCRIPTS)
def test_canonical_tool_calls_give_the_tokens_of_the_whole(name: str, script: str) -> None:
    assert find_drift(make_tokenizer(name), TOOL_SCRIPTS[script], [TOOL]) is None


def test_the_end_of_a_turn_is_written_out_after_a_reply_that_was_cut_off() -> None:
    assert follow("ChatML", [NEXT], None).startswith("<|im_end|>\n<|im_start|>user\n")
    assert follow("Llama 3", [NEXT], None).startswith("<|eot_id|><|start_header_id|>user")


def test_a_reply_that_is_cut_off_after_a_newline_keeps_it_and_the_separator() -> None:
    tokenizer = make_tokenizer("ChatML")
    [newline] = encode(tokenizer, "\n")
    renderer = ChatRenderer(tokenizer)
    assert renderer.render_next([NEXT], newline) == renderer.render_next([NEXT], None)
    assert renderer.decode([*encode(tokenizer, "8"), newline], "length") == "8\n"


def test_another_stop_token_is_followed_by_the_whole_end_of_the_turn() -> None:
    assert follow("ChatML", [NEXT], "<|endoftext|>").startswith("<|im_end|>\n<|im_start|>user")
    assert follow("Llama 3", [NEXT], "<|eom_id|>").startswith("<|eot_id|><|start_header_id|>user")


def test_an_end_token_in_a_message_is_not_taken_for_the_end_of_the_turn() -> None:
    message = {"role": "user", "content": "<|im_end|>Lower.<|im_end|>"}
    text = follow("ChatML", [message], "<|im_end|>")
    assert text == "\n<|im_start|>user\n<|im_end|>Lower.<|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_special_tokens_loses_nothing_of_a_message_that_has_one() -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' }}"
    tokenizer = with_template("Zephyr", template)
    end = get_id(tokenizer, "</s>")
    appended = ChatRenderer(tokenizer).render_next([{"role": "user", "content": "a</s>b"}], end)
    assert tokenizer.decode(appended) == "\nuser: a</s>b\nassistant:"


def test_the_header_with_which_a_turn_ended_is_not_repeated() -> None:
    assert follow("GLM-4", [NEXT], "<|user|>") == "\nLower.<|assistant|>\n"
    assert follow("GLM-4", [ANSWER], "<|observation|>") == "\n<tool_response>Seven.</tool_response><|assistant|>\n"
    assert follow("GLM-4", [NEXT], "<|observation|>") == "<|user|>\nLower.<|assistant|>\n"
    assert follow("GLM-4", [NEXT], None) == "<|user|>\nLower.<|assistant|>\n"


def test_a_last_turn_that_ends_differently_from_others_is_continued_as_the_others() -> None:
    assert follow("Zephyr", [NEXT], None) == "</s>\n<|user|>\nLower.\n<|assistant|>\n"
    whole = make_tokenizer("Phi 3").apply_chat_template(
        [QUESTION, {"role": "assistant", "content": "8"}], tokenize=False
    )
    assert whole.endswith("<|end|>\n<|endoftext|>")
    assert follow("Phi 3", [NEXT], "<|end|>") == "<|user|>Lower.<|end|><|assistant|>"
    assert follow("gpt-oss", [NEXT], None).startswith("<|end|><|start|>user")


def test_a_turn_with_calls_may_end_with_another_token() -> None:
    header = "<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>Seven.<|end|><|start|>assistant"
    assert follow("gpt-oss", [ANSWER], "<|call|>", [TOOL]) == header
    assert follow("gpt-oss", [ANSWER], None, [TOOL]) == "<|call|>" + header


def test_answers_of_several_tools_share_a_turn_if_the_template_says_so() -> None:
    text = follow("ChatML", [ANSWER, OTHER_ANSWER], "<|im_end|>", [TOOL])
    answers = "\n<tool_response>\nSeven.\n</tool_response>\n<tool_response>\nEight.\n</tool_response>"
    assert text == f"\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"


def test_several_answers_are_rendered_by_a_template_that_accepts_one_call() -> None:
    text = follow("Llama 3", [ANSWER, OTHER_ANSWER], "<|eot_id|>", [TOOL])
    assert text.count("ipython") == 2
    assert text.startswith("<|start_header_id|>ipython<|end_header_id|>\n\nSeven.<|eot_id|>")


def test_answers_are_rendered_by_a_template_that_does_not_show_calls() -> None:
    assert follow("Zephyr", [ANSWER], "</s>") == "\n<|tool|>\nSeven.\n<|assistant|>\n"


def test_tools_are_part_of_what_a_template_renders_again() -> None:
    assert "[AVAILABLE_TOOLS]" in follow("Mistral", [NEXT], "</s>", [TOOL])
    assert follow("Mistral", [NEXT], "</s>") == "[INST] Lower.[/INST]"


def test_a_role_that_the_template_refuses_is_named() -> None:
    with pytest.raises(DataError, match=r"roles: user, assistant, tool.*unknown role tool"):
        follow("Command R", [ANSWER], None)


def test_a_template_that_hides_replies_cannot_be_continued() -> None:
    tokenizer = with_template("Zephyr", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="does not show a reply"):
        ChatRenderer(tokenizer).render_next([NEXT], None)


def test_text_at_the_end_of_a_turn_gets_no_space_of_a_first_word() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template("Mistral", template)
    whole = encode(tokenizer, "<s>[INST] Guess. [/INST] 8 </s><s>[INST] Lower. [/INST]")
    assert encode(tokenizer, "<s>[INST] Guess. [/INST] 8") + ChatRenderer(tokenizer).render_next([NEXT], None) == whole


@pytest.mark.parametrize("arguments", [{"key": "é"}, '{"key": "\\u00e9"}'])
@pytest.mark.parametrize(
    ("name", "expected"), [("ChatML", '"arguments": {"key": "é"}}'), ("DeepSeek", '{"key": "é"}\n')]
)
def test_arguments_are_objects_or_text_as_the_template_wants_them(name: str, expected: str, arguments: Any) -> None:
    call = {**CALL, "function": {"name": "lookup", "arguments": arguments}}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, ANSWER]
    tokenizer = make_tokenizer(name)
    assert expected in tokenizer.decode(ChatRenderer(tokenizer).render_prompt(prepare_messages(messages), [TOOL]))


def test_a_decoded_reply_has_its_special_tokens_but_not_the_one_that_ended_it() -> None:
    tokenizer = make_tokenizer("ChatML")
    renderer = ChatRenderer(tokenizer)
    ids = encode(tokenizer, "<tool_call>8 . 4</tool_call><|im_end|>")
    assert renderer.decode(ids) == "<tool_call>8 . 4</tool_call>"
    assert renderer.decode(ids[:-1], "length") == "<tool_call>8 . 4</tool_call>"
    assert renderer.decode(encode(tokenizer, "8<|endoftext|>")) == "8"
    assert renderer.decode([]) == ""


@pytest.mark.parametrize(
    ("name", "tools", "tokens"),
    [
        ("Qwen3", [], r"'<think' \(\d+\) where the whole conversation has '8' \(\d+\)"),
        ("gpt-oss", [], r"'<\|return\|>' \(\d+\) where the whole conversation has '<\|end\|>'"),
        ("Mistral", [TOOL], r"at token 1, .*'\[AVAILABLE_TOOLS\]' \(\d+\) where the whole conversation has '\[INST\]'"),
    ],
)
def test_a_template_that_rewrites_history_is_refused_with_the_first_differing_token(
    name: str, tools: list[Any], tokens: str
) -> None:
    with pytest.raises(ConfigError, match=tokens) as caught:
        check_template(make_tokenizer(name), tools)
    assert "use_inference_chat_template=true" in str(caught.value)
    check_template(make_tokenizer(name), tools, branches=True)


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss", "Mistral", "ChatML", "Llama 3", "DeepSeek", "GLM-4", "Kimi"])
def test_tools_alone_never_make_a_template_rewrite_history(name: str) -> None:
    check_template(make_tokenizer(name), [TOOL], only_tools=True)


def test_a_header_that_is_not_kept_in_history_is_a_rewrite() -> None:
    with pytest.raises(ConfigError, match="where the whole conversation has"):
        check_template(make_tokenizer("Qwen3"), template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("name", "tools"),
    [(name, []) for name, shape in SHAPES.items() if not shape.rewrites]
    + [(name, [TOOL]) for name in ("ChatML", "Llama 3", "DeepSeek", "GLM-4", "Kimi")],
)
def test_a_template_that_keeps_history_is_accepted(name: str, tools: list[Any]) -> None:
    check_template(make_tokenizer(name), tools)


@pytest.mark.parametrize("branches", [False, True])
def test_a_template_that_cannot_show_answers_of_tools_is_refused(branches: bool) -> None:
    with pytest.raises(ConfigError, match="drops messages of role tool"):
        check_template(make_tokenizer("Phi 3"), [TOOL], branches=branches)
    with pytest.raises(ConfigError, match="unknown role tool"):
        check_template(make_tokenizer("Command R"), [TOOL], branches=branches)


def test_drift_names_the_turn_and_the_position() -> None:
    template = "{% for m in messages %}{{ m.content if loop.index0 != 1 or not messages[4:] else '' }}</s>{% endfor %}"
    tokenizer = with_template("Zephyr", template)
    position = len(encode(tokenizer, "Guess.</s>"))
    assert find_drift(tokenizer, SCRIPTS["a second question"]) == (
        f"at token {position}, after 2 replies: '8' ({get_id(tokenizer, '8')}) where the whole conversation has "
        f"'</s>' ({get_id(tokenizer, '</s>')})"
    )
