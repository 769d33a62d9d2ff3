"""Checks certificates before a start. Every error names the file and the fix."""

from __future__ import annotations

from pathlib import Path

from cluster.certificates import SOON_DAYS, days_left, load, texts_of
from tandem.config.security import TlsSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.rpc.edge_tls import edge_context
from tandem.rpc.identity import Identity
from tandem.rpc.tls import load_tls

_RAY_ADDRESS = "127.0.0.1"


def check_tls(spec: ClusterSpec) -> list[str]:
    """Returns a warning for each certificate that expires within SOON_DAYS.

    Raises ConfigError for a file that is missing or expired, does not match the others, or has the wrong identity.
    """
    soon = []
    if spec.transfer.tls is not None:
        soon += _check_files(spec.transfer.tls.of(Identity.WORKER), "transfer.tls")
    if spec.security.tls is not None:
        for identity in _needed_here(spec, spec.security.tls):
            soon += _check_identity(spec.security.tls.of(identity), identity, spec.name)
        if spec.control.backend == "ray" and spec.control.ray_address is None:
            _check_ray(spec.security.tls.of(Identity.CONTROLLER))
    if spec.router.tls is not None and spec.router.replicas:
        edge_context(spec.router.tls)
        soon += _check_dates(spec.router.tls.cert, "router.tls.cert")
    return soon


def _needed_here(spec: ClusterSpec, files: TlsSpec) -> list[Identity]:
    """Identities whose files this host needs. Workers on other hosts, and routers that join, have their own files."""
    needed = [Identity.CONTROLLER]
    if spec.router.replicas:
        needed.append(Identity.ROUTER)
    if spec.control.ray_address is None or Path(files.of(Identity.WORKER).cert).exists():
        needed.append(Identity.WORKER)
    return needed


def _check_identity(files: TlsSpec, identity: Identity, cluster: str) -> list[str]:
    soon = _check_files(files, "security.tls")
    shown = texts_of(load(files.cert, "security.tls.cert")[0])
    for name in (identity.uri(cluster), identity.dns_name(cluster)):
        if name not in shown:
            raise ConfigError(
                f"security.tls.cert: {files.cert}: expected the name {name} among its alternative names, got "
                f"{', '.join(shown) or 'none'}: it belongs to another cluster: use its name with "
                f"`tandem up --name`, or run `tandem certs init NEW_FOLDER --cluster {cluster}`",
                field="security.tls.cert",
            )
    return soon


def _check_files(files: TlsSpec, field: str) -> list[str]:
    for name in ("cert", "ca"):
        path = getattr(files, name)
        if Path(path).exists():  # load_tls reports a missing file
            _check_dates(path, f"{field}.{name}")
    load_tls(files, field)
    return _check_dates(files.cert, f"{field}.cert") + _check_dates(files.ca, f"{field}.ca")


def _check_dates(path: str, field: str) -> list[str]:
    left = min(days_left(each) for each in load(path, field))
    if left <= 0:
        raise ConfigError(f"{field}: {path}: expired {-left:.1f} days ago: renew it (tandem certs renew)", field=field)
    return [f"{path} expires in {left:.0f} days"] if left < SOON_DAYS else []


def _check_ray(files: TlsSpec) -> None:
    shown = texts_of(load(files.cert, "security.tls.cert")[0])
    if _RAY_ADDRESS not in shown:
        raise ConfigError(
            f"security.tls.cert: {files.cert}: expected the address {_RAY_ADDRESS} among its alternative names, "
            "which Ray's processes connect to: create it with `tandem certs init`, or use --backend subprocess",
            field="security.tls.cert",
        )
