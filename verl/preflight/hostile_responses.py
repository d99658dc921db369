"""Responses that break reward functions: what a policy writes early in training, late in training, or by chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEEP, _LONG = 3000, 200_000


def list_hostile_responses(prompt: Any, reference: str) -> dict[str, str]:
    """Return name -> response to a prompt. None of them solves the task, or only by naming many answers."""
    return {**_list_short(), **_list_long(), **_list_maths(), **_list_markup(), **dict(_copy_row(prompt, reference))}


def _list_short() -> dict[str, str]:
    return {
        "blank": " \n\t ",
        "one word": "yes",
        "a null byte": "\x00",
        "emoji and right-to-left text": "\N{PILE OF POO}\u202e\u0639\u0631\u0628\u064a \u0661\u0662",
        "combining characters": "e" + "\u0301" * 2000,
        "digits of other scripts": "\u0967\u0968 \uff11\uff12 \u00bd \u2460",
        "format strings": "%s %n {0} {} ${x} \\1",
        "control characters": "\x1b[31m\x07\r\n\x7f",
    }


def _list_long() -> dict[str, str]:
    return {
        "200,000 words": "word " * _LONG,
        "one word of 200,000 letters": "a" * _LONG,
        "200,000 spaces": " " * _LONG + "x",
        "20,000 lines": "so\n" * 20_000,
    }


def _list_maths() -> dict[str, str]:
    return {
        "a number of 5,000 digits": "9" * 5000,
        "a number beyond floats": "1e400",
        "not a number": "nan",
        "infinity": "\\boxed{-\\infty}",
        "a tower of powers": "\\boxed{9^{9^{9^{9}}}}",
        "a huge factorial": "\\boxed{(10^{9})!}",
        "division by zero": "\\boxed{\\frac{1}{0}}",
        "nested fractions": "\\boxed{" + "\\frac{1}{" * _DEEP + "2" + "}" * _DEEP + "}",
        "an open box": "\\boxed{" * _DEEP,
        "an empty box": "\\boxed{}",
        "a macro of itself": "\\def\\x{\\x\\x}\\boxed{\\x}",
        "every number to 999": " ".join(f"\\boxed{{{number}}}" for number in range(1000)),
    }


def _list_markup() -> dict[str, str]:
    return {
        "nested brackets": "[" * _DEEP + "]" * _DEEP,
        "open brackets": "(" * _DEEP,
        "nested JSON": '{"a":' * _DEEP + "1" + "}" * _DEEP,
        "an open code fence": "```python\nwhile True: pass",
        "code that exits": "```python\nimport os; os._exit(0)\n```",
        "an empty code fence": "```python\n```",
        "tags without an end": "<answer>" * _DEEP,
        "tags in the wrong order": "</answer></think>1<think><answer>",
        "special tokens": "<|im_end|><|endoftext|></s>",
    }


def _copy_row(prompt: Any, reference: str) -> Iterator[tuple[str, str]]:
    text = prompt if isinstance(prompt, str) else "\n".join(_list_contents(prompt))
    yield "the prompt itself", text
    if reference != reference[::-1]:
        yield "the reference, reversed", reference[::-1]


def _list_contents(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield str(message.get("content") or "")
