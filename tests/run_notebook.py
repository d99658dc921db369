"""Execute the code cells of a notebook: `python tests/run_notebook.py NOTEBOOK [OLD=NEW...]`, with texts replaced.

nbclient does it in a Jupyter kernel if it is installed; otherwise the cells run in this process, one after another.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path


def read_cells(notebook: Path) -> list[str]:
    """Return the code cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def replace(text: str, replacements: list[str]) -> str:
    for replacement in replacements:
        old, _, new = replacement.partition("=")
        assert old in text, f"the notebook has no {old!r}"
        text = text.replace(old, new)
    return text


def main(notebook: Path, replacements: list[str]) -> None:
    if find_spec("nbclient") and find_spec("ipykernel"):
        import nbformat
        from nbclient import NotebookClient

        text = replace(notebook.read_text(encoding="utf-8"), replacements)
        done = NotebookClient(nbformat.reads(text, as_version=4), timeout=900, kernel_name="python3").execute()
        print("".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", ())))
        return
    namespace = vars(sys.modules["__main__"])
    code = replace("\n\n\n".join(read_cells(notebook)), replacements)
    exec(compile(code, str(notebook), "exec"), namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
