"""Connects commands to the admin port of a cluster's controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from cluster.certificates import folder_spec, load, texts_of
from cluster.cli import state_file
from tandem.config.spec import TlsSpec
from tandem.errors import ConfigError
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity


@dataclass(frozen=True, slots=True)
class Admin:
    """The address of a controller's admin port, and the certificates to use."""

    address: str
    tls: TlsSpec | None = None

    def channel(self) -> grpc.aio.Channel:
        """Raises ConfigError if the certificate cannot be used."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address)
        tls = ClusterTls(_cluster_of(self.tls.of(Identity.ADMIN)), Identity.ADMIN, self.tls)
        return open_channel(self.address, tls, Identity.CONTROLLER)


def find_admin(address: str | None, cluster: str | None, tls: Path | None = None) -> Admin:
    """The controller at `address`, or that of a cluster on this machine. `tls`: a folder made by `tandem certs`."""
    given = None if tls is None else folder_spec(tls)
    if address is not None:
        return Admin(address, given)
    found = state_file.find(cluster)
    return Admin(found.admin, given or (TlsSpec(**found.tls) if found.tls is not None else None))


def tls_hint(admin: Admin) -> str:
    """What else to check if no controller answers."""
    return (
        ", and does it accept this certificate" if admin.tls is not None else ", and without TLS (otherwise pass --tls)"
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
