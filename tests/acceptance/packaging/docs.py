"""Check the documentation site: a strict build, every internal link and anchor of its pages, how they look in Chromium
on a phone without a network, and every snippet.

make show-docs [ARGS="[--short] [--site DIR]"]

Formulas and diagrams are drawn, and neither pages nor tables are wider than the screen. `--short` looks at the pages
with diagrams, the wide tables and some formulas, and leaves out the snippets, which are unit tests too
(tests/unit/test_docs.py). `--site` keeps the built site. Links to other sites are not followed. A broken link, a broken
anchor, and a page with a formula, a diagram and a table that do not work must be reported. Without Chromium or npm, the
JSON line says what was not looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from _browser import View, find_chromium, look_at
from _common import ROOT, Stopwatch, finish

from verl.installation import format_install_hint

SHORT_PAGES = ("agents", "algorithms/ppo", "index", "results", "settings")
SPOILED = (
    '<article><p>\\frac{1}{2}</p><div class="diagram"><pre class="mermaid">flowchart LR</pre></div>'
    '<div class="md-typeset__scrollwrap" style="overflow: auto"><table><td><p style="width: 2000px"></table></div>'
    "</article>"
)
ADDRESSES = {"a": "href", "link": "href", "img": "src", "script": "src"}


class PageParser(HTMLParser):
    """Collects the links of a page, and the anchors that links can lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := attributes.get(key))}
        if link := attributes.get(ADDRESSES.get(tag, "")):
            self.links.append(link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="without the snippets")
    parser.add_argument("--site", type=Path, help="build into this folder and keep it")
    options = parser.parse_args()
    if missing := [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]:
        print(f"the site cannot be built: {', '.join(missing)} not installed. Run {format_install_hint('docs')}")
        finish("docs", False, missing=missing)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        site = options.site or Path(folder) / "site"
        built = build(site)
        build_s = watch.seconds()
        pages = read_pages(site)
        links, broken = check_links(site, pages)
        noticed = count_noticed_mistakes(site, pages)
        looked, ugly = look(site, list(pages), options.short)
    for problem in broken + ugly:
        print(problem)
    snippets, snippets_passed = (0, True) if options.short else check_snippets()
    finish(
        "docs",
        built and not broken and not ugly and noticed == 2 and len(pages) > 60 and links > 1000 and snippets_passed,
        pages=len(pages),
        links=links,
        broken=len(broken),
        deliberate_mistakes_noticed=f"{noticed} of 2",
        **looked,
        snippets="not run" if options.short else snippets,
        build_s=round(build_s, 1),
        seconds=round(watch.seconds(), 1),
    )


def build(site: Path) -> bool:
    """Build the site; any warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {name: value for name, value in os.environ.items() if name not in ("SITE_URL", "REPO_URL")}
    return subprocess.run(command, cwd=ROOT, env={**environment, "NO_MKDOCS_2_WARNING": "1"}).returncode == 0


def read_pages(site: Path) -> dict[Path, PageParser]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = PageParser()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


def check_links(site: Path, pages: dict[Path, PageParser]) -> tuple[int, list[str]]:
    """Return the number of internal links, and a message for each that leads nowhere."""
    count, broken = 0, []
    for page, content in pages.items():
        for link in content.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            if problem := explain_broken(site, page, unquote(parts.path), unquote(parts.fragment), pages):
                broken.append(f"{page.relative_to(site)}: {link}: {problem}")
    return count, broken


def explain_broken(site: Path, page: Path, path: str, anchor: str, pages: dict[Path, PageParser]) -> str | None:
    if path.startswith("/"):  # of the 404 page, which has no place of its own
        target = site / path.removeprefix("/").removeprefix("docs/")
    else:
        target = Path(os.path.normpath(page.parent / path)) if path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "no such page or file"
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return None


def count_noticed_mistakes(site: Path, pages: dict[Path, PageParser]) -> int:
    """Return how many of two deliberate mistakes the check of links reports."""
    spoiled = PageParser()
    spoiled.feed('<a href="no_such_page/">a</a><a href="settings/#data.no_such_setting">b</a>')
    return len(check_links(site, {**pages, site / "spoiled.html": spoiled})[1]) - len(check_links(site, pages)[1])


def look(site: Path, pages: list[Path], is_short: bool) -> tuple[dict[str, object], list[str]]:
    """Return what was looked at in Chromium, and a message for each page with a fault."""
    chromium = find_chromium()
    if chromium is None:
        return {"looked_at": "nothing: Chromium is not installed"}, []
    texts = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in pages if path.name != "404.html"}
    has_script = (site / "assets/mermaid.min.js").is_file()
    if is_short:
        short = {f"{name}/index.html" for name in SHORT_PAGES} | {"index.html"}
        texts = {page: text for page, text in texts.items() if page in short or 'class="mermaid"' in text}
    (site / "spoiled.html").write_text(SPOILED)
    *views, spoiled = look_at(site, [*texts, "spoiled.html"], chromium)
    (site / "spoiled.html").unlink()
    faults = [f"{view.page}: {fault}" for view in views for fault in find_faults(view, has_script)]
    if missed := {"TeX", "diagrams", "tables"} - {fault.split()[0] for fault in find_faults(spoiled, True)}:
        faults.append(f"not noticed in the spoiled page: {', '.join(missed)}")
    figures = {
        "looked_at": len(views),
        "formulas": sum(view.formulas for view in views),
        "diagrams": sum(view.drawn for view in views) if has_script else "not drawn: npm is not reachable",
        "tables": sum(view.tables for view in views),
        "ugly": len(faults),
    }
    return figures, faults


def find_faults(view: View, has_script: bool) -> list[str]:
    faults = {
        "TeX is shown as text": view.tex,
        "diagrams are not drawn": has_script and view.drawn < view.diagrams,
        "tables are wider than a phone": view.wide_tables > 0,
        "the page is wider than a phone": view.wide,
    }
    return [fault for fault, is_present in faults.items() if is_present]


def check_snippets() -> tuple[int, bool]:
    """Run what tests/unit/test_docs.py checks: the number of blocks and commands, and whether all pass."""
    sys.path.insert(0, str(ROOT / "tests/unit"))
    import test_docs

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_docs.__file__]
    passed = subprocess.run(command, cwd=ROOT).returncode == 0
    return len(list(test_docs.blocks())) + len(list(test_docs.commands())), passed


if __name__ == "__main__":
    main()
