"""`tandem bench --compare batching`: its clusters, what it refuses, and what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.commands.planning import bench_batching
from cluster.cli.commands.planning.bench import BenchFlags
from cluster.cli.commands.planning.bench_batching import batching_specs, show
from cluster.cli.commands.planning.inputs import TrafficFlags, load_traffic
from cluster.cli.load.player import LoadResult
from cluster.cli.main import app
from planner.simulator.measurements import RunMeasurements
from planner.simulator.outcome import LatencyQuantiles, outcome_fields
from planner.simulator.setup import Slo
from planner.traces.arrivals import Gamma
from planner.traces.synthetic import LengthSpec, synthetic_trace
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, TandemError
from tandem.request import RequestState

TRAFFIC = ("synthetic", "--arrivals", "poisson:4", "--lengths", "60:30", "--requests", "6")


def flags(*settings: str, config: Path | None = None) -> BenchFlags:
    return BenchFlags(TrafficFlags("synthetic"), Slo(), compare="batching", config=config, settings=settings)


def test_the_clusters_differ_in_their_batching_alone(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "name: mine\nmodels: [{prefill: {workers: 2}, engine: {batching_window_s: 0.5, batching: dynamic}, "
        "decode: {workers: 3, engine: {max_running_requests: 8, batching: static}}}]\n"
    )
    specs = batching_specs(flags("models.0.engine.kv_blocks=99", config=config))
    engines = {kind: spec.models[0].engine_of(Role.DECODE) for kind, spec in specs.items()}
    assert {kind: (engine.batching, engine.batching_window_s) for kind, engine in engines.items()} == {
        "continuous": ("continuous", None),
        "static": ("static", 0.5),
        "dynamic": ("dynamic", 0.5),
    }
    assert {(engine.kv_blocks, engine.max_running_requests) for engine in engines.values()} == {(99, 8)}
    for spec in specs.values():
        (model,) = spec.models
        assert (model.prefill.workers, model.decode.workers, spec.name) == (0, 3, "mine-bench")
        assert spec.router.max_prefill_tokens_in_flight == 1 << 20
        assert (spec.router.http_port, spec.router.grpc_port, spec.control.admin_port) == (0, 0, 0)


def test_several_models_cannot_be_compared(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("models: [{}, {source: /models/other}]\n")
    with pytest.raises(ConfigError, match="one model to compare, got 2"):
        batching_specs(flags(config=config))


@pytest.mark.parametrize(
    "setting",
    [
        "models.0.decode.engine.batching=static",
        "models.00.prefill.workers=2",
        "models.0.engine={batching: dynamic}",
        "router.http_port=1",
        "autoscaler.enabled=true",
    ],
)
def test_what_the_comparison_decides_cannot_be_set(setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=f"--set: expected no key that --compare decides itself, got {key}: remove"):
        batching_specs(flags(setting))


def test_a_long_name_is_cut() -> None:
    assert {spec.name for spec in batching_specs(flags(f"name={'n' * 40}")).values()} == {f"{'n' * 34}-bench"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compare", "weather"), "--compare: expected batching, got 'weather'"),
        (("--compare", "batching", "--url", "grpc://h:1"), "--url: expected none with --compare"),
        (("--compare", "batching", "--cluster", "c"), "--cluster: expected none with --compare"),
        (("--compare", "batching", "--api", "chat"), "--api: expected none with --compare"),
        (("--compare", "batching", "--ca", "ca.pem"), "--ca: expected none with --compare"),
        (("--set", "models.0.source=x"), "--set: expected together with --compare"),
        (("--config", "cluster.yaml"), "--config: expected together with --compare"),
        (("--url", "grpc://h:1", "--cluster", "c"), "--cluster: expected none with --url"),
        (("--api", "chat", "--model", "m", "--vocab", "300"), "--vocab: expected none with --api chat"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *TRAFFIC, *options])
    assert isinstance(result.exception, TandemError)
    assert said in result.exception.message


def measured(ttft_s: float, *, complete: bool = True) -> LoadResult:
    trace = synthetic_trace(6, Gamma(4.0), LengthSpec(60), LengthSpec(30))
    found = RunMeasurements(trace, Slo(1.0))
    for index, arrival_s in enumerate(trace.arrival_s):
        found.first_token(index, arrival_s + ttft_s)
        found.last_token_s[index] = arrival_s + ttft_s + 2.9
        found.end(index, RequestState.FINISHED)
    fields = outcome_fields(trace, Slo(1.0), found) | {"complete": complete}
    return LoadResult(**fields, kv_bytes_moved=None, target="t", send_lag_s=LatencyQuantiles(0.0, 0.0, 0.0, 0.0))


def test_the_table_has_a_column_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    show({"continuous": measured(0.25), "static": measured(4.0, complete=False)}, Console(width=120, highlight=False))
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    lines = {row[1].strip(): row[2:4] for row in rows}
    assert [cell.strip() for cell in lines["ttft_s.p90"]] == ["250.0 ms", "4.00 s"]
    assert [cell.strip() for cell in lines["tpot_s.p50"]] == ["100.0 ms", "100.0 ms"]
    assert [cell.strip() for cell in lines["attainment.ttft"]] == ["100.0%", "0.0%"]
    fast, slow = (float(cell.strip().removesuffix("/s")) for cell in lines["served_tokens_per_s"])
    assert fast > slow


@pytest.mark.parametrize("done", [0, 1])
async def test_an_interrupt_keeps_the_results_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: int
) -> None:
    results = iter([measured(0.25)][:done])
    warms_up = asyncio.Event()

    @asynccontextmanager
    async def cluster(spec: ClusterSpec, progress: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(spec=spec, grpc_address="h:1")

    async def measure(*_: object) -> LoadResult:
        for result in results:
            return result
        warms_up.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bench_batching, "running_cluster", cluster)
    monkeypatch.setattr(bench_batching, "measure", measure)
    output = tmp_path / "results.json"
    traffic = TrafficFlags("synthetic", "poisson:4", "60:30", requests=6)
    asked = BenchFlags(traffic, Slo(), compare="batching", output=output, json=True)
    bench = asyncio.create_task(bench_batching._bench(asked, load_traffic(traffic), batching_specs(asked)))
    await warms_up.wait()
    bench.cancel()
    assert await bench == (0 if done else 1)
    said = capsys.readouterr()
    assert said.err.startswith("interrupted, without results for ")
    assert ("continuous" in said.err) is not bool(done)
    if done:
        assert list(json.loads(said.out)["results"]) == ["continuous"]
        assert json.loads(output.read_text()) == json.loads(said.out)
    else:
        assert not output.exists()
