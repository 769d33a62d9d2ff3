"""The cluster's certificate authority and certificates, in one folder: `tandem certs`.

    ca.pem ca.key                                  the authority; its key can issue any identity in the cluster
    controller.pem controller.key, router, worker  processes (security.tls)
    admin.pem admin.key                            administrators: `tandem status` from other machines
    edge.pem edge.key                              routers towards clients (router.tls); no identity inside the cluster

Keys are ECDSA P-256; files have mode 0600. Renewed files replace the old ones atomically.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.config.security import TlsSpec
from tandem.errors import ConfigError
from tandem.files import replace_file
from tandem.rpc.identity import Identity
from tandem.rpc.tls import read_file, wrong_file

AUTHORITY = "ca"
EDGE = "edge"
LEAVES = (*(each.value for each in Identity), EDGE)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
BACKDATED = datetime.timedelta(minutes=5)  # tolerates clock skew
SOON_DAYS = 30

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: x509.Certificate
    key: Key


def folder_spec(folder: Path) -> TlsSpec:
    """The `security.tls` of a folder made by `tandem certs`."""
    here = folder.absolute()
    return TlsSpec(cert=f"{here}/{{role}}.pem", key=f"{here}/{{role}}.key", ca=f"{here}/ca.pem")


def create(folder: Path, cluster: str, hosts: Sequence[str], days: int, authority_days: int) -> None:
    """Creates an authority and one certificate for each of LEAVES. `hosts`: names and addresses of routers and Ray
    nodes, beside LOCAL_HOSTS. Raises ConfigError if a file exists."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (AUTHORITY, *LEAVES):
        for path in (_cert_path(folder, name), _key_path(folder, name)):
            if path.exists():
                raise ConfigError(
                    f"{path}: the file exists: renew it with `tandem certs renew {folder}`, or choose another folder",
                    field=str(path),
                )
    names = [_host_name(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts))]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Tandem cluster {cluster}")])
    builder = (
        _builder(subject, subject, key, authority_days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    authority = Authority(builder.sign(key, hashes.SHA256()), key)
    _write(folder, AUTHORITY, authority.certificate, key)
    for leaf in LEAVES:
        _issue(folder, authority, leaf, [*_own_names(leaf, cluster), *names], days)


def renew(folder: Path, days: int, only: Sequence[str] = ()) -> list[str]:
    """Replaces keys and certificates, keeping their names; returns which ones. Raises ConfigError."""
    authority = _authority(folder)
    if unknown := set(only) - set(LEAVES):
        raise ConfigError(f"--only: expected some of {', '.join(LEAVES)}, got {', '.join(sorted(unknown))}")
    found = [leaf for leaf in only or LEAVES if only or _cert_path(folder, leaf).exists()]
    for leaf in found:
        former = load(str(_cert_path(folder, leaf)), leaf)[0]
        _issue(folder, authority, leaf, list(names_of(former)), days)
    return found


def load(path: str, field: str) -> list[x509.Certificate]:
    """The certificates in a file, the leaf first. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(read_file(path, field))
    except ValueError:
        raise wrong_file(field, path, "expected certificates in PEM format") from None


def names_of(certificate: x509.Certificate) -> tuple[x509.GeneralName, ...]:
    try:
        return tuple(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return ()


def texts_of(certificate: x509.Certificate) -> list[str]:
    return [str(name.value) for name in names_of(certificate)]


def days_left(certificate: x509.Certificate, now: datetime.datetime | None = None) -> float:
    """Days until it expires; negative if it has expired."""
    now = now or datetime.datetime.now(datetime.UTC)
    return (certificate.not_valid_after_utc - now) / datetime.timedelta(days=1)


def _own_names(leaf: str, cluster: str) -> list[x509.GeneralName]:
    if leaf == EDGE:
        return []
    identity = Identity(leaf)
    return [x509.UniformResourceIdentifier(identity.uri(cluster)), x509.DNSName(identity.dns_name(cluster))]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # not an address
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"--host: expected a host name or an address, got {host!r}", field="--host") from None


def _issue(folder: Path, authority: Authority, leaf: str, names: Iterable[x509.GeneralName], days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tandem {leaf}")])
    issuer = authority.certificate
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if leaf != EDGE else [])]
    certificate = (
        _builder(subject, issuer.subject, key, days, not_after=issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    _write(folder, leaf, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, days: int, not_after: datetime.datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(end if not_after is None else min(end, not_after))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(folder: Path) -> Authority:
    certificate = load(str(_cert_path(folder, AUTHORITY)), "ca")[0]
    key_path = str(_key_path(folder, AUTHORITY))
    try:
        key = serialization.load_pem_private_key(read_file(key_path, "ca.key"), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise wrong_file("ca.key", key_path, "expected an unencrypted PEM key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise wrong_file("ca.key", key_path, f"expected the key of {_cert_path(folder, AUTHORITY)}")
    if days_left(certificate) <= 0:
        raise wrong_file(
            "ca", str(_cert_path(folder, AUTHORITY)), "it has expired: create a new one with `tandem certs init`"
        )
    return Authority(certificate, key)


def _cert_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.pem"


def _key_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.key"


def _write(folder: Path, name: str, certificate: x509.Certificate, key: Key) -> None:
    """Writes the key first: a process that reads between the two writes detects the mismatch and retries."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(_key_path(folder, name), private)
    replace_file(_cert_path(folder, name), certificate.public_bytes(serialization.Encoding.PEM))
