"""What the machine must leave to a cluster before it starts: open files for each process, and room on its disks and in
shared memory."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from cluster.cli import state_file
from cluster.cli.run_dirs import private_base
from router.edge.limits.http import SPARE_FILES
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.config.transfer import TransportKind
from tandem.errors import ConfigError
from tandem.files import existing
from tandem.text.words import plural

LEAST_FILES = 512  # of one process: its sockets, logs and libraries, and a few hundred connections
LEAST_FREE_BYTES = 64 << 20
SHARED_MEMORY = Path("/dev/shm")
COLLECTIVES_BYTES = 64 << 20  # of each GPU, for NCCL


def check_open_files(spec: ClusterSpec) -> str:
    """Returns what the limit suffices for. Raises ConfigError if it is too low to serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the start raises the soft limit to it
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
        free = shutil.disk_usage(existing(folder)).free
        if free < LEAST_FREE_BYTES:
            raise ConfigError(
                f"{name}: expected at least {LEAST_FREE_BYTES >> 20} MiB free in {folder}, got {free >> 20}: free "
                f"space there, or set {name} to another folder",
                field=name,
            )
        found.append(f"{free >> 20} MiB free in {folder}")
    return ", ".join(found)


def check_shared_memory(spec: ClusterSpec) -> str:
    """Returns its free room. Raises ConfigError if that is too little for the collectives of this machine's GPUs.

    Ray needs none of it: without room there, it keeps its objects, of which Tandem has none, in its own folder.
    """
    free, ranks = shutil.disk_usage(SHARED_MEMORY).free, _ranks_with_collectives(spec)
    if free < (needed := ranks * COLLECTIVES_BYTES):
        raise ConfigError(
            f"{SHARED_MEMORY}: expected at least {needed >> 20} MiB free for the collectives of "
            f"{plural(ranks, 'rank')} on GPUs, got {free >> 20}: free space there, or make it larger (a container's "
            "`--shm-size`, the chart's node.sharedMemory)",
            field=str(SHARED_MEMORY),
        )
    return f"{free >> 20} MiB free in {SHARED_MEMORY}"


def _ranks_with_collectives(spec: ClusterSpec) -> int:
    """The ranks that NCCL joins, on this machine."""
    if spec.control.ray_address is not None:
        return 0
    joins_workers = spec.transfer.transport is TransportKind.NCCL
    pools = [(model.pool(role), model.engine_of(role)) for model in spec.models for role in Role]
    return sum(p.workers * p.tp for p, engine in pools if engine.on_gpu and (p.tp > 1 or joins_workers))
