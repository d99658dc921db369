"""The hooks that make formulas and diagrams of the documentation site work without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
pytest.importorskip("latex2mathml")

SPEC = importlib.util.spec_from_file_location("site_offline", Path(__file__).parents[2] / "docs/site_offline.py")
assert SPEC is not None
assert SPEC.loader is not None
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


def test_a_formula_becomes_mathml() -> None:
    mathml = hooks.render_formula(r"\frac{a}{\beta}")
    assert mathml.startswith("<math")
    assert "<mfrac>" in mathml
    assert "frac{" not in mathml


def test_a_command_that_mathml_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nosuchcommand.*in this formula"):
        hooks.render_formula(r"\nosuchcommand{a}")


def test_without_npm_there_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hooks.find_script(tmp_path / "cache") is None


def test_the_script_comes_from_the_cache_if_its_checksum_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / f"mermaid-{hooks.MERMAID}.min.js").write_bytes(b"script")
    assert hooks.find_script(tmp_path) is None
    monkeypatch.setattr(hooks, "is_genuine", lambda content: content == b"script")
    assert hooks.find_script(tmp_path) == b"script"
