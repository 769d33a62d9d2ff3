"""`tandem certs`: creates, renews and shows the cluster's certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.certificates import AUTHORITY, LEAVES, SOON_DAYS, create, days_left, load, renew, texts_of
from cluster.cli.console import console, fitted
from cluster.spec.loader import load_spec
from tandem.errors import ConfigError

TITLES = ("file", "subject", "expires", "days", "names")


def run_init(folder: Path, cluster: str, hosts: Sequence[str], days: int, authority_days: int) -> int:
    load_spec(None, {"name": cluster}, environ={})  # checks the name
    create(folder, cluster, hosts, days, authority_days)
    print(f"certificates of cluster {cluster}, valid for {days} days, are in {folder}")
    print(f"  tandem up --name {cluster} --tls {folder}")
    print("Move ca.key to where no process of the cluster can read it: only `tandem certs renew` needs it.")
    return 0


def run_renew(folder: Path, days: int, only: Sequence[str]) -> int:
    for leaf in renew(folder, days, only):
        print(f"renewed {folder / leaf}.pem")
    print("running processes use them for new connections")
    return 0


def run_show(folder: Path) -> int:
    """Returns 1 if a certificate has expired."""
    rows: list[tuple[str, ...]] = []
    warnings, expired = [], False
    found = [name for name in (AUTHORITY, *LEAVES) if (folder / f"{name}.pem").exists()]
    if not found:
        raise ConfigError(f"{folder}: expected certificates, found none: create them with `tandem certs init {folder}`")
    for name in found:
        path = folder / f"{name}.pem"
        certificate = load(str(path), name)[0]
        left = days_left(certificate)
        expires = certificate.not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")
        subject = certificate.subject.rfc4514_string()
        rows.append((path.name, subject, expires, f"{left:.0f}", " ".join(texts_of(certificate))))
        expired |= left <= 0
        if left <= 0:
            warnings.append(f"[red]{path.name} has expired[/]: tandem certs renew {folder}")
        elif left < SOON_DAYS:
            warnings.append(f"[yellow]{path.name} expires in {left:.0f} days[/]: tandem certs renew {folder}")
    screen = console()
    justified = ("file", "subject", "expires", "names")
    screen.print(fitted(screen.width, TITLES, rows, left=justified, spare=("subject",), folded=("names",)))
    for warning in warnings:
        screen.print(warning, soft_wrap=True)
    return 1 if expired else 0
