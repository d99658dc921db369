"""The table of the files of a step in docs/architecture.md is the one that a profile of a step prints."""

import os
import subprocess
import sys

import pytest
from step_files import PAGE, ROOT

pytestmark = pytest.mark.contract


def test_the_page_lists_the_files_whose_functions_run_in_a_step() -> None:
    """If modules have moved, `make docs` writes the new table."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/step_files.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("The ") :]
    assert table in PAGE.read_text(encoding="utf-8"), f"run `make docs`; the table is now:\n{table}"
