"""The rules in docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import pytest
from diagnosis_page import PAGE, replace_rules

from verl.diagnosis.rules import RULES

pytestmark = pytest.mark.unit


def test_the_page_has_the_rules_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_rules(text), "run `make docs`"
    assert all(f"#### {rule.name}\n" in text for rule in RULES)
