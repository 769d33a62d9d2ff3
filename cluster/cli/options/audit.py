"""Options of `tandem audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# ruff: noqa: PLC0415 (as in cluster.cli.main)

audit = typer.Typer(help="Chained audit logs (docs/security.md).", no_args_is_help=True)


@audit.callback()
def commands() -> None:
    """Makes `verify` a command of its own: with one command, typer would leave its name out."""


@audit.command()
def verify(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files of one log, the oldest first; .gz files too.")
    ],
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TANDEM_SECURITY__AUTH__AUDIT_KEY_FILE",
            help="The key, the same as security.auth.audit_key_file. Default: the chain has none.",
        ),
    ] = None,
) -> None:
    """Check the chain of an audit log. Says the first broken line, and exits with 1 if there is one."""
    from cluster.cli.commands.audit import run_verify

    raise typer.Exit(run_verify(files, key_file))
