"""The options of `tandem profile`, `simulate` and `plan`. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# ruff: noqa: PLC0415 (as in cluster.cli: `--help` answers at once)

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
Requests = Annotated[int | None, typer.Option(help="Only so many requests.", min=1)]
Load = Annotated[float, typer.Option(help="Requests come so many times as fast.")]
Prompts = Annotated[float, typer.Option(help="Prompts are so many times as long.")]
Outputs = Annotated[float, typer.Option(help="Answers are so many times as long.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Jitter = Annotated[bool, typer.Option(help="Spread arrivals that the source rounded to seconds.")]
ModelName = Annotated[str | None, typer.Option("--model", help="llama-3-70b, ..., or a checkpoint folder.")]
Device = Annotated[str, typer.Option(help="a100, h100, h200, b200, cpu, or a YAML file.")]
Cost = Annotated[
    str | None, typer.Option(help="Measured step times: FILE.json, or a published table FILE:MODEL[/HARDWARE].")
]
ElementBytes = Annotated[float, typer.Option(help="Of weights and KV: 2 for bf16, 1 for fp8.")]
Ttft = Annotated[float | None, typer.Option("--ttft", help="Objective for the time to first token, seconds.")]
Tpot = Annotated[float | None, typer.Option("--tpot", help="Objective for the time per output token, seconds.")]


def simulate(
    trace: Traffic,
    config: Annotated[Path | None, typer.Option("--config", help="Cluster spec (YAML).")] = None,
    model: ModelName = None,
    device: Device = "cpu",
    cost: Cost = None,
    element_bytes: ElementBytes = 2.0,
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
) -> None:
    """Run a trace through a simulated cluster: latencies, objectives met, use of workers and links."""
    from cluster.commands.planning import HardwareFlags, TrafficFlags
    from cluster.commands.simulate import SimulateFlags, run_simulate
    from planner.simulator.setup import Slo

    traffic = TrafficFlags(
        trace, arrivals, lengths, prefixes, start, duration, requests, load, prompts, outputs, seed, jitter
    )
    hardware = HardwareFlags(model or "", device, cost, None, element_bytes)
    flags = SimulateFlags(
        traffic, hardware, Slo(ttft, tpot), config, prefill, decode, prefill_tp, decode_tp, tuple(fault or ()), json
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
    element_bytes: ElementBytes = 2.0,
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
    """Find the cheapest cluster that serves a traffic within its objectives."""
    from cluster.commands.plan import PlanFlags, run_plan
    from cluster.commands.planning import HardwareFlags, TrafficFlags
    from planner.search.plan import Goal
    from planner.simulator.setup import Slo

    traffic = TrafficFlags(
        trace, arrivals, lengths, prefixes, start, duration, requests, load, prompts, outputs, seed, jitter
    )
    hardware = HardwareFlags(model, device, cost, price, element_bytes)
    goal = Goal(Slo(ttft, tpot), attainment, devices, tuple(step_tokens or (2048, 8192)), running)
    raise typer.Exit(
        run_plan(PlanFlags(traffic, hardware, goal, source, simulated, jobs, state, report, values, json))
    )


def profile(
    output: Annotated[Path, typer.Argument(help="The cost model, JSON: `--cost` of simulate and plan takes it.")],
    config: Annotated[Path | None, typer.Option("--config", help="Cluster spec (YAML): its first model.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Pulled model, checkpoint folder or GGUF file.")] = None,
    device: Annotated[str, typer.Option(help="Whose links are meant: a100, ..., cpu, or a YAML file.")] = "cpu",
) -> None:
    """Measure this hardware's engine steps over a grid, for `tandem simulate --cost` and `tandem plan --cost`."""
    from cluster.commands.profile import run_profile

    raise typer.Exit(run_profile(config, model, device, output))


def add_to(app: typer.Typer) -> None:
    app.command()(profile)
    app.command()(simulate)
    app.command()(plan)
