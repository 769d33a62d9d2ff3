"""The options of `tandem profile`, `simulate`, `plan`, `bench`, `compare`. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# ruff: noqa: PLC0415 (as in cluster.cli.main: `--help` answers at once)

Traffic = Annotated[
    str, typer.Argument(help="A trace file, a folder of ServeGen clients, or `synthetic`; see docs/planning.md.")
]
Arrivals = Annotated[
    str | None,
    typer.Option(help="Without arrivals: poisson:RATE, gamma:RATE:CV, ramp:FROM:TO:S or diurnal:RATE:SWING:S."),
]
Lengths = Annotated[str | None, typer.Option(help="synthetic: mean tokens PROMPT:OUTPUT, or with :CV:CV.")]
Prefixes = Annotated[str | None, typer.Option(help="synthetic: shared prefixes, COUNT:TOKENS:SHARE.")]
Start = Annotated[float, typer.Option("--start", help="Leave out what arrives before, seconds.", min=0)]
Duration = Annotated[float | None, typer.Option("--duration", help="Only what arrives in so many seconds.", min=0)]
Requests = Annotated[int | None, typer.Option("--requests", "--limit", help="Only so many requests.", min=1)]
Load = Annotated[float, typer.Option("--load", "--time-scale", help="Requests come so many times as fast.")]
Prompts = Annotated[float, typer.Option(help="Prompts are so many times as long.")]
Outputs = Annotated[float, typer.Option(help="Answers are so many times as long.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Jitter = Annotated[bool, typer.Option(help="Spread arrivals that the source rounded to seconds.")]
ModelName = Annotated[str | None, typer.Option("--model", help="llama-3-70b, ..., or a checkpoint folder.")]
Device = Annotated[str, typer.Option(help="a100, h100, h200, b200, cpu, or a YAML file.")]
Cost = Annotated[
    str | None, typer.Option(help="Measured step times FILE.json, or a table FILE:MODEL or FILE:MODEL/HARDWARE.")
]
ElementBytes = Annotated[
    float | None, typer.Option(help="Of weights and KV: 1 for fp8, 2 for bf16, 4 for fp32; unset: the device file's.")
]
Ttft = Annotated[float | None, typer.Option("--ttft", help="Objective for the time to first token, seconds.")]
Tpot = Annotated[float | None, typer.Option("--tpot", help="Objective for the time per output token, seconds.")]


def simulate(
    trace: Traffic,
    config: Annotated[Path | None, typer.Option("--config", help="Cluster spec (YAML).")] = None,
    model: ModelName = None,
    device: Device = "cpu",
    cost: Cost = None,
    element_bytes: ElementBytes = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="All workers share the cores of the host of --cost (`tandem profile`).")
    ] = False,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers; 0: aggregated.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of a prefill worker.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks of a decode worker.")] = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    arrivals: Arrivals = None,
    lengths: Lengths = None,
    prefixes: Prefixes = None,
    start: Start = 0.0,
    duration: Duration = None,
    requests: Requests = None,
    load: Load = 1.0,
    prompts: Prompts = 1.0,
    outputs: Outputs = 1.0,
    seed: Seed = 0,
    jitter: Jitter = True,
    fault: Annotated[
        list[str] | None, typer.Option(help="worker:decode-0@30+10, redis@30+20 or link:prefill-0@30+20*8.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Roles follow the traffic.")] = False,
) -> None:
    """Run a trace through a simulated cluster: latencies, objectives met, use of workers and links."""
    from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags
    from cluster.cli.commands.planning.simulate import SimulateFlags, run_simulate
    from planner.simulator.setup import Slo

    traffic = TrafficFlags(
        trace, arrivals, lengths, prefixes, start, duration, requests, load, prompts, outputs, seed, jitter
    )
    hardware = HardwareFlags(model or "", device, cost, None, element_bytes, one_host)
    flags = SimulateFlags(
        traffic,
        hardware,
        Slo(ttft, tpot),
        config,
        prefill,
        decode,
        prefill_tp,
        decode_tp,
        tuple(fault or ()),
        json,
        autoscale,
    )
    raise typer.Exit(run_simulate(flags))


def plan(
    trace: Traffic,
    model: Annotated[str, typer.Option("--model", help="llama-3-70b, ..., or a checkpoint folder.")],
    device: Device = "h100",
    devices: Annotated[int, typer.Option(help="At most so many.", min=1, max=1024)] = 16,
    ttft: Ttft = None,
    tpot: Tpot = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that shall meet both objectives.")] = 0.95,
    price: Annotated[float | None, typer.Option(help="Dollars per device and hour.")] = None,
    cost: Cost = None,
    element_bytes: ElementBytes = None,
    step_tokens: Annotated[list[int] | None, typer.Option(help="Chunk budgets to try.", min=16)] = None,
    running: Annotated[int, typer.Option(help="Most requests that a worker runs.", min=1, max=4096)] = 256,
    source: Annotated[str | None, typer.Option(help="What the values file serves: ORG/NAME, or a folder.")] = None,
    simulated: Annotated[int, typer.Option(help="Requests of the last round: the busiest ones.", min=50)] = 1000,
    jobs: Annotated[int | None, typer.Option(help="Processes; unset: all cores.", min=1)] = None,
    state: Annotated[Path | None, typer.Option(help="Results are kept here; an interrupted search goes on.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report with charts.")] = None,
    values: Annotated[Path | None, typer.Option(help="Write a values file for the Helm chart.")] = None,
    arrivals: Arrivals = None,
    lengths: Lengths = None,
    prefixes: Prefixes = None,
    start: Start = 0.0,
    duration: Duration = None,
    requests: Requests = None,
    load: Load = 1.0,
    prompts: Prompts = 1.0,
    outputs: Outputs = 1.0,
    seed: Seed = 0,
    jitter: Jitter = True,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Find the cheapest cluster that serves a traffic within its objectives (--ttft, --tpot, or both)."""
    from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags
    from cluster.cli.commands.planning.plan import PlanFlags, run_plan
    from planner.search.plan import Goal
    from planner.simulator.setup import Slo

    traffic = TrafficFlags(
        trace, arrivals, lengths, prefixes, start, duration, requests, load, prompts, outputs, seed, jitter
    )
    hardware = HardwareFlags(model, device, cost, price, element_bytes)
    goal = Goal(Slo(ttft, tpot), attainment, devices, tuple(step_tokens or (2048, 8192)), running)
    raise typer.Exit(run_plan(PlanFlags(traffic, hardware, goal, source, simulated, jobs, state, report, values, json)))


def profile(
    output: Annotated[Path, typer.Argument(help="The cost model, JSON: `--cost` of simulate and plan takes it.")],
    config: Annotated[Path | None, typer.Option("--config", help="Cluster spec (YAML): its first model.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Pulled model, checkpoint folder or GGUF file.")] = None,
    device: Annotated[str, typer.Option(help="Whose links are meant: a100, ..., cpu, or a YAML file.")] = "cpu",
) -> None:
    """Measure this hardware's engine steps over a grid, for `tandem simulate --cost` and `tandem plan --cost`."""
    from cluster.cli.commands.planning.profile import run_profile

    raise typer.Exit(run_profile(config, model, device, output))


def bench(
    trace: Traffic,
    api: Annotated[str, typer.Option(help="tandem (gRPC), completions (token ids) or chat (text).")] = "tandem",
    url: Annotated[
        str | None,
        typer.Option(help="grpc://HOST:PORT, or http://HOST:PORT/v1 of any OpenAI API; unset: the cluster here."),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="As the server names it; tandem: unset for the only one.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="TANDEM_API_KEY", help="Where the server asks for one.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file to check the server's certificate against.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Which running cluster; else the only one.")] = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    arrivals: Arrivals = None,
    lengths: Lengths = None,
    prefixes: Prefixes = None,
    start: Start = 0.0,
    duration: Duration = None,
    requests: Requests = None,
    load: Load = 1.0,
    prompts: Prompts = 1.0,
    outputs: Outputs = 1.0,
    seed: Seed = 0,
    jitter: Jitter = True,
    connections: Annotated[int, typer.Option(help="Most requests under way at once.", min=1, max=65536)] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole answer.", min=0.1, max=86400)] = 600.0,
    warm_up: Annotated[int, typer.Option(help="Requests before, which do not count.", min=0, max=1000)] = 2,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly the trace's lengths.")] = True,
    vocab: Annotated[int | None, typer.Option(help="Token ids below this; unset: all; completions: 32000.")] = None,
    prompt_seed: Annotated[int | None, typer.Option(help="The same prompts each time; else new ones.", min=0)] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON here, for `tandem compare`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Play a trace against a live cluster or any OpenAI endpoint: the same figures as `simulate`, measured."""
    from cluster.cli.commands.planning.bench import BenchFlags, run_bench
    from cluster.cli.commands.planning.inputs import TrafficFlags
    from cluster.cli.load.player import Limits
    from planner.simulator.setup import Slo

    traffic = TrafficFlags(
        trace, arrivals, lengths, prefixes, start, duration, requests, load, prompts, outputs, seed, jitter
    )
    flags = BenchFlags(
        traffic, Slo(ttft, tpot), api, url, cluster, model, api_key, ca, Limits(connections, timeout), warm_up,
        ignore_eos, vocab, prompt_seed, output, json,
    )  # fmt: skip
    raise typer.Exit(run_bench(flags))


Result = Annotated[Path, typer.Argument(help="What `simulate --json` or `bench --json` printed.")]


def compare(
    a: Result,
    b: Result,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Lay two results side by side: prediction and measurement, two ratios, Tandem and a rival."""
    from cluster.cli.commands.planning.compare import run_compare

    raise typer.Exit(run_compare(a, b, json))


def add_to(app: typer.Typer) -> None:
    app.command()(profile)
    app.command()(simulate)
    app.command()(plan)
    app.command()(bench)
    app.command()(compare)
