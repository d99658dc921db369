"""Multi-turn conversations: the last assistant message is the ground truth, the messages before it are the prompt.

    python examples/data_preprocess/multiturn.py --source chats.jsonl --data_source squad --local_dir ~/data/chats

An example has `messages` with role and content, or `conversations` with from and value. If no built-in scorer supports
your --data_source, set reward.custom_reward_function.path=my_reward.py.
"""

from __future__ import annotations

import sys
from typing import Any

from rows import Example, ExampleError, get_field, make_row, prepare

ROLES = {"human": "user", "gpt": "assistant"}


def convert(example: Example, data_source: str) -> dict[str, Any]:
    messages = []
    for turn in get_field(example, "messages", "conversations"):
        role, content = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")
        if not role or not isinstance(content, str):
            raise ExampleError(f"has a turn without role or text: {turn}")
        messages.append({"role": ROLES.get(role, role), "content": content})
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ExampleError("does not end with a reply of the assistant")
    *prompt, answer = messages
    turns = sum(message["role"] == "user" for message in prompt)
    return make_row(data_source, prompt, answer["content"], turns=turns)


if __name__ == "__main__":
    sys.exit(prepare(convert, description=__doc__, data_source="multiturn"))
