"""`tandem certs`: the cluster's own certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.certificates import AUTHORITY, LEAVES, SOON_DAYS, create, days_left, load, renew, texts_of
from cluster.spec_loader import load_spec
from tandem.errors import ConfigError


def run_init(folder: Path, cluster: str, hosts: Sequence[str], days: int, authority_days: int) -> int:
    load_spec(None, {"name": cluster}, environ={})  # refuses what is no cluster's name
    create(folder, cluster, hosts, days, authority_days)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"certificates of cluster {cluster} for {days} days in {folder}", markup=False)
    console.print(f"  tandem up --name {cluster} --tls {folder}", markup=False)
    console.print("Keep ca.key where no process of the cluster can read it: only `tandem certs renew` needs it.")
    return 0


def run_renew(folder: Path, days: int, only: Sequence[str]) -> int:
    for leaf in renew(folder, days, only):
        print(f"renewed {folder / leaf}.pem")
    print("running processes take them for their next connections")
    return 0


def run_show(folder: Path) -> int:
    """1 when one has expired."""
    table = Table(box=None, pad_edge=False)
    for column in ("file", "subject", "expires", "days", "names"):
        table.add_column(column, overflow="fold")
    warnings, expired = [], False
    found = [name for name in (AUTHORITY, *LEAVES) if (folder / f"{name}.pem").exists()]
    if not found:
        raise ConfigError(f"{folder}: expected certificates: make them with `tandem certs init {folder}`")
    for name in found:
        path = folder / f"{name}.pem"
        certificate = load(str(path), name)[0]
        left = days_left(certificate)
        expires = certificate.not_valid_after_utc.strftime("%Y-%m-%d %H:%M UTC")
        subject = certificate.subject.rfc4514_string()
        table.add_row(path.name, subject, expires, f"{left:.0f}", " ".join(texts_of(certificate)))
        expired |= left <= 0
        if left <= 0:
            warnings.append(f"[red]{path.name} has expired[/]: tandem certs renew {folder}")
        elif left < SOON_DAYS:
            warnings.append(f"[yellow]{path.name} expires in {left:.0f} days[/]: tandem certs renew {folder}")
    console = Console(highlight=False)
    console.print(table)
    for warning in warnings:
        console.print(warning, soft_wrap=True)
    return 1 if expired else 0
