"""Writes the part of docs/troubleshooting.md that describes the rules of `verl.diagnosis`.

python tests/diagnosis_page.py [--write]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from verl.diagnosis.rule import Rule
from verl.diagnosis.rules import TOPICS

PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"
BEGIN, END = "<!-- rules: written by `make docs` -->\n", "<!-- end of the rules -->\n"


def render_rules() -> str:
    """Return all rules as Markdown."""
    return "\n".join(line for topic, rules in TOPICS.items() for line in [f"### {topic}\n", *_rules(rules)])


def replace_rules(page: str) -> str:
    """Return the page with the rules of today."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{render_rules()}{END}{rest.split(END)[1]}"


def _rules(rules: tuple[Rule, ...]) -> Iterator[str]:
    for rule in rules:
        metrics = ", ".join(f"`{name}`" for name in rule.metrics)
        yield f"#### {rule.name}\n"
        yield f"{rule.meaning}\n"
        yield f"- **Looks at** {metrics}."
        yield f"- **Warns if:** {rule.limits}"
        yield f"- **Remedy:** {rule.remedy[0].upper()}{rule.remedy[1:]}."
        if rule.sft_remedy not in ("", rule.remedy):
            yield f"- **In supervised fine-tuning:** {rule.sft_remedy[0].upper()}{rule.sft_remedy[1:]}."
        yield ""


if __name__ == "__main__":
    text = replace_rules(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
