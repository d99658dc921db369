"""Hooks of the documentation site (`mkdocs.yml`) that make formulas and diagrams work without a network.

- Formulas become MathML when the site is built.
- The script that draws diagrams is taken from the npm registry once, checked, and becomes a part of the site.
"""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import tarfile
import tempfile
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

MERMAID = "11.17.2"
CHECKSUM = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"
CACHE = Path.home() / ".cache/verl"
ADDRESS = "assets/mermaid.min.js"
NPM_TIMEOUT_S = 60.0
LOG = logging.getLogger("mkdocs.hooks")  # a warning would fail a strict build

_FORMULA = re.compile(r'(<div class="formula">)(.*?)(</div>)', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the script that draws diagrams."""
    from mkdocs.structure.files import File

    if script := find_script(CACHE):
        files.append(File.generated(config, ADDRESS, content=script))
    else:
        LOG.info("npm cannot get mermaid %s: on this site, diagrams need a network", MERMAID)
    return files


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Render formulas, and load the script on pages with diagrams, before the theme looks for one elsewhere."""
    script = files.get_file_from_path(ADDRESS)
    if script is not None and '<pre class="mermaid">' in html:
        html += f'<script src="{script.url_relative_to(page.file)}"></script>'
    return _FORMULA.sub(lambda match: match[1] + render_formula(unescape(match[2])) + match[3], html)


def render_formula(tex: str) -> str:
    """Return a formula as MathML; a command that stays TeX is an error."""
    from latex2mathml.converter import convert

    mathml: str = convert(tex.strip(), display="block")
    if left := re.findall(r"\\[a-zA-Z]+", mathml):
        raise ValueError(f"latex2mathml does not know {', '.join(left)} in this formula: {tex.strip()}")
    return mathml


def find_script(cache: Path) -> bytes | None:
    """Return the script from the cache or, once, from the npm registry; None if npm is missing or fails."""
    cached = cache / f"mermaid-{MERMAID}.min.js"
    if cached.is_file() and is_genuine(cached.read_bytes()):
        return cached.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, f"mermaid@{MERMAID}"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=NPM_TIMEOUT_S)
            with tarfile.open(Path(folder) / f"mermaid-{MERMAID}.tgz") as package:
                script = package.extractfile("package/dist/mermaid.min.js")
                content = script.read() if script else b""
        except (OSError, subprocess.SubprocessError):
            return None
    if not is_genuine(content):
        raise ValueError(f"mermaid {MERMAID} from npm does not have the checksum in {Path(__file__).name}")
    cache.mkdir(parents=True, exist_ok=True)
    cached.write_bytes(content)
    return content


def is_genuine(content: bytes) -> bool:
    return hashlib.sha256(content).hexdigest() == CHECKSUM
