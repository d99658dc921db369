"""The final answer of a response, for votes among several responses to a prompt."""

from __future__ import annotations

import re

from verl.rewards.scorers.gsm8k import final_number
from verl.rewards.scorers.math import last_boxed


def extract_final_answer(text: str) -> str:
    """Return the number after ####, or the content of the last \\boxed, or else the text in normalized form.

    >>> extract_final_answer("2 + 2 = 4\\n#### 4"), extract_final_answer(" The Answer!")
    ('4', 'the answer')
    """
    if (number := final_number(text)) is not None:
        return f"{number.normalize():f}"
    if (boxed := last_boxed(text)) is not None:
        return " ".join(boxed.split())
    return " ".join(re.sub(r"[^\w\s.+-]", " ", text.casefold()).split()).strip(".")
