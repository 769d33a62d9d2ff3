"""Connects commands to the admin port of a cluster's controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
from grpc_status import rpc_status

from cluster.certificates import folder_spec, load, texts_of
from cluster.cli import state_file
from cluster.cli.state_file import ClusterState
from tandem.config.security import TlsSpec
from tandem.errors import ConfigError, TandemError, UnavailableError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.rpc.grpc_options import CLIENT_OPTIONS
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.v1 import cluster_pb2, cluster_pb2_grpc

TIMEOUT_S = 10.0
_NO_CONTROLLER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)


class NoController(UnavailableError):
    """No controller answers at the address; it may be another process, or one that refuses the certificate."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The address of a controller's admin port, and the certificates to use."""

    address: str
    tls: TlsSpec | None = None

    def channel(self) -> grpc.aio.Channel:
        """Raises ConfigError if the certificate cannot be used."""
        if self.tls is None:
            return open_channel(self.address, None, Identity.CONTROLLER, CLIENT_OPTIONS)
        tls = ClusterTls(_cluster_of(self.tls.of(Identity.ADMIN)), Identity.ADMIN, self.tls)
        return open_channel(self.address, tls, Identity.CONTROLLER, CLIENT_OPTIONS)


def find_admin(address: str | None, cluster: str | None, tls: Path | None = None) -> Admin:
    """The controller at `address`, or that of a cluster on this machine. `tls`: a folder made by `tandem certs`.

    Raises ConfigError, UnavailableError.
    """
    refuse_cluster_beside("--address", address, cluster)
    given = None if tls is None else folder_spec(tls)
    if address is not None:
        return Admin(address, given)
    found = state_file.find(cluster)
    return Admin(found.admin, given or (TlsSpec(**found.tls) if found.tls is not None else None))


def refuse_cluster_beside(option: str, address: str | None, cluster: str | None) -> None:
    """Raises ConfigError if a cluster of this machine is named, but not used."""
    if address is not None and cluster is not None:
        raise ConfigError(
            f"--cluster: expected none with {option}, which says where to connect, got {cluster}", field="--cluster"
        )


def find_routed(cluster: str | None) -> ClusterState:
    """A cluster on this machine, with the addresses of its first router, or of one that joined it.

    Raises ConfigError, UnavailableError.
    """
    found = state_file.find(cluster)
    if found.http:
        return found
    routers = asyncio.run(fetch_status(find_admin(None, found.name))).routers
    ready = next((router for router in routers if router.state == "ready"), None)
    if ready is None:
        raise UnavailableError(
            f"{found.name} has no router that is ready: start one with `python -m router --join {found.admin} "
            f"--cluster {found.name} --name NAME`"
        )
    return replace(found, http=ready.http_address, grpc=ready.grpc_address)


async def fetch_status(admin: Admin) -> cluster_pb2.ClusterStatus:
    """Raises the controller's error, or NoController."""
    async with controller_at(admin) as stub:
        return await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=TIMEOUT_S)


@asynccontextmanager
async def controller_at(admin: Admin) -> AsyncIterator[cluster_pb2_grpc.ClusterAsyncStub]:
    """Raises the controller's error, or NoController."""
    async with admin.channel() as channel:
        try:
            yield cluster_pb2_grpc.ClusterStub(channel)
        except grpc.aio.AioRpcError as error:
            raise controller_error(error, admin) from None


def controller_error(error: grpc.aio.AioRpcError, admin: Admin) -> TandemError:
    if error.code() not in _NO_CONTROLLER or rpc_status.from_call(error) is not None:
        return error_from_rpc(error)
    hint = "does it accept this certificate" if admin.tls is not None else "without TLS (otherwise pass --tls)"
    return NoController(
        f"--address: no controller answers at {admin.address} ({error.code().name}): is `tandem up` running, and "
        f"{hint}?",
        field="--address",
    )


def _cluster_of(files: TlsSpec) -> str:
    """The name of the cluster in an admin certificate."""
    prefix, suffix = Identity.ADMIN.uri("|").split("|")
    for name in texts_of(load(files.cert, "--tls")[0]):
        if name.startswith(prefix) and name.endswith(suffix):
            return name.removeprefix(prefix).removesuffix(suffix)
    raise ConfigError(
        f"--tls: {files.cert}: expected a certificate with the name {prefix}CLUSTER{suffix}", field="--tls"
    )
