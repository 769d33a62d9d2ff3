"""The launch file of a process: one JSON file that the control plane writes to the worker's private run folder.

Only this module derives file names under `run_dir`, so no peer can give a process a path.
"""

from __future__ import annotations

import ipaddress
import socket
from functools import cached_property
from pathlib import Path

from pydantic import Field

from tandem.config.auth import AuthSpec
from tandem.config.engine import EngineSpec
from tandem.config.frozen import Frozen
from tandem.config.log_format import LogFormat
from tandem.config.model import ModelSpec, Role, SamplingDefaults, SpecialTokens
from tandem.config.observability import ObservabilitySpec
from tandem.config.router import RouterSpec
from tandem.config.security import TlsSpec
from tandem.config.transfer import TransferSpec
from tandem.errors import ConfigError

AUTO_HOST = "auto"


class WorkerLaunch(Frozen):
    """One epoch of one worker. All its ranks run on one host and share `run_dir` (mode 0700)."""

    cluster: str
    worker_id: str
    epoch: int
    role: Role
    model: ModelSpec
    engine: EngineSpec  # of the role: `model.engine_of(role)`
    model_dir: str
    transfer: TransferSpec
    controller_address: str
    redis_url: str | None
    run_dir: str
    tls: TlsSpec | None = None  # security.tls
    log_level: str = "info"
    log_format: LogFormat = LogFormat.TEXT

    def on_device(self, device: str | None) -> WorkerLaunch:
        """The launch of one rank, on its own device. None: as in `engine`."""
        if device is None:
            return self
        return self.model_copy(update={"engine": self.engine.model_copy(update={"device": device})})

    @property
    def tp(self) -> int:
        return self.model.pool(self.role).tp

    @cached_property
    def bind_host(self) -> str:
        """The address on which this worker listens. Call it on the worker's host."""
        host = self.transfer.bind_host
        return address_towards(self.controller_address) if host == AUTO_HOST else host

    @property
    def leader_socket(self) -> Path:
        """Unix socket of rank 0, to which the worker's service connects."""
        return Path(self.run_dir) / "leader.sock"

    def agent_socket(self, rank: int) -> Path:
        """Unix socket of rank `rank`'s transfer agent, for the ranks of this worker."""
        return Path(self.run_dir) / f"agent-{rank}.sock"

    def link_socket(self, rank: int) -> Path:
        """Unix socket of rank `rank`'s agent for peers' agents on this host (`mapped`)."""
        return Path(self.run_dir) / f"link-{rank}.sock"

    def rank_pid_file(self, rank: int) -> Path:
        """Process id of rank `rank`, for the worker's service. The leader has none: it is connected."""
        return Path(self.run_dir) / f"rank-{rank}.pid"

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
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    sampling_defaults: SamplingDefaults = SamplingDefaults.CHECKPOINT
    special_tokens_in_messages: SpecialTokens = SpecialTokens.TEXT


ROUTER_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class RouterLaunch(Frozen):
    """One router process."""

    cluster: str
    router_id: str
    router: RouterSpec
    models: tuple[ServedModel, ...]
    controller_address: str
    redis_url: str | None
    controller_secret: str | None = Field(default=None, repr=False)  # grants access to traces; None: no access
    observability: ObservabilitySpec = ObservabilitySpec()
    controller_socket: str | None = None  # unix socket in a private folder: plain-text gRPC edge for the controller
    control_address: str | None = None  # host:port for the controller instead, with `tls` if that is set
    tls: TlsSpec | None = None  # security.tls
    auth: AuthSpec = AuthSpec()
    salt_secret: str | None = Field(default=None, repr=False)  # of tenants' cache salts; None: the router's own
    log_level: str = "info"
    drains_as_orphan: bool = False  # at the death of the process that started it, as of its node of a Ray cluster

    @classmethod
    def load(cls, path: Path) -> RouterLaunch:
        return cls.model_validate_json(path.read_bytes())


def address_towards(peer: str) -> str:
    """The local IP address from which a connection to `peer` (host:port) would leave. Sends no packet.

    Raises ConfigError if there is no route.
    """
    host, _, port = peer.rpartition(":")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # # connecting a datagram socket only looks up the route
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transfer.bind_host: auto needs a route to {peer}, but found none ({error}): set an address instead",
            field="transfer.bind_host",
        ) from None
