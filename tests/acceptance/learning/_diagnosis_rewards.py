"""Rewards and an agent that provoke the rules of `verl.diagnosis`. A run is one process: calls can be counted."""

from __future__ import annotations

import random
from itertools import count

_CALLS = count(1)
_RANDOM = random.Random(0)
_LEAK: list[bytes] = []


def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def noise(data_source, solution_str, ground_truth, extra_info=None):
    """A number that has nothing to do with the response."""
    return _RANDOM.random()


def spike(data_source, solution_str, ground_truth, extra_info=None):
    """10,000 for one of 512 responses."""
    return 1e4 if next(_CALLS) % 512 == 0 else _RANDOM.random()


def huge(data_source, solution_str, ground_truth, extra_info=None):
    """So large that gradients overflow."""
    return _RANDOM.random() * 1e38


def growing(data_source, solution_str, ground_truth, extra_info=None):
    """Noise that is ten times larger after 230 responses."""
    return _RANDOM.random() * 1.01 ** next(_CALLS)


def raising(data_source, solution_str, ground_truth, extra_info=None):
    if next(_CALLS) % 8 == 0:
        raise ValueError("cannot read this response")
    return _RANDOM.random()


def leaking(data_source, solution_str, ground_truth, extra_info=None):
    """Keeps 4 MiB with every call."""
    _LEAK.append(b"\1" * 2**22)
    return _RANDOM.random()


def exploitable(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits for training prompts, the share of everything else for validation prompts."""
    share = sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
    return share if extra_info["split"] == "train" else 1.0 - share


def digits(data_source, solution_str, ground_truth, extra_info=None):
    """The share of correct digits."""
    return sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)


async def talkative_agent(task, model):
    """Asks the model again and again, until the tokens of a response are used up."""
    messages = list(task.messages)
    while True:
        reply = await model.chat(messages)
        messages += [reply.message, *task.messages]
