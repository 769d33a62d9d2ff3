"""The `tandem` command. Each command's own module is imported when it runs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import planning as planning_cli
from cluster.cli.keys import keys
from cluster.cli.trace import traces

# ruff: noqa: PLC0415 (commands import what they need when they run: gRPC, pydantic, Ray and torch take seconds)

app = typer.Typer(
    name="tandem",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(keys, name="keys")
app.add_typer(traces, name="trace")

Config = Annotated[Path | None, typer.Option("--config", help="Cluster spec (YAML); see docs/configuration.md.")]
Model = Annotated[str | None, typer.Option("--model", help="Pulled model, checkpoint folder or GGUF file.")]
Address = Annotated[str | None, typer.Option("--address", help="Admin address (host:port) of a cluster elsewhere.")]
GrpcAddress = Annotated[str | None, typer.Option("--address", help="gRPC address (host:port) of a router elsewhere.")]
Tls = Annotated[Path | None, typer.Option("--tls", envvar="TANDEM_TLS", help="Folder of `tandem certs`: as its admin.")]
ApiKey = Annotated[str | None, typer.Option(envvar="TANDEM_API_KEY", help="Where the routers ask for one.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", "--name", help="Which running cluster; the only one by default.")
]


@app.command()
def up(
    config: Config = None,
    model: Model = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 0 makes the cluster aggregated.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of a prefill worker.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of a decode worker.")] = None,
    routers: Annotated[int | None, typer.Option(help="Routers; each has ports of its own.")] = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI-compatible HTTP; 0 takes a free one.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Admin gRPC; 0 takes a free one.")] = None,
    backend: Annotated[str | None, typer.Option(help="ray or subprocess.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="An external Redis or Valkey instead of the embedded.")] = None,
    disaggregation: Annotated[str | None, typer.Option(help="auto, always or never.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", "--cluster", help="A name of its own lets a second cluster run.")
    ] = None,
    tls: Annotated[Path | None, typer.Option(help="Folder of `tandem certs`: TLS inside and at the edge.")] = None,
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Let the pools follow the traffic.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The autoscaler decides, but changes nothing.")] = False,
) -> None:
    """Start a cluster and stay up until Ctrl-C."""
    from cluster.cli.commands.up import UpFlags, run_up

    flags = UpFlags(
        config, model, prefill, decode, prefill_tp, decode_tp, routers, http_port, grpc_port, admin_port, backend,
        redis_url, disaggregation, name, tls, autoscale, dry_run,
    )  # fmt: skip
    raise typer.Exit(run_up(flags))


@app.command()
def demo() -> None:
    """Start one prefill and one decode worker, ask three questions, show where the time went, stop."""
    from cluster.cli.commands.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask once; otherwise read from the terminal or stdin.")] = None,
    model: Model = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; higher is more varied.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer; unset: what the context leaves.")] = None,
    address: GrpcAddress = None,
    cluster: ClusterName = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue each text as it is, for models without a chat.")] = False,
    ca: Annotated[Path | None, typer.Option(help="PEM file to check a router's certificate against.")] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running cluster."""
    from cluster.cli.commands.chat import Ask, run_chat

    raise typer.Exit(run_chat(question, Ask(model or "", temperature, max_tokens, raw), address, cluster, ca, api_key))


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Show a running cluster's workers, blocks, links and processes."""
    from cluster.cli.commands.status import run_status

    raise typer.Exit(run_status(json, address, cluster, tls))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame, as without a terminal.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two frames.", min=0.2, max=60)] = 1.0,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Watch a running cluster: workers, links, queues and requests, live."""
    from cluster.cli.commands.top import run_top

    raise typer.Exit(run_top(once, interval, address, cluster, tls))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers there shall be.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers there shall be.")] = None,
    model: Annotated[str | None, typer.Option(help="Served name, where there are several.")] = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Change how many workers there are, without losing a request."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.live_ratio import run_scale

    raise typer.Exit(run_scale(prefill, decode, model, find_admin(address, cluster, tls)))


@app.command()
def ratio(
    ratio: Annotated[str, typer.Argument(help="Prefill to decode workers, as in 2:1.")],
    model: Annotated[str | None, typer.Option(help="Served name, where there are several.")] = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Give the workers there are other roles, in this ratio."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.live_ratio import run_ratio

    raise typer.Exit(run_ratio(ratio, model, find_admin(address, cluster, tls)))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's id, as in `tandem status`.")],
    restart: Annotated[bool, typer.Option("--restart", help="Start it again instead of taking it out.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Let its requests end there instead of moving them.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Empty a worker and take it out of the cluster, or restart it, without losing a request."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.live_ratio import run_drain

    raise typer.Exit(run_drain(worker, restart, wait, find_admin(address, cluster, tls)))


@app.command()
def restart(
    model: Annotated[str | None, typer.Option(help="Only the workers of this served name.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Let requests end instead of moving them.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Restart every worker, one after the other, without losing a request."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.live_ratio import run_restart

    raise typer.Exit(run_restart(model, wait, find_admin(address, cluster, tls)))


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The changed cluster spec (YAML).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Make a running cluster what a changed spec says; refused where that needs a restart."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.apply import run_apply

    raise typer.Exit(run_apply(file, dry_run, find_admin(address, cluster, tls)))


@app.command()
def pull(model: Annotated[str, typer.Argument(help="smollm2-135m, or a model hub name (owner/name).")]) -> None:
    """Fetch a model into the local cache."""
    from cluster.cli.commands.pull import run_pull

    raise typer.Exit(run_pull(model))


@app.command()
def doctor(config: Config = None, model: Model = None) -> None:
    """Check ports, memory, shared memory, devices, Redis and model; every failure names its fix."""
    from cluster.cli.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(config, model))


planning_cli.add_to(app)


certs = typer.Typer(help="The cluster's own certificates: mutual TLS inside, TLS at the edge.", no_args_is_help=True)
app.add_typer(certs, name="certs")
CertsFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the files.")]
Days = Annotated[int, typer.Option(help="Days that the certificates are valid.", min=1, max=3650)]


@certs.command("init")
def certs_init(
    folder: CertsFolder,
    cluster: Annotated[str, typer.Option("--cluster", "--name", help="A certificate is of no other.")] = "tandem",
    host: Annotated[list[str] | None, typer.Option(help="Name or address of a host; may be repeated.")] = None,
    days: Days = 365,
    ca_days: Annotated[int, typer.Option(help="Days that the authority is valid.", min=1, max=7300)] = 3650,
) -> None:
    """Make an authority and a certificate for each kind of process. Refuses to overwrite."""
    from cluster.cli.commands.certs import run_init

    raise typer.Exit(run_init(folder, cluster, host or [], days, ca_days))


@certs.command("renew")
def certs_renew(
    folder: CertsFolder,
    days: Days = 365,
    only: Annotated[list[str] | None, typer.Option(help="edge, controller, router, worker, admin.")] = None,
) -> None:
    """Replace certificates and keys by new ones of the same names. Running processes take them."""
    from cluster.cli.commands.certs import run_renew

    raise typer.Exit(run_renew(folder, days, only or []))


@certs.command("show")
def certs_show(folder: CertsFolder) -> None:
    """Show names and expiry; warn below 30 days, and exit with 1 when one has expired."""
    from cluster.cli.commands.certs import run_show

    raise typer.Exit(run_show(folder))


@app.command()
def version() -> None:
    """Print the version."""
    from tandem.version import tandem_version

    typer.echo(tandem_version())


def main() -> None:
    """Runs the command line. Every error of ours is one line on stderr and exit code 2."""
    # Children replace themselves at once, so gRPC has nothing to do at a fork but talk about it on stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each peer without TLS leaves a raw line on the terminal
    try:
        app()
    except Exception as error:
        from cluster.cli.termination_message import leave
        from tandem.errors import TandemError

        if not isinstance(error, TandemError):
            raise
        print(f"error: {error.message}", file=sys.stderr)
        leave(error.message)
        sys.exit(2)
