"""Disaggregate or not: for a grid of models, devices, links, traffic and objectives, the largest load that the best
aggregated and the best disaggregated layout serve on the same devices, in simulation.

Both kinds are tuned: every width, and every budget of tokens in a step. A disaggregated layout also has every ratio of
its workers, and its decode workers prefill when the router's policy says so. Layouts that serve nearly the most of a
short trace are compared on one so long that overload shows.

    python -m benchmarks.planner_grid --traces FOLDER --processes 2 >benchmarks/planner_grid.jsonl && make docs

Prints a JSON line per cell; `--cell TEXT` only those with TEXT in their names. docs/disaggregate-or-not.md shows them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from planner.devices import DeviceSpec, LinkSpec, find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.analytic import Analysis, allowed_misses
from planner.search.evaluate import Evaluator, Job
from planner.search.headroom import largest_load
from planner.search.layout import ClusterLayout, layouts
from planner.search.traffic import busiest
from planner.simulator.setup import Paper, Slo
from planner.traces.arrivals import Gamma
from planner.traces.read import read_trace
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace

CLEAR_WIN = 1.5
ATTAINMENT = 0.95
MOST_RUNNING = 256
STEP_TOKENS = (256, 512, 2048, 8192)
SHORT, MOST_REQUESTS = 300, 3000
SPANS = 10.0  # TTFT objectives in the time of a trace, or more: then 10 % of overload show
ANSWERS = 2.0  # answers at the TPOT objective in that time, or more: then as many run at a time as in a longer trace
CLOSE = 0.75  # of the largest load of the short trace: what a layout must serve of it to be compared
SEED = 1
RESAMPLES = 2
_FIRST_SHARE = 0.6  # of the load at which a layout's bounds are exceeded: where the search for its largest begins
_BAND = 1.2  # a layout's largest load with other traffic of the same kind is looked for within this factor


@dataclass(frozen=True, slots=True)
class Traffic:
    """`draw`: so many requests, at any rate; None: the trace is not in the folder. `ttft_s`: an objective that few
    layouts meet, and one that most do."""

    name: str
    draw: Callable[[int], TrafficTrace | None]
    ttft_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """`tpot_s`: an objective near the time of a decode step, and one of several times that."""

    model: str
    device: str
    devices: int
    tpot_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """`objectives`: which of the two is the hard one."""

    place: Place
    traffic: Traffic
    link: str
    objectives: str

    @property
    def name(self) -> str:
        place = self.place
        return f"{place.model}_{place.device}x{place.devices}_{self.link}_{self.traffic.name}_{self.objectives}"

    @property
    def slo(self) -> Slo:
        ttft, tpot = self.traffic.ttft_s, self.place.tpot_s
        return Slo(ttft[0], tpot[1]) if self.objectives == START else Slo(ttft[1], tpot[0])

    @property
    def hardware(self) -> Hardware:
        return Hardware(find_model(self.place.model), LINKS[self.link](find_device(self.place.device)))


START, STREAM = "start", "stream"  # a hard TTFT and an easy TPOT, or an easy TTFT and a hard TPOT

LINKS: dict[str, Callable[[DeviceSpec], DeviceSpec]] = {
    # As the device file has it: a NIC of 400 Gbit/s for each device.
    "rdma": lambda device: device,
    # All workers in one NVLink domain: a device sends KV as fast as a rank to its peers.
    "nvlink": lambda device: device.model_copy(update={"link": device.fabric}),
    # One NIC of 100 Gbit/s for a machine's eight devices, over TCP. Latency and efficiency are assumed.
    "ethernet": lambda device: device.model_copy(
        update={"link": LinkSpec(bytes_per_s=12.5e9 / device.devices_per_node, latency_s=200e-6, efficiency=0.8)}
    ),
}
PLACES = (
    Place("llama-3-8b", "h100", 4, (0.015, 0.05)),
    Place("llama-3-70b", "h100", 16, (0.03, 0.1)),
    Place("gpt-oss-120b", "h100", 4, (0.015, 0.05)),
    Place("deepseek-v3", "h200", 32, (0.04, 0.1)),
)


def drawn(cv: float, prompt: LengthSpec, output: LengthSpec) -> Callable[[int], TrafficTrace]:
    return lambda requests: synthetic_trace(requests, Gamma(10.0, cv), prompt, output, seed=SEED)


def made_up() -> tuple[Traffic, ...]:
    lengths = LengthSpec
    return (
        Traffic("chat", drawn(1.5, lengths(1200, 1.0, 14_000), lengths(200, 0.7, 1000)), (0.3, 1.0)),
        Traffic("code", drawn(1.5, lengths(2000, 0.9, 7500), lengths(28, 0.9, 300)), (0.4, 1.5)),
        Traffic("documents", drawn(1.0, lengths(9000, 0.8, 60_000), lengths(120, 0.8, 600)), (2.0, 6.0)),
    )


def recorded(folder: Path | None) -> tuple[Traffic, ...]:
    def read(pattern: str) -> Callable[[int], TrafficTrace | None]:
        def of(requests: int) -> TrafficTrace | None:
            path = next(iter(sorted(folder.glob(pattern))), None) if folder is not None else None
            return None if path is None else busiest(read_trace(path), requests)

        return of

    return (
        Traffic("azure", read("*[aA]zure*conv*.csv"), (0.3, 1.0)),
        Traffic("mooncake", read("mooncake_conversation_head2000.jsonl"), (3.0, 10.0)),
    )


def cells(folder: Path | None) -> list[Cell]:
    """Every place with every traffic; other links where KV is large beside the answers; recorded traffic on one."""
    found = [
        Cell(place, traffic, "rdma", hard) for place in PLACES for traffic in made_up() for hard in (STREAM, START)
    ]
    dense = next(each for each in PLACES if each.model == "llama-3-70b" and each.device == "h100")
    found += [
        Cell(dense, traffic, link, STREAM)
        for traffic in made_up()
        if traffic.name in ("chat", "documents")
        for link in ("nvlink", "ethernet")
    ]
    return found + [Cell(dense, traffic, "rdma", hard) for traffic in recorded(folder) for hard in (STREAM, START)]


# --- the largest load of a kind --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """The largest load that was met, as a factor of the trace's rate, and the next that was tried and missed; None: the
    trace is too short for more."""

    layout: ClusterLayout
    load: float
    missed_at: float | None


class Loads:
    """The largest loads that layouts serve of one traffic, placed by the router or by a paper's rule. A layout that
    missed a load is taken to miss all above."""

    def __init__(
        self,
        trace: TrafficTrace,
        hardware: Hardware,
        slo: Slo,
        paper: Paper | None = None,
        *,
        bounds_steps: bool = False,
    ) -> None:
        assert slo.ttft_s is not None
        self._trace, self._hardware, self._slo = trace, hardware, slo
        self._evaluator = Evaluator(trace, hardware, slo, MOST_RUNNING, paper, slo.tpot_s if bounds_steps else None)
        self._misses = allowed_misses(ATTAINMENT, len(trace))
        self._most = max(1.0, trace.span_s / slo.ttft_s)  # then all requests arrive within one TTFT objective
        self._analysis, self._is_met = cache(self._analysis_at), cache(self._simulate)
        self._is_bounded = paper is not Paper.TAICHI  # its prefill workers decode too
        self.simulated = 0

    @property
    def requests_per_s(self) -> float:
        """At a load of 1."""
        return self._trace.requests_per_s

    def best(self, candidates: Iterable[ClusterLayout]) -> Served | None:
        """The layout that serves the most; None: none serves any."""
        best: Served | None = None
        use = {each: self._analysis(1.0).bounds(each).worst[1] for each in candidates}
        for layout in sorted(use, key=lambda each: (use[each], each)):
            if best is None:
                best = self.largest(layout, _FIRST_SHARE / use[layout])
            elif best.missed_at is not None and self.meets(layout, best.missed_at):
                best = self.largest(layout, best.missed_at)
        return best

    def largest(
        self, layout: ClusterLayout, first: float, *, most: float = math.inf, resample: int = 0
    ) -> Served | None:
        """Looks from the load `first` up to `most`, and down without end."""
        first = min(first, self._most)
        found = largest_load(
            lambda factor: self.meets(layout, factor * first, resample), max(1.0, min(most, self._most) / first)
        )
        if found is None:
            return None
        met, missed = found
        return Served(layout, met * first, None if missed is None else missed * first)

    def meets(self, layout: ClusterLayout, load: float, resample: int = 0) -> bool:
        """`resample`: the number of the other traffic of the same kind; 0: the traffic itself."""
        if self._is_bounded and not resample and not self._analysis(load).bounds(layout).possible:
            return False
        return self._is_met(layout, load, resample)

    def _simulate(self, layout: ClusterLayout, load: float, resample: int) -> bool:
        self.simulated += 1
        job = Job(layout, len(self._trace), load=load, most_misses=self._misses, resample=resample)
        return self._evaluator.evaluate(job).meets(ATTAINMENT)

    def _analysis_at(self, load: float) -> Analysis:
        return Analysis(self._trace.at_rate(load), self._hardware, self._slo, ATTAINMENT, MOST_RUNNING)


# --- cells -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """`together`, `apart`: the best aggregated and the best disaggregated layout; None: no load meets the objectives.
    `others`: the ratios of these two layouts' largest loads with resampled traces. `rate`: requests a second at a
    load of 1."""

    cell: Cell
    together: Served | None
    apart: Served | None
    others: tuple[float, ...]
    rate: float
    span_s: float
    simulated: int

    @property
    def ratio(self) -> float | None:
        """None: one of the two serves no load."""
        if self.together is None or self.apart is None:
            return None
        return self.apart.load / self.together.load

    def line(self) -> str:
        ratio = self.ratio
        shown = None if ratio is None else round(ratio, 3)
        figure = {
            "figure": f"grid.ratio_{self.cell.name}", "value": shown, "unit": "ratio", "reference": CLEAR_WIN,
            "ratio": None if ratio is None else round(ratio / CLEAR_WIN, 3),
        }  # fmt: skip
        place, slo = self.cell.place, self.cell.slo
        return json.dumps(
            figure
            | {
                "model": place.model, "device": place.device, "devices": place.devices, "link": self.cell.link,
                "traffic": self.cell.traffic.name, "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s,
                "aggregated": self._served(self.together), "disaggregated": self._served(self.apart),
                "others": [round(each, 3) for each in self.others], "simulated": self.simulated,
            }
        )  # fmt: skip

    def _served(self, found: Served | None) -> dict[str, Any] | None:
        """`unseen`: the share of overload that the trace is too short to show."""
        if found is None:
            return None
        assert self.cell.slo.ttft_s is not None
        return {
            "layout": str(found.layout), "requests_per_s": round(found.load * self.rate, 3),
            "missed_at": None if found.missed_at is None else round(found.missed_at * self.rate, 3),
            "unseen": round(found.load * self.cell.slo.ttft_s / self.span_s, 3),
        }  # fmt: skip


def compare(cell: Cell, requests: int | None = None, resamples: int = RESAMPLES) -> Comparison | None:
    """`requests` None: as many as the largest load needs. None: the cell's trace is not in the folder."""
    short = cell.traffic.draw(min(SHORT, requests or SHORT))
    if short is None:
        return None
    hardware, devices = cell.hardware, cell.place.devices
    first = Loads(short, hardware, cell.slo)
    kinds = [layouts_on_all(hardware, devices, is_aggregated=kind) for kind in (True, False)]
    most = [first.best(layouts_of) for layouts_of in kinds]
    fastest = max((served.load * short.requests_per_s for served in most if served is not None), default=0.0)
    trace = cell.traffic.draw(requests or enough(cell.slo, float(short.output_tokens.mean()), fastest))
    assert trace is not None
    loads = Loads(trace, hardware, cell.slo)
    together, apart = (
        None if served is None else loads.best(each for each in of if first.meets(each, CLOSE * served.load))
        for of, served in zip(kinds, most, strict=True)
    )
    others: tuple[float, ...] = ()
    if together is not None and apart is not None:
        others = tuple(_other_ratio(loads, together, apart, 1 + number) for number in range(resamples))
    simulated = first.simulated + loads.simulated
    return Comparison(cell, together, apart, others, trace.requests_per_s, trace.span_s, simulated)


def layouts_on_all(hardware: Hardware, devices: int, *, is_aggregated: bool) -> list[ClusterLayout]:
    widths = [tp for tp in hardware.widths() if tp <= devices]
    listed = layouts(widths, devices, STEP_TOKENS)
    return [each for each in listed if each.devices == devices and each.is_aggregated is is_aggregated]


def enough(slo: Slo, answer: float, rate: float) -> int:
    """Requests for a trace that shows whether `rate` is too much, whose answers have so many tokens on average."""
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    lasts_s = max(SPANS * slo.ttft_s, ANSWERS * answer * slo.tpot_s)
    return math.ceil(min(MOST_REQUESTS, max(SHORT, lasts_s * rate)))


def _other_ratio(loads: Loads, together: Served, apart: Served, resample: int) -> float:
    def load(found: Served) -> float:
        other = loads.largest(found.layout, found.load / _BAND, most=found.load * _BAND, resample=resample)
        return 0.0 if other is None else other.load

    return load(apart) / load(together)


def _line(folder: Path | None, number: int) -> str | None:
    """Of the cell of this number: cells themselves cannot be sent to another process."""
    found = compare(cells(folder)[number])
    return None if found is None else found.line()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_grid", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--traces", type=Path, help="a folder with recorded traces; without it, no cell of theirs")
    parser.add_argument("--cell", default="", help="only cells with this in their names")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    numbers = [at for at, cell in enumerate(cells(options.traces)) if options.cell in cell.name]
    if not numbers:
        parser.error(f"--cell: no cell has {options.cell!r} in its name")
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for line in pool.map(partial(_line, options.traces), numbers):
            if line is not None:
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
