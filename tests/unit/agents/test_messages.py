"""Messages in OpenAI's form become what chat templates read."""

import pytest

from verl.agents.messages import prepare_messages

pytestmark = pytest.mark.unit


def test_messages_of_an_sdk_become_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "a"}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "noon"},
        {"role": "tool", "tool_call_id": "other", "content": "?"},
    ]
    assert prepare_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**call, "function": {"name": "lookup", "arguments": {"key": "a"}}},
                {**empty, "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "lookup", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "noon"},
        {"role": "tool", "tool_call_id": "other", "content": "?"},
    ]
    assert call["function"]["arguments"] == '{"key": "a"}', "the messages of the agent are not changed"


def test_lone_surrogates_are_replaced_because_tokenizers_refuse_them() -> None:
    [message] = prepare_messages([{"role": "tool", "content": "a\ud800b"}])
    assert message["content"] == "a?b"
