"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.files import replace_file


def test_the_new_content_is_there_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"old", b"new"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(("is_durable", "synced"), [(True, ["a", "folder"]), (False, [])])
def test_what_must_last_is_synced_content_first(
    is_durable: bool, synced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        assert (tmp_path / "a").exists() is path.is_dir(), "the content before the rename, the folder after it"
        seen.append("folder" if path.is_dir() else "a")

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "a", b"x", is_durable=is_durable)
    assert seen == synced


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    replace_file(path, b"old")

    def fail(*args: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
