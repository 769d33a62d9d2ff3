"""How commands reach a cluster: the controller's admin port, and the routers' edge as any client does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509

from cluster.cli import state_file
from cluster.cli.certificates import load, names_of, texts_of
from tandem.config.spec import TlsSpec
from tandem.errors import ConfigError
from tandem.rpc.grpc_tls import ClusterTls, open_channel
from tandem.rpc.identity import Identity
from tandem.rpc.tls import read_file


@dataclass(frozen=True, slots=True)
class Admin:
    """A controller's admin port."""

    address: str
    tls: TlsSpec | None = None

    def channel(self) -> grpc.aio.Channel:
        """Raises ConfigError when the certificate cannot be used."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address)
        tls = ClusterTls(_cluster_of(self.tls.of(Identity.ADMIN)), Identity.ADMIN, self.tls)
        return open_channel(self.address, tls, Identity.CONTROLLER)


def find_admin(address: str | None, cluster: str | None, tls: Path | None = None) -> Admin:
    """The one at `address`, or that of a cluster on this machine. `tls`: a folder of `tandem certs`."""
    given = None if tls is None else folder_spec(tls)
    if address is not None:
        return Admin(address, given)
    found = state_file.find(cluster)
    return Admin(found.admin, given or (TlsSpec(**found.tls) if found.tls is not None else None))


def tls_hint(admin: Admin) -> str:
    """What else may be wrong when nobody answers, in words."""
    return ", and does it take this certificate" if admin.tls is not None else ", and without TLS (else give --tls)"


def folder_spec(folder: Path) -> TlsSpec:
    """`security.tls` for a folder of `tandem certs`."""
    here = folder.absolute()
    return TlsSpec(cert=f"{here}/{{role}}.pem", key=f"{here}/{{role}}.key", ca=f"{here}/ca.pem")


def edge_channel(address: str, ca: str | None) -> grpc.aio.Channel:
    """To a router as a client. `ca`: the PEM file that its certificate is checked against (it may be that certificate
    itself); None: no TLS. Raises ConfigError."""
    if ca is None:
        return grpc.aio.insecure_channel(address)
    roots, options = read_file(ca, "--ca"), []
    first = load(ca, "--ca")[0]
    if not _is_authority(first) and (name := _server_name(first)):
        options.append(("grpc.ssl_target_name_override", name))  # it is the very certificate that we expect
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=options)


def _cluster_of(files: TlsSpec) -> str:
    """The cluster that an admin's certificate is of."""
    prefix, suffix = Identity.ADMIN.uri("|").split("|")
    for name in texts_of(load(files.cert, "--tls")[0]):
        if name.startswith(prefix) and name.endswith(suffix):
            return name.removeprefix(prefix).removesuffix(suffix)
    raise ConfigError(f"--tls: {files.cert}: expected a certificate that says {prefix}CLUSTER{suffix}", field="--tls")


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _server_name(certificate: x509.Certificate) -> str | None:
    names = (str(n.value) for n in names_of(certificate) if isinstance(n, x509.DNSName | x509.IPAddress))
    return next(names, None)
