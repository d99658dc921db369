"""`verl explain`: what a number on the terminal, a metric, or a warning of a run means."""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from verl.commands.arguments import ArgumentParser
from verl.diagnosis.rule import Rule
from verl.diagnosis.rules import RULES, find_rule
from verl.errors import VerlError
from verl.tracking.explanations import EXPLANATIONS, Explanation, find_explanations

HELP = """\
usage: verl explain [NAME]

Explain a number of a run: what it means, which values are usual, and what to do about others. Or explain a warning:
what it means, when it is given, and what to try. Without a name, all numbers and all warnings are listed.

options:
  NAME    label on a terminal, such as kl; metric, such as actor/entropy; or rule of a warning, such as kl-explosion

examples:
  verl explain "grad norm"
  verl explain response_length/clip_ratio
  verl explain entropy-collapse
"""

_WIDTH = 100


def main(argv: Sequence[str]) -> int:
    """Print the explanation of a name, or of all."""
    parser = ArgumentParser("verl explain")
    parser.add_argument("name", nargs="*")
    name = " ".join(parser.parse_args(argv).name)
    if not name:
        _print(*map(_render, EXPLANATIONS), _render_list(RULES))
    elif found := find_explanations(name):
        _print(*map(_render, found))
    elif rule := find_rule(name):
        _print(_render_rule(rule))
    else:
        raise VerlError(
            f"verl explain: {name!r} is not a label, a documented metric or the rule of a warning{_suggest(name)}"
        )
    return 0


def _print(*blocks: Iterator[str]) -> None:
    sys.stdout.write("\n".join(line for block in blocks for line in [*block, ""]))


def _render(explanation: Explanation) -> Iterator[str]:
    metrics = ", ".join(explanation.metrics)
    yield f"{explanation.label} ({metrics})" if explanation.label and metrics else explanation.label or metrics
    for text in filter(None, (explanation.meaning, explanation.usual)):
        yield from _wrap(text)


def _render_rule(rule: Rule) -> Iterator[str]:
    yield rule.name
    yield from _wrap(rule.meaning)
    for title, text in (
        ("looks at", ", ".join(rule.metrics)),
        ("warns if", rule.limits),
        ("remedy", f"{rule.remedy[0].upper()}{rule.remedy[1:]}."),
        ("remedy in supervised fine-tuning", rule.sft_remedy and f"{rule.sft_remedy[0].upper()}{rule.sft_remedy[1:]}."),
    ):
        if not text:
            continue
        yield f"  {title}:"
        yield from _wrap(text, "    ")


def _render_list(rules: Sequence[Rule]) -> Iterator[str]:
    """List the rules, each with the first sentence of its meaning."""
    yield "warnings (verl explain NAME says more)"
    for rule in rules:
        yield f"  {rule.name}"
        yield from _wrap(f"{rule.meaning.partition('. ')[0].rstrip('.')}.", "    ")


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text.replace("`", ""),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _suggest(name: str) -> str:
    known = [text for each in EXPLANATIONS for text in (each.label, *each.metrics) if text]
    nearest = difflib.get_close_matches(name, [*known, *(rule.name for rule in RULES)], n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else "; `verl explain` lists all"
