"""The `tandem` command. A command imports its module only when it runs, so `--help` is fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import planning, training
from cluster.cli.options.audit import audit
from cluster.cli.options.certs import certs
from cluster.cli.options.keys import keys
from cluster.cli.options.shared import Address, ClusterName, Config, Json, Model, ServedName, Settings, Tls
from cluster.cli.options.trace import traces

# ruff: noqa: PLC0415 (importing gRPC, pydantic, Ray and torch takes seconds)

app = typer.Typer(
    name="tandem",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut off option names on a terminal of 80 columns
)

app.add_typer(keys, name="keys")
app.add_typer(audit, name="audit")
app.add_typer(traces, name="trace")
app.add_typer(certs, name="certs")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from tandem.version import tandem_version

        typer.echo(tandem_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""


GrpcAddress = Annotated[
    str | None,
    typer.Option("--address", help="gRPC address (HOST:PORT) of a router. Default: a cluster on this machine."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="TANDEM_API_KEY", help="API key, if the routers require one. Default: none.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Let running requests finish on the worker instead of moving them to others.")
]
RestartModel = Annotated[
    str | None,
    typer.Option("--model", help="Restart only this model's workers (its served name). Default: all models."),
]


@app.command()
def up(
    config: Config = None,
    model: Model = None,
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers; 0 turns disaggregation off. Default: 1.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. Default: 1.")] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks of each prefill worker. Default: 1.")
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks of each decode worker. Default: 1.")
    ] = None,
    routers: Annotated[int | None, typer.Option(help="Routers; each has its own ports. Default: 1.")] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of the OpenAI-compatible HTTP API; 0 picks a free one. Default: 8000.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the gRPC API; 0 picks a free one. Default: 50051.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of the admin gRPC API; 0 picks a free one. Default: 50052.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="ray, or subprocess (one machine, without Ray). Default: ray.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="URL of an external Redis or Valkey. Default: the embedded server.")
    ] = None,
    disaggregation: Annotated[str | None, typer.Option(help="auto, always or never. Default: auto.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", "--cluster", help="Name of the cluster, unique on this machine. Default: tandem."),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(help="Folder made by `tandem certs`: mutual TLS inside, TLS for clients. Default: no TLS."),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Turn the autoscaler on: pool sizes follow the load.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --autoscale: show decisions, but change nothing.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="Address of the HTTP and gRPC ports; 0.0.0.0 for all. Default: 127.0.0.1.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in the API. Default: the last part of --model.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens. Default: the model's own.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key that clients must send. Default: none; see `tandem keys` for more.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the cluster serves; `tandem down` stops it.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Start a cluster and run it until Ctrl-C. Options override the spec given with --config."""
    from cluster.cli.commands.up import UpFlags, run_up

    flags = UpFlags(
        config=config, model=model, prefill=prefill, decode=decode, prefill_tp=prefill_tp, decode_tp=decode_tp,
        routers=routers, http_port=http_port, grpc_port=grpc_port, admin_port=admin_port, backend=backend,
        redis_url=redis_url, disaggregation=disaggregation, name=name, tls=tls, autoscale=autoscale, dry_run=dry_run,
        settings=tuple(settings or ()), host=host, served_model_name=served_model_name, max_model_len=max_model_len,
        dtype=dtype, api_key=api_key,
    )  # fmt: skip
    if detach:
        from cluster.cli.commands.background import run_detached

        raise typer.Exit(run_detached(flags.source().spec))
    raise typer.Exit(run_up(flags))


@app.command()
def down(address: Address = None, cluster: ClusterName = None, tls: Tls = None) -> None:
    """Stop a cluster: running requests end, then its processes."""
    from cluster.cli.commands.background import run_down

    raise typer.Exit(run_down(address, cluster, tls))


@app.command()
def demo(
    name: Annotated[
        str, typer.Option("--name", "--cluster", help="Name of the cluster, unique on this machine.")
    ] = "tandem-demo",
) -> None:
    """Ask a small cluster three questions, show where time went. It has one prefill and one decode worker."""
    from cluster.cli.commands.demo import run_demo

    raise typer.Exit(run_demo(name))


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Ask this and exit. Default: read questions from the terminal or stdin.")
    ] = None,
    model: ServedName = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's own sampling.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer. Default: 1024.", min=1)] = None,
    address: GrpcAddress = None,
    cluster: ClusterName = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send each text as a plain prompt, for models without a chat template.")
    ] = False,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="Send this file with the first question. May be repeated.")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(help="PEM file with the CA of the router's certificate. Default: the local cluster's."),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model of a running cluster."""
    from cluster.cli.commands.chat import ChatOptions, run_chat

    options = ChatOptions(model or "", temperature, max_tokens, raw, tuple(image or ()))
    raise typer.Exit(run_chat(question, options, address, cluster, ca, api_key))


@app.command()
def status(
    json: Json = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Show workers, KV blocks, links and processes of a cluster."""
    from cluster.cli.commands.status import run_status

    raise typer.Exit(run_status(json, address, cluster, tls))


@app.command()
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit. Without a terminal, this is the default.")
    ] = False,
    interval: Annotated[float | None, typer.Option(help="Seconds between frames. Default: 1.", min=0.2, max=60)] = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Watch workers, links, queues and requests of a cluster."""
    from cluster.cli.commands.top import run_top

    raise typer.Exit(run_top(once, interval, address, cluster, tls))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers. Default: unchanged.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers. Default: unchanged.")] = None,
    model: ServedName = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Change the number of workers without losing a request."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.scaling import run_scale

    raise typer.Exit(run_scale(prefill, decode, model, find_admin(address, cluster, tls)))


@app.command()
def ratio(
    ratio: Annotated[str, typer.Argument(help="Prefill:decode, for example 2:1.")],
    model: ServedName = None,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Change the roles of the running workers to this ratio."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.scaling import run_ratio

    raise typer.Exit(run_ratio(ratio, model, find_admin(address, cluster, tls)))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Id of the worker, as `tandem status` shows it.")],
    restart: Annotated[bool, typer.Option("--restart", help="Restart the worker instead of removing it.")] = False,
    wait: Wait = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Empty a worker, then remove or restart it, losing no request."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.scaling import run_drain

    raise typer.Exit(run_drain(worker, restart, wait, find_admin(address, cluster, tls)))


@app.command()
def restart(
    model: RestartModel = None,
    wait: Wait = False,
    routers: Annotated[
        bool, typer.Option("--routers", help="The routers too, before the workers. With one, clients must reconnect.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Begin none: follow the one under way.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Restart the workers one after another, losing no request. The cluster goes on if this command ends."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.scaling import run_restart, run_watch_restart

    admin = find_admin(address, cluster, tls)
    run = run_watch_restart if watch else run_restart
    raise typer.Exit(run(model, wait, routers, admin))


@app.command()
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The changed cluster spec (YAML).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes without making them.")] = False,
    address: Address = None,
    cluster: ClusterName = None,
    tls: Tls = None,
) -> None:
    """Apply a changed spec to a running cluster. Refuses changes that need a restart."""
    from cluster.cli.admin_client import find_admin
    from cluster.cli.commands.scaling import run_apply

    raise typer.Exit(run_apply(file, dry_run, find_admin(address, cluster, tls)))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="smollm2-135m, or a model on the hub (OWNER/NAME).")],
    volume_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes that the cache's volume may hold, if its file system does not limit them."),
    ] = None,
) -> None:
    """Download a model into the local cache, if there is room."""
    from cluster.cli.commands.pull import run_pull

    raise typer.Exit(run_pull(model, volume_bytes))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file that a router wrote to its router.record folder.")],
    request: Annotated[str | None, typer.Option(help="Show every step of this request only.")] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show every step: event, actions, state.")] = False,
) -> None:
    """Replay recorded decisions and show the first difference. Exits with 1 if there is one."""
    from cluster.cli.commands.replay import run_replay

    raise typer.Exit(run_replay(file, request, steps))


@app.command()
def doctor(config: Config = None, model: Model = None, settings: Settings = None) -> None:
    """Check ports, memory, devices, Redis and the model. Every failure names its fix."""
    from cluster.cli.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(config, model, settings or ()))


planning.add_to(app)
training.add_to(app)


@app.command()
def version() -> None:
    """Print the version."""
    from tandem.version import tandem_version

    typer.echo(tandem_version())


def main() -> None:
    """Runs the command line. Every error of ours, or of a file, is one line on stderr and exit code 2."""
    # Children replace themselves at once, so gRPC has nothing to do at a fork but talk about it on stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # At the default level, gRPC prints a line for each peer without TLS.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except Exception as error:
        from cluster.cli import termination_message
        from tandem.errors import TandemError

        if isinstance(error, TandemError):
            message = error.message
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        else:
            raise
        print(f"error: {message}", file=sys.stderr)
        termination_message.write(message)
        sys.exit(2)
