"""The same questions to NVIDIA's aiconfigurator and to Tandem's planner: how many requests per second do given devices
serve within a TTFT and a TPOT, aggregated and disaggregated?

    scripts/planner-peers.sh && python -m benchmarks.planner_answers >benchmarks/planner_answers.jsonl && make docs

aiconfigurator knows prompts and answers of one length and a constant number of requests at a time; its times are means.
So the planner is asked with equal lengths and even arrivals, and once more with arrivals at random and 95 % of the
requests within both objectives. Prints one JSON line per question. docs/others-answers.md shows them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.planner_grid import SEED, SHORT, STEP_TOKENS, Loads, Served, enough, layouts_on_all
from benchmarks.planner_silicon import PEER
from planner.devices import find_device
from planner.hardware import Hardware
from planner.models import find_model
from planner.search.layout import ClusterLayout
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from planner.traces.trace import TrafficTrace

EVEN, RANDOM = 0.02, 1.0  # coefficients of variation of the times between requests
KINDS = ("aggregated", "disaggregated")


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    peer_model: str
    device: str
    devices: int
    prompt: int
    answer: int
    slo: Slo

    def asked(self) -> dict[str, Any]:
        """As aiconfigurator wants it."""
        assert self.slo.ttft_s is not None
        assert self.slo.tpot_s is not None
        return {
            "model_path": self.peer_model, "total_gpus": self.devices, "system": f"{self.device}_sxm",
            "isl": self.prompt, "osl": self.answer, "ttft": 1000 * self.slo.ttft_s, "tpot": 1000 * self.slo.tpot_s,
        }  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.model}_{self.device}x{self.devices}_{self.prompt}_{self.answer}"

    @property
    def hardware(self) -> Hardware:
        return Hardware(find_model(self.model), find_device(self.device))

    def trace(self, requests: int, cv: float) -> TrafficTrace:
        lengths = LengthSpec(self.prompt), LengthSpec(self.answer)
        return synthetic_trace(requests, Gamma(1.0, cv), *lengths, seed=SEED)


_70B, _8B = ("llama-3-70b", "meta-llama/Meta-Llama-3.1-70B"), ("llama-3-8b", "meta-llama/Meta-Llama-3.1-8B")
_32B, _V3 = ("qwen3-32b", "Qwen/Qwen3-32B"), ("deepseek-v3", "deepseek-ai/DeepSeek-V3")
QUESTIONS = (
    Question(*_70B, "h100", 16, 4000, 500, Slo(1.0, 0.03)),
    Question(*_70B, "h100", 8, 1000, 1000, Slo(0.5, 0.04)),
    Question(*_8B, "h100", 8, 3000, 150, Slo(0.3, 0.015)),
    Question(*_32B, "h200", 16, 4000, 1000, Slo(1.0, 0.02)),
    Question("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "h200", 32, 4000, 1000, Slo(1.5, 0.03)),
    Question(*_V3, "h200", 32, 5000, 1000, Slo(3.0, 0.04)),
)


def peer_answers(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Of each, aiconfigurator's best of both kinds; without one that it finds nothing for."""
    script = Path(__file__).with_name("planner_aiconfigurator.py")
    asked = {str(number): question.asked() for number, question in enumerate(questions)}
    done = subprocess.run([PEER, script, "search"], input=json.dumps(asked), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [found.get(number, {}) for number in asked]


def layout_of(answer: dict[str, Any], devices: int) -> ClusterLayout | None:
    """Theirs, on all devices. None: a worker of theirs is wider than a machine, or its ranks each attend to requests of
    their own, which the planner has no layout for."""
    if answer["attention_dp"] > 1:
        return None
    copies, prefill, decode = devices // answer["devices"], answer["prefill"], answer["decode"]
    if prefill is not None:
        return ClusterLayout(copies * prefill[0], prefill[1], copies * decode[0], decode[1], STEP_TOKENS[-1])
    tokens = min(STEP_TOKENS, key=lambda each: abs(each - answer["step_tokens"]))
    return ClusterLayout(0, 1, copies * decode[0], decode[1], tokens)


def answer(question: Question, kind: str, their_layout: ClusterLayout | None) -> dict[str, Any]:
    """The planner's: its best layout of that kind, with even arrivals and with random ones, and how much their layout
    serves with even ones."""
    listed = layouts_on_all(question.hardware, question.devices, is_aggregated=kind == KINDS[0])
    found: dict[str, Any] = {"their_layout": None if their_layout is None else str(their_layout)}
    for name, cv in (("even", EVEN), ("random", RANDOM)):
        loads, best = best_of(question, cv, listed)
        found[name] = shown(best, loads)
        if name == "even" and their_layout is not None:
            first = 1.0 if best is None else best.load
            found["at_theirs"] = shown(loads.largest(their_layout, first), loads)
    return found


def best_of(question: Question, cv: float, listed: Sequence[ClusterLayout]) -> tuple[Loads, Served | None]:
    """Of a trace so long that overload shows; how long that is, a short one tells."""
    short = Loads(question.trace(SHORT, cv), question.hardware, question.slo)
    rough = short.best(listed)
    if rough is None:
        return short, None
    requests = enough(question.slo, question.answer, rough.load * short.requests_per_s)
    loads = Loads(question.trace(requests, cv), question.hardware, question.slo)
    return loads, loads.best(listed)


def shown(served: Served | None, loads: Loads) -> dict[str, Any] | None:
    if served is None:
        return None
    return {"layout": str(served.layout), "requests_per_s": round(served.load * loads.requests_per_s, 3)}


def compared(number: int, theirs: dict[str, Any]) -> list[str]:
    """A line for each kind."""
    question, made = QUESTIONS[number], list[str]()
    for kind in KINDS:
        their = theirs.get(kind)
        ours = answer(question, kind, None if their is None else layout_of(their, question.devices))
        reference = None if their is None else round(their["requests_per_s_of_device"] * question.devices, 3)
        value = None if ours["even"] is None else ours["even"]["requests_per_s"]
        asked = question.asked() | {"model": question.model, "device": question.device}
        made.append(
            json.dumps(
                {
                    "figure": f"answers.{question.name}_{kind}", "value": value, "unit": "requests/s",
                    "reference": reference,
                    "ratio": None if value is None or reference is None else round(value / reference, 3),
                    "asked": asked, "theirs": their, "ours": ours,
                }
            )
        )  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_answers", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    if not PEER.exists():
        parser.error("expected aiconfigurator: run scripts/planner-peers.sh first")
    theirs = peer_answers(QUESTIONS)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for lines in pool.map(compared, range(len(QUESTIONS)), theirs):
            print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
