"""The `tandem keys` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# ruff: noqa: PLC0415 (as in cluster/cli/main.py: commands import what they need when they run)

keys = typer.Typer(help="API keys: who may call the routers (docs/security.md).", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="TANDEM_SECURITY__AUTH__KEYS_FILE", help="The keys file, as security.auth.keys_file names it."
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id: the part between its two underscores.")]
ExpiresIn = Annotated[str | None, typer.Option(help="30m, 12h, 90d; without it, it stays good until revoked.")]


@keys.command()
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Whose it is. Tenants take turns, and share no cached blocks.")],
    note: Annotated[str, typer.Option(help="For people who read the list.")] = "",
    expires_in: ExpiresIn = None,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use, repeatable; without it, all.")] = None,
    priority: Annotated[
        list[str] | None, typer.Option(help="A priority class it may name, repeatable; without it, all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="On each router.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompts and answers, on each router.")] = None,
    admin: Annotated[bool, typer.Option(help="May read metrics and the dashboard, and act for any tenant.")] = False,
) -> None:
    """Make a key. It is printed once; the file keeps only its hash."""
    from cluster.cli.commands.keys import KeyFlags, run_create

    flags = KeyFlags(
        tenant, note, expires_in, model or [], priority or [], requests_per_minute, tokens_per_minute, admin
    )
    raise typer.Exit(run_create(file, flags))


@keys.command("list")
def list_keys(file: File, json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Show the keys there are, without their secrets."""
    from cluster.cli.commands.keys import run_list

    raise typer.Exit(run_list(file, json))


@keys.command()
def rotate(
    key_id: KeyId,
    file: File,
    grace: Annotated[str, typer.Option(help="How long the key before stays good.")] = "24h",
    expires_in: ExpiresIn = None,
) -> None:
    """Make a new secret for a key; both are good for a while."""
    from cluster.cli.commands.keys import run_rotate

    raise typer.Exit(run_rotate(file, key_id, grace, expires_in))


@keys.command()
def revoke(key_id: KeyId, file: File) -> None:
    """End a key now."""
    from cluster.cli.commands.keys import run_revoke

    raise typer.Exit(run_revoke(file, key_id))
