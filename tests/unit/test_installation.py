"""Install hints: the name `verl` on PyPI belongs to another project, so every text names this checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.installation import format_install_hint, format_vllm_hint

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
TEXTS = {".cff", ".cpu", ".cuda", ".ipynb", ".md", ".py", ".sh", ".slurm", ".toml", ".txt", ".yaml", ".yml", ""}
FOLDERS = (".ci", ".github", "docker", "docs", "examples", "tests", "verl")
FROM_PYPI = re.compile(r"""\bverl\[[a-z]|\binstall\s+(?:-\S+\s+)*["']?verl\b""")
EXTRAS = {"cpu", "vllm", "lora", "math", "wandb", "tracking", "agents", "megatron", "docs", "dev"}


def list_texts() -> list[Path]:
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return [path for path in sorted(paths) if path.suffix in TEXTS and path.is_file() and path.name != ".git"]


def declared_extras() -> set[str]:
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", read("pyproject.toml"), re.M | re.S)
    return set(re.findall(r"^([a-z]+) = \[", table, re.M))


def read(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_no_text_of_ours_installs_verl_from_pypi() -> None:
    texts = [path for path in list_texts() if path != Path(__file__)]
    assert {ROOT / "README.md", ROOT / "verl/cli.py", ROOT / ".ci/setup"} <= set(texts)
    assert [str(path) for path in texts if FROM_PYPI.search(read(path))] == []


@pytest.mark.parametrize("text", ['pip install "verl[lora]"', "pip install verl", "uv pip install -U 'verl'"])
def test_what_would_install_the_other_project_is_recognized(text: str) -> None:
    assert FROM_PYPI.search(text)


def test_the_extras_are_declared_and_texts_name_no_other() -> None:
    assert declared_extras() == EXTRAS
    lists = {names for path in list_texts() for names in re.findall(r'"\.\[([a-z,]+)\]"', read(path))}
    named = {extra for names in lists for extra in names.split(",")}
    assert {"cpu", "lora"} <= named <= EXTRAS


def test_hints_name_this_checkout_and_come_from_one_function() -> None:
    assert format_install_hint("lora") == 'pip install -e ".[lora]" in the verl checkout'
    sources = [path for path in (ROOT / "verl").rglob("*.py") if "pip install" in read(path)]
    assert sources == [ROOT / "verl/installation.py"]
    used = {extra for path in (ROOT / "verl").rglob("*.py") for extra in re.findall(r"_hint\('([a-z]+)'\)", read(path))}
    assert {"lora", "math"} <= used <= EXTRAS


def test_the_hint_for_vllm_is_the_command_of_the_readme() -> None:
    command, _, rest = format_vllm_hint().partition(" in the verl checkout ")
    assert f"\n{command}\n" in read("README.md")
    assert (ROOT / "requirements-cuda.txt").exists()
    assert "requirements-cuda.txt" in rest
