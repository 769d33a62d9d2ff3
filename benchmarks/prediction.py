"""Simulation compared with measurement on this machine: the demo model in two formats, four shapes, three kinds of
traffic, two loads.

Each cell has a cluster of its own. First all requests arrive at once: the rate at which they are answered is the
capacity. The loads are shares of this measured capacity, so the load is right even if the profile is wrong. A folder
keeps the step times of this machine and what was measured with them, so that a run can be continued, and judged again
after a change of the simulator.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.handoff_figures import Figure
from benchmarks.live_cluster import live, play_timed, say, spec_of
from benchmarks.prediction_errors import CellErrors, Run, errors_of, figures_of, figures_of_all
from cluster.cli.commands.planning.inputs import HardwareFlags, load_hardware
from cluster.cli.commands.planning.profile import run_profile
from cluster.cli.load.player import LoadResult
from cluster.profiling.profiler import FixedWork, Grid, Profiler, open_profiler
from planner.cost import Corrections
from planner.hardware import Hardware, setup_of_spec
from planner.simulator.outcome import Outcome
from planner.simulator.setup import Setup
from planner.simulator.simulate import simulate, simulated_times
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import MeasuredTimes, TrafficTrace
from tandem.checkpoint.model_store import pull
from tandem.config.engine import EngineSpec
from tandem.config.model import DEMO_MODEL

TRACES = ("chat", "documents", "bursts")
SHAPES = ((0, 1), (1, 1), (2, 1), (1, 2))
WEIGHTS: Mapping[str, Mapping[str, Any]] = {"float32": {}, "int8": {"weights": "int8"}}
SHARES = (0.85, 0.95)
PROBES = 3
FORMAT = 2  # of profiles and of the journal
_SECONDS_AT = {"prefill": 2, "decode": 2, "mixed": 3}  # places in the rows of a profile
GRID = Grid(
    chunks=(16, 24, 32, 48, 64, 96, 128, 192, 256, 512),
    batches=(1, 2, 3, 4, 6, 8, 12, 15, 16, 32, 64),
    contexts=(32, 128, 512),
)
"""Step sizes of the traces: prompts of at most 400 tokens, batches of up to engine.max_running_requests. Close together
where the products change their kernels."""


@dataclass(frozen=True, slots=True)
class PredictionSizes:
    """`seconds`: approximate time of a run. `at_once_s`: of the run in which all requests arrive at once."""

    seconds: float = 18.0
    runs: int = 5  # at each share, each of other requests
    at_once_s: float = 12.0
    min_requests: int = 24
    max_requests: int = 400
    draws: int = 400  # requests drawn, of which each run takes the first
    grid: Grid = field(default=GRID, repr=False)


@dataclass(frozen=True, slots=True)
class CellName:
    weights: str
    prefill: int
    decode: int
    traffic: str

    def __str__(self) -> str:
        return f"{self.weights}_{self.prefill}:{self.decode}_{self.traffic}"


def traces(count: int, draw: int = 0) -> dict[str, TrafficTrace]:
    """Traces like conversations, questions about documents, and bursts of short questions. Lengths are scaled down to
    seconds of one core's time. One request per second. Each `draw` has other requests."""
    seed = 11 + 100 * draw
    chat = synthetic_trace(count, Gamma(1.0), LengthSpec(96, 0.8, 400), LengthSpec(24, 0.6, 96), seed=seed)
    shared = SharedPrefixes(4, 128, 0.8)
    documents = synthetic_trace(
        count, Gamma(1.0), LengthSpec(48, 0.5, 160), LengthSpec(16, 0.5, 64), prefixes=shared, seed=seed + 1
    )
    bursts = synthetic_trace(count, Gamma(1.0, 2.0), LengthSpec(40, 0.6, 160), LengthSpec(32, 0.6, 96), seed=seed + 2)
    return {name: replace(each, name=name) for name, each in zip(TRACES, (chat, documents, bursts), strict=True)}


def setup_for(
    hardware: Hardware, prefill: int, decode: int, trace: TrafficTrace, engine: Mapping[str, Any] | None = None
) -> Setup:
    block = None if trace.prefixes is None else trace.prefixes.block_tokens
    mean = float(trace.prompt_tokens.mean())
    return setup_of_spec(
        spec_of(prefill, decode, _changes(engine)), hardware, mean_prompt_tokens=mean, trace_block=block
    )


def at_once(trace: TrafficTrace, setup: Setup, sizes: PredictionSizes) -> TrafficTrace:
    """As many requests, all arriving together, as the simulation answers in `at_once_s`."""
    count = round(sizes.at_once_s * answered_per_s(simulate(_together(trace), setup)))
    return _together(trace.head(min(sizes.max_requests, max(sizes.min_requests, count))))


def _together(trace: TrafficTrace) -> TrafficTrace:
    return replace(trace, arrival_s=np.zeros(len(trace)))


def answered_per_s(outcome: Outcome) -> float:
    """The rate of the first 90 % of answers to requests that arrived together; after that the batch runs empty. Raises
    RuntimeError if there are none."""
    if outcome.e2e_s.p90 is None:
        raise RuntimeError(f"{outcome.trace}: expected answers, got none; refusals: {outcome.refusals}")
    return 0.9 * outcome.finished / outcome.e2e_s.p90


def at_share(trace: TrafficTrace, rate: float, sizes: PredictionSizes) -> TrafficTrace:
    """The trace at `rate` requests per second, with as many requests as fit into a run."""
    count = min(sizes.max_requests, max(sizes.min_requests, round(rate * sizes.seconds)))
    return trace.at_rate(rate / trace.requests_per_s).head(count)


def profiled(folder: Path, weights: str, grid: Grid, name: str | None = None) -> Path:
    """Returns the file `name` of the demo model's step times on this machine; measures them if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    cost = folder / f"{name or weights}-{FORMAT}.json"
    if not cost.exists():
        with TemporaryDirectory() as scratch:
            config = Path(scratch) / "spec.yaml"
            config.write_text(yaml.safe_dump({"models": [{"source": DEMO_MODEL, "engine": dict(WEIGHTS[weights])}]}))
            run_profile(config, DEMO_MODEL, "cpu", cost, grid)
    return cost


def load_measured_hardware(cost: Path) -> Hardware:
    """The demo model on this machine, from the measurements of `tandem profile`."""
    return load_hardware(HardwareFlags(DEMO_MODEL, "cpu", str(cost), one_host=True))


class CellJournal:
    """Measurements by cell, in a file, from which a later run goes on."""

    def __init__(self, path: Path, shares: Sequence[float], sizes: PredictionSizes) -> None:
        """Skips lines of other formats, sizes and shares."""
        self._path = path
        about = repr((FORMAT, tuple(shares), sizes))
        self._about = hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
        self._found: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["about"] == self._about:
                self._found[entry["cell"]] = entry

    def find(self, name: str) -> dict[str, Any] | None:
        return self._found.get(name)

    def add(self, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
        entry = {"about": self._about, "cell": name, **found}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self._found[name] = entry
        return entry


class Probes:
    """The fixed work of profiles, to tell how fast the machine is now."""

    def __init__(self, sizes: PredictionSizes, formats: Sequence[str]) -> None:
        self._stack, self._grid, self._formats = ExitStack(), sizes.grid, formats
        self._profilers: dict[str, Profiler] = {}

    def __enter__(self) -> Probes:
        for weights in self._formats:
            engine = EngineSpec(kv_blocks=512, threads_per_rank=1, **WEIGHTS[weights])
            profiler = self._stack.enter_context(open_profiler(pull(DEMO_MODEL), engine, self._grid))
            profiler.fixed_work()
            self._profilers[weights] = profiler
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def take(self, weights: str) -> FixedWork:
        return self._profilers[weights].fixed_work(PROBES)


def prediction(
    folder: Path,
    names: Sequence[CellName],
    shares: Sequence[float],
    sizes: PredictionSizes,
    table: Path | None = None,
) -> Iterator[Figure]:
    """Yields the figures of each cell, then of all. `table`: a file for the errors and their intervals, as JSON."""
    journal, found = CellJournal(folder / "cells.jsonl", shares, sizes), list[CellErrors]()
    formats = list(dict.fromkeys(each.weights for each in names))
    before = {weights: profiled(folder, weights, sizes.grid, f"{weights}-before") for weights in formats}
    with Probes(sizes, formats) as probes:
        for name in names:
            if journal.find(str(name)) is None:
                hardware = load_measured_hardware(before[name.weights])
                journal.add(str(name), _measured(name, hardware, shares, sizes, probes))
    after = {weights: profiled(folder, weights, sizes.grid, f"{weights}-after") for weights in formats}
    for weights in formats:
        write_mean(before[weights], after[weights], folder / f"{weights}.json")
    for name in names:
        for errors in judged(name, folder / f"{name.weights}.json", sizes, journal):
            yield from figures_of(errors)
            found.append(errors)
    for share in shares:
        yield from figures_of_all([each for each in found if each.share == _percent(share)])
    if table is not None:
        table.write_text("".join(json.dumps(each.to_json()) + "\n" for each in found))


def all_cells() -> list[CellName]:
    return [CellName(weights, *shape, which) for weights in WEIGHTS for shape in SHAPES for which in TRACES]


def write_mean(before: Path, after: Path, to: Path) -> None:
    """The mean of two profiles: one alone is off by some percent. A point that only one has is scaled as the others."""
    found = [json.loads(each.read_text()) for each in (before, after)]
    widths = [each["widths"][0] for each in found]
    mean = {kind: _mean_points(at, *(each.get(kind, []) for each in widths)) for kind, at in _SECONDS_AT.items()}
    hosts = [each["host"] for each in found]
    host = _means(hosts) | {"contention": _means([each["contention"] for each in hosts]), "cores": hosts[1]["cores"]}
    fixed_work = _means([each["fixed_work"] for each in found])
    content = found[1] | {"widths": [widths[1] | mean], "host": host, "fixed_work": fixed_work}
    to.write_text(json.dumps(content, indent=1) + "\n")


def _means(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each number that all have."""
    return {
        key: statistics.mean(each[key] for each in entries)
        for key, value in entries[0].items()
        if isinstance(value, float | int)
    }


def _mean_points(at: int, one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    """Rows of sizes and, `at` this place, seconds."""
    seconds = [{tuple(row[:at] + row[at + 1 :]): row[at] for row in rows} for rows in (one, other)]
    both = seconds[0].keys() & seconds[1].keys()
    means = {key: (seconds[0][key] + seconds[1][key]) / 2 for key in both}
    for known in seconds:
        factor = statistics.median(means[key] / known[key] for key in both) if both else 1.0
        means = {key: factor * value for key, value in known.items() if key not in both} | means
    return [[*key[:at], value, *key[at:]] for key, value in sorted(means.items())]


def judged(name: CellName, cost: Path, sizes: PredictionSizes, journal: CellJournal) -> Iterator[CellErrors]:
    """The errors at each share of a cell that was measured. All that its cluster got is simulated as one trace, because
    routers and caches remember what came before. Prompts and decoding take as much longer than profiled in the file
    `cost` as the fixed work did."""
    entry = journal.find(str(name))
    assert entry is not None
    probes = [FixedWork(*each) for each in entry["probes"]]
    usual = FixedWork(**json.loads(cost.read_text())["fixed_work"])
    prompts, decoding = (statistics.median(each) for each in zip(*probes, strict=True))
    drift = max(abs(each.prompts_s / prompts - 1) for each in probes)
    drift = max(drift, *(abs(each.decoding_s / decoding - 1) for each in probes))
    hardware = load_measured_hardware(cost)
    slower = Corrections(prefill=prompts / usual.prompts_s, decode=decoding / usual.decoding_s)
    hardware = replace(hardware, measured={tp: slower.of(each) for tp, each in hardware.measured.items()})
    parts = [_trace_of(run, entry["capacity"], name, sizes, len(run["ttft_s"])) for run in entry["runs"]]
    whole = parts[0]
    for part, run in zip(parts[1:], entry["runs"][1:], strict=True):
        whole = whole.followed_by(part, run["began_s"])
    setup = setup_for(hardware, name.prefill, name.decode, parts[0], WEIGHTS[name.weights])
    simulated, ends = simulated_times(whole, setup), np.cumsum([len(part) for part in parts])
    runs: dict[float | None, list[Run]] = {}
    for run, part, end in zip(entry["runs"], parts, ends.tolist(), strict=True):
        measured = MeasuredTimes(np.array(run["ttft_s"], float), np.array(run["decode_s"], float))
        own = simulated.rows(slice(end - len(part), end))
        runs.setdefault(run["share"], []).append(Run(measured, own, part.output_tokens))
    capacity = _rate(runs[None][0].simulated) / entry["capacity"] - 1
    for share, some in runs.items():
        if share is not None:
            yield errors_of(str(name), _percent(share), some, capacity, drift)


def _trace_of(
    run: Mapping[str, Any], capacity: float, name: CellName, sizes: PredictionSizes, count: int
) -> TrafficTrace:
    drawn = traces(sizes.draws, run["draw"])[name.traffic]
    if run["share"] is None:
        return _together(drawn.head(count))
    return at_share(drawn, run["share"] * capacity, sizes)


def _rate(times: MeasuredTimes) -> float:
    """As `answered_per_s`."""
    e2e_s = times.e2e_s[~np.isnan(times.e2e_s)]
    return float(0.9 * len(e2e_s) / np.quantile(e2e_s, 0.9))


def _measured(
    name: CellName, hardware: Hardware, shares: Sequence[float], sizes: PredictionSizes, probes: Probes
) -> dict[str, Any]:
    """The capacity, the measured times of each run, and what the probes before and after took."""
    taken = [probes.take(name.weights)]

    def probe() -> None:
        taken.append(probes.take(name.weights))

    capacity, runs = asyncio.run(_played(name, hardware, shares, sizes, probe))
    return {"capacity": capacity, "probes": taken, "runs": runs}


async def _played(
    name: CellName,
    hardware: Hardware,
    shares: Sequence[float],
    sizes: PredictionSizes,
    probe: Callable[[], None],
) -> tuple[float, list[dict[str, Any]]]:
    drawn = traces(sizes.draws)[name.traffic]
    setup = setup_for(hardware, name.prefill, name.decode, drawn, WEIGHTS[name.weights])
    runs: list[dict[str, Any]] = []

    async with live(spec_of(name.prefill, name.decode, _changes(WEIGHTS[name.weights]))) as cluster:

        async def play(trace: TrafficTrace, share: float | None, draw: int) -> LoadResult:
            result, times = await play_timed(cluster, trace, salt=1 + len(runs))
            began_s = times.began_s - (began[0] if began else times.began_s)
            began.append(times.began_s)
            seen = {"ttft_s": _rounded(times.ttft_s), "decode_s": _rounded(times.decode_s)}
            about = {"share": share, "draw": draw, "began_s": round(began_s, 3), "handoffs": result.handoffs}
            runs.append(about | seen)
            probe()
            return result

        began: list[float] = []
        capacity = answered_per_s(await play(at_once(drawn, setup, sizes), None, 0))
        say(f"{name}: {capacity:.2f} requests/s")
        for share in shares:
            for draw in range(1, 1 + sizes.runs):
                other = traces(sizes.draws, draw)[name.traffic]
                await play(at_share(other, share * capacity, sizes), share, draw)
    return capacity, runs


def _rounded(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
    """In tenths of a millisecond. None: not measured."""
    return [None if np.isnan(each) else round(each, 4) for each in seconds.tolist()]


def _changes(engine: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"models.0.engine.{name}": value for name, value in (engine or {}).items()}


def _percent(share: float) -> int:
    return round(100 * share)
