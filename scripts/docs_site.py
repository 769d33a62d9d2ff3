"""What mkdocs does with our pages beside rendering them (mkdocs.yml, `hooks`). The same files read well without it.

- `<!-- from README: A, B -->` brings the README's sections of these titles.
- `<!-- picture: NAME.svg -->` before a mermaid block puts docs/pictures/NAME.svg in its place: mermaid would have to
  come from another host.
- A link to a file that is not a page becomes its plain text: the site has the documents, not the code.
- A place in `nav` that ends in / stands for all pages of that folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_README = re.compile(r"<!-- from README: (.+) -->")
_PICTURE = re.compile(r"<!-- picture: (\S+\.svg) -->\n+```mermaid\n.*?\n```", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_TEST_MARK = re.compile(r"<!-- test: .+? -->\n")


def on_config(config: Any) -> Any:
    """Called by mkdocs once."""
    config.nav = [_filled(entry) for entry in config.nav]
    return config


def _filled(entry: Any) -> Any:
    match entry:
        case str() if entry.endswith("/"):
            return [str(page.relative_to(DOCS)) for page in sorted((DOCS / entry).glob("*.md"))]
        case list():
            return [_filled(each) for each in entry]
        case dict():
            return {title: _filled(each) for title, each in entry.items()}
        case _:
            return entry


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page before it is rendered."""
    folder = (DOCS / page.file.src_uri).parent
    text = _README.sub(lambda found: _sections(found[1].split(", "), folder), markdown)
    text = _PICTURE.sub(lambda found: f"![]({os.path.relpath(DOCS / 'pictures' / found[1], folder)})", text)
    return _LINK.sub(lambda found: _link(found, folder), text)


def _sections(titles: list[str], folder: Path) -> str:
    """The named sections of the README, with links as they are from `folder`. Raises PluginError."""
    parts = re.split(r"^## (.+)\n", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if missing := [title for title in titles if title not in sections]:
        raise PluginError(f"README.md: expected a section {missing[0]!r}, got {', '.join(sections)}")
    text = "\n".join(f"## {title}\n{sections[title]}" for title in titles)
    return _LINK.sub(lambda found: _moved(found, folder), _TEST_MARK.sub("", text))


def _moved(found: re.Match[str], folder: Path) -> str:
    return f"[{found[1]}]({os.path.relpath(ROOT / found[2], folder)}{found[3] or ''})"


def _link(found: re.Match[str], folder: Path) -> str:
    target = (folder / found[2]).resolve()
    is_page = target.is_relative_to(DOCS) and target.suffix == ".md"
    return found[1] if target.exists() and not is_page else found[0]  # mkdocs names what is not there
