"""The YAML file of API keys, which `tandem keys` writes and routers read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from router.auth.api_keys import KeyList
from tandem.errors import ConfigError
from tandem.files import replace_file

FIELD = "security.auth.keys_file"
MAX_FILE_BYTES = 64 << 20
_HEAD = "# API keys of a Tandem cluster, written by `tandem keys`. Hashes only: a lost key cannot be recovered.\n"


def _load(data: bytes) -> Any:
    """As `yaml.safe_load`, ten times as fast where PyYAML has its parser in C. Raises YAMLError."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(data)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_keys(path: Path) -> KeyList:
    """Raises ConfigError if the file is missing or broken, or if other users may write to it."""
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _fault(path, f"{error.strerror}; `tandem keys create` makes one") from None
    if len(data) > MAX_FILE_BYTES:
        raise _fault(path, f"expected at most {MAX_FILE_BYTES} bytes")
    try:
        return KeyList.model_validate(_load(data) or {})
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise _fault(path, "expected YAML") from None  # a parser's text could repeat secrets of the file
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise _fault(path, f"{location}: {first['msg'].removeprefix('Value error, ')}") from None


def change_keys(path: Path, change: Callable[[KeyList], KeyList]) -> None:
    """Replaces the file by the result of `change`, under a lock. A missing file counts as empty.

    Raises ConfigError, and what `change` raises.
    """
    with _locked(path.parent):
        keys = change(read_keys(path) if path.exists() else KeyList())
        dumped = keys.model_dump(mode="json", exclude_defaults=True)
        text = _HEAD + yaml.safe_dump({"keys": dumped.get("keys", [])}, sort_keys=False)
        try:
            replace_file(path, text.encode())
        except OSError as error:
            raise _fault(path, f"cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _fault(folder, f"{error.strerror}; make the folder first") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_mode(path: Path, mode: int) -> None:
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _fault(path, f"others may write to it (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}")


def _fault(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {path}: {what}", field=FIELD)
