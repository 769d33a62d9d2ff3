"""Options of `tandem profile`, `calibrate`, `simulate`, `plan`, `bench` and `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import planning_types as types
from cluster.cli.options.shared import ClusterName, Config, Json, Model

# ruff: noqa: PLC0415 (as in cluster.cli.main)


def simulate(
    trace: types.Traffic,
    config: Config = None,
    model: types.ModelName = None,
    device: types.Device = "cpu",
    prefill_device: Annotated[
        str | None, typer.Option(help="Device of prefill workers, if another. Default: --device.")
    ] = None,
    decode_device: Annotated[
        str | None, typer.Option(help="Device of decode workers, if another. Default: --device.")
    ] = None,
    cost: types.Cost = None,
    element_bytes: types.ElementBytes = None,
    kv_bytes: types.KvBytes = None,
    expert_bytes: types.ExpertBytes = None,
    constrained: types.Constrained = 0.0,
    acceptance: types.Acceptance = None,
    calibration: types.Calibration = None,
    one_host: types.OneHost = False,
    prefill: types.Prefill = None,
    decode: types.Decode = None,
    prefill_tp: types.PrefillTp = None,
    decode_tp: types.DecodeTp = None,
    ttft: types.Ttft = None,
    tpot: types.Tpot = None,
    class_slo: types.ClassSlo = None,
    arrivals: types.Arrivals = None,
    lengths: types.Lengths = None,
    prefixes: types.Prefixes = None,
    start: types.Start = 0.0,
    duration: types.Duration = None,
    requests: types.Requests = None,
    load: types.Load = 1.0,
    prompts: types.Prompts = 1.0,
    outputs: types.Outputs = 1.0,
    seed: types.Seed = 0,
    jitter: types.Jitter = True,
    where: types.Where = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fault at START+SECONDS, repeatable: worker:decode-0@30+10, redis@30+20, or a slower link, "
            "link:prefill-0@30+20*8. Default: none."
        ),
    ] = None,
    json: Json = False,
    autoscale: types.Autoscale = False,
    paper: Annotated[
        str | None,
        typer.Option(
            help="Place requests by the rule of a paper, with --ttft and --tpot: deflection, ppd, laps, ecoserve "
            "or taichi. Default: as the router does."
        ),
    ] = None,
) -> None:
    """Run a trace through a simulated cluster. Shows latencies, objectives met, and use of workers and links."""
    from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags, parse_slo
    from cluster.cli.commands.planning.simulate import ClusterFlags, SimulateFlags, run_simulate
    from tandem.config.model import Role

    traffic = TrafficFlags(
        trace, arrivals=arrivals, lengths=lengths, prefixes=prefixes, start_s=start, duration_s=duration,
        requests=requests, load=load, prompts=prompts, outputs=outputs, seed=seed, jitter=jitter,
        where=tuple(where or ()),
    )  # fmt: skip
    hardware = HardwareFlags(
        model or "", device, cost=cost, element_bytes=element_bytes, kv_bytes=kv_bytes, expert_bytes=expert_bytes,
        constrained=constrained, acceptance=acceptance, one_host=one_host, calibration=calibration,
    )  # fmt: skip
    given = zip(Role, (prefill_device, decode_device), strict=True)
    devices = {role: name for role, name in given if name is not None}
    cluster = ClusterFlags(config, prefill, decode, prefill_tp, decode_tp, autoscale, devices)
    slo = parse_slo(ttft, tpot, class_slo)
    raise typer.Exit(run_simulate(SimulateFlags(traffic, hardware, cluster, slo, tuple(fault or ()), json, paper)))


def calibrate(
    trace: Annotated[str, typer.Argument(help="Recorded trace of `tandem trace record`, with measured times.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, for --calibration of simulate and plan.")
    ],
    config: Config = None,
    model: types.ModelName = None,
    device: types.Device = "cpu",
    cost: types.Cost = None,
    element_bytes: types.ElementBytes = None,
    kv_bytes: types.KvBytes = None,
    expert_bytes: types.ExpertBytes = None,
    constrained: types.Constrained = 0.0,
    acceptance: types.Acceptance = None,
    one_host: types.OneHost = False,
    prefill: types.Prefill = None,
    decode: types.Decode = None,
    prefill_tp: types.PrefillTp = None,
    decode_tp: types.DecodeTp = None,
    start: types.Start = 0.0,
    duration: types.Duration = None,
    requests: types.Requests = None,
    where: types.Where = None,
    json: Json = False,
    autoscale: types.Autoscale = False,
) -> None:
    """Fit the step times to a cluster's recorded requests. The spec and options describe that cluster as it was."""
    from cluster.cli.commands.planning.calibrate import CalibrateFlags, run_calibrate
    from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags
    from cluster.cli.commands.planning.simulate import ClusterFlags

    traffic = TrafficFlags(
        trace, start_s=start, duration_s=duration, requests=requests, jitter=False, where=tuple(where or ())
    )
    hardware = HardwareFlags(
        model or "", device, cost=cost, element_bytes=element_bytes, kv_bytes=kv_bytes, expert_bytes=expert_bytes,
        constrained=constrained, acceptance=acceptance, one_host=one_host,
    )  # fmt: skip
    cluster = ClusterFlags(config, prefill, decode, prefill_tp, decode_tp, autoscale)
    raise typer.Exit(run_calibrate(CalibrateFlags(traffic, hardware, cluster, output, json)))


def plan(
    trace: types.Traffic,
    model: Annotated[str, typer.Option("--model", help="llama-3-70b, ..., or a checkpoint folder.")],
    device: Annotated[
        str,
        typer.Option(help="a100, h100, h200, b200, cpu or a YAML file; of several (h100,h200) the cheapest is taken."),
    ] = "h100",
    mix_roles: Annotated[
        bool,
        typer.Option("--mix-roles", help="Plan for each pair too: one --device for prefill, another for decode."),
    ] = False,
    devices: Annotated[int, typer.Option(help="Maximum number of devices.", min=1, max=1024)] = 16,
    max_load: Annotated[
        bool, typer.Option("--max-load", help="Plan for the largest --load that up to --devices devices serve.")
    ] = False,
    ttft: types.Ttft = None,
    tpot: types.Tpot = None,
    class_slo: types.ClassSlo = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet the objectives.")] = 0.95,
    confidence: Annotated[
        float, typer.Option(help="Share of resampled traces with which it must be met too. Default: 0.")
    ] = 0.0,
    growth: Annotated[
        float | None,
        typer.Option(help="Monthly growth of the traffic, such as 0.05: shows how long the plan lasts. Default: none."),
    ] = None,
    schedule: Annotated[
        int | None,
        typer.Option(help="Also the smallest pools for each of so many equal parts of the trace. Default: none."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Dollars per device and hour: 2.5, or h100=2.5,h200=3.5. Default: those of the device files."
        ),
    ] = None,
    cost: types.Cost = None,
    element_bytes: types.ElementBytes = None,
    kv_bytes: types.KvBytes = None,
    expert_bytes: types.ExpertBytes = None,
    constrained: types.Constrained = 0.0,
    acceptance: types.Acceptance = None,
    calibration: types.Calibration = None,
    step_tokens: Annotated[
        list[int] | None, typer.Option(help="Step token budget to try, repeatable. Default: 2048 and 8192.", min=16)
    ] = None,
    bounded_steps: Annotated[
        bool,
        typer.Option(
            "--bounded-steps", help="Plan with engine.longest_step_s: steps with prompts and answers aim at --tpot."
        ),
    ] = False,
    whole_machines: Annotated[
        bool,
        typer.Option("--whole-machines", help="The cheapest as deployed, on whole machines, instead of by devices."),
    ] = False,
    running: Annotated[int, typer.Option(help="Maximum number of running requests per worker.", min=1, max=4096)] = 256,
    source: Annotated[
        str | None, typer.Option(help="Model in the values file: ORG/NAME or a folder. Default: --model.")
    ] = None,
    simulated: Annotated[
        int, typer.Option(help="Requests to simulate: those of the busiest part of the trace.", min=50)
    ] = 1000,
    jobs: Annotated[int | None, typer.Option(help="Parallel processes. Default: one per core.", min=1)] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="File to keep results in: an interrupted search continues from it. Default: none."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML report with charts to write. Default: none.")] = None,
    values: Annotated[Path | None, typer.Option(help="Values file for the Helm chart to write. Default: none.")] = None,
    arrivals: types.Arrivals = None,
    lengths: types.Lengths = None,
    prefixes: types.Prefixes = None,
    start: types.Start = 0.0,
    duration: types.Duration = None,
    requests: types.Requests = None,
    load: types.Load = 1.0,
    prompts: types.Prompts = 1.0,
    outputs: types.Outputs = 1.0,
    seed: types.Seed = 0,
    jitter: types.Jitter = True,
    where: types.Where = None,
    json: Json = False,
) -> None:
    """Find the cheapest cluster that serves a traffic. It must meet the objectives --ttft, --tpot, or both."""
    from cluster.cli.commands.planning.inputs import HardwareFlags, TrafficFlags, parse_slo
    from cluster.cli.commands.planning.plan import PlanFlags, run_plan
    from planner.search.goal import Goal

    traffic = TrafficFlags(
        trace, arrivals=arrivals, lengths=lengths, prefixes=prefixes, start_s=start, duration_s=duration,
        requests=requests, load=load, prompts=prompts, outputs=outputs, seed=seed, jitter=jitter,
        where=tuple(where or ()),
    )  # fmt: skip
    hardware = HardwareFlags(
        model, device, cost=cost, element_bytes=element_bytes, kv_bytes=kv_bytes, expert_bytes=expert_bytes,
        constrained=constrained, acceptance=acceptance, calibration=calibration,
    )  # fmt: skip
    goal = Goal(
        parse_slo(ttft, tpot, class_slo), attainment=attainment, max_devices=devices,
        step_tokens=tuple(step_tokens or (2048, 8192)), max_running_requests=running, confidence=confidence,
        bounds_steps=bounded_steps, whole_machines=whole_machines,
    )  # fmt: skip
    flags = PlanFlags(
        traffic, hardware, goal, source=source, simulated_requests=simulated, jobs=jobs, state=state, report=report,
        values=values, json=json, price=price, max_load=max_load, growth=growth, mix_roles=mix_roles,
        schedule=schedule,
    )  # fmt: skip
    raise typer.Exit(run_plan(flags))


def profile(
    output: Annotated[Path, typer.Argument(help="Cost model to write (JSON), for --cost of simulate and plan.")],
    config: Config = None,
    model: Model = None,
    device: Annotated[
        str, typer.Option(help="Device whose links the model assumes: a100, ..., cpu, or a YAML file.")
    ] = "cpu",
) -> None:
    """Measure the engine's steps on this hardware. `simulate` and `plan` take the result as --cost."""
    from cluster.cli.commands.planning.profile import run_profile

    raise typer.Exit(run_profile(config, model, device, output))


def bench(
    trace: types.Traffic,
    api: Annotated[str, typer.Option(help="tandem (gRPC), completions (token ids) or chat (text).")] = "tandem",
    url: Annotated[
        str | None,
        typer.Option(
            help="grpc://HOST:PORT, or http://HOST:PORT/v1 of an OpenAI API. Default: a cluster on this machine."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Served name of the model. Default with --api tandem: the only one.")
    ] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="TANDEM_API_KEY", help="API key, if the server requires one. Default: none.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file with the CA of the server's certificate. Default: the system's.")
    ] = None,
    cluster: ClusterName = None,
    ttft: types.Ttft = None,
    tpot: types.Tpot = None,
    class_slo: types.ClassSlo = None,
    arrivals: types.Arrivals = None,
    lengths: types.Lengths = None,
    prefixes: types.Prefixes = None,
    start: types.Start = 0.0,
    duration: types.Duration = None,
    requests: types.Requests = None,
    load: types.Load = 1.0,
    prompts: types.Prompts = 1.0,
    outputs: types.Outputs = 1.0,
    seed: types.Seed = 0,
    jitter: types.Jitter = True,
    where: types.Where = None,
    connections: Annotated[
        int,
        typer.Option("--concurrency", "--connections", help="Maximum number of concurrent requests.", min=1, max=65536),
    ] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is cancelled.", min=0.1, max=86400)] = 600.0,
    warm_up: Annotated[int, typer.Option(help="Warm-up requests, which are not measured.", min=0, max=1000)] = 2,
    ignore_eos: Annotated[bool, typer.Option(help="Force outputs of exactly the trace's lengths.")] = True,
    vocab: Annotated[
        int | None,
        typer.Option(
            help="Draw prompt token ids below this. Default: the server's vocabulary; with --api completions: 32000."
        ),
    ] = None,
    prompt_seed: Annotated[
        int | None, typer.Option(help="Seed of the prompts, to repeat a run. Default: random.", min=0)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write the JSON to, for `tandem compare`. Default: none.")
    ] = None,
    json: Json = False,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            help="batching: start a cluster with each engine.batching, one after the other and without prefill "
            "workers, and show the results beside each other. Default: measure a cluster that runs.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Spec of the clusters of --compare. Default: built-in defaults.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Key of that spec; can be repeated. Default: none."),
    ] = None,
) -> None:
    """Play a trace against a cluster or an OpenAI endpoint. Measures the figures that `simulate` predicts."""
    from cluster.cli.commands.planning.bench import BenchFlags, run_bench
    from cluster.cli.commands.planning.inputs import TrafficFlags, parse_slo
    from cluster.cli.load.player import LoadLimits

    traffic = TrafficFlags(
        trace, arrivals=arrivals, lengths=lengths, prefixes=prefixes, start_s=start, duration_s=duration,
        requests=requests, load=load, prompts=prompts, outputs=outputs, seed=seed, jitter=jitter,
        where=tuple(where or ()),
    )  # fmt: skip
    flags = BenchFlags(
        traffic, parse_slo(ttft, tpot, class_slo), api=api, url=url, cluster=cluster, model=model, api_key=api_key,
        ca=ca, limits=LoadLimits(connections, timeout), warm_up=warm_up, ignore_eos=ignore_eos, vocab=vocab,
        prompt_seed=prompt_seed, output=output, json=json, compare=compare, config=config,
        settings=tuple(settings or ()),
    )  # fmt: skip
    if compare is not None:
        from cluster.cli.commands.planning.bench_batching import run_bench_batching

        raise typer.Exit(run_bench_batching(flags))
    raise typer.Exit(run_bench(flags))


Result = Annotated[Path, typer.Argument(help="Output of `simulate --json` or `bench --json`.")]


def compare(
    a: Result,
    b: Result,
    json: Json = False,
    report: Annotated[Path | None, typer.Option(help="HTML page of two plans to write. Default: none.")] = None,
) -> None:
    """Compare two results or two plans. Results are those of `simulate` or `bench`, such as of two ratios."""
    from cluster.cli.commands.planning.compare import run_compare

    raise typer.Exit(run_compare(a, b, json, report))


def add_to(app: typer.Typer) -> None:
    app.command()(profile)
    app.command()(calibrate)
    app.command()(simulate)
    app.command()(plan)
    app.command()(bench)
    app.command()(compare)
