"""`tandem audit verify`: checks the chain of an audit log."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from cluster.cli.console import console
from tandem.errors import InputError
from tandem.telemetry.audit import read_key
from tandem.telemetry.audit_chain import verify
from tandem.text.words import plural

BROKEN_EXIT_CODE = 1


def run_verify(files: list[Path], key_file: Path | None) -> int:
    """Raises InputError for a file that cannot be read, ConfigError for a key."""
    key = None if key_file is None else read_key(key_file, "--key-file")
    found = verify([(str(path), _lines(path)) for path in files], key)
    screen = console()
    if found.broken is not None:
        screen.print(f"broken: {found.broken}", markup=False, soft_wrap=True)
        return BROKEN_EXIT_CODE
    what = f"{plural(found.lines, 'line')} of {plural(len(found.segments), 'segment')}"
    screen.print(f"intact: {what}", markup=False, soft_wrap=True)
    for note in found.notes():
        screen.print(f"  {note}", markup=False, soft_wrap=True)
    return 0


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"FILE: cannot read {path}: {error.args[-1]}", field="FILE") from None
