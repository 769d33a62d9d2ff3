"""`tandem bench --compare batching`: plays a trace against a cluster with each engine.batching, one after the other."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli.commands.planning.bench import BenchFlags, Target, measure
from cluster.cli.commands.planning.compare import metric_value
from cluster.cli.commands.planning.inputs import check_writable, load_traffic, write_result
from cluster.cli.commands.running import running_cluster
from cluster.cli.console import console
from cluster.cli.load.player import LoadResult
from cluster.interruptible import run_interruptible
from cluster.keeper.lossy_output import lossy_output
from cluster.spec.loader import assignments, load_spec
from planner.compare import side_by_side
from planner.traces.trace import TrafficTrace
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

COMPARED = ("batching",)
KINDS = ("continuous", "static", "dynamic")
_DECIDED = {
    "router.http_port": 0,
    "router.grpc_port": 0,
    "control.admin_port": 0,
    "models.0.prefill.workers": 0,
    "models.0.engine.batching": "static",
}
_PROMPT_TOKENS = 1 << 20  # in flight to a worker, at least: otherwise the router would hold back most of a batch


def run_bench_batching(flags: BenchFlags) -> int:
    """Returns 1 if a measured cluster finished no request, or an interrupt left no result. Raises InputError,
    ConfigError, and what a cluster's start or first request raises."""
    check_compare(flags)
    check_writable("--output", flags.output)
    trace, specs = load_traffic(flags.traffic), batching_specs(flags)
    with lossy_output():
        return run_interruptible(_bench(flags, trace, specs))


def check_compare(flags: BenchFlags) -> None:
    """Raises ConfigError."""
    if flags.compare not in COMPARED:
        raise ConfigError(f"--compare: expected {', '.join(COMPARED)}, got {flags.compare!r}", field="--compare")
    elsewhere = {
        "--api": flags.api if flags.api != "tandem" else None,
        "--url": flags.url,
        "--cluster": flags.cluster,
        "--ca": flags.ca,
    }
    for option, given in elsewhere.items():
        if given is not None:
            raise ConfigError(
                f"{option}: expected none with --compare, which starts clusters of its own, got {given}", field=option
            )


def batching_specs(flags: BenchFlags) -> dict[str, ClusterSpec]:
    """The spec with each kind of batching, without prefill workers and a limit of the prompts in flight, under a name
    and at ports of its own. Raises ConfigError."""
    given = assignments(flags.settings)
    if decided := [key for key, value in given.items() if any(map(_is_decided, _leaves(key, value)))]:
        raise ConfigError(
            f"--set: expected no key that --compare decides itself, got {decided[0]}: remove it", field="--set"
        )
    base = load_spec(flags.config, given | _DECIDED)
    if len(base.models) != 1:
        raise ConfigError(f"models: expected one model to compare, got {len(base.models)}", field="models")
    return {kind: _batching(base, kind) for kind in KINDS}


def _leaves(key: str, value: object) -> Iterator[str]:
    """Keys of the values in `value`, with indices as they are counted: models.0.engine for models.00.engine."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield ".".join(str(int(part)) if part.isdecimal() else part for part in key.split("."))


def _is_decided(key: str) -> bool:
    return key in _DECIDED or key.endswith("engine.batching") or key in ("autoscaler.enabled", "autoscaler.external")


def _batching(base: ClusterSpec, kind: str) -> ClusterSpec:
    spec = base.model_dump() | {"name": f"{base.name[:34]}-bench"}  # of at most 40 characters
    in_flight = max(_PROMPT_TOKENS, base.router.max_prefill_tokens_in_flight)
    spec["router"] |= {"max_prefill_tokens_in_flight": in_flight}
    spec["autoscaler"] |= {"enabled": False, "external": False}  # the clusters differ in their batching alone
    (model,) = spec["models"]
    engines = [model["engine"], *(model[role]["engine"] for role in ("prefill", "decode"))]
    for engine in engines:
        engine.pop("batching", None)
        if kind == "continuous":
            engine.pop("batching_window_s", None)
    model["engine"]["batching"] = kind
    return ClusterSpec.model_validate(spec)


async def _bench(flags: BenchFlags, trace: TrafficTrace, specs: Mapping[str, ClusterSpec]) -> int:
    notes = Console(stderr=True, highlight=False)
    results = await _measured(flags, trace, specs, notes)
    if missing := [kind for kind in specs if kind not in results]:
        notes.print(f"interrupted, without results for {', '.join(missing)}")
    if not results:
        return 1
    found = {kind: result.to_json() for kind, result in results.items()}
    text = json.dumps({"compared": "engine.batching", "results": found}, indent=2, allow_nan=False)
    if flags.json:
        print(text)
    else:
        show(results, console())
    if flags.output is not None:
        write_result("--output", flags.output, text)
    return 0 if all(result.finished for result in results.values()) else 1


async def _measured(
    flags: BenchFlags, trace: TrafficTrace, specs: Mapping[str, ClusterSpec], notes: Console
) -> dict[str, LoadResult]:
    """The results so far, if it is cancelled."""
    seed = secrets.randbits(32) if flags.prompt_seed is None else flags.prompt_seed  # the same prompts for all
    results: dict[str, LoadResult] = {}
    for kind, spec in specs.items():

        def progress(text: str, kind: str = kind) -> None:
            notes.print(f"[dim]{kind}: {escape(text)}[/]")

        try:
            async with running_cluster(spec, progress) as cluster:
                tls = cluster.spec.router.tls
                url = urlsplit(f"{'grpc' if tls is None else 'grpcs'}://{cluster.grpc_address}")
                results[kind] = await measure(flags, Target(url, None if tls is None else tls.cert), trace, seed)
        except asyncio.CancelledError:
            break
        if not results[kind].complete:
            break  # interrupted
    return results


def show(results: Mapping[str, LoadResult], console: Console) -> None:
    first = next(iter(results.values()))
    console.print(f"[bold]{first.trace}[/]: {first.requests} requests over {first.span_s:.0f} s, by engine.batching")
    for note in dict.fromkeys(note for result in results.values() for note in result.notes):
        console.print(f"note: {note}", style="dim", markup=False)
    table = Table("", *(kind if result.complete else f"{kind} (interrupted)" for kind, result in results.items()))
    for column in table.columns[1:]:
        column.justify = "right"
    for metric, unit, values in side_by_side([result.to_json() for result in results.values()]):
        table.add_row(metric, *(metric_value(value, unit) for value in values))
    console.print(table)
