"""Reports of the errors that end a run, in its folder."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from verl.private_files import make_folder
from verl.redaction import redact


def record_failure(error: Exception, folder: Path) -> None:
    """Write the traceback to `errors/<time>.txt`, and name the file in a note of the error.

    A file system that cannot be written must not hide the error.
    """
    now = time.localtime()
    path = folder / "errors" / time.strftime("%Y%m%d-%H%M%S.txt", now)
    with suppress(OSError):
        make_folder(path.parent)
        lines = [time.strftime("%Y-%m-%d %H:%M:%S", now), " ".join(sys.argv), *traceback.format_exception(error)]
        path.write_text(redact("\n".join(lines)), encoding="utf-8")
        error.add_note(f"full report: {path}")
