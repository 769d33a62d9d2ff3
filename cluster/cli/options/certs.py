"""Options of `tandem certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# ruff: noqa: PLC0415 (as in cluster.cli.main)

certs = typer.Typer(help="Certificates: mutual TLS inside a cluster, TLS for clients.", no_args_is_help=True)
CertsFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the certificates.")]
Days = Annotated[int, typer.Option(help="Days for which the certificates are valid.", min=1, max=3650)]


@certs.command()
def init(
    folder: CertsFolder,
    cluster: Annotated[
        str, typer.Option("--cluster", "--name", help="Name of the cluster. Other clusters refuse its certificates.")
    ] = "tandem",
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of a host, repeatable. Default: only this machine.")
    ] = None,
    days: Days = 365,
    ca_days: Annotated[int, typer.Option(help="Days for which the authority is valid.", min=1, max=7300)] = 3650,
) -> None:
    """Create a certificate authority and a certificate for each role. Refuses to overwrite files."""
    from cluster.cli.commands.certs import run_init

    raise typer.Exit(run_init(folder, cluster, host or [], days, ca_days))


@certs.command()
def renew(
    folder: CertsFolder,
    days: Days = 365,
    only: Annotated[
        list[str] | None, typer.Option(help="edge, controller, router, worker or admin, repeatable. Default: all.")
    ] = None,
) -> None:
    """Replace certificates and keys, keeping their names. Running processes load the new ones."""
    from cluster.cli.commands.certs import run_renew

    raise typer.Exit(run_renew(folder, days, only or []))


@certs.command()
def show(folder: CertsFolder) -> None:
    """Show names and expiry. Warns below 30 days; exits with 1 if a certificate has expired."""
    from cluster.cli.commands.certs import run_show

    raise typer.Exit(run_show(folder))
