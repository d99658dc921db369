"""Check the documentation site: a strict build, every internal link and anchor of its pages, and every snippet.

make show-docs [ARGS="[--short] [--site DIR]"]

`--short` leaves out the snippets, which are unit tests too (tests/unit/test_docs.py). `--site` keeps the built site.
Links to other sites are not followed. A broken link and a broken anchor, added to a copy of the site, must be reported.
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

from _common import ROOT, Stopwatch, finish

from verl.installation import format_install_hint

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
    for problem in broken:
        print(problem)
    snippets, snippets_passed = (0, True) if options.short else check_snippets()
    finish(
        "docs",
        built and not broken and noticed == 2 and len(pages) > 60 and links > 1000 and snippets_passed,
        pages=len(pages),
        links=links,
        broken=len(broken),
        deliberate_mistakes_noticed=f"{noticed} of 2",
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


def check_snippets() -> tuple[int, bool]:
    """Run what tests/unit/test_docs.py checks: the number of blocks and commands, and whether all pass."""
    sys.path.insert(0, str(ROOT / "tests/unit"))
    import test_docs

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_docs.__file__]
    passed = subprocess.run(command, cwd=ROOT).returncode == 0
    return len(list(test_docs.blocks())) + len(list(test_docs.commands())), passed


if __name__ == "__main__":
    main()
