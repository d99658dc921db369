"""Hooks of the documentation site (`mkdocs.yml`), so that the same pages work on a Git host and on the site.

- Pages at the root of the repository, such as CONTRIBUTING.md, become pages of the site.
- Links to source files go to the repository if its address is known (`repo_url`); otherwise they become paths.
- Every setting has an anchor, and its name links to it wherever a page mentions it.
- Diagrams and settings are readable on narrow screens.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "SECURITY.md": "security_policy.md",
}
SETTINGS_PAGES = {"": "settings.md", "sft.md": "settings_sft.md"}  # by the page that mentions them; "": all others

_BLOCK_OR_LINK = re.compile(r"^ *```.*?^ *```$|(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)", re.M | re.S)
_SECTION_OR_KEY = re.compile(r"^#+ ([\w.]+)$|^\| `(\w+)`", re.MULTILINE)
_HEADING_OR_KEY = re.compile(r'(<h[23] id="[^"]*">)([\w.]+)|(<tr>\s*<td)(><code>)(\w+)(?=</code>)')
_NOT_LINKED = r"<(a|h\d|pre)\b.*?</\1>"
_KEY = re.compile(_NOT_LINKED + r"|<code>([\w.]+\.\w+)((?:=[^<]*)?)</code>", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root of the repository."""
    from mkdocs.structure.files import File

    for name, address in ROOT_PAGES.items():
        files.append(File.generated(config, address, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/."""
    return rewrite_links(markdown, page.file.src_uri, config.repo_url or "")


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Give settings their anchors, and link to them; mark up what `assets/site.css` lays out for narrow screens."""
    uri = page.file.src_uri
    if uri in SETTINGS_PAGES.values():
        for section in page.toc.items[0].children:
            for child in section.children:
                child.title = child.title.removeprefix(section.title)
        return f'<div class="settings">{add_setting_anchors(html)}</div>'
    html = re.sub(r'(<pre class="mermaid">.*?</pre>)', r'<div class="diagram">\1</div>', html, flags=re.DOTALL)
    target = SETTINGS_PAGES.get(uri, SETTINGS_PAGES[""])
    address = files.get_file_from_path(target).url_relative_to(page.file)  # type: ignore[union-attr]
    return link_settings(html, list_settings((ROOT / "docs" / target).read_text(encoding="utf-8")), address)


def rewrite_links(markdown: str, page: str, repo_url: str) -> str:
    """Return the text of a page with every link leading to a page of the site or to the repository.

    Args:
        markdown: Text of the page.
        page: Its address in the site's sources, such as `algorithms/grpo.md`.
        repo_url: Address of the repository; if empty, a link to a file becomes its path.
    """
    is_root_page = page in ROOT_PAGES.values()
    folder = "" if is_root_page else posixpath.dirname(f"docs/{page}")

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if text is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, link))
        if path.startswith("docs/") and not is_root_page:
            return match[0]
        if path in ROOT_PAGES or path.startswith("docs/"):
            target = ROOT_PAGES.get(path, path.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"
        if repo_url:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{text}]({repo_url.rstrip('/')}/{kind}/main/{path}{anchor})"
        return f"`{path}`" if text.strip("`") in (path, link) else f"{text} (`{path}`)"

    return _BLOCK_OR_LINK.sub(rewrite, markdown)


def list_settings(markdown: str) -> set[str]:
    """Return the full names of the settings that a reference page describes."""
    section, names = "", set()
    for heading, key in _SECTION_OR_KEY.findall(markdown):
        section = heading or section
        if key and section != "Aliases":
            names.add(f"{section}.{key}")
    return names


def add_setting_anchors(html: str) -> str:
    """Return a reference page whose keys have their full names as anchors."""
    section = ""

    def add(match: re.Match[str]) -> str:
        nonlocal section
        if match[2]:
            section = match[2]
            return match[0]
        return f'{match[3]} id="{section}.{match[5]}"{match[4]}{match[5]}'

    return _HEADING_OR_KEY.sub(add, html)


def link_settings(html: str, names: set[str], address: str) -> str:
    """Return a page on which the names of settings, outside headings, links and blocks, link to the reference."""

    def link(match: re.Match[str]) -> str:
        return match[0] if match[2] not in names else f'<a href="{address}#{match[2]}">{match[0]}</a>'

    return _KEY.sub(link, html)
