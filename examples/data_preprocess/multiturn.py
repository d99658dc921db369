"""Conversations of several turns: all but the last answer is the prompt, and the last answer the ground truth.

    python examples/data_preprocess/multiturn.py --source chats.jsonl --data_source squad --local_dir ~/data/chats

An example has `messages`, each with role and content, or `conversations`, each with from and value. Without a shipped
scorer for --data_source, give your own function with reward.custom_reward_function.path=my_reward.py.
"""

from __future__ import annotations

import sys
from typing import Any

from rows import Example, ExampleError, make_row, prepare, required

ROLES = {"human": "user", "gpt": "assistant"}


def convert(example: Example, data_source: str) -> dict[str, Any]:
    messages = []
    for turn in required(example, "messages", "conversations"):
        role, content = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")
        if not role or not isinstance(content, str):
            raise ExampleError(f"has a turn without role or text: {turn}")
        messages.append({"role": ROLES.get(role, role), "content": content})
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ExampleError("does not end with an answer of the assistant to something")
    *prompt, answer = messages
    turns = sum(message["role"] == "user" for message in prompt)
    return make_row(data_source, prompt, answer["content"], turns=turns)


if __name__ == "__main__":
    sys.exit(prepare(convert, description=__doc__, data_source="multiturn"))
