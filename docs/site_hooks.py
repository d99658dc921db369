"""Hooks of the documentation site (`mkdocs.yml`), so that the same pages work on a Git host and on the site.

- Pages at the root of the repository, such as CONTRIBUTING.md, become pages of the site.
- Each folder of examples/ is a page with its files, and paths of examples link to it.
- Links to other source files go to the repository if its address is known (`repo_url`); otherwise they become paths.
- Every setting has an anchor, and its name links to it wherever a page mentions it.
- Diagrams, settings and tables are readable on narrow screens.
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
LANGUAGES = {".py": "python", ".yaml": "yaml", ".slurm": "bash"}  # of examples; others are downloads

_BLOCK_OR_LINK = re.compile(
    r"^ *```.*?^ *```$"  # a block
    r"|(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)"  # a link: text, address, anchor
    r"|`(examples/[\w./-]+)`",  # the path of an example
    re.MULTILINE | re.DOTALL,
)
_SECTION_OR_KEY = re.compile(r"^#+ ([\w.]+)$|^\| `(\w+)`", re.MULTILINE)
_HEADING_OR_KEY = re.compile(r'(<h[23] id="[^"]*">)([\w.]+)|(<tr>\s*<td)(><code>)(\w+)(?=</code>)')
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_NOT_LINKED = r"<(a|h\d|pre)\b.*?</\1>"
_KEY = re.compile(_NOT_LINKED + r"|<code>([\w.]+\.\w+)((?:=[^<]*)?)</code>", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root of the repository, and the examples."""
    from mkdocs.structure.files import File

    for folder in sorted({path.parent for path in list_examples()}):
        address = folder.relative_to(ROOT).as_posix()
        paths = [path for path in list_examples() if path.parent == folder]
        files.append(File.generated(config, f"{address}.md", content=render_examples(address, paths)))
        for path in paths:
            if path.suffix not in LANGUAGES:
                files.append(File.generated(config, f"{address}/{path.name}", abs_src_path=str(path)))
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
    html = _TABLE.sub(lambda match: label_cells(match[0]), html)
    html = re.sub(r'(<pre class="mermaid">.*?</pre>)', r'<div class="diagram">\1</div>', html, flags=re.DOTALL)
    target = SETTINGS_PAGES.get(uri, SETTINGS_PAGES[""])
    address = files.get_file_from_path(target).url_relative_to(page.file)  # type: ignore[union-attr]
    return link_settings(html, list_settings((ROOT / "docs" / target).read_text(encoding="utf-8")), address)


def list_examples() -> list[Path]:
    """Return the files of examples/, without what running them has left there."""
    return sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in {*LANGUAGES, ".ipynb", ".json"})


def render_examples(address: str, paths: list[Path]) -> str:
    """Return a page with the files of a folder, each below its name."""
    parts = [f"# {address}"]
    for path in paths:
        parts.append(f"## {path.name} {{ #{path.name} }}")
        if language := LANGUAGES.get(path.suffix):
            parts.append(f"~~~~{language}\n{path.read_text(encoding='utf-8').rstrip()}\n~~~~")
        else:
            parts.append(f"[Download]({posixpath.basename(address)}/{path.name})")
    return "\n\n".join(parts) + "\n"


def find_example(path: str) -> str | None:
    """Return the address of an example's page, with the anchor of its file; None if its folder has no files."""
    if (ROOT / path).is_file():
        return f"{posixpath.dirname(path)}.md#{posixpath.basename(path)}"
    return f"{path}.md" if ROOT / path in {example.parent for example in list_examples()} else None


def rewrite_links(markdown: str, page: str, repo_url: str) -> str:
    """Return the text of a page with every link leading to a page of the site or to the repository.

    Paths of examples become links.

    Args:
        markdown: Text of the page.
        page: Its address in the site's sources, such as `algorithms/grpo.md`.
        repo_url: Address of the repository; if empty, a link to a file becomes its path.
    """
    is_root_page = page in ROOT_PAGES.values()
    folder = "" if is_root_page else posixpath.dirname(f"docs/{page}")

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor, example = match[1], match[2], match[3] or "", match[4]
        if example is not None:
            text, path = f"`{example}`", posixpath.normpath(example)
        elif text is None:
            return match[0]
        else:
            path = posixpath.normpath(posixpath.join(folder, link))
        if path.startswith("examples/") and (target := find_example(path)):
            return f"[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')})"
        if example is not None:
            return match[0]
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


def label_cells(table: str) -> str:
    """Return a table whose cells know the headings of their columns, if it has three columns or more.

    `assets/site.css` then shows its rows as blocks on narrow screens.
    """
    headings = [re.sub(r"<[^>]*>", "", heading) for heading in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(headings) < 3:
        return table

    def label(row: re.Match[str]) -> str:
        labels = iter(headings)
        return re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', row[0])

    return f'<div class="rows">{re.sub("<tr>.*?</tr>", label, table, flags=re.DOTALL)}</div>'


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
