"""What mkdocs does with our pages beside rendering them (mkdocs.yml, `hooks`). The same files read well without it.

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

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_PICTURE = re.compile(r"<!-- picture: (\S+\.svg) -->\n+```mermaid\n.*?\n```", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


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
    text = _PICTURE.sub(lambda found: f"![]({os.path.relpath(DOCS / 'pictures' / found[1], folder)})", markdown)
    return _LINK.sub(lambda found: _link(found, folder), text)


def _link(found: re.Match[str], folder: Path) -> str:
    target = (folder / found[2]).resolve()
    is_page = target.is_relative_to(DOCS) and target.suffix == ".md"
    return found[1] if target.exists() and not is_page else found[0]  # mkdocs names what is not there
