"""`tandem simulate`: runs a trace through a simulated cluster and prints what happens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.cli.commands.planning.inputs import (
    HardwareFlags,
    TrafficFlags,
    calibration_json,
    describe_costs,
    load_role_hardware,
    load_traffic,
    reach_of,
)
from cluster.cli.console import console
from cluster.spec.loader import load_spec
from planner.hardware import RoleHardware, setup_of_spec, spec_notes
from planner.profiled import SETTINGS
from planner.simulator.outcome import LatencyQuantiles, Outcome
from planner.simulator.result import SimResult
from planner.simulator.setup import Fault, Paper, Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.context import check_context
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.config.router import RouterSpec
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError
from tandem.text.words import plural, seconds


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """The cluster to simulate: a spec, and options that override it. `devices`: of the roles whose device is not that
    of the hardware."""

    config: Path | None = None
    prefill: int | None = None
    decode: int | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None
    autoscale: bool = False
    devices: Mapping[Role, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulateFlags:
    traffic: TrafficFlags
    hardware: HardwareFlags
    cluster: ClusterFlags
    slo: Slo
    faults: tuple[str, ...] = ()
    json: bool = False
    paper: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedSimulation:
    trace: TrafficTrace
    hardware: RoleHardware
    setup: Setup


def load_simulation(traffic: TrafficFlags, hardware: HardwareFlags, cluster: ClusterFlags) -> LoadedSimulation:
    """Raises InputError, ConfigError."""
    changes = {
        "models.0.prefill.workers": cluster.prefill,
        "models.0.decode.workers": cluster.decode,
        "models.0.prefill.tp": cluster.prefill_tp,
        "models.0.decode.tp": cluster.decode_tp,
        "autoscaler.enabled": True if cluster.autoscale else None,
    }
    spec = load_spec(cluster.config, changes)
    wanted = replace(hardware, model=hardware.model or spec.models[0].source)
    loaded = load_role_hardware(wanted, _devices(cluster, has_prefill=bool(spec.models[0].prefill.workers)))
    spec = spec if cluster.config is not None else _as_profiled(spec, loaded)
    trace = load_traffic(traffic)
    trace_block = None if trace.prefixes is None else trace.prefixes.block_tokens
    mean_tokens = float(trace.prompt_tokens.mean())
    setup = setup_of_spec(spec, loaded, mean_prompt_tokens=mean_tokens, trace_block=trace_block)
    check_context(trace, setup.max_model_tokens)
    notes = [*(spec_notes(spec, loaded) if cluster.config is not None else ()), *_class_notes(trace, spec.router)]
    trace = replace(trace, notes=(*trace.notes, *notes))
    return LoadedSimulation(trace, loaded, setup)


def _as_profiled(spec: ClusterSpec, hardware: RoleHardware) -> ClusterSpec:
    """Without a spec of the user's, engines have the settings that the step times were measured with."""
    profiled, (model, *others) = hardware.of(Role.DECODE).profiled, spec.models
    if profiled is None or profiled.engine is None:
        return spec
    own = {name: getattr(profiled.engine, name) for name in SETTINGS if name not in model.engine.model_fields_set}
    model = model.model_copy(update={"engine": model.engine.model_copy(update=own)})
    return spec.model_copy(update={"models": (model, *others)})


def _class_notes(trace: TrafficTrace, router: RouterSpec) -> Iterator[str]:
    known = {"", *(each.name for each in router.classes)}
    unknown = {number: name for number, (name, _) in enumerate(trace.labels) if name not in known}
    if unknown:
        label = np.zeros(len(trace), np.int32) if trace.label is None else trace.label
        count, names = int(np.isin(label, list(unknown)).sum()), ", ".join(dict.fromkeys(unknown.values()))
        yield (
            f"{count} of {len(trace)} requests have a class that router.classes lacks ({names}): a router rejects "
            f"them; here they are {router.classes[0].name}"
        )


def run_simulate(flags: SimulateFlags) -> int:
    """Raises InputError, ConfigError."""
    loaded = load_simulation(flags.traffic, flags.hardware, flags.cluster)
    faults = tuple(Fault.parse(each) for each in flags.faults)
    trace, setup = loaded.trace, replace(loaded.setup, faults=faults, paper=_paper(flags.paper))
    pools = [pool for _, pool in setup.pools()]
    asked = reach_of(
        trace,
        max(pool.max_step_tokens or setup.max_step_tokens for pool in pools),
        max(pool.max_running_requests or setup.max_running_requests for pool in pools),
    )
    cost = describe_costs(loaded.hardware, setup.decode.tp, (pool.tp for pool in pools), asked)
    result = _run(trace, setup, flags)
    if flags.json:
        about = {"cost_model": cost, **calibration_json(loaded.hardware), "paper": setup.paper}
        print(json.dumps({**about, **result.to_json()}, indent=2, allow_nan=False))
    else:
        show(result, setup, cost, console())
    return 0


def _devices(flags: ClusterFlags, *, has_prefill: bool) -> Mapping[Role, str]:
    """Raises ConfigError for a device of workers that are not there."""
    if has_prefill or not flags.devices:
        return flags.devices
    if Role.PREFILL in flags.devices:
        raise ConfigError(
            "--prefill-device: expected none, because the cluster has no prefill workers; add some with --prefill",
            field="--prefill-device",
        )
    return dict.fromkeys(Role, flags.devices[Role.DECODE])


def _paper(name: str | None) -> Paper | None:
    """Raises ConfigError."""
    if name is None or name in list(Paper):
        return None if name is None else Paper(name)
    raise ConfigError(f"--paper: expected one of {', '.join(Paper)}, got {name!r}", field="--paper")


def _run(trace: TrafficTrace, setup: Setup, flags: SimulateFlags) -> SimResult:
    if flags.json or not sys.stderr.isatty():
        return simulate(trace, setup, flags.slo)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(trace))
        return simulate(trace, setup, flags.slo, progress=lambda done: progress.update(task, completed=done))


def show(result: SimResult, setup: Setup, cost: str, console: Console) -> None:
    shape = " + ".join(f"{pool.workers} {role.value} x TP {pool.tp}" for role, pool in setup.pools())
    console.print(
        f"[bold]{result.trace}[/]: {result.requests} requests over {result.span_s:.0f} s on {shape}, "
        f"{plural(setup.devices, 'device')}{'' if setup.paper is None else f', placed by {setup.paper.value}'}"
    )
    console.print(f"step times: {cost}", style="dim")
    for note in result.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    console.print(latencies(result))
    console.print(_pools(result))
    for line in _lines(result):
        console.print(line)


def latencies(result: Outcome) -> Table:
    table = Table("", "p50", "p90", "p95", "p99")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, LatencyQuantiles]] = [
        ("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("ITL", result.itl_s), ("end to end", result.e2e_s),
        ("in the queue", result.queue_s),
    ]  # fmt: skip
    for name, found in rows:
        table.add_row(name, *(seconds(each) for each in (found.p50, found.p90, found.p95, found.p99)))
    return table


def _pools(result: SimResult) -> Table:
    table = Table("pool", "workers", "busy", "busiest", "link sends", "link receives", "KV sent")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, use in result.pools.items():
        shares = (f"{each:.0%}" for each in (use.busy, use.busiest, use.sent, use.received))
        table.add_row(name, str(use.workers), *shares, f"{use.bytes_sent / 1e9:.1f} GB")
    return table


def _lines(result: SimResult) -> list[str]:
    moved = f"{result.migrated} requests moved to another worker after a fault; {result.local_prefills} local prefills"
    lines = [*outcome_lines(result), moved]
    if result.role_changes:
        changes = ", ".join(f"{at_s:.0f} s {prefill}P:{decode}D" for at_s, prefill, decode in result.role_changes[:8])
        more = f" and {len(result.role_changes) - 8} more" if len(result.role_changes) > 8 else ""
        lines.append(f"roles changed {len(result.role_changes)} times: {changes}{more}")
    return lines


def outcome_lines(result: Outcome) -> list[str]:
    handoffs = "" if result.handoffs is None else f"; {result.handoffs} handoffs"
    lines = [
        f"finished {result.finished}, rejected {result.rejected}, failed {result.failed}{handoffs}",
        f"{result.requests_per_s:.2f} requests/s, {result.prompt_tokens_per_s:.0f} prompt and "
        f"{result.output_tokens_per_s:.0f} output tokens/s ({result.served_tokens_per_s:.0f} until the last token)",
    ]
    if result.hit_rate is not None:
        possible = f"(an infinite cache: {result.possible_hit_rate:.1%})"
        lines.append(f"prefix cache: {result.hit_rate:.1%} of prompt tokens hit {possible}")
    if result.refusals:
        lines.append("refused: " + ", ".join(f"{count} {code}" for code, count in sorted(result.refusals.items())))
    if result.goodput_per_s is not None:
        found = result.attainment
        shares = [("TTFT", found.ttft), ("TPOT", found.tpot), ("both", found.joint)]
        shares += [(f"class {name or 'default'}", share) for name, share in found.of_class.items()]
        met = ", ".join(f"{name} {share:.1%}" for name, share in shares if share is not None)
        lines.append(f"objectives met: {met}; goodput {result.goodput_per_s:.2f} requests/s")
    return lines
