"""`tandem trace [ID]` and `tandem trace record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# ruff: noqa: PLC0415 (as in cluster.cli.main: `--help` answers at once)


class _ShowByDefault(TyperGroup):
    """`tandem trace`, `tandem trace ID`: the command may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, which is not always typer's own
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["show", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


traces = typer.Typer(cls=_ShowByDefault, help="Where the time of requests went; or record them as a trace.")

Address = Annotated[str | None, typer.Option("--address", help="Admin address (host:port) of a cluster elsewhere.")]
Tls = Annotated[Path | None, typer.Option("--tls", envvar="TANDEM_TLS", help="Folder of `tandem certs`: as its admin.")]
ClusterName = Annotated[str | None, typer.Option("--cluster", help="Which running cluster; the only one by default.")]


@traces.command()
def show(
    request: Annotated[str | None, typer.Argument(help="Id of a request; without it, the latest are listed.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    limit: Annotated[int, typer.Option(help="How many to list.", min=1, max=1000)] = 20,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Show where the time of one request went, its handoff above all, as a Gantt chart. `show` may be left out."""
    from cluster.cli.commands.trace import run_trace

    raise typer.Exit(run_trace(request, json, limit, address, cluster, tls))


@traces.command()
def record(
    output: Annotated[Path, typer.Argument(help="The trace: JSON lines that simulate, plan and bench read.")],
    model: Annotated[str, typer.Option("--model", help="Served name, where there are several.")] = "",
    duration: Annotated[float | None, typer.Option(help="Seconds; unset: until Ctrl-C.", min=0.1)] = None,
    requests: Annotated[int, typer.Option("--requests", "--limit", help="At most so many.", min=1)] = 1_000_000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Where the file exists.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Record the requests of a running cluster as a trace: times, lengths, classes, salted hashes; no text."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.record import run_record

    target = find_admin(address, cluster, tls)
    raise typer.Exit(
        run_record(target, output, model=model, duration_s=duration, requests=requests, overwrite=overwrite)
    )
