"""The tables of docs/engines.md are what the engines declare."""

from __future__ import annotations

import pytest
from engine_tables import PAGE, replace_tables

pytestmark = pytest.mark.unit


def test_the_page_has_the_capabilities_of_the_engines() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_tables(text), "run `make docs`"
