"""The installed version. A module of its own, so that `tandem version` loads nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tandem_version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"
