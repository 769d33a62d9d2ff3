"""Libraries of the C sources: beside them, as in an image, else built into the cache; named by what they are of."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.native import build
from tandem.native.build import build_all, library_path

SOURCES = Path(build.__file__).parent


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "native"
    folder.mkdir()
    for path in (*SOURCES.glob("*.c"), *SOURCES.glob("*.h")):
        shutil.copy(path, folder)
    try:
        library_path(folder / "digest.c")
    except ConfigError as error:
        pytest.skip(str(error))
    return folder


@pytest.mark.slow
def test_an_image_needs_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_all(sources)
    assert [re.sub("-.*", "", path.name) for path in built] == ["digest", "kernels", "prefix"]
    shutil.rmtree(sources.parent / "cache")
    monkeypatch.setenv("PATH", "")
    for path, source in zip(built, ("digest.c", "kernels.c", "prefix.c"), strict=True):
        assert library_path(sources / source) == path
        assert path.stat().st_mode & 0o777 == 0o755
        ctypes.CDLL(str(path))
    assert not (sources.parent / "cache").exists()


def test_a_changed_header_is_another_library(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library_path(sources / "digest.c")
    assert library_path(sources / "digest.c") == before
    (sources / "team.h").write_text("/* nothing */")
    assert library_path(sources / "digest.c") != before
    monkeypatch.setenv("PATH", "")
    (sources / "team.h").write_text("/* nothing else */")
    with pytest.raises(ConfigError, match="a C compiler"):
        library_path(sources / "digest.c")


def test_a_source_that_cannot_be_built_says_what_the_compiler_said(sources: Path) -> None:
    (sources / "digest.c").write_text("int broken(void) { return nothing; }")
    with pytest.raises(ConfigError, match=r"to build digest\.c, got: "):
        library_path(sources / "digest.c")
    assert not list((sources.parent / "cache" / "native").glob("tmp*"))


def test_a_compiler_that_cannot_run_leaves_nothing_behind(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = sources.parent / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    (sources / "digest.c").write_text("int another;")
    with pytest.raises(ConfigError, match="a working compiler, got: "):
        library_path(sources / "digest.c")
    assert not list((sources.parent / "cache" / "native").glob("tmp*"))
