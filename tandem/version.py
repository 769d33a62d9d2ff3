"""The installed version, in its own module so that `tandem version` imports nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tandem_version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"


def works_with(ours: str, theirs: str) -> bool:
    """Whether parts of two releases may serve together: equal ones, and those at most one minor version apart."""
    ours_major, ours_minor = _numbers(ours)
    theirs_major, theirs_minor = _numbers(theirs)
    return ours == theirs or (ours_major == theirs_major is not None and abs(ours_minor - theirs_minor) <= 1)


def _numbers(release: str) -> tuple[int | None, int]:
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (None, 0)
