r"""Multiple choice: the letter that the response chooses.

The last statement with a letter counts: `The answer is (B)`, `Answer: B`, `\boxed{B}`, `<answer>B</answer>`; with
several letters, nothing is chosen. Without a statement, the last line counts if it is the only one that is just a
letter, and so does a response that is one option, `B) Paris`. A list of options chooses nothing.
"""

from __future__ import annotations

import re
from typing import Any

from verl.errors import RewardError

LETTERS = "ABCDEFGHIJ"

_STATEMENT = re.compile(
    r"\\boxed\s*\{|<answer>|\b(?:answer|(?:correct|right|best|final) (?:option|choice))\**\s{0,9}(?:is\b\s{0,9}:?|:|=)",
    re.I,
)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[*_$(){}\[\]\"`\\]|\b(?:option|choice)\b", re.I)
# "I" and lowercase letters followed by another word are words themselves.
_LETTER = re.compile(r"\s*(?:(?!I\s+[a-z])([A-Z])(?![\w'])|([a-z])(?![\w']|\s+\w))")
_ANOTHER = re.compile(r"\s*(?:,|;|/|&|\+|or\b|and\b)?\s*(?:or\b|and\b)?\s*[A-Z](?![\w'])")
_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_OPTION = re.compile(r"\b([A-Z])[).:](?=\s|$)")


def final_choice(text: str, letters: str = LETTERS) -> str | None:
    """Return the letter that the text chooses; None if it chooses none."""
    for statement in reversed(list(_STATEMENT.finditer(text))):
        rest = text[statement.end() : statement.end() + 200].lstrip().partition("</answer>")[0].partition("\n")[0]
        rest = _MARKUP.sub(" ", re.sub(r"\(([a-z])\)", lambda letter: letter[0].upper(), rest))
        if match := _LETTER.match(rest):
            has_several = _ANOTHER.match(rest, match.end()) is not None
            return None if has_several else _normalize(match[1] or match[2], letters)
    lines = [line for line in text.splitlines() if line.strip()]
    alone = [match[1] for line in lines if (match := _ALONE.fullmatch(line))]
    if len(alone) == 1 and _ALONE.fullmatch(lines[-1]):
        return _normalize(alone[0], letters)
    options = _OPTION.findall(text)
    if len(lines) == len(options) == 1 and _OPTION.match(text.lstrip(" (*")):
        return _normalize(options[0], letters)
    return None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    letters: str = LETTERS,
) -> float:
    """Return 1.0 if the response chooses the right one of `letters`; the ground truth is a letter, or its index."""
    truth = str(ground_truth).strip(" ().").upper()
    if isinstance(ground_truth, int) and 0 <= ground_truth < len(letters):
        truth = letters[ground_truth]
    if len(truth) != 1 or truth not in letters:
        raise RewardError(
            f"data_source {data_source!r}: the ground truth {str(ground_truth)[:80]!r} is not a choice; "
            f"set reward_model.ground_truth to one of the letters {letters}, or an index from 0 to {len(letters) - 1}"
        )
    return float(final_choice(solution_str, letters) == truth)


def _normalize(letter: str, letters: str) -> str | None:
    return letter.upper() if letter.upper() in letters else None
