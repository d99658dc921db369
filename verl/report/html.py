"""Writing the page: one HTML file that needs no network.

All data is in script elements that are not executed, as base64 of compressed JSON: no text of a run appears in the HTML
itself. The content security policy names the page's script and style by their hashes and forbids everything else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl.report.contents import Contents, Limits, make_contents, read_run, read_samples
from verl.tracking.run_folder import RunFolder

MAX_BYTES = 14_500_000
"""The texts and tokens of samples are reduced until the page is not larger."""
SCRIPTS = ("dom", "data", "charts", "curves", "timeline", "table", "tokens", "group", "settings", "main")
"""Files in `page/`, in the order in which they become one script."""
_REDUCTION = 0.6


def build_page(folder: RunFolder, now: float, limits: Limits | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the HTML of a run's report.

    Args:
        folder: The run; it may still be going on.
        now: Unix time that the page shows as its own.
        limits: What the page contains at most.
        max_bytes: Limit of the page's size. Metrics and settings are not reduced to fit it.
    """
    limits = limits or Limits()
    run, data = read_run(folder, now), read_samples(folder, limits)
    while True:
        page = fill_page(make_contents(folder, run, data, limits))
        if len(page) <= max_bytes or not limits.characters:
            return page
        limits = replace(
            limits,
            characters=int(limits.characters * _REDUCTION) if limits.characters > 100_000 else 0,
            tokens=int(limits.tokens * _REDUCTION),
        )


def write_page(page: bytes, path: Path) -> None:
    """Write atomically, readable by this user only: responses may be confidential."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(page)
    os.replace(file.name, path)


def fill_page(contents: Contents) -> bytes:
    """Return the page with its data."""
    style, script = _read("page.css"), "\n".join(_read(f"{name}.js") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": "\n".join(_list_data(contents))}
    page = _read("page.html")
    for name, text in parts.items():
        page = page.replace(f"%{name}%", text, 1)
    return page.encode()


def _list_data(contents: Contents) -> Iterator[str]:
    yield _embed("run", {**contents.run, "chunks": len(contents.texts)})
    for number, chunk in enumerate(contents.texts):
        yield _embed(f"texts-{number}", chunk)
    for file, tokens in contents.tokens.items():
        yield _embed(f"tokens-{file}", tokens)


def _embed(name: str, value: Any) -> str:
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), mtime=0)).decode()
    return f'<script type="text/plain" id="data-{name}">{packed}</script>'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _read(name: str) -> str:
    return files("verl.report").joinpath("page", name).read_text(encoding="utf-8")
