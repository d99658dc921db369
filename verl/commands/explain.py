"""`verl explain`: what a number on the terminal or a metric means."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from verl.commands.arguments import ArgumentParser
from verl.errors import VerlError
from verl.tracking.explanations import EXPLANATIONS, Explanation, find_explanations

HELP = """\
usage: verl explain [NAME]

Explain a number of a run: what it means, which values are usual, and what to do about others. Without a name, all
numbers are listed.

options:
  NAME    label on a terminal, such as kl, or metric, such as actor/entropy

examples:
  verl explain "grad norm"
  verl explain response_length/clip_ratio
"""

_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Print the explanation of a name, or of all."""
    parser = ArgumentParser("verl explain")
    parser.add_argument("name", nargs="*")
    name = " ".join(parser.parse_args(argv).name)
    found = find_explanations(name) if name else EXPLANATIONS
    if not found:
        raise VerlError(f"verl explain: {name!r} is not a label or a documented metric{_suggest(name)}")
    sys.stdout.write("\n".join(f"{line}" for each in found for line in [*_render(each), ""]))
    return 0


def _render(explanation: Explanation) -> Iterator[str]:
    metrics = ", ".join(explanation.metrics)
    yield f"{explanation.label} ({metrics})" if explanation.label and metrics else explanation.label or metrics
    for text in filter(None, (explanation.meaning, explanation.usual)):
        yield from textwrap.wrap(text.replace("`", ""), _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _suggest(name: str) -> str:
    known = [text for each in EXPLANATIONS for text in (each.label, *each.metrics) if text]
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "; `verl explain` lists all"
