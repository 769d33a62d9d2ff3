"""Options of `tandem trace [ID]` and `tandem trace record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cluster.cli.options.shared import Address, ClusterName, Json, ServedName, Tls

# ruff: noqa: PLC0415 (as in cluster.cli.main)


class _ShowByDefault(TyperGroup):
    """Makes `show` the default command: `tandem trace`, `tandem trace ID`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, not typer's
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


traces = typer.Typer(cls=_ShowByDefault, help="Show where the time of requests went, or record them.")


@traces.command()
def show(
    request: Annotated[str | None, typer.Argument(help="Id of the request. Default: list the latest requests.")] = None,
    json: Json = False,
    limit: Annotated[int | None, typer.Option(help="Number of requests to list. Default: 20.", min=1, max=1000)] = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Show the stages of one request as a Gantt chart. The word `show` is optional."""
    from cluster.cli.commands.trace import run_trace

    raise typer.Exit(run_trace(request, json, limit, address, cluster, tls))


@traces.command()
def record(
    output: Annotated[
        Path, typer.Argument(help="Trace file to write: JSON lines, which simulate, plan and bench read.")
    ],
    model: ServedName = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to record. Default: until Ctrl-C.", min=0.1)] = None,
    requests: Annotated[
        int, typer.Option("--requests", "--limit", help="Maximum number of requests.", min=1)
    ] = 1_000_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Record the requests of a running cluster, without text. Times, lengths, classes and salted hashes are kept."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.record import run_record

    target = find_admin(address, cluster, tls)
    raise typer.Exit(
        run_record(target, output, model=model or "", duration_s=duration, requests=requests, overwrite=overwrite)
    )
