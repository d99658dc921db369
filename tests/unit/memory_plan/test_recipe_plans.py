"""The comparison with published launch scripts in docs/performance.md is that of the code."""

from __future__ import annotations

import pytest
from recipe_plans import PAGE, replace_recipes

pytestmark = pytest.mark.unit


def test_the_page_has_the_plans_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_recipes(text), "run `make docs`"
