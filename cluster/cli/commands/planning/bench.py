"""`tandem bench`: plays a trace against a cluster or any OpenAI endpoint. Prints the figures of `tandem simulate`."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rich.console import Console
from rich.progress import Progress

from cluster.cli.admin_client import find_routed, refuse_cluster_beside
from cluster.cli.commands.planning.inputs import TrafficFlags, check_writable, load_traffic, write_result
from cluster.cli.commands.planning.simulate import latencies, outcome_lines
from cluster.cli.load.client import LoadClient
from cluster.cli.load.grpc_client import GrpcClient
from cluster.cli.load.openai_client import OpenAiClient, OpenAiEndpoint
from cluster.cli.load.player import LoadLimits, LoadResult, Player
from cluster.cli.load.prompts import Prompts
from cluster.cli.router_client import check_api_key
from cluster.interruptible import run_interruptible
from planner.simulator.setup import Slo
from planner.traces.trace import TrafficTrace
from tandem.errors import ConfigError, TandemError
from tandem.text.words import seconds

APIS = ("tandem", "completions", "chat")
DEFAULT_VOCAB = 32_000  # most vocabularies are larger
_SCHEMES = {"tandem": ("grpc", "grpcs"), "completions": ("http", "https"), "chat": ("http", "https")}


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """`url` None: the local cluster, or the one named `cluster`. `vocab` None: the server's, else DEFAULT_VOCAB.
    `prompt_seed` None: random."""

    traffic: TrafficFlags
    slo: Slo
    api: str = "tandem"
    url: str | None = None
    cluster: str | None = None
    model: str = ""
    api_key: str | None = None
    ca: Path | None = None
    limits: LoadLimits = field(default_factory=LoadLimits)
    warm_up: int = 2
    ignore_eos: bool = True
    vocab: int | None = None
    prompt_seed: int | None = None
    output: Path | None = None
    json: bool = False
    compare: str | None = None
    config: Path | None = None  # of the clusters that are compared
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    url: SplitResult
    ca: str | None

    @property
    def shown(self) -> str:
        """Without a user and password."""
        return self.url._replace(netloc=self.url.netloc.rpartition("@")[2]).geturl()


def run_bench(flags: BenchFlags) -> int:
    """Returns 1 if no request finished. Raises InputError, ConfigError, and the server's error to the first request."""
    check_writable("--output", flags.output)
    for option, given in (("--config", flags.config), ("--set", flags.settings)):
        if given:
            raise ConfigError(
                f"{option}: expected together with --compare, which starts clusters; without it the cluster is there",
                field=option,
            )
    target = find_target(flags)
    trace = load_traffic(flags.traffic)
    return run_interruptible(bench_against(flags, target, trace))


async def measure(flags: BenchFlags, target: Target, trace: TrafficTrace, prompt_seed: int) -> LoadResult:
    client, vocab = await _connect(flags, target)
    try:
        return await _play(flags, target, trace, Prompts(trace, prompt_seed, vocab), client)
    finally:
        await client.close()


async def bench_against(flags: BenchFlags, target: Target, trace: TrafficTrace) -> int:
    """Measures until the end of the trace or a cancellation. Returns 1 if no request finished."""
    seed = secrets.randbits(32) if flags.prompt_seed is None else flags.prompt_seed
    try:
        result = await measure(flags, target, trace, seed)
    except asyncio.CancelledError:
        print("interrupted before the first request", file=sys.stderr)
        return 1
    text = json.dumps(result.to_json(), indent=2, allow_nan=False)
    if flags.json:
        print(text)
    else:
        show(result, Console(highlight=False))
    if flags.output is not None:
        write_result("--output", flags.output, text)
    return 0 if result.finished else 1


async def _connect(flags: BenchFlags, target: Target) -> tuple[LoadClient, int | None]:
    """The client, and the size of the vocabulary to draw prompts from; None: prompts are text."""
    url = target.url
    if flags.api == "tandem":
        address = url.netloc
        tls = url.scheme == "grpcs"
        client = GrpcClient(
            address, target.ca, tls=tls, model=flags.model, api_key=flags.api_key, ignore_eos=flags.ignore_eos
        )
        try:
            return client, flags.vocab or await client.vocab_tokens()
        except TandemError:
            await client.close()
            raise
    endpoint = OpenAiEndpoint(url, flags.model, flags.api == "chat", flags.api_key, target.ca, flags.ignore_eos)
    return OpenAiClient(endpoint), None if endpoint.chat else flags.vocab or DEFAULT_VOCAB


async def _play(
    flags: BenchFlags, target: Target, trace: TrafficTrace, prompts: Prompts, client: LoadClient
) -> LoadResult:
    quiet = flags.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("requests ended", total=len(trace))
        player = Player(
            trace, prompts, client, flags.slo, flags.limits, lambda ended: progress.update(task, completed=ended)
        )
        await player.warm_up(flags.warm_up)
        return await player.play(target.shown)


def find_target(flags: BenchFlags) -> Target:
    """Raises ConfigError."""
    if flags.api not in APIS:
        raise ConfigError(f"--api: expected one of {', '.join(APIS)}, got {flags.api!r}", field="--api")
    check_api_key(flags.api_key)
    if flags.api != "tandem" and not flags.model:
        raise ConfigError("--model: expected the served name of the model", field="--model")
    if flags.api == "chat" and flags.vocab is not None:
        raise ConfigError(
            f"--vocab: expected none with --api chat, whose prompts are text, got {flags.vocab}", field="--vocab"
        )
    refuse_cluster_beside("--url", flags.url, flags.cluster)
    schemes = _SCHEMES[flags.api]
    given = None if flags.ca is None else str(flags.ca)
    if flags.url is None:
        found = find_routed(flags.cluster)
        ca = given or found.edge_ca
        scheme = schemes[0] if found.edge_ca is None else schemes[1]
        where = found.grpc if flags.api == "tandem" else f"{found.http}/v1"
        return Target(urlsplit(f"{scheme}://{where}"), ca)
    target = Target(urlsplit(flags.url), given)
    if target.url.scheme not in schemes or not target.url.hostname:
        example = "grpc://HOST:PORT" if flags.api == "tandem" else "http://HOST:PORT/v1"
        raise ConfigError(f"--url: expected {example} for --api {flags.api}, got {target.shown!r}", field="--url")
    return target


def show(result: LoadResult, console: Console) -> None:
    ended = "" if result.complete else " (interrupted)"
    console.print(
        f"[bold]{result.trace}[/]: {result.requests} requests over {result.span_s:.0f} s to {result.target}{ended}"
    )
    for note in result.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    console.print(latencies(result))
    for line in outcome_lines(result):
        console.print(line)
    console.print(f"this client sent 99 % of the requests at most {seconds(result.send_lag_s.p99)} late", style="dim")
