"""The notebook is the first example of docs/python_api.md, which `make show-api` runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_notebook import main, read_cells

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/grpo/train_from_python.ipynb"


def test_the_notebook_is_the_example_of_the_page() -> None:
    page = (ROOT / "docs/python_api.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert example is not None
    assert "\n\n\n".join(read_cells(NOTEBOOK)) == example[1].rstrip("\n")


def test_the_notebook_has_no_outputs_and_its_links_exist() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    texts = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)#\s]+)", texts):
        assert (NOTEBOOK.parent / link).exists(), link


def test_cells_run_one_after_another_with_texts_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("run_notebook.find_spec", lambda name: None)
    cells = [{"cell_type": "code", "source": ["notebook_number = 20"]}, {"cell_type": "markdown", "source": ["# no"]}]
    cells += [{"cell_type": "code", "source": ["print(notebook_number + 2)"]}]
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": cells}))
    main(tmp_path / "x.ipynb", ["20=40"])
    assert capsys.readouterr().out == "42\n"
