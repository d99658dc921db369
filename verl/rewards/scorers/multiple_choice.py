r"""Multiple choice: the letter that the answer settles on.

The last statement that names one counts: `The answer is (B)`, `Answer: B`, `\boxed{B}`, `<answer>B</answer>`. If it
names several, the answer settles on none. Without a statement, a letter alone in the last line counts if no other line
is one, and so does an answer that is one option, `B) Paris`: a list of the options settles on nothing.
"""

from __future__ import annotations

import re
from typing import Any

from verl.errors import RewardError

__all__ = ["compute_score", "final_choice"]

LETTERS = "ABCDEFGHIJ"

_STATEMENT = re.compile(
    r"\\boxed\s*\{|<answer>|\b(?:answer|(?:correct|right|best|final) (?:option|choice))\**\s{0,9}(?:is\b\s{0,9}:?|:|=)",
    re.I,
)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[*_$(){}\[\]\"`\\]|\b(?:option|choice)\b", re.I)
# "I" and small letters are words of the sentence when another word follows.
_LETTER = re.compile(r"\s*(?:(?!I\s+[a-z])([A-Z])(?![\w'])|([a-z])(?![\w']|\s+\w))")
_ANOTHER = re.compile(r"\s*(?:,|;|/|&|\+|or\b|and\b)?\s*(?:or\b|and\b)?\s*[A-Z](?![\w'])")
_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_OPTION = re.compile(r"\b([A-Z])[).:](?=\s|$)")


def final_choice(text: str, letters: str = LETTERS) -> str | None:
    """The letter that the text settles on, None when it settles on none.

    >>> final_choice("It could be (A), but no: the answer is **(B)**.")
    'B'
    """
    for statement in reversed(list(_STATEMENT.finditer(text))):
        rest = text[statement.end() : statement.end() + 200].lstrip().partition("</answer>")[0].partition("\n")[0]
        rest = _MARKUP.sub(" ", re.sub(r"\(([a-z])\)", lambda letter: letter[0].upper(), rest))
        if found := _LETTER.match(rest):
            several = _ANOTHER.match(rest, found.end()) is not None
            return None if several else _among(letters, found[1] or found[2])
    lines = [line for line in text.splitlines() if line.strip()]
    alone = [found[1] for line in lines if (found := _ALONE.fullmatch(line))]
    if len(alone) == 1 and _ALONE.fullmatch(lines[-1]):
        return _among(letters, alone[0])
    options = _OPTION.findall(text)
    if len(lines) == len(options) == 1 and _OPTION.match(text.lstrip(" (*")):
        return _among(letters, options[0])
    return None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    letters: str = LETTERS,
) -> float:
    """1.0 when the answer settles on the right one of `letters`; the ground truth is a letter, or an index from 0."""
    truth = str(ground_truth).strip(" ().").upper()
    if isinstance(ground_truth, int) and 0 <= ground_truth < len(letters):
        truth = letters[ground_truth]
    if len(truth) != 1 or truth not in letters:
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {str(ground_truth)[:80]!r} is no choice; "
            f"reward_model.ground_truth must be one of the letters {letters}, or an index from 0 to {len(letters) - 1}"
        )
    return float(final_choice(solution_str, letters) == truth)


def _among(letters: str, letter: str) -> str | None:
    return letter.upper() if letter.upper() in letters else None
