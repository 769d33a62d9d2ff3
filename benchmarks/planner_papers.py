"""The largest load that a cluster serves by its router's rule and by the rules of five papers, in simulation.

Each rule has the layout and the budget of tokens in a step that serve the most with it, on the same devices. Objectives
are hard on the TTFT, hard on the TPOT, or balanced (the geometric means of the two).

    python -m benchmarks.planner_papers --traces FOLDER >benchmarks/planner_papers.jsonl && make docs

Prints a JSON line per cell and rule: the load over that of the better of the router's aggregated and disaggregated
layouts. docs/placement-papers.md shows them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_grid import LINKS, START, STREAM, Cell, Loads, Place, Served, Traffic, layouts_on_all, made_up
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.traffic import busiest
from planner.simulator.setup import Paper, Slo
from planner.traces.read import read_trace
from planner.traces.trace import TrafficTrace

BALANCED = "balanced"
REQUESTS = 300
PLACE = Place("llama-3-8b", "h100", 4, (0.015, 0.05))
TURNS = "mooncake_conversation_head2000.jsonl"


@dataclass(frozen=True, slots=True)
class Question:
    traffic: Traffic
    objectives: str

    @property
    def name(self) -> str:
        return f"{self.traffic.name}_{self.objectives}"

    @property
    def slo(self) -> Slo:
        if self.objectives != BALANCED:
            return Cell(PLACE, self.traffic, "rdma", self.objectives).slo
        ttft_s, tpot_s = (math.sqrt(hard * easy) for hard, easy in (self.traffic.ttft_s, PLACE.tpot_s))
        return Slo(ttft_s, tpot_s)


def questions(folder: Path | None) -> list[Question]:
    """Chat and documents that share nothing, and conversations in turns, whose prompts share the turns before."""

    def turns(requests: int) -> TrafficTrace | None:
        path = None if folder is None else folder / TURNS
        return busiest(read_trace(path), requests) if path is not None and path.exists() else None

    drawn = [each for each in made_up() if each.name in ("chat", "documents")]
    return [
        Question(traffic, objectives)
        for traffic in (*drawn, Traffic("turns", turns, (3.0, 10.0)))
        for objectives in (START, STREAM, BALANCED)
    ]


def answers(question: Question, requests: int = REQUESTS, place: Place = PLACE) -> Iterator[dict[str, Any]]:
    """Nothing if the trace is not in the folder, or if the router's rule meets the objectives at no load."""
    trace = question.traffic.draw(requests)
    if trace is None:
        return
    hardware = Hardware(find_model(place.model), LINKS["rdma"](find_device(place.device)))

    def best(paper: Paper | None, *, is_aggregated: bool, bounds_steps: bool = False) -> Served | None:
        loads = Loads(trace, hardware, question.slo, paper, bounds_steps=bounds_steps)
        return loads.best(layouts_on_all(hardware, place.devices, is_aggregated=is_aggregated))

    kinds = {"aggregated": best(None, is_aggregated=True), "disaggregated": best(None, is_aggregated=False)}
    most = max((each.load for each in kinds.values() if each is not None), default=0.0)
    if not most:
        return
    rules = kinds | {
        f"{name}_bounded": best(None, is_aggregated=name == "aggregated", bounds_steps=True) for name in kinds
    }
    rules |= {each.value: best(each, is_aggregated=each is Paper.ECOSERVE) for each in Paper}
    for name, served in rules.items():
        ratio = 0.0 if served is None else round(served.load / most, 3)
        yield {
            "figure": f"papers.{question.name}_{name}", "value": ratio, "unit": "ratio", "reference": 1.0,
            "ratio": ratio, "rule": name, "traffic": question.traffic.name, "objectives": question.objectives,
            "ttft_s": round(question.slo.ttft_s or 0.0, 3), "tpot_s": round(question.slo.tpot_s or 0.0, 4),
            "layout": None if served is None else str(served.layout),
            "requests_per_s": None if served is None else round(served.load * trace.requests_per_s, 3),
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_papers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--traces", type=Path, help="a folder with recorded traces; without it, no question of theirs")
    parser.add_argument("--cell", default="", help="only questions with this in their names")
    options = parser.parse_args(arguments)
    for question in questions(options.traces):
        if options.cell in question.name:
            for answer in answers(question):
                print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
