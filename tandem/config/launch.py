"""What the control plane tells a process when it starts it: one JSON file in the worker's private run folder.

The file names under `run_dir` are derived here and nowhere else, so no process is ever told a path by a peer.
"""

from __future__ import annotations

import ipaddress
import socket
from functools import cached_property
from pathlib import Path

from pydantic import Field

from tandem.config.auth import AuthSpec
from tandem.config.frozen import Frozen
from tandem.config.log_format import LogFormat
from tandem.config.observability import ObservabilitySpec
from tandem.config.spec import ModelSpec, Role, RouterSpec, TlsSpec, TransferSpec
from tandem.errors import ConfigError

AUTO_HOST = "auto"


class WorkerLaunch(Frozen):
    """One life (epoch) of one worker. All its ranks run on one host and share `run_dir` (mode 0700)."""

    cluster: str
    worker_id: str
    epoch: int
    role: Role
    model: ModelSpec
    model_dir: str
    transfer: TransferSpec
    controller_address: str
    redis_url: str | None
    run_dir: str
    tls: TlsSpec | None = None  # security.tls
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT

    @property
    def tp(self) -> int:
        return (self.model.prefill if self.role is Role.PREFILL else self.model.decode).tp

    @cached_property
    def bind_host(self) -> str:
        """Where this worker listens and is reached: asked on its own host."""
        host = self.transfer.bind_host
        return address_towards(self.controller_address) if host == AUTO_HOST else host

    @property
    def leader_socket(self) -> Path:
        """The worker's service connects to rank 0 here."""
        return Path(self.run_dir) / "leader.sock"

    def agent_socket(self, rank: int) -> Path:
        """Ranks connect to rank `rank`'s transfer agent here."""
        return Path(self.run_dir) / f"agent-{rank}.sock"

    def link_socket(self, rank: int) -> Path:
        """Peers' agents on this host connect to rank `rank`'s agent here (`mapped`)."""
        return Path(self.run_dir) / f"link-{rank}.sock"

    @property
    def rendezvous_file(self) -> Path:
        """The tensor-parallel group's file store."""
        return Path(self.run_dir) / "rendezvous"

    @classmethod
    def load(cls, path: Path) -> WorkerLaunch:
        return cls.model_validate_json(path.read_bytes())


class ServedModel(Frozen):
    name: str
    model_dir: str
    model_fingerprint: str
    block_tokens: int
    max_model_tokens: int | None = None


class RouterLaunch(Frozen):
    """One router process."""

    cluster: str
    router_id: str
    router: RouterSpec
    models: tuple[ServedModel, ...]
    controller_address: str
    redis_url: str | None
    controller_secret: str | None = Field(default=None, repr=False)  # whoever shows it may read traces; None: nobody
    observability: ObservabilitySpec = ObservabilitySpec()
    controller_socket: str | None = None  # in a private folder: the gRPC edge, in plain text, for the controller
    tls: TlsSpec | None = None  # security.tls
    auth: AuthSpec = AuthSpec()
    salt_secret: str | None = Field(default=None, repr=False)  # of all routers: tenants' cache salts; None: its own
    log_level: str = "info"

    @classmethod
    def load(cls, path: Path) -> RouterLaunch:
        return cls.model_validate_json(path.read_bytes())


def address_towards(peer: str) -> str:
    """The local IP address that a connection to `peer` (host:port) would come from. Sends nothing.

    Raises ConfigError when there is no way to it.
    """
    host, _, port = peer.rpartition(":")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: only a look at the routing table
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transfer.bind_host: auto needs a route to {peer}, and there is none ({error}): name an address instead",
            field="transfer.bind_host",
        ) from None
