from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.errors import CheckpointError, ConfigError
from tandem.model_store import cache_dir, pull, resolve
from tandem.testing import write_tiny_llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "tandem"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_checkpoint_folder_is_itself(cache: Path, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    assert resolve(str(folder)) == folder
    assert not cache.exists()


@pytest.mark.parametrize("source", ["smollm2-135m", "some-org/some-model", "nothing"])
def test_a_model_that_is_not_here_says_how_to_get_it(source: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"run `tandem pull {source}` first"):
        resolve(source)


def test_a_gguf_file_that_is_not_there_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a GGUF file at .*none\.gguf, found none"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_damaged_gguf_file_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + os.urandom(100))
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        resolve(str(path))
    assert list((cache / "gguf").iterdir()) == []


def test_a_name_of_no_known_form_is_refused_without_asking_anyone(cache: Path) -> None:
    with pytest.raises(ConfigError, match="expected smollm2-135m or a model hub name like org/name"):
        pull("no such name")


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="set TANDEM_CACHE to another folder"):
        resolve(str(path))
