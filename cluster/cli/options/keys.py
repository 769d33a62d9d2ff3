"""Options of `tandem keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options.shared import Json

# ruff: noqa: PLC0415 (as in cluster.cli.main)

keys = typer.Typer(help="API keys of clients (docs/security.md).", no_args_is_help=True)

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="TANDEM_SECURITY__AUTH__KEYS_FILE", help="Keys file, the same as security.auth.keys_file."
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Id of the key: the part between its two underscores.")]
ExpiresIn = Annotated[str | None, typer.Option(help="Time until the key expires: 30m, 12h, 90d. Default: never.")]


@keys.command()
def create(
    file: File,
    tenant: Annotated[
        str, typer.Option(help="Tenant of the key. Tenants get fair shares of the queue and share no cached blocks.")
    ],
    note: Annotated[str, typer.Option(help="Comment that `tandem keys list` shows.")] = "",
    expires_in: ExpiresIn = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use, repeatable. Default: all.")
    ] = None,
    priority: Annotated[
        list[str] | None, typer.Option(help="A priority class that the key may use, repeatable. Default: all.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests per minute on each router. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Prompt and output tokens per minute on each router. Default: no limit.")
    ] = None,
    admin: Annotated[
        bool, typer.Option(help="The key may read metrics and the dashboard, and act for any tenant.")
    ] = False,
) -> None:
    """Create a key and print it. The file stores only its hash, so the key cannot be shown again."""
    from cluster.cli.commands.keys import KeyFlags, run_create

    flags = KeyFlags(
        tenant, note, expires_in, model or [], priority or [], requests_per_minute, tokens_per_minute, admin
    )
    raise typer.Exit(run_create(file, flags))


@keys.command("list")
def list_keys(file: File, json: Json = False) -> None:
    """List the keys, without their secrets."""
    from cluster.cli.commands.keys import run_list

    raise typer.Exit(run_list(file, json))


@keys.command()
def rotate(
    key_id: KeyId,
    file: File,
    grace: Annotated[str, typer.Option(help="Time for which the old secret stays valid.")] = "24h",
    expires_in: ExpiresIn = None,
) -> None:
    """Create a new secret for a key. The old one stays valid for --grace."""
    from cluster.cli.commands.keys import run_rotate

    raise typer.Exit(run_rotate(file, key_id, grace, expires_in))


@keys.command()
def revoke(key_id: KeyId, file: File) -> None:
    """Revoke a key immediately."""
    from cluster.cli.commands.keys import run_revoke

    raise typer.Exit(run_revoke(file, key_id))
