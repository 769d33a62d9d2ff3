"""Compiles our C sources with the machine's compiler, once per version of a source.

python -m tandem.native.build       builds all beside their sources, for images that have no compiler
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tandem.errors import ConfigError
from tandem.files import cache_dir

_FLAGS: Final = ("-O3", "-mavx2", "-mfma", "-mf16c", "-std=gnu11", "-pthread", "-shared", "-fPIC")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120
_CPU_FEATURES: Final = ("avx2", "fma", "f16c")


def library_path(source: Path) -> Path:
    """The library of a source: beside it or in the cache, compiled if needed.

    Raises ConfigError saying what is missing: a supported processor, its features, or a working compiler.
    """
    _check_processor()
    cached = cache_dir() / "native" / _name(source)
    for path in (source.with_name(cached.name), cached):
        if path.is_file():
            return path
    _build(source, cached)
    return cached


def build_all(folder: Path) -> list[Path]:
    """Builds the sources in `folder` there, for all processors that `library_path` accepts. Raises ConfigError."""
    targets = {source: source.with_name(_name(source)) for source in sorted(folder.glob("*.c"))}
    for source, target in targets.items():
        _build(source, target)
    return list(targets.values())


def _name(source: Path) -> str:
    written = [source, *sorted(source.parent.glob("*.h"))]
    content = b"".join(path.read_bytes() for path in written) + " ".join(_FLAGS).encode()
    return f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def cpu_fields() -> dict[str, str]:
    """Of the first processor in /proc/cpuinfo: `vendor_id`, `flags` and others; empty where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _check_processor() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise _unavailable(f"Linux on x86-64, got {platform.system()} on {platform.machine()}")
    flags = cpu_fields().get("flags", "").split()
    missing = [name for name in _CPU_FEATURES if name not in flags]
    if missing:
        raise _unavailable(f"a processor with {', '.join(missing)}")


def _build(source: Path, target: Path) -> None:
    """Compiles to a temporary name first, because ranks may build at the same time; the last rename wins."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _unavailable(f"a C compiler ({', '.join(_COMPILERS)}) to build them with")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(descriptor)
        part = Path(name)
        try:
            command = [compiler, *_FLAGS, "-o", name, str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if done.returncode == 0:
                part.chmod(0o755)  # other users load it in an image
                part.replace(target)
                return
        finally:
            part.unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unavailable(f"a working compiler, got: {error}") from error
    lines = done.stderr.strip().splitlines()
    raise _unavailable(f"{compiler} to build {source.name}, got: {lines[-1] if lines else 'no reason'}")


def _unavailable(needed: str) -> ConfigError:
    return ConfigError(f"native kernels need {needed}")


if __name__ == "__main__":
    print(*build_all(Path(__file__).parent), sep="\n")
