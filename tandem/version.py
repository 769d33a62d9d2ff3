"""The installed version, in its own module so that `tandem version` imports nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def tandem_version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"
