"""mkdocs hooks that rewrite pages before rendering (mkdocs.yml, `hooks`). The files are readable without them.

- `<!-- picture: NAME.svg -->` before a mermaid block replaces the block with docs/pictures/NAME.svg, because mermaid
  would be loaded from another host.
- A link to a file that is not a page becomes plain text, because the site contains the documents but not the code.
- A `nav` entry that ends in / expands to all pages of that folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_PICTURE = re.compile(r"<!-- picture: (\S+\.svg) -->\n+```mermaid\n.*?\n```", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Called by mkdocs once, before the build."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def _expanded(entry: Any) -> Any:
    match entry:
        case str() if entry.endswith("/"):
            return [str(page.relative_to(DOCS)) for page in sorted((DOCS / entry).glob("*.md"))]
        case list():
            return [_expanded(each) for each in entry]
        case dict():
            return {title: _expanded(each) for title, each in entry.items()}
        case _:
            return entry


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page before it is rendered."""
    folder = (DOCS / page.file.src_uri).parent
    text = _PICTURE.sub(lambda found: f"![]({os.path.relpath(DOCS / 'pictures' / found[1], folder)})", markdown)
    return _LINK.sub(lambda found: _link(found, folder), text)


def _link(found: re.Match[str], folder: Path) -> str:
    target = (folder / found[2]).resolve()
    is_page = target.is_relative_to(DOCS) and target.suffix == ".md"
    return found[1] if target.exists() and not is_page else found[0]  # mkdocs reports targets that do not exist
