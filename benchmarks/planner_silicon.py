"""Step times of the roofline beside measurements of GPUs that aiconfigurator publishes, and beside its predictions.

    scripts/planner-peers.sh
    python -m benchmarks.planner_silicon --fit h100

The measurements are of TPOT under closed-loop load on TensorRT-LLM, vLLM and SGLang, on one worker of up to eight
devices whose KV pool holds all requests. Points whose requests waited longer for their first token than their answer
took are left out: the server did not run all of them at once. Every third is held out: the fit of a device never sees
it. Efficiencies are fitted to dense models, and then those of experts to models with experts. While a request decodes,
others are prefilled beside it. How much of that it sees depends on how a campaign sends its requests (all at once, or
one after another), so each campaign has a share of its own, fitted too.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.handoff_figures import Figure
from planner.cost import CostModel, PrefillWork
from planner.devices import DeviceSpec, find_device
from planner.hardware import Hardware
from planner.models import ElementSizes, PlannedModel, find_model

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".cache" / "peers" / "aiconfigurator" / "bin" / "python"
TARGET = 0.10
CHUNK_TOKENS = 8192
MODELS = {
    "Llama-3.1-8B": "llama-3-8b", "Llama-3.1-70B": "llama-3-70b", "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b", "MiniMax-M2.5": "minimax-m2", "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek-V3": "deepseek-v3",  # not R1, whose points mix runs with and without speculation, unmarked
}  # fmt: skip
PEER_MODELS = {
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
}  # fmt: skip
DEVICES = ("h100", "h200", "b200")
MOST_DEVICES = 8
WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
MEASURED = ("model_path", "system", "backend", "tp_size", "isl", "osl", "batch_size", "silicon_tpot_ms")
FITTED = {
    "dense": ("mbu", "layer_overhead_s", "row_overhead_s", "fabric.latency_s", "fabric.efficiency"),
    "experts": ("expert_overhead_s", "expert_efficiency"),
}
LEAST = {"expert_overhead_s": 1e-6}  # to be scaled
MOST = {"mbu": 0.92, "fabric.efficiency": 0.9}  # of copies; of all-reduces


@dataclass(frozen=True)
class Point:
    """`tpot_s`: measured. `campaign`: who measured it, where and with which server. `held_out`: not for fitting."""

    row: Mapping[str, str]
    device: str
    model: PlannedModel
    held_out: bool

    @property
    def family(self) -> str:
        return "dense" if self.model.shape.experts is None else "experts"

    @property
    def tp(self) -> int:
        return int(self.row["tp_size"])

    @property
    def batch(self) -> int:
        return int(self.row["batch_size"])

    @property
    def prompt(self) -> int:
        return int(self.row["isl"])

    @property
    def answer(self) -> int:
        return int(self.row["osl"])

    @property
    def tpot_s(self) -> float:
        return float(self.row["silicon_tpot_ms"]) / 1000

    @property
    def campaign(self) -> tuple[str, ...]:
        source = self.row["silicon_data_source"].split(";")[0].split("/")[0]
        return self.row["system"], self.row["backend"], MODELS[_model(self.row)], source

    @cached_property
    def ran_at_once(self) -> bool:
        pool = Hardware(self.model, find_device(self.device)).kv_tokens(self.tp)
        waited_s = float(self.row["silicon_ttft_ms"] or 0) / 1000
        return self.batch * (self.prompt + self.answer) <= pool and waited_s <= self.answer * self.tpot_s

    def step_times(self, cost: CostModel) -> tuple[float, float]:
        """Of a decode step, and what the prefill of all others adds to each of an answer's steps."""
        context = round(self.batch * (self.prompt + self.answer / 2))
        decode_s = cost.decode_step_s(self.batch, context)
        total = (self.batch - 1) * self.prompt
        if not total:
            return decode_s, 0.0
        mixed = min(max(1.0, total / CHUNK_TOKENS), self.answer)
        whole, rest = divmod(round(total / mixed), self.prompt)
        prefills = [PrefillWork(self.prompt, 0)] * whole
        prefills += [PrefillWork(rest, (self.prompt - rest) // 2)] if rest else []
        return decode_s, mixed * (cost.step_s(prefills, self.batch, context) - decode_s) / self.answer


def read(path: Path) -> list[Point]:
    """Measurements that the table has twice are taken once."""
    found: dict[tuple[str, ...], Point] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            device = row["system"].split("_")[0]
            elements = _elements(row)
            if device not in DEVICES or elements is None or not _is_one_worker(row):
                continue
            measured = tuple(row[name] for name in MEASURED)
            point = Point(row, device, find_model(MODELS[_model(row)], elements), held_out=len(found) % 3 == 0)
            if point.ran_at_once:
                found.setdefault(measured, point)
    return list(found.values())


def _is_one_worker(row: Mapping[str, str]) -> bool:
    alone = row["mode"] == "agg" and row["attention_dp_size"] in ("", "0", "1")
    return alone and int(row["tp_size"]) <= MOST_DEVICES


def _model(row: Mapping[str, str]) -> str:
    return next((name for name in MODELS if name in row["model_path"]), "")


def _elements(row: Mapping[str, str]) -> ElementSizes | None:
    """None: a model or a format that the roofline does not know."""
    name, weights = _model(row), WEIGHT_BYTES.get(row["gemm_quant_mode"])
    if not name or weights is None:
        return None
    if name == "gpt-oss-120b":  # its experts are published in MXFP4, whatever the table calls it
        return ElementSizes(2.0)
    if weights >= 1:
        return ElementSizes(weights)
    return ElementSizes(2.0, experts=weights) if "DeepSeek" in name else None  # NVFP4 leaves its attention as it is


def predict(points: Sequence[Point], device: DeviceSpec) -> dict[str, float]:
    """TPOT by point id. The shares of prefill that requests see are fitted to the points that are not held out."""
    times = {each.row["id"]: each.step_times(Hardware(each.model, device).cost(each.tp)) for each in points}
    campaigns: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for each in points:
        campaigns[each.campaign].append(each)
    found: dict[str, float] = {}
    for mine in campaigns.values():
        seen = [(*times[each.row["id"]], each.tpot_s) for each in mine if not each.held_out]
        share = min((step / 20 for step in range(31)), key=lambda share: _misfit(seen, share))
        found |= {each.row["id"]: times[each.row["id"]][0] + share * times[each.row["id"]][1] for each in mine}
    return found


def _misfit(seen: Sequence[tuple[float, float, float]], share: float) -> float:
    return sum(abs((decode_s + share * more_s) / tpot_s - 1) for decode_s, more_s, tpot_s in seen)


def mean_error(points: Sequence[Point], predicted: Mapping[str, float], *, held_out: bool) -> float:
    return _mean(abs(predicted[each.row["id"]] / each.tpot_s - 1) for each in points if each.held_out is held_out)


def fit(points: Sequence[Point], device: DeviceSpec) -> DeviceSpec:
    """Changes one efficiency after another while that brings the points that are not held out nearer: those of dense
    models first, then those of experts."""
    for family, names in FITTED.items():
        device = _fit([each for each in points if each.family == family], device, names)
    return device


def _fit(points: Sequence[Point], device: DeviceSpec, names: Sequence[str]) -> DeviceSpec:
    best, factor = mean_error(points, predict(points, device), held_out=False), 1.5
    while factor > 1.01:
        before = best
        for name in names:
            for way in (factor, 1 / factor):
                tried = _scaled(device, name, way)
                error = mean_error(points, predict(points, tried), held_out=False)
                if error < best:
                    best, device = error, tried
        if best > before * 0.999:
            factor = factor**0.5
    return device


def _scaled(device: DeviceSpec, name: str, factor: float) -> DeviceSpec:
    part, _, field = name.rpartition(".")
    of = device.fabric if part else device
    value = min(max(getattr(of, field), LEAST.get(name, 0.0)) * factor, MOST.get(name, 1.0))
    changed = of.model_copy(update={field: value})
    return device.model_copy(update={"fabric": changed}) if part else changed  # type: ignore[return-value]


def figures(path: Path | None = None) -> Iterator[Figure]:
    path = path or silicon_table()
    if path is None:
        print("cost.silicon_tpot_error: omitted without scripts/planner-peers.sh", file=sys.stderr)
        return
    points = read(path)
    errors: dict[str, float] = {}
    for device in DEVICES:
        mine = [each for each in points if each.device == device]
        predicted = predict(mine, find_device(device))
        errors |= {p.row["id"]: abs(predicted[p.row["id"]] / p.tpot_s - 1) for p in mine if p.held_out}
    held_out = {each.row["id"]: each for each in points if each.held_out}
    peer = {
        name: abs(tpot_s / held_out[name].tpot_s - 1) for name, tpot_s in peer_predictions(held_out.values()).items()
    }
    for family, suffix in (("dense", ""), ("experts", "_experts")):
        mine = [each for each in held_out.values() if each.family == family]
        for device in DEVICES:
            if of_device := [errors[each.row["id"]] for each in mine if each.device == device]:
                yield _figure(f"cost.silicon_tpot_error{suffix}_{device}", of_device)
        if not mine:
            continue
        yield _figure(f"cost.silicon_tpot_error{suffix}", [errors[each.row["id"]] for each in mine])
        if both := [each.row["id"] for each in mine if each.row["id"] in peer]:
            print(f"aiconfigurator: {len(both)} of {len(mine)} points of {family} models", file=sys.stderr)
            ours, theirs = _mean(errors[name] for name in both), _mean(peer[name] for name in both)
            name = f"cost.silicon_tpot_error{suffix}_peer"
            yield Figure(name, round(ours, 4), "share", round(theirs, 4), round(ours / theirs, 3))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _figure(name: str, errors: Iterable[float]) -> Figure:
    value = _mean(errors)
    return Figure(name, round(value, 4), "share", TARGET, round(value / TARGET, 3))


def silicon_table() -> Path | None:
    found = PEER.parents[1].glob("lib/python*/site-packages/aiconfigurator_core/systems/silicon_sample.csv")
    return next(found, None)


def peer_predictions(points: Iterable[Point]) -> dict[str, float]:
    """TPOT by point id, as aiconfigurator predicts it, of the points that it knows; none if it is not installed."""
    if not PEER.exists():
        return {}
    asked = {
        each.row["id"]: {
            "model_path": PEER_MODELS.get(_model(each.row), each.row["model_path"]),
            "system_name": each.row["system"],
            "backend_name": each.row["backend"], "isl": each.prompt, "osl": each.answer,
            "batch_size": each.batch, "tp_size": each.tp,
            "gemm_quant_mode": each.row["gemm_quant_mode"] or "bfloat16",
        } | _peer_experts(each)
        for each in points
    }  # fmt: skip
    script = Path(__file__).with_name("planner_aiconfigurator.py")
    done = subprocess.run([PEER, script], input=json.dumps(asked), capture_output=True, text=True, check=True)
    answers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _peer_experts(point: Point) -> dict[str, object]:
    if point.family == "dense":
        return {}
    row = point.row
    sizes = {name: int(row[name] or 1) for name in ("moe_tp_size", "moe_ep_size")}
    return {**sizes, "attention_dp_size": 1, "moe_quant_mode": row["moe_quant_mode"] or "bfloat16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fit", choices=DEVICES, required=True)
    parser.add_argument("--table", type=Path, default=None, help="silicon_sample.csv of aiconfigurator-core")
    options = parser.parse_args()
    table = options.table or silicon_table()
    if table is None:
        parser.error("--table: expected silicon_sample.csv, or run scripts/planner-peers.sh first")
    points = [each for each in read(table) if each.device == options.fit]
    fitted = fit(points, find_device(options.fit))
    predicted = predict(points, fitted)
    for name in (name for names in FITTED.values() for name in names):
        part, _, field = name.rpartition(".")
        print(f"{name}: {getattr(fitted.fabric if part else fitted, field):.3g}")
    for family in FITTED:
        mine = [each for each in points if each.family == family]
        for held_out in (False, True):
            count = sum(each.held_out is held_out for each in mine)
            error = mean_error(mine, predicted, held_out=held_out)
            print(f"{count} points of {family} models {'held out' if held_out else 'fitted'}: {error:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
