"""RDMA fabrics, by the NIXL library, which is an optional extra."""

from __future__ import annotations

import importlib.util

from tandem.errors import ConfigError

PACKAGE = "nixl"


def check_nixl() -> None:
    """Raises ConfigError naming the missing package and how to get it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"transfer.transport: nixl needs the package {PACKAGE}, which is not installed: pip install "
            "'tandem-serve[nixl]', or choose another transport",
            field="transfer.transport",
        )
