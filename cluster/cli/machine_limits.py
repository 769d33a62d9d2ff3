"""What the machine must leave to a cluster before it starts: open files for each process, and room on its disks."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from cluster.cli import state_file
from cluster.cli.run_dirs import private_base
from router.edge.limits.http import SPARE_FILES
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

LEAST_FILES = 512  # of one process: its sockets, logs and libraries, and a few hundred connections
LEAST_FREE_BYTES = 64 << 20


def check_open_files(spec: ClusterSpec) -> str:
    """Returns what the limit suffices for. Raises ConfigError if it is too low to serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # routers raise the soft limit to it
    if hard == resource.RLIM_INFINITY:
        return "unlimited"
    if hard < LEAST_FILES:
        raise ConfigError(
            f"open files: expected a limit of at least {LEAST_FILES} for each process, got {hard}: raise it with "
            "`ulimit -n` (LimitNOFILE of a service, the runtime's ulimits of a container)",
            field="ulimit -n",
        )
    connections, wanted = hard - SPARE_FILES, 2 * spec.router.max_connections
    if connections < wanted:
        return (
            f"{hard} for each process: a router holds about {connections} connections, fewer than "
            f"router.max_connections allows on its two ports ({wanted})"
        )
    return f"{hard} for each process"


def check_disks() -> str:
    """Returns the free room in the folders for logs and for sockets. Raises ConfigError for one that is full."""
    found = []
    for folder, name in ((state_file.state_dir(), "XDG_STATE_HOME"), (private_base(), "XDG_RUNTIME_DIR")):
        free = shutil.disk_usage(_existing(folder)).free
        if free < LEAST_FREE_BYTES:
            raise ConfigError(
                f"{name}: expected at least {LEAST_FREE_BYTES >> 20} MiB free in {folder}, got {free >> 20}: free "
                f"space there, or set {name} to another folder",
                field=name,
            )
        found.append(f"{free >> 20} MiB free in {folder}")
    return ", ".join(found)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
